"""The algebra of masks: and, or, not, and the mask that hides nothing."""

from __future__ import annotations

from functools import reduce
from operator import and_, or_
from typing import Any, final

import torch
from torch import Tensor

from regard.masks.base import Diagonals, Extent, Mask, Sizes
from regard.masks.convert import as_mask
from regard.masks.intervals import Span, intersection, outside, union
from regard.masks.tiling import Tiling


def both(a: Any, b: Any) -> Mask:
    """Return ``a & b``: pairs visible in both; biases add up."""
    return AndMask((*_parts(as_mask(a), AndMask), *_parts(as_mask(b), AndMask)))


def either(a: Any, b: Any) -> Mask:
    """Return ``a | b``: pairs visible in one of them.

    Raises
    ------
    TypeError
        If one of them adds a bias, which has no meaning where only the other shows a pair.
    """
    sides = as_mask(a), as_mask(b)
    for side in sides:
        if side.has_bias:
            raise TypeError(f"|: {side!r} adds a bias, and only masks without one can be joined; use & for the bias.")
    return OrMask((*_parts(sides[0], OrMask), *_parts(sides[1], OrMask)))


def complement(mask: Mask) -> Mask:
    """Return ``~mask``: the pairs that the mask hides.

    Raises
    ------
    TypeError
        If the mask adds a bias, which has no complement.
    """
    if mask.has_bias:
        raise TypeError(f"~: {mask!r} adds a bias, and only a mask without one has a complement.")
    return mask.mask if isinstance(mask, NotMask) else NotMask(mask)


def everything() -> Mask:
    """Return the mask that hides nothing; ``~everything()`` hides all.

    Examples
    --------
    >>> from regard import masks
    >>> masks.everything()(0, 0, 3, 9), (~masks.everything())(0, 0, 3, 9)
    (tensor(True), tensor(False))
    """
    return Everything()


class _Node(Mask):
    """Several masks in one."""

    def __init__(self, masks: tuple[Mask, ...]) -> None:
        self.masks = masks

    def fit(self, extent: Extent, device: torch.device) -> Mask:
        return type(self)(tuple([mask.fit(extent, device) for mask in self.masks]))

    def for_lengths(self, queries: Tensor, keys: Tensor) -> Mask:
        return type(self)(tuple([mask.for_lengths(queries, keys) for mask in self.masks]))

    @property
    def is_structural(self) -> bool:
        return all(mask.is_structural for mask in self.masks)

    def sizes(self) -> Sizes:
        return _largest([mask.sizes() for mask in self.masks])


@final
class AndMask(_Node):
    """Pairs that every one of several masks shows; biases add up."""

    def fit(self, extent: Extent, device: torch.device) -> Mask:
        """Fit the masks inside, without those that then hide nothing."""
        fitted = [mask.fit(extent, device) for mask in self.masks]
        kept = [mask for mask in fitted if not mask.shows_everything(extent)]
        return AndMask(tuple(kept)) if len(kept) > 1 else (kept or fitted)[0]

    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:
        """Return where all masks show a pair."""
        found = [mask.visible(b, h, q_idx, kv_idx) for mask in self.masks if mask.hides]
        seen = [x for x in found if x is not None]
        return reduce(and_, seen) if seen else None

    def bias(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:
        """Return the sum of the biases."""
        found = [mask.bias(b, h, q_idx, kv_idx) for mask in self.masks if mask.has_bias]
        added = [x for x in found if x is not None]
        return sum(added[1:], start=added[0]) if added else None

    @property
    def has_bias(self) -> bool:
        """Whether one of them has."""
        return any(mask.has_bias for mask in self.masks)

    @property
    def hides(self) -> bool:
        """Whether one of them does."""
        return any(mask.hides for mask in self.masks)

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return the conjunction of the bounds."""
        found = [mask.bounds(tiling) for mask in self.masks if mask.hides]
        if not found:
            return tiling.full()
        return reduce(and_, [some for some, _ in found]), reduce(and_, [every for _, every in found])

    @property
    def bounds_are_exact(self) -> bool:
        """Whether only one of them hides anything, and is exact."""
        hiding = [mask for mask in self.masks if mask.hides]
        return len(hiding) == 1 and hiding[0].bounds_are_exact

    def as_band(self, extent: Extent) -> Diagonals | None:
        """Return the intersection of the bands, if all are."""
        lo: int | None = None
        hi: int | None = None
        for mask in self.masks:
            band = mask.as_band(extent)
            if band is None:
                return None
            if band[0] is not None:
                lo = band[0] if lo is None else max(lo, band[0])
            if band[1] is not None:
                hi = band[1] if hi is None else min(hi, band[1])
        return lo, hi

    def span(self, extent: Extent, device: torch.device) -> Span | None:
        """Return the intersection of the spans, if all are known."""
        found = [mask.span(extent, device) for mask in self.masks if mask.hides]
        known = [span for span in found if span is not None]
        return intersection(known) if len(known) == len(found) else None

    def __repr__(self) -> str:
        return " & ".join([_wrapped(mask) for mask in self.masks])


@final
class OrMask(_Node):
    """Pairs that one of several masks shows."""

    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:
        """Return where a mask shows a pair."""
        found = [mask.visible(b, h, q_idx, kv_idx) for mask in self.masks]
        seen = [x for x in found if x is not None]
        return reduce(or_, seen) if len(seen) == len(found) else None

    @property
    def hides(self) -> bool:
        """Whether all of them do."""
        return all(mask.hides for mask in self.masks)

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return the disjunction of the bounds."""
        found = [mask.bounds(tiling) for mask in self.masks]
        return reduce(or_, [some for some, _ in found]), reduce(or_, [every for _, every in found])

    def span(self, extent: Extent, device: torch.device) -> Span | None:
        """Return the union of the spans, if all are known and it has no gap."""
        if not self.hides:
            return None, None
        found = [mask.span(extent, device) for mask in self.masks]
        known = [span for span in found if span is not None]
        return union(known, extent.S, device) if len(known) == len(found) else None

    def __repr__(self) -> str:
        return " | ".join([_wrapped(mask) for mask in self.masks])


@final
class NotMask(Mask):
    """The pairs that a mask hides."""

    def __init__(self, mask: Mask) -> None:
        self.mask = mask

    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:
        """Return where the mask hides a pair."""
        seen = self.mask.visible(b, h, q_idx, kv_idx)
        return torch.zeros((), dtype=torch.bool, device=kv_idx.device) if seen is None else ~seen

    @property
    def bounds_are_exact(self) -> bool:
        """Whether the mask's are."""
        return self.mask.bounds_are_exact

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return the bounds, exchanged."""
        some, every = self.mask.bounds(tiling)
        return ~every, ~some

    def span(self, extent: Extent, device: torch.device) -> Span | None:
        """Return what the mask's span leaves, if that is on one side of it."""
        span = self.mask.span(extent, device)
        return None if span is None else outside(span, extent.S, device)

    def fit(self, extent: Extent, device: torch.device) -> Mask:
        """Fit the mask inside."""
        return NotMask(self.mask.fit(extent, device))

    def for_lengths(self, queries: Tensor, keys: Tensor) -> Mask:
        """Return the mask inside for these lengths, negated."""
        return NotMask(self.mask.for_lengths(queries, keys))

    def sizes(self) -> Sizes:
        """Return the sizes of the mask inside."""
        return self.mask.sizes()

    def __repr__(self) -> str:
        return f"~{_wrapped(self.mask)}"


@final
class Everything(Mask):
    """No pair is hidden."""

    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return None."""
        return None

    @property
    def hides(self) -> bool:
        """Never."""
        return False

    @property
    def bounds_are_exact(self) -> bool:
        """Always."""
        return True

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return that all is visible."""
        return tiling.full()

    def as_band(self, extent: Extent) -> Diagonals | None:  # noqa: ARG002
        """Return the band without bounds."""
        return None, None

    def __repr__(self) -> str:
        return "everything()"


def _parts(mask: Mask, kind: type[_Node]) -> tuple[Mask, ...]:
    return mask.masks if isinstance(mask, _Node) and type(mask) is kind else (mask,)


def _wrapped(mask: Mask) -> str:
    return f"({mask!r})" if isinstance(mask, _Node) else repr(mask)


def _largest(found: list[Sizes]) -> Sizes:
    b, h, q, k = (max([size for size in axis if size is not None], default=None) for axis in zip(*found))
    return b, h, q, k
