"""Rows of tokens: every target once per epoch, batches that are a function of their number, and documents apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from regard_lab.data.packing import (
    IGNORE_INDEX,
    NO_DOCUMENT,
    LanguageBatch,
    LanguageBatches,
    PackedBatches,
    Runs,
    StreamBatches,
    TokenShards,
    best_fit,
    write_shards,
)
from regard_lab.text.ragged import Ragged
from regard_lab.text.tokenizer import Tokenizer

KINDS = (PackedBatches, StreamBatches)


def numbered(lengths: Iterable[int]) -> TokenShards:
    """Documents in which every number comes once."""
    ends = np.cumsum([0, *lengths])
    return TokenShards.of(Ragged(np.arange(ends[-1], dtype=np.int32), ends), max(int(ends[-1]), 1))


def wanted(shards: TokenShards, kind: type[LanguageBatches]) -> Counter[tuple[int, int]]:
    if kind is StreamBatches:
        return Counter((i, i + 1) for i in range(shards.tokens - 1))
    rows = (shards.document(i).tolist() for i in range(len(shards)))
    return Counter(pair for row in rows for pair in pairwise(row))


def found(batches: Iterable[LanguageBatch]) -> Counter[tuple[int, int]]:
    pairs: Counter[tuple[int, int]] = Counter()
    for batch in batches:
        real = batch.targets != IGNORE_INDEX
        assert not bool(real[batch.documents == NO_DOCUMENT].any())
        assert batch.count == int(real.sum())
        pairs.update(zip(batch.tokens[real].tolist(), batch.targets[real].tolist()))
        _check(batch)
    return pairs


def _check(batch: LanguageBatch) -> None:
    for tokens, documents, positions in zip(batch.tokens, batch.documents, batch.positions):
        used = int((documents != NO_DOCUMENT).sum())
        assert bool((documents[used:] == NO_DOCUMENT).all())
        steps = documents[:used].diff()
        assert set(steps.tolist()) <= {0, 1}
        for document in documents.unique().tolist():
            here = documents == document
            assert positions[here].tolist() == list(range(int(here.sum())))
            if document != NO_DOCUMENT:
                assert set(tokens[here].diff().tolist()) <= {1}  # neighbours in the data


LENGTHS = st.lists(st.integers(0, 30), max_size=30).filter(lambda lengths: max(lengths, default=0) > 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(
    lengths=LENGTHS,
    length=st.integers(1, 20),
    rows=st.integers(1, 5),
    world=st.integers(1, 3),
    epoch=st.integers(0, 2),
    stride=st.integers(1, 20),
)
def test_every_target_comes_once_in_an_epoch(
    kind: type[LanguageBatches], lengths: list[int], length: int, rows: int, world: int, epoch: int, stride: int
) -> None:
    shards = numbered(lengths)
    sizes: dict[str, Any] = {"length": length, "rows": rows}
    world = min(world, kind(shards, **sizes)._rows)
    epoch_of: list[LanguageBatch] = []
    once: list[LanguageBatch] = []
    counts = set()
    for rank in range(world):
        batches = kind(shards, **sizes, seed=3, rank=rank, world=world)
        epoch_of += islice(batches.starting(epoch * batches.per_epoch), batches.per_epoch)
        mine = list(batches.once(min(stride, length)))
        once += mine
        counts.add((batches.per_epoch, len(mine)))
    assert len(counts) == 1
    assert all(batch.tokens.shape == batch.targets.shape == (rows, length) for batch in epoch_of + once)
    assert found(epoch_of) == found(once) == wanted(shards, kind)
    real = sum(batch.count for batch in epoch_of)
    assert real == batches.targets
    assert batches.padding == pytest.approx(1 - real / (batches._rows * length))
    if rows > 1 and batches.per_epoch > 1:
        assert min(batch.count for batch in epoch_of) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_depends_on_its_number_alone(kind: type[LanguageBatches]) -> None:
    shards = numbered(range(40))
    batches = kind(shards, length=16, rows=3, seed=1)
    first = list(islice(batches, 4 * batches.per_epoch))
    for number in (len(first) - 1, 0, batches.per_epoch, 7, 7):
        for again in (batches.batch(number), kind(shards, length=16, rows=3, seed=1).batch(number)):
            for name in ("tokens", "targets", "documents", "positions"):
                assert torch.equal(getattr(first[number], name), getattr(again, name))
    assert not torch.equal(first[0].tokens, kind(shards, length=16, rows=3, seed=2).batch(0).tokens)
    assert not torch.equal(first[0].tokens, first[batches.per_epoch].tokens)
    assert [batch.tokens.tolist() for batch in batches.once()] == [batch.tokens.tolist() for batch in batches.once()]


def test_files_give_the_same_batches_as_memory(tmp_path: Path) -> None:
    tokenizer = Tokenizer.learn([], kind="bytes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("regard_lab.text.tokenizer._BLOCK", 100)
        shards = write_shards((f"document {i} " * (i % 7) for i in range(90)), tokenizer, tmp_path, size=500)
    assert len(list(tmp_path.glob("tokens-*"))) > 3
    memory = TokenShards.of([shards.document(i).tolist() for i in range(len(shards))], len(tokenizer))
    for kind in KINDS:
        for one, two in zip(
            kind(shards, length=32, rows=4).once(), kind(memory, length=32, rows=4).once(), strict=True
        ):
            assert torch.equal(one.tokens, two.tokens)
            assert torch.equal(one.targets, two.targets)


def test_documents_that_fit_a_row_are_not_cut() -> None:
    batches = PackedBatches(numbered([9, 5, 4, 7, 2, 30]), length=8, rows=2)
    whole = 0
    for batch in islice(batches, batches.per_epoch):
        for row in range(2):
            for document in batch.documents[row].unique().tolist():
                here = batch.documents[row] == document
                whole += document != NO_DOCUMENT and int(here.sum()) in (4, 3, 6, 1, 8)
    assert whole >= 5


def test_a_window_has_context() -> None:
    shards = numbered([20])
    for kind in KINDS:
        batches = kind(shards, length=8, rows=10)
        (batch,) = batches.once(stride=2)
        real = batch.targets != IGNORE_INDEX
        # But for the first window, every target sees at least T − stride tokens before itself.
        later = real & (batch.tokens >= 8)
        assert int(batch.positions[later].min()) >= 6
        (batch,) = batches.once()
        assert int((batch.documents != NO_DOCUMENT).sum()) == 24  # the last window is full, too


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=200), length=st.integers(50, 60))
def test_best_fit(lengths: list[int], length: int) -> None:
    sizes = np.array(lengths)
    rows = best_fit(Runs(np.arange(len(sizes)), sizes, np.zeros_like(sizes)), length)
    assert sorted(rows.runs_of.tolist()) == list(range(len(lengths)))
    assert rows.firsts[-1] == len(lengths)
    room = []
    for begin, end in pairwise(rows.firsts):
        mine = sizes[rows.runs_of[begin:end]]
        assert rows.offsets[begin:end].tolist() == (np.cumsum(mine) - mine).tolist()
        room.append(length - int(mine.sum()))
    assert min(room) >= 0
    # The definition: one run after the other, the longest first, where the least room is left.
    plain: list[int] = []
    for size in sorted(lengths, reverse=True):
        fits = [left for left in plain if left >= size]
        if fits:
            plain.remove(min(fits))
        plain.append((min(fits) if fits else length) - size)
    assert sorted(plain) == sorted(room)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_move(kind: type[LanguageBatches]) -> None:
    batch = kind(numbered([20]), length=8, rows=2).batch(0)
    moved = batch.to("meta")
    assert {getattr(moved, name).device.type for name in vars(moved)} == {"meta"}
    assert all(getattr(batch, name).dtype == torch.int64 for name in vars(batch))
    if torch.cuda.is_available():
        assert batch.pin_memory().tokens.is_pinned()


def test_padding_has_the_number_that_is_asked() -> None:
    batch = PackedBatches(numbered([3]), length=4, rows=2, pad=1).batch(0)
    assert batch.tokens.tolist() == [[0, 1, 1, 1], [1, 1, 1, 1]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"length": 0}, "length must be at least 1, got 0"),
        ({"rows": 0}, "rows must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"rank": 1}, "rank must be from 0 to 0, below world, got 1"),
        ({"world": 9, "length": 6}, r"world must be at most the number of rows, \d, got 9"),
        ({"pad": 20}, "pad must be from 0 to 19, below the vocabulary, got 20"),
        ({"shards": numbered([1])}, "shards must have a document of two tokens or more"),
        ({"shards": numbered([])}, "shards must have a document of two tokens or more"),
    ],
)
def test_arguments(kind: type[LanguageBatches], options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=rf"^{kind.__name__}: {sentence}"):
        kind(**{"shards": numbered([12, 8]), "length": 4, "rows": 2, **options})


def test_numbers_of_batches_and_strides() -> None:
    batches = PackedBatches(numbered([12]), length=4, rows=1)
    with pytest.raises(ValueError, match="batch: number must be at least 0, got -1"):
        batches.batch(-1)
    for stride in (0, 5):
        with pytest.raises(ValueError, match="once: stride must be from 1 to 4, the length of rows"):
            batches.once(stride)


@settings(deadline=None, max_examples=examples(60))
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(1, 9), st.integers(1, 3), st.sampled_from(KINDS)
)
def test_rows_that_are_turned_predict_what_was_read(
    lengths: list[int], length: int, rows: int, kind: type[LanguageBatches]
) -> None:
    shards = numbered(lengths)
    if not wanted(shards, kind):
        return
    for batch in kind(shards, length=length, rows=rows).once():
        which = torch.arange(rows) % 2 == 0
        turned = batch.turned(which)
        for row in range(rows):
            if not which[row]:
                for name in ("tokens", "targets", "documents", "positions"):
                    assert torch.equal(getattr(turned, name)[row], getattr(batch, name)[row])
                continue
            real = batch.targets[row] != IGNORE_INDEX
            forward = list(zip(batch.tokens[row][real].tolist(), batch.targets[row][real].tolist()))
            seen = turned.targets[row] != IGNORE_INDEX
            backward = list(zip(turned.targets[row][seen].tolist(), turned.tokens[row][seen].tolist()))
            assert backward == forward[::-1]
            assert turned.documents[row].tolist() == batch.documents[row].tolist()[::-1]
            for document in batch.documents[row].unique().tolist():
                here = turned.documents[row] == document
                assert turned.positions[row][here].tolist() == list(range(int(here.sum())))
        assert torch.equal(batch.turned(torch.zeros(rows, dtype=torch.bool)).tokens, batch.tokens)
