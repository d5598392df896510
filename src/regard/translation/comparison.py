"""Several mechanisms on the same data, steps and seed: how good, how large, how fast."""

from __future__ import annotations

import csv
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from regard._errors import rejected
from regard._writing import write_atomically
from regard.translation.experiment import Experiment
from regard.translation.options import ExperimentOptions
from regard.translation.run_folder import PairRunFolder

RESULTS = "compared.json"
#: Batches that do not count, as kernels are compiled or loaded there.
_FIRST = 5


@dataclass(frozen=True)
class ComparedRun:
    """The quality, size, speed and memory of one of the runs that are compared.

    Attributes
    ----------
    name : str
    scores : dict of str to float
        On the held-out sources, by beam search.
    parameters, steps : int
    tokens_per_second : float
        Of both sides in training, validations left out.
    memory : float
        The most that its process held, in MB (10⁶ bytes).
    seconds : float
        Of the whole run.
    curve : list of (int, float)
        Steps, and the metric that a validation found there.
    """

    name: str
    scores: dict[str, float]
    parameters: int
    steps: int
    tokens_per_second: float
    memory: float
    seconds: float
    curve: list[tuple[int, float]] = field(default_factory=list)


def compare(
    variants: Mapping[str, ExperimentOptions],
    folder: str | Path,
    report: Callable[[ComparedRun], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> list[ComparedRun]:
    """Train one model after the other, each in a process of its own, and return what became of them.

    Parameters
    ----------
    variants : mapping of str to ExperimentOptions
        They may differ in the model alone.
    folder : str or Path
        Gets a folder for each, and ``compared.json``, which has those that are done.
    report : callable
        Called with each when it is there.
    say : callable
        Called with every line that a user should read, but once with those that are the same for all.

    Raises
    ------
    ValueError
        If there are fewer than two, they differ in more than the model, an option is wrong, or a folder is not new.
    TrainingError
        If a training cannot go on.
    """
    if len(variants) < 2:
        raise rejected("compare", "variants", "be at least two", len(variants))
    first, *others = variants.values()
    for each in others:
        if _shared(each) != _shared(first):
            raise rejected("compare", "variants", "differ in the model alone", "other data or training options")
    folder = Path(folder)
    for name, options in variants.items():
        # What is wrong with the last is said before the first is trained.
        Experiment(options, folder / name)
        PairRunFolder(folder / name).check_new()
    results: list[ComparedRun] = []
    reported: set[str] = set()
    for name, options in variants.items():
        # A process of its own: memory is that of one model.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            compared, messages = pool.submit(_run, name, options, folder / name).result()
        for line in messages:
            if line not in reported:  # the data is the same for all
                say(line)
        reported.update(messages)
        results.append(compared)
        write_atomically(folder / RESULTS, json.dumps([asdict(each) for each in results], indent=1).encode())
        report(compared)
    return results


def _shared(options: ExperimentOptions) -> tuple[Any, ...]:
    return options.task, options.data, options.vocabularies, options.training


def _run(name: str, options: ExperimentOptions, folder: Path) -> tuple[ComparedRun, list[str]]:
    """Return what became of a variant, and what was said on the way."""
    meter = _meter()
    began = time.monotonic()
    messages: list[str] = []
    experiment = Experiment(options, folder, messages.append)
    sequence_model, ended = experiment.train(callbacks=[meter])
    unit = 1 if sys.platform == "darwin" else 1024
    compared = ComparedRun(
        name,
        experiment.scores(sequence_model),
        sum(parameter.numel() for parameter in sequence_model.model.parameters()),
        ended.steps,
        meter.tokens / max(meter.seconds, 1e-9),
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6,
        time.monotonic() - began,
        _curve(folder / "log" / "metrics.csv", f"valid_{options.training.metric}"),
    )
    return compared, messages


def _curve(path: Path, metric: str) -> list[tuple[int, float]]:
    with path.open(encoding="utf-8") as file:
        return [(int(row["step"]) + 1, float(row[metric])) for row in csv.DictReader(file) if row.get(metric)]


def _meter() -> Any:
    from lightning.pytorch import Callback

    from regard.models.base import PAD

    class Meter(Callback):
        """Counts the tokens and the seconds of training steps, the first few of which compile."""

        tokens, seconds, began = 0, 0.0, 0.0

        def on_train_batch_start(self, *_: Any) -> None:
            self.began = time.monotonic()

        def on_train_batch_end(self, *given: Any) -> None:
            *_, batch, number = given
            if number >= _FIRST:
                self.seconds += time.monotonic() - self.began
                self.tokens += int(batch.lengths.sum()) + int((batch.target != PAD).sum())

    return Meter()
