"""Tokens corrupted so that a model learns to restore them: masked tokens, and spans replaced by sentinels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from regard._utils.errors import described, rejected
from regard_lab.data.packing import IGNORE_INDEX
from regard_lab.text.ragged import Ragged

#: Of the tokens that are to be restored: the share that is masked, and that which is another token at random.
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
    """Return tokens of which some are masked, and targets: these tokens, and elsewhere :data:`IGNORE_INDEX`.

    Each token is to be restored with probability ``share``. Of those, 80 % become ``mask``, 10 % another token at
    random, and 10 % stay as they are (Devlin 2019, arXiv 1810.04805).

    Parameters
    ----------
    tokens : Tensor (..., T), int64
    mask : int
        The number of the mask.
    vocabulary : int
        How many numbers there are.
    generator : torch.Generator
        On the device of ``tokens``.
    share : float, default 0.15
        In [0, 1].
    specials : sequence of int
        Numbers that are neither chosen nor put anywhere at random, besides ``mask``.
    real : Tensor (..., T), bool, optional
        False for padding, which is not chosen.
    word_starts : Tensor (vocabulary,), bool, optional
        Choose whole words, all of their tokens or none: those that begin where this is true of a token
        (:attr:`~regard_lab.text.tokenizer.Tokenizer.word_starts`), or behind a special token.

    Returns
    -------
    (Tensor, Tensor)
        Both (..., T), int64.

    Raises
    ------
    ValueError
        If ``share`` is out of its range, or a number is not in the vocabulary, or all are special.

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
    """Return tokens in which spans are replaced by sentinels, and the spans, each behind its sentinel.

    In rows of L tokens, N = round(share · L) are in round(N / mean_length) spans of random lengths at random places,
    as T5 learns (Raffel 2020, arXiv 1910.10683). These numbers depend on L alone, so rows stay equally long.

    Parameters
    ----------
    tokens : Tensor (L,) or (B, L), int64
        Without padding.
    sentinels : sequence of int
        As many as there are spans, or more; the first replaces the first span.
    generator : torch.Generator
        On the CPU.
    share : float, default 0.15
        In (0, 1).
    mean_length : float, default 3.0
        At least 1.
    end : int, optional
        Put behind both.

    Returns
    -------
    (Tensor, Tensor)
        What is read, (L − N + spans,) or (B, …), and what is to be written, (N + spans,) or (B, …), each one longer
        with ``end``.

    Raises
    ------
    ValueError
        If there are fewer than two tokens or too few sentinels, or an argument is out of its range.

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
    # Turns of what is kept and what is lost; every token is of one turn, and turns of odd numbers are lost.
    edges = torch.stack([kept, lost], -1).flatten(1).cumsum(1)
    turn = torch.searchsorted(edges, torch.arange(L, device=device).expand(B, L).contiguous(), right=True)
    hidden = turn % 2 == 1
    first = hidden & torch.nn.functional.pad(~hidden[:, :-1], (1, 0))
    marks = torch.tensor(list(sentinels[:spans]), device=device)[turn // 2]
    read = torch.where(first, marks, rows)[~hidden | first].view(B, -1)
    pairs = torch.stack([marks, rows], -1)  # before the first token of a span stands its sentinel
    write = pairs[torch.stack([first, hidden], -1)].view(B, -1)
    if end is not None:
        read, write = (torch.nn.functional.pad(each, (0, 1), value=end) for each in (read, write))
    return (read, write) if tokens.dim() == 2 else (read[0], write[0])


def hide_spans(
    texts: Ragged, sentinels: Sequence[int], seed: int, *, share: float = 0.15, mean_length: float = 3.0, times: int = 1
) -> tuple[Ragged, Ragged]:
    """Return sequences of unequal lengths with spans hidden, and the spans, as :func:`corrupt_spans` does.

    Parameters
    ----------
    texts : Ragged
        Those of fewer than two tokens are left out.
    sentinels : sequence of int
    seed : int
    share, mean_length : float
    times : int, default 1
        How often all of the texts come, with other spans each time.

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
    """Return the lengths, at least 1, of so many segments of a total, drawn uniformly for each row, (rows, count)."""
    cuts = torch.rand(rows, total - 1, generator=generator).argsort(1)[:, : count - 1].sort(1).values + 1
    edges = torch.nn.functional.pad(cuts, (1, 0))
    return torch.diff(torch.nn.functional.pad(edges, (0, 1), value=total), dim=1)
