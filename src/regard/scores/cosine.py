"""Cosine: the angle between query and key, whatever their lengths."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard._catalogue import mechanism
from regard._constraints import Interval
from regard._errors import rejected
from regard.scores.base import register
from regard.scores.dot_like import DotLike


def unit(rows: Tensor) -> Tensor:
    """Return rows (..., E) at length 1; a zero row stays zero, with zero gradient."""
    # The largest entry goes first, so that squares neither overflow nor vanish; a constant factor has no gradient here.
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

    A zero vector has cosine 0 with everything, and no gradient.

    No constant is added to a length: the cosine of a vector does not depend on its length however short it is, and its
    gradient is in proportion to 1/length, which for short vectors may exceed the largest number of float16 and is
    then infinite. With one feature the cosine is ±1, so its derivative is 0. (A function that bounds lengths from
    below, such as ``torch.nn.functional.cosine_similarity`` by ``eps``, has another derivative within that bound.)

    Parameters
    ----------
    temperature : float or Tensor of one element, default 1.0
        Divides the cosine; smaller is sharper. A tensor gets gradients.

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
            temperature = Interval(0, math.inf, "()", note=" or a tensor")(self, "temperature", temperature)
        self.temperature = temperature

    def project(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return unit(query) / self.temperature, unit(key)
