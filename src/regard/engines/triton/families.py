"""Which scores and normalizers have kernels, and what the kernels read of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard import scores
from regard.engines.problem import Problem
from regard.normalizers import Argmax, Entmax, Entmax15, Normalizer, Sigmoid, Softmax, SoftmaxSink, Sparsemax
from regard.scores import Score
from regard.scores.dot_products import DotLike
from regard.scores.kernels import Distance, kernels

#: The families of scores, by their constants in the kernels.
DOT, ADDITIVE, DISTANCE = 0, 1, 2
#: The distances by theirs.
KINDS: dict[type[Score], int] = {
    kernels()[name]: kind for kind, name in enumerate(("gaussian", "laplacian", "boxcar", "triangular", "epanechnikov"))
}
#: The normalizers by theirs.
SOFTMAX, SIGMOID, SPARSEMAX, ENTMAX15, ENTMAX, ARGMAX = range(6)
RULES: dict[type[Normalizer], int] = {
    Softmax: SOFTMAX, SoftmaxSink: SOFTMAX, Sigmoid: SIGMOID, Sparsemax: SPARSEMAX, Entmax15: ENTMAX15, Entmax: ENTMAX,
    Argmax: ARGMAX,
}  # fmt: skip
#: Those that give many keys no weight: tiles without any are skipped.
ENTMAXES = (SPARSEMAX, ENTMAX15, ENTMAX)


def row_shape(rule: int) -> tuple[int, ...]:
    """Return the shape of what a row's weights follow from: two numbers are a shift and an offset, whose sum counts."""
    return () if rule in (SOFTMAX, SIGMOID) else (2,)


def family_of(score: Score) -> int | None:
    """Return the family of a score, None if it has no kernel."""
    if type(score) in (scores.Additive, scores.Concat):
        return ADDITIVE
    if type(score) in KINDS:
        return DISTANCE
    if isinstance(score, DotLike) and type(score).compare is DotLike.compare and type(score).modify is Score.modify:
        return DOT
    return None


@dataclass(frozen=True)
class Rows:
    """The rows that the kernels read.

    Attributes
    ----------
    query : Tensor (B, H, L, C)
    key : Tensor (B, G, S, C)
    value : Tensor (B, G, S, V)
    weight : Tensor (1, H, C)
        w_v of the additive score, the widths of a distance; (1, H, 0) for dot products.
    sink : Tensor (1, H), or None
        Logits of sinks.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    weight: Tensor
    sink: Tensor | None

    @classmethod
    def of(cls, problem: Problem) -> Rows:
        """Project the rows of a problem.

        Projections are computed in float32, and dot products of 16-bit inputs on their rounded rows.
        """
        query, key, score, wide = problem.query, problem.key, problem.score, problem.compute_dtype
        dot = family_of(score) == DOT
        if type(score).project is not Score.project:
            projected = _projected(score.cast(wide), query.to(wide), key.to(wide), problem.mask is not None)
            query, key = (t.to(problem.query.dtype) for t in projected) if dot else projected
        elif not dot:
            query, key = query.to(wide), key.to(wide)
        sink = None
        if isinstance(problem.normalizer, SoftmaxSink):
            sink = problem.normalizer.logits(query.new_empty((), dtype=wide)).reshape(1, -1).expand(1, query.shape[1])
        return cls(query, key, problem.value, _weight(score.cast(wide), query), sink)


def _projected(score: Score, query: Tensor, key: Tensor, masked: bool) -> tuple[Tensor, Tensor]:
    """Return projected rows; those that are not finite become NaN, outside of the graph if pairs may be hidden.

    The gradient of a hidden row is 0, and that of a projection multiplies it by the row.
    """
    if not masked:
        return score.project(query, key)
    bad = [~t.detach().isfinite().all(-1, keepdim=True) for t in (query, key)]
    rows = score.project(*(torch.where(b, 0.0, t) for b, t in zip(bad, (query, key))))
    query, key = (t.masked_fill(b, torch.nan) for b, t in zip(bad, rows))
    return query, key


def _weight(score: Score, query: Tensor) -> Tensor:
    H, C = query.shape[1], query.shape[-1]
    if isinstance(score, (scores.Additive, scores.Concat)):
        return score.w_v.expand(1, H, C).contiguous()
    if isinstance(score, Distance):
        width = score.width
        return width.expand(1, H, C) if isinstance(width, Tensor) else query.new_full((1, H, C), width)
    return query.new_empty(1, H, 0, dtype=torch.float32)
