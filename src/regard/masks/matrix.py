"""Masks and biases written out as a matrix, as torch's BlockMask, or cut from another mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, TypeGuard, final

import torch
from torch import Tensor

from regard._utils.errors import described, rejected, shape
from regard._utils.part import brief
from regard.masks.base import (
    FULL,
    MIXED,
    Diagonals,
    Extent,
    Mask,
    Sizes,
    Span,
    Tiling,
    called,
    convertible,
    is_instance,
    lookup,
    run,
)

# A mask or bias written out as a matrix -------------------------------------------------------------------------------


_KIND = "be a bool tensor (True = may attend) or a float tensor (added to the score; -inf hides)"


def dense(tensor: Tensor) -> Mask:
    """Return the mask, or bias, that is written out in a tensor: torch's ``attn_mask``.

    Visible iff ``tensor[b, h, q, k]`` is True, or is not −inf and is added to the score.

    Parameters
    ----------
    tensor : Tensor (L, S), (H, L, S) or (B, H, L, S), bool or float
        A size of 1 is shared along that dimension. Three dimensions are heads first, as torch broadcasts them;
        one matrix per sequence is (B, 1, L, S). A float tensor gets gradients.

    Raises
    ------
    TypeError
        If the tensor is neither bool nor float, or not a tensor.
    ValueError
        If it has another number of dimensions; when used, if its sizes are not those of the call, or if it is
        (H, L, S) with as many heads as sequences, where it may have been meant as one matrix per sequence.

    Examples
    --------
    >>> import torch
    >>> from regard import masks
    >>> mask = masks.dense(torch.tensor([[0.0, -1.0, float("-inf")]]))
    >>> b = h = torch.tensor(0)
    >>> mask(0, 0, 0, torch.arange(3)), mask.bias(b, h, torch.tensor(0), torch.arange(3))
    (tensor([ True,  True, False]), tensor([ 0., -1.,  0.]))
    """
    return Dense.of(tensor, "masks.dense", "tensor")


@final
class Dense(Mask):
    """Pairs marked True, or not −inf, in a tensor (L, S), (H, L, S) or (B, H, L, S) with 1 where it is shared."""

    def __init__(self, values: Tensor, origin: tuple[str, str]) -> None:
        self.values = values
        self._origin = origin

    @classmethod
    def of(cls, tensor: Any, function: str, argument: str) -> Self:
        """Return the mask of a checked tensor; errors name this argument of this function."""
        if not isinstance(tensor, Tensor) or not (tensor.dtype == torch.bool or tensor.is_floating_point()):
            raise rejected(function, argument, _KIND, described(tensor), TypeError)
        if tensor.is_nested or tensor.layout != torch.strided:
            layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise rejected(function, argument, "be a dense tensor", f"a {layout} one", TypeError)
        if tensor.dim() not in (2, 3, 4):
            raise rejected(function, argument, "have shape (L, S), (H, L, S) or (B, H, L, S)", shape(tensor))
        return cls(tensor, (function, argument))

    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:
        """Return the marks, or where the number is not −inf."""
        found = lookup(self.values, *(b, h, q_idx, kv_idx)[-self.values.dim() :])
        return ~found.isneginf() if self.has_bias else found

    def bias(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:
        """Return the numbers, 0 in place of −inf."""
        if not self.has_bias:
            return None
        found = lookup(self.values, *(b, h, q_idx, kv_idx)[-self.values.dim() :])
        return found.masked_fill(found.isneginf(), 0.0)

    @property
    def has_bias(self) -> bool:
        """Whether the tensor holds floats."""
        return self.values.is_floating_point()

    def fit(self, extent: Extent, device: torch.device) -> Mask:  # noqa: ARG002
        """Check the tensor's sizes."""
        B, H, L, S = whole = (extent.B, extent.H, extent.L, extent.S)
        came = tuple(self.values.shape)
        fits = all(size in (1, full) for size, full in zip(came, whole[-len(came) :]))
        if fits and not (len(came) == 3 and came[0] == B == H != 1):
            return self
        expected = f"have shape (L, S) = {(L, S)}, (H, L, S) = {(H, L, S)} or (B, H, L, S) = {whole}, or 1 where shared"
        hint = ""
        if fits:
            expected = f"say whether it is (1, H, L, S) or (B, 1, L, S), as there are {B} of both: unsqueeze(0) or (1)"
        elif len(came) == 3 and came[0] == B and all(x in (1, y) for x, y in zip(came[1:], (L, S))):
            hint = "; for one matrix per sequence, unsqueeze(1)"
        elif len(came) == 2 and came == (B, S):
            hint = "; for the padding of each sequence, use masks.key_padding"
        raise rejected(*self._origin, expected, f"{came}{hint}")

    @property
    def bounds_are_exact(self) -> bool:
        """Always."""
        return True

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return which tiles have a visible pair, and which only such; keys are reduced first, then queries."""
        seen = self._seen()
        some = tiling.over_queries(tiling.over_keys(seen, "any"), "any")
        return some, tiling.over_queries(tiling.over_keys(seen, "all"), "all")

    def span(self, extent: Extent, device: torch.device) -> Span | None:  # noqa: ARG002
        """Return the keys that all queries see, or all keys for some queries; unknown for a matrix of both."""
        if self.values.shape[-1] == 1:
            return None, self._seen()[..., 0] * extent.S
        return run(self._seen()) if self.values.shape[-2] == 1 else None

    def _seen(self) -> Tensor:
        """Return where a pair is visible: (B or 1, H or 1, L or 1, S or 1)."""
        seen = ~self.values.detach().isneginf() if self.has_bias else self.values
        return seen[(None,) * (4 - seen.dim())]

    def sizes(self) -> Sizes:
        """Return the tensor's sizes, where not shared."""
        padded: list[Any] = [None] * (4 - self.values.dim()) + [
            size if size != 1 else None for size in self.values.shape
        ]
        return padded[0], padded[1], padded[2], padded[3]

    def __repr__(self) -> str:
        return f"dense({brief(self.values)})"


# A mask given as lists of blocks: FlexAttention's BlockMask -----------------------------------------------------------


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


# A part of a larger mask: some neighbouring queries against some neighbouring keys ------------------------------------


@final
class Submatrix(Mask):
    """The queries from ``first_query`` on against the keys from ``first_key`` on, of a mask for more of both.

    Where a sequence is divided, among processes or into chunks, a mask goes on speaking of positions in the whole.

    Parameters
    ----------
    mask : Mask
        Bound to the whole, by :meth:`Mask.bind`.
    whole : Extent
        The size it is bound to.
    first_query, first_key : int
        Where the part begins. Its own size is that of the call.

    Examples
    --------
    >>> from regard import masks
    >>> whole = masks.Extent(1, 1, 8, 8)
    >>> part = Submatrix(masks.window(2, 0).bind(whole, "cpu"), whole, 4, 2)
    >>> print(part.draw(4, 4))
    window(2, 0)[4:, 2:]
    4 queries ↓, 4 keys →; █ visible, · not
      0
    0 ███·
    1 ·███
    2 ··██
    3 ···█
    """

    def __init__(self, mask: Mask, whole: Extent, first_query: int, first_key: int) -> None:
        self.mask = mask
        self.first_query = first_query
        self.first_key = first_key
        self._sizes = (whole.B, whole.H, whole.L, whole.S)

    @property
    def whole(self) -> Extent:
        """The size of the mask inside."""
        return Extent(*self._sizes)

    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:
        """Return what the mask shows at the positions in the whole."""
        return self.mask.visible(b, h, q_idx + self.first_query, kv_idx + self.first_key)

    def bias(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:
        """Return what the mask adds at the positions in the whole."""
        return self.mask.bias(b, h, q_idx + self.first_query, kv_idx + self.first_key)

    @property
    def has_bias(self) -> bool:
        """Whether the mask has."""
        return self.mask.has_bias

    @property
    def hides(self) -> bool:
        """Whether the mask does."""
        return self.mask.hides

    @property
    def is_structural(self) -> bool:
        """Whether the mask is."""
        return self.mask.is_structural

    @property
    def bounds_are_exact(self) -> bool:
        """Whether the mask's are."""
        return self.mask.bounds_are_exact

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return the mask's bounds of tiles that lie in the part."""
        return self.mask.bounds(tiling.inside(self.whole, self.first_query, self.first_key))

    def fit(self, extent: Extent, device: torch.device) -> Mask:  # noqa: ARG002
        """Check that the part lies in the whole."""
        B, H, L, S = self._sizes
        fits = self.first_query + extent.L <= L and self.first_key + extent.S <= S
        if (extent.B, extent.H) == (B, H) and fits:
            return self
        expected = f"be a part of (B, H, L, S) = {self._sizes} from ({self.first_query}, {self.first_key}) on"
        raise rejected("masks.Submatrix", "mask", expected, f"one of {(extent.B, extent.H, extent.L, extent.S)}")

    def as_band(self, extent: Extent) -> Diagonals | None:  # noqa: ARG002
        """Return the mask's band, moved."""
        band = self.mask.as_band(self.whole)
        if band is None:
            return None
        moved = self.first_query - self.first_key
        low, high = (None if edge is None else edge + moved for edge in band)
        return low, high

    def span(self, extent: Extent, device: torch.device) -> Span | None:
        """Return the mask's span, moved."""
        band = self.as_band(extent)
        if band is not None:
            q_idx = torch.arange(extent.L, device=device)[None, None]
            low, high = (None if edge is None else q_idx + max(min(edge, extent.S), -extent.L) for edge in band)
            return low, None if high is None else high + 1
        span = self.mask.span(self.whole, device)
        if span is None:
            return None
        start, stop = (None if edge is None else self._moved(edge, extent.L) for edge in span)
        return start, stop

    def _moved(self, edge: Tensor, count: int) -> Tensor:
        """Return an edge (B or 1, H or 1, L or 1) of the rows in the part, counted from its first key."""
        shared = edge.shape[-1] == 1
        return (edge if shared else edge.narrow(-1, self.first_query, count)) - self.first_key

    def __repr__(self) -> str:
        return f"{self.mask!r}[{self.first_query}:, {self.first_key}:]"


def submatrix(mask: Mask, whole: Extent, rows: tuple[int, int], keys: tuple[int, int]) -> Mask:
    """Return the part of a bound mask for some queries and keys, (first, count) each; a matrix is cut.

    Examples
    --------
    >>> import torch
    >>> from regard import masks
    >>> submatrix(masks.dense(torch.ones(8, 8).tril().bool()), masks.Extent(1, 1, 8, 8), (0, 4), (4, 2))
    dense(tensor[4, 2])
    """
    if not isinstance(mask, Dense):
        return Submatrix(mask, whole, rows[0], keys[0])
    values = mask.values
    for dim, (first, count) in ((-2, rows), (-1, keys)):
        values = values if values.shape[dim] == 1 else values.narrow(dim, first, count)
    return Dense.of(values, "masks.submatrix", "mask")


def is_matrix(mask: Any) -> TypeGuard[Tensor]:
    """Whether a mask is written out in a tensor; torch's CausalBias is a tensor by its class alone."""
    return isinstance(mask, Tensor) and not is_instance(mask, "torch.nn.attention.bias.CausalBias")


def _is_block_mask(value: Any) -> bool:
    return is_instance(value, "torch.nn.attention.flex_attention.BlockMask")


convertible(_is_block_mask, lambda mask, function, argument: BlockSparse.of(mask))  # noqa: ARG005
convertible(is_matrix, Dense.of)
