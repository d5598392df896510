"""A cache for beams: the rows that a cache for each beam would give, whichever beams go on from which."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from regard.inspect import capture
from regard.nn import KVCache, MultiheadAttention, Rotary
from regard_lab.models.beam_cache import BeamCache

E = 8


def layer(**options: Any) -> MultiheadAttention:
    torch.manual_seed(0)
    return MultiheadAttention(E, 2, batch_first=True, **{"dtype": torch.float64} | options).eval()


def written(attend: MultiheadAttention, x: torch.Tensor, cache: BeamCache | KVCache) -> torch.Tensor:
    return attend(x, x, x, need_weights=False, is_causal=True, cache=cache)[0]


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    steps=st.integers(1, 20),
    options=st.sampled_from(
        [{}, {"num_kv_heads": 1}, {"score": "cosine"}, {"normalizer": "sparsemax"}, {"dtype": torch.float32}]
    ),
    learns=st.booleans(),
)
def test_it_is_a_cache_of_every_beam(seed: int, steps: int, options: dict[str, Any], learns: bool) -> None:
    torch.manual_seed(seed)
    attend = layer(rotary=Rotary(4), **options)
    beams, own = BeamCache(), KVCache()
    count = int(torch.randint(1, 9, ()))
    with torch.set_grad_enabled(learns):
        for step in range(steps):
            if step:
                rows = torch.randint(count, (int(torch.randint(1, 9, ())),))
                beams.reorder(rows)
                own.reorder(rows)
                count = len(rows)
            x = torch.randn(count, 1, E, dtype=options.get("dtype", torch.float64))
            torch.testing.assert_close(written(attend, x, beams), written(attend, x, own))
    assert len(beams) == steps


def test_gradients_are_those_of_a_cache_of_every_beam() -> None:
    attend, x, rows = layer(), torch.randn(3, 4, 1, E, dtype=torch.float64), torch.tensor([1, 1, 0, 3])
    found = []
    for cache in (BeamCache(), KVCache()):
        attend.zero_grad()
        total = 0
        for t, each in enumerate(x):
            if t:
                cache.reorder(rows)
            total = total + written(attend, each, cache).square().sum()
        total.backward()
        found.append([each.grad.clone() for each in attend.parameters()])
    for ours, theirs in zip(*found):
        torch.testing.assert_close(ours, theirs)


@torch.no_grad()
def test_what_no_beam_comes_from_is_dropped() -> None:
    attend, cache, all_from_one = layer(), BeamCache(), torch.tensor([2] * 4 + [5] * 4)
    for step in range(60):
        if step:
            cache.reorder(all_from_one)
        written(attend, torch.randn(8, 1, E, dtype=torch.float64), cache)
    assert len(cache.rows.key) < 2 * 2 * 60 + 16 * 8 + 8
    assert cache.rows.table.shape == (8, 60)


@torch.no_grad()
def test_two_searches_go_on_from_one_state() -> None:
    attend, cache = layer(), BeamCache()
    written(attend, torch.randn(4, 1, E, dtype=torch.float64), cache)
    twins = [copy.copy(cache) for _ in range(2)]
    for twin, rows in zip(twins, ([0, 1, 2, 3], [1, 0, 3, 3])):
        twin.reorder(torch.tensor(rows))
    ends = [torch.randn(4, 1, E, dtype=torch.float64) for _ in twins]
    first = written(attend, ends[0], copy.copy(twins[0]))
    written(attend, ends[1], twins[1])
    assert torch.equal(written(attend, ends[0], twins[0]), first)
    assert len(cache) == 1


@torch.no_grad()
def test_steps_are_forgotten() -> None:
    attend, cache = layer(), BeamCache()
    steps = torch.randn(3, 2, 1, E, dtype=torch.float64)
    outputs = [written(attend, each, cache) for each in steps]
    cache.truncate(1)
    torch.testing.assert_close(written(attend, steps[1], cache), outputs[1])
    cache.truncate(0)
    torch.testing.assert_close(written(attend, steps[0], cache), outputs[0])
    with pytest.raises(ValueError, match=r"BeamCache: length must be at most 1, got 2\."):
        cache.truncate(2)


@torch.no_grad()
def test_half_precision_is_read() -> None:
    attend, beams, own = layer(dtype=torch.bfloat16), BeamCache(), KVCache()
    for x in torch.randn(4, 3, 1, E, dtype=torch.bfloat16):
        made = written(attend, x, beams)
        assert made.dtype == torch.bfloat16
        torch.testing.assert_close(made, written(attend, x, own), rtol=0.05, atol=0.02)


@torch.no_grad()
def test_whoever_watches_sees_every_call() -> None:
    attend, cache = layer(), BeamCache()
    x = torch.randn(3, 1, E, dtype=torch.float64)
    alone = written(attend, x, copy.copy(cache))
    with capture(attend) as record:
        torch.testing.assert_close(written(attend, x, cache), alone)
    assert len(record) == 1
    assert record[0].shape[-1] == 1


@torch.no_grad()
def test_what_is_refused() -> None:
    attend, cache = layer(), BeamCache()
    x = torch.randn(4, 1, E, dtype=torch.float64)
    refused = (
        r"cache must be a KVCache for calls with masks, several steps, other keys, or returned weights, got a Beam"
    )
    two = torch.randn(4, 2, E, dtype=torch.float64)
    for given_, options in (
        (x, {"need_weights": True}),
        (x, {"key_padding_mask": torch.zeros(4, 1, dtype=torch.bool), "need_weights": False}),
        (two, {"need_weights": False}),
    ):
        with pytest.raises(ValueError, match=refused):
            attend(given_, given_, given_, cache=cache, **options)
    written(attend, x, cache)
    with pytest.raises(ValueError, match=r"BeamCache: key must be a step of its 4 rows, got one of 3"):
        written(attend, x[:3], cache)
    assert len(cache) == 1
