"""Sequences of unequal lengths in slots, with and without a window or a shared prefix, get what each gets alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from language_models import KINDS, small_model
from pairwise import across

from regard_lab.models import DecoderLM
from regard_lab.models.slot_cache import SlotCache, Slots


def loaded(model: DecoderLM, tokens: torch.Tensor, lengths: list[int], prefix: int = 0) -> list[SlotCache]:
    """Return caches that hold the beginnings of sequences."""
    first = model.caches()
    model(tokens[:1, :prefix], caches=first) if prefix else None
    window = {"window": model.config.window, "sinks": model.config.sinks} if model.slides else {}
    slots = Slots(**window, prefix=prefix)  # type: ignore[arg-type]
    made = [SlotCache(slots, (cache.key, cache.value) if prefix else None) for cache in first]
    for row, length in enumerate(lengths):
        caches = model.caches(sliding=True)
        model(tokens[row : row + 1, : prefix + length], caches=caches)
        for slot, cache in zip(made, caches):
            slot.load(row, cache.key[:, :, prefix:], cache.value[:, :, prefix:])
    slots.lengths = list(lengths)
    return made


@torch.no_grad()
@across({"prefix": [0, 4], "lengths": [[9, 9], [9, 5]], "kind": KINDS})
def test_each_sequence_gets_what_it_gets_alone(kind: dict[str, Any], lengths: list[int], prefix: int) -> None:
    model, tokens = small_model(**kind), torch.randint(50, (2, 20))
    if prefix and model.slides:
        pytest.skip("a window forgets a prefix")
    tokens[:, :prefix] = tokens[0, :prefix]
    whole, caches = model(tokens), loaded(model, tokens, lengths, prefix)
    for step in range(6):
        at = [prefix + length + step for length in lengths]
        made = model(tokens[[0, 1], at][:, None], caches=caches)
        caches[0].slots.finish()
        torch.testing.assert_close(made[:, 0], whole[[0, 1], at], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_sequence_moves_to_another_slot() -> None:
    model, tokens = small_model(), torch.randint(50, (3, 12))
    caches = loaded(model, tokens, [8, 3, 6])
    for cache in caches:
        cache.move(2, 0)
    caches[0].slots.lengths = [6, 3]
    made = model(tokens[[2, 1], [6, 3]][:, None], caches=caches)
    torch.testing.assert_close(made[:, 0], model(tokens)[[2, 1], [6, 3]], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_what_another_sequence_left_in_a_slot_has_no_influence() -> None:
    model, tokens = small_model(), torch.randint(50, (2, 12))
    caches = loaded(model, tokens, [10, 4])
    for cache in caches:
        for buffer in cache._buffers or ():
            buffer[1] = torch.nan
    one = model.caches()
    model(tokens[1:, :4], caches=one)
    for slot, cache in zip(caches, one):
        slot.load(1, cache.key, cache.value)
    made = model(tokens[[0, 1], [10, 4]][:, None], caches=caches)
    torch.testing.assert_close(made[:, 0], model(tokens)[[0, 1], [10, 4]], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_wrong_use_is_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"Slots: prefix must be 0 where there is a window, got 3\."):
        Slots(window=4, prefix=3)
    with pytest.raises(ValueError, match=r"Slots: slots must be in use where a step is made, got none\."):
        Slots().begin()
    model, tokens = small_model(), torch.randint(50, (2, 12))
    caches = loaded(model, tokens, [4, 4])
    with pytest.raises(ValueError, match=r"SlotCache: key must have the shape \(2, G, 1, D\), got"):
        model(tokens[:, :2], caches=caches)
    with pytest.raises(ValueError, match="mask must be None with caches of slots"):
        model(tokens[:, :1], caches=caches, mask=torch.ones(1, 5, dtype=torch.bool))
