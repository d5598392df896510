"""Models in int8 say nearly the same; models with packed weights say the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from language_models import small_model

from regard_lab.generation.beam_search import SearchOptions, search
from regard_lab.generation.generation import generate
from regard_lab.generation.quantization import pack_weights, quantize
from regard_lab.generation.sequence_model import posteriors, score_targets
from regard_lab.models import (
    DecoderLM,
    RecurrentConfig,
    RecurrentEncoderDecoder,
    TransformerConfig,
    TransformerEncoderDecoder,
)
from regard_lab.models.packed_weight import PackedWeight

SOURCE, LENGTHS, TARGET = (
    torch.tensor([[3, 4, 5, 6], [7, 8, 0, 0]]),
    torch.tensor([4, 2]),
    torch.tensor([[1, 9], [1, 4]]),
)


def translator(**changes: Any) -> TransformerEncoderDecoder:
    """A Transformer with parameters that are no zeros."""
    torch.manual_seed(0)
    sizes = {"sources": 20, "targets": 30, "width": 32, "heads": 4, "feedforward": 48, "encoder_layers": 1}
    model = TransformerEncoderDecoder(TransformerConfig(**(sizes | {"decoder_layers": 2} | changes))).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


KINDS = [{}, {"norm": "post", "tied": "target"}, {"kv_heads": 2}, {"positions": "rotary"}, {"score": "additive"},
         {"normalizer": "entmax15"}, {"positions": "learned"}]  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_logits_in_int8_are_near(tied: bool) -> None:
    model, tokens = small_model(width=64, tied=tied, std=0.1), torch.randint(50, (2, 9))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made, wanted = quantize(model)(tokens), model(tokens)
    assert 0 < float((made - wanted).norm() / wanted.norm()) < 0.05
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert len(generate(quantize(model), tokens.tolist())) == 2


@pytest.mark.parametrize("changes", KINDS, ids=str)
@torch.no_grad()
def test_translators_in_int8_are_near(changes: dict[str, Any]) -> None:
    model = translator(**changes)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    narrow = quantize(model)
    made, wanted = (each(SOURCE, LENGTHS, TARGET) for each in (narrow, model))
    assert 0 < float((made - wanted).norm() / wanted.norm()) < 0.1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [len(each) for each in search(narrow, SOURCE, LENGTHS, SearchOptions(beams=3, n_best=2))] == [2, 2]


@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_packed_weights_mean_the_same(tied: bool) -> None:
    model, tokens = small_model(tied=tied), torch.randint(50, (2, 9))
    wanted, written = model(tokens), generate(model, tokens.tolist())
    embedding = model.embedding.weight.clone()
    pack_weights(model)
    torch.testing.assert_close(model(tokens), wanted, rtol=1e-4, atol=1e-4)
    assert [each.numbers for each in generate(model, tokens.tolist())] == [each.numbers for each in written]
    assert torch.equal(model.embedding.weight, embedding)
    pack_weights(model)  # what is packed stays so


@pytest.mark.parametrize("changes", KINDS, ids=str)
@torch.no_grad()
def test_packed_translators_write_the_same(changes: dict[str, Any]) -> None:
    model, options = translator(**changes), SearchOptions(beams=3, n_best=2)
    logits, maps = model(SOURCE, LENGTHS, TARGET), model.align(SOURCE, LENGTHS, TARGET)
    written, pairs = search(model, SOURCE, LENGTHS, options), [([3, 4, 5], [9, 4]), ([7], [4])]
    scores, posterior = score_targets(model, pairs), posteriors(model, pairs, None)
    pack_weights(model)
    assert score_targets(model, pairs) == pytest.approx(scores, rel=1e-4)
    torch.testing.assert_close(posteriors(model, pairs, None), posterior, rtol=1e-4, atol=1e-5)
    assert isinstance(model.output.weight, PackedWeight)
    torch.testing.assert_close(model(SOURCE, LENGTHS, TARGET), logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.align(SOURCE, LENGTHS, TARGET), maps, rtol=1e-4, atol=1e-5)
    numbers = [
        [[each.numbers for each in best] for best in found]
        for found in (search(model, SOURCE, LENGTHS, options), written)
    ]
    assert numbers[0] == numbers[1]


def test_wrong_models_are_one_sentence() -> None:
    config = RecurrentConfig(20, 30, encoder=8, decoder=8)
    for other in (torch.nn.Linear(2, 2), RecurrentEncoderDecoder(config)):
        with pytest.raises(
            TypeError,
            match="quantize: model must be a DecoderLM, TransformerEncoderDecoder or TransformerCaptioner, got",
        ):
            quantize(other)  # type: ignore[type-var]
        before = {name: value.clone() for name, value in other.state_dict().items()}
        pack_weights(other)
        assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items()), "it stays"
    with pytest.raises(ValueError, match="quantize: model must be on the CPU in float32, got"):
        quantize(small_model().bfloat16())
    model = small_model()
    assert isinstance(quantize(model), DecoderLM)
    pack_weights(model)
    with pytest.raises(
        ValueError, match="quantize: model must have ordinary weights, got packed ones: load the model again"
    ):
        quantize(model)
