"""Where a recurrent decoder stands, and what it attends to.

Dimensions: R rows: sequences, or their beams, B sources, S rows of a source, V width of values, Q decoder width, P
width of the features that logits are made of, G width of what enters every step, Y decoder layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class State:
    """Where the decoder stands, for R rows: sequences, or their beams.

    Attributes
    ----------
    hidden : Tensor (Y, R, Q)
    cell : Tensor (Y, R, Q), or None for GRUs
    fed : Tensor (R, P), or None without input feeding
        The features of the last step.
    time : int
        How many steps have been made.
    """

    hidden: Tensor
    cell: Tensor | None
    fed: Tensor | None
    time: int = 0

    def select(self, rows: Tensor) -> State:
        """Return these rows in this order."""
        cell, fed = self.cell, self.fed
        return State(
            self.hidden.index_select(1, rows),
            None if cell is None else cell.index_select(1, rows),
            None if fed is None else fed.index_select(0, rows),
            self.time,
        )


@dataclass(frozen=True)
class Memory:
    """What was read of B sources, computed once and attended at every step.

    Attributes
    ----------
    keys, values : Tensor (B, S, ·), (B, S, V)
        The rows that were read, as attention compares and reads them; in wiring "encoder" both are what these rows read
        of each other.
    lengths : Tensor (B,)
        How many are real.
    start : State
        The decoder's first state, B rows.
    glimpse : Tensor (B, G), or None
        What enters every step.
    weights : Tensor (B, S, S), or None
        Of the states to each other, where they were asked for.
    """

    keys: Tensor
    values: Tensor
    lengths: Tensor
    start: State
    glimpse: Tensor | None = None
    weights: Tensor | None = None

    def select(self, rows: Tensor) -> Memory:
        """Return these rows in this order."""
        glimpse, weights = (
            None if part is None else part.index_select(0, rows) for part in (self.glimpse, self.weights)
        )
        keys, values, lengths = (part.index_select(0, rows) for part in (self.keys, self.values, self.lengths))
        return Memory(keys, values, lengths, self.start.select(rows), glimpse, weights)
