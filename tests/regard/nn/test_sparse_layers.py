"""Layers that choose keys: transformers' indexer, naive definitions, losses, steps through caches, and bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.regard.nn.layer_samples.sparse import chosen_keys, index_scores, latent_parts
from torch import Tensor

from regard import masks
from regard.nn import (
    DeepSeekSparseAttention,
    KVCache,
    LightningIndexer,
    MixtureOfBlockAttention,
    MultiheadLatentAttention,
    NativeSparseAttention,
    Rotary,
    SelfAttention,
)

SIZES: dict[str, Any] = {
    "latent_dim": 12, "head_dim": 8, "value_dim": 6, "query_latent_dim": 10, "index_heads": 3, "index_dim": 6,
    "topk": 4,
}  # fmt: skip


def sparse(dtype: torch.dtype = torch.float64, **settings: Any) -> DeepSeekSparseAttention:
    torch.manual_seed(0)
    rotary = Rotary(4, interleaved=True)
    return DeepSeekSparseAttention(16, 4, **{**SIZES, "rotary": rotary, **settings}).to(dtype).eval()


def rows(L: int = 9, width: int = 16, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, L, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def hidden(L: int) -> Tensor:
    return torch.full((L, L), -torch.inf, dtype=torch.float64).triu(1)[None, None]


# DeepSeek sparse attention --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_transformers(family: str) -> None:
    """The layer, and the keys of its indexer, with the same weights."""
    import importlib

    import transformers

    prefix = {"deepseek_v32": "DeepseekV32", "glm_moe_dsa": "GlmMoeDsa"}[family]
    theirs = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config = getattr(transformers, f"{prefix}Config")(
        hidden_size=16, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=10, kv_lora_rank=12,
        qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, index_n_heads=3, index_head_dim=6, index_topk=4,
        max_position_embeddings=32, num_hidden_layers=1,
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(2)
    layer = getattr(theirs, f"{prefix}Attention")(config, 0).double()
    turning = getattr(theirs, f"{prefix}RotaryEmbedding")(config)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    ours = sparse(index_interleaved=family == "glm_moe_dsa")
    names = {
        "latent": "kv_a_proj_with_mqa", "latent_norm": "kv_a_layernorm", "key_value": "kv_b_proj", "out": "o_proj",
        "query_latent": "q_a_proj", "query_norm": "q_a_layernorm", "query": "q_b_proj", "indexer.query": "indexer.wq_b",
        "indexer.key": "indexer.wk", "indexer.key_norm": "indexer.k_norm", "indexer.weight": "indexer.weights_proj",
    }  # fmt: skip
    for mine, other in names.items():
        ours.get_submodule(mine).load_state_dict(layer.get_submodule(other).state_dict())
    x, places = rows(), torch.arange(9).unsqueeze(0)
    cos, sin = turning(x, places)
    rotation = cos[0, :, :2].double(), sin[0, :, :2].double()
    right = layer(x, (cos.double(), sin.double()), hidden(9), position_ids=places)[0]
    torch.testing.assert_close(ours(x, masks.causal(), rotation=rotation), right, rtol=1e-6, atol=1e-6)
    asked = layer.q_a_layernorm(layer.q_a_proj(x))
    keys = layer.indexer(x, asked, (cos.double(), sin.double()), hidden(9)[0], places)
    found = ours.indexer(x, asked, attn_mask=masks.causal(), rotation=rotation)
    for t in range(9):  # theirs also name hidden keys where fewer are visible
        for b in range(2):
            assert {*found[b, t].tolist()} - {-1} == {j for j in keys[b, t].tolist() if j <= t}


def test_all_keys_are_latent_attention() -> None:
    layer, x = sparse(topk=9), rows()
    dense = MultiheadLatentAttention(
        16, 4, latent_dim=12, head_dim=8, value_dim=6, query_latent_dim=10, rotary=Rotary(4, interleaved=True)
    ).double()
    dense.load_state_dict({name: t for name, t in layer.state_dict().items() if not name.startswith("indexer")})
    for mask in (None, masks.causal(), masks.causal() & masks.alibi(4)):
        torch.testing.assert_close(layer(x, mask), dense(x, mask))


@pytest.mark.parametrize("split", [(1,) * 9, (4, 1, 4), (9,)])
@pytest.mark.parametrize("turned", [True, False])
def test_steps_are_the_whole(split: tuple[int, ...], turned: bool) -> None:
    layer, x, cache = sparse(rotary=Rotary(4, interleaved=True) if turned else None), rows(), KVCache()
    whole = layer(x, is_causal=True)
    with torch.no_grad():
        steps = [layer(part, masks.causal(align="lower_right"), cache=cache) for part in x.split(split, 1)]
    torch.testing.assert_close(torch.cat(steps, 1), whole)
    assert cache.key.shape == (2, 1, 9, 16 if turned else 12) and cache.value.shape == (2, 1, 9, 6)


@pytest.mark.parametrize("kind", ["all", "selected"])
def test_the_indexer_learns_from_its_loss_alone(kind: Any) -> None:
    layer, x = sparse(), rows().requires_grad_()
    output, loss = layer(x, is_causal=True, loss=kind)
    output.square().sum().backward()
    assert all(p.grad is None for p in layer.indexer.parameters())
    others = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    before = x.grad.clone() if x.grad is not None else None
    loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in layer.indexer.parameters())
    for one, other in zip(others, [p for p in layer.parameters() if p.grad is not None]):
        assert other.grad is not None and torch.equal(one, other.grad)
    assert before is not None and torch.equal(before, x.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["all", "selected"])
def test_the_loss_is_its_formula(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In NumPy, and in tiles of any size; the gradient by differences."""
    layer, x = sparse(index_heads=12), rows()  # so many that none of a row's scores are equal
    array = x.numpy()
    asked, q, k, _ = latent_parts(layer, array)
    scores = index_scores(layer.indexer, array, asked, 4)
    causal = np.tril(np.ones((9, 9), bool))
    seen = np.broadcast_to(causal, scores.shape) if kind == "all" else chosen_keys(scores, causal, 4)
    total = 0.0
    for b in range(2):
        for t in range(9):
            s = np.einsum("hd,hsd->hs", q[b, :, t], k[b]) / np.sqrt(12)
            s, i = s[:, seen[b, t]], scores[b, t, seen[b, t]]
            weights = (np.exp(s) / np.exp(s).sum(-1, keepdims=True)).mean(0)
            guess = np.exp(i) / np.exp(i).sum()
            total += (weights * np.log(weights / guess)).sum()
    loss = layer(x, is_causal=True, loss=kind)[1]
    torch.testing.assert_close(loss, torch.tensor(total / 18, dtype=torch.float64))
    parameters = list(layer.indexer.parameters())
    gradients = torch.autograd.grad(loss, parameters)
    monkeypatch.setattr("regard.nn.heads.indexed.HELD", 80)
    tiled = layer(x, is_causal=True, loss=kind)[1]
    torch.testing.assert_close(tiled, loss)
    for one, other in zip(torch.autograd.grad(tiled, parameters), gradients):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, is_causal=True, loss=kind)[1], loss)
        weight, step = layer.indexer.weight.weight, 1e-6
        weight[0, 0] += step
        up = layer(x, is_causal=True, loss=kind)[1]
        torch.testing.assert_close((up - loss) / step, gradients[-1][0, 0], rtol=1e-4, atol=1e-6)


def test_rows_that_see_nothing_do_not_count() -> None:
    """Neither in the loss nor in the output, which is 0 there but for biases."""
    layer, x = sparse(), rows()
    seen = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    seen[1, :, 5:] = False
    found, loss = layer(x, seen, loss="all")
    assert torch.equal(found[1, 5:], torch.zeros_like(found[1, 5:]))
    loss.backward()
    assert all(p.grad.isfinite().all() for p in layer.indexer.parameters() if p.grad is not None)
    first = layer(x[:1], is_causal=True, loss="all")[1] * 9 + layer(x[1:, :5], is_causal=True, loss="all")[1] * 5
    torch.testing.assert_close(loss, first / 14)


def test_padding_is_never_chosen() -> None:
    layer, x, lengths = sparse(), rows(), torch.tensor([9, 5])
    padded = x.clone()
    padded[1, 5:] = 50.0
    found = layer(padded, masks.causal() & masks.padding(lengths))
    torch.testing.assert_close(found[1, :5], layer(x[1:, :5], masks.causal())[0])
    torch.testing.assert_close(found[0], layer(x, masks.causal())[0])


def test_the_first_of_equal_keys_are_chosen() -> None:
    layer = sparse(topk=3).eval()
    with torch.no_grad():
        for weight in layer.indexer.parameters():
            weight.zero_()  # all scores are 0
    x, cache = rows(), KVCache()
    with torch.no_grad():
        whole = layer(x, is_causal=True)
        steps = torch.cat([layer(step, cache=cache) for step in x.split(1, 1)], 1)
    torch.testing.assert_close(steps, whole, rtol=0, atol=1e-9)


def test_scores_of_the_indexer_stay_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same keys in tiles of one query; memory of a few tiles, where all scores would take 40 times as much."""
    indexer, x = LightningIndexer(16, num_heads=3, head_dim=6, topk=4).double(), rows()
    whole = indexer(x, attn_mask=masks.causal())
    monkeypatch.setattr("regard.nn.heads.indexed.HELD", 1)
    assert torch.equal(whole, indexer(x, attn_mask=masks.causal()))
    held: list[int] = []
    scores = LightningIndexer.scores

    def counted(*given: Any) -> Tensor:
        held.append(given[1].shape[2] * given[3].shape[2] * 3)
        return scores(*given)

    monkeypatch.setattr(LightningIndexer, "scores", counted)
    monkeypatch.setattr("regard.nn.heads.indexed.HELD", 4000)
    indexer(rows(200), attn_mask=masks.causal())
    assert max(held) <= 4000 and sum(held) == 200 * 200 * 3


# Blocks ---------------------------------------------------------------------------------------------------------------


def mixture(dtype: torch.dtype = torch.float64, **settings: Any) -> MixtureOfBlockAttention:
    torch.manual_seed(0)
    made = {"block_size": 3, "topk": 2, "num_kv_heads": 2, "rotary": Rotary(4), **settings}
    return MixtureOfBlockAttention(16, 4, **made).to(dtype).eval()


def native(dtype: torch.dtype = torch.float64, **settings: Any) -> NativeSparseAttention:
    torch.manual_seed(0)
    made = {"block_size": 3, "num_blocks": 3, "window": 4, "num_kv_heads": 2, "rotary": Rotary(4), **settings}
    return NativeSparseAttention(16, 4, **made).to(dtype).eval()


@pytest.mark.parametrize("make", [mixture, native])
@pytest.mark.parametrize("split", [(1,) * 20, (7, 1, 12), (20,)])
def test_steps_of_blocks(make: Any, split: tuple[int, ...]) -> None:
    layer, x, cache = make(), rows(20), KVCache()
    whole = layer(x)
    with torch.no_grad():
        steps = [layer(part, cache=cache) for part in x.split(split, 1)]
    torch.testing.assert_close(torch.cat(steps, 1), whole)


@pytest.mark.parametrize("make", [mixture, native])
def test_a_change_reaches_later_rows_alone(make: Any) -> None:
    layer, x = make(), rows(20)
    changed = x.clone()
    changed[:, 11] += 1.0
    one, other = layer(x), layer(changed)
    assert torch.equal(one[:, :11], other[:, :11]) and not torch.equal(one[:, 11], other[:, 11])


@pytest.mark.parametrize("make", [mixture, native])
@pytest.mark.parametrize("engine", ["reference", "streaming", "fused"])
def test_every_engine_with_gradients(make: Any, engine: str) -> None:
    found = []
    for name in ("auto", engine):
        layer = make(engine=name)
        x = rows(20).requires_grad_()
        output = layer(x, torch.tensor([20, 13]))
        output.square().sum().backward()
        found.append([output, x.grad, *(p.grad for p in layer.parameters())])
    for one, other in zip(*found):
        torch.testing.assert_close(one, other)


def test_all_blocks_are_self_attention() -> None:
    layer, x = mixture(topk=7), rows(20)
    plain = SelfAttention(16, 4, num_kv_heads=2, bias=False, rotary=Rotary(4)).double()
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x), plain(x, masks.causal()))


def test_blocks_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    x = rows(20)
    whole = [make()(x) for make in (mixture, native)]
    monkeypatch.setattr("regard.nn.heads.blocks.HELD", 1)
    for one, make in zip(whole, (mixture, native)):
        torch.testing.assert_close(make()(x), one)


@pytest.mark.parametrize("make", [mixture, native])
def test_sequences_shorter_than_a_block(make: Any) -> None:
    for L in (1, 2):
        assert make()(rows(L)).shape == (2, L, 16)


@pytest.mark.parametrize("make", [mixture, native, sparse])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types(make: Any, dtype: torch.dtype) -> None:
    """All keys are chosen, so that rounding does not change the choice."""
    settings = {mixture: {"topk": 9}, native: {"num_blocks": 9}, sparse: {"topk": 20}}[make]
    layer, x = make(torch.float32, **settings), rows(20, dtype=torch.float32)
    call = (lambda m, t: m(t, is_causal=True)) if make is sparse else (lambda m, t: m(t))
    right = call(layer, x)
    found = call(layer.to(dtype), x.to(dtype))
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), right, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: mixture(topk=0), "MixtureOfBlockAttention: topk must be an int of at least 1, got 0"),
        (lambda: mixture(block_size=0), "MixtureOfBlockAttention: block_size must be an int of at least 1, got 0"),
        (lambda: native(num_blocks=2), "NativeSparseAttention: num_blocks must be an int of at least 3, got 2"),
        (lambda: native(window=0), "NativeSparseAttention: window must be an int of at least 1, got 0"),
        (lambda: mixture()(rows(), cache=KVCache(window=4)), "MixtureOfBlockAttention: cache must keep all steps"),
        (
            lambda: native()(rows(), torch.tensor([9, 9]), cache=KVCache()),
            "NativeSparseAttention: valid_lens must be None with a cache",
        ),
        (lambda: sparse(topk=0), "LightningIndexer: topk must be an int of at least 1, got 0"),
        (lambda: sparse(index_dim=3), "DeepSeekSparseAttention: index_dim must be at least 4, got 3"),
        (lambda: sparse()(rows(), loss="none"), "DeepSeekSparseAttention: loss must be one of 'all', 'selected'"),
        (
            lambda: sparse()(rows(), loss="all", cache=KVCache()),
            "DeepSeekSparseAttention: cache must be None with a loss",
        ),
    ],
)
def test_bad_input(call: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call()
