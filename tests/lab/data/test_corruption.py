"""Corrupted tokens: what is to be restored is there, the shares are as asked, and one generator gives one result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples
from torch import Tensor

from regard_lab.data.corruption import corrupt_spans, hide_spans, mask_tokens
from regard_lab.data.packing import IGNORE_INDEX
from regard_lab.text.ragged import Ragged
from regard_lab.text.tokenizer import Tokenizer


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_shares_of_masked_tokens() -> None:
    tokens = torch.randint(0, 50, (400, 500), generator=seeded())
    masked, targets = mask_tokens(tokens, 7, 50, seeded(), share=0.2, specials=[0, 49, 48])
    chosen = targets != IGNORE_INDEX
    assert torch.equal(targets[chosen], tokens[chosen])
    assert torch.equal(masked[~chosen], tokens[~chosen])
    special = torch.isin(tokens, torch.tensor([0, 7, 48, 49]))
    assert not bool(chosen[special].any())
    assert float(chosen[~special].double().mean()) == pytest.approx(0.2, abs=0.005)
    share = (masked[chosen] == 7).double().mean()
    assert float(share) == pytest.approx(0.8, abs=0.01)
    others = masked[chosen & (masked != 7)]
    assert not set(others.tolist()) & {0, 48, 49}
    drawn = masked[chosen & (masked != 7) & (masked != tokens)]
    assert set(drawn.tolist()) == set(range(1, 48)) - {7}
    assert len(drawn) / int(chosen.sum()) == pytest.approx(0.1 * 45 / 46, abs=0.01)


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(seed=st.integers(0, 99), share=st.sampled_from([0.0, 0.15, 1.0]))
def test_one_generator_gives_one_result(seed: int, share: float) -> None:
    tokens = torch.arange(2, 30)
    real = torch.arange(28) < 20
    first, again = (mask_tokens(tokens, 1, 30, seeded(seed), share=share, real=real) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, again))
    assert bool((first[1][~real] == IGNORE_INDEX).all())
    assert torch.equal(first[0][~real], tokens[~real])
    if share != 0.15:
        assert int((first[1] != IGNORE_INDEX).sum()) == 20 * share


def test_whole_words() -> None:
    tokenizer = Tokenizer.learn([], kind="bytes", specials=("mask", "cls", "sep"))
    assert tokenizer.mask is not None
    tokens = torch.tensor([tokenizer.encode("some words are longer than others", specials=True)]).expand(200, -1)
    starts = torch.from_numpy(tokenizer.word_starts)
    specials = list(tokenizer.roles().values())
    _, targets = mask_tokens(tokens, tokenizer.mask, len(tokenizer), seeded(), specials=specials, word_starts=starts)
    words = ["some", " words", " are", " longer", " than", " others"]
    seen = set()
    for row in targets.tolist():
        row = row[1:-1]
        for word in words:
            part, row = row[: len(word)], row[len(word) :]
            seen.add((word, part[0] != IGNORE_INDEX))
            assert part in (list(word.encode()), [IGNORE_INDEX] * len(word))
    assert len(seen) == 12
    assert float((targets[:, 1:-1] != IGNORE_INDEX).double().mean()) == pytest.approx(0.15, abs=0.05)


def restored(read: list[int], write: list[int], sentinels: set[int]) -> list[int]:
    spans: dict[int, list[int]] = {}
    for number in write:
        if number in sentinels:
            spans[number] = last = []
        else:
            last.append(number)
    return [number for each in read for number in spans.get(each, [each])]


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(
    length=st.integers(2, 60),
    rows=st.none() | st.integers(1, 4),
    share=st.floats(0.01, 0.99),
    mean=st.floats(1, 9),
    seed=st.integers(0, 999),
)
def test_spans_come_back(length: int, rows: int | None, share: float, mean: float, seed: int) -> None:
    sentinels = list(range(999, 900, -1))
    tokens = torch.randint(0, 900, (length,) if rows is None else (rows, length), generator=seeded(seed))
    read, write = corrupt_spans(tokens, sentinels, seeded(seed), share=share, mean_length=mean)
    ended = corrupt_spans(tokens, sentinels, seeded(seed), share=share, mean_length=mean, end=5)
    noise = min(max(round(share * length), 1), length - 1)
    spans = min(max(round(noise / mean), 1), length - noise)
    assert read.shape[-1] == length - noise + spans
    assert write.shape[-1] == noise + spans
    for plain, closed in zip((read, write), ended):
        assert torch.equal(closed[..., :-1], plain)
        assert bool((closed[..., -1] == 5).all())

    def listed(x: Tensor) -> list[list[int]]:
        return x.reshape(-1, x.shape[-1]).tolist()

    for row, of_read, of_write in zip(listed(tokens), listed(read), listed(write)):
        assert restored(of_read, of_write, set(sentinels)) == row
        assert [number for number in of_read if number > 900] == sentinels[:spans]
        assert [number for number in of_write if number > 900] == sentinels[:spans]
        assert of_read[0] < 900  # what is kept comes first


def test_places_of_spans_are_uniform() -> None:
    tokens = torch.arange(7).repeat(6000, 1)
    read, _ = corrupt_spans(tokens, [99, 98], seeded(), share=3 / 7, mean_length=2)
    kinds, counts = torch.unique(read, dim=0, return_counts=True)
    assert len(kinds) == 2 * 3  # two spans of three tokens, and two of the four others, each in all ways
    assert float(counts.min() / counts.max()) > 0.85


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(
    texts=st.lists(st.lists(st.integers(0, 20), max_size=12), min_size=1, max_size=8),
    share=st.floats(0.05, 0.9), mean=st.floats(1, 4), times=st.integers(1, 3),
)  # fmt: skip
def test_hidden_spans_come_back_in_order(texts: list[list[int]], share: float, mean: float, times: int) -> None:
    sentinels = list(range(100, 112))
    read, written = hide_spans(Ragged.of(texts), sentinels, 3, share=share, mean_length=mean, times=times)
    restored = []
    for left, right in zip(read, written):
        spans: dict[int, list[int]] = {}
        for number in right.tolist():
            if number in sentinels:
                spans[number] = []
            else:
                spans[max(spans)].append(number)
        assert list(spans) == sentinels[: len(spans)] == [each for each in left.tolist() if each in sentinels]
        restored.append([token for number in left.tolist() for token in spans.get(number, [number])])
    assert restored == [text for text in texts if len(text) > 1] * times
    again = hide_spans(Ragged.of(texts), sentinels, 3, share=share, mean_length=mean, times=times)
    assert [each.numbers.tolist() for each in again] == [read.numbers.tolist(), written.numbers.tolist()]


def test_spans_are_others_each_time() -> None:
    read, _ = hide_spans(Ragged.of([list(range(40))]), list(range(100, 112)), 0, times=4)
    assert len({tuple(each.tolist()) for each in read}) == 4


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"share": 1.5}, r"share must be in \[0, 1\], got 1.5"),
        ({"mask": 30}, "mask and specials must be from 0 to 29, got 30"),
        ({"specials": [-1]}, "mask and specials must be from 0 to 29, got -1"),
        ({"specials": range(30)}, "vocabulary must have numbers that are not special"),
    ],
)
def test_what_cannot_be_masked(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^mask_tokens: {sentence}"):
        mask_tokens(**{"tokens": torch.arange(9), "mask": 1, "vocabulary": 30, "generator": seeded(), **options})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tokens": torch.arange(1)}, r"tokens must be \(L,\) or \(B, L\) with at least 2 tokens, got an int64 tensor"),
        ({"share": 0.0}, r"share must be in \(0, 1\), got 0.0"),
        ({"mean_length": 0.5}, "mean_length must be at least 1, got 0.5"),
        ({"share": 0.9, "mean_length": 1}, "sentinels must be at least 1"),
        ({"share": 0.5, "mean_length": 1}, "sentinels must be at least 4, one for each span, got 2"),
    ],
)
def test_what_cannot_be_corrupted(options: dict[str, Any], sentence: str) -> None:
    arguments = {"tokens": torch.arange(9), "sentinels": [9, 8], "generator": seeded(), **options}
    if options.get("share") == 0.9:
        arguments["sentinels"] = []
    with pytest.raises(ValueError, match=f"^corrupt_spans: {sentence}"):
        corrupt_spans(**arguments)
