"""Distance kernels as scores: Gaussian, Laplacian, boxcar, triangular and Epanechnikov."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from regard._utils.constraints import Number, TensorOf
from regard._utils.errors import rejected, shape
from regard._utils.mechanism import mechanism
from regard._utils.tracing import is_exported_to_onnx
from regard.scores.base import TABLE, DotForm, Score, register

# Base classes ---------------------------------------------------------------------------------------------------------


#: Shells by which a kernel's variance is integrated; the log of the largest radius, if the kernel does not end; and how
#: far, in logs, the weight there must lie below the largest.
_SHELLS, _FARTHEST, _TAIL = 50_000, 40.0, 16.0
_WIDTH = Number(gt=0, note=" or a tensor")


class Distance(Score):
    """A kernel K of the distance u = ‖(q − k) / width‖: the score is log K(u).

    Once a kernel is registered, the layer, the estimators, the command line, the tests and the documentation find it
    through :func:`kernels`.

    Parameters
    ----------
    width : float or Tensor of shape () or (E,), default 1.0
        The unit of distance, shared by all features or one per feature.
    """

    #: The constructor's name for the width.
    unit: ClassVar[str] = "width"
    #: Whether the distance is the Manhattan distance rather than the Euclidean.
    manhattan: ClassVar[bool] = False
    #: Whether K(u) is 0 for u > 1.
    compact: ClassVar[bool] = False
    #: Whether the weights are differentiable in the width.
    smooth: ClassVar[bool] = True

    def __init__(self, width: float | Tensor = 1.0) -> None:
        if isinstance(width, Tensor):
            TensorOf((), ("E",))(self, self.unit, width)
        else:
            width = _WIDTH(self, self.unit, width)
        self.width = width

    @staticmethod
    def log_profile(u: Any) -> Any:
        """Return log K(u) for NumPy distances u ≥ 0, or 0 ≤ u ≤ 1 for a compact kernel.

        This is the reference for tests of :meth:`compare`: the plain formula, analytic in u, without care for rounding.
        """
        raise NotImplementedError

    @classmethod
    def variance(cls, features: int) -> float:
        """Return the variance of K along one coordinate, as a density over so many, for a width of 1.

        By default it is integrated from :meth:`log_profile`, to about 7 digits. It is infinite where the kernel has
        none because its tails are too heavy, as a Cauchy kernel's are.
        """
        # Shells of radius u, in equal steps of u up to where a compact kernel ends, else of log u.
        middles = (np.arange(_SHELLS) + 0.5) / _SHELLS
        log_u = np.log(middles) if cls.compact else _FARTHEST * (2 * middles - 1)
        shells = cls.log_profile(np.exp(log_u)) + (features - cls.compact) * log_u
        squares = shells + 2 * log_u
        if not cls.compact and squares[-1] > squares.max() - _TAIL:
            return math.inf
        peak = shells.max()
        mean = np.exp(squares - peak).sum() / np.exp(shells - peak).sum()
        return float(mean * (2 / (features * (features + 1)) if cls.manhattan else 1 / features))

    @classmethod
    def profile(cls, u: Any) -> Any:
        """Return K(u) of distances u ≥ 0 as a NumPy array."""
        u = np.asarray(u, dtype=float)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where((u <= 1) | (not cls.compact), np.exp(cls.log_profile(u)), 0.0)

    def __repr__(self) -> str:
        return super().__repr__().replace("(width=", f"({self.unit}=")

    def check(self, query: Tensor, key: Tensor) -> None:  # noqa: ARG002
        width = self.width
        if isinstance(width, Tensor) and width.dim() == 1 and width.shape[0] not in (1, query.shape[-1]):
            expected = f"have shape () or ({query.shape[-1]},), query's head width"
            raise rejected("attention", f"score {type(self).__name__}'s {self.unit}", expected, shape(width))

    def difference(self, query: Tensor, key: Tensor) -> Tensor:
        """Return ``(q − k) / width`` of every pair, (..., l, s, E)."""
        # Subtract before dividing: unlike q/width − k/width, this is exact for near neighbours.
        return (query.unsqueeze(-2) - key.unsqueeze(-3)) / self.width

    def positions(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor] | None:
        width = self.width
        if isinstance(width, Tensor) and width.dim():  # features of different units
            return query / width, key / width
        return query, key

    def pair_size(self, width: int) -> int:
        return 2 * width

    def pair_flops(self, width: int) -> int:
        return 4 * width


class Radial(Distance):
    """A score that depends only on ``‖(q − k) / width‖``; a subclass defines :meth:`log_weight`."""

    @abstractmethod
    def log_weight(self, square: Tensor) -> Tensor:
        """Return the score at squared distance ``square``, in units of the width."""

    def compare(self, query: Tensor, key: Tensor) -> Tensor:
        difference = self.difference(query, key)
        return self.log_weight((difference * difference).sum(-1))


class Compact(Radial):
    """A kernel that is 0 beyond the width; a subclass defines :meth:`one_minus_kernel`."""

    can_return_neg_inf = True
    compact = True
    #: The width of a sample, in units of √E.
    typical: ClassVar[float] = 2.5

    @abstractmethod
    def one_minus_kernel(self, square: Tensor) -> Tensor:
        """Return 1 − K at squared distances below 1."""

    def log_weight(self, square: Tensor) -> Tensor:
        inside = square < 1  # both guards keep the infinite slope of the logarithm at 1 out of the gradient
        return torch.where(inside, torch.log1p(-self.one_minus_kernel(torch.where(inside, square, 0.0))), -torch.inf)

    @classmethod
    def sample(cls, query_width: int, key_width: int, keys: int, generator: torch.Generator) -> Self:  # noqa: ARG003
        return cls(cls.typical * max(query_width, 1) ** 0.5)


def kernels() -> dict[str, type[Distance]]:
    """Return every registered kernel by name."""
    return {name: cls for name, cls in TABLE.items() if issubclass(cls, Distance)}


# Gaussian -------------------------------------------------------------------------------------------------------------


@register("gaussian")
@mechanism(
    formula="−‖(q − k) / σ‖² / 2",
    sources=(
        "nadaraya1964",
        "watson1964",
    ),
    learned="σ, or one for each feature",
    cost="O(L·S·E)",
)
class Gaussian(Radial):
    """Gaussian kernel as a log-weight, ``−½ ‖(q − k) / σ‖²`` (Nadaraya 1964; Watson 1964).

    With it, attention is Nadaraya–Watson regression: queries are the points to predict at, keys the training inputs,
    values their targets.

    Parameters
    ----------
    bandwidth : float or Tensor of shape () or (E,), default 1.0
        The width σ, shared by all features or one per feature; a tensor gets gradients.

    Examples
    --------
    >>> import torch, regard
    >>> x = torch.tensor([[0.0], [1.0], [2.0]])
    >>> regard.attention(torch.tensor([[1.0]]), x, x**2, score=Gaussian(0.1))
    tensor([[1.]])
    """

    unit = "bandwidth"

    def __init__(self, bandwidth: float | Tensor = 1.0) -> None:
        super().__init__(bandwidth)

    @staticmethod
    def log_profile(u: Any) -> Any:
        return -u * u / 2

    @staticmethod
    def variance(features: int) -> float:  # noqa: ARG004
        return 1.0

    def log_weight(self, square: Tensor) -> Tensor:
        return -0.5 * square

    def dot_refusal(self, dtype: torch.dtype) -> str | None:
        if dtype == torch.float64:
            return "as a dot product, the Gaussian loses digits to cancellation and needs a dtype wider than float64"
        if is_exported_to_onnx():
            return "as a dot product, the Gaussian needs a median, which ONNX does not support"
        return None

    def as_dot(self, query: Tensor, key: Tensor) -> DotForm:
        """Lift the keys by one feature: ``−½‖q−k‖² = q·k − ½‖k‖² − ½‖q‖²``, in float64 because it cancels."""
        query, key = query.double(), key.double()
        width = self.width.double() if isinstance(self.width, Tensor) else self.width
        # Any origin is valid; one near the keys minimizes cancellation. Padding does not move the median.
        origin = (
            key.detach().nanmedian(-2, keepdim=True).values if 0 not in key.shape else key.new_zeros(key.shape[1], 1, 1)
        )
        key = (key - origin) / width
        query = (query - origin.repeat_interleave(query.shape[1] // max(key.shape[1], 1), -3)) / width
        offset = -0.5 * (query * query).sum(-1)
        key = torch.cat((key, -0.5 * (key * key).sum(-1, keepdim=True)), -1)
        return DotForm(torch.cat((query, torch.ones_like(offset).unsqueeze(-1)), -1), key, offset)


# Laplacian ------------------------------------------------------------------------------------------------------------


@register("laplacian")
@mechanism(
    formula="−‖(q − k) / σ‖₁",
    sources=("rahimi2007",),
    learned="σ, or one for each feature",
    cost="O(L·S·E)",
)
class Laplacian(Distance):
    """Laplacian kernel as a log-weight, ``−‖(q − k) / σ‖₁ = −Σ_e |q_e − k_e| / σ_e`` (Rahimi & Recht 2007).

    It is the product of a kernel ``exp(−|q_e − k_e| / σ_e)`` per feature. Its peak is sharper than the Gaussian's and
    its tails are heavier. scikit-learn's ``laplacian_kernel`` has gamma = 1 / σ.

    Parameters
    ----------
    width : float or Tensor of shape () or (E,), default 1.0
        The width σ, shared by all features or one per feature; a tensor gets gradients.

    Notes
    -----
    Where a feature of the query equals that of the key, the score has a kink; the gradient there is 0, as in torch.

    Examples
    --------
    >>> import torch
    >>> Laplacian(2.0).compare(torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, -1.0], [3.0, 0.0]]))
    tensor([[-1.0000, -1.5000]])
    """

    manhattan = True

    @staticmethod
    def log_profile(u: Any) -> Any:
        return -u

    @staticmethod
    def variance(features: int) -> float:  # noqa: ARG004
        return 2.0

    def compare(self, query: Tensor, key: Tensor) -> Tensor:
        return -self.difference(query, key).abs().sum(-1)


# Boxcar: equal weight for all keys within the width -------------------------------------------------------------------


@register("boxcar")
@mechanism(
    formula="0 if ‖q − k‖ ≤ σ, else −∞",
    cost="O(L·S·E)",
)
class Boxcar(Compact):
    """Boxcar kernel as a log-weight: ``0`` where ``‖q − k‖ ≤ σ``, else ``−inf``.

    Parameters
    ----------
    width : float or Tensor of shape () or (E,), default 1.0
        The radius σ, shared by all features or one per feature. Weights are piecewise constant in σ, queries and keys,
        so all three gradients are zero.

    Examples
    --------
    >>> import torch
    >>> Boxcar(1.0).compare(torch.tensor([[0.0]]), torch.tensor([[0.5], [1.0], [1.5]]))
    tensor([[0., 0., -inf]])
    """

    smooth = False
    typical = 1.7

    @staticmethod
    def log_profile(u: Any) -> Any:
        return 0 * u

    @staticmethod
    def variance(features: int) -> float:
        return 1 / (features + 2)

    def one_minus_kernel(self, square: Tensor) -> Tensor:
        return 0.0 * square

    def log_weight(self, square: Tensor) -> Tensor:
        # Distance 1 is inside. 0·square keeps the graph, so that gradients are zero rather than missing.
        return torch.where(square <= 1, self.one_minus_kernel(square), -torch.inf)


# Triangular: weights fall linearly with distance, to 0 at the width ---------------------------------------------------


@register("triangular")
@mechanism(
    formula="log max(0, 1 − ‖q − k‖ / σ)",
    learned="σ, or one for each feature",
    cost="O(L·S·E)",
)
class Triangular(Compact):
    """Triangular kernel as a log-weight, ``log max(0, 1 − ‖q − k‖ / σ)``.

    Some texts call this kernel Epanechnikov's, which is quadratic: :class:`Epanechnikov`.

    Parameters
    ----------
    width : float or Tensor of shape () or (E,), default 1.0
        The distance σ at which weights reach 0, shared by all features or one per feature; a tensor gets gradients.

    Examples
    --------
    >>> import torch
    >>> Triangular(2.0).compare(torch.tensor([[0.0]]), torch.tensor([[0.0], [1.0], [2.0]])).exp()
    tensor([[1.0000, 0.5000, 0.0000]])
    """

    @staticmethod
    def log_profile(u: Any) -> Any:
        return np.log(1 - u)

    @staticmethod
    def variance(features: int) -> float:
        return (features + 1) / ((features + 2) * (features + 3))

    def one_minus_kernel(self, square: Tensor) -> Tensor:
        moved = square > 0  # the root has an infinite slope at 0
        return torch.where(moved, torch.where(moved, square, 0.25).sqrt(), 0.0 * square)


# Epanechnikov: weights fall with the squared distance, to 0 at the width ----------------------------------------------


@register("epanechnikov")
@mechanism(
    formula="log max(0, 1 − ‖q − k‖² / σ²)",
    sources=("epanechnikov1969",),
    learned="σ, or one for each feature",
    cost="O(L·S·E)",
)
class Epanechnikov(Compact):
    """Epanechnikov's kernel as a log-weight, ``log max(0, 1 − ‖q − k‖² / σ²)`` (Epanechnikov 1969).

    Some texts use this name for the linear kernel: :class:`Triangular`.

    Parameters
    ----------
    width : float or Tensor of shape () or (E,), default 1.0
        The distance σ at which weights reach 0, shared by all features or one per feature; a tensor gets gradients.

    Examples
    --------
    >>> import torch
    >>> Epanechnikov(2.0).compare(torch.tensor([[0.0]]), torch.tensor([[0.0], [1.0], [2.0]])).exp()
    tensor([[1.0000, 0.7500, 0.0000]])
    """

    @staticmethod
    def log_profile(u: Any) -> Any:
        return np.log(1 - u * u)

    @staticmethod
    def variance(features: int) -> float:
        return 1 / (features + 4)

    def one_minus_kernel(self, square: Tensor) -> Tensor:
        return square
