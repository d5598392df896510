"""Scores for cases: of every registered class its own sample, and variants that a sample does not show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regard import scores
from regard.scores import Score
from regard.scores.base import TABLE
from regard.scores.distance import Distance, kernels
from regard.testing.formulas import Array


@dataclass(frozen=True)
class Widths:
    """The sizes that a score must fit: query and key widths, the number of keys, query heads H and key heads G."""

    query: int
    key: int
    keys: int
    heads: int
    key_heads: int


Maker = Callable[[Widths, torch.Generator], Score]


def near_is_more(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
    """Take a quarter of the distance from a score."""
    return score - 0.25 * (q_idx - kv_idx).abs()


def by_sequence(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
    """Square a score, with a share that depends on the sequence and the head."""
    return score + 0.125 * (b + 2 * h) * score * score


def not_the_third(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
    """Exclude every third key."""
    return torch.where(kv_idx % 3 != 0, score, -torch.inf)


#: The same in NumPy: ``(scores (..., B, H, L, S), b, h, q_idx, kv_idx)``, analytic in the scores.
MODS: dict[object, Callable[[Array, Array, Array, Array, Array], Array]] = {
    near_is_more: lambda s, b, h, q, k: s - np.abs(q - k) / 4,  # noqa: ARG005
    by_sequence: lambda s, b, h, q, k: s + (b + 2 * h) * s * s / 8,  # noqa: ARG005
    not_the_third: lambda s, b, h, q, k: np.where(k % 3 != 0, s, -np.inf),  # noqa: ARG005
}


def _randn(generator: torch.Generator, *size: int) -> Tensor:
    return torch.randn(*size, generator=generator)


def _positive(generator: torch.Generator, *size: int) -> Tensor:
    return 0.5 + torch.rand(size, generator=generator)


def _kernel(cls: type[Distance], size: Callable[[Widths], tuple[int, ...]]) -> Maker:
    """Return what makes a kernel with a width that is a tensor of this size, around that of its sample."""

    def make(w: Widths, generator: torch.Generator) -> Score:
        usual = cls.sample(w.query, w.key, w.keys, generator).width
        return cls((1.2 if cls.compact else 1.0) * usual * _positive(generator, *size(w)))

    return make


#: Variants by name, "score/variant"; only those of registered scores are used.
VARIANTS: dict[str, Maker] = {
    "general/heads": lambda w, g: scores.General(_randn(g, w.heads, w.query, w.key) / 2),
    "additive/projected": lambda w, g: scores.Additive(_randn(g, w.query)),
    "additive/heads": lambda w, g: scores.Additive(
        _randn(g, w.heads, 3), _randn(g, w.heads, 3, w.query), _randn(g, *_key_heads(w), 3, w.key)
    ),
    "concat/heads": lambda w, g: scores.Concat(_randn(g, w.heads, 3), _randn(g, 3, w.query + w.key)),
    "cosine/learned": lambda w, g: scores.Cosine(_positive(g, 1)),  # noqa: ARG005
    "score_mod/near": lambda w, g: scores.ScoreMod(near_is_more),  # noqa: ARG005
    "score_mod/sequence": lambda w, g: scores.ScoreMod(by_sequence, scores.Dot()),  # noqa: ARG005
    "score_mod/third": lambda w, g: scores.ScoreMod(  # noqa: ARG005
        not_the_third, scores.Gaussian(_positive(g, 1).squeeze())
    ),
    **{f"{name}/learned": _kernel(cls, lambda w: ()) for name, cls in kernels().items()},  # noqa: ARG005
    **{f"{name}/features": _kernel(cls, lambda w: (w.query,)) for name, cls in kernels().items()},
}

#: Variants that need equal query and key widths though their class does not.
SAME_WIDTHS = {"additive/projected"}


def _key_heads(w: Widths) -> tuple[int, ...]:
    return (w.key_heads,) if w.key_heads == w.heads else ()


def names() -> list[str]:
    """Return the name of every score and variant there is."""
    variants = [name for name in VARIANTS if name.split("/")[0] in (*TABLE, "score_mod")]
    return [*TABLE, *variants]


def make(name: str, widths: Widths, generator: torch.Generator) -> Score:
    """Return the score of a name, with random parameters that fit."""
    if name in VARIANTS:
        return VARIANTS[name](widths, generator)
    return TABLE[name].sample(widths.query, widths.key, widths.keys, generator)


def mixes_widths(name: str) -> bool:
    """Return whether the score takes keys of another width than the queries."""
    base = name.split("/", maxsplit=1)[0]
    return name not in SAME_WIDTHS and base in TABLE and TABLE[base].mixed_widths
