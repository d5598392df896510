"""Nested tensors of every structure that torch has, made of padded ones, and their sequences."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nested import nested_tensor_from_jagged

#: Where each sequence begins in a padded one, and how long it is.
Places = Sequence[tuple[int, int]]

#: What makes a nested tensor of padded sequences (B, N, E), of which it is a view or a copy.
Maker = Callable[[Tensor, Places], Tensor]


def rows(padded: Tensor, places: Places) -> list[Tensor]:
    """Return the sequences."""
    return [each[start : start + length] for each, (start, length) in zip(padded, places)]


def narrowed(padded: Tensor, places: Places) -> Tensor:
    """Return sequences where they are, with holes between them, as ``torch.nested.narrow`` is meant to.

    That of torch 2.13 gives other rows where the first sequence ends at the end of its row and the last begins later
    than at the beginning of its own.
    """
    starts, lengths = (torch.tensor(column) for column in zip(*places))
    starts = starts + padded.shape[1] * torch.arange(len(padded))
    return nested_tensor_from_jagged(padded.flatten(0, 1), torch.cat((starts, (starts + lengths)[-1:])), lengths)


def with_exact_lengths(padded: Tensor, places: Places) -> Tensor:
    """Return sequences without holes whose lengths are stated all the same."""
    lengths = torch.tensor([length for _, length in places])
    return nested_tensor_from_jagged(torch.cat(rows(padded, places)), _offsets(lengths), lengths)


def with_ends(padded: Tensor, places: Places) -> Tensor:
    """Return sequences one after the other, with rows before the first and after the last."""
    offsets = _offsets(torch.tensor([length for _, length in places])) + 2
    ends = padded[0, :1].expand(2, -1), padded[0, :1].expand(3, -1)
    return nested_tensor_from_jagged(torch.cat((ends[0], *rows(padded, places), ends[1])), offsets)


def turned(padded: Tensor, places: Places) -> Tensor:
    """Return sequences as a transposed view of features by rows."""
    offsets = _offsets(torch.tensor([length for _, length in places]))
    return nested_tensor_from_jagged(torch.cat(rows(padded, places)).T, offsets, jagged_dim=2).transpose(1, 2)


def strided(padded: Tensor, places: Places) -> Tensor:
    """Return sequences in torch's older layout."""
    return torch.nested.as_nested_tensor(rows(padded, places))


def jagged(padded: Tensor, places: Places) -> Tensor:
    """Return sequences one after the other."""
    return torch.nested.as_nested_tensor(rows(padded, places), layout=torch.jagged)


#: Every structure.
MAKERS: tuple[Maker, ...] = (narrowed, with_exact_lengths, with_ends, turned, strided, jagged)


def sequences(nested: Any) -> list[Tensor]:
    """Return the sequences of a nested tensor; torch's ``unbind`` refuses rows outside of all."""
    if nested.layout == torch.strided or nested.lengths() is not None:
        return list(nested.unbind())
    return [nested.values()[start:stop] for start, stop in itertools.pairwise(nested.offsets().tolist())]


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
