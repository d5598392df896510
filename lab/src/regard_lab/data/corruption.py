"""Corrupted inputs for pretraining: masked tokens (BERT) and span corruption (T5)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from regard._utils.errors import described, rejected
from regard_lab.data.packing import IGNORE_INDEX
from regard_lab.text.ragged import Ragged

#: Shares of the selected tokens to replace by the mask and by a random token.
_MASKED, _RANDOM = 0.8, 0.1


def mask_tokens(
    tokens: Tensor,
    mask: int,
    vocabulary: int,
    generator: torch.Generator,
    *,
    share: float = 0.15,
    specials: Sequence[int] = (),
    real: Tensor | None = None,
    word_starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return masked tokens, and targets: the original tokens where chosen, :data:`IGNORE_INDEX` elsewhere.

    Each token is chosen with probability ``share``. Of the chosen tokens, 80 % become ``mask``, 10 % a random token,
    and 10 % do not change (Devlin 2019, arXiv 1810.04805).

    Parameters
    ----------
    tokens : Tensor (..., T), int64
    mask : int
        Id of the mask token.
    vocabulary : int
        Vocabulary size.
    generator : torch.Generator
        On the device of ``tokens``.
    share : float, default 0.15
        In [0, 1].
    specials : sequence of int
        Ids that are never chosen and never used as random tokens, in addition to ``mask``.
    real : Tensor (..., T), bool, optional
        False for padding, which is not chosen.
    word_starts : Tensor (vocabulary,), bool, optional
        Choose whole words instead of tokens. A word starts at tokens for which this is True
        (:attr:`~regard_lab.text.tokenizer.Tokenizer.word_starts`), and after special tokens.

    Returns
    -------
    (Tensor, Tensor)
        Both (..., T), int64.

    Raises
    ------
    ValueError
        If ``share`` is out of range, if an id is not in the vocabulary, or if all ids are special.

    Examples
    --------
    >>> tokens = torch.arange(8, 16)
    >>> masked, targets = mask_tokens(tokens, 1, 20, torch.Generator().manual_seed(2), share=0.5, specials=[0, 1])
    >>> masked.tolist()
    [8, 1, 10, 1, 12, 13, 1, 1]
    >>> targets.tolist()
    [-100, 9, -100, 11, -100, -100, 14, 15]
    """
    if not 0 <= share <= 1:
        raise rejected("mask_tokens", "share", "be in [0, 1]", share)
    fixed = sorted({mask, *specials})
    for number in fixed:
        if not 0 <= number < vocabulary:
            raise rejected("mask_tokens", "mask and specials", f"be from 0 to {vocabulary - 1}", number)
    if len(fixed) == vocabulary:
        raise rejected("mask_tokens", "vocabulary", "have numbers that are not special", vocabulary)
    special = torch.isin(tokens, torch.tensor(fixed, device=tokens.device))
    free = ~special if real is None else ~special & real
    drawn = torch.rand(tokens.shape, generator=generator, device=tokens.device)
    if word_starts is not None:
        begins = word_starts.to(tokens.device)[tokens] | special
        begins[..., 1:] |= special[..., :-1]
        begins[..., :1] = True
        drawn = drawn.gather(-1, begins.long().cumsum(-1) - 1)  # one draw for each word
    chosen = free & (drawn < share)
    kind = torch.rand(tokens.shape, generator=generator, device=tokens.device)
    other = torch.randint(vocabulary - len(fixed), tokens.shape, generator=generator, device=tokens.device)
    for number in fixed:  # numbers that are not special, counted from 0
        other += other >= number
    corrupted = torch.where(chosen & (kind < _MASKED), mask, tokens)
    corrupted = torch.where(chosen & (kind >= _MASKED) & (kind < _MASKED + _RANDOM), other, corrupted)
    return corrupted, torch.where(chosen, tokens, IGNORE_INDEX)


def corrupt_spans(
    tokens: Tensor,
    sentinels: Sequence[int],
    generator: torch.Generator,
    *,
    share: float = 0.15,
    mean_length: float = 3.0,
    end: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return tokens with spans replaced by sentinels, and the spans, each preceded by its sentinel.

    Of L tokens, N = round(share · L) are in round(N / mean_length) spans of random lengths and positions, as in T5
    (Raffel 2020, arXiv 1910.10683). These numbers depend only on L, so all rows keep equal lengths.

    Parameters
    ----------
    tokens : Tensor (L,) or (B, L), int64
        Without padding.
    sentinels : sequence of int
        At least one per span, used in order.
    generator : torch.Generator
        On the CPU.
    share : float, default 0.15
        In (0, 1).
    mean_length : float, default 3.0
        At least 1.
    end : int, optional
        Token to append to both results.

    Returns
    -------
    (Tensor, Tensor)
        Inputs (L − N + spans,) or (B, …), and targets (N + spans,) or (B, …); one longer with ``end``.

    Raises
    ------
    ValueError
        If there are fewer than two tokens or too few sentinels, or if an argument is out of range.

    Examples
    --------
    >>> random = torch.Generator().manual_seed(0)
    >>> read, write = corrupt_spans(torch.arange(10), [99, 98], random, share=0.4, mean_length=2)
    >>> read.tolist(), write.tolist()
    ([0, 1, 2, 99, 5, 6, 7, 98], [99, 3, 4, 98, 8, 9])
    """
    L = tokens.shape[-1] if tokens.dim() else 0
    if tokens.dim() not in (1, 2) or L < 2:
        raise rejected("corrupt_spans", "tokens", "be (L,) or (B, L) with at least 2 tokens", described(tokens))
    if not 0 < share < 1:
        raise rejected("corrupt_spans", "share", "be in (0, 1)", share)
    if not mean_length >= 1:
        raise rejected("corrupt_spans", "mean_length", "be at least 1", mean_length)
    noise = min(max(round(share * L), 1), L - 1)
    spans = min(max(round(noise / mean_length), 1), L - noise)
    if len(sentinels) < spans:
        raise rejected("corrupt_spans", "sentinels", f"be at least {spans}, one for each span", len(sentinels))
    rows = tokens.reshape(-1, L)
    B, device = len(rows), tokens.device
    kept, lost = (_segments(B, total, spans, generator).to(device) for total in (L - noise, noise))
    # Segments alternate between kept and hidden; those with odd indices are hidden.
    edges = torch.stack([kept, lost], -1).flatten(1).cumsum(1)
    turn = torch.searchsorted(edges, torch.arange(L, device=device).expand(B, L).contiguous(), right=True)
    hidden = turn % 2 == 1
    first = hidden & torch.nn.functional.pad(~hidden[:, :-1], (1, 0))
    marks = torch.tensor(list(sentinels[:spans]), device=device)[turn // 2]
    read = torch.where(first, marks, rows)[~hidden | first].view(B, -1)
    pairs = torch.stack([marks, rows], -1)  # a sentinel precedes the first token of its span
    write = pairs[torch.stack([first, hidden], -1)].view(B, -1)
    if end is not None:
        read, write = (torch.nn.functional.pad(each, (0, 1), value=end) for each in (read, write))
    return (read, write) if tokens.dim() == 2 else (read[0], write[0])


def hide_spans(
    texts: Ragged, sentinels: Sequence[int], seed: int, *, share: float = 0.15, mean_length: float = 3.0, times: int = 1
) -> tuple[Ragged, Ragged]:
    """Apply :func:`corrupt_spans` to sequences of different lengths.

    Parameters
    ----------
    texts : Ragged
        Sequences with fewer than two tokens are skipped.
    sentinels : sequence of int
    seed : int
    share, mean_length : float
    times : int, default 1
        Number of copies of the texts, with different spans each.

    Examples
    --------
    >>> from regard_lab.text.ragged import Ragged
    >>> read, write = hide_spans(Ragged.of([[5, 6, 7, 8], [9], [4, 4]]), [99], 1)
    >>> read.lengths.tolist(), write.lengths.tolist()
    ([4, 2], [2, 2])
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = np.tile(texts.lengths, times)
    kept = np.flatnonzero(lengths > 1)
    sides: tuple[list[list[int]], list[list[int]]] = ([[]] * len(kept), [[]] * len(kept))
    for length in np.unique(lengths[kept]):
        places = np.flatnonzero(lengths[kept] == length)
        rows, _ = texts.padded(kept[places] % len(texts))
        made = corrupt_spans(rows, sentinels, generator, share=share, mean_length=mean_length)
        for side, each in zip(sides, made):
            for place, row in zip(places, each.tolist()):
                side[place] = row
    read, written = (Ragged.of(side) for side in sides)
    return read, written


def _segments(rows: int, total: int, count: int, generator: torch.Generator) -> Tensor:
    """Return random segment lengths (rows, count), at least 1 each, that sum to ``total`` in each row."""
    cuts = torch.rand(rows, total - 1, generator=generator).argsort(1)[:, : count - 1].sort(1).values + 1
    edges = torch.nn.functional.pad(cuts, (1, 0))
    return torch.diff(torch.nn.functional.pad(edges, (0, 1), value=total), dim=1)
