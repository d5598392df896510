"""What the kernels compare: for each family of scores, the arrays made once for every row."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard import scores
from regard.scores import Score
from regard.scores.distance import Radial
from regard.scores.dot_like import DotLike

#: The additive score: features up to here lose precision to exponentials; beyond, four denominators overflow.
SMALL = 0.5
LARGE = {torch.float32: 5.5, torch.float64: 44.0}
KINDS = {scores.Gaussian: 0, scores.Boxcar: 1, scores.Triangular: 2, scores.Epanechikov: 3}


def family_of(score: Score) -> str | None:
    """Return the kernels' module for a score, or None."""
    if type(score) in (scores.Additive, scores.Concat):
        return "additive"
    if type(score) in KINDS:
        return "radial"
    if isinstance(score, DotLike) and type(score).modify is Score.modify:
        return "dot"
    return None


@dataclass(frozen=True)
class Rows:
    """Compared rows as the kernels read them.

    Attributes
    ----------
    family : str
    width : int
        Features C of a row.
    arrays : dict of str to Tensor
        By the name of the kernels' argument: ``query`` (B, H, L, C), ``key`` (B, G, C, S) and so on.
    numbers : dict of str to int
        The same for flags.
    scale : float
        What a kernel multiplies its scores by; 1 where that is done already.
    """

    family: str
    width: int
    arrays: dict[str, Tensor]
    numbers: dict[str, int] = field(default_factory=dict)
    scale: float = 1.0

    @property
    def is_direct(self) -> bool:
        """Whether the kernels find weights instead of scores."""
        return bool(self.numbers.get("direct"))

    @property
    def planes(self) -> int:
        """Forms of a tile of keys that are packed."""
        return 3 if self.numbers.get("mixed") else 1


def is_direct(kind: int, scale: float, plain: bool) -> bool:
    """Whether a compact kernel's weights are found without their logarithms."""
    return plain and kind != 0 and scale == 1.0


def rows_of(family: str, query: Tensor, key: Tensor, weight: Tensor, scale: float, kind: int, plain: bool) -> Rows:
    """Return what the kernels compare, made from projected rows (B, H, L, C) and (B, G, S, C).

    ``weight`` (H, C) is w_v of the additive score, or the widths of a radial one. ``plain`` says that nothing is added
    to the scores.
    """
    if family == "dot":
        arrays = {"query": (query * scale).contiguous(), "key": key.mT.contiguous(), "key_raw": key.contiguous()}
        return Rows(family, query.shape[-1], arrays)
    if family == "radial":
        inverse = 1 / weight.contiguous()
        arrays = {"query": query.contiguous(), "key": key.mT.contiguous(), "weight": inverse}
        numbers = {"kind": kind, "direct": int(is_direct(kind, scale, plain)), "weight_head": query.shape[-1]}
        return Rows(family, query.shape[-1], arrays, numbers, scale)
    return _additive(query, key, weight * scale)


def _additive(query: Tensor, key: Tensor, weight: Tensor) -> Rows:
    extra = -query.shape[-1] % 4
    if extra:
        query, key, weight = (pad(t, (0, extra)) for t in (query, key, weight))
    limit = LARGE[query.dtype]
    classes = [_classes(t, limit) for t in (query, key)]
    mixed = any(not bool((c == 1).all()) for c in classes)
    raw = query.contiguous(), key.mT.contiguous()
    powers = [torch.exp(2 * (t.clamp(-limit, limit) if mixed else t)) for t in raw]
    arrays = {"query": powers[0], "key": powers[1], "weight": weight.contiguous()}
    numbers = {"weight_head": query.shape[-1], "mixed": int(mixed)}
    if mixed:
        small = [t.clamp(-SMALL, SMALL).tanh() for t in raw]
        arrays |= {"query_small": small[0], "key_small": small[1], "query_raw": raw[0], "key_raw": raw[1]}
        arrays |= {"query_class": classes[0], "key_class": classes[1]}
    return Rows("additive", query.shape[-1], arrays, numbers)


def _classes(rows: Tensor, limit: float) -> Tensor:
    """Return 0, 1 or 2 for each row: small features, ordinary ones, and some that exponentials cannot hold."""
    largest = rows.abs().amax(-1) if rows.shape[-1] else rows.new_zeros(rows.shape[:-1])
    return ((largest > SMALL).to(torch.uint8) + (~(largest <= limit)).to(torch.uint8)).contiguous()


@dataclass(frozen=True)
class Gradients:
    """What the backward kernels sum up: for rows (B, H, L, C), keys as the kernels lay them out, and weights."""

    query: Tensor
    key: Tensor
    weight: Tensor

    def finished(self, rows: Rows, width: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients to projected query, key and weight (H, C): with the factors that kernels leave out."""
        if rows.family == "dot":
            return self.query * scale, self.key, self.weight.new_zeros(self.weight.shape[1], 0)
        weight = rows.arrays["weight"]
        by_query = weight.unsqueeze(1)  # (H, 1, C)
        by_key = by_query[:: weight.shape[0] // self.key.shape[1]]  # the same for the query heads of a key head
        C = rows.width
        if rows.family == "radial":
            d_weight = -2 * weight * self.weight[..., :C].sum(0)
            return self.query * (2 * by_query), self.key.mT * (2 * by_key), d_weight
        d_weight = scale * (self.weight[..., :C] - 2 * self.weight[..., C:]).sum(0)
        d_query, d_key = self.query * (4 * by_query), self.key.mT * (4 * by_key)
        return d_query[..., :width], d_key[..., :width], d_weight[..., :width]
