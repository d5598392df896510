"""Batches of texts with labels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from regard_lab.data.batches import LabelBatches, label_batch
from regard_lab.text.inputs import Inputs
from regard_lab.text.ragged import Ragged


def made(count: int = 50, second: bool = False, **options: int) -> LabelBatches:
    random = np.random.default_rng(0)
    rows = [[i + 1] * int(random.integers(2, 9)) for i in range(count)]
    behind = np.array([len(row) // 2 for row in rows]) if second else None
    inputs = Inputs(Ragged.of(rows), behind, int(second), np.zeros(count, bool))
    return LabelBatches(inputs, np.arange(count) % 3, **{"size": 8} | options)


def test_every_text_comes_once_an_epoch_with_its_label() -> None:
    batches = made(seed=3)
    for epoch in range(2):
        seen = []
        for step in range(batches.per_epoch):
            batch = batches.batch(epoch * batches.per_epoch + step)
            numbers = batch.tokens[:, 0] - 1
            assert torch.equal(numbers % 3, batch.labels) and batch.examples <= 8
            keep = batch.tokens != 0
            assert batch.count == int(keep.sum()) and (
                batch.attention_mask is None or torch.equal(batch.attention_mask, keep)
            )
            seen += numbers.tolist()
        assert sorted(seen) == list(range(50))
    assert sorted(t for batch in batches.once() for t in (batch.tokens[:, 0] - 1).tolist()) == list(range(50))


def test_a_batch_depends_on_its_number_alone() -> None:
    one, other = made(seed=3), made(seed=3)
    later = other.batch(17)
    for number in range(17):
        one.batch(number)
    assert torch.equal(one.batch(17).tokens, later.tokens)
    assert any(not torch.equal(made(seed=4).batch(k).tokens, made(seed=3).batch(k).tokens) for k in range(3))


def test_processes_share_an_epoch() -> None:
    seen = []
    for rank in range(2):
        batches = made(seed=3, rank=rank, world=2)
        seen += [t for step in range(batches.per_epoch) for t in (batches.batch(step).tokens[:, 0] - 1).tolist()]
    assert sorted(seen) == list(range(50))


def test_segments_begin_where_second_texts_do() -> None:
    batch = made(second=True).batch(0)
    assert batch.segments is not None
    for row, kinds in zip(batch.tokens, batch.segments):
        length = int((row != 0).sum())
        assert kinds[:length].tolist() == [0] * (length // 2) + [1] * (length - length // 2)
        assert not kinds[length:].any()
    moved = batch.to("cpu")
    assert torch.equal(moved.segments, batch.segments) and torch.equal(moved.attention_mask, batch.attention_mask)


def test_labels_must_be_as_many() -> None:
    inputs = Inputs(Ragged.of([[1]]), None, 0, np.zeros(1, bool))
    with pytest.raises(ValueError, match="labels must be as many as texts, got 2 for 1 texts"):
        LabelBatches(inputs, np.zeros(2, np.int64), size=1)
    assert label_batch(inputs, np.zeros(1, np.int64), np.array([0])).attention_mask is None
