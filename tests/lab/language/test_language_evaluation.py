"""Perplexity and bits of texts: sums over the tokens themselves, with windows that overlap."""

from __future__ import annotations

import math

import pytest
import torch

from regard import RegardWarning
from regard_lab.models import DecoderLM, DecoderLMConfig, EncoderLM, EncoderLMConfig
from regard_lab.tasks.language.evaluation import score_text
from regard_lab.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.learn([], kind="bytes", specials=("end", "pad", "mask", "cls", "sep"))
TEXTS = ["to be or not to be, that is the question", "né", "x"]


def decoder(**fields: object) -> DecoderLM:
    torch.manual_seed(0)
    model = DecoderLM(DecoderLMConfig(len(TOKENIZER), **{"width": 16, "layers": 1, "max_length": 64} | fields)).eval()
    torch.nn.init.normal_(model.embedding.weight, std=0.5)
    return model


@torch.no_grad()
def test_it_is_the_likelihood_of_every_byte_and_end() -> None:
    tokenizer = Tokenizer.learn([], kind="bytes")
    model = decoder()
    nats = 0.0
    for text in TEXTS:
        tokens = torch.tensor([tokenizer.begin, *tokenizer.encode(text), tokenizer.end])
        likely = model(tokens[None, :-1]).log_softmax(-1)[0]
        nats -= float(likely[torch.arange(len(tokens) - 1), tokens[1:]].sum())
    scores = score_text(model, tokenizer, TEXTS)
    assert (scores.documents, scores.characters, scores.bytes, scores.targets) == (3, 43, 44, 47)
    assert scores.nats == pytest.approx(nats, rel=1e-5)
    report = scores.report()
    assert report["bits_per_byte"] == pytest.approx(nats / math.log(2) / 44, abs=1e-4)
    assert report["bits_per_character"] == pytest.approx(nats / math.log(2) / 43, abs=1e-4)
    assert report["perplexity"] == pytest.approx(math.exp(nats / 47), rel=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("stride", [1, 3, 8])
def test_each_token_is_predicted_once_from_at_least_so_many_before_it(stride: int) -> None:
    tokenizer = Tokenizer.learn([], kind="bytes")
    model, text = decoder(), TEXTS[0]
    tokens = torch.tensor([tokenizer.begin, *tokenizer.encode(text), tokenizer.end])
    nats, done, end = 0.0, 0, 8
    while done < len(tokens) - 1:
        begin = min(end, len(tokens) - 1) - 8  # the last window ends where the text does
        likely = model(tokens[None, begin : begin + 8]).log_softmax(-1)[0]
        each = likely[torch.arange(8), tokens[begin + 1 : begin + 9]]
        nats -= float(each[done - begin :].sum())
        done, end = begin + 8, end + stride
    scores = score_text(model, tokenizer, [text], length=8, stride=stride, batch=2)
    assert scores.targets == len(text) + 1 and scores.nats == pytest.approx(nats, rel=1e-5)


def test_bits_are_not_told_where_spaces_are_not_predicted() -> None:
    with pytest.warns(RegardWarning, match="are more than these texts support"):
        pieces = Tokenizer.learn(TEXTS * 2, 300, "wordpiece")
    assert TOKENIZER.keeps_spaces and not pieces.keeps_spaces
    model = DecoderLM(DecoderLMConfig(len(pieces), width=16, layers=1, max_length=64)).eval()
    report = score_text(model, pieces, TEXTS).report()
    assert report["perplexity"] > 1 and not {"bits_per_byte", "bits_per_character"} & set(report)


def test_masked_tokens_are_the_same_every_time() -> None:
    torch.manual_seed(0)
    model = EncoderLM(EncoderLMConfig(len(TOKENIZER), width=16, layers=1)).eval()
    scores = score_text(model, TOKENIZER, TEXTS * 20)
    assert scores == score_text(model, TOKENIZER, TEXTS * 20)
    assert "bits_per_byte" not in scores.report() and 100 < scores.targets < 200


def test_what_is_refused() -> None:
    bare = EncoderLM(EncoderLMConfig(len(TOKENIZER), width=16, layers=1, masked_head=False))
    masked, unmasked = EncoderLM(EncoderLMConfig(len(TOKENIZER), width=16, layers=1)), Tokenizer.learn([], kind="bytes")
    for model, tokenizer, options, sentence in (
        (decoder(), TOKENIZER, {"length": 65}, "length must be from 2 to 64, got 65"),
        (decoder(), TOKENIZER, {"stride": 65}, "stride must be from 1 to 64, the length of a window, got 65"),
        (masked, TOKENIZER, {"stride": 5}, "stride must be left out for a model of masked tokens"),
        (masked, unmasked, {}, "must have a tokenizer with a mask"),
        (bare, TOKENIZER, {}, "must have a head that names masked tokens"),
    ):
        with pytest.raises(ValueError, match=sentence):
            score_text(model, tokenizer, TEXTS, **options)
