"""Leave-one-out: each query sees every key except its own."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from regard._utils.constraints import TensorOf
from regard._utils.errors import rejected, shape
from regard._utils.mechanism import mechanism
from regard._utils.part import brief
from regard.masks.base import Extent, Mask, Sizes, Tiling, lookup


@mechanism(formula="visible iff j ≠ i", cost="O(L·S·E)")
def leave_one_out(own: Tensor | None = None) -> Mask:
    """Return the leave-one-out mask: each query sees every key except its own.

    Visible iff ``k ≠ q``, or ``k ≠ own[q]``. If queries and keys are the same points, each point is predicted from all
    the others.

    Parameters
    ----------
    own : Tensor (L,), integer, optional
        The key hidden from each query, by default key q for query q. −1 or any other index that is not a key hides
        nothing. Use it for a subset of the queries, or for queries in another order than the keys.

    Raises
    ------
    TypeError
        If ``own`` is not an integer tensor.
    ValueError
        If ``own`` is not one-dimensional or, when used, does not have size L.

    Notes
    -----
    A query whose own key is the only one has no visible keys, so its output is 0.

    Examples
    --------
    >>> import torch
    >>> from regard import masks
    >>> print(masks.leave_one_out().draw(4))
    leave_one_out()
    4 queries ↓, 4 keys →; █ visible, · not
      0
    0 ·███
    1 █·██
    2 ██·█
    3 ███·
    >>> print(masks.leave_one_out(torch.tensor([2, -1])).draw(2, 4))
    leave_one_out(tensor[2])
    2 queries ↓, 4 keys →; █ visible, · not
      0
    0 ██·█
    1 ████
    """
    return LeaveOneOut(None if own is None else TensorOf(("L",), integer=True)("masks.leave_one_out", "own", own))


@final
class LeaveOneOut(Mask):
    """All keys except the query's own: key q, or ``own[q]``."""

    def __init__(self, own: Tensor | None) -> None:
        self.own = own

    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return which keys are not the query's own."""
        return kv_idx != (q_idx if self.own is None else lookup(self.own, q_idx))

    def fit(self, extent: Extent, device: torch.device) -> Mask:  # noqa: ARG002
        """Check the tensor's size."""
        if self.own is not None and self.own.shape[0] != extent.L:
            raise rejected("masks.leave_one_out", "own", f"have one entry per query ({extent.L})", shape(self.own))
        return self

    @property
    def bounds_are_exact(self) -> bool:
        """Always."""
        return True

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return which tiles have visible pairs, and which contain no query's own key."""
        if self.own is None:
            least, greatest = tiling.q_lo, tiling.q_hi
            every = (greatest < tiling.k_lo) | (least > tiling.k_hi)
        else:
            own = self.own.to(torch.int64)
            least, greatest = (tiling.over_queries(own[:, None], how) for how in ("amin", "amax"))
            every = self._free_tiles(own, tiling)
        # A tile hides all of its pairs only if its single key is the own key of all its queries.
        return (tiling.k_lo != tiling.k_hi) | (least != tiling.k_lo) | (greatest != tiling.k_hi), every

    @staticmethod
    def _free_tiles(own: Tensor, tiling: Tiling) -> Tensor:
        """Return which tiles contain no query's own key, (nq, nk), in memory of that size."""
        (nq, nk), (L, S) = tiling.counts, tiling.lengths
        own = own[tiling.first_query : tiling.first_query + L] - tiling.first_key
        column = torch.where((own >= 0) & (own < S), own // tiling.kv_block, nk)
        row = torch.arange(own.shape[0], device=own.device) // tiling.q_block
        free = torch.ones(nq * (nk + 1), dtype=torch.bool, device=own.device)
        return free.scatter(0, row * (nk + 1) + column, value=False).unflatten(0, (nq, nk + 1))[:, :nk]

    def sizes(self) -> Sizes:
        """Return the size L of the tensor."""
        return None, None, None if self.own is None else self.own.shape[0], None

    def __repr__(self) -> str:
        return "leave_one_out()" if self.own is None else f"leave_one_out({brief(self.own)})"
