"""Kernels of a distance: the score of each, and how wide it is for its spread."""

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
from regard.scores.distance import Radial

#: A kernel of one's own: scaled distances u ≥ 0 in, weights K(u) ≥ 0 out, of the same shape.
Profile = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Kernel:
    """A kernel of the distance in units of its bandwidth.

    Attributes
    ----------
    name : str
    score : callable
        The score whose exponential is the kernel, from a bandwidth for each coordinate.
    stretch : callable
        How many times as wide as a Gaussian of the same spread (standard deviation along each of C coordinates) it is.
    compact : bool
        Whether it is 0 beyond one bandwidth.
    learnable : bool
        Whether its weights have a gradient to the bandwidth.
    manhattan : bool
        Whether the distance is the sum of absolute differences, instead of the Euclidean.
    flat : bool
        Whether the weight is the same at every distance.
    radius : float
        Beyond how many bandwidths the weight is less than 1 % of that at no distance.
    """

    name: str
    score: Callable[[Tensor], Score]
    stretch: Callable[[int], float]
    compact: bool = False
    learnable: bool = True
    manhattan: bool = False
    flat: bool = False
    radius: float = math.sqrt(2 * math.log(100))


class Shaped(Radial):
    """The logarithm of a function of the distance."""

    excludes = True

    def __init__(self, profile: Profile, width: float | Tensor = 1.0) -> None:
        super().__init__(width)
        self.profile = profile

    def log_weight(self, square: Tensor) -> Tensor:
        positive = square > 0  # the root has no gradient at 0
        distance = torch.where(positive, torch.where(positive, square, 1.0).sqrt(), 0.0)
        expected = "have weights with a gradient in torch to the distance for bandwidth='learned'"
        try:
            weight = torch.as_tensor(self.profile(distance), dtype=square.dtype, device=square.device)
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


#: By name. The variance of a kernel along a coordinate, as a density over C of them: 1 of the Gaussian, 1/(C+2) of the
#: ball, (C+1)/((C+2)(C+3)) of the cone, 1/(C+4) of the paraboloid, 2 of the Laplacian.
TABLE = {
    kernel.name: kernel
    for kernel in (
        Kernel("gaussian", scores.Gaussian, lambda _: 1.0),
        Kernel("boxcar", scores.Boxcar, lambda C: math.sqrt(C + 2), compact=True, learnable=False, radius=1),
        Kernel(
            "triangular", scores.Triangular, lambda C: math.sqrt((C + 2) * (C + 3) / (C + 1)), compact=True, radius=1
        ),
        Kernel("epanechikov", scores.Epanechikov, lambda C: math.sqrt(C + 4), compact=True, radius=1),
        Kernel("constant", lambda _: scores.Constant(), lambda _: 1.0, learnable=False, flat=True),
        Kernel("laplacian", scores.Laplacian, lambda _: math.sqrt(0.5), manhattan=True, radius=math.log(100)),
    )
}


def named(function: str, kernel: Any) -> Kernel:
    """Return the kernel of this name, or of this function."""
    if isinstance(kernel, str):
        if kernel not in TABLE:
            raise unknown_name(function, "kernel", kernel, TABLE)
        return TABLE[kernel]
    if not callable(kernel):
        raise rejected(function, "kernel", "be a name or a function of distances", described(kernel), TypeError)
    return Kernel(getattr(kernel, "__name__", "function"), lambda width: Shaped(kernel, width), lambda _: 1.0)
