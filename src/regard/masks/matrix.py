"""Dense masks and biases, torch's BlockMask, and slices of other masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, TypeGuard, final

import torch
from torch import Tensor

from regard._utils.constraints import INTEGERS
from regard._utils.errors import described, rejected, shape
from regard._utils.mechanism import mechanism
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
    is_instance,
    lookup,
    register_conversion,
    run,
)

# Dense masks and biases -----------------------------------------------------------------------------------------------


_KIND = "be a bool tensor (True = may attend) or a float tensor (added to the score; -inf hides)"


@mechanism(formula="visible where True, or adds a number for each pair", cost="O(L·S·E)")
def dense(tensor: Tensor) -> Mask:
    """Return the mask or bias given by a tensor, like torch's ``attn_mask``.

    A bool tensor shows a pair iff ``tensor[b, h, q, k]`` is True. A float tensor is added to the score; −inf hides.

    Parameters
    ----------
    tensor : Tensor (L, S), (H, L, S) or (B, H, L, S), bool or float
        Sizes of 1 broadcast. As in torch, three dimensions are (H, L, S); one matrix per sequence is (B, 1, L, S).
        A float tensor gets gradients.

    Raises
    ------
    TypeError
        If ``tensor`` is not a bool or float tensor.
    ValueError
        If it has another number of dimensions or, when used, sizes that do not match the call. Also if it has three
        dimensions and there are as many heads as sequences, because (B, L, S) may have been meant.

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
    """A mask or bias given by a tensor (L, S), (H, L, S) or (B, H, L, S), in which sizes of 1 broadcast."""

    def __init__(self, values: Tensor, origin: tuple[str, str]) -> None:
        self.values = values
        self._origin = origin

    @classmethod
    def of(cls, tensor: Any, function: str, argument: str) -> Self:
        """Check the tensor and return its mask; errors name this argument of this function."""
        if not isinstance(tensor, Tensor) or not (tensor.dtype == torch.bool or tensor.is_floating_point()):
            integer = isinstance(tensor, Tensor) and tensor.dtype in INTEGERS
            hint = "; if 1 = may attend, pass it as tensor.bool()" if integer else ""
            raise rejected(function, argument, _KIND, f"{described(tensor)}{hint}", TypeError)
        if tensor.is_nested or tensor.layout != torch.strided:
            layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise rejected(function, argument, "be a dense tensor", f"a {layout} one", TypeError)
        if tensor.dim() not in (2, 3, 4):
            hint = "; for the same keys in all queries, unsqueeze(0) makes it (1, S)" if tensor.dim() == 1 else ""
            expected = "have shape (L, S), (H, L, S) or (B, H, L, S)"
            raise rejected(function, argument, expected, f"{shape(tensor)}{hint}")
        return cls(tensor, (function, argument))

    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:
        """Return the bool tensor, or where the float tensor is not −inf."""
        found = lookup(self.values, *(b, h, q_idx, kv_idx)[-self.values.dim() :])
        return ~found.isneginf() if self.has_bias else found

    def bias(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:
        """Return the float tensor, with 0 in place of −inf."""
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
        B, H, L, S = whole = tuple(extent)
        got = tuple(self.values.shape)
        fits = all(size in (1, full) for size, full in zip(got, whole[-len(got) :]))
        if fits and not (len(got) == 3 and got[0] == B == H != 1):
            return self
        expected = f"have shape (L, S) = {(L, S)}, (H, L, S) = {(H, L, S)} or (B, H, L, S) = {whole}; 1 broadcasts"
        hint = ""
        if fits:
            expected = f"be (1, H, L, S) or (B, 1, L, S), as there are {B} heads and sequences: unsqueeze(0) or (1)"
        elif len(got) == 3 and got[0] == B and all(x in (1, y) for x, y in zip(got[1:], (L, S))):
            hint = "; for one matrix per sequence, unsqueeze(1)"
        elif len(got) == 3 and got[0] == B * H and all(x in (1, y) for x, y in zip(got[1:], (L, S))):
            hint = f"; for one matrix per sequence and head, unflatten(0, ({B}, {H}))"
        elif len(got) == 2 and got == (B, S):
            hint = "; for key padding, use masks.key_padding"
        raise rejected(*self._origin, expected, f"{got}{hint}")

    @property
    def bounds_are_exact(self) -> bool:
        """Always."""
        return True

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return which tiles have a visible pair, and which have no hidden pair."""
        visible = self._visible()
        some = tiling.over_queries(tiling.over_keys(visible, "any"), "any")
        return some, tiling.over_queries(tiling.over_keys(visible, "all"), "all")

    def span(self, extent: Extent, device: torch.device) -> Span | None:  # noqa: ARG002
        """Return the span of a mask that is constant along queries or keys; None for a full matrix."""
        if self.values.shape[-1] == 1:
            return None, self._visible()[..., 0] * extent.S
        return run(self._visible()) if self.values.shape[-2] == 1 else None

    def _visible(self) -> Tensor:
        """Return the visible pairs: (B or 1, H or 1, L or 1, S or 1)."""
        visible = ~self.values.detach().isneginf() if self.has_bias else self.values
        return visible[(None,) * (4 - visible.dim())]

    def sizes(self) -> Sizes:
        """Return the tensor's sizes; None for those of 1."""
        padded: list[Any] = [None] * (4 - self.values.dim()) + [
            size if size != 1 else None for size in self.values.shape
        ]
        return padded[0], padded[1], padded[2], padded[3]

    def __repr__(self) -> str:
        return f"dense({brief(self.values)})"


# FlexAttention's BlockMask --------------------------------------------------------------------------------------------


@final
class BlockSparse(Mask):
    """Pairs in full blocks, and pairs in partial blocks for which ``mask_mod`` is True.

    Parameters
    ----------
    states : Tensor (B or 1, H or 1, rows, columns), int8
        EMPTY, MIXED or FULL for each block.
    block : (int, int)
        Number of queries and keys per block.
    lengths : (int, int)
        L and S.
    mask_mod : callable
        FlexAttention's predicate, evaluated in MIXED blocks only.
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
        """Return the pairs in full blocks, and those in partial blocks for which the predicate is True."""
        state = lookup(self.states, b, h, q_idx // self.block[0], kv_idx // self.block[1])
        return (state == FULL) | ((state == MIXED) & called(self.mask_mod, b, h, q_idx, kv_idx))

    def fit(self, extent: Extent, device: torch.device) -> Mask:
        """Raise unless the BlockMask was made for these sizes."""
        B, H = self.states.shape[:2]
        if B not in (1, extent.B) or H not in (1, extent.H) or self.lengths != (extent.L, extent.S):
            wanted, got = tuple(extent), (B, H, *self.lengths)
            expected = f"be made for (B or 1, H or 1, L, S) = {wanted}"
            raise rejected("masks.as_mask", "BlockMask", expected, f"one made for {got}")
        if not isinstance(self.mask_mod, Mask):
            return self
        return BlockSparse(self.states, self.block, self.lengths, self.mask_mod.fit(extent, device))

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return the bounds of each tile, from two-dimensional prefix sums over the blocks."""
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
        if tiling.exact:  # the predicate may differ per sequence and head even if the blocks do not
            some = some.expand(tiling.extent.B, tiling.extent.H, *some.shape[2:])
        return some, every

    def sizes(self) -> Sizes:
        """Return the sizes of the BlockMask."""
        B, H = self.states.shape[:2]
        return B, H, *self.lengths

    def __repr__(self) -> str:
        return f"as_mask(BlockMask{(*self.states.shape[:2], *self.lengths)})"


def _listed(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Return 1 for the listed columns: the first ``counts`` (..., rows) of ``indices`` (..., rows, n)."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
    # Entries past the count are undefined; write them to an extra column that is dropped.
    table = indices.new_zeros((*indices.shape[:-1], columns + 1), dtype=torch.int64)
    return table.scatter_(-1, torch.where(listed, indices, columns).long(), 1)[..., :columns]


# Slices of larger masks -----------------------------------------------------------------------------------------------


@final
class Submatrix(Mask):
    """A slice of a larger mask: queries from ``first_query`` and keys from ``first_key``.

    It applies a mask on whole sequences to a part of them, held by a process or computed as a chunk.

    Parameters
    ----------
    mask : Mask
        The whole mask, bound by :meth:`Mask.bind`.
    whole : Extent
        The size it is bound to.
    first_query, first_key : int
        Start of the slice. The call determines its size.

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
        self._sizes = tuple(whole)

    @property
    def whole(self) -> Extent:
        """The size of the whole mask."""
        return Extent(*self._sizes)

    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:
        """Return the visible pairs, at shifted positions."""
        return self.mask.visible(b, h, q_idx + self.first_query, kv_idx + self.first_key)

    def bias(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:
        """Return the bias, at shifted positions."""
        return self.mask.bias(b, h, q_idx + self.first_query, kv_idx + self.first_key)

    @property
    def has_bias(self) -> bool:
        """Whether the whole mask has a bias."""
        return self.mask.has_bias

    @property
    def hides(self) -> bool:
        """Whether the whole mask hides pairs."""
        return self.mask.hides

    @property
    def is_structural(self) -> bool:
        """Whether the whole mask is structural."""
        return self.mask.is_structural

    @property
    def bounds_are_exact(self) -> bool:
        """Whether the bounds of the whole mask are exact."""
        return self.mask.bounds_are_exact

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return the bounds of the shifted tiles."""
        return self.mask.bounds(tiling.inside(self.whole, self.first_query, self.first_key))

    def fit(self, extent: Extent, device: torch.device) -> Mask:  # noqa: ARG002
        """Check that the slice lies within the whole mask."""
        B, H, L, S = self._sizes
        fits = self.first_query + extent.L <= L and self.first_key + extent.S <= S
        if (extent.B, extent.H) == (B, H) and fits:
            return self
        expected = f"be a slice of (B, H, L, S) = {self._sizes} from ({self.first_query}, {self.first_key})"
        raise rejected("masks.Submatrix", "mask", expected, f"one of {tuple(extent)}")

    def as_band(self, extent: Extent) -> Diagonals | None:  # noqa: ARG002
        """Return the shifted band."""
        band = self.mask.as_band(self.whole)
        if band is None:
            return None
        shift = self.first_query - self.first_key
        low, high = (None if edge is None else edge + shift for edge in band)
        return low, high

    def span(self, extent: Extent, device: torch.device) -> Span | None:
        """Return the shifted span."""
        band = self.as_band(extent)
        if band is not None:
            q_idx = torch.arange(extent.L, device=device)[None, None]
            low, high = (None if edge is None else q_idx + max(min(edge, extent.S), -extent.L) for edge in band)
            return low, None if high is None else high + 1
        span = self.mask.span(self.whole, device)
        if span is None:
            return None
        start, stop = (None if edge is None else self._shifted(edge, extent.L) for edge in span)
        return start, stop

    def _shifted(self, edge: Tensor, count: int) -> Tensor:
        """Return the edges of the rows in the slice, relative to its first key."""
        shared = edge.shape[-1] == 1
        return (edge if shared else edge.narrow(-1, self.first_query, count)) - self.first_key

    def __repr__(self) -> str:
        return f"{self.mask!r}[{self.first_query}:, {self.first_key}:]"


@mechanism(formula="another mask's rows and keys, of a part", cost="O(L·S·E)")
def submatrix(mask: Mask, whole: Extent, rows: tuple[int, int], keys: tuple[int, int]) -> Mask:
    """Return a slice of a bound mask, as (first, count) of queries and of keys; a dense mask is sliced directly.

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
    """Whether a mask is a tensor; torch's CausalBias, a Tensor subclass without values, does not count."""
    return isinstance(mask, Tensor) and not is_instance(mask, "torch.nn.attention.bias.CausalBias")


def _is_block_mask(value: Any) -> bool:
    return is_instance(value, "torch.nn.attention.flex_attention.BlockMask")


register_conversion(_is_block_mask, lambda mask, function, argument: BlockSparse.of(mask))  # noqa: ARG005
register_conversion(is_matrix, Dense.of)
