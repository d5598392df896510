"""Padding, bucketing by tokens or by number, and batches that are a function of their number alone."""

from __future__ import annotations

import random
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from regard_lab.data.batches import Batch, Batches
from regard_lab.models.base import END, PAD
from regard_lab.text.ragged import Ragged, pad

Pair = tuple[list[int], list[int]]


def _pairs(count: int, longest: int = 12, seed: int = 1) -> tuple[list[list[int]], list[list[int]]]:
    chance = random.Random(seed)
    sources = [[chance.randint(2, 20) for _ in range(chance.randint(1, longest))] for _ in range(count)]
    return sources, [[chance.randint(2, 20) for _ in range(chance.randint(0, len(source) + 1))] for source in sources]


def _unpadded(batch: Batch) -> list[Pair]:
    found = []
    for source, length, target in zip(batch.source.tolist(), batch.lengths.tolist(), batch.target.tolist()):
        end = target.index(END)
        assert {*source[length:], *target[end + 1 :]} <= {PAD}
        assert PAD not in source[:length]
        found.append((source[:length], target[:end]))
    assert batch.source.shape[1] == int(batch.lengths.max())
    assert batch.target.shape[1] == max(len(target) + 1 for _, target in found)
    return found


def _same(one: Batch, two: Batch) -> bool:
    return all(torch.equal(getattr(one, name), getattr(two, name)) for name in ("source", "lengths", "target", "rows"))


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(
    count=st.integers(1, 90),
    longest=st.integers(1, 30),
    tokens=st.one_of(st.none(), st.integers(1, 300)),
    size=st.integers(1, 100),
    world=st.integers(1, 4),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 3),
)
def test_an_epoch_has_every_pair_once(
    count: int, longest: int, tokens: int | None, size: int, world: int, seed: int, epoch: int
) -> None:
    world = min(world, count)
    sources, targets = _pairs(count, longest, seed)
    limits = {"size": size} if tokens is None else {"tokens": tokens}
    found: list[Pair] = []
    once: list[Pair] = []
    lengths: set[int] = set()
    for rank in range(world):
        batches = Batches(sources, targets, **limits, seed=seed, rank=rank, world=world)
        lengths |= {batches.per_epoch, len(list(batches.once()))}
        first = epoch * batches.per_epoch
        for batch in islice(batches.starting(first), batches.per_epoch):
            pairs = _unpadded(batch)
            assert batch.rows is not None
            assert pairs == [(sources[row], targets[row]) for row in batch.rows.tolist()]
            found += pairs
            # Single pairs, of which processes would have unequally many, are the only ones to share a full batch.
            most = 2 if count % world and world * batches.per_epoch == count - count % world else 1
            if tokens is None:
                assert len(pairs) <= max(size, most)
            else:
                assert batch.source.numel() + batch.target.numel() <= tokens or len(pairs) <= most
        once += [pair for batch in batches.once() for pair in _unpadded(batch)]
    assert len(lengths) == 1
    assert sorted(found) == sorted(once) == sorted(zip(sources, targets))


@pytest.mark.parametrize("limits", [{"tokens": 120}, {"size": 7}], ids=["tokens", "size"])
def test_a_batch_is_a_function_of_its_number(limits: dict[str, int]) -> None:
    sources, targets = _pairs(200)
    walked = list(islice(Batches(sources, targets, **limits, seed=3), 100))
    fresh = Batches(Ragged.of(sources), Ragged.of(targets), **limits, seed=3)
    assert 2 * fresh.per_epoch < 100
    for number in (99, 0, 50, 51, 17, fresh.per_epoch, fresh.per_epoch - 1):
        assert _same(fresh.batch(number), walked[number])
    assert all(map(_same, fresh.starting(40), walked[40:]))


def test_batches_follow_the_seed_and_epochs_differ() -> None:
    sources, targets = _pairs(200)
    one, other = (Batches(sources, targets, size=16, seed=seed) for seed in (3, 4))
    n = one.per_epoch
    assert not all(_same(one.batch(k), other.batch(k)) for k in range(n))
    assert not all(_same(one.batch(k), one.batch(n + k)) for k in range(n))

    def company(epoch: int) -> set[frozenset[int]]:
        return {frozenset(one.batch(epoch * n + k).rows.tolist()) for k in range(n)}  # type: ignore[union-attr]

    assert len(company(0) & company(1)) < n / 2
    orders = {tuple(batch.target[:, 0].tolist()) for batch in islice(Batches([[2]] * 4, [[2], [3], [4], [5]]), 20)}
    assert len(orders) > 3


def test_similar_lengths_go_together() -> None:
    sources, _ = _pairs(3000, longest=30)
    targets = [source * (1 + number % 2) for number, source in enumerate(sources)]
    batches = Batches(sources, targets, tokens=1500)
    epoch = [batches.batch(k) for k in range(batches.per_epoch)]
    padded = sum(batch.source.numel() + batch.target.numel() for batch in epoch)
    assert padded < 1.1 * sum(len(source) + len(target) + 1 for source, target in zip(sources, targets))
    assert padded > 0.85 * 1500 * len(epoch)  # and the budget is used


def test_evaluation_goes_from_short_to_long_and_processes_keep_step() -> None:
    sources, targets = _pairs(500, longest=40)
    widths = [batch.source.shape[1] for batch in Batches(sources, targets, tokens=300).once()]
    assert widths == sorted(widths)
    ranks = [Batches(sources, targets, tokens=300, rank=rank, world=2) for rank in range(2)]
    apart = [abs(a.source.shape[1] - b.source.shape[1]) for a, b in zip(*(islice(r, r.per_epoch) for r in ranks))]
    assert np.mean(apart) < 2


def test_a_pair_longer_than_the_budget_has_its_own_batch() -> None:
    batches = Batches([[2] * 50, [3], [4]], [[2] * 50, [3], [4]], tokens=10)
    shapes = sorted((tuple(batch.source.shape), tuple(batch.target.shape)) for batch in batches.once())
    assert shapes == [((1, 50), (1, 51)), ((2, 1), (2, 2))]


def test_ragged_sequences() -> None:
    ragged = Ragged.of([[5, 6], [], [7]])
    assert [ragged[row].tolist() for row in range(3)] == [[5, 6], [], [7]]
    assert [each.tolist() for each in ragged] == [[5, 6], [], [7]]
    taken = ragged.take(np.array([2, 0, 1, 0]))
    assert [taken[row].tolist() for row in range(4)] == [[7], [5, 6], [], [5, 6]]
    padded, lengths = ragged.padded(np.array([1, 2]), ending=END)
    assert padded.tolist() == [[END, PAD], [7, END]]
    assert lengths.tolist() == [1, 2]
    assert padded.dtype == lengths.dtype == torch.int64
    assert pad([[], []])[0].shape == (2, 0)
    assert pad([])[0].shape == (0, 0)
    assert Ragged.of([[]]).padded(np.array([0]), ending=END)[0].tolist() == [[END]]


def test_a_batch_moves_whole() -> None:
    batch = next(iter(Batches([[2, 3]], [[5]]))).to("meta")
    assert {batch.source.device.type, batch.lengths.device.type, batch.target.device.type} == {"meta"}
    assert batch.rows is not None and batch.rows.device.type == "meta"
    assert Batch(torch.zeros(1, 1), torch.ones(1), torch.ones(1, 1)).to("cpu").rows is None


@pytest.mark.parametrize(
    ("sources", "targets", "options", "message"),
    [
        ([[2]], [], {}, "targets must be as many as sources, and at least one, got 0 for 1 sources."),
        ([], [], {}, "targets must be as many as sources, and at least one, got 0 for 0 sources."),
        ([[2]], [[2]], {"size": 0}, "size must be at least 1, got 0."),
        ([[2]], [[2]], {"tokens": 0}, "tokens must be at least 1, got 0."),
        ([[2]], [[2]], {"tokens": 5, "size": 5}, "tokens or size must be given, not both, got 5 and 5."),
        ([[2]], [[2]], {"seed": -1}, "seed must be at least 0, got -1."),
        ([[2]], [[2]], {"world": 0}, "world must be at least 1, got 0."),
        ([[2]], [[2]], {"world": 2}, "world must be at most the number of pairs, 1, got 2."),
        ([[2]], [[2]], {"rank": 1}, "rank must be from 0 to 0, below world, got 1."),
        ([[2], []], [[2], [2]], {}, "sources must not be empty, got an empty one at 1."),
    ],
)
def test_bad_arguments_are_named(sources, targets, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Batches(sources, targets, **options)
    assert str(caught.value) == f"Batches: {message}"


def test_numbers_are_not_negative() -> None:
    with pytest.raises(ValueError, match="batch: number must be at least 0, got -1"):
        Batches([[2]], [[2]]).batch(-1)
