"""``regard fill-mask``: the tokens and probabilities of transformers, of models of every kind, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lab.cli.test_other_families import folder_of
from transformers import AutoModelForMaskedLM, AutoTokenizer

from regard_lab.models import EncoderLM, EncoderLMConfig, load, save
from regard_lab.text.tokenizer import Tokenizer

TEXTS = ["to be <|mask|>r not to <|mask|>", "", "<|mask|>", "that is the questi<|mask|>n, and a longer one"]
SIZES: dict[str, Any] = {"vocab_size": 264, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 24, "max_position_embeddings": 330, "pad_token_id": 257}
DISTILBERT: dict[str, Any] = {"vocab_size": 264, "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 4}
MODERN = {"local_attention": 8, "eos_token_id": 256, "bos_token_id": 256, "cls_token_id": 259, "sep_token_id": 260}
MODELS = {
    "BertForMaskedLM": SIZES, "RobertaForMaskedLM": SIZES, "XLMRobertaForMaskedLM": SIZES,
    "ModernBertForMaskedLM": SIZES | MODERN, "DistilBertForMaskedLM": DISTILBERT, "ElectraForMaskedLM": SIZES,
    "ConvBertForMaskedLM": SIZES, "FNetForMaskedLM": SIZES,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.learn([], kind="bytes", specials=("end", "pad", "mask", "cls", "sep"))


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_transformers_whatever_the_batch(
    regard, name: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "model", name, tokenizer, **MODELS[name])
    theirs = AutoModelForMaskedLM.from_pretrained(folder, attn_implementation="eager").eval()
    read = AutoTokenizer.from_pretrained(folder)
    expected = []
    for text in TEXTS:
        numbers = torch.tensor([read(text)["input_ids"]])
        expected.append(theirs(numbers).logits[0, numbers[0] == tokenizer.mask].softmax(-1) if text else [])
    (tmp_path / "lines").write_text("".join(f"{text}\n" for text in TEXTS))
    for batch in (1, 3):
        outcome = regard(
            "fill-mask", "--model", folder, "--data", tmp_path / "lines", "--batch", batch, "--top", 4, "--json"
        )
        assert outcome.code == 0, outcome.err
        records = [json.loads(line) for line in outcome.out.splitlines()]
        assert [record["text"] for record in records] == TEXTS
        for record, shares in zip(records, expected):
            assert len(record["masks"]) == len(shares)
            for found, wanted in zip(record["masks"], shares):
                best = wanted[: len(tokenizer)].sort(descending=True)
                assert [each["number"] for each in found] == best.indices[:4].tolist()
                for each, share in zip(found, best.values):
                    assert abs(each["probability"] - float(share)) < 1e-5
                    assert each["token"] == tokenizer.tokens([each["number"]])[0]
        first, second = (mask[0]["number"] for mask in records[0]["masks"])
        filled = [*tokenizer.encode("to be "), first, *tokenizer.encode("r not to "), second]
        assert records[0]["filled"] == tokenizer.decode(filled)


@torch.no_grad()
def test_padding_on_either_side_changes_no_row(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Of models whose positions do not count padding; the command itself pads behind, or not at all."""
    for name in ("RobertaForMaskedLM", "ModernBertForMaskedLM"):
        model: Any = load(folder_of(tmp_path / name, name, tokenizer, **MODELS[name]))
        numbers = torch.tensor([tokenizer.encode(TEXTS[0], specials=True, parse_specials=True)])
        logits = (lambda *a, m=model, **k: m.logits(m(*a, **k))) if isinstance(model, EncoderLM) else model
        alone = logits(numbers)
        for left, right in ((0, 7), (7, 0)):
            padded = torch.nn.functional.pad(numbers, (left, right), value=257)
            keep = torch.nn.functional.pad(torch.ones_like(numbers), (left, right)).bool()
            assert float((logits(padded, attention_mask=keep)[keep] - alone[0]).abs().max()) < 1e-5


def test_a_model_of_ours(regard, tokenizer: Tokenizer, tmp_path: Path) -> None:
    torch.manual_seed(0)
    save(EncoderLM(EncoderLMConfig(261, width=16, layers=1, positions="rotary", norm="rms")), tmp_path / "model")
    tokenizer.save(tmp_path / "model")
    outcome = regard("fill-mask", "a <|mask|> c <|mask|>", "<|mask|>", "--model", tmp_path / "model", "--top", 2)
    assert outcome.code == 0, outcome.err
    lines = [line.split("\t") for line in outcome.out.splitlines()]
    assert [len(line) for line in lines] == [4, 4, 4]
    assert all(0 < float(line[3]) <= float(line[1]) < 1 for line in lines)
    typed = regard("fill-mask", "--model", tmp_path / "model", "--top", 2, stdin="<|mask|>\n")
    assert typed.out.splitlines() == outcome.out.splitlines()[2:]


@pytest.mark.slow
def test_what_has_no_mask_is_explained(regard, tokenizer: Tokenizer, tmp_path: Path) -> None:
    plain = Tokenizer.learn([], kind="bytes", specials=("end", "pad", "cls", "sep"))
    masked = folder_of(tmp_path / "masked", "DistilBertForMaskedLM", tokenizer, **DISTILBERT)
    short = folder_of(tmp_path / "short", "BertForMaskedLM", tokenizer, **SIZES | {"max_position_embeddings": 8})
    unmasked = folder_of(tmp_path / "unmasked", "DistilBertForMaskedLM", plain, **DISTILBERT)
    bare = folder_of(tmp_path / "bare", "BertModel", tokenizer, **SIZES)
    labels = folder_of(tmp_path / "labels", "BertForSequenceClassification", tokenizer, **SIZES)
    discriminator = folder_of(tmp_path / "discriminator", "ElectraForPreTraining", tokenizer, **SIZES)
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "lines").write_text("a <|mask|>\nnone\n")
    for arguments, sentence in (
        (
            ["a [MASK]", "--model", masked],
            "TEXT must have the model's mask, <|mask|>, where a word is missing, got none in",
        ),
        (["--data", tmp_path / "lines", "--model", masked], "lines, line 2 must have the model's mask"),
        (["--data", tmp_path / "empty", "--model", masked], "empty must hold a text with the model's mask, <|mask|>"),
        (["a", "--data", tmp_path / "lines", "--model", masked], "--data must be left out if texts are given"),
        (
            [f"{'a' * 9}<|mask|>", "--model", short],
            "TEXT must have at most 8 tokens, the positions of the model, got 12",
        ),
        (
            ["<|mask|>", "--model", unmasked],
            "have a tokenizer with a mask_token in tokenizer_config.json",
        ),
        (["<|mask|>", "--model", bare], "have a masked-language-model head, as ...ForMaskedLM folders have"),
        (["<|mask|>", "--model", labels], f"is a text classifier: use `regard classify --model {labels}`."),
        (["<|mask|>", "--model", discriminator], "or a model without a head, got ElectraForPreTraining"),
        (["<|mask|>", "--model", tmp_path / "none"], "must be a folder with config.json"),
    ):
        outcome = regard("fill-mask", *arguments)
        assert outcome.code == 2 and sentence in outcome.err and outcome.err.count("\n") == 1, outcome.err
