"""Caches that slide over a window give what all keys under the window's mask give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from language_models import KINDS, small_model

from regard.nn import KVCache

CHUNKS = ([20], [1] * 20, [3] * 6 + [2], [9, 1, 1, 5, 4], [1, 12, 1, 1, 5])


@pytest.mark.campaign(keep=24)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
@torch.no_grad()
def test_a_sliding_cache_gives_what_the_full_one_gives(kind: dict[str, Any], chunks: list[int]) -> None:
    model, tokens = small_model(**kind), torch.randint(50, (2, 20))
    caches = model.caches(sliding=True)
    made = torch.cat([model(part, caches=caches) for part in tokens.split(chunks, 1)], 1)
    torch.testing.assert_close(made, model(tokens), rtol=1e-4, atol=1e-4)
    assert len(caches[0]) == 20
    if model.slides:
        assert caches[0].key.shape[2] == kind["window"] + kind["sinks"]


@torch.no_grad()
def test_a_window_takes_no_more_memory_than_it_shows() -> None:
    cache = KVCache(window=4, sinks=1)
    for length in (3, 1, 1, 1, 9, 1):
        key, value = cache.append(*torch.randn(2, 1, 2, length, 8))
        assert key.shape == value.shape
    assert (len(cache), cache.kept, cache.key.shape[2]) == (16, 5, 5)


@torch.no_grad()
def test_steps_stand_where_order_says() -> None:
    cache = KVCache(window=3, sinks=2)
    steps = torch.arange(11.0).view(1, 1, 11, 1)
    for part in steps.split([4, 1, 1, 4, 1], 2):
        cache.append(part, part)
    assert cache.key[0, 0, cache.order(), 0].tolist() == [0, 1, 8, 9, 10]


@torch.no_grad()
def test_a_sliding_cache_is_reordered() -> None:
    model, tokens = small_model(positions="rotary", window=6), torch.randint(50, (2, 12))
    caches = model.caches(sliding=True)
    model(tokens[:, :11], caches=caches)
    for cache in caches:
        cache.reorder(torch.tensor([1, 1, 0]))
    made = model(tokens[[1, 1, 0], 11:], caches=caches)
    torch.testing.assert_close(made, model(tokens[[1, 1, 0]])[:, 11:], rtol=1e-4, atol=1e-4)


def test_wrong_use_is_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"KVCache: window must be an int of at least 1, or None, got 0\."):
        KVCache(window=0)
    with pytest.raises(ValueError, match=r"KVCache: sinks must be 0 without a window, got 2\."):
        KVCache(sinks=2)
    cache, step = KVCache(window=2), torch.zeros(1, 1, 3, 4)
    with pytest.raises(ValueError, match="decode under torch"):
        cache.append(step, step)
    with torch.no_grad():
        cache.append(step, step)
        with pytest.raises(ValueError, match=r"length must be 0 or \d+ if the window is full, got 1\."):
            cache.truncate(1)
        with pytest.raises(ValueError, match="have the shape"):
            cache.append(step[..., :2], step)
    model = small_model(window=4)
    with torch.no_grad(), pytest.raises(ValueError, match="mask must be None where a window is full"):
        model(torch.zeros(1, 6, dtype=torch.int64), caches=model.caches(sliding=True), mask=lambda b, h, q, k: k >= 0)


@torch.no_grad()
def test_a_reordered_cache_has_its_room_left() -> None:
    cache, rows = KVCache(capacity=8), torch.randn(2, 3, 2, 5, 4)
    cache.append(*rows)
    cache.reorder(torch.tensor([2, 0]))
    before, more = cache.key.data_ptr(), torch.randn(2, 2, 2, 3, 4)
    key, value = cache.append(*more)
    assert key.data_ptr() == before  # nothing was copied to a larger buffer
    for read, old, new in zip((key, value), rows, more):
        torch.testing.assert_close(read, torch.cat([old[[2, 0]], new], 2), rtol=0, atol=0)
