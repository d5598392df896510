"""Where the queries lie among the keys: what masks share that compare positions."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from regard._errors import rejected
from regard._part import brief
from regard.masks._checks import as_int, int_tensor, lookup
from regard.masks.base import Extent, Mask, Sizes

#: What ``offset`` may be: query i is at key position i + offset.
Offset = int | Tensor | None

_UNSTATED = (
    "be stated where there are not as many queries as keys: 'upper_left' (query 0 is at key 0) "
    "or 'lower_right' (the last query is at the last key)"
)


class Aligned(Mask):
    """A mask in which query i is at key position i + offset.

    Parameters
    ----------
    align : {"upper_left", "lower_right"}, optional
        Offset 0, or S − L. Where L ≠ S one of them, or an offset, must be given.
    offset : int or Tensor () or (B,), optional
        How many keys come before query 0: the length of the cache, when decoding.
    """

    #: The function that made the mask, for error messages and the repr.
    name: str

    def __init__(self, align: str | None, offset: Offset) -> None:
        self.align = align
        self.offset = offset
        #: The offset as an int where it is one; None where it is a tensor or not yet known.
        self._shift: int | None = offset if isinstance(offset, int) else None

    @abstractmethod
    def _twin(self) -> Aligned:
        """Return a new mask of the same arguments."""

    def fit(self, extent: Extent, device: torch.device) -> Mask:  # noqa: ARG002
        """Resolve the alignment."""
        offset, function = self.offset, f"masks.{self.name}"
        if isinstance(offset, Tensor):
            if offset.dim() == 1 and offset.shape[0] != extent.B:
                raise rejected(function, "offset", f"have one entry per sequence ({extent.B})", tuple(offset.shape))
            return self
        if offset is not None or self.align == "upper_left":
            return self
        L, S = extent.L, extent.S
        if self.align is None and L != S and L != 0 and S != 0:
            raise rejected(function, "align", _UNSTATED, f"None ({L} queries, {S} keys)")
        twin = self._twin()
        twin._shift = S - L if self.align == "lower_right" else 0
        return twin

    def for_lengths(self, queries: Tensor, keys: Tensor) -> Mask:
        """Return the mask with an offset for each sequence, where its alignment speaks of the numbers of both."""
        if self.offset is not None or self.align == "upper_left":
            return self
        twin = self._twin()
        if self.align == "lower_right":
            twin.align, twin.offset = None, keys - queries
            return twin
        unclear = (queries != keys) & (queries != 0) & (keys != 0)
        if bool(unclear.any()):
            i = int(unclear.int().argmax())
            got = f"None ({int(queries[i])} queries, {int(keys[i])} keys in sequence {i})"
            raise rejected(f"masks.{self.name}", "align", _UNSTATED, got)
        twin.align = "upper_left"
        return twin

    def positions(self, b: Tensor, q_idx: Tensor) -> Tensor:
        """Return the key positions of queries; with an offset per sequence they depend on b."""
        if isinstance(self.offset, Tensor):
            return q_idx + (lookup(self.offset, b) if self.offset.dim() else self.offset)
        if self._shift is None and self.align == "lower_right":
            raise ValueError(
                f"masks.{self.name}: align='lower_right' needs the numbers of queries and keys; "
                f"call .bind(Extent(B, H, L, S), device) first, or give an offset."
            )
        return q_idx + self._shift if self._shift else q_idx

    def tile_positions(self, q_idx: Tensor) -> Tensor:
        """Return the key positions of queries (nq, 1) as (nq, 1), or (B, 1, nq, 1)."""
        if isinstance(self.offset, Tensor):
            return q_idx + self.offset.reshape(-1, 1, 1, 1)
        return q_idx + self._shift if self._shift else q_idx

    def sizes(self) -> Sizes:
        """Return B of an offset per sequence."""
        B = self.offset.shape[0] if isinstance(self.offset, Tensor) and self.offset.dim() else None
        return B, None, None, None

    def _call(self, *arguments: Any) -> str:
        written = [str(x) for x in arguments]
        if self.align is not None:
            written.append(f"align={self.align!r}")
        if self.offset is not None:
            shown = brief(self.offset) if isinstance(self.offset, Tensor) else self.offset
            written.append(f"offset={shown}")
        return f"{self.name}({', '.join(written)})"


def checked(name: str, align: Any, offset: Any) -> tuple[str | None, Offset]:
    """Return a valid alignment and offset, or raise."""
    function = f"masks.{name}"
    if align not in (None, "upper_left", "lower_right"):
        raise rejected(function, "align", "be 'upper_left', 'lower_right' or None", repr(align))
    if offset is None:
        return align, None
    if align is not None:
        raise rejected(function, "offset", "be left out where align is given", f"align={align!r} and an offset")
    if isinstance(offset, Tensor):
        return None, int_tensor(function, "offset", offset, "an int, or an integer tensor () or (B,)", (0, 1))
    return None, as_int(function, "offset", offset)
