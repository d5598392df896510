"""Kernels of a distance as scores: Gaussian, Laplacian, boxcar, triangular and Epanechnikov."""

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

# Kernels of a distance: what they share, and what each states of itself, which everybody else reads here --------------


#: Shells by which a kernel's variance is integrated; the log of the largest radius, if the kernel does not end; and how
#: far, in logs, the weight there must lie below the largest.
_SHELLS, _FARTHEST, _TAIL = 50_000, 40.0, 16.0
_WIDTH = Number(gt=0, note=" or a tensor")


class Distance(Score):
    """A kernel K of the distance u = ‖(q − k) / width‖: the score is log K(u).

    A kernel is stated by its class alone: the layer, the estimators, the command line, the tests and the documentation
    find it in :func:`kernels` as soon as it is registered.

    Parameters
    ----------
    width : float or Tensor of shape () or (E,), default 1.0
        The unit of distance, one for all features or one for each.
    """

    #: What the constructor calls the width.
    unit: ClassVar[str] = "width"
    #: Whether the distance is the sum of absolute differences, instead of the Euclidean.
    manhattan: ClassVar[bool] = False
    #: Whether K(u) is 0 for u > 1.
    compact: ClassVar[bool] = False
    #: Whether the weights have a gradient to the width.
    smooth: ClassVar[bool] = True

    def __init__(self, width: float | Tensor = 1.0) -> None:
        if isinstance(width, Tensor):
            TensorOf((), ("E",))(self, self.unit, width)
        else:
            width = _WIDTH(self, self.unit, width)
        self.width = width

    @staticmethod
    def log_profile(u: Any) -> Any:
        """Return log K(u) of distances u ≥ 0 in NumPy; where the kernel is compact, of u ≤ 1 alone.

        It is what :meth:`compare` is judged by: the plain formula, analytic in u, without care for rounding.
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
        # The difference comes first: it is exact for near neighbours, which q/width − k/width is not.
        return (query.unsqueeze(-2) - key.unsqueeze(-3)) / self.width

    def pair_size(self, width: int) -> int:
        return 2 * width

    def pair_flops(self, width: int) -> int:
        return 4 * width


class Radial(Distance):
    """A score that depends on ``‖(q − k) / width‖`` alone; a subclass defines :meth:`log_weight`."""

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
        inside = square < 1  # both guards keep the logarithm's infinite slope at the rim out of the gradient
        return torch.where(inside, torch.log1p(-self.one_minus_kernel(torch.where(inside, square, 0.0))), -torch.inf)

    @classmethod
    def sample(cls, query_width: int, key_width: int, keys: int, generator: torch.Generator) -> Self:  # noqa: ARG003
        return cls(cls.typical * max(query_width, 1) ** 0.5)


def kernels() -> dict[str, type[Distance]]:
    """Return every registered kernel by its name."""
    return {name: cls for name, cls in TABLE.items() if issubclass(cls, Distance)}


# Gaussian: nearness, as in Nadaraya–Watson regression -----------------------------------------------------------------


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

    With it, attention is Nadaraya–Watson regression: queries are points to predict at, keys the inputs seen,
    values their targets.

    Parameters
    ----------
    bandwidth : float or Tensor of shape () or (E,), default 1.0
        The width σ, one for all features or one for each; a tensor gets gradients.

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
            return "Gaussian as a dot product cancels, and there is no dtype wider than float64 to absorb that"
        if is_exported_to_onnx():
            return "Gaussian as a dot product needs a median, which cannot be written to ONNX"
        return None

    def as_dot(self, query: Tensor, key: Tensor) -> DotForm:
        """Lift the keys by one feature: ``−½‖q−k‖² = q·k − ½‖k‖² − ½‖q‖²``, in float64 because it cancels."""
        query, key = query.double(), key.double()
        width = self.width.double() if isinstance(self.width, Tensor) else self.width
        # Where the origin lies is free, and near the keys least is cancelled; a median is not moved by padding.
        origin = (
            key.detach().nanmedian(-2, keepdim=True).values if 0 not in key.shape else key.new_zeros(key.shape[1], 1, 1)
        )
        key = (key - origin) / width
        query = (query - origin.repeat_interleave(query.shape[1] // max(key.shape[1], 1), -3)) / width
        offset = -0.5 * (query * query).sum(-1)
        key = torch.cat((key, -0.5 * (key * key).sum(-1, keepdim=True)), -1)
        return DotForm(torch.cat((query, torch.ones_like(offset).unsqueeze(-1)), -1), key, offset)


# Laplacian: nearness by the Manhattan distance ------------------------------------------------------------------------


@register("laplacian")
@mechanism(
    formula="−‖(q − k) / σ‖₁",
    sources=("rahimi2007",),
    learned="σ, or one for each feature",
    cost="O(L·S·E)",
)
class Laplacian(Distance):
    """Laplacian kernel as a log-weight, ``−‖(q − k) / σ‖₁ = −Σ_e |q_e − k_e| / σ_e`` (Rahimi & Recht 2007).

    A product of one kernel ``exp(−|q_e − k_e| / σ_e)`` for each feature. Its peak is sharper than the Gaussian's, and
    its tails are heavier. scikit-learn's ``laplacian_kernel`` has gamma = 1 / σ.

    Parameters
    ----------
    width : float or Tensor of shape () or (E,), default 1.0
        The width σ, one for all features or one for each; a tensor gets gradients.

    Notes
    -----
    Where a query's feature equals a key's, the score has a kink; its gradient to both is 0 there, as torch's is.

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


# Boxcar: every key within reach counts the same -----------------------------------------------------------------------


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
        The radius σ, one for all features or one for each. Weights are piecewise constant in it, in queries and
        in keys: the gradient to all three is zero.

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
        # The rim counts, and 0·square keeps the graph, so that asking for a gradient answers zero.
        return torch.where(square <= 1, self.one_minus_kernel(square), -torch.inf)


# Triangular: weight falls linearly with distance, to nothing at the width ---------------------------------------------


@register("triangular")
@mechanism(
    formula="log max(0, 1 − ‖q − k‖ / σ)",
    learned="σ, or one for each feature",
    cost="O(L·S·E)",
)
class Triangular(Compact):
    """Triangular kernel as a log-weight, ``log max(0, 1 − ‖q − k‖ / σ)``.

    Some texts print this kernel under the name of Epanechikov, whose own is quadratic: :class:`Epanechikov`.

    Parameters
    ----------
    width : float or Tensor of shape () or (E,), default 1.0
        The distance σ at which the weight reaches zero, one for all features or one for each; a tensor gets gradients.

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


# Epanechikov: weight falls with the square of the distance, to nothing at the width -----------------------------------


@register("epanechikov")
@mechanism(
    formula="log max(0, 1 − ‖q − k‖² / σ²)",
    sources=("epanechikov1969",),
    learned="σ, or one for each feature",
    cost="O(L·S·E)",
)
class Epanechikov(Compact):
    """Epanechikov's kernel as a log-weight, ``log max(0, 1 − ‖q − k‖² / σ²)`` (Epanechikov 1969).

    Some texts print the linear kernel under this name: that is :class:`Triangular`.

    Parameters
    ----------
    width : float or Tensor of shape () or (E,), default 1.0
        The distance σ at which the weight reaches zero, one for all features or one for each; a tensor gets gradients.

    Examples
    --------
    >>> import torch
    >>> Epanechikov(2.0).compare(torch.tensor([[0.0]]), torch.tensor([[0.0], [1.0], [2.0]])).exp()
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
