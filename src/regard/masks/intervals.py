"""Masks whose every row shows one run of keys: intersections, unions and complements of such runs."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from regard._tracing import is_blind

#: Each query sees exactly the keys start ≤ k < stop: two int64 tensors (B or 1, H or 1, L or 1), None where there is
#: no bound on that side. They may lie outside [0, S], and start past stop where nothing is seen.
Span = tuple[Tensor | None, Tensor | None]


def clamped(span: Span, S: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the span as two tensors with 0 ≤ start ≤ stop ≤ S.

    Examples
    --------
    >>> import torch
    >>> start, stop = clamped((None, torch.tensor([[[-1, 3, 9]]])), 5, torch.device("cpu"))
    >>> start.tolist(), stop.tolist()
    ([[[0]]], [[[0, 3, 5]]])
    """
    start, stop = (None if edge is None else edge.clamp(0, S) for edge in span)
    if start is not None and stop is not None:
        stop = torch.maximum(start, stop)
    return (
        constant(0, device) if start is None else start,
        constant(S, device) if stop is None else stop,
    )


def constant(value: int, device: torch.device) -> Tensor:
    """Return an edge that is the same in every row: (1, 1, 1), int64."""
    return torch.full((1, 1, 1), value, dtype=torch.int64, device=device)


def intersection(spans: list[Span]) -> Span:
    """Return the keys that lie in all spans."""
    starts = [start for start, _ in spans if start is not None]
    stops = [stop for _, stop in spans if stop is not None]
    return reduce(torch.maximum, starts) if starts else None, reduce(torch.minimum, stops) if stops else None


def union(spans: list[Span], S: int, device: torch.device) -> Span | None:
    """Return the keys that lie in one of the spans; None if in some row there is a gap, or it cannot be seen."""
    starts = [start for start, _ in spans if start is not None]
    stops = [stop for _, stop in spans if stop is not None]
    if not starts or not stops:  # all begin with the first key, or all end with the last
        from_first = reduce(torch.maximum, stops) if len(stops) == len(spans) else None
        to_last = reduce(torch.minimum, starts) if len(starts) == len(spans) else None
        return to_last, from_first
    edges = [edge for span in spans for edge in clamped(span, S, device)]
    if any(is_blind(edge) for edge in edges):
        return None
    stacked = torch.stack(torch.broadcast_tensors(*edges))
    first, end = stacked[::2], stacked[1::2]
    empty = first == end  # sorted behind all others, where they fill no gap
    first, order = first.masked_fill(empty, S).sort(0)
    reached = end.masked_fill(empty, 0).gather(0, order).cummax(0).values
    if bool(((first[1:] > reached[:-1]) & (first[1:] < S)).any()):
        return None
    return first[0], reached[-1]


def outside(span: Span, S: int, device: torch.device) -> Span | None:
    """Return the keys that do not lie in the span; None if in some row they are on both sides, or it cannot be seen."""
    start, stop = span
    if start is None:
        return (constant(S, device) if stop is None else stop), None
    if stop is None:
        return None, start
    start, stop = clamped(span, S, device)
    if is_blind(start) or is_blind(stop):
        return None
    empty = start == stop
    before = start.masked_fill(empty, 0)  # how many keys lie before the span
    if bool(((before > 0) & (stop < S)).any()):
        return None
    return torch.where(before == 0, stop.masked_fill(empty, 0), 0), torch.where(before == 0, S, before)


def run(marks: Tensor) -> Span | None:
    """Return where the marked keys are; None if in some row they are not neighbours, or it cannot be seen.

    Parameters
    ----------
    marks : Tensor (B or 1, H or 1, L or 1, S), bool

    Examples
    --------
    >>> import torch
    >>> run(torch.tensor([[[[False, True, True, False]]]]))
    (tensor([[[1]]]), tensor([[[3]]]))
    >>> run(torch.tensor([[[[False, True, False, True]]]])) is None
    True
    """
    if is_blind(marks):
        return None
    k = torch.arange(marks.shape[-1] + 1, device=marks.device)
    marks = torch.nn.functional.pad(marks, (0, 1))  # so that there is a key to take the least of
    start = torch.where(marks, k, marks.shape[-1]).amin(-1)
    stop = torch.where(marks, k + 1, 0).amax(-1)
    counts = marks.sum(-1)
    if bool(((stop - start != counts) & (counts > 0)).any()):
        return None
    return start, stop


def reached(start: Tensor, stop: Tensor, keys: int) -> Tensor:
    """Return which keys (b, h, S) lie in the interval of any row, for intervals (b, h, L)."""
    start, stop = torch.broadcast_tensors(start, stop)
    one = (start < stop).to(torch.int64)
    counts = one.new_zeros(*start.shape[:2], keys + 1)
    return counts.scatter_add(-1, start, one).scatter_add(-1, stop, -one).cumsum(-1)[..., :keys] > 0
