"""Every so-many-th key."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from regard.masks._checks import as_int
from regard.masks.aligned import Aligned, Offset, checked
from regard.masks.base import Extent, Mask
from regard.masks.intervals import Span
from regard.masks.tiling import Tiling


def dilated(step: int, align: str | None = None, offset: Offset = None) -> Mask:
    """Return the mask that shows a query every ``step``-th key, counted from its own position both ways.

    Visible iff ``(q + offset − k) mod step = 0``. A dilated window is ``dilated(2) & window(8, 8)``.

    Parameters
    ----------
    step : int
        At least 1, which shows all.
    align, offset
        As in :func:`~regard.masks.causal`.

    Raises
    ------
    ValueError
        If ``step`` is less than 1, or ``align`` is not known or given together with ``offset``.
    TypeError
        If ``step`` is not an int.

    Examples
    --------
    >>> from regard import masks
    >>> print((masks.dilated(2) & masks.causal()).draw(4))
    dilated(2) & causal()
    4 queries ↓, 4 keys →; █ visible, · not
      0
    0 █···
    1 ·█··
    2 █·█·
    3 ·█·█
    """
    return Dilated(as_int("masks.dilated", "step", step, 1), *checked("dilated", align, offset))


@final
class Dilated(Aligned):
    """Keys at a multiple of ``step`` from the query's position."""

    name = "dilated"

    def __init__(self, step: int, align: str | None, offset: Offset) -> None:
        super().__init__(align, offset)
        self.step = step

    def _twin(self) -> Dilated:
        return Dilated(self.step, self.align, self.offset)

    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return where the step divides position − k."""
        return (self.positions(b, q_idx) - kv_idx) % self.step == 0

    @property
    def bounds_are_exact(self) -> bool:
        """Always: position − k takes every value between its least and greatest in a tile."""
        return True

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return whether a multiple of the step is among the distances, and whether there is no other."""
        least = self.tile_positions(tiling.q_lo) - tiling.k_hi
        greatest = self.tile_positions(tiling.q_hi) - tiling.k_lo
        some = greatest - greatest % self.step >= least
        return some, some & ((least == greatest) | (self.step == 1))

    def span(self, extent: Extent, device: torch.device) -> Span | None:  # noqa: ARG002
        """Return all keys for step 1."""
        return (None, None) if self.step == 1 else None

    def __repr__(self) -> str:
        return self._call(self.step)
