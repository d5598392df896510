"""Folders of transformers in the commands, of families that we read and of others: transformers' own numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pairwise import across
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from regard_lab.text.tokenizer import Tokenizer

transformers.utils.logging.set_verbosity_error()
TEXTS = ["a fine film", "dull", "so it goes, and goes on for a while", "no", "why not"]
SIZES: dict[str, Any] = {"vocab_size": 264, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 24, "max_position_embeddings": 64, "num_key_value_heads": 2, "head_dim": 4}
GPT2: dict[str, Any] = {"vocab_size": 264, "n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": 64}


def folder_of(path: Path, name: str, tokenizer: Tokenizer, **options: Any) -> Path:
    """Write the folder of a small random model of transformers."""
    made = getattr(transformers, name)
    torch.manual_seed(0)
    model = made(made.config_class(**options))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model.eval().save_pretrained(path)
    tokenizer.save(path)
    return path


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.learn([], kind="bytes", specials=("end", "pad"))


@pytest.mark.campaign(keep=4)
@torch.no_grad()
@across(
    {
        "name": ["GPT2ForSequenceClassification", "LlamaForSequenceClassification", "Qwen3ForSequenceClassification"],
        "problem": [None, "multi_label_classification", "regression"],
        "pad": ["pad", "end"],
        "around": [True, False],
    }
)
def test_classifiers_on_decoders(
    regard, name: str, problem: str | None, pad: str, around: bool, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    begin, end = (tokenizer.begin, tokenizer.end) if around else (None, None)
    used, special = tokenizer.surrounded(begin, end, end), getattr(tokenizer, pad)
    sizes = GPT2 if "GPT2" in name else SIZES
    labels = {0: "bad", 1: "fair", 2: "good"}
    options = {"pad_token_id": special, "problem_type": problem, "id2label": labels, "bos_token_id": None}
    folder = folder_of(tmp_path / "model", name, used, **sizes, **options, eos_token_id=tokenizer.end)
    theirs, read = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    (tmp_path / "texts").write_text("".join(f"{text}\n" for text in TEXTS))
    expected = torch.cat([theirs(torch.tensor([read(text)["input_ids"]])).logits for text in TEXTS])
    expected = expected.softmax(1) if problem is None else expected if problem == "regression" else expected.sigmoid()
    for batch in (1, 3, 128):
        outcome = regard("classify", "--model", folder, "--data", tmp_path / "texts", "--batch", batch, "--json")
        assert outcome.code == 0, outcome.err
        shown = [json.loads(line)["probabilities"] for line in outcome.out.splitlines()]
        found = torch.tensor([[each[label] for label in labels.values()] for each in shown])
        assert float((found - expected).abs().max()) < 1e-5
    refused = regard("evaluate", "classifier", tmp_path / "texts", "--model", folder)
    assert (problem is None) == ("single-label classifier" not in refused.err)


@pytest.mark.slow
def test_texts_of_other_families(regard, tokenizer: Tokenizer, tmp_path: Path) -> None:
    special = {"pad_token_id": tokenizer.pad, "eos_token_id": tokenizer.end, "bos_token_id": tokenizer.begin}
    one = folder_of(tmp_path / "one", "Qwen3ForCausalLM", tokenizer, **SIZES, **special)
    sizes = {"vocab_size": 264, "d_model": 16, "d_ff": 24, "d_kv": 4, "num_layers": 2, "num_heads": 4}
    pair = folder_of(tmp_path / "pair", "T5ForConditionalGeneration", tokenizer, **sizes, **special,
                     decoder_start_token_id=tokenizer.pad)  # fmt: skip
    (tmp_path / "text").write_text("to be or not to be")
    outcome = regard("generate", "ab", "--model", one, "--max-new-tokens", 4, "--json")
    assert outcome.code == 0 and json.loads(outcome.out)["tokens"] <= 4
    outcome = regard("generate", "ab", "--model", one, "--max-new-tokens", 4, "--alignment")
    assert outcome.code == 0 and outcome.out.startswith("ab")
    outcome = regard("generate", "ab", "cd", "--model", pair, "--max-new-tokens", 4)
    assert outcome.code == 0 and "ab" not in outcome.out and "cd" not in outcome.out
    outcome = regard("generate", "ab", "--model", pair, "--max-new-tokens", 3, "--beams", 3)
    assert outcome.code == 0
    outcome = regard("evaluate", "language-model", tmp_path / "text", "--model", one, "--json")
    assert outcome.code == 0 and json.loads(outcome.out)["tokens"] == 19
    for folder in (one, pair):
        outcome = regard("look", folder, "--text", "to be")
        layers = 2 if folder == one else 6  # of a pair: those of the encoder, of the decoder, and between them
        assert outcome.code == 0 and f"{layers} layers of 4 heads" in outcome.out


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_a_text_beyond_the_learned_length(regard, name: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    special = {"pad_token_id": tokenizer.pad, "eos_token_id": None, "bos_token_id": None}
    folder = folder_of(tmp_path / name, name, tokenizer, **SIZES | {"max_position_embeddings": 12}, **special)
    outcome = regard("generate", "to be", "--model", folder, "--max-new-tokens", 6)
    assert outcome.code == 0 and "positions" not in outcome.err
    outcome = regard("generate", "to be", "--model", folder, "--max-new-tokens", 20)
    sentence = "the text is longer than the model's maximum length of 12 tokens, so its quality may drop: lower"
    assert outcome.code == 0 and outcome.err.count(sentence) == 1, outcome.err


def test_bytes_that_are_no_character_are_explained(regard, tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "GPT2LMHeadModel", tokenizer, **GPT2, eos_token_id=None, bos_token_id=None)
    made = transformers.GPT2LMHeadModel.from_pretrained(folder)
    with torch.no_grad():  # writes one byte whatever it reads: 0xC3, with which characters begin
        for parameter in made.parameters():
            parameter.zero_()
        made.transformer.ln_f.bias.fill_(1.0)
        made.transformer.wte.weight[0xC3] = 1.0
    made.save_pretrained(folder)
    outcome = regard("generate", "x", "--model", folder, "--max-new-tokens", 1)
    assert outcome.out == "x�\n" and "increase --max-new-tokens to complete it" in outcome.err
    outcome = regard("generate", "x", "--model", folder, "--max-new-tokens", 3)
    assert "marks bytes in the model's output that are not valid UTF-8" in outcome.err


def test_folders_of_timm_are_explained(regard, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architecture": "resnet18", "num_classes": 10, "pretrained_cfg": {}})
    )
    for command in (["classify", "x"], ["generate", "x"], ["evaluate", "classifier", "x"]):
        outcome = regard(*command, "--model", tmp_path)
        assert outcome.code == 2 and "got one of timm, 'resnet18': timm.create_model(" in outcome.err, outcome.err
    outcome = regard("look", tmp_path, "--text", "x")
    assert outcome.code == 2 and "got one of timm, 'resnet18': timm.create_model(" in outcome.err, outcome.err
