"""A record of the last queries alone holds the rows that a record of all of them holds."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face_models import DECODERS, PAIRED, made, tokens
from tests.helpers.vision_language import family
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM

import regard
from regard import masks
from regard.inspect import Record, capture, input_texts, patch
from regard.integrations.transformers import register
from regard.scores import ScoreMod

#: Queries that are kept.
KEPT = 3


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    register()


def both(call: Callable[[], Any], model: nn.Module | None = None, **options: Any) -> tuple[Record, Record]:
    """Return the record of a call, and that of its last queries."""
    records = []
    for given in ({}, {"queries": KEPT}):
        torch.manual_seed(0)
        with capture(model, **options, **given) as record, torch.no_grad():
            call()
        records.append(record)
    return records[0], records[1]


def agree(call: Callable[[], Any], model: nn.Module | None = None) -> Record:
    whole, last = both(call, model)
    assert whole.layers == last.layers and len(whole)
    for one, other in zip(whole, last):
        rows = other.shape[2]
        torch.testing.assert_close(other.weights(), one.weights()[:, :, -rows:])
        torch.testing.assert_close(other.received(), one.weights()[:, :, -rows:].sum(2), rtol=1e-4, atol=1e-5)
        assert (other.kind, other.shape[3], other.skipped) == (one.kind, one.shape[3], one.shape[2] - rows)
    summaries = both(call, model, keep="summaries")
    for one, other in zip(last, summaries[1]):
        torch.testing.assert_close(other.topk(2).weights, one.topk(2).weights)
    assert last.nbytes < whole.nbytes
    return last


@pytest.mark.campaign(keep=9)
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "regard"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name: str, implementation: str) -> None:
    if (name, implementation) in {("gemma 2, softcap", "sdpa"), ("gpt-oss, sinks", "sdpa")}:
        implementation = "eager"  # transformers has no other
    model = made(DECODERS[name]())
    model.set_attn_implementation(implementation)
    agree(lambda: model(tokens()), model)


@pytest.mark.parametrize("name", PAIRED)
def test_encoder_decoders(name: str) -> None:
    model = made(PAIRED[name](), AutoModelForSeq2SeqLM)
    agree(lambda: model(input_ids=tokens(), decoder_input_ids=tokens()[:, :5]), model)


@pytest.mark.slow
def test_layers_of_torch_on_their_fast_path() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), torch.randn(2, 7, 16)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 4:] = True
    agree(lambda: model(x), model)
    agree(lambda: model(x, src_key_padding_mask=padding), model)
    agree(lambda: model(x, mask=nn.Transformer.generate_square_subsequent_mask(7)), model)


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"attn_mask": masks.window(2, 1)},
        {"attn_mask": masks.alibi(torch.tensor([0.5, 0.25])) & masks.causal(offset=0)},
        {"attn_mask": torch.ones(9, 9).tril() > 0, "is_causal": True},
        {"attn_mask": torch.randn(1, 9)},
        {"score": "gaussian"},
        {"score": ScoreMod(lambda score, b, h, q, k: score + (q - k) * 0.1)},
        {"normalizer": "sparsemax"},
    ],
)
def test_calls_of_attention(options: dict[str, Any]) -> None:
    x = torch.randn(1, 2, 9, 4)
    agree(lambda: regard.attention(x, x, x, **options))


def test_what_a_model_writes(tmp_path: Path) -> None:
    """The rows are those of the last tokens, and of what is written after them."""
    model, read = made(DECODERS["llama, grouped"]()), tokens()[:1]
    written: list[Tensor] = []

    def write() -> None:
        written.append(model.generate(read, max_new_tokens=4, do_sample=False, pad_token_id=0))

    whole, last = both(write, model)
    words = [f"w{i}" for i in range(written[0].shape[1] - 1)]
    for one, other in zip(whole.describe(words), last.describe(words)):
        assert other.shape[2] == KEPT + 3
        torch.testing.assert_close(other.weights(), one.weights()[:, :, -KEPT - 3 :])
        assert last.texts_of(other, 0)[0].tokens == tuple(words[-KEPT - 3 :])
    again = Record.load(last.save(tmp_path / "last.regard"))
    torch.testing.assert_close(again[1].weights(), last[1].weights())
    assert again[1].skipped == read.shape[1] - KEPT


def test_weights_that_were_replaced() -> None:
    model = made(DECODERS["llama, grouped"]())
    with torch.no_grad(), capture(model) as other:
        model(tokens().flip(1))

    def patched() -> None:
        with patch(model, 0, other, head=1):
            model(tokens())

    agree(patched, model)


def test_words_and_tiles_of_images() -> None:
    """Of cross-attention, the rows are the last words, the columns the tiles."""
    model, processor = family("mllama")
    images = [torch.randint(0, 256, (45, 60, 3), dtype=torch.uint8).numpy()]
    inputs = processor(text=[f"{processor.image_token}the cat"], images=[images], return_tensors="pt")
    _, last = both(lambda: model(**inputs), model, layers=["model.language_model"])
    last.describe(*input_texts(model, processor, inputs, images=images))
    (cross,) = [run for run in last if run.kind == "cross"]
    queries, keys = last.texts_of(cross, 0)
    assert queries.tokens == ("c", "a", "t") and len(keys.patches) == 4


@pytest.mark.parametrize("wrong", [0, -1, True, 2.0])
def test_what_is_wrong(wrong: Any) -> None:
    expected = re.escape(f"queries must be an int of at least 1, or None, got {wrong!r}")
    with pytest.raises(ValueError, match=expected), capture(queries=wrong):
        pass


def test_gradients_need_all_queries() -> None:
    expected = "capture: gradients must be False with queries, got True"
    with pytest.raises(ValueError, match=expected), capture(queries=1, gradients=True):
        pass
