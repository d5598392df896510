"""Scores that are dot products of features: plain, scaled, bilinear and cosine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor

from regard._utils.constraints import Number, TensorOf
from regard._utils.errors import rejected, shape
from regard._utils.mechanism import mechanism
from regard.scores.base import DotForm, Score, register

# Base class -----------------------------------------------------------------------------------------------------------


class DotLike(Score):
    """A dot product of projected rows; ``project`` is the identity by default."""

    # as_dot calls project, which may be overridden.
    shortcuts: ClassVar[Mapping[str, frozenset[str]]] = dict.fromkeys(
        ("as_dot", "dot_refusal"), frozenset({"compare", "modify"})
    )

    def compare(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.mT

    def positions(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor] | None:
        return self.project(query, key)

    def dot_refusal(self, dtype: torch.dtype) -> str | None:  # noqa: ARG002
        return None

    def as_dot(self, query: Tensor, key: Tensor) -> DotForm:
        return DotForm(*self.project(query, key))


# Dot product ----------------------------------------------------------------------------------------------------------


@register("dot")
@mechanism(
    formula="q·k",
    sources=("luong2015",),
    cost="O(L·S·E)",
)
class Dot(DotLike):
    """Dot product, ``q·k`` (Luong et al. 2015, arXiv 1508.04025).

    Examples
    --------
    >>> import torch, regard
    >>> q = torch.tensor([[1.0, -1.0, 2.0]])
    >>> k = torch.tensor([[2.0, 1.0, -2.0], [1.0, 2.0, -1.0], [3.0, -2.0, 0.0]])
    >>> regard.scores.Dot().compare(q, k)
    tensor([[-3., -3.,  5.]])
    """


# Scaled dot product: the score of the Transformer, and of torch's SDPA ------------------------------------------------


@register("scaled_dot")
@mechanism(
    formula="q·k / √E",
    sources=("vaswani2017",),
    cost="O(L·S·E)",
)
class ScaledDot(DotLike):
    """Scaled dot product, ``q·k / √E`` (Vaswani et al. 2017, arXiv 1706.03762). The default.

    The factor 1/√E is the default ``scale``; ``scale=`` of :func:`regard.attention` replaces it.

    Examples
    --------
    >>> ScaledDot().default_scale(64)
    0.125
    """

    def default_scale(self, width: int) -> float:
        return 1.0 if width == 0 else 1.0 / width**0.5  # torch's factor to the bit, unlike width**-0.5


# General: a dot product through a learned matrix ----------------------------------------------------------------------


@register("general")
@mechanism(
    formula="qᵀ W k",
    sources=("luong2015",),
    learned="W (Eq, Ek)",
    cost="O(L·Eq·Ek + L·S·Ek)",
)
class General(DotLike):
    """Luong's general score, ``qᵀ W k`` (Luong et al. 2015, arXiv 1508.04025).

    Parameters
    ----------
    weight : Tensor (Eq, Ek) or (H, Eq, Ek)
        The matrix W, shared by all heads or one per query head.

    Examples
    --------
    >>> import torch
    >>> score = General(torch.eye(2, 3))
    >>> score.compare(*score.project(torch.tensor([[[[1.0, 2.0]]]]), torch.tensor([[[[3.0, 4.0, 5.0]]]])))
    tensor([[[[11.]]]])
    """

    mixed_widths = True

    def __init__(self, weight: Tensor) -> None:
        self.weight = TensorOf(("Eq", "Ek"), ("H", "Eq", "Ek"))(self, "weight", weight)

    def check(self, query: Tensor, key: Tensor) -> None:
        wanted = (query.shape[-1], key.shape[-1])
        per_head = self.weight.dim() == 3
        if tuple(self.weight.shape[-2:]) != wanted or (per_head and self.weight.shape[0] != query.shape[1]):
            heads = f" or {(query.shape[1], *wanted)}"
            raise rejected("attention", "score General's weight", f"have shape {wanted}{heads}", shape(self.weight))

    def project(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return query @ self.weight, key

    @classmethod
    def sample(cls, query_width: int, key_width: int, keys: int, generator: torch.Generator) -> Self:  # noqa: ARG003
        return cls(torch.randn(query_width, key_width, generator=generator) / max(query_width, 1) ** 0.5)


# Cosine: the angle between query and key ------------------------------------------------------------------------------


def unit(rows: Tensor) -> Tensor:
    """Normalize rows (..., E) to length 1; a zero row stays zero, with zero gradient."""
    # Divide by the largest entry first: squares then neither overflow nor underflow. The factor needs no gradient.
    peak = rows.detach().abs().amax(-1, keepdim=True) if rows.shape[-1] else rows.new_ones(*rows.shape[:-1], 1)
    rows = rows / torch.where(peak == 0, 1, peak)
    square = (rows * rows).sum(-1, keepdim=True)
    return torch.where(square == 0, 0, rows * torch.where(square == 0, 1, square).rsqrt())


@register("cosine")
@mechanism(
    formula="β cos(q, k)",
    sources=("graves2014",),
    learned="β",
    cost="O(L·S·E)",
)
class Cosine(DotLike):
    """Cosine similarity, ``cos(q, k) / temperature`` (Graves et al. 2014, arXiv 1410.5401: β = 1/temperature).

    A zero vector has cosine 0 with every vector, and gradient 0.

    Lengths have no ``eps``: the cosine is exact for arbitrarily short vectors, and its gradient is proportional to
    1/length, which may overflow in float16. With one feature the cosine is ±1 and its derivative 0.
    (``torch.nn.functional.cosine_similarity`` bounds lengths by ``eps`` and so has another derivative below it.)

    Parameters
    ----------
    temperature : float or Tensor of one element, default 1.0
        Divides the cosine; smaller values give sharper weights. A tensor gets gradients.

    Examples
    --------
    >>> import torch
    >>> score = Cosine(temperature=0.5)
    >>> score.compare(*score.project(torch.tensor([[3.0, 4.0]]), torch.tensor([[30.0, 40.0], [0.0, 0.0]])))
    tensor([[2., 0.]])
    """

    def __init__(self, temperature: float | Tensor = 1.0) -> None:
        if isinstance(temperature, Tensor):
            if temperature.numel() != 1:
                raise rejected("Cosine", "temperature", "have one element", tuple(temperature.shape))
            temperature = temperature.reshape(())
        else:
            temperature = Number(gt=0, note=" or a tensor")(self, "temperature", temperature)
        self.temperature = temperature

    def project(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return unit(query) / self.temperature, unit(key)

    def positions(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor] | None:
        return unit(query), unit(key)
