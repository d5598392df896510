"""Scores modified by a FlexAttention ``score_mod``."""

from __future__ import annotations

import torch
from torch import Tensor

from regard._utils.elementwise import per_element
from regard._utils.errors import described, rejected
from regard._utils.mechanism import mechanism
from regard.scores.base import Score, ScoreModFunction
from regard.scores.dot_products import ScaledDot


class _Shifted:
    """A ``score_mod`` for a slice of the sequences: adds the start of the slice to the positions."""

    def __init__(self, score_mod: ScoreModFunction, first_query: int, first_key: int) -> None:
        self.score_mod, self.first_query, self.first_key = score_mod, first_query, first_key

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.score_mod(score, b, h, q_idx + self.first_query, kv_idx + self.first_key)


@mechanism(
    formula="any function of a score and its place",
    sources=("dong2024",),
    cost="O(L·S·E)",
)
class ScoreMod(Score):
    """A score modified elementwise: ``score_mod(scale · base(q, k), b, h, q_idx, kv_idx)``, as in FlexAttention.

    As in FlexAttention, the function takes one pair, as 0-d tensors, and must work under ``torch.vmap``.
    Passing a function as ``score=`` is the same as passing ``ScoreMod(function)``.

    Parameters
    ----------
    score_mod : callable
        ``score_mod(score, b, h, q_idx, kv_idx) -> score``. A result of −inf excludes the pair.
    base : Score, optional
        The score to modify; defaults to the scaled dot product.

    Examples
    --------
    >>> import torch, regard
    >>> q = torch.randn(1, 2, 5, 8)
    >>> far_is_less = ScoreMod(lambda score, b, h, q_idx, kv_idx: score - (q_idx - kv_idx).abs())
    >>> regard.attention(q, q, q, score=far_is_less).shape
    torch.Size([1, 2, 5, 8])
    """

    can_return_neg_inf = True
    positional = True

    def __init__(self, score_mod: ScoreModFunction, base: Score | None = None) -> None:
        if not callable(score_mod):
            raise rejected("ScoreMod", "score_mod", "be callable", described(score_mod), TypeError)
        if base is not None and not isinstance(base, Score):
            raise rejected("ScoreMod", "base", "be a Score or None", described(base), TypeError)
        self.score_mod = score_mod
        self.base = ScaledDot() if base is None else base

    @property
    def per_head(self) -> bool:
        """Whether the tensors of the base differ per head."""
        return self.base.per_head

    @property
    def mixed_widths(self) -> bool:  # type: ignore[override]
        return self.base.mixed_widths

    def default_scale(self, width: int) -> float:
        return self.base.default_scale(width)

    def check(self, query: Tensor, key: Tensor) -> None:
        self.base.check(query, key)

    def project(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return self.base.project(query, key)

    def compare(self, query: Tensor, key: Tensor) -> Tensor:
        return self.base.compare(query, key)

    def positions(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor] | None:
        return self.base.positions(query, key)

    def modify(self, scores: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        scores = self.base.modify(scores, b, h, q_idx, kv_idx)
        blame = "ScoreMod", "score_mod"
        modified = per_element(self.score_mod, scores, b, h, q_idx, kv_idx, kind="float", blame=blame)
        return modified.to(scores.dtype)

    def at(self, first_query: int, first_key: int) -> ScoreMod | None:
        base = self.base.at(first_query, first_key)
        return None if base is None else ScoreMod(_Shifted(self.score_mod, first_query, first_key), base)

    def dot_refusal(self, dtype: torch.dtype) -> str | None:  # noqa: ARG002
        return "a score_mod changes the dot product"

    def pair_size(self, width: int) -> int:
        return self.base.pair_size(width) + 1

    def pair_flops(self, width: int) -> int:
        return self.base.pair_flops(width) + 4
