"""Memory in O(L + S): what is kept for the backward pass, and the largest tensor that is ever made."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_calls import normal
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import regard
from regard import AuxRequest, masks, scores
from regard.engines import tiles
from regard.engines.fused import pages

E = 8
TILE = 1 << 12  # a tile of a problem with one head is 64x64

MASKS: dict[str, Callable[[int], Any]] = {
    "causal": lambda L: masks.causal(),
    "window": lambda L: masks.window(16, 0),
    "padding": lambda L: masks.padding(torch.tensor([L - 3])),
    "keep": lambda L: masks.key_padding(normal(1, L) > 0),
    "documents": lambda L: masks.document(torch.arange(L).unsqueeze(0) // 100),
    "alibi": lambda L: masks.alibi(torch.ones(1)) & masks.causal(),
    "sinks": lambda L: masks.causal() & (masks.window(16, 0) | masks.sinks(4)),
    "dense keys": lambda L: normal(1, L) > 0,
    "function": lambda L: lambda b, h, q_idx, kv_idx: (q_idx + kv_idx) % 3 > 0,
}

CALLS: dict[str, Callable[[int], dict[str, Any]]] = {
    "plain": lambda L: {},
    "no scale": lambda L: {"scale": 0.0, "is_causal": True},
    "streaming": lambda L: {"engine": "streaming"},
    "additive": lambda L: {"score": scores.Additive(normal(E))},
    "gaussian": lambda L: {"score": "gaussian"},
    "gaussian streaming": lambda L: {"score": "gaussian", "engine": "streaming"},
    "laplacian": lambda L: {"score": "laplacian"},
    "epanechnikov": lambda L: {"score": scores.Epanechnikov(5.0)},
    "score_mod": lambda L: {"score": lambda s, b, h, q_idx, kv_idx: s - (q_idx - kv_idx).abs()},
    "sparsemax": lambda L: {"normalizer": "sparsemax"},
    "sigmoid": lambda L: {"normalizer": "sigmoid"},
    "argmax": lambda L: {"normalizer": "argmax"},
    "softcap": lambda L: {"softcap": 2.0},
    "dropout": lambda L: {"dropout_p": 0.3, "engine": "streaming"},
    "dropout and padding": lambda L: {"dropout_p": 0.3, "attn_mask": masks.padding(torch.tensor([L - 3]))},
    **{f"sdpa {name}": lambda L, m=mask: {"attn_mask": m(L), "engine": "sdpa"} for name, mask in MASKS.items()},
    **{f"tiles {name}": lambda L, m=mask: {"attn_mask": m(L), "engine": "streaming"} for name, mask in MASKS.items()},
}


class Largest(TorchDispatchMode):
    """Records the most elements that a tensor's storage has, over every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


def leaf(L: int) -> Tensor:
    return normal(1, 1, L, E).requires_grad_()


def largest(L: int, made: dict[str, Any], aux: AuxRequest | None = None) -> int:
    """Return the largest tensor of a forward and backward pass, and check what autograd keeps."""
    x, kept = leaf(L), 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept = max(kept, tensor.untyped_storage().nbytes() // tensor.element_size())
        return tensor

    with Largest() as seen:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            output = regard.attention(x, x, x, **made, return_aux=aux)
        output = output if aux is None else output[0]
        output.sum().backward()
    assert 0 < kept <= L * (E + 1), f"{kept} numbers are kept of {L} rows"
    assert x.grad is not None
    return seen.elements


@pytest.fixture(autouse=True)
def tiles_of_a_few_thousand_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE_SIZE", TILE)


def bound(L: int) -> int:
    """Return what may be held at once: inputs with an extra feature or mark each, a tile, a strip's mask."""
    strip = 128 * min(16 * 128, L)
    return max(4 * L * (E + 1), 2 * TILE, strip)


#: Calls whose tiles are small, because a pair takes many numbers, or are swept many times.
SLOW = ("epanechnikov", "gaussian streaming", "additive", "sparsemax", "argmax")


def lengths(call: str) -> tuple[int, int]:
    """Return two lengths past those for which a mask is a matrix, which has a bounded size."""
    return (128, 256) if call in SLOW else (512, 1024) if call.startswith("sdpa") else (256, 512)


@pytest.mark.campaign(keep=16)
@pytest.mark.parametrize("call", CALLS)
def test_nothing_grows_with_both_lengths(call: str) -> None:
    short, long = lengths(call)
    at_short, at_long = (largest(L, CALLS[call](L)) for L in (short, long))
    assert at_long <= bound(long)
    assert at_long <= max(2 * at_short, 2 * TILE), "doubling both lengths may double what is held, not more"


@pytest.mark.campaign(keep=15)
@pytest.mark.parametrize("asked", [{"lse": True}, {"max": True}, {"entropy": True}, {"received": True}, {"topk": 3}])
@pytest.mark.parametrize("call", ["plain", "sdpa causal", "sdpa padding", "sdpa alibi", "additive", "argmax"])
def test_nor_does_what_is_asked_beside(call: str, asked: dict[str, Any]) -> None:
    short, long = lengths(call)
    at_short, at_long = (largest(L, CALLS[call](L), AuxRequest(**asked)) for L in (short, long))
    assert at_long <= bound(long) + 4 * TILE
    assert at_long <= max(2 * at_short, 4 * TILE)


def test_a_dispatch_mode_sees_what_does_grow() -> None:
    x = leaf(512)
    with Largest() as seen:
        regard.attention(x, x, x, engine="reference")
    assert seen.elements >= 512 * 512


def test_sparsemax_asked_for_its_topk() -> None:
    made = {"normalizer": "sparsemax"}
    at_short, at_long = (largest(L, made, AuxRequest(topk=2, received=True)) for L in (128, 256))
    assert at_long <= max(2 * at_short, 8 * TILE)


@pytest.mark.parametrize("score", ["scaled_dot", "gaussian"])
@pytest.mark.parametrize("hidden", ["nothing", "window", "some"])
def test_a_bias_of_pairs_costs_its_own_size_and_not_that_of_all_scores(score: str, hidden: str) -> None:
    B, H, L = 6, 2, 256
    x, bias = normal(B, H, L, E).requires_grad_(), normal(H, L, L)
    if hidden == "some":
        bias = bias.masked_fill(normal(L, L, seed=1) > 1, -torch.inf)
    mask = masks.dense(bias.unsqueeze(0).requires_grad_())
    with Largest() as seen:
        regard.attention(
            x, x, x, mask & masks.window(40, 9) if hidden == "window" else mask, score=score
        ).sum().backward()
    assert seen.elements <= H * L * L


def test_every_layout_gets_the_kernel_that_does_not_grow() -> None:
    x = torch.stack((leaf(512), leaf(512)), -1)[..., 0]
    assert x.stride(-1) != 1
    for named in ({}, {"is_causal": True}, {"attn_mask": masks.window(4, 0)}, {"scale": 0.5}):
        with Largest() as seen:
            regard.attention(x, x, x, **named)
        assert seen.elements < 512 * 512 // 2, named


def test_what_is_not_finite_is_looked_at_row_by_row() -> None:
    x = leaf(1024).detach()
    x[0, 0, 5] = torch.nan
    with Largest() as seen:
        output = regard.attention(x, x, x, masks.window(4, 0), engine="sdpa")
    assert output.isnan().any(-1).sum() == 5
    assert seen.elements <= 128 * 1024


@pytest.mark.parametrize("name", ["causal", "window", "padding", "documents", "function"])
def test_nor_under_a_transform(name: str) -> None:
    def held(L: int) -> int:
        many = normal(3, 1, 1, L, E)
        with Largest() as seen:
            torch.func.vmap(lambda x: regard.attention(x, x, x, MASKS[name](L)))(many)
        return seen.elements

    assert held(1024) <= 2 * held(512)


@pytest.mark.parametrize("known", [True, False])
def test_large_pages_change_no_number(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the system has pages of one size."""
    pages._advise.cache_clear()
    if not known:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    for count in (0, 1, pages._LARGE // 4, pages._LARGE // 4 + 1):
        array = torch.empty(count)
        assert pages.in_large_pages(array) is array
        assert bool((array.fill_(1.5) == 1.5).all())
    pages._advise.cache_clear()
