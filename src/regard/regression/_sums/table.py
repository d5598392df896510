"""Sums over rows whose features are all categorical, by counting which categories agree instead of comparing pairs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from torch import Tensor

from regard import scores
from regard.regression._sums.mixed import log_weight
from regard.regression._sums.smoother import Averages, Estimate, Smoother
from regard.scores.kernels import Distance

#: The most features: sums are over each set of them.
MOST = 8
#: Kernels that are products of one for each feature.
PRODUCTS = (scores.Gaussian, scores.Laplacian)


@dataclass(frozen=True)
class Agreement:
    """The training points by their categories in some of the features.

    Attributes
    ----------
    same : tuple of bool
        Which features these are.
    known : ndarray (G,), int64
        The combinations of categories that occur, as numbers, sorted.
    group : ndarray (N,), int64
        The place of each point's combination.
    """

    same: tuple[bool, ...]
    known: np.ndarray
    group: np.ndarray


@dataclass(frozen=True)
class Table:
    """Training points with codes as their coordinates.

    With ``λ_j`` for the kernel at a distance of one along feature j, and 1 at 0, a product kernel is
    ``Π_j (λ_j + (1 − λ_j) [q_j = k_j])``. Multiplied out, a sum over points is one over the sets A of features,

    ``Σ_A Π_{j ∉ A} λ_j Π_{j ∈ A} (1 − λ_j) T_A(q)``,

    where T_A(q) sums up the points that agree with q in A, and is looked up. No term is negative, so nothing cancels.
    The same holds for every kernel of one feature.

    Attributes
    ----------
    sizes : tuple of int
        The number of categories of each feature.
    agreements : tuple of Agreement
        One for each set of features.
    """

    sizes: tuple[int, ...]
    agreements: tuple[Agreement, ...]

    @classmethod
    def of(cls, smoother: Smoother) -> Table:
        """Return the points of a smoother."""
        codes = smoother.key.cpu().numpy().astype(np.int64)
        sizes = tuple(len(smoother.features.categories[place]) for place in smoother.features.coded)
        found = []
        for same in product((False, True), repeat=len(sizes)):
            known, group = np.unique(_combined(codes, sizes, same), return_inverse=True)
            found.append(Agreement(same, known, group.reshape(-1)))
        return cls(sizes, tuple(found))

    def estimate(
        self, smoother: Smoother, query: Tensor, bandwidth: Tensor, own: Tensor | None, *,
        spread: bool = False, peak: bool = False, leverage: bool = False,
    ) -> Estimate:  # fmt: skip
        """Return the estimate at queries (L, C), each without its ``own`` point (L,) if given; differentiable.

        For several bandwidths (W, n_features), results have a leading dimension W.
        """
        smoother, query, bandwidth = smoother.to(torch.float64), query.double(), bandwidth.double()
        groups, wanted = self._groups(query, own), {"spread": spread, "peak": peak, "leverage": leverage}
        if bandwidth.dim() == 1:
            return self._estimate(smoother, query, bandwidth, groups, own, **wanted)
        return Estimate.stack([self._estimate(smoother, query, one, groups, own, **wanted) for one in bandwidth])

    def closeness(self, smoother: Smoother, query: Tensor, bandwidth: Tensor, own: Tensor | None) -> Tensor:
        """Return how near the nearest point of each query is, as :meth:`Smoother.closeness` does (L,)."""
        unit = 1 / smoother.coordinate_bandwidth(bandwidth)
        apart = unit if smoother.kernel.form.manhattan else unit.square() / 2
        found = query.new_full((len(query),), -torch.inf)
        for each, group in zip(self.agreements, self._groups(query, own)):
            others = self._others(each, group, own)
            away = -(apart * ~torch.tensor(each.same)).sum()
            found = torch.maximum(found, torch.where(torch.from_numpy(others > 0), away, -torch.inf))
        return found

    @staticmethod
    def _others(each: Agreement, group: np.ndarray, own: Tensor | None) -> np.ndarray:
        """Return the number of points but the queries' own that agree with them in a set of features (L,)."""
        return _looked_up(np.bincount(each.group), group) - (0 if own is None else 1)

    def _groups(self, query: Tensor, own: Tensor | None) -> list[np.ndarray]:
        """Return the place of each query's combination for each set of features (L,); −1 where no point has it."""
        if own is not None:
            return [each.group[own.numpy()] for each in self.agreements]
        codes = query.numpy().astype(np.int64)
        found = []
        for each in self.agreements:
            wanted = _combined(codes, self.sizes, each.same)
            place = np.searchsorted(each.known, wanted).clip(max=len(each.known) - 1)
            is_there = (each.known[place] == wanted) & (codes[:, list(each.same)] >= 0).all(1)
            found.append(np.where(is_there, place, -1))
        return found

    def _estimate(
        self, smoother: Smoother, query: Tensor, bandwidth: Tensor, groups: list[np.ndarray], own: Tensor | None, *,
        spread: bool, peak: bool, leverage: bool,
    ) -> Estimate:  # fmt: skip
        M, weight = smoother.target.shape[1], smoother.point_weights()
        values = torch.cat([torch.ones_like(weight), smoother.target, *[smoother.target.square()] * spread], 1) * weight
        apart = _log_weights_apart(smoother, smoother.coordinate_bandwidth(bandwidth))
        most = query.new_full((len(query),), -torch.inf)
        nearest = most
        for each, group in zip(self.agreements, groups):
            there = torch.from_numpy(self._others(each, group, own) > 0)
            most = torch.maximum(most, torch.where(there, _coefficient(apart.detach(), each.same), -torch.inf))
            nearest = torch.maximum(nearest, torch.where(there, _difference(apart.detach(), each.same), -torch.inf))
        reached = most > -torch.inf
        base = torch.where(reached, most, 0.0)
        total = self._sums(values, apart, base, groups, own)
        share = torch.where(reached[:, None], total[:, 1:] / torch.where(reached[:, None], total[:, :1], 1.0), 0.0)
        mean, squares = share.tensor_split([M], 1)
        averages = Averages(query, query.new_zeros(()), reached[:, None], mean, mean[:, :0])
        if spread:
            square = self._sums(smoother.squared_weights(), 2 * apart, 2 * base, groups, own)
            square = square / torch.where(reached[:, None], total[:, :1], 1.0).square()
            averages = replace(averages, squares=squares, repeated=square)
        if leverage:
            # The kernel is 1 at distance 0.
            alone = (-base).exp() / torch.where(reached, total[:, 0], 1.0)
            averages = replace(averages, own=torch.where(reached, alone, 0.0))
        return replace(smoother.finish(averages), peak=nearest if peak else None)

    def _sums(
        self, values: Tensor, apart: Tensor, base: Tensor, groups: list[np.ndarray], own: Tensor | None
    ) -> Tensor:
        """Return the sums of values (N, ·) over all points but the queries' own, divided by exp(base) (L, ·)."""
        found = values.new_zeros(len(base), values.shape[1])
        for each, group in zip(self.agreements, groups):
            columns = [np.bincount(each.group, column.numpy()) for column in values.T]
            terms = torch.from_numpy(np.stack([_looked_up(column, group) for column in columns], 1))
            if own is not None:
                alone = torch.from_numpy(np.bincount(each.group)[group] == 1)
                terms = torch.where(alone[:, None], 0.0, terms - values[own])
            # A set in which no point agrees may have a coefficient far above the others.
            there = torch.from_numpy(self._others(each, group, own) > 0)
            factor = torch.where(there, _coefficient(apart, each.same) - base, -torch.inf).exp()
            found = found + factor[:, None] * terms
        return found


def tabulates(smoother: Smoother) -> bool:
    """Return whether sums over a smoother's points can be looked up."""
    features, form = smoother.features, smoother.kernel.form
    is_product = form in PRODUCTS or len(features.kinds) == 1
    sizes = [len(each) + 1.0 for each in features.categories.values()]
    return (
        features.is_table and smoother.kernel.known and not smoother.kernel.flat and is_product
        and len(sizes) <= MOST and math.prod(sizes) < 2**62 and smoother.key.device.type == "cpu"
    )  # fmt: skip


def _combined(codes: np.ndarray, sizes: tuple[int, ...], same: tuple[bool, ...]) -> np.ndarray:
    """Return one number for the categories of rows (n, C) in some of the features (n,)."""
    found = np.zeros(len(codes), np.int64)
    for column, size, is_in in zip(codes.T, sizes, same):
        if is_in:
            found = found * size + column
    return found


def _looked_up(sums: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Return the sum of each group (L,), 0 for −1."""
    return np.where(group >= 0, sums[group], 0)


def _log_weights_apart(smoother: Smoother, width: Tensor) -> Tensor:
    """Return the logarithm of the kernel at a distance of one along each feature (C,), which is 0 at 0."""
    kernel = smoother.kernel.score(1.0)
    assert isinstance(kernel, Distance)
    return log_weight(kernel, width.reciprocal() ** (1 if smoother.kernel.form.manhattan else 2))


def _coefficient(apart: Tensor, same: tuple[bool, ...]) -> Tensor:
    """Return the logarithm of the factor of points that agree in a set of features."""
    # log(1 − λ); a kernel that is flat up to there has no such points to add.
    rest = -torch.expm1(apart)
    rest = torch.where(rest > 0, torch.where(rest > 0, rest, 1.0).log(), -torch.inf)
    return torch.where(torch.tensor(same), rest, apart).sum()


def _difference(apart: Tensor, same: tuple[bool, ...]) -> Tensor:
    """Return the logarithm of the kernel where exactly the other features differ."""
    return torch.where(torch.tensor(same), 0.0, apart).sum()
