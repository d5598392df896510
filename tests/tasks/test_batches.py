"""Padding, bucketing and the vocabulary."""

from __future__ import annotations

import random
from itertools import islice

import pytest
import torch

from regard.tasks.batches import Batch, Batches
from regard.tasks.vocabulary import END, PAD, Vocabulary


def _epoch(size: int, seed: int = 0, count: int = 300) -> tuple[list[tuple[list[int], list[int]]], list[Batch]]:
    chance = random.Random(1)
    sources = [[chance.randint(2, 20) for _ in range(chance.randint(1, 12))] for _ in range(count)]
    targets = [[chance.randint(2, 20) for _ in range(len(source) + 1)] for source in sources]
    stream, batches, seen = iter(Batches(sources, targets, size=size, seed=seed)), [], 0
    while seen < count:
        batches.append(next(stream))
        seen += len(batches[-1].source)
    return list(zip(sources, targets)), batches


def test_an_epoch_holds_every_example_once_and_whole() -> None:
    examples, batches = _epoch(size=32)
    found = []
    for batch in batches:
        assert len(batch.source) <= 32
        for source, length, target in zip(batch.source.tolist(), batch.lengths.tolist(), batch.target.tolist()):
            assert set(source[length:]) <= {PAD}
            end = target.index(END)
            assert set(target[end + 1 :]) <= {PAD}
            found.append((source[:length], target[:end]))
    assert sorted(found) == sorted(examples)


def test_similar_lengths_go_together() -> None:
    _, batches = _epoch(size=16)
    padded = sum(batch.source.numel() for batch in batches)
    assert padded < 1.1 * sum(int(batch.lengths.sum()) for batch in batches)


def test_batches_follow_the_seed() -> None:
    one, two, other = (_epoch(size=32, seed=seed)[1] for seed in (3, 3, 4))
    assert all(torch.equal(a.source, b.source) and torch.equal(a.target, b.target) for a, b in zip(one, two))
    assert any(a.source.shape != b.source.shape or not torch.equal(a.source, b.source) for a, b in zip(one, other))


def test_epochs_differ() -> None:
    batches = Batches([[2]] * 4, [[number] for number in range(2, 6)], size=4, seed=0)
    orders = {tuple(batch.target[:, 0].tolist()) for batch in islice(batches, 20)}
    assert len(orders) > 3


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="Batches: targets must be as many as sources, and at least one, got 0 for 1"):
        Batches([[2]], [], size=1)
    with pytest.raises(ValueError, match="Batches: size must be at least 1, got 0"):
        Batches([[2]], [[2]], size=0)


def test_the_vocabulary_round_trips_and_refuses() -> None:
    letters = Vocabulary.of(["hello", "world"])
    assert letters.decode(letters.encode("hole")) == ("h", "o", "l", "e")
    assert letters.decode([PAD, *letters.encode("he"), END, *letters.encode("lo")]) == ("h", "e")
    assert len(letters) == 7 + 2
    with pytest.raises(ValueError, match="encode: sequence must be of symbols in the vocabulary, got 'x'"):
        letters.encode("hex")
    with pytest.raises(ValueError, match="Vocabulary: symbols must all be different, got 1 repeated"):
        Vocabulary(("a", "a"))
