"""Translation and other writing of sequences from sequences: options, runs and metrics."""

from typing import TYPE_CHECKING

from regard._utils.lazy import lazy

if TYPE_CHECKING:
    from regard_lab.generation.sequence_model import SequenceModel
    from regard_lab.tasks.translation.metrics import (
        ErrorRates,
        Score,
        bleu,
        chrf,
        edit_distance,
        error_rates,
        tokenized_bleu,
    )
    from regard_lab.tasks.translation.options import DataOptions, ExperimentOptions
    from regard_lab.tasks.translation.tasks import TASKS, Task, VocabularyOptions, get_task
    from regard_lab.tasks.translation.training import Experiment, PairRunFolder
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "regard_lab.generation.sequence_model": "SequenceModel",
            "regard_lab.tasks.translation.metrics": (
                "ErrorRates Score bleu chrf edit_distance error_rates tokenized_bleu"
            ),
            "regard_lab.tasks.translation.options": "DataOptions ExperimentOptions",
            "regard_lab.tasks.translation.tasks": "TASKS Task VocabularyOptions get_task",
            "regard_lab.tasks.translation.training": "Experiment PairRunFolder",
        },
    )

__all__ = [
    "TASKS",
    "DataOptions",
    "ErrorRates",
    "Experiment",
    "ExperimentOptions",
    "PairRunFolder",
    "Score",
    "SequenceModel",
    "Task",
    "VocabularyOptions",
    "bleu",
    "chrf",
    "edit_distance",
    "error_rates",
    "get_task",
    "tokenized_bleu",
]
