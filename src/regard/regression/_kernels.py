"""Kernels by name or from a function: their scores, and the scale of their bandwidths."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard import scores
from regard._errors import described, rejected, unknown_name
from regard.scores import Score
from regard.scores.distance import Distance, Radial, kernels

#: A kernel of one's own: scaled distances u ≥ 0 in, weights K(u) ≥ 0 out, of the same shape.
Profile = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Kernel:
    """A kernel of the distance in units of its bandwidth.

    Attributes
    ----------
    score : callable
        The score whose exponential is the kernel, from a bandwidth for each coordinate.
    form : type of Distance
        What is known of it.
    flat : bool
        Whether the weight is the same at every distance.
    """

    score: Callable[[float | Tensor], Score]
    form: type[Distance]
    flat: bool = False

    def canonical_factor(self, features: int) -> float:
        """Return how many times as wide as a Gaussian of the same standard deviation along each coordinate it is."""
        return self.form.variance(features) ** -0.5

    @property
    def known(self) -> bool:
        """True where the weight is known to fall with the distance, and its logarithm is known, too."""
        return self.form is not Shaped

    @property
    def learnable(self) -> bool:
        """True where the weights have a gradient to the bandwidth."""
        return self.form.smooth and not self.flat

    @property
    def distance_score(self) -> type[Distance]:
        """The score that falls for ever with the kernel's own distance."""
        return scores.Laplacian if self.form.manhattan else scores.Gaussian

    @property
    def radius(self) -> float:
        """The number of bandwidths beyond which the weight is 0, or by :attr:`distance_score` less than 1 %."""
        if self.form.compact:
            return 1.0
        return math.log(100) if self.form.manhattan else math.sqrt(2 * math.log(100))


class Shaped(Radial):
    """The logarithm of a function of the distance."""

    excludes = True

    def __init__(self, function: Profile, width: float | Tensor = 1.0) -> None:
        super().__init__(width)
        self.function = function

    def log_weight(self, square: Tensor) -> Tensor:
        positive = square > 0  # the root has no gradient at 0
        distance = torch.where(positive, torch.where(positive, square, 1.0).sqrt(), 0.0)
        expected = "have weights with a gradient in torch to the distance for bandwidth='learned'"
        try:
            weight = torch.as_tensor(self.function(distance), dtype=square.dtype, device=square.device)
        except RuntimeError as error:
            if "requires grad" not in str(error):
                raise
            raise rejected("NadarayaWatson", "kernel", expected, "a function of NumPy") from None
        if distance.requires_grad and not weight.requires_grad:
            raise rejected("NadarayaWatson", "kernel", expected, "a function whose weights have none")
        if weight.shape != square.shape:
            expected = f"return a weight for each of the distances {tuple(square.shape)}"
            raise rejected("NadarayaWatson", "kernel", expected, f"shape {tuple(weight.shape)}")
        good = (weight >= 0) & (weight < torch.inf)
        if not bool(good.all()):
            came = f"{float(weight[~good][0]):g}"
            raise rejected("NadarayaWatson", "kernel", "return finite weights of at least 0", came)
        seen = weight > 0
        return torch.where(seen, torch.where(seen, weight, 1.0).log(), -torch.inf)


def names() -> tuple[str, ...]:
    """Return the names of all kernels: those of a distance, and "constant"."""
    return (*kernels(), "constant")


def resolve_kernel(function: str, kernel: Any) -> Kernel:
    """Return the kernel of this name, or of this function."""
    if isinstance(kernel, str):
        if kernel not in names():
            raise unknown_name(function, "kernel", kernel, names())
        if kernel == "constant":
            return Kernel(lambda _: scores.Constant(), Shaped, flat=True)
        return Kernel(kernels()[kernel], kernels()[kernel])
    if not callable(kernel):
        raise rejected(function, "kernel", "be a name or a function of distances", described(kernel), TypeError)
    return Kernel(lambda width: Shaped(kernel, width), Shaped)
