"""Structured masks through torch's fused kernel: blocks of queries, each over the ranges of keys that it sees.

Ranges of one block are merged by their log-sum-exp. The backward pass hands the merged output and log-sum-exp to
the kernel's own backward for each range, which is exact: every range's weights are relative to the whole row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard._torch import flash_attention_backward
from regard.engines.block_mask import BlockMask, Run
from regard.engines.flash import flash_attention
from regard.engines.online_softmax import OnlineSoftmax
from regard.engines.tiles import Span
from regard.masks.base import EMPTY, FULL, MIXED, Extent, Mask

#: Rows of a block, and the keys by which its ranges are measured.
ROWS, BLOCK = 128, 128
#: A run of full blocks at least this long is worth a call of its own, free of a mask.
FULL_RUN = 4
#: Keys of one masked call at most, which bounds the mask that is made for it.
MASKED_RUN = 16


def largest_mask() -> int:
    """Return how many numbers the mask of one call holds at most, for each head."""
    return ROWS * BLOCK * MASKED_RUN


@dataclass(frozen=True)
class KeyRange:
    """Keys that a block sees in one call; ``masked`` when some pairs among them may not meet."""

    cols: Span
    masked: bool


@dataclass(frozen=True)
class QueryBlock:
    """Queries ``rows`` of batches and heads ``where``, and the ranges of keys they see."""

    where: tuple[slice, slice]
    rows: Span
    ranges: tuple[KeyRange, ...]


def query_blocks(mask: Mask, extent: Extent) -> list[QueryBlock]:
    """Cut a bound mask into blocks, for each batch and head in which it differs."""
    blocks = BlockMask.of(mask, extent, ROWS, BLOCK)
    by_batch, by_head = blocks.differs
    found = []
    for b, h, row, runs in blocks.rows():
        where = slice(b, b + 1) if by_batch else slice(None), slice(h, h + 1) if by_head else slice(None)
        rows = Span(row * ROWS, min((row + 1) * ROWS, extent.L))
        found.append(QueryBlock(where, rows, tuple(_ranges(runs))))
    return found


def _is_long(run: Run) -> bool:
    """Whether a run is worth a call of its own, free of a mask."""
    return run.state == FULL and run.stop - run.start > (FULL_RUN - 1) * BLOCK


def _ranges(runs: list[Run]) -> Iterator[KeyRange]:
    """Join runs of blocks into ranges: long full ones by themselves, the rest masked, in parts of bounded size."""
    joined: list[Run] = []
    for run in runs:
        alone = run.state == EMPTY or _is_long(run)
        last = joined[-1] if joined and joined[-1].stop == run.start else None
        if alone or last is None or last.state == EMPTY or _is_long(last):
            joined.append(run)
        else:
            state = FULL if last.state == run.state == FULL else MIXED
            joined[-1] = Run(last.start, run.stop, state)
    for run in joined:
        if run.state == FULL:
            yield KeyRange(Span(run.start, run.stop), masked=False)
        elif run.state == MIXED:
            for start in range(run.start, run.stop, MASKED_RUN * BLOCK):
                yield KeyRange(Span(start, min(start + MASKED_RUN * BLOCK, run.stop)), masked=True)


@dataclass(frozen=True)
class BlockedRun:
    """Everything about a block run that is not differentiated."""

    mask: Mask
    extent: Extent
    blocks: list[QueryBlock]
    scale: float
    wants_grad: bool
    #: The output and log-sum-exp of rows that see more keys than these, where they were found elsewhere.
    known: tuple[Tensor, Tensor] | None = None

    def shift(self, block: QueryBlock, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Return the largest bias of each row (b, h, l, 1), 0 where it sees nothing; None where nothing is merged.

        Ranges merge by their log-sum-exp, in which a bias of −1e9 would leave no digit for the scores.
        """
        if not self.mask.has_bias or len(block.ranges) < 2:
            return None
        peak: Tensor | None = None
        for part in block.ranges:
            added, _ = self.tile_mask(block, part, dtype, device, None)
            assert added is not None
            largest = added.amax(-1, keepdim=True)
            peak = largest if peak is None else torch.maximum(peak, largest)
        assert peak is not None
        return torch.where(peak == -torch.inf, 0.0, peak)

    def tile_mask(
        self, block: QueryBlock, part: KeyRange, dtype: torch.dtype, device: torch.device, shift: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return what is added to the scores (b, h, l, s), and which rows see anything (b, h, l, 1); None for all.

        It is added in float32 where features of ``dtype`` are narrower, and less the ``shift`` of each row.
        """
        if not part.masked and not self.mask.has_bias:
            return None, None
        b = torch.arange(self.extent.B, device=device)[block.where[0]].view(-1, 1, 1, 1)
        h = torch.arange(self.extent.H, device=device)[block.where[1]].view(-1, 1, 1)
        q_idx = torch.arange(block.rows.start, block.rows.stop, device=device).unsqueeze(1)
        index = b, h, q_idx, torch.arange(part.cols.start, part.cols.stop, device=device)
        bias = self.mask.bias(*index) if self.mask.has_bias else None
        wide = torch.promote_types(dtype, torch.float32)
        added = torch.zeros((), dtype=wide, device=device) if bias is None else bias.detach().to(wide)
        seen = None
        visible = self.mask.visible(*index) if part.masked else None
        if visible is not None:
            added = torch.where(visible, added, -torch.inf)
            seen = visible.any(-1, keepdim=True)
            seen = seen.view((1,) * (4 - seen.dim()) + seen.shape)
        if shift is not None:
            added = added - shift
        sizes = (q_idx.shape[0], index[3].shape[0])
        outer = added.shape[:-2] if added.dim() >= 2 else ()
        return added.expand(*(1,) * (2 - len(outer)), *outer, *sizes), seen


class BlockedAttention(torch.autograd.Function):
    """Attention under a structured mask; query, key and value (B, H, N, E) of one width, on the CPU."""

    @staticmethod
    def forward(
        ctx: Any, run: BlockedRun, query: Tensor, key: Tensor, value: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        if run.known is not None:
            return _attached(ctx, run, query, key, value, tensors)
        output = torch.zeros_like(query)
        relative = query.new_full(query.shape[:3], -torch.inf, dtype=torch.promote_types(query.dtype, torch.float32))
        lse = relative.clone()
        for block in run.blocks:
            rows = (*block.where, block.rows.slice)
            shift = run.shift(block, query.dtype, query.device)
            found = _block(run, block, query[rows], key[block.where], value[block.where], shift)
            output[rows], relative[rows] = found
            lse[rows] = found[1] if shift is None else found[1] + shift.squeeze(-1)
        ctx.run = run
        # The mask's tensors are saved too, so that autograd notices when one was changed in place.
        ctx.save_for_backward(query, key, value, output, relative, *tensors)
        ctx.mark_non_differentiable(lse)
        return output, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse, *tensors = ctx.saved_tensors
        run = replace(ctx.run, mask=ctx.run.mask.with_tensors(tensors))
        grad = grad.contiguous()
        wide = lse.dtype  # sums over blocks keep their precision for narrow inputs
        d_query, d_key, d_value = (torch.zeros_like(t, dtype=wide) for t in (query, key, value))
        lse = torch.where(lse == -torch.inf, 0.0, lse)  # what the kernel writes for a row that sees nothing
        for block in run.blocks:
            rows = (*block.where, block.rows.slice)
            shift = run.shift(block, query.dtype, query.device)
            for part in block.ranges:
                cols = (*block.where, part.cols.slice)
                added = run.tile_mask(block, part, query.dtype, query.device, shift)[0]
                found = flash_attention_backward(
                    grad[rows], query[rows], key[cols], value[cols], output[rows], lse[rows], 0.0, False,
                    attn_mask=added, scale=run.scale,
                )  # fmt: skip
                for total, where, gradient in zip((d_query, d_key, d_value), (rows, cols, cols), found):
                    total[where] += gradient
        grads = (total.to(query.dtype) for total in (d_query, d_key, d_value))
        return None, *grads, *(None for _ in tensors)


def _attached(
    ctx: Any, run: BlockedRun, query: Tensor, key: Tensor, value: Tensor, tensors: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """Return a known output and log-sum-exp, with what :meth:`BlockedAttention.backward` needs of them."""
    assert run.known is not None
    output, lse = (t.detach() for t in run.known)
    relative = lse.clone()
    for block in run.blocks:
        shift = run.shift(block, query.dtype, query.device)
        if shift is not None:
            relative[(*block.where, block.rows.slice)] -= shift.squeeze(-1)
    ctx.run = replace(run, known=None)
    ctx.save_for_backward(query, key, value, output, relative, *tensors)
    ctx.mark_non_differentiable(lse)
    return output, lse


def _block(
    run: BlockedRun, block: QueryBlock, query: Tensor, key: Tensor, value: Tensor, shift: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return a block's output (b, h, l, V) and log-sum-exp (b, h, l), relative to the ``shift`` of its rows."""
    parts = []
    for part in block.ranges:
        added, seen = run.tile_mask(block, part, query.dtype, query.device, shift)
        cols = part.cols.slice
        out, flat = flash_attention(query, key[:, :, cols], value[:, :, cols], False, added, run.scale, fits=True)
        lse = flat.unsqueeze(-1)
        parts.append((out, lse if seen is None else torch.where(seen, lse, -torch.inf)))
    if len(parts) == 1:
        return parts[0][0], parts[0][1].squeeze(-1)
    wide = torch.promote_types(query.dtype, torch.float32)
    state = OnlineSoftmax(query.new_zeros(*query.shape[:3], 1, dtype=wide), value.shape[-1])
    for out, lse in parts:
        state.merge(out, lse)
    out, lse = state.finish()
    return out.to(query.dtype), lse.squeeze(-1)
