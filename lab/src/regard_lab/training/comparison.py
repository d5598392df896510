"""Compare mechanisms on the same data, steps and seed: quality, size and speed, and a picture."""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from regard._utils.errors import rejected
from regard._utils.files import naming, write_atomically
from regard_lab.training.options import RunOptions
from regard_lab.training.run import RunFolder

# Train and measure each mechanism on the same data, steps and seed ----------------------------------------------------


RESULTS = "compared.json"
#: Batches to leave out of the speed, because kernels are compiled or loaded in them; at most half of all.
_FIRST = 5
#: Options in which compared runs may differ.
_OWN = ("kind", "preset", "model.")


class ComparableRun(Protocol):
    """A run in a folder whose model can be scored."""

    def train(self, *, callbacks: Any = ...) -> tuple[Any, Any]:
        """Return the model and the training result."""

    def scores(self, made: Any) -> dict[str, float]:
        """Return the scores of the model on the held-out data, by name."""

    def module(self, made: Any) -> nn.Module:
        """Return the module whose parameters are counted."""

    def cache_bytes(self, made: Any) -> tuple[float, float] | None:
        """Return the bytes that decoding caches per token of a sequence, and independently of its length, or None."""


@dataclass(frozen=True)
class ComparedRun:
    """The quality, size, speed and memory of one of the runs that are compared.

    Attributes
    ----------
    name : str
    scores : dict of str to float
        On what was held out; of sequences, by beam search.
    parameters, steps : int
    unit : str
        What is counted: tokens, of both sides, or images.
    per_second : float
        Of these in training, validations left out.
    memory : float
        The most that its process held, in MB (10⁶ bytes).
    seconds : float
        Of the whole run.
    curve : list of (int, float)
        Steps, and the metric that a validation found there.
    cache_per_token, cache_fixed : float, optional
        Bytes that decoding caches for each token of a sequence, and for a sequence of any length.
    """

    name: str
    scores: dict[str, float]
    parameters: int
    steps: int
    unit: str
    per_second: float
    memory: float
    seconds: float
    curve: list[tuple[int, float]] = field(default_factory=list)
    cache_per_token: float | None = None
    cache_fixed: float | None = None


def compare(
    kind: Callable[[Any, Path, Callable[[str], None]], ComparableRun],
    variants: Mapping[str, RunOptions],
    folder: str | Path,
    report: Callable[[ComparedRun], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> list[ComparedRun]:
    """Train one model after the other, each in its own process, and return the results.

    Parameters
    ----------
    kind : type of run
        Such as :class:`regard_lab.tasks.translation.Experiment`; called with options, a folder, and what says lines.
    variants : mapping of str to RunOptions
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
        # Check all variants before training the first.
        kind(options, folder / name, lambda _: None)
        RunFolder(folder / name, type(options)).check_new()
    results: list[ComparedRun] = []
    reported: set[str] = set()
    for name, options in variants.items():
        # A separate process each, so that memory is measured per model.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_end_with_parent) as pool:
            compared, messages = pool.submit(_run, kind, name, options, folder / name).result()
        for line in messages:
            if line not in reported:  # the data is the same for all
                say(line)
        reported.update(messages)
        results.append(compared)
        write_atomically(folder / RESULTS, json.dumps([asdict(each) for each in results], indent=1).encode())
        report(compared)
    return results


def _shared(options: RunOptions) -> dict[str, Any]:
    return {name: value for name, value in options.flat().items() if not name.startswith(_OWN)}


def _end_with_parent() -> None:
    """End this process as soon as the one that started it is gone: the pool's queues would keep it forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a pool starts it"

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _run(kind: Any, name: str, options: RunOptions, folder: Path) -> tuple[ComparedRun, list[str]]:
    """Return the result of a variant, and the lines that it reported."""
    meter = _meter()
    began = time.monotonic()
    messages: list[str] = []
    run: ComparableRun = kind(options, folder, messages.append)
    made, ended = run.train(callbacks=[meter])
    unit = 1 if sys.platform == "darwin" else 1024
    cached = run.cache_bytes(made) or (None, None)
    compared = ComparedRun(
        name,
        run.scores(made),
        sum(parameter.numel() for parameter in run.module(made).parameters()),
        ended.steps,
        options.training.unit,
        meter.per_second,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6,
        time.monotonic() - began,
        _curve(folder / "log" / "metrics.csv", f"valid_{options.training.metric}"),
        *cached,
    )
    return compared, messages


def _curve(path: Path, metric: str) -> list[tuple[int, float]]:
    with path.open(encoding="utf-8") as file:
        return [(int(row["step"]) + 1, float(row[metric])) for row in csv.DictReader(file) if row.get(metric)]


def _meter() -> Any:
    from lightning.pytorch import Callback

    class Meter(Callback):
        """Counts the tokens or images, and the seconds, of training steps, without the first few, which compile."""

        def __init__(self) -> None:
            self.began, self.steps = 0.0, list[tuple[int, float]]()

        def on_train_batch_start(self, *_: Any) -> None:
            self.began = time.monotonic()

        def on_train_batch_end(self, *given: Any) -> None:
            *_, batch, _ = given
            self.steps.append((batch.count, time.monotonic() - self.began))

        @property
        def per_second(self) -> float:
            counts, seconds = zip(*self.steps[min(_FIRST, len(self.steps) // 2) :])
            return float(sum(counts) / max(sum(seconds), 1e-9))

    return Meter()


# Compare training runs in a picture: the metric over the steps, and the speed -----------------------------------------


def picture(runs: list[ComparedRun], label: str, path: str | Path) -> Path:
    """Write a PNG file with the metric (named ``label``) by step, the speed, and the cache size."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    bars = {f"{runs[0].unit} per second in training": [each.per_second for each in runs]}
    if all(each.cache_per_token is not None for each in runs):
        bars["cached bytes per token"] = [each.cache_per_token or 0.0 for each in runs]
    figure = Figure(figsize=(7 + 3 * len(bars), 4), layout="constrained")
    FigureCanvasAgg(figure)
    quality, *others = figure.subplots(1, 1 + len(bars), width_ratios=(3, *[2] * len(bars)))
    for each in runs:
        if each.curve:
            quality.plot(*zip(*each.curve), marker=".", label=each.name)
    quality.set(xlabel="step", ylabel=label)
    quality.xaxis.set_major_locator(MaxNLocator(integer=True))
    quality.legend(frameon=False)
    for axes, (heading, lengths) in zip(others, bars.items()):
        axes.barh([each.name for each in runs], lengths, color=[f"C{i}" for i in range(len(runs))])
        axes.invert_yaxis()
        axes.set(xlabel=heading)
        for row, each in enumerate(runs):
            if lengths[row] == 0 and each.cache_fixed:  # a state of one size in place of keys
                text = f"0, and {each.cache_fixed:,.0f} per sequence"
                where: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
                axes.annotate(text, (0, row), **where, fontsize="small")
    for axes in (quality, *others):
        axes.spines[["top", "right"]].set_visible(False)
    with naming(path):
        figure.savefig(path, dpi=130, format="png")
    return Path(path)
