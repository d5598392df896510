"""Weighted averages of targets, and the moments for a local line, by one call of attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard import AuxRequest, attention, masks, scores
from regard.masks import Mask
from regard.regression._features import Features
from regard.regression._kernels import Kernel

#: Pairs that one call compares, and queries that it has at least: about a second on two cores.
PAIRS, ROWS = 1 << 30, 4096
#: Numbers that are held at one time: weights where all are wanted, moments of a line, and columns that are averaged.
HELD, COLUMNS = 1 << 23, 1 << 24
#: Where every feature has a spread of 1, directions in which points spread less than this share have no slope.
FLAT = 1e-10

Report = Callable[[int, str], None]


@dataclass(frozen=True)
class Estimate:
    """What is known at L queries.

    Attributes
    ----------
    mean : Tensor (L, M)
    reached : Tensor (L,), bool
        Whether any point has a weight; where not, the mean is 0.
    variance : Tensor (L, M) or None
        That of the targets about the mean, or about the local line.
    """

    mean: Tensor
    reached: Tensor
    variance: Tensor | None = None


@dataclass(frozen=True)
class Smoother:
    """Points with targets, ready to be averaged.

    Attributes
    ----------
    features : Features
    kernel : Kernel
    key : Tensor (N, C)
        Coordinates.
    target : Tensor (N, M)
    weight : Tensor (N,) or None
        How often each point counts; positive.
    order : int
        0 for the weighted average, 1 for the local line.
    engine : str or Engine
    """

    features: Features
    kernel: Kernel
    key: Tensor
    target: Tensor
    weight: Tensor | None
    order: int = 0
    engine: Any = "auto"

    def at(self, query: Tensor, bandwidth: Tensor, mask: Mask | None = None, spread: bool = False) -> Estimate:
        """Return the estimate at queries (L, C) for a bandwidth per feature, differentiable; all of them at once."""
        read = self._averages(query, bandwidth, mask, spread)
        reached = read[:, :1] > 0
        read = torch.where(reached, read[:, 1:] / torch.where(reached, read[:, :1], 1.0), 0.0)
        M = self.target.shape[1]
        mean, squares, moments = read.tensor_split([M, M + M * spread], 1)
        variance = squares - mean.square() if spread else None
        if self.order:
            line = self._line(query, moments, mean)
            mean = torch.where(reached, mean + line.rise(), 0.0)
            variance = None if variance is None else variance - line.explained()
        return Estimate(mean, reached[:, 0], None if variance is None else variance.clamp(min=0))

    def in_chunks(self, query: Tensor, bandwidth: Tensor, report: Report, spread: bool = False) -> Estimate:
        """Return the estimate at any number of queries, telling of each chunk that is done."""
        parts = []
        for rows in query.split(self.rows_at_once):
            parts.append(self.at(rows, bandwidth, spread=spread))
            report(len(rows), "")
        if len(parts) == 1:
            return parts[0]
        variances = [part.variance for part in parts if part.variance is not None]
        mean, reached = (torch.cat([getattr(part, name) for part in parts]) for name in ("mean", "reached"))
        return Estimate(mean, reached, torch.cat(variances) if spread else None)

    @property
    def rows_at_once(self) -> int:
        """How many queries one call should have, by time and by memory."""
        P = len(self.features.sloped_coordinates) if self.order else 0
        columns = 1 + 2 * self.target.shape[1] + P * (P + self.target.shape[1])
        return max(1, min(max(ROWS, PAIRS // max(len(self.key), 1)), HELD // (columns + 4 * P * P)))

    def _averages(self, query: Tensor, bandwidth: Tensor, mask: Mask | None, spread: bool) -> Tensor:
        """Return averages (L, ·) of weights, targets, their squares if asked, and what a line needs.

        These are of products z zᵀ (the upper triangle) and z yᵀ, after those of z; each column is a product of two.
        """
        score = self.kernel.score(self.width(bandwidth))
        M, z = self.target.shape[1], self._sloped
        factors = torch.cat([torch.ones_like(self.target[:, :1]), self.target, z], 1)
        y, c = torch.arange(1, 1 + M), torch.arange(1 + M, factors.shape[1])
        one, pairs = torch.zeros(1, dtype=torch.long), torch.triu_indices(len(c), len(c)) + 1 + M
        left = [one, one.expand(M), *([y] if spread else [])]
        right = [one, y, *([y] if spread else [])]
        if self.order:
            left += [one.expand(len(c)), pairs[0], c.repeat_interleave(M)]
            right += [c, pairs[1], y.repeat(len(c))]
        # Weights stand with the values, not as a bias of their logarithms, which is the same and keeps kernels plain.
        ones = self.ones()
        size = max(16, COLUMNS // max(len(self.key), 1))
        return torch.cat([
            attention(query, self.key, ones * factors[:, a] * factors[:, b], mask, score=score, engine=self.engine)
            for a, b in zip(torch.cat(left).to(ones.device).split(size), torch.cat(right).to(ones.device).split(size))
        ], 1)  # fmt: skip

    @property
    def _sloped(self) -> Tensor:
        """Return the coordinates (N, Z) that a line has slopes along; none without a line."""
        return self.key[:, self.features.sloped_coordinates if self.order else []]

    def concentration(self, query: Tensor, bandwidth: Tensor) -> Tensor:
        """Return Σ α², one over the effective number of points, of the kernel's weights α at each query (L,)."""
        ones = self.ones()
        found = []
        for rows in query.split(self.rows_at_once):
            (sums, lse), (squares, lse_squares) = (
                self._observed(rows, value, bandwidth, return_aux=AuxRequest(lse=True), scale=scale)
                for value, scale in ((ones, None), (ones.square(), 2.0))
            )
            share = (lse_squares.lse - 2 * lse.lse).exp()
            found.append(torch.where(sums[:, 0] > 0, share * squares[:, 0] / sums[:, 0].square(), 1.0))
        return torch.cat(found) if found else query.new_zeros(0)

    def strongest(self, query: Tensor, bandwidth: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest kernel weights of each query (L, k) and their points, −1 where there are fewer."""
        bias = None if self.weight is None else masks.dense(self.weight.log()[None])
        _, aux = self._observed(query, self.target[:, :0], bandwidth, attn_mask=bias, return_aux=AuxRequest(topk=k))
        return aux.topk.weights, aux.topk.indices

    def nearest(self, query: Tensor, bandwidth: Tensor, mask: Mask | None = None) -> Tensor:
        """Return the nearest point of each query (L,), distances measured in bandwidths; −1 where there is none."""
        width = self.width(bandwidth)
        low, high = self.key.amin(0), self.key.amax(0)
        # In a unit in which no square overflows, however small the bandwidth is.
        width = width * ((high - low) / width).amax().clamp(min=1e-300)
        score = scores.Laplacian(width) if self.kernel.manhattan else scores.Gaussian(width)
        _, aux = attention(
            query, self.key, self.target[:, :0], mask, score=score, engine=self.engine, return_aux=AuxRequest(topk=1)
        )
        assert aux.topk is not None
        return aux.topk.indices[:, 0]

    def rows_of_weights(self, query: Tensor, bandwidth: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, for some queries after the other, kernel weights and effective weights (l, N) each.

        Effective weights times targets are the estimate: with a local line they may be negative.
        """
        for rows in query.split(max(1, HELD // max(len(self.key), 1))):
            _, aux = self._observed(rows, self.target[:, :0], bandwidth, return_aux=AuxRequest(weights=True))
            weights = aux.weights if self.weight is None else aux.weights * self.weight
            total = weights.sum(1, keepdim=True)
            weights = torch.where(total > 0, weights / torch.where(total > 0, total, 1.0), 0.0)
            effective = weights
            if self.order:
                z = self._sloped
                first, second = torch.triu_indices(z.shape[1], z.shape[1], device=z.device)
                cross = (z.unsqueeze(2) * self.target.unsqueeze(1)).flatten(1)
                moments = weights @ torch.cat([z, z[:, first] * z[:, second], cross], 1)
                effective = weights * (1 + self._line(rows, moments, weights @ self.target).lever(z))
            yield weights, effective

    def width(self, bandwidth: Tensor) -> Tensor:
        """Return a bandwidth for each coordinate."""
        return bandwidth[torch.from_numpy(self.features.owner).to(bandwidth.device)]

    def ones(self) -> Tensor:
        """Return how often each point counts (N, 1)."""
        return torch.ones_like(self.key[:, :1]) if self.weight is None else self.weight[:, None]

    def _observed(self, query: Tensor, value: Tensor, bandwidth: Tensor, **options: Any) -> tuple[Tensor, Any]:
        """Return what is read and what else was asked."""
        score = self.kernel.score(self.width(bandwidth))
        return attention(query, self.key, value, score=score, engine=self.engine, **options)

    def _line(self, query: Tensor, moments: Tensor, mean: Tensor) -> _Line:
        """Return the local line, from averages of z, z zᵀ and z yᵀ (L, ·) and of the targets (L, M)."""
        columns = self.features.sloped_coordinates
        Z, M = len(columns), mean.shape[1]
        first, second = torch.triu_indices(Z, Z, device=query.device)
        center, triangle, cross = moments.tensor_split([Z, Z + len(first)], 1)
        place = torch.empty(Z, Z, dtype=torch.long, device=query.device)
        place[first, second] = place[second, first] = torch.arange(len(first), device=query.device)
        squares = triangle[:, place.flatten()].unflatten(1, (Z, Z))
        covariance = squares - center.unsqueeze(2) * center.unsqueeze(1)
        with_target = cross.unflatten(1, (Z, M)) - center.unsqueeze(2) * mean.unsqueeze(1)
        terms = self.features.tangents(query)
        squares, covariance, with_target = (
            terms @ squares @ terms.mT,
            terms @ covariance @ terms.mT,
            terms @ with_target,
        )
        # In units of the points' own spread. What a square loses when another is subtracted is noise, no spread.
        noise = 16 * torch.finfo(query.dtype).eps * squares.diagonal(dim1=1, dim2=2).detach()
        spread = covariance.diagonal(dim1=1, dim2=2).detach()
        flat = spread <= noise
        unit = torch.where(flat, 0.0, torch.where(flat, 1.0, spread).rsqrt())
        doubt = (noise * unit.square()).amax(1) if unit.shape[1] else noise.new_zeros(len(noise))
        scaled = covariance * unit.unsqueeze(2) * unit.unsqueeze(1)
        inverse = torch.linalg.pinv(scaled, atol=doubt, rtol=torch.full_like(doubt, FLAT), hermitian=True)
        inverse = inverse * unit.unsqueeze(2) * unit.unsqueeze(1)
        return _Line(terms, query[:, columns], center, inverse, with_target)


@dataclass(frozen=True)
class _Line:
    """A least-squares line through the points around each query.

    ``terms`` (L or 1, P, Z) are the directions of its P slopes, ``query`` and ``center`` (L, Z) where it is asked for
    and the points' average, ``inverse`` (L, P, P) that of their covariance, ``with_target`` (L, P, M) their covariance
    with the targets.
    """

    terms: Tensor
    query: Tensor
    center: Tensor
    inverse: Tensor
    with_target: Tensor

    def _away(self) -> Tensor:
        """Return how far the query lies from the points' average (L, P, 1)."""
        return self.terms @ (self.query - self.center).unsqueeze(2)

    def rise(self) -> Tensor:
        """Return what the line adds to the points' average target (L, M)."""
        return (self._away().mT @ self.inverse @ self.with_target)[:, 0]

    def explained(self) -> Tensor:
        """Return the variance of the targets along the line (L, M)."""
        return (self.with_target * (self.inverse @ self.with_target)).sum(1)

    def lever(self, key: Tensor) -> Tensor:
        """Return by what share the line changes the weight of each point (N, Z): (L, N)."""
        direction = (self._away().mT @ self.inverse @ self.terms)[:, 0]
        return direction @ key.T - (direction * self.center).sum(1, keepdim=True)
