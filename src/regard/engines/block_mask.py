"""Which blocks of the score matrix a mask shows, in the one form that engines read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from regard.masks.base import MIXED, Extent, Mask


@dataclass(frozen=True)
class Run:
    """Neighbouring blocks of keys in one state, EMPTY, MIXED or FULL: keys ``start ≤ k < stop``."""

    start: int
    stop: int
    state: int


@dataclass(frozen=True)
class BlockMask:
    """The state of every block of a bound mask.

    Attributes
    ----------
    states : Tensor (B or 1, H or 1, nq, nk), int8
        EMPTY, MIXED or FULL, with 1 where it is the same in all.
    q_block, kv_block : int
        The size of a block; the last ones may be smaller.
    extent : Extent
    """

    states: Tensor
    q_block: int
    kv_block: int
    extent: Extent

    @classmethod
    def of(cls, mask: Mask, extent: Extent, q_block: int, kv_block: int) -> BlockMask:
        """Ask a bound mask for its blocks."""
        return cls(mask.tiles(extent, q_block, kv_block, device="cpu"), q_block, kv_block, extent)

    @property
    def differs(self) -> tuple[bool, bool]:
        """Whether blocks differ between batches, and between heads."""
        return self.states.shape[0] > 1, self.states.shape[1] > 1

    def over_heads(self) -> list[list[int]]:
        """Return the states over all batches and heads: EMPTY or FULL only where it is so in every one."""
        if 0 in self.states.shape[:2]:
            return []
        low, high = self.states.amin((0, 1)), self.states.amax((0, 1))
        return torch.where(low == high, low, MIXED).tolist()

    def rows(self, by_head: bool = False) -> Iterator[tuple[int, int, int, list[Run]]]:
        """Yield batch, head, row of blocks, and its runs; ``by_head`` also where heads do not differ."""
        states = self.states
        if by_head:
            states = states.expand(self.extent.B, self.extent.H, -1, -1)
        for b, of_batch in enumerate(states.tolist()):
            for h, of_head in enumerate(of_batch):
                for row, line in enumerate(of_head):
                    yield b, h, row, self._runs(line)

    def _runs(self, line: list[int]) -> list[Run]:
        runs, first = [], 0
        for state, group in groupby(line):
            last = first + len(list(group))
            runs.append(Run(first * self.kv_block, min(last * self.kv_block, self.extent.S), state))
            first = last
        return runs
