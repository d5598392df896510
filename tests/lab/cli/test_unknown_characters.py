"""Characters that a model's vocabulary lacks are counted and reported by every command that reads text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from regard_lab.models import (
    DecoderLM,
    DecoderLMConfig,
    EncoderLM,
    EncoderLMConfig,
    SequenceClassifier,
    TokenClassifier,
    save,
)
from regard_lab.text.tokenizer import Tokenizer

SPECIALS = ("end", "pad", "mask", "cls", "sep")


def folder(path: Path, kind: str) -> Path:
    """Write the folder of a small random model with a vocabulary of a few letters."""
    tokenizer = Tokenizer.learn(["to be or not to be"], kind="characters", specials=SPECIALS)
    torch.manual_seed(0)
    encoder = EncoderLM(EncoderLMConfig(len(tokenizer), width=16, layers=1))
    made = {
        "decoder": lambda: DecoderLM(DecoderLMConfig(len(tokenizer), width=16, layers=1)),
        "encoder": lambda: encoder,
        "classifier": lambda: SequenceClassifier(encoder, ["x", "y"]),
        "tokens": lambda: TokenClassifier(encoder, ["x", "y"]),
    }
    save(made[kind]().eval(), path)
    tokenizer.save(path)
    return path


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("encoder", ["embed", "to bé", "or nöt"]),
        ("encoder", ["fill-mask", "to <|mask|>é", "n<|mask|>ö"]),
        ("classifier", ["classify", "to bé", "or nöt"]),
        ("tokens", ["classify", "to bé", "or nöt"]),
        ("decoder", ["generate", "to bé", "or nöt", "--max-new-tokens", "1"]),
        ("decoder", ["look", "--text", "to bé"]),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_they_are_reported_in_one_line(regard, tmp_path: Path, kind: str, arguments: list[str]) -> None:
    name, *rest = arguments
    model = [folder(tmp_path, kind)] if name == "look" else ["--model", folder(tmp_path, kind)]
    result = regard(name, *model, *rest)
    counted = {"fill-mask": "2 of 22", "look": "1 of 5"}.get(name, "2 of 11")
    listed = "'é'" if name == "look" else "'é', 'ö'"
    assert result.code == 0 and f"regard: the model's vocabulary lacks {counted} characters: {listed}\n" in result.err
    assert result.err.count("vocabulary lacks") == 1
    known = regard(name, *model, *(each.translate({0xE9: "e", 0xF6: "o"}) for each in rest))
    assert known.code == 0 and "vocabulary lacks" not in known.err


def test_labelled_texts_are_counted_too(regard, tmp_path: Path) -> None:
    (tmp_path / "data.tsv").write_text("to bé\tx\nor not\ty\n", encoding="utf-8")
    result = regard(
        "evaluate", "classifier", tmp_path / "data.tsv", "--model", folder(tmp_path / "model", "classifier")
    )
    assert result.code == 0 and "regard: the model's vocabulary lacks 1 of 11 characters: 'é'\n" in result.err
