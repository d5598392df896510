"""A mask given as lists of blocks: FlexAttention's BlockMask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, final

import torch
from torch import Tensor

from regard._errors import rejected
from regard.masks._checks import lookup
from regard.masks.base import FULL, MIXED, Extent, Mask, Sizes
from regard.masks.predicate import called
from regard.masks.tiling import Tiling


@final
class BlockSparse(Mask):
    """Pairs in full blocks, and pairs in partial blocks for which ``mask_mod`` is True.

    Parameters
    ----------
    states : Tensor (B or 1, H or 1, rows, columns), int8
        EMPTY, MIXED or FULL for each block.
    block : (int, int)
        How many queries and keys a block has.
    lengths : (int, int)
        L and S.
    mask_mod : callable
        FlexAttention's predicate; asked for MIXED blocks only.
    """

    def __init__(
        self, states: Tensor, block: tuple[int, int], lengths: tuple[int, int], mask_mod: Callable[..., Any]
    ) -> None:
        self.states = states
        self.block = block
        self.lengths = lengths
        self.mask_mod = mask_mod

    @classmethod
    def of(cls, block_mask: Any) -> Self:
        """Return torch's BlockMask as a Mask."""
        (q_block, kv_block), (L, S) = block_mask.BLOCK_SIZE, block_mask.seq_lengths
        columns = -(-S // kv_block)
        states = MIXED * _listed(block_mask.kv_num_blocks, block_mask.kv_indices, columns)
        if block_mask.full_kv_num_blocks is not None:
            full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, columns)
            states = torch.where(full == 1, FULL, states)
        states = states.to(torch.int8)
        return cls(states[(None,) * (4 - states.dim())], (q_block, kv_block), (L, S), block_mask.mask_mod)

    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:
        """Return where the block is full, or partial and the predicate True."""
        state = lookup(self.states, b, h, q_idx // self.block[0], kv_idx // self.block[1])
        return (state == FULL) | ((state == MIXED) & called(self.mask_mod, b, h, q_idx, kv_idx))

    def fit(self, extent: Extent, device: torch.device) -> Mask:
        """Raise unless the BlockMask was made for these sizes."""
        B, H = self.states.shape[:2]
        if B not in (1, extent.B) or H not in (1, extent.H) or self.lengths != (extent.L, extent.S):
            wanted, came = (extent.B, extent.H, extent.L, extent.S), (B, H, *self.lengths)
            expected = f"be made for (B or 1, H or 1, L, S) = {wanted}"
            raise rejected("masks.as_mask", "BlockMask", expected, f"one made for {came}")
        if not isinstance(self.mask_mod, Mask):
            return self
        return BlockSparse(self.states, self.block, self.lengths, self.mask_mod.fit(extent, device))

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return the bounds of the blocks that each tile touches, from two-dimensional prefix sums."""
        top, bottom = tiling.q_lo // self.block[0], tiling.q_hi // self.block[0] + 1
        left, right = tiling.k_lo // self.block[1], tiling.k_hi // self.block[1] + 1
        blocks = (bottom - top) * (right - left)
        counts = []
        for held in (self.states != 0, self.states == FULL):
            sums = torch.nn.functional.pad(held.long().cumsum(-1).cumsum(-2), (1, 0, 1, 0))
            counts.append(
                sums[..., bottom, right] - sums[..., top, right] - sums[..., bottom, left] + sums[..., top, left]
            )
        some, every = counts[0] > 0, counts[1] == blocks
        if tiling.exact:  # the predicate may differ per sequence and head where the lists do not
            some = some.expand(tiling.extent.B, tiling.extent.H, *some.shape[2:])
        return some, every

    def sizes(self) -> Sizes:
        """Return the sizes the BlockMask was made for."""
        B, H = self.states.shape[:2]
        return B, H, *self.lengths

    def __repr__(self) -> str:
        return f"as_mask(BlockMask{(*self.states.shape[:2], *self.lengths)})"


def _listed(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Return 1 for the columns that each row (..., rows) lists first in (..., rows, n): (..., rows, columns)."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
    # What is listed past the count is undefined, and is written to a column that is dropped.
    table = indices.new_zeros((*indices.shape[:-1], columns + 1), dtype=torch.int64)
    return table.scatter_(-1, torch.where(listed, indices, columns).long(), 1)[..., :columns]
