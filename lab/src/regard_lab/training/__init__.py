"""Training of any model: the loop, its options, checkpoints, logs and losses."""

from typing import TYPE_CHECKING

from regard._utils.lazy import lazy

if TYPE_CHECKING:
    from regard_lab.training.comparison import ComparableRun, ComparedRun, compare
    from regard_lab.training.learner import Learner, Stream, is_bfloat16
    from regard_lab.training.loop import LostProcessError, TrainingResult, train
    from regard_lab.training.objectives import (
        Frequencies,
        Loss,
        Objective,
        SampledSoftmax,
        Seq2SeqObjective,
        alignment_loss,
        coverage_loss,
        cross_entropy,
    )
    from regard_lab.training.options import RunOptions, TrainingError, TrainingOptions
    from regard_lab.training.run import FolderRun, RunFolder
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "regard_lab.training.comparison": "ComparableRun ComparedRun compare",
            "regard_lab.training.learner": "Learner Stream is_bfloat16",
            "regard_lab.training.loop": "LostProcessError TrainingResult train",
            "regard_lab.training.objectives": (
                "Frequencies Loss Objective SampledSoftmax Seq2SeqObjective alignment_loss coverage_loss cross_entropy"
            ),
            "regard_lab.training.options": "RunOptions TrainingError TrainingOptions",
            "regard_lab.training.run": "FolderRun RunFolder",
        },
    )

__all__ = [
    "ComparableRun",
    "ComparedRun",
    "FolderRun",
    "Frequencies",
    "Learner",
    "Loss",
    "LostProcessError",
    "Objective",
    "RunFolder",
    "RunOptions",
    "SampledSoftmax",
    "Seq2SeqObjective",
    "Stream",
    "TrainingError",
    "TrainingOptions",
    "TrainingResult",
    "alignment_loss",
    "compare",
    "coverage_loss",
    "cross_entropy",
    "is_bfloat16",
    "train",
]
