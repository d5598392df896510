"""Linear attention as language models have it: what its weights are, documents, caches, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from language_models import LINEAR, small_model
from torch import Tensor

from regard import AuxRequest, cite, masks
from regard.nn import LinearCache, LinearSelfAttention
from regard_lab.models import DecoderLMConfig
from regard_lab.models.slot_cache import LinearSlotCache, Slots


def made(**options: object) -> tuple[LinearSelfAttention, Tensor]:
    torch.manual_seed(0)
    layer = LinearSelfAttention(16, 4, dtype=torch.float64, **options)  # type: ignore[arg-type]
    return layer, torch.randn(2, 7, 16, dtype=torch.float64)


@pytest.mark.parametrize("feature_map", ["elu", "relu"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_weights_are_products_of_features(groups: int, feature_map: str) -> None:
    layer, x = made(num_kv_heads=groups, feature_map=feature_map)
    rows = (x @ layer.qkv.weight.T + layer.qkv.bias).view(2, 7, -1, 4)
    q, k, v = rows[:, :, :4], rows[:, :, 4 : 4 + groups], rows[:, :, 4 + groups :]
    told = []
    for head in range(4):
        phi = [
            each.relu() if feature_map == "relu" else torch.nn.functional.elu(each) + 1
            for each in (q[:, :, head], k[:, :, head * groups // 4])
        ]
        weights = (phi[0] @ phi[1].mT).tril()
        told.append(weights / weights.sum(-1, keepdim=True).clamp(min=1e-300) @ v[:, :, head * groups // 4])
    expected = torch.cat(told, -1) @ layer.out.weight.T + layer.out.bias
    torch.testing.assert_close(layer(x), expected, rtol=1e-9, atol=1e-9)


def test_documents_and_steps_are_as_one_pass() -> None:
    layer, x = made(num_kv_heads=2)
    documents = torch.tensor([[0, 0, 1, 1, 1, 5, 5], [3, 3, 3, 3, 3, 3, 3]])
    whole = layer(x, masks.document(documents))
    torch.testing.assert_close(whole[0], torch.cat([layer(part[None])[0] for part in x[0].split([2, 3, 2])]))
    cache = LinearCache()
    parts = [layer(part, cache=cache) for part in x[1:].split([3, 1, 1, 2], 1)]
    torch.testing.assert_close(torch.cat(parts, 1)[0], whole[1])
    assert len(cache) == 7 and repr(cache) == "LinearCache(): 7 steps"
    with pytest.raises(ValueError, match=r"LinearCache: length must be 0 or 7, the number of steps, got 3\."):
        cache.truncate(3)
    cache.truncate(0)
    torch.testing.assert_close(layer(x[1:], cache=cache)[0], whole[1])


def test_a_model_keeps_packed_documents_apart() -> None:
    model = small_model(**LINEAR).double()
    tokens, documents = torch.randint(0, 50, (1, 90)), torch.arange(90)[None] // 40
    positions = torch.arange(90)[None] % 40
    packed = model(tokens, mask=masks.document(documents), positions=positions)
    alone = torch.cat([model(part) for part in tokens.split(40, 1)], 1)
    torch.testing.assert_close(packed, alone)


def test_a_step_in_slots_counts_once_it_is_finished() -> None:
    slots, layer, x = Slots(), *made()
    cache = LinearSlotCache(slots)
    slots.lengths = [0, 0]
    for _ in range(2):  # the first try failed in a later layer
        first = layer(x[:, :1], cache=cache)
    slots.finish()
    torch.testing.assert_close(torch.cat([first, layer(x[:, 1:2], cache=cache)], 1), layer(x[:, :2]))
    slots.finish()
    cache.move(1, 0)
    slots.lengths = slots.lengths[:1]
    torch.testing.assert_close(layer(x[1:, 2:3], cache=cache), layer(x[1:, :3])[:, 2:])
    slots.finish()
    slots.lengths.append(0)  # a slot that another sequence has left
    torch.testing.assert_close(layer(x[:, :1], cache=cache)[1], layer(x[1:, :1])[0])


def test_what_it_cannot_do_is_one_sentence() -> None:
    layer, x = made()
    with pytest.raises(
        ValueError, match=r"attn_mask must be None or masks.document\(ids\), as linear attention has no"
    ):
        layer(x, masks.causal() & masks.document(torch.zeros(7, dtype=torch.long)))
    with pytest.raises(ValueError, match="LinearSelfAttention: return_aux must be None"):
        layer(x, return_aux=AuxRequest(weights=True))
    with pytest.raises(ValueError, match="LinearCache: the cache is empty"):
        LinearCache().sequence(0)
    with pytest.raises(ValueError, match="feature_map must be one of 'elu'"):
        LinearSelfAttention(16, 4, feature_map="exp")
    for changes, sentence in (
        ({"positions": "rotary"}, "positions must be 'learned', 'sinusoidal' or 'none' in linear attention"),
        ({"score": "additive"}, "score must be 'scaled_dot' in linear attention, which has none, got additive"),
        ({"normalizer": "sparsemax"}, "normalizer must be 'softmax' in linear attention"),
        ({"window": 5}, "window must be None in linear attention"),
        ({"attention_dropout": 0.1}, "attention_dropout must be 0.0 in linear attention"),
    ):
        with pytest.raises(ValueError, match=sentence):
            DecoderLMConfig(50, width=16, **{"positions": "learned", "feature_map": "elu"} | changes)


def test_it_is_cited_and_printed() -> None:
    layer, _ = made(num_kv_heads=2)
    assert "katharopoulos2020" in cite(layer) and "su2021" not in cite(layer)
    assert "num_kv_heads=2" in repr(layer) and "feature_map='elu'" in repr(layer)
