"""Calls from several threads, and calls that are broken off: neither leaves a trace in another call."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from engine_calls import inputs, normal, run
from torch import Tensor

import regard
from regard import AuxRequest, masks, scores

CALLS: list[dict[str, Any]] = [
    {},
    {"is_causal": True},
    {"attn_mask": masks.window(3, 0, offset=0)},
    {"attn_mask": masks.padding(torch.tensor([29, 3])), "engine": "streaming"},
    {"normalizer": "sparsemax"},
    {"score": scores.Additive(normal(8))},
    {"score": "gaussian"},
    {"engine": "reference", "softcap": 2.0},
]


@pytest.mark.slow
def test_threads_get_the_bits_that_a_single_one_gets(
    small_tiles: Callable[..., None], small_strips: Callable[..., None]
) -> None:
    small_tiles(600)
    small_strips()
    request = AuxRequest(lse=True, entropy=True, topk=2, received=True)

    def one(job: int) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in inputs()]
        named = CALLS[job % len(CALLS)]
        with torch.no_grad():
            aux = regard.attention(*leaves, **named, return_aux=request)[1]
        return [*run(leaves, **named), aux.lse, aux.entropy, aux.received, aux.topk.weights, aux.topk.indices]

    serial = [one(job) for job in range(len(CALLS))]
    with ThreadPoolExecutor(4) as pool:
        for job, found in enumerate(pool.map(one, range(3 * len(CALLS)))):
            for a, b in zip(found, serial[job % len(CALLS)], strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_call_that_is_broken_off_leaves_no_trace(
    where: str, error: type[BaseException], small_tiles: Callable[..., None]
) -> None:
    small_tiles()
    armed, calls = False, 0

    def break_off(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        nonlocal calls
        if armed:
            calls += 1
            if calls == 5:
                raise error
        return score - (q_idx - kv_idx).abs()

    leaves = inputs()
    before = run(leaves, score=break_off, engine="streaming")
    state = torch.get_rng_state(), torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", enabled=False):
        if where == "forward":
            armed = True
            with pytest.raises(error):
                regard.attention(*leaves, score=break_off, engine="streaming")
        else:
            output = regard.attention(*leaves, score=break_off, engine="streaming")
            armed = True
            with pytest.raises(error):
                output.sum().backward()
            assert all(leaf.grad is None for leaf in leaves)
    after = torch.get_rng_state(), torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_autocast_enabled("cpu")
    assert torch.equal(state[0], after[0])
    assert state[1:] == after[1:]
    armed = False
    for a, b in zip(run(leaves, score=break_off, engine="streaming"), before, strict=True):
        assert torch.equal(a, b)


def test_broken_off_under_autocast_leaves_autocast_on() -> None:
    def break_off(score: Tensor, *_: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):  # the check before the run
            return score
        raise KeyboardInterrupt

    query = normal(1, 2, 9, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(KeyboardInterrupt):
            regard.attention(query, query, query, score=break_off)
        assert torch.is_autocast_enabled("cpu")
        assert regard.attention(query, query, query).dtype == torch.bfloat16
