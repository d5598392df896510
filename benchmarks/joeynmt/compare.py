"""Both sides in turns: workers that stay alive, rounds A B A B, and what was checked before."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.joeynmt import prepare
from benchmarks.joeynmt.shapes import BETAS, CLIP, DECAY, RATE, SHAPES, SMOOTHING, numbers
from benchmarks.machine import ROOT
from benchmarks.measure import Ratio, Timing, ratio

#: −1 is JoeyNMT's default for the most symbols of a batch's targets: 1.5 times those of its longest source.
BEAMS, ALPHA, LONGEST = 5, 0.6, -1
OURS, THEIRS = "regard", "JoeyNMT"
#: Log-probabilities of the same parameters may differ by so much.
NEAR = 1e-4
#: A model that writes fewer symbols for a sentence has not learned enough to be timed.
_SHORTEST = 5
Say = Callable[[str], None]


@dataclass(frozen=True)
class Contender:
    """A side at a precision of matrix products."""

    side: str
    precision: str

    @property
    def name(self) -> str:
        return f"{self.side}, {self.precision}"


CONTENDERS = [Contender(side, precision) for precision in ("float32", "bfloat16") for side in (THEIRS, OURS)]


@dataclass
class Row:
    """What one contender did: samples in seconds, one for each round, of so many units."""

    contender: str
    parameters: int
    seconds: list[float] = field(default_factory=list)
    units: int = 0
    bleu: float | None = None
    same: float | None = None
    speed: Ratio | None = None


class WorkerError(RuntimeError):
    """A worker ended; the message has the end of what it printed."""


class Worker:
    """A process of one side, which works when it is asked to."""

    def __init__(self, contender: Contender, python: Path, job: dict[str, Any], folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "job.json").write_text(json.dumps(job | {"folder": str(folder)}), encoding="utf-8")
        here = Path(__file__).parent
        ours = [sys.executable, "-m", "benchmarks.joeynmt.ours"]
        command = ours if contender.side == OURS else [str(python), str(here / "theirs.py")]
        self._log = folder / "log.txt"
        environment = {**os.environ, "OMP_NUM_THREADS": str(job["threads"]), "TQDM_DISABLE": "1"}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, str(folder / "job.json")], cwd=ROOT, env=environment, text=True, encoding="utf-8",
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        try:
            self.about = self._answer()
        except WorkerError:
            self.close()
            raise

    def ask(self, do: str = "go", **more: Any) -> dict[str, Any]:
        """Let it work, and return what it found."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # why it ended is in the log
            self._process.stdin.write(json.dumps({"do": do, **more}) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise WorkerError(self._log.read_text(errors="replace")[-1500:].strip())
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@dataclass(frozen=True)
class Settings:
    """Of a comparison: JoeyNMT's Python, folders of files and of models, threads of each side, and rounds."""

    python: Path
    folder: Path
    models: Path
    threads: int
    rounds: int
    contenders: tuple[Contender, ...]
    say: Say


@contextmanager
def workers(settings: Settings, jobs: Mapping[Contender, dict[str, Any]]) -> Iterator[dict[Contender, Worker]]:
    """Start a worker for each contender, and end all."""
    with ExitStack() as stack:
        found: dict[Contender, Worker] = {}
        for number, (contender, job) in enumerate(jobs.items()):
            folder = settings.folder / f"{job['task']}-{job['shape']}-{number}"
            found[contender] = Worker(contender, settings.python, job, folder)
            stack.callback(found[contender].close)
        yield found


def jobs(settings: Settings, task: str, shape: str, symbols: int, files: Path) -> dict[Contender, dict[str, Any]]:
    """Return the job of each worker."""
    common: dict[str, Any] = {"task": task, "shape": shape, "threads": settings.threads, "smoothing": SMOOTHING}
    common |= {"clip": CLIP, "decay": DECAY, "betas": BETAS, "rate": RATE}
    common |= {"beams": BEAMS, "alpha": ALPHA, "longest": LONGEST}
    found = {}
    for contender in settings.contenders:
        end = "ours" if contender.side == OURS else "theirs"
        job = common | {"precision": contender.precision, "batches": f"{files}-{end}.npz"}
        job |= {"weights": f"{settings.models / shape}-{end}.npz", "check": f"{settings.folder / 'check'}-{end}.npz"}
        found[contender] = job | SHAPES[shape].theirs(symbols, task == "translate")
    return found


def in_turns(
    settings: Settings, found: Mapping[Contender, Worker], units: int
) -> tuple[dict[Contender, Row], dict[Contender, Any]]:
    """Let all work in turn, and return times, and the answers of a first round that does not count."""
    first: dict[Contender, Any] = {}
    rows = {each: Row(each.name, worker.about["parameters"], units=units) for each, worker in found.items()}
    for number in range(settings.rounds + 1):
        for contender, worker in found.items():
            answer = worker.ask()
            if not number:
                first[contender] = answer
            else:
                rows[contender].seconds.append(answer["seconds"])
                settings.say(f"  round {number}: {contender.name} {answer['seconds']:.1f} s")
    base = rows[settings.contenders[0]]
    for row in rows.values():
        row.speed = ratio(Timing(tuple(base.seconds), 1), Timing(tuple(row.seconds), 1))
    return rows, first


def training(settings: Settings, shape: str, data: prepare.Data, steps: int) -> dict[str, Any]:
    """Return tokens a second of training, on the first batches of an epoch."""
    settings.say(f"training, {shape}")
    batches = [data.batches.batch(number) for number in range(steps)]
    files = settings.folder / "train"
    prepare.save(files, batches, data.size)
    with workers(settings, jobs(settings, "train", shape, data.size, files)) as found:
        rows, _ = in_turns(settings, found, prepare.real(batches))
    places = sum(batch.source.numel() + batch.target.numel() for batch in batches)
    about = {"task": "training", "shape": shape, "unit": "tokens/s", "batches": steps, "places": places}
    return about | {"tokens": prepare.real(batches), "rows": [asdict(row) for row in rows.values()]}


def translation(settings: Settings, shape: str, data: prepare.Data) -> dict[str, Any]:
    """Return sentences a second of beam search with the same parameters, and how alike the results are."""
    settings.say(f"translation, {shape}")
    files, batches = settings.folder / "test", data.test_batches()
    prepare.save(files, batches, data.size)
    prepare.save(settings.folder / "check", [data.batches.batch(0)], data.size)
    with workers(settings, jobs(settings, "translate", shape, data.size, files)) as found:
        agreed = _agreement(settings, found, data)
        settings.say(f"  log-probabilities differ by {agreed['difference']:.1e}, gradients by {agreed['gradient']:.1e}")
        rows, first = in_turns(settings, found, len(data.order))
    written = {each: _numbers(each, answer["written"], data) for each, answer in first.items()}
    base = written[settings.contenders[0]]
    for contender, row in rows.items():
        row.bleu = _bleu(written[contender], data)
        row.same = statistics.mean(a == b for a, b in zip(base, written[contender]))
    lengths = {each.name: statistics.mean(map(len, numbers_)) for each, numbers_ in written.items()}
    if lengths[settings.contenders[0].name] < _SHORTEST:
        raise SystemExit(f"the model must have learned to write sentences, got {lengths}: let it learn for longer")
    about = {"task": "translation", "shape": shape, "unit": "sentences/s", "sentences": len(data.order)}
    return about | agreed | {"lengths": lengths, "rows": [asdict(row) for row in rows.values()]}


def _agreement(settings: Settings, found: Mapping[Contender, Worker], data: prepare.Data) -> dict[str, float]:
    """Return how far the log-probabilities of real steps, and the norm of the gradient, are from each other."""
    batch, outputs, norms = data.batches.batch(0), {}, {}
    for contender, worker in found.items():
        if contender.precision == "float32":
            out = settings.folder / f"log-probabilities-{contender.side}.npy"
            norms[contender.side] = worker.ask("check", out=str(out))["norm"]
            outputs[contender.side] = np.load(out)
    there = (batch.target != 0).numpy()
    difference = np.abs(outputs[OURS] - outputs[THEIRS][..., numbers(data.size)])[there].max()
    gradient = abs(norms[OURS] / norms[THEIRS] - 1)
    if not (difference < NEAR and gradient < NEAR):
        raise SystemExit(f"the models must be the same, but differ by {difference:.1e} and {gradient:.1e}")
    return {"difference": float(difference), "gradient": gradient}


def _numbers(contender: Contender, written: list[list[int]], data: prepare.Data) -> list[list[int]]:
    """Return sentences in regard's numbers, up to their end, in the order of the test set."""
    of = numbers(data.size)
    back = np.empty_like(of)
    back[of] = np.arange(len(of))
    found: list[list[int]] = [[] for _ in written]
    for place, sentence in zip(data.order, written):
        own = sentence if contender.side == OURS else back[sentence].tolist()
        ends = [i for i, number in enumerate(own) if number in (0, 1)]
        found[place] = own[: ends[0]] if ends else own
    return found


def _bleu(written: list[list[int]], data: prepare.Data) -> float:
    from sacrebleu.metrics.bleu import BLEU

    texts = [data.vocabulary.decode([number for number in each if number < len(data.vocabulary)]) for each in written]
    return BLEU().corpus_score(texts, [data.references]).score
