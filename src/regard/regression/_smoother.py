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
#: Weights that are held at one time where all are wanted.
HELD = 1 << 23
#: Directions in which the points in reach spread less than this, of the largest spread, have no slope.
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
        """Return the estimate at queries (L, C) for a bandwidth per feature, in one differentiable call."""
        # Weights stand with the values, not as a bias of their logarithms, which is the same and keeps kernels plain.
        ones = self.ones()
        columns = [self.target, *([self.target.square()] if spread else []), *(self._products() if self.order else [])]
        value = torch.cat([ones, *(ones * column for column in columns)], 1)
        score = self.kernel.score(self.width(bandwidth))
        read = attention(query, self.key, value, mask, score=score, engine=self.engine)
        total = read[:, :1]
        reached = total > 0
        read = torch.where(reached, read[:, 1:] / torch.where(reached, total, 1.0), 0.0)
        mean, read = read.tensor_split([self.target.shape[1]], 1)
        variance = None
        if spread:
            squares, read = read.tensor_split([self.target.shape[1]], 1)
            variance = squares - mean.square()
        if self.order:
            line = self._line(query, bandwidth, read, mean)
            mean = torch.where(reached, mean + line.rise(), 0.0)
            variance = None if variance is None else variance - line.explained()
        return Estimate(mean, reached[:, 0], None if variance is None else variance.clamp(min=0))

    def in_chunks(self, query: Tensor, bandwidth: Tensor, report: Report, spread: bool = False) -> Estimate:
        """Return the estimate at any number of queries, telling of each chunk that is done."""
        parts = []
        for rows in query.split(max(ROWS, PAIRS // max(len(self.key), 1))):
            parts.append(self.at(rows, bandwidth, spread=spread))
            report(len(rows), "")
        if len(parts) == 1:
            return parts[0]
        variances = [part.variance for part in parts if part.variance is not None]
        mean, reached = (torch.cat([getattr(part, name) for part in parts]) for name in ("mean", "reached"))
        return Estimate(mean, reached, torch.cat(variances) if spread else None)

    def concentration(self, query: Tensor, bandwidth: Tensor) -> Tensor:
        """Return Σ α², one over the effective number of points, of the kernel's weights α at each query (L,)."""
        ones = self.ones()
        found = []
        for rows in query.split(max(ROWS, PAIRS // max(len(self.key), 1))):
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
                moments = weights @ torch.cat(self._products(), 1)
                line = self._line(rows, bandwidth, moments, weights @ self.target)
                effective = weights * (1 + line.lever(self.key))
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

    def _products(self) -> list[Tensor]:
        """Return what a line needs averaged: z, z zᵀ (the upper triangle) and z yᵀ."""
        z = self.key
        first, second = torch.triu_indices(z.shape[1], z.shape[1], device=z.device)
        cross = z.unsqueeze(2) * self.target.unsqueeze(1)
        return [z, z[:, first] * z[:, second], cross.flatten(1)]

    def _line(self, query: Tensor, bandwidth: Tensor, moments: Tensor, mean: Tensor) -> _Line:
        """Return the local line, from averages (L, ·) of :meth:`_products` and of the targets (L, M)."""
        C, M = self.key.shape[1], mean.shape[1]
        first, second = torch.triu_indices(C, C, device=query.device)
        center, triangle, cross = moments.tensor_split([C, C + len(first)], 1)
        place = torch.empty(C, C, dtype=torch.long, device=query.device)
        place[first, second] = place[second, first] = torch.arange(len(first), device=query.device)
        squares = triangle[:, place.flatten()].unflatten(1, (C, C))
        covariance = squares - center.unsqueeze(2) * center.unsqueeze(1)
        with_target = cross.unflatten(1, (C, M)) - center.unsqueeze(2) * mean.unsqueeze(1)
        # In bandwidths, so that the directions can be compared.
        terms = self.features.tangents(query) / bandwidth[self.features.sloped].unsqueeze(1)
        covariance, with_target = terms @ covariance @ terms.mT, terms @ with_target
        # What squares lose when they are subtracted; less is nothing.
        largest = (self.key.abs().amax(0) / self.width(bandwidth)).square().amax()
        noise = (16 * torch.finfo(query.dtype).eps * largest).detach()
        inverse = torch.linalg.pinv(covariance, atol=noise, rtol=torch.full_like(noise, FLAT), hermitian=True)
        return _Line(terms, center, inverse, with_target, query)


@dataclass(frozen=True)
class _Line:
    """A least-squares line through the points around each query.

    ``terms`` (L or 1, P, C) are the directions of its P slopes, ``center`` (L, C) the points' average, ``inverse``
    (L, P, P) of their covariance, ``with_target`` (L, P, M) their covariance with the targets.
    """

    terms: Tensor
    center: Tensor
    inverse: Tensor
    with_target: Tensor
    query: Tensor

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
        """Return by what share the line changes each point's weight (L, N)."""
        direction = (self._away().mT @ self.inverse @ self.terms)[:, 0]
        return direction @ key.T - (direction * self.center).sum(1, keepdim=True)
