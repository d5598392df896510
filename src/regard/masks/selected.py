"""Selected keys: each query sees the keys, or blocks of keys, in its own list, as chosen by an indexer."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from regard._utils.constraints import INTEGERS, size
from regard._utils.errors import described, rejected, shape
from regard._utils.mechanism import mechanism
from regard._utils.part import brief
from regard._utils.tracing import is_exported_to_onnx, values_unavailable
from regard.masks.base import Extent, Mask, Sizes, Tiling


@mechanism(formula="visible iff j is in the list of query i", cost="O(L·K·E)")
def selected(indices: Tensor, block_size: int = 1) -> Mask:
    """Return the mask in which each query sees the keys, or blocks of keys, listed in its row.

    Query q of head h sees key k iff ``k // block_size`` is in ``indices[b, h, q]``. Use it with an indexer that chooses
    the keys, such as top-k of a cheaper score; gradients reach the scores of the chosen keys, not the choice. On a CPU,
    engine ``fused`` computes only the listed pairs, in O(L + S) memory besides the lists.

    Parameters
    ----------
    indices : Tensor (L, K), (H, L, K) or (B, H, L, K), integer
        Indices of keys or blocks in any order; −1 for none. A repeated index counts once. The head dimension may be 1,
        the number of heads, or a number that divides it, such as that of key and value heads: consecutive query heads
        share a list.
    block_size : int, default 1
        Number of consecutive keys that an index names; the last block may be shorter. Block 0 begins with key 0.

    Raises
    ------
    TypeError
        If ``indices`` is not an integer tensor.
    ValueError
        If it has another number of dimensions or, when used, sizes that do not match the call, or, on the CPU, an
        index below −1 or of no key; or if ``block_size`` is less than 1.

    References
    ----------
    DeepSeek-AI, DeepSeek-V3.2, 2025, arXiv 2512.02556.

    Examples
    --------
    >>> import torch
    >>> from regard import masks
    >>> print(masks.selected(torch.tensor([[0, -1], [1, 0], [3, 2], [-1, -1]])).draw(4))
    selected(tensor[4, 2])
    4 queries ↓, 4 keys →; █ visible, · not
      0
    0 █···
    1 ██··
    2 ··██
    3 ····
    """
    if not isinstance(indices, Tensor) or indices.dtype not in INTEGERS:
        expected = "be an integer tensor of key indices, −1 for none"
        raise rejected("masks.selected", "indices", expected, described(indices), TypeError)
    if indices.is_nested or indices.layout != torch.strided:
        raise rejected("masks.selected", "indices", "be a dense tensor of integers", described(indices), TypeError)
    if indices.dim() not in (2, 3, 4):
        raise rejected("masks.selected", "indices", "have shape (L, K), (H, L, K) or (B, H, L, K)", shape(indices))
    return Selected(indices[(None,) * (4 - indices.dim())], size("masks.selected", "block_size", block_size))


@final
class Selected(Mask):
    """The blocks of keys in a list per query, (B or 1, any divisor of H, L, K); −1 is no block."""

    def __init__(self, indices: Tensor, block_size: int) -> None:
        self.indices, self.block_size = indices, block_size

    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:
        """Return which keys are in the lists of the queries."""
        lists, kv_idx = self._lists_of(b, h, q_idx), kv_idx // self.block_size
        if kv_idx.dim() != 1 or q_idx.dim() < 2 or q_idx.shape[-1] != 1 or is_exported_to_onnx():
            return (lists == kv_idx.unsqueeze(-1)).any(-1)
        lists = lists.squeeze(-2).sort(-1).values
        keys = kv_idx.to(torch.int64).expand(*lists.shape[:-1], -1).contiguous()
        place = torch.searchsorted(lists, keys).clamp(max=lists.shape[-1] - 1)
        return lists.gather(-1, place) == keys

    def _lists_of(self, b: Tensor, h: Tensor, q_idx: Tensor) -> Tensor:
        """Return the lists of these queries, with the indices' shape and K at the end."""
        B, heads, L, _ = self.indices.shape
        index = [i if n != 1 else torch.zeros_like(i) for i, n in ((b, B), (h, heads), (q_idx, L))]
        lists = torch.ops.aten.index.Tensor(self.indices, list(index)).to(torch.int64)
        return lists if lists.shape[-1] else torch.nn.functional.pad(lists, (0, 1), value=-1)

    def fit(self, extent: Extent, device: torch.device) -> Mask:  # noqa: ARG002
        """Check sizes and indices, and repeat the lists of heads that share one."""
        B, heads, L, _ = self.indices.shape
        shares = heads in (1, extent.H) or (heads > 0 and extent.H % heads == 0)
        if B not in (1, extent.B) or L != extent.L or not shares:
            expected = (
                f"have shape (B or 1, heads, L, K) with B = {extent.B}, L = {extent.L} and a number of heads that "
                f"divides {extent.H}"
            )
            raise rejected("masks.selected", "indices", expected, shape(self.indices))
        if self.indices.is_cpu and self.indices.numel() and not values_unavailable(self.indices):
            least, greatest = (int(x) for x in self.indices.aminmax())
            if least < -1 or greatest * self.block_size >= extent.S:
                wrong = least if least < -1 else greatest
                what = (
                    "keys below S" if self.block_size == 1 else f"blocks of {self.block_size} keys that begin below S"
                )
                expected = f"hold indices of {what} = {extent.S}, or −1 for none"
                raise rejected("masks.selected", "indices", expected, wrong)
        # No engine need know of keys that a block would have behind the last.
        block_size = min(self.block_size, max(extent.S, 1))
        if heads in (1, extent.H):
            return self if block_size == self.block_size else Selected(self.indices, block_size)
        return Selected(self.indices.repeat_interleave(extent.H // heads, 1), block_size)

    def key_lists(self, extent: Extent, first: int = 0, last: int | None = None) -> Tensor | None:
        """Return the keys of each list."""
        indices = self.indices[:, :, first:last]
        if self.block_size == 1:
            return indices
        blocks = indices.to(torch.int32).unsqueeze(-1)
        keys = blocks * self.block_size + torch.arange(self.block_size, dtype=torch.int32, device=blocks.device)
        return keys.masked_fill_((blocks < 0) | (keys >= extent.S), -1).flatten(-2)

    @property
    def listed_keys(self) -> int:
        """The number of keys that a list names."""
        return self.indices.shape[-1] * self.block_size

    def nonempty_rows(self, extent: Extent) -> Tensor:  # noqa: ARG002
        """Return which lists hold a key."""
        return (self.indices >= 0).any(-1)

    def visible_keys(self, extent: Extent) -> Tensor:
        """Return which keys are in a list."""
        lists, blocks = self.indices.flatten(2).to(torch.int64), -(-extent.S // self.block_size)
        marks = torch.zeros((*lists.shape[:2], blocks + 1), dtype=torch.bool, device=lists.device)
        marks = marks.scatter(-1, torch.where(lists < 0, blocks, lists), value=True)[..., :blocks]
        return marks.repeat_interleave(self.block_size, -1)[..., : extent.S]

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return which tiles hold a listed key; whether all pairs of a tile are visible is not known."""
        (_, nk), (_, S), length = tiling.counts, tiling.lengths, self.block_size
        blocks = self.indices.to(torch.int64)
        first = blocks * length - tiling.first_key
        inside = (blocks >= 0) & (first < S) & (first + length > 0)
        marks = torch.zeros((*blocks.shape[:3], nk + 1), dtype=torch.bool, device=blocks.device)
        # Keys of a block that are at most a tile apart, so that each of its tiles is met.
        for step in (*range(0, length - 1, min(tiling.kv_block, length)), length - 1):
            column = (first + step).clamp(0, max(S - 1, 0)) // tiling.kv_block
            marks = marks.scatter(-1, torch.where(inside, column, nk), value=True)
        some = tiling.over_queries(marks[..., :nk], "any")
        return some, torch.zeros((), dtype=torch.bool, device=blocks.device)

    def sizes(self) -> Sizes:
        """Return the sizes of the tensor."""
        B, heads, L, _ = self.indices.shape
        found: Any = None if B == 1 else B, None if heads == 1 else heads, L, None
        return found

    def __repr__(self) -> str:
        blocks = "" if self.block_size == 1 else f", {self.block_size}"
        return f"selected({brief(self.indices.squeeze((0, 1)))}{blocks})"
