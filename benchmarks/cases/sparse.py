"""Sparse weights: sparsemax and entmax with α = 1.5, compared with the package of the papers' authors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases.contenders import by_regard, differentiated, seeded
from benchmarks.registry import Call, Case, Contender, Goal, MissingError, Point, register
from benchmarks.work import Work, scaled_dot

HEADS, WIDTH = 4, 64
PACKAGE = "entmax (PyPI)"
#: A size so small that calls alone cost: one query.
TINY = 8


def sparsemax(scores: Tensor) -> Tensor:
    """Return max(0, s − τ), with τ from the sorted scores (Martins & Astudillo 2016, algorithm 1)."""
    ordered = scores.sort(-1, descending=True).values
    count = torch.arange(1, scores.shape[-1] + 1, dtype=scores.dtype)
    total = ordered.cumsum(-1)
    size = (1 + count * ordered > total).sum(-1, keepdim=True)
    return (scores - (total.gather(-1, size - 1) - 1) / size).clamp(min=0)


def entmax15(scores: Tensor) -> Tensor:
    """Return max(0, s / 2 − τ)², with τ from the sorted scores (Peters et al. 2019, algorithm 1)."""
    half = scores / 2
    ordered = half.sort(-1, descending=True).values
    count = torch.arange(1, scores.shape[-1] + 1, dtype=scores.dtype)
    mean = ordered.cumsum(-1) / count
    spread = count * (ordered.square().cumsum(-1) / count - mean.square())
    left = (1 - spread) / count
    each = mean - torch.where(left > 0, left, 1.0).sqrt() * (left > 0)
    size = (each <= ordered).sum(-1, keepdim=True)
    return (half - each.gather(-1, size - 1)).clamp(min=0).square()


#: Queries of this variant are so small that scores hardly differ, and many keys have weight.
FLAT, SHRUNK = " of flat scores", 0.05

FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {"sparsemax": sparsemax, "entmax15": entmax15}


def build(point: Point) -> Work:
    """Return as many queries as keys; of the tiniest, one query in one head."""
    heads, queries = (1, 1) if point.size <= TINY else (HEADS, point.size)
    query, key, value = seeded((1, heads, queries, WIDTH), *[(1, heads, point.size, WIDTH)] * 2)
    name = point.variant.removesuffix(FLAT)
    query = query if name == point.variant else query * SHRUNK
    return Work(query, key, value, backward=point.backward, weigh=FORMULAS[name], kernel=name)


def options(work: Work) -> dict[str, Any]:
    """Return what makes the weights of ``regard.attention`` sparse."""
    return {"normalizer": work.kernel}


def _package(work: Work) -> Call:
    try:
        import entmax
    except ImportError as error:
        raise MissingError("entmax is not installed") from error
    weigh = getattr(entmax, work.kernel)
    return differentiated(work, lambda: weigh(scaled_dot(work.query, work.key, {}), -1) @ work.value)


SIZES = (TINY, 256, 2048, 4096)
LONG = 4096

register(
    Case(
        name="sparse",
        title=f"Sparse weights, {HEADS} heads of {WIDTH} (size {TINY}: one query, one head)",
        unit="queries and keys",
        build=build,
        contenders={PACKAGE: Contender(_package), "regard": by_regard(options)},
        baseline=PACKAGE,
        points=tuple(
            Point(size, backward=backward, variant=variant, rounds=3 if size > 1000 else None)
            for variant in FORMULAS
            for size in SIZES
            for backward in (False, True)
        )
        + tuple(Point(LONG, variant=variant + FLAT, rounds=3) for variant in FORMULAS),
        quick=16,
        goals=tuple(
            goal
            for variant in FORMULAS
            for goal in (
                Goal(f"{variant}-forward", "speed", 20, LONG, variant=variant),
                Goal(f"{variant}-flat", "speed", 10, LONG, variant=variant + FLAT),
                Goal(f"{variant}-backward", "speed", 10, LONG, True, variant=variant),
            )
        ),
        notes="The package sorts all scores of a row, and keeps the whole matrix of weights.",
    )
)
