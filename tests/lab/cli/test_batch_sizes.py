"""Batches that suit the amount of data: what is chosen is printed, kept for resuming, and may be overridden."""

from __future__ import annotations

import random
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from small_images import draw, write_list

pytestmark = pytest.mark.slow
QUICK = ["--steps", "1", "--set", "training.threads=1", "--set", "training.precision=float32"]
WORDS = ["one", "two", "red", "blue", "cat", "dog", "sees"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs, labelled texts, a text, and captions of images."""
    drawn, folder = random.Random(0), tmp_path_factory.mktemp("data")
    lines = [" ".join(drawn.choices(WORDS, k=drawn.randint(2, 9))) for _ in range(400)]
    (folder / "pairs.tsv").write_text("".join(f"{line}\t{line.upper()}\n" for line in lines))
    (folder / "labelled.tsv").write_text("".join(f"{line}\t{'yes' if 'cat' in line else 'no'}\n" for line in lines))
    (folder / "text.txt").write_text(" ".join(lines))
    write_list(folder / "captions.tsv", draw(folder / "images", 9))
    for label in ("red", "blue"):
        draw(folder / "photos" / label, 2)
    return folder


#: Commands, what their batches have, which option sets that, and the size for this data.
RUNS: dict[str, tuple[list[str], str, str, int]] = {
    "translation": (["--data", "pairs.tsv", "--preset", "small", "--vocabulary-size", "60"], "tokens", "--batch-tokens",
                    1024),
    "language-model": (["--data", "text.txt", "--preset", "tiny", "--length", "32", "--tokenizer", "bytes"], "tokens",
                       "--batch-tokens", 1024),
    "classifier": (["--data", "labelled.tsv", "--tokenizer", "bytes"], "texts", "--batch", 16),
    "classifier of images": (["--images", "photos", "--side", "16"], "images", "--batch", 8),
    "captioner": (["--data", "captions.tsv", "--images", "images", "--encoder", "cnn", "--tune", "full", "--preset",
                   "small", "--vocabulary", "characters"], "images", "--batch", 4),
}  # fmt: skip


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("name", RUNS)
def test_what_is_chosen_is_printed_and_kept(regard, data, tmp_path, monkeypatch, name: str) -> None:
    monkeypatch.chdir(data)
    words, what, flag, size = RUNS[name]
    command = ["train", name.split(maxsplit=1)[0], "--out", str(tmp_path / "out"), *QUICK]
    begun = regard(*command, *words)
    assert begun.code == 0, begun.err
    line = re.search(rf"^batches of {size:,} {what}, chosen for ([\d,]+) to learn from; {flag} sets another size$",
                     begun.out, re.M)  # fmt: skip
    assert line, begun.out
    assert sized(tmp_path / "out") == size
    resumed = regard(*command[:4], "--resume", "--steps", "2")
    assert resumed.code == 0, resumed.err
    assert "chosen for" not in resumed.out and sized(tmp_path / "out") == size
    command[3] = str(tmp_path / "own")
    own = regard(*command, *words, flag, 64)
    assert own.code == 0, own.err
    assert "chosen for" not in own.out and sized(tmp_path / "own") == 64


def sized(folder: Path) -> Any:
    """Return the batch size in a run's options file."""
    training = tomllib.loads((folder / "options.toml").read_text(encoding="utf-8"))["training"]
    return next(training[name] for name in ("batch_images", "batch_examples", "batch_tokens") if name in training)


@pytest.mark.campaign
def test_few_texts_are_read_more_often(regard, data, tmp_path, monkeypatch) -> None:
    """Eighteen steps, as before, teach nothing."""
    monkeypatch.chdir(data)
    done = regard("train", "classifier", "--data", "labelled.tsv", "--out", tmp_path, "--tokenizer", "bytes",
                  "--set", "model.layers=1", "--set", "model.width=16", "--set", "model.heads=2")  # fmt: skip
    assert done.code == 0, done.err
    (steps,) = re.findall(r"^([\d,]+) steps, 23 batches per epoch", done.out, re.M)
    assert int(steps) == 460, "20 epochs"
