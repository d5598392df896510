"""``regard classify`` of tokens: transformers' own labels, of models of ours and of those that it computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lab.cli.test_fill_mask import DISTILBERT, MODERN, SIZES
from tests.lab.cli.test_other_families import folder_of
from transformers import AutoModelForTokenClassification, AutoTokenizer

from regard_lab.text.tokenizer import Tokenizer

TEXTS = ["Ada and Bo", "né", "so it goes, and goes on for a while", ""]
LABELS = {0: "O", 1: "B-PER", 2: "I-PER"}
MODELS: dict[str, dict[str, Any]] = {
    "BertForTokenClassification": SIZES,
    "RobertaForTokenClassification": SIZES,
    "DistilBertForTokenClassification": DISTILBERT | {"max_position_embeddings": 40},
    "ModernBertForTokenClassification": SIZES | MODERN,
    "ConvBertForTokenClassification": SIZES,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.learn(TEXTS, 270, specials=("end", "pad", "mask", "cls", "sep"))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::regard._utils.errors.RegardWarning")
@pytest.mark.parametrize("name", MODELS)
def test_labels_are_those_of_transformers(regard, name: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    sizes = {**MODELS[name], "vocab_size": 280, "id2label": LABELS, "pad_token_id": tokenizer.pad}
    folder = folder_of(tmp_path / "model", name, tokenizer, **sizes)
    theirs = AutoModelForTokenClassification.from_pretrained(folder, attn_implementation="eager").eval()
    read = AutoTokenizer.from_pretrained(folder)
    (tmp_path / "texts").write_text("".join(f"{text}\n" for text in TEXTS))
    for batch in (1, 3):
        outcome = regard("classify", "--model", folder, "--data", tmp_path / "texts", "--batch", batch, "--json")
        assert outcome.code == 0, outcome.err
        records = [json.loads(line) for line in outcome.out.splitlines()]
        assert [each["text"] for each in records] == TEXTS
        for record in records:
            given = read(record["text"], return_offsets_mapping=True)
            shares = theirs(torch.tensor([given["input_ids"]])).logits[0, 1:-1].softmax(-1)
            found = [[token["probabilities"][label] for label in LABELS.values()] for token in record["tokens"]]
            assert len(found) == len(shares)
            assert not found or float((torch.tensor(found) - shares).abs().max()) < 1e-5
            assert [(token["start"], token["end"]) for token in record["tokens"]] == given["offset_mapping"][1:-1]
            best = [LABELS[number] for number in shares.argmax(-1).tolist()]
            assert [token["label"] for token in record["tokens"]] == best
    outcome = regard("classify", "né", "Ada", "--model", folder)
    first, second, rest = outcome.out.split("\n\n")
    assert len(first.splitlines()) == len(tokenizer.encode("né")) and rest == ""
    assert all(len(line.split("\t")) == 3 for line in (*first.splitlines(), *second.splitlines()))


def test_what_does_not_fit(regard, tokenizer: Tokenizer, tmp_path: Path) -> None:
    sizes = DISTILBERT | {"vocab_size": 280, "max_position_embeddings": 6, "id2label": LABELS}
    folder = folder_of(tmp_path, "DistilBertForTokenClassification", tokenizer, **sizes)
    outcome = regard("classify", "wxyz wxyz", "a", "--model", folder, "--json")
    assert outcome.code == 0 and "truncated 1 of 2 texts to 6 tokens" in outcome.err
    assert [len(json.loads(line)["tokens"]) for line in outcome.out.splitlines()] == [4, 1]
    outcome = regard("classify", "a\tb", "--pairs", "--model", folder)
    assert outcome.code == 2 and "--pairs must be left out for a token classifier" in outcome.err
    outcome = regard("evaluate", "classifier", tmp_path / "config.json", "--model", folder)
    assert outcome.code == 2 and "is a token classifier: use `regard classify --model" in outcome.err
