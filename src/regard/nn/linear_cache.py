"""The cache of linear attention: sums over all steps so far, of one size however many they are.

Dimensions: B sequences, H heads, F features, V width of values.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from regard._utils.errors import rejected
from regard.nn.linear.recurrence import LinearState
from regard.nn.slot_cache import Slots


class LinearCache:
    """What linear attention knows of earlier steps, of sequences of one length or of those in slots.

    Parameters
    ----------
    slots : Slots, optional
        How long the sequences are, where they join and leave one by one; the same for all layers.

    Examples
    --------
    >>> import torch
    >>> from regard.nn.linear.attention import linear_attention
    >>> from regard.nn.linear_cache import LinearCache
    >>> cache, (q, k, v) = LinearCache(), torch.randn(3, 1, 2, 5, 8).unbind(0)
    >>> _, state = linear_attention(q, k, v, is_causal=True, return_state=True)
    >>> cache.advance(state, 5)
    >>> len(cache), cache.state.matrix.shape
    (5, torch.Size([1, 2, 8, 8]))
    """

    def __init__(self, slots: Slots | None = None) -> None:
        self.slots = slots
        self._sums: list[Tensor] | None = None  # matrices and normalizers, one row for each sequence
        self._length = 0
        self._begun: tuple[int, list[Tensor]] | None = None

    def __len__(self) -> int:
        """Return how many steps there are, of the longest sequence."""
        return self._length if self.slots is None else max(self.slots.lengths, default=0)

    def __repr__(self) -> str:
        return f"LinearCache(): {len(self)} steps"

    @property
    def state(self) -> LinearState | None:
        """The sums (B, H, F, V) and (B, H, F) of the sequences in use; None before the first step."""
        self._settle()
        if self._sums is None:
            return None
        if self.slots is None:
            return LinearState(*self._sums)
        lengths = self.slots.lengths
        self._make_room(len(lengths))
        fresh = [row for row, length in enumerate(lengths) if not length]
        for each in self._sums if fresh else ():
            each[fresh] = 0  # a slot may hold what another sequence has left
        return LinearState(*(each[: len(lengths)] for each in self._sums))

    def advance(self, state: LinearState, steps: int) -> None:
        """Go on to the sums after so many more steps; in slots, as soon as the step is finished in all layers."""
        assert state.normalizer is not None
        sums = [state.matrix, state.normalizer]
        if self.slots is None:
            self._sums, self._length = sums, self._length + steps
        else:
            self._settle()
            self._begun = (self.slots.finished, sums)

    def sequence(self, row: int, first: int = 0, last: int | None = None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Return what :meth:`load` takes of a sequence: all of it, as steps cannot be told apart."""
        if self._sums is None:
            raise rejected("LinearCache", "state", "have been advanced before it is read", "an empty cache")
        matrix, normalizer = (each[row : row + 1] for each in self._sums)
        return matrix, normalizer

    def load(self, slot: int, matrix: Tensor, normalizer: Tensor) -> None:
        """Put the sums (1, H, F, V) and (1, H, F) of a sequence into a slot."""
        self._settle()
        if self._sums is None:
            self._sums = [each.new_zeros(0, *each.shape[1:]) for each in (matrix, normalizer)]
        self._make_room(slot + 1)
        for each, new in zip(self._sums, (matrix, normalizer)):
            each[slot] = new[0]

    def move(self, source: int, target: int) -> None:
        """Put the sequence of one slot into another."""
        self._settle()
        self._make_room(source + 1)
        for each in self._sums or ():
            each[target] = each[source]

    def reorder(self, index: Tensor) -> None:
        """Make sequence b continue what was sequence ``index[b]``: for beam search."""
        self._settle()
        if self._sums is not None:
            self._make_room(int(index.max()) + 1 if len(index) else 0)
            self._sums = [each.index_select(0, index) for each in self._sums]

    def truncate(self, length: int) -> None:
        """Forget all steps; some alone cannot be, as sums do not tell them apart."""
        if self.slots is not None or length == len(self):
            return
        if length:
            raise rejected("LinearCache", "length", f"be 0 or all {len(self)} steps", length)
        self._sums, self._length = None, 0

    def _settle(self) -> None:
        """Take over the step begun, if it was finished; one that failed is made again."""
        if self._begun is None or self.slots is None:
            return
        (begun, sums), self._begun = self._begun, None
        if self.slots.finished > begun:
            self._sums = sums

    def _make_room(self, rows: int) -> None:
        """Let there be so many rows; new ones are 0."""
        if self._sums is not None and (missing := rows - len(self._sums[0])) > 0:
            self._sums = [F.pad(each, (0, 0) * (each.dim() - 1) + (0, missing)) for each in self._sums]
