"""``regard train span-corruption``: an encoder–decoder that learns from text, and then from pairs."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch

from regard_lab.generation.sequence_model import SequenceModel
from regard_lab.text.vocabulary import SubwordVocabulary

pytestmark = pytest.mark.slow

SIZES = [
    "--set",
    "model.width=32",
    "--set",
    "model.heads=2",
    "--set",
    "model.feedforward=64",
    "--set",
    "model.tied=all",
]
SIZES += ["--set", "model.encoder_layers=1", "--set", "model.decoder_layers=1", "--vocabulary-size", "60"]
SIZES += ["--set", "data.duplicates=true"]
EXACT = ["--set", "training.precision=float32", "--set", "training.threads=1", "--set", "training.save_every=5"]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Lines that count on from anywhere: what is hidden follows from what is not."""
    drawn, words = random.Random(0), ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    path = tmp_path / "texts.txt"
    lines = [
        [words[(start + i) % 8] for i in range(12 + start % 5)] for start in (drawn.randrange(99) for _ in range(300))
    ]
    path.write_text("".join(f"{' '.join(line)}\n" for line in lines))
    return path


@pytest.mark.campaign
def test_what_is_hidden_is_learned_and_the_model_goes_on_with_pairs(regard, texts, tmp_path) -> None:
    run = ["--data", texts, "--out", tmp_path / "spans", *SIZES, "--steps", "150", "--learning-rate", "1e-2"]
    result = regard("train", "span-corruption", *run, "--set", "training.validate_every=50")
    assert result.code == 0, result.err
    assert "300 texts of 300 lines" in result.out and "regard train translation --data pairs.tsv --start" in result.out
    losses = [float(each) for each in re.findall(r"^step \d+  loss ([\d.]+)", result.out, re.M)]
    assert losses[-1] < 0.5 * losses[0]
    made = SequenceModel.load(tmp_path / "spans")
    assert made.about["task"] == "span-corruption" and made.source.to_json() == made.target.to_json()
    assert isinstance(made.source, SubwordVocabulary) and len(made.source.sentinels) == 100
    for command in (("translate", "one two"), ("evaluate", "translation", str(texts))):
        refused = regard(*command, "--model", tmp_path / "spans")
        assert refused.code == 2 and "is a span-corruption model: use `regard train translation --start" in refused.err
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"{line} \t{line}\n" for line in texts.read_text().splitlines()[:30]))
    run = ["--data", pairs, "--out", tmp_path / "pairs", "--steps", "4", "--learning-rate", "1e-12"]
    result = regard("train", "translation", "--start", tmp_path / "spans", *run)
    assert result.code == 0, result.err
    found = SequenceModel.load(tmp_path / "pairs")
    assert found.about["task"] == "translation"
    for name, each in made.model.state_dict().items():
        torch.testing.assert_close(found.model.state_dict()[name], each, atol=1e-6, rtol=1e-5)
    refused = regard(
        "train", "span-corruption", "--start", tmp_path / "pairs", "--data", texts, "--out", tmp_path / "no"
    )
    assert refused.code == 2 and "must be a model for span-corruption, got one for translation" in refused.err


def test_a_run_in_two_parts_is_the_same_to_the_bit(regard, texts, tmp_path) -> None:
    for out, steps in (("whole", "10"), ("parted", "5")):
        options = ["--set", "training.schedule=constant", "--set", "training.warmup=1", "--steps", steps]
        run = regard("train", "span-corruption", "--data", texts, "--out", tmp_path / out, *SIZES, *EXACT, *options)
        assert run.code == 0, run.err
    assert regard("train", "span-corruption", "--out", tmp_path / "parted", "--resume", "--steps", "10").code == 0
    whole, parted = (SequenceModel.load(tmp_path / each).model.state_dict() for each in ("whole", "parted"))
    assert all(torch.equal(whole[name], parted[name]) for name in whole)


def test_what_has_no_place_is_refused(regard, texts, tmp_path) -> None:
    for task, setting, sentence in (
        ("span-corruption", "data.targets=x", "data.targets must be left out for span-corruption, which has texts"),
        ("span-corruption", "training.metric=bleu", "training.metric must be loss for span-corruption, got 'bleu'"),
        ("translation", "data.span_share=0.3", "data.span_share must be left out unless the task is span-corruption"),
        ("span-corruption", "data.span_length=0.5", "span_length must be a finite number of at least 1"),
    ):
        result = regard("train", task, "--data", texts, "--out", tmp_path / "no", "--set", setting)
        assert result.code == 2 and sentence in result.err, result.err
    assert not (tmp_path / "no").exists()


def test_a_text_with_more_spans_than_sentinels_is_refused(regard, texts, tmp_path) -> None:
    texts.write_text(texts.read_text() + "one two three four five six seven eight " * 500)
    run = ["--data", texts, "--out", tmp_path / "no", *SIZES, "--steps", "1", "--set", "data.max_length=5000"]
    result = regard("train", "span-corruption", *run)
    assert result.code == 2
    assert "data.max_length must be small enough for at most 100 spans per text, got 5000, which gives " in result.err
