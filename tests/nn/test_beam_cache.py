"""A cache for beams: the rows that a cache for each beam would give, whichever beams go on from which."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.nn import BeamCache, KVCache, MultiheadAttention, Rotary
from regard.nn.beam_cache import continued

E = 8


def layer(**options: object) -> MultiheadAttention:
    torch.manual_seed(0)
    return MultiheadAttention(E, 2, batch_first=True, dtype=torch.float64, **options).eval()  # type: ignore[arg-type]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 4), st.integers(1, 14), st.booleans(), st.booleans())
def test_it_is_a_cache_of_every_beam(
    seed: int, sequences: int, beams: int, steps: int, grouped: bool, learns: bool
) -> None:
    torch.manual_seed(seed)
    attend = layer(rotary=Rotary(4), **({"num_kv_heads": 1} if grouped else {}))
    shared, own, rows, count = BeamCache(), KVCache(), None, sequences
    with torch.set_grad_enabled(learns):
        for step in range(steps):
            shared = continued(shared, step, rows, count)
            if rows is not None:
                own.reorder(rows)
            wide = beams if step else 1  # beams are alike at first
            x = torch.randn(count * wide, 1, E, dtype=torch.float64)
            ours, theirs = (attend(x, x, x, need_weights=False, is_causal=True, cache=c)[0] for c in (shared, own))
            torch.testing.assert_close(ours, theirs)
            kept = torch.randperm(count)[: int(torch.randint(1, count + 1, ()))].sort().values  # others have ended
            rows = (kept[:, None] * wide + torch.randint(wide, (len(kept), beams))).flatten()
            count = len(kept)
    assert len(shared) == steps


@torch.no_grad()
def test_what_no_beam_comes_from_is_dropped() -> None:
    attend, cache, all_from_one = layer(), BeamCache(), torch.tensor([2] * 4 + [5] * 4)
    for step in range(40):
        cache = continued(cache, step, all_from_one if step else None, 2)
        x = torch.randn(8, 1, E, dtype=torch.float64)
        attend(x, x, x, need_weights=False, cache=cache)
    keys, _, mask = continued(cache, 40, all_from_one, 2).append(*(torch.randn(8, 2, 1, 4) for _ in range(2)))
    assert keys.shape[2] < 2 * 40 + 8 and mask is not None and mask.shape == (2, 1, 4, keys.shape[2])
    assert (mask == 0).sum(-1).eq(41).all()


@torch.no_grad()
def test_two_searches_go_on_from_one_state() -> None:
    attend, cache = layer(), BeamCache()
    x = torch.randn(4, 1, E, dtype=torch.float64)
    cache.reorder(None, 2)
    attend(x, x, x, need_weights=False, cache=cache)
    twins = [continued(cache, 1, torch.tensor(rows), 2) for rows in ([0, 1, 2, 3], [1, 0, 3, 3])]
    ends = [torch.randn(4, 1, E, dtype=torch.float64) for _ in twins]
    first = attend(ends[0], ends[0], ends[0], need_weights=False, cache=copy.copy(twins[0]))[0]
    attend(ends[1], ends[1], ends[1], need_weights=False, cache=twins[1])
    again = attend(ends[0], ends[0], ends[0], need_weights=False, cache=twins[0])[0]
    torch.testing.assert_close(again, first, rtol=0, atol=0)


@torch.no_grad()
def test_what_is_refused() -> None:
    attend, cache = layer(), BeamCache()
    x = torch.randn(4, 1, E, dtype=torch.float64)
    with pytest.raises(ValueError, match="be a step of the beams of 0 sequences"):
        attend(x, x, x, need_weights=False, cache=cache)
    cache.reorder(None, 2)
    with pytest.raises(ValueError, match="cache must be a KVCache where there are masks, got a BeamCache"):
        attend(x, x, x, torch.zeros(4, 1, dtype=torch.bool), need_weights=False, cache=cache)
    attend(x, x, x, need_weights=False, cache=cache)
    with pytest.raises(ValueError, match="index must have a sequence's beams together"):
        cache.reorder(torch.tensor([0, 2, 1, 3]), 2)
    cache.reorder(torch.tensor([0, 0, 2, 3]), 2)
    attend(x, x, x, need_weights=False, cache=cache)
    cache.reorder(torch.tensor([0, 0, 2, 3]), 2)
    with pytest.raises(ValueError, match="length must be at most 2, and not before a reordering, got 1"):
        cache.truncate(1)
