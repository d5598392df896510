"""Engine sdpa: strips under structured masks, merged ranges, and what is not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_calls import check, inputs, normal, oracle, run
from pairwise import across
from torch import Tensor

import regard
from regard import masks
from regard.engines import flash, nonfinite, tiles
from regard.engines import sdpa as module
from regard.engines import sdpa as query_blocks
from regard.testing.conformance import tiny_tiles

L, S, B, H = 23, 29, 2, 4

IDS = torch.tensor([[0] * 9 + [1] * 14, [0] * 3 + [1] * 2 + [2] * 18])
KEY_IDS = torch.tensor([[0] * 5 + [1] * 24, [2] * 13 + [0] * 16])


def odd(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx * 7 + kv_idx * (3 + h) + b) % 5 < 2


MASKS: dict[str, Any] = {
    "causal": masks.causal("upper_left"),
    "lower right": masks.causal("lower_right"),
    "decoding": masks.causal(offset=torch.tensor([6, 0])),
    "window": masks.window(3, 2, align="upper_left"),
    "narrow": masks.window(0, 0, offset=0),
    "no window at all": masks.window(-1, -1, offset=0),
    "sinks": masks.causal("upper_left") & (masks.window(4, 0, align="upper_left") | masks.sinks(2)),
    "padding": masks.padding(torch.tensor([S, 10])),
    "nothing in one": masks.padding(torch.tensor([0, 17])),
    "per query": masks.padding(normal(B, L).mul(9).abs().long()),
    "keep": masks.key_padding(normal(B, S) > 0),
    "documents": masks.document(IDS, KEY_IDS),
    "prefix": masks.causal("upper_left") | masks.prefix(torch.tensor([4, 20])),
    "dilated": masks.dilated(3, align="upper_left"),
    "not": ~masks.window(3, 3, align="upper_left"),
    "nothing": ~masks.everything(),
    "everything": masks.everything(),
    "function": odd,
    "alibi": masks.alibi(normal(H).abs(), align="upper_left"),
    "alibi and causal": masks.alibi(normal(H).abs(), align="upper_left") & masks.causal("upper_left"),
    "biased padding": masks.padding(torch.tensor([20, 3])) & masks.dense(normal(H, L, S)),
    "dense": normal(L, S) > 0,
    "dense for all": normal(B, H, L, S) > 0,
    "dense float": normal(H, L, S).masked_fill(normal(L, S) > 1, -torch.inf),
    "dense keys": normal(B, 1, 1, S) > 0,
    "and": masks.key_padding(normal(B, S) > -1) & masks.as_mask(odd) & masks.causal("lower_right"),
}

SIZES = [(4, 3, 2, 2), (1, 1, 1, 1), (7, 5, 2, 1), (128, 128, 4, 16), (5, 2, 99, 3), (6, 4, 1, 99)]


@pytest.mark.parametrize("name", MASKS)
def test_against_float64(name: str, small_strips: Callable[..., None]) -> None:
    leaves = inputs(B, H, H, L, S)
    right = oracle(leaves, attn_mask=MASKS[name])
    for sizes in SIZES[:1] if name == "per query" else SIZES:
        small_strips(*sizes)
        check(run(leaves, attn_mask=MASKS[name], engine="sdpa"), right)


@pytest.mark.parametrize("G", [1, 2])
@pytest.mark.parametrize("name", ["causal", "window", "documents", "alibi", "dense keys", "dense", "function"])
def test_grouped_queries(name: str, G: int, small_strips: Callable[..., None]) -> None:
    small_strips()
    leaves = inputs(B, H, G, L, S)
    named = {"attn_mask": MASKS[name], "enable_gqa": True}
    check(run(leaves, **named, engine="sdpa"), oracle(leaves, **named))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["window", "sinks", "alibi and causal", "nothing in one", "dense float"])
def test_narrow_dtypes(name: str, dtype: torch.dtype, small_strips: Callable[..., None]) -> None:
    small_strips()
    leaves = inputs(B, H, H, L, S, dtype=dtype)
    found = run(leaves, attn_mask=MASKS[name], engine="sdpa")
    assert {t.dtype for t in found} == {dtype}
    check(found, oracle(leaves, attn_mask=MASKS[name]), 2.5e-2 if dtype == torch.bfloat16 else 3e-3)


@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0])
@pytest.mark.parametrize("name", ["causal", "window", "dense", "alibi", "padding", "not"])
def test_scales_of_any_sign(name: str, scale: float, small_strips: Callable[..., None]) -> None:
    small_strips()
    leaves = inputs(B, H, H, L, S)
    check(
        run(leaves, attn_mask=MASKS[name], scale=scale, engine="sdpa"),
        oracle(leaves, attn_mask=MASKS[name], scale=scale),
    )


@pytest.mark.parametrize("score", ["cosine", "dot", "gaussian", "constant"])
@pytest.mark.parametrize("name", ["window", "nothing in one", "dense keys"])
def test_other_dot_products(name: str, score: str, small_strips: Callable[..., None]) -> None:
    small_strips()
    leaves = inputs(B, H, H, L, S)
    named = {"attn_mask": MASKS[name], "score": score}
    check(run(leaves, **named, engine="sdpa"), oracle(leaves, **named), 5e-5)


def strided(tensor: Tensor, how: str) -> Tensor:
    tensor = tensor.detach()
    if how == "transposed":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    return torch.stack((tensor, -tensor), -1)[..., 0].requires_grad_()


@pytest.mark.parametrize("how", ["transposed", "every other feature"])
@pytest.mark.parametrize("name", ["causal", "window", "documents", "dense"])
def test_layouts(name: str, how: str, small_strips: Callable[..., None]) -> None:
    small_strips()
    plain = inputs(B, H, H, L, S, V=8)
    leaves = [strided(t, how) for t in plain]
    assert not leaves[1].is_contiguous()
    check(run(leaves, attn_mask=MASKS[name], engine="sdpa"), oracle(plain, attn_mask=MASKS[name]))


def test_the_value_may_be_wider_or_narrower_than_the_key(small_strips: Callable[..., None]) -> None:
    small_strips()
    for V in (0, 1, 3, 19):
        leaves = inputs(B, H, H, L, S, V=V)
        for name in ("window", "causal", "dense"):
            check(run(leaves, attn_mask=MASKS[name], engine="sdpa"), oracle(leaves, attn_mask=MASKS[name]))


def test_large_scores_merge(small_strips: Callable[..., None]) -> None:
    small_strips()
    query, key, value = inputs(B, H, H, L, S)
    leaves = [(query * 1e3).detach().requires_grad_(), (key * 1e3).detach().requires_grad_(), value]
    found = run(leaves, attn_mask=MASKS["sinks"], engine="sdpa")
    assert all(t.isfinite().all() for t in found)
    check(found[:1], oracle(leaves, attn_mask=MASKS["sinks"])[:1], 1e-4)


def test_strips_cover_what_is_visible_and_no_more(small_strips: Callable[..., None]) -> None:
    small_strips(4, 3, 2, 2)
    extent = masks.Extent(B, H, L, S)
    for name, mask in MASKS.items():
        bound = masks.as_mask(mask).bind(extent, "cpu")
        b, h = torch.arange(B).view(-1, 1, 1, 1), torch.arange(H).view(-1, 1, 1)
        visible = bound(b, h, torch.arange(L).unsqueeze(1), torch.arange(S))
        reached = torch.zeros_like(visible, dtype=torch.long)
        for strip in query_blocks.cut_queries(bound, extent):
            for part in strip.ranges:
                reached[(*strip.where, strip.rows.slice, part.cols.slice)] += 1
                if not part.masked:
                    assert visible[(*strip.where, strip.rows.slice, part.cols.slice)].all(), name
                else:
                    assert part.cols.stop - part.cols.start <= 2 * 3, name
        assert reached.max() <= 1, name
        assert not (visible & (reached == 0)).any(), name


def test_no_kernel_call_spans_what_a_window_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = 0
    kernel = query_blocks.flash_attention

    def counted(query: Tensor, key: Tensor, *rest: Any, **named: Any) -> Any:
        nonlocal pairs
        pairs += query.shape[2] * key.shape[2]
        return kernel(query, key, *rest, **named)

    monkeypatch.setattr(query_blocks, "flash_attention", counted)
    query = normal(1, 1, 4096, 8)
    regard.attention(query, query, query, masks.window(64, 0), engine="sdpa")
    assert pairs <= 4096 * (query_blocks.ROWS + 64 + query_blocks.BLOCK)


# What is not finite ---------------------------------------------------------------------------------------------------

BAD = [torch.nan, torch.inf, -torch.inf]
HIDING = ["causal", "window", "padding", "keep", "documents", "dense", "dense keys", "alibi and causal", "function"]


def spoiled(leaves: list[Tensor], bad: Tensor, which: str, number: float) -> list[Tensor]:
    """Return the leaves with a bad number at the keys ``bad`` (B, S), in one feature of key or value."""
    twins = [t.detach().clone() for t in leaves]
    twins[{"key": 1, "value": 2}[which]][..., 0].masked_fill_(bad[:, None], number)
    return [t.requires_grad_() for t in twins]


def visible_to(mask: Any) -> Tensor:
    """Return (B, H, L, S)."""
    bound = masks.as_mask(mask).bind(masks.Extent(B, H, L, S), "cpu")
    b, h = torch.arange(B).view(-1, 1, 1, 1), torch.arange(H).view(-1, 1, 1)
    return bound(b, h, torch.arange(L).unsqueeze(1), torch.arange(S))


@pytest.mark.campaign(keep=14)
@across({"name": HIDING, "engine": ["sdpa", "streaming", "reference"], "which": ["key", "value"]})
def test_what_nobody_sees_changes_nothing(
    name: str, engine: str, which: str, small_strips: Callable[..., None], small_tiles: Callable[..., None]
) -> None:
    small_strips()
    small_tiles()
    mask = masks.as_mask(MASKS[name]) & masks.key_padding(normal(B, S, seed=3) > -1)
    bad = ~visible_to(mask).any(2).any(1)
    assert bad.any()
    clean = inputs(B, H, H, L, S)
    right = run(clean, attn_mask=mask, engine=engine)
    for number in BAD:
        leaves = spoiled(clean, bad, which, number)
        for a, b in zip(run(leaves, attn_mask=mask, engine=engine), right, strict=True):
            assert torch.equal(a, b)
        with torch.no_grad():
            assert torch.equal(regard.attention(*leaves, attn_mask=mask, engine=engine), right[0])


@across({"name": HIDING, "engine": ["sdpa", "streaming", "reference"], "which": ["key", "value"]})
def test_what_some_see_shows_in_exactly_their_rows(
    name: str, engine: str, which: str, small_strips: Callable[..., None], small_tiles: Callable[..., None]
) -> None:
    small_strips()
    small_tiles()
    mask = MASKS[name]
    visible = visible_to(mask)
    bad = torch.zeros(B, S, dtype=torch.bool)
    bad[:, (visible.float().mean((0, 1, 2)) - 0.5).abs().argmin()] = True  # the key that divides the rows best
    sees = (visible & bad[:, None, None]).any(-1)
    assert 0 < sees.sum() < sees.numel()
    clean = inputs(B, H, H, L, S)
    right = run(clean, attn_mask=mask, engine=engine)[0]
    for number in BAD[: 1 if which == "key" else 3]:
        leaves = spoiled(clean, bad, which, number)
        for grads in (True, False):
            with torch.set_grad_enabled(grads):
                output = regard.attention(*leaves, attn_mask=mask, engine=engine)
            # (an infinite value may meet a weight that rounds to 0: that is not finite either)
            told = output[..., 0] if which == "value" else output
            finite = told.isfinite() if which == "value" else told.isfinite().all(-1)
            assert torch.equal(~finite, sees), (number, grads)
            torch.testing.assert_close(output[~sees].detach(), right[~sees], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("engine", ["sdpa", "streaming", "reference"])
def test_a_bad_query_spoils_its_own_row_alone(engine: str, small_strips: Callable[..., None]) -> None:
    small_strips()
    for name in ("causal", "window", "dense", "documents"):
        query, key, value = inputs(B, H, H, L, S)
        right = regard.attention(query, key, value, MASKS[name], engine=engine)
        query = query.detach().clone()
        query[:, :, 7, 0] = torch.nan
        for grads in (True, False):
            leaves = [t.detach().clone().requires_grad_(grads) for t in (query, key, value)]
            output = regard.attention(*leaves, MASKS[name], engine=engine)
            others = torch.arange(L) != 7
            torch.testing.assert_close(output[:, :, others], right[:, :, others], rtol=1e-5, atol=1e-5)
            blind = ~visible_to(MASKS[name]).any(-1)[:, :, 7]
            assert torch.equal(output[:, :, 7].isnan().all(-1), ~blind)


def test_decoding_pays_no_second_pass_over_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> None:
        raise AssertionError("the cache was read a second time")

    query, key, value = (t.detach() for t in inputs(B, H, H, 1, S))
    offset = torch.tensor([12, 28])
    right = regard.attention(query, key, value, masks.causal(offset=offset), engine="reference")
    monkeypatch.setattr(nonfinite, "zeroed", forbidden)
    monkeypatch.setattr(nonfinite, "is_visible", forbidden)
    monkeypatch.setattr(module.dense, "needs_care", forbidden)
    for engine in ("sdpa", "fused"):
        found = regard.attention(query, key, value, masks.causal(offset=offset), engine=engine)
        torch.testing.assert_close(found, right)


def test_auto_is_not_slower_than_it_says(small_strips: Callable[..., None]) -> None:
    small_strips()
    query = normal(1, 2, 64, 8)
    share = (
        regard.explain(query, query, query, masks.window(4, 0)).cost.flops
        / regard.explain(query, query, query).cost.flops
    )
    assert share < 0.3


def test_sizes_of_strips_are_no_sizes_of_tiles() -> None:
    assert query_blocks.ROWS % query_blocks.BLOCK == 0
    assert tiles.TILE_SIZE >= query_blocks.ROWS * query_blocks.BLOCK


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ranges_of_keys_merge_under_biases_far_from_zero(dtype: torch.dtype) -> None:
    """A bias of −1e9 on all that a row sees leaves its log-sum-exp no digit to tell one range of keys from another."""
    made = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 700, 8, generator=made, dtype=dtype).unbind(0)
    mask = masks.causal() & masks.dense(torch.full((700, 1), -1e9, dtype=dtype))
    with tiny_tiles(128, 128):
        found = regard.attention(torch.zeros_like(q), k, v, mask, engine="sdpa")
    mean = v.cumsum(2) / torch.arange(1, 701, dtype=dtype).unsqueeze(1)
    torch.testing.assert_close(found, mean)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_of_the_kernel_is_right_or_nan_or_lost_as_a_whole(dtype: torch.dtype) -> None:
    """Within one block of keys, a masked score that is not finite loses all of a row or nothing: its lse is then 0."""
    draw = torch.Generator().manual_seed(4)
    lost = 0
    for trial in range(300):
        rows, cols, width = (int(torch.randint(*ends, (1,), generator=draw)) for ends in ((1, 90), (2, 513), (1, 20)))
        query, key, value = (torch.randn(1, 2, n, width, generator=draw, dtype=dtype) for n in (rows, cols, cols))
        bad = torch.rand(cols, generator=draw) < 2 / cols
        largest = torch.finfo(dtype).max
        key[:, :, bad] = torch.tensor([torch.inf, -torch.inf, torch.nan, largest], dtype=dtype)[trial % 4]
        hidden = (torch.rand(rows, cols, generator=draw) < (trial % 10) / 10) | bad
        causal = trial % 3 == 0
        added = torch.where(hidden, -torch.inf, torch.randn(rows, cols, generator=draw, dtype=dtype))[None, None]
        output, lse = flash.kernel(query, key, value, 0.0, causal, attn_mask=added, scale=2.0)
        if causal:
            hidden = hidden | torch.ones(rows, cols, dtype=torch.bool).triu(1)
        scores = 2 * query.double() @ key.double().mT + added.double()
        weights = torch.softmax(torch.where(hidden, -torch.inf, scores), -1).masked_fill(hidden, 0.0)
        right = torch.where(hidden.all(-1, keepdim=True), 0.0, weights.nan_to_num() @ value.double())
        suspect = output.isnan().any(-1) | (lse == 0)
        lost += int((suspect & ~hidden.all(-1)).sum())
        torch.testing.assert_close(output[~suspect], right[~suspect].to(dtype), atol=1e-4, rtol=1e-4)
        found, _ = flash.flash_attention(query, key, value, causal, added, 2.0)
        assert bool(found.isnan().any(-1)[suspect & ~hidden.all(-1)].all())
    assert lost > 100


def test_large_biases_under_the_causal_mask_have_the_gradients_of_the_definition() -> None:
    query, key, value = (normal(1, 2, 70, 8, dtype=torch.float64).requires_grad_() for _ in range(3))
    bias = torch.where(torch.arange(70) % 7 < 3, -1e18, 0.0).double().view(1, 1, 70)
    bias[..., :5] = -1e18
    mask = masks.dense(bias) & masks.causal()
    found = torch.autograd.grad(regard.attention(query, key, value, mask).square().sum(), (query, key, value))
    output = regard.attention(query, key, value, mask, engine="reference")
    expected = torch.autograd.grad(output.square().sum(), (query, key, value))
    for each, right in zip(found, expected):
        torch.testing.assert_close(each, right, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", MASKS)
def test_the_log_sum_exp_alone_under_a_causal_mask_and_another(name: str) -> None:
    """Asked for alone, it comes from the kernel, where other fields bring a pass of their own."""
    given, mask = inputs(), masks.causal("upper_left") & masks.as_mask(MASKS[name])
    output, aux = regard.attention(*given, mask, engine="sdpa", return_aux=regard.AuxRequest(lse=True))
    right, known = regard.attention(*given, mask, engine="reference", return_aux=regard.AuxRequest(lse=True))
    torch.testing.assert_close(aux.lse, known.lse, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(output, right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("mask", [None, masks.causal(), masks.padding(torch.tensor([64, 3, 9, 40, 64, 1, 2, 7]))])
def test_16_bit_gradients_on_a_cpu_are_computed_in_float32(mask: masks.Mask | None, autocast: bool) -> None:
    dtype = torch.float32 if autocast else torch.bfloat16
    leaves = torch.randn(3, 8, 8, 64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    query, key, value = (leaf.to(dtype).requires_grad_() for leaf in leaves)
    wide = [leaf.float().requires_grad_() for leaf in leaves]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = regard.attention(query, key, value, mask, engine="sdpa")
    assert output.dtype == torch.bfloat16
    right = regard.attention(*wide, mask, engine="sdpa")
    assert torch.equal(output, right.bfloat16())
    slope = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = torch.autograd.grad(output, (query, key, value), slope)
    for ours, theirs in zip(found, torch.autograd.grad(right, wide, slope.float())):
        assert torch.equal(ours.bfloat16(), theirs.bfloat16())
