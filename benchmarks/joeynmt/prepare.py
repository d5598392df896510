"""What both sides are given: batches in the numbers of each, and the parameters that both translate with."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.joeynmt import weights
from benchmarks.joeynmt.ours import built, options
from benchmarks.joeynmt.shapes import END, PAD, SHAPES, START, numbers
from regard_lab.data import Batch, Batches
from regard_lab.text import Ragged, SubwordVocabulary, normalize
from regard_lab.training import Learner, Seq2SeqObjective, Stream, train

#: Numbers of the joint vocabulary, and tokens of a batch, both sides and padding included.
SYMBOLS, TOKENS = 8000, 4096
SENTENCES = 64


def lines(path: Path) -> list[str]:
    """Return the lines of a gzip file as models read them."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [normalize(line) for line in file]


@dataclass(frozen=True)
class Data:
    """Sentences to learn from and to translate.

    Attributes
    ----------
    vocabulary : SubwordVocabulary
        Of both languages.
    batches : Batches
        Of the training pairs.
    sources : Ragged
        Test sentences.
    order : ndarray
        Which of them come when: from the longest to the shortest, as ``regard translate`` takes them.
    references : list of str
    """

    vocabulary: SubwordVocabulary
    batches: Batches
    sources: Ragged
    order: np.ndarray
    references: list[str]

    @classmethod
    def read(cls, folder: Path, most: int | None = None) -> Data:
        """Read Multi30k, German to English; of the test set the first ``most`` sentences."""
        german, english = lines(folder / "train.de.gz"), lines(folder / "train.en.gz")
        vocabulary = SubwordVocabulary.train([*german, *english], size=SYMBOLS)
        batches = Batches(vocabulary.encode_all(german), vocabulary.encode_all(english), tokens=TOKENS)
        sources = vocabulary.encode_all(lines(folder / "test_2016_flickr.de.gz")[:most])
        order = np.argsort(-sources.lengths, kind="stable")
        return cls(vocabulary, batches, sources, order, lines(folder / "test_2016_flickr.en.gz")[:most])

    @property
    def size(self) -> int:
        """How many symbols models know: one more than texts have."""
        return len(self.vocabulary) + 1

    def test_batches(self) -> list[Batch]:
        """Return the test sentences to translate together."""
        parts = [self.order[first : first + SENTENCES] for first in range(0, len(self.order), SENTENCES)]
        return [Batch(*self.sources.padded(part), torch.zeros(len(part), 0, dtype=torch.int64)) for part in parts]


def save(path: Path, batches: list[Batch], size: int) -> None:
    """Write batches twice: in regard's numbers to PATH-ours.npz, in JoeyNMT's, targets with a start, to -theirs.npz."""
    ours: dict[str, np.ndarray] = {}
    other: dict[str, np.ndarray] = {}
    of = numbers(size)
    assert of[0] == PAD
    assert of[1] == END
    for i, batch in enumerate(batches):
        lengths = batch.lengths.numpy()
        ours |= {f"{i}.source": batch.source.numpy(), f"{i}.lengths": lengths}
        other |= {f"{i}.source": of[batch.source.numpy()], f"{i}.lengths": lengths}
        if batch.target.shape[1]:
            target = batch.target.numpy()
            ours[f"{i}.target"] = target
            other[f"{i}.target"] = np.concatenate([np.full_like(target[:, :1], START), of[target]], 1)
    np.savez(f"{path}-ours.npz", **ours)
    np.savez(f"{path}-theirs.npz", **other)


def real(batches: list[Batch]) -> int:
    """Return how many tokens are no padding, on both sides; the end mark of a target counts."""
    return sum(int(batch.lengths.sum()) + int((batch.target != 0).sum()) for batch in batches)


def learned(path: Path, shape: str, data: Data, steps: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Train a model with regard unless that was done, and say how; its parameters are then in PATH-ours.npz.

    By JoeyNMT's names they are in PATH-theirs.npz.
    """
    description = Path(f"{path}.json")
    if description.exists():
        about: dict[str, Any] = json.loads(description.read_text(encoding="utf-8"))
        if about["steps"] == steps:
            say(f"{shape}: learned before, {about}")
            return about
    torch.manual_seed(0)
    model = built(shape, data.size, copied=True)
    given = options(schedule="linear", warmup=0.1, learning_rate=2e-3, steps=steps)
    learner = Learner(model, given, Stream(data.batches.batch), Seq2SeqObjective.of(given))
    ended = train(learner, [], given, None)
    about = {"steps": ended.steps, "loss": round(learner.loss, 2), "threads": torch.get_num_threads()}
    say(f"{shape}: learned for {ended.seconds:.0f} s, {about}")
    state = {name: each.numpy() for name, each in model.state_dict().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(f"{path}-ours.npz", **state)
    np.savez(f"{path}-theirs.npz", **weights.theirs(SHAPES[shape].kind, state))
    description.write_text(json.dumps(about), encoding="utf-8")  # last, as a mark that all is complete
    return about
