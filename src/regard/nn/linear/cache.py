"""The cache of linear attention: sums over all steps so far, of constant size.

Dimensions: B sequences, H heads, F features, V width of values.
"""

from __future__ import annotations

from torch import Tensor

from regard._utils.errors import rejected
from regard.nn.linear.recurrence import LinearState


class LinearCache:
    """The state of linear attention after earlier steps.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import LinearCache, linear_attention
    >>> cache, (q, k, v) = LinearCache(), torch.randn(3, 1, 2, 5, 8).unbind(0)
    >>> _, state = linear_attention(q, k, v, is_causal=True, return_state=True)
    >>> cache.advance(state, 5)
    >>> len(cache), cache.state.matrix.shape
    (5, torch.Size([1, 2, 8, 8]))
    """

    def __init__(self) -> None:
        self._sums: list[Tensor] | None = None  # matrices and normalizers, one row for each sequence
        self._length = 0

    def __len__(self) -> int:
        """Return the number of steps."""
        return self._length

    def __repr__(self) -> str:
        return f"{type(self).__name__}(): {len(self)} steps"

    @property
    def state(self) -> LinearState | None:
        """The sums (B, H, F, V) and (B, H, F) of the sequences; None before the first step."""
        return None if self._sums is None else LinearState(*self._sums)

    def advance(self, state: LinearState, steps: int) -> None:
        """Replace the sums by those after ``steps`` further steps."""
        assert state.normalizer is not None
        self._sums, self._length = [state.matrix, state.normalizer], self._length + steps

    def sequence(self, row: int, first: int = 0, last: int | None = None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Return the sums (1, H, F, V) and (1, H, F) of one sequence, over all steps: sums do not separate steps."""
        if self._sums is None:
            raise ValueError("LinearCache: the cache is empty; call advance before reading it.")
        matrix, normalizer = (each[row : row + 1] for each in self._sums)
        return matrix, normalizer

    def reorder(self, index: Tensor) -> None:
        """Replace sequence b by sequence ``index[b]``, for beam search."""
        if self._sums is not None:
            self._sums = [each.index_select(0, index) for each in self._sums]

    def truncate(self, length: int) -> None:
        """Keep only the first ``length`` steps: 0 or all, as sums do not separate steps."""
        if length == len(self):
            return
        if length:
            raise rejected("LinearCache", "length", f"be 0 or {len(self)}, the number of steps", length)
        self._sums, self._length = None, 0
