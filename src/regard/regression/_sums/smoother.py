"""Kernel averages, their moments and local polynomials from one call of attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from regard import Aux, AuxRequest, attention, masks, scores
from regard._utils.errors import described, rejected, unknown_name
from regard.masks import LeaveOneOut, Mask
from regard.regression._features import Features
from regard.regression._sums.mixed import MixedScore
from regard.scores import Score
from regard.scores.kernels import Distance, Radial, kernels
from regard.scores.own_width import OwnWidth

# Kernels by name or from a function: their scores and the scale of their bandwidths -----------------------------------


#: A user-defined kernel: a function from scaled distances u ≥ 0 to weights K(u) ≥ 0 of the same shape.
Profile = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Kernel:
    """A kernel as a function of the distance in bandwidths.

    Attributes
    ----------
    score : callable
        Returns the score whose exponential is the kernel, given a bandwidth for each coordinate.
    form : type of Distance
        The class with the kernel's properties.
    flat : bool
        Whether the weight is the same at every distance.
    """

    score: Callable[[float | Tensor], Score]
    form: type[Distance]
    flat: bool = False

    def canonical_factor(self, features: int) -> float:
        """Return how many times as wide as a Gaussian of the same standard deviation along each coordinate it is.

        1 for a kernel without a standard deviation.
        """
        variance = self.form.variance(features)
        return variance**-0.5 if variance < math.inf else 1.0

    @property
    def known(self) -> bool:
        """True if the weight decreases with the distance and its logarithm has a formula."""
        return self.form is not Shaped

    @property
    def learnable(self) -> bool:
        """True if the weights have a gradient with respect to the bandwidth."""
        return self.form.smooth and not self.flat

    @property
    def distance_score(self) -> type[Distance]:
        """A strictly decreasing score of the kernel's distance."""
        return scores.Laplacian if self.form.manhattan else scores.Gaussian

    @property
    def radius(self) -> float:
        """The number of bandwidths beyond which the weight is 0, or less than 1 % by :attr:`distance_score`."""
        if self.form.compact:
            return 1.0
        return math.log(100) if self.form.manhattan else math.sqrt(2 * math.log(100))


class Shaped(Radial):
    """The logarithm of a user-defined function of the distance."""

    can_return_neg_inf = True

    def __init__(self, function: Profile, width: float | Tensor = 1.0) -> None:
        super().__init__(width)
        self.function = function

    @staticmethod
    def variance(features: int) -> float:  # noqa: ARG004
        """Return 1: the bandwidth of a function is not scaled."""
        return 1.0

    def log_weight(self, square: Tensor) -> Tensor:
        positive = square > 0  # the root has no gradient at 0
        distance = torch.where(positive, torch.where(positive, square, 1.0).sqrt(), 0.0)
        expected = "have weights that are differentiable in torch for bandwidth='learned' and slopes of order=0"
        try:
            weight = torch.as_tensor(self.function(distance), dtype=square.dtype, device=square.device)
        except RuntimeError as error:
            if "requires grad" not in str(error):
                raise
            raise rejected("NadarayaWatson", "kernel", expected, "a function of NumPy") from None
        if distance.requires_grad and not weight.requires_grad:
            raise rejected("NadarayaWatson", "kernel", expected, "a function whose weights have none")
        if weight.shape != square.shape:
            expected = f"return a weight for each distance, shape {tuple(square.shape)}"
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
    """Return the kernel with this name, or from this function."""
    if isinstance(kernel, str):
        if kernel not in names():
            raise unknown_name(function, "kernel", kernel, names())
        if kernel == "constant":
            return Kernel(lambda _: scores.Constant(), Shaped, flat=True)
        return Kernel(kernels()[kernel], kernels()[kernel])
    if not callable(kernel):
        raise rejected(function, "kernel", "be a name or a function of distances", described(kernel), TypeError)
    return Kernel(lambda width: Shaped(kernel, width), Shaped)


# Attention over selected pairs of queries and points ------------------------------------------------------------------


@dataclass(frozen=True)
class Pairs:
    """Pairs of queries and points to compare.

    Attributes
    ----------
    rows : Tensor (P,), int64
        Indices of queries in ascending order.
    points : Tensor (P,), int64
        Indices of points.
    count : int
        The number of queries.
    """

    rows: Tensor
    points: Tensor
    count: int

    def attend(
        self, scorer: Callable[[Tensor], Score], query: Tensor, key: Tensor, value: Tensor, width: Tensor, scale: float
    ) -> tuple[Tensor, Aux]:
        """Return the averages (L, ·) of values (P, ·) of pairs by softmax over each query's pairs, with lse and max.

        For several widths (W, C) of the score, results have a leading dimension W.
        """
        at, own = query[self.rows].tensor_split([key.shape[1]], 1)
        gap, here = (at - key[self.points])[:, None], torch.zeros_like(key[:1])
        gap = gap / own[:, None] if own.shape[1] else gap
        each = [scorer(one).compare(gap, here)[:, 0, 0] for one in width.reshape(-1, key.shape[1])]
        return self._read(torch.stack(each, 1) * scale, value, width.shape[:-1])

    def _read(self, score: Tensor, value: Tensor, lead: torch.Size) -> tuple[Tensor, Aux]:
        """Return the averages of values (P, ·) by softmax of scores (P, W)."""
        shape = (*lead, self.count)
        if not len(self.rows):  # torch cannot reduce empty segments only
            nothing = score.new_full(shape, -torch.inf)
            return score.new_zeros(*shape, value.shape[1]), Aux(lse=nothing, max=nothing)
        counts = self.rows.bincount(minlength=self.count)
        peak = torch.segment_reduce(score.detach(), "max", lengths=counts, axis=0)  # (L, W)
        weight = (score - peak.clamp(min=torch.finfo(score.dtype).min)[self.rows]).exp()
        total = torch.segment_reduce(weight, "sum", lengths=counts, axis=0)
        terms = (weight[..., None] * value[:, None]).flatten(1)  # (P, W ·)
        read = torch.segment_reduce(terms, "sum", lengths=counts, axis=0).unflatten(1, (-1, value.shape[1]))
        read = read / torch.where(total > 0, total, 1.0)[..., None]
        aux = Aux(lse=(peak + total.log()).T.reshape(shape), max=peak.T.reshape(shape))
        return read.transpose(0, 1).reshape(*shape, -1), aux


# Weighted averages of targets, and the moments for a local polynomial, from one call of attention ---------------------


#: The pairs that one call compares, and its fewest queries: about a second on two cores.
PAIRS, ROWS = 1 << 30, 4096
#: The least share of the points that a query counts as meeting: it takes some time to skip the others.
LEAST_SHARE = 1e-3
#: The most numbers held at once: materialized weights or moments of lines; and columns to average.
HELD, COLUMNS = 1 << 23, 1 << 24
#: The query axis of each field of an estimate; several bandwidths come before it.
_QUERIES = {
    "mean": -2, "reached": -1, "peak": -1, "variance": -2, "noise": -1, "freedom": -1, "leverage": -1, "slope": -3,
}  # fmt: skip
#: With features scaled to a spread of 1, directions with a spread below this have no slope.
FLAT = 1e-10
#: A feature whose direction is known to this share has a slope.
KNOWN = 1 - 1e-6
#: The moments of a parabola are those about a point within half so many bandwidths of the query along each coordinate:
#: their fourth powers, about the query, lose digits to cancellation.
TOGETHER = 32.0

Report = Callable[[int, str], None]
#: The points that a query sees; all by default.
Seen = Mask | Pairs | None


@dataclass(frozen=True)
class Estimate:
    """The estimate at L queries.

    Attributes
    ----------
    mean : Tensor (L, M)
    reached : Tensor (L,), bool
        Whether any point has a weight; otherwise the mean is 0.
    peak : Tensor (L,) or None
        Logarithm of the largest kernel weight of any point, if requested.
    variance : Tensor (L, M) or None
        The variance of the targets about the mean or the local polynomial; NaN if too few points have a weight.
    noise : Tensor (L,) or None
        With the variance, the sum of the squared effective weights: the variance of the estimate is their product.
    freedom : Tensor (L,) or None
        With the variance, its degrees of freedom, ``(1 − tr) / Σ α²``: for n points of equal weight n − 1, or n less
        the coefficients of a line or parabola.
    leverage : Tensor (L,) or None
        The effective weight of a point of weight 1 at the query itself, if requested.
    slope : Tensor (L, P, M) or None
        The slope along each of P sloped features, if requested; NaN where no point with a weight says what it is.
    """

    mean: Tensor
    reached: Tensor
    peak: Tensor | None = None
    variance: Tensor | None = None
    noise: Tensor | None = None
    freedom: Tensor | None = None
    leverage: Tensor | None = None
    slope: Tensor | None = None

    @classmethod
    def cat(cls, parts: list[Estimate]) -> Estimate:
        """Concatenate the estimates of consecutive queries."""
        if len(parts) == 1:
            return parts[0]
        present = [name for name in _QUERIES if getattr(parts[0], name) is not None]
        return cls(**{name: torch.cat([getattr(part, name) for part in parts], _QUERIES[name]) for name in present})

    @classmethod
    def stack(cls, parts: list[Estimate]) -> Estimate:
        """Return the estimates at the same queries for several bandwidths as one, with a leading dimension."""
        present = [name for name in _QUERIES if getattr(parts[0], name) is not None]
        return cls(**{name: torch.stack([getattr(part, name) for part in parts]) for name in present})

    def at(self, rows: Tensor) -> Estimate:
        """Return the estimate at these queries, in this order."""
        present = {name: value for name in _QUERIES if (value := getattr(self, name)) is not None}
        return Estimate(**{name: value.index_select(_QUERIES[name], rows) for name, value in present.items()})

    def replaced(self, rows: Tensor, other: Estimate) -> Estimate:
        """Return the estimate with some rows (r,) replaced by another one, differentiable."""
        pairs = {n: (getattr(self, n), getattr(other, n)) for n in _QUERIES if getattr(self, n) is not None}
        return Estimate(**{name: mine.index_put((rows,), theirs.to(mine)) for name, (mine, theirs) in pairs.items()})


@dataclass(frozen=True)
class Averages:
    """Kernel-weighted averages at L queries, from which an estimate is computed.

    Attributes
    ----------
    query : Tensor (L, C)
    origin : Tensor () or (Z,) or (L, Z)
        Subtracted from the coordinates z along which a line has slopes.
    reached : Tensor (L, 1), bool
    mean : Tensor (L, M)
        The averages of the targets y.
    moments : Tensor (L, ·)
        With a line, the averages of z, of the upper triangle of z zᵀ, and of z yᵀ; with a parabola, those of the
        regressors φ in place of z: z, and the upper triangle of z zᵀ.
    squares : Tensor (L, M) or None
        The averages of y², for a variance.
    repeated : Tensor (L, ·) or None
        With ``squares``, ``Σ α²``, and with a line ``Σ α² z`` and the upper triangle of ``Σ α² z zᵀ`` (φ in place of z
        with a parabola), for weights α that sum to 1.
    own : Tensor (L,) or None
        The weight α of a point of weight 1 at the query, for its leverage.
    """

    query: Tensor
    origin: Tensor
    reached: Tensor
    mean: Tensor
    moments: Tensor
    squares: Tensor | None = None
    repeated: Tensor | None = None
    own: Tensor | None = None


@dataclass(frozen=True)
class Smoother:
    """Training points with targets, and the kernel to average them.

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
        0 for the weighted average, 1 for the local line, 2 for the local parabola.
    engine : str or Engine
    repetition : float
        The weight of a point that counts once, where weights count repetitions; otherwise 0.
    neighbours : int
        If above 0, a bandwidth is that times the distance of a query to so many nearest points, in bandwidths. Queries
        then have this factor as another column (L, C + 1), from :meth:`Evaluator.with_own_widths`.
    """

    features: Features
    kernel: Kernel
    key: Tensor
    target: Tensor
    weight: Tensor | None
    order: int = 0
    engine: Any = "auto"
    repetition: float = 0.0
    neighbours: int = 0

    def estimate(
        self, query: Tensor, bandwidth: Tensor, mask: Seen = None, *,
        spread: bool = False, peak: bool = False, leverage: bool = False, slope: bool = False,
    ) -> Estimate:  # fmt: skip
        """Return the estimate at queries (L, C) for a bandwidth per feature in one call; differentiable.

        ``spread`` adds the variance with what goes with it, ``peak`` the peak, ``leverage`` the leverage, ``slope`` the
        slopes. For several bandwidths (W, n_features), results have a leading dimension W and neither variance nor
        slopes.
        """
        wanted = {"spread": spread, "peak": peak, "leverage": leverage}
        if bandwidth.dim() > 1 and not self.features.is_metric:  # codes cannot be scaled
            return Estimate.stack([self.estimate(query, one, mask, **wanted) for one in bandwidth])
        if slope and not self.order:
            return self._with_gradient(query, bandwidth, mask, **wanted)
        groups = [] if isinstance(mask, Pairs) else self._groups(query, bandwidth)
        if len(groups) < 2:
            origin = query[:, self._axes] if isinstance(mask, Pairs) else groups[0][1]
            return self._estimate(query, bandwidth, mask, origin, slope=slope, **wanted)
        parts = []
        for rows, origin in groups:
            seen = mask
            if isinstance(mask, LeaveOneOut):
                seen = masks.leave_one_out(rows if mask.own is None else mask.own[rows])
            parts.append(self._estimate(query[rows], bandwidth, seen, origin, slope=slope, **wanted))
        return Estimate.cat(parts).at(torch.cat([rows for rows, _ in groups]).argsort())

    def _estimate(
        self, query: Tensor, bandwidth: Tensor, mask: Seen, origin: Tensor, *,
        spread: bool, peak: bool, leverage: bool, slope: bool,
    ) -> Estimate:  # fmt: skip
        """Return the estimate, with moments about an origin () or (Z,), or of pairs about the queries (L, Z)."""
        request = AuxRequest(max=peak, lse=spread or leverage)
        read, aux = self._averages(query, bandwidth, mask, origin, request, spread)
        total = read[..., :1]
        reached = total > 0
        read = torch.where(reached, read[..., 1:] / torch.where(reached, total, 1.0), 0.0)
        M = self.target.shape[1]
        mean, squares, moments = read.tensor_split([M, M + M * spread], -1)
        averages = Averages(query, origin, reached, mean, moments)
        if spread:
            repeated = self._squared_weights(query, bandwidth, mask, origin, aux.lse, total)
            averages = replace(averages, squares=squares, repeated=repeated)
        if leverage:
            own = (self._log_at_zero(bandwidth) - aux.lse).exp() / torch.where(reached, total, 1.0)[..., 0]
            averages = replace(averages, own=torch.where(reached[..., 0], own, 0.0))
        return replace(self.finish(averages, slope=slope), peak=aux.max.detach() if peak else None)

    def _log_at_zero(self, bandwidth: Tensor) -> Tensor:
        """Return the logarithm of the kernel at distance 0, as a tensor without dimensions."""
        width = self.coordinate_bandwidth(bandwidth).reshape(-1, self.key.shape[1])[0]
        here = torch.zeros_like(self.key[:1])
        return self.kernel.score(width).compare(here, here)[0, 0]

    def _with_gradient(self, query: Tensor, bandwidth: Tensor, mask: Seen, **wanted: bool) -> Estimate:
        """Return the estimate with the slopes of the weighted average, its derivatives."""
        with torch.enable_grad():
            at = query.detach().requires_grad_()
            found = self.estimate(at, bandwidth, mask, **wanted)
            each = [torch.autograd.grad(column.sum(), at, retain_graph=True)[0] for column in found.mean.unbind(1)]
        slope = self.features.tangents(query) @ torch.stack(each, 2)[:, self.features.sloped_coordinates]
        found = Estimate(**{name: value.detach() for name in _QUERIES if (value := getattr(found, name)) is not None})
        return replace(found, slope=torch.where(found.reached[:, None, None], slope, torch.nan))

    def finish(self, averages: Averages, *, slope: bool = False) -> Estimate:
        """Compute the estimate from averages; with a variance if they include squares, with slopes on request."""
        mean, reached = averages.mean, averages.reached
        line = self.line(averages) if self.order else None
        variance = noise = points = None
        if averages.squares is not None:
            variance = averages.squares - mean.square() - (0.0 if line is None else line.explained())
            freedom, noise = self._freedom(averages, line), self._noise(averages, line)
            valid = reached[:, 0] & (freedom > torch.finfo(freedom.dtype).eps ** 0.5)
            freedom = torch.where(valid, freedom, torch.nan)
            variance = variance.clamp(min=0) / freedom[:, None]
            assert averages.repeated is not None
            points = freedom / averages.repeated[:, 0]
        leverage, slopes = averages.own, None
        if line is not None:
            mean = torch.where(reached, mean + line.rise(), 0.0)
            leverage = None if leverage is None else leverage * (1 + line.distance())
            slopes = line.slope(self.features.directions) if slope else None
        return Estimate(mean, reached[..., 0], None, variance, noise, points, leverage, slopes)

    def _groups(self, query: Tensor, bandwidth: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return rows of queries (L, C) with an origin for their moments; with a parabola, one that is near them."""
        if self.order < 2 or not len(query) or not self._axes:
            return [(torch.arange(len(query), device=query.device), query.new_zeros(()))]
        at, own = query.detach().tensor_split([self.key.shape[1]], 1)
        width = self.coordinate_bandwidth(bandwidth.detach()).reshape(-1, at.shape[1]).amin(0)[self._axes]
        times = 2 ** own.log2().floor() if own.shape[1] else torch.ones_like(at[:, :1])  # queries of similar widths
        cells = torch.cat([(at[:, self._axes] / (TOGETHER * width * times)).round(), times], 1)
        which, place = cells.unique(dim=0, return_inverse=True)
        origins = which[:, :-1] * (TOGETHER * width * which[:, -1:])
        return [(torch.nonzero(place == i)[:, 0], origin) for i, origin in enumerate(origins)]

    def to(self, dtype: torch.dtype) -> Smoother:
        """Return the smoother in another dtype."""
        if self.key.dtype == dtype:
            return self
        weight = None if self.weight is None else self.weight.to(dtype)
        return replace(self, key=self.key.to(dtype), target=self.target.to(dtype), weight=weight)

    def at(self, rows: Tensor) -> Smoother:
        """Return a smoother with a subset of the points."""
        weight = None if self.weight is None else self.weight[rows]
        return replace(self, key=self.key[rows], target=self.target[rows], weight=weight)

    @cached_property
    def deviations(self) -> Tensor:
        """The standard deviation of each target (M,); 1 where it is 0."""
        weight = self.point_weights()
        variance = (weight * self.target.square()).sum(0) / weight.sum()
        return torch.where(variance > 0, variance, 1.0).sqrt()

    def rows_at_once(self, share: float = 1.0) -> int:
        """Return the number of queries per call, by time and by memory, where each meets a share of the points."""
        P = self._regressor_count
        columns = 1 + 2 * self.target.shape[1] + P * (P + self.target.shape[1])
        pairs = max(share, LEAST_SHARE) * len(self.key)
        return max(1, min(max(ROWS, int(PAIRS / max(pairs, 1.0))), HELD // (columns + 4 * P * P)))

    def _averages(
        self, query: Tensor, bandwidth: Tensor, mask: Seen, origin: Tensor, wanted: AuxRequest, spread: bool
    ) -> tuple[Tensor, Any]:
        """Return averages (..., L, ·) of weights, targets, with ``spread`` their squares, and moments; and aux fields.

        Moments are averages of the regressors φ, then of φ φᵀ (the upper triangle) and φ yᵀ; each column is a product
        of two.
        """
        M = self.target.shape[1]
        target, phi = self._seen(self.target, mask), self._regressors(mask, origin)
        factors = torch.cat([torch.ones_like(target[:, :1]), target, phi], 1)
        y, c = torch.arange(1, 1 + M), torch.arange(1 + M, factors.shape[1])
        one, pairs = torch.zeros(1, dtype=torch.long), torch.triu_indices(len(c), len(c)) + 1 + M
        left = [one, one.expand(M), *([y] if spread else [])]
        right = [one, y, *([y] if spread else [])]
        if self.order:
            left += [one.expand(len(c)), pairs[0], c.repeat_interleave(M)]
            right += [c, pairs[1], y.repeat(len(c))]
        # Multiply the values by the weights instead of adding a bias log w: an equal result from simpler kernels.
        ones = self._seen(self.point_weights(), mask)
        size = max(16, COLUMNS // max(len(ones), 1))
        parts: list[tuple[Tensor, Any]] = []
        for a, b in zip(torch.cat(left).to(ones.device).split(size), torch.cat(right).to(ones.device).split(size)):
            value, request = ones * factors[:, a] * factors[:, b], AuxRequest() if parts else wanted
            parts.append(self._attend(query, value, bandwidth, attn_mask=mask, return_aux=request))
        return torch.cat([part for part, _ in parts], -1), parts[0][1]

    def _squared_weights(
        self, query: Tensor, bandwidth: Tensor, mask: Seen, origin: Tensor, lse: Tensor, total: Tensor
    ) -> Tensor:
        """Return Σ α², Σ α² φ and the upper triangle of Σ α² φ φᵀ (L, ·), for weights α that sum to 1."""
        ones, phi = self._seen(self.squared_weights(), mask), self._regressors(mask, origin)
        value = ones * torch.cat([torch.ones_like(ones), phi, products(phi)], 1)
        request = AuxRequest(lse=True)
        read, aux = self._attend(query, value, bandwidth, attn_mask=mask, return_aux=request, scale=2.0)
        share = (aux.lse - 2 * lse).exp() / total[:, 0].square().clamp(min=torch.finfo(total.dtype).tiny)
        return read * share[:, None]

    def _freedom(self, averages: Averages, line: _Line | None) -> Tensor:
        """Return the residual degrees of freedom as a share (L,).

        With weights α that sum to 1 and regressors x, ``1 − tr((Σ α x xᵀ)⁻¹ Σ α² x xᵀ)`` (Fan and Gijbels 1996,
        section 4.3); without a line, ``1 − Σ α²``.
        """
        squares, center, square = self._split(averages)
        taken = squares[:, 0]
        return 1 - (taken if line is None else taken + line.trace(squares, center, square))

    def _noise(self, averages: Averages, line: _Line | None) -> Tensor:
        """Return the sum of the squared effective weights (L,), ``Σ α²`` without a line."""
        squares, center, square = self._split(averages)
        return squares[:, 0] if line is None else line.noise(squares, center, square)

    def _split(self, averages: Averages) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``Σ α²`` (L, 1), ``Σ α² z`` (L, Z) and ``Σ α² z zᵀ`` (L, Z, Z)."""
        assert averages.repeated is not None
        T = self._regressor_count
        squares, center, triangle = averages.repeated.tensor_split([1, 1 + T], 1)
        return squares, center, symmetric(triangle, T)

    @property
    def _axes(self) -> list[int]:
        """Return the coordinates along which there are slopes; none for a weighted average."""
        return self.features.sloped_coordinates if self.order else []

    @property
    def _regressor_count(self) -> int:
        """Return the number T of regressors besides the constant: Z coordinates, and for a parabola their products."""
        Z = len(self._axes)
        return Z + Z * (Z + 1) // 2 * (self.order == 2)

    def _regressors(self, mask: Seen, origin: Tensor) -> Tensor:
        """Return the regressors φ of the points (N, T), about an origin; of pairs (P, T), about the queries (L, Z)."""
        z = self._seen(self.key, mask)[:, self._axes]
        return self._powers(z - (origin[mask.rows] if isinstance(mask, Pairs) else origin))

    def _powers(self, z: Tensor) -> Tensor:
        """Return the regressors φ (n, T) at coordinates (n, Z)."""
        return torch.cat([z, products(z)], 1) if self.order == 2 else z

    def _seen(self, rows: Tensor, mask: Seen) -> Tensor:
        """Return rows of the points (N, ·), or of those of pairs (P, ·)."""
        return rows[mask.points] if isinstance(mask, Pairs) else rows

    def concentration(self, query: Tensor, bandwidth: Tensor) -> Tensor:
        """Return Σ α² of the kernel weights at each query (L,), the inverse of the effective number of points."""
        ones = self.point_weights()
        found = []
        for rows in query.split(self.rows_at_once()):
            (sums, lse), (squares, lse_squares) = (
                self._attend(rows, value, bandwidth, return_aux=AuxRequest(lse=True), scale=scale)
                for value, scale in ((ones, None), (self.squared_weights(), 2.0))
            )
            share = (lse_squares.lse - 2 * lse.lse).exp()
            found.append(torch.where(sums[:, 0] > 0, share * squares[:, 0] / sums[:, 0].square(), 1.0))
        return torch.cat(found) if found else query.new_zeros(0)

    def top_k(self, query: Tensor, bandwidth: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest kernel weights of each query (L, k) and their points, padded with −1."""
        bias = None if self.weight is None else masks.dense(self.weight.log()[None])
        _, aux = self._attend(query, self.target[:, :0], bandwidth, attn_mask=bias, return_aux=AuxRequest(topk=k))
        return aux.topk.weights, aux.topk.indices

    def nearest(self, query: Tensor, bandwidth: Tensor, mask: Mask | None = None) -> Tensor:
        """Return the nearest point of each query (L,), with distances in bandwidths; −1 if there is none."""
        width = self.coordinate_bandwidth(bandwidth)
        low, high = self.key.amin(0), self.key.amax(0)
        # Scale so that no square overflows, however small the bandwidth.
        width = width * ((high - low) / width).amax().clamp(min=1e-300)
        return self._attend_by_distance(query, width, mask, AuxRequest(topk=1)).topk.indices[:, 0]

    def closeness(self, query: Tensor, bandwidth: Tensor, mask: Mask | None = None) -> Tensor:
        """Return minus half the squared distance to the nearest point (L,); for the Laplacian minus the distance.

        Distances are in bandwidths; −inf if there is no point.
        """
        return self._attend_by_distance(query, self.coordinate_bandwidth(bandwidth), mask, AuxRequest(max=True)).max

    def _attend_by_distance(self, query: Tensor, width: Tensor, mask: Mask | None, request: AuxRequest) -> Any:
        """Return auxiliary outputs for scores that decrease with the distance, for any kernel."""
        score = self.score(query, width, self.kernel.distance_score)
        return attention(
            query, self.key, self.target[:, :0], mask, score=score, engine=self.engine, return_aux=request
        )[1]  # fmt: skip

    def effective_weights(self, query: Tensor, bandwidth: Tensor) -> Iterator[Tensor]:
        """Yield effective weights (l, N) for consecutive blocks of queries.

        Their products with the targets are the estimate; with a local polynomial they may be negative.
        """
        for rows, weights in self._kernel_weights(query, bandwidth):
            leverage = torch.zeros_like(weights)
            for some, line, phi in self._local_lines(rows, bandwidth, weights) if self.order else ():
                leverage[some] = line.leverage(phi)
            yield weights * (1 + leverage)

    def shifted_targets(self, query: Tensor, bandwidth: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield kernel weights (l, N) and targets (M, l, N) shifted along the line, for consecutive blocks of queries.

        A target shifts by the difference of the local polynomial between the query and its point.
        """
        for rows, weights in self._kernel_weights(query, bandwidth):
            targets = self.target.T[:, None].repeat(1, len(rows), 1)
            for some, line, phi in self._local_lines(rows, bandwidth, weights):
                targets[:, some] -= line.difference(phi)
            yield weights, targets

    def _kernel_weights(self, query: Tensor, bandwidth: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield consecutive blocks of queries (l, C) with their kernel weights (l, N), which sum to 1 or are all 0."""
        for rows in query.split(max(1, HELD // max(len(self.key), 1))):
            _, aux = self._attend(rows, self.target[:, :0], bandwidth, return_aux=AuxRequest(weights=True))
            weights = aux.weights if self.weight is None else aux.weights * self.weight
            total = weights.sum(1, keepdim=True)
            yield rows, torch.where(total > 0, weights / torch.where(total > 0, total, 1.0), 0.0)

    def _local_lines(self, query: Tensor, bandwidth: Tensor, weights: Tensor) -> Iterator[tuple[Tensor, _Line, Tensor]]:
        """Yield rows of queries (L, C) with kernel weights (L, N), their local line, and the regressors (N, T)."""
        for some, origin in self._groups(query, bandwidth):
            phi = self._regressors(None, origin)
            cross = (phi.unsqueeze(2) * self.target.unsqueeze(1)).flatten(1)
            moments = weights[some] @ torch.cat([phi, products(phi), cross], 1)
            reached = torch.ones_like(moments[:, :1], dtype=torch.bool)
            yield some, self.line(Averages(query[some], origin, reached, weights[some] @ self.target, moments)), phi

    def distances(self, query: Tensor, bandwidth: Tensor) -> Tensor:
        """Return the distance of each point from queries, in bandwidths (L, N)."""
        width = self.coordinate_bandwidth(bandwidth)
        score = self.score(query, width, self.kernel.distance_score).compare(query, self.key)
        return -score if self.kernel.form.manhattan else (-2 * score).sqrt()

    def coordinate_bandwidth(self, bandwidth: Tensor) -> Tensor:
        """Return a bandwidth for each coordinate (..., C)."""
        return bandwidth[..., torch.from_numpy(self.features.owner).to(bandwidth.device)]

    def point_weights(self) -> Tensor:
        """Return how often each point counts (N, 1)."""
        return torch.ones_like(self.key[:, :1]) if self.weight is None else self.weight[:, None]

    def squared_weights(self) -> Tensor:
        """Return the sum of the squared weights of a point's repetitions (N, 1)."""
        weight = self.point_weights()
        return weight * self.repetition if self.repetition else weight.square()

    def _attend(self, query: Tensor, value: Tensor, bandwidth: Tensor, **options: Any) -> tuple[Tensor, Any]:
        """Return the averages of values and the auxiliary outputs."""
        width, key = self.coordinate_bandwidth(bandwidth), self.key
        if isinstance(pairs := options.get("attn_mask"), Pairs):
            return pairs.attend(self.kernel.score, query, key, value, width, options.get("scale", 1.0))
        score = self.score(query, width if width.dim() == 1 else 1.0)
        if width.dim() > 1:  # one call for all bandwidths, with scaled coordinates
            query, key, value = query / width[:, None], key / width[:, None], value.expand(len(width), -1, -1)
        return attention(query, key, value, score=score, engine=self.engine, **options)

    def score(self, query: Tensor, width: float | Tensor, kernel: Callable[[Any], Score] | None = None) -> Score:
        """Return the score of queries (L, C or C + 1) for a width of each coordinate (C,).

        That of the kernel, or of another one of the same distance.
        """
        kernel = kernel or self.kernel.score
        if not self.features.is_metric and isinstance(one := kernel(1.0), Distance):
            assert isinstance(width, Tensor)
            return MixedScore(one, width, self.features.code_coordinates, self.features.gaps)
        score = kernel(width)
        return score if query.shape[-1] == self.key.shape[1] else OwnWidth(score)

    def line(self, averages: Averages) -> _Line:
        """Return the local line or parabola from averages of φ, φ φᵀ, φ yᵀ and the targets."""
        query, mean = averages.query, averages.mean
        T, M = self._regressor_count, mean.shape[-1]
        center, triangle, cross = averages.moments.tensor_split([T, T + T * (T + 1) // 2], -1)
        squares = symmetric(triangle, T)
        covariance = squares - center.unsqueeze(-1) * center.unsqueeze(-2)
        with_target = cross.unflatten(-1, (T, M)) - center.unsqueeze(-1) * mean.unsqueeze(-2)
        away = query[:, self._axes] - averages.origin
        tangents = self.features.tangents(query[:, : self.key.shape[1]])
        terms = _about(tangents, away) if self.order == 2 else tangents
        # Spread below the cancellation error of the subtraction is noise.
        size = terms.abs().detach()
        noise = 16 * torch.finfo(query.dtype).eps * (size @ squares.abs().detach() @ size.mT).diagonal(dim1=-2, dim2=-1)
        covariance, with_target = terms @ covariance @ terms.mT, terms @ with_target
        inverse, known = _inverse(covariance, noise, tangents.shape[-2])
        return _Line(terms, self._powers(away), center, inverse, with_target, known)


def _about(tangents: Tensor, away: Tensor) -> Tensor:
    """Return what makes regressors of a parabola about an origin those about queries, but for constants (L, P, T).

    Given the directions of slopes (L or 1, p, Z) and the queries about that origin (L, Z). With s = t·(z − x) for each
    direction t, these are s, and the products of two s.
    """
    (p, Z), L = tangents.shape[1:], len(away)
    tangents = tangents.expand(L, -1, -1)
    (i, j), (a, b) = (torch.triu_indices(n, n, device=away.device) for n in (p, Z))
    one, other = tangents[:, i], tangents[:, j]
    square = one[..., a] * other[..., b] + torch.where(a == b, 0.0, 1.0).to(away) * one[..., b] * other[..., a]
    step = tangents @ away.unsqueeze(-1)  # (L, p, 1)
    linear = -step[:, j] * one - step[:, i] * other
    return torch.cat([torch.cat([tangents, tangents.new_zeros(L, p, len(a))], 2), torch.cat([linear, square], 2)], 1)


def _inverse(covariance: Tensor, noise: Tensor, slopes: int) -> tuple[Tensor, Callable[[], Tensor]]:
    """Return a pseudoinverse of covariances (..., P, P), and a function for which slopes are determined (..., p).

    Directions without spread get no slope. The first p terms are linear; what they leave of the others, the curvature,
    is fitted to the rest: where points say nothing about it, a parabola is the line, as a line is the mean.
    """
    linear, level = covariance[..., :slopes, :slopes], noise[..., :slopes]
    inverse = _pseudoinverse(linear, level)

    def known() -> Tensor:
        scaled, _, doubt = _scaled(linear, level)
        values, vectors = torch.linalg.eigh(scaled)
        kept = values > torch.maximum(doubt, FLAT * values.abs().amax(-1)).unsqueeze(-1)
        return (vectors.square() * kept.unsqueeze(-2)).sum(-1) > KNOWN

    if covariance.shape[-1] == slopes:
        return inverse, known
    mixed, square = covariance[..., :slopes, slopes:], covariance[..., slopes:, slopes:]
    along = inverse @ mixed
    floor = torch.maximum(noise[..., slopes:], FLAT * square.diagonal(dim1=-2, dim2=-1).detach())
    curved = _pseudoinverse(square - mixed.mT @ along, floor)
    corner = -along @ curved
    above = torch.cat([inverse - corner @ along.mT, corner], -1)
    return torch.cat([above, torch.cat([corner.mT, curved], -1)], -2), known


def _scaled(covariance: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return covariances scaled by the spread of the points, the scale (..., P), and the noise in them (...)."""
    spread = covariance.diagonal(dim1=-2, dim2=-1).detach()
    flat = spread <= noise
    unit = torch.where(flat, 0.0, torch.where(flat, 1.0, spread).rsqrt())
    doubt = (noise * unit.square()).amax(-1) if unit.shape[-1] else noise.new_zeros(noise.shape[:-1])
    return covariance * unit.unsqueeze(-1) * unit.unsqueeze(-2), unit, doubt


def _pseudoinverse(covariance: Tensor, noise: Tensor) -> Tensor:
    scaled, unit, doubt = _scaled(covariance, noise)
    inverse = torch.linalg.pinv(scaled, atol=doubt, rtol=torch.full_like(doubt, FLAT), hermitian=True)
    return inverse * unit.unsqueeze(-1) * unit.unsqueeze(-2)


def products(z: Tensor) -> Tensor:
    """Return the products of each two columns (n, Z), the upper triangle of z zᵀ."""
    first, second = torch.triu_indices(z.shape[1], z.shape[1], device=z.device)
    return z[:, first] * z[:, second]


def column_range(points: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least and largest value of each column (C,); torch reduces long narrow tensors slowly."""
    columns = [torch.aminmax(points[:, axis].contiguous()) for axis in range(points.shape[1])]
    return torch.stack([low for low, _ in columns]), torch.stack([high for _, high in columns])


def symmetric(triangle: Tensor, width: int) -> Tensor:
    """Return symmetric matrices (..., width, width) from flattened upper triangles."""
    first, second = torch.triu_indices(width, width, device=triangle.device)
    place = torch.empty(width, width, dtype=torch.long, device=triangle.device)
    place[first, second] = place[second, first] = torch.arange(len(first), device=triangle.device)
    return triangle[..., place.flatten()].unflatten(-1, (width, width))


@dataclass(frozen=True)
class _Line:
    """A least-squares line, or parabola, through the points around each query.

    ``terms`` (L or 1, P, T) make the P terms of the fit of the regressors φ, ``query`` (L, T) are these at the query,
    ``center`` (L, T) is their mean over the points, ``inverse`` (L, P, P) the inverse of the covariance of the terms,
    ``with_target`` (L, P, M) their covariance with the targets, and ``known`` a function for which slopes there are.
    """

    terms: Tensor
    query: Tensor
    center: Tensor
    inverse: Tensor
    with_target: Tensor
    known: Callable[[], Tensor]

    def _away(self) -> Tensor:
        """Return the distance of the query from the mean of the points (L, P, 1)."""
        return self.terms @ (self.query - self.center).unsqueeze(-1)

    def rise(self) -> Tensor:
        """Return the difference between the line at the query and the mean target (L, M)."""
        return (self._away().mT @ self.inverse @ self.with_target)[..., 0, :]

    def explained(self) -> Tensor:
        """Return the variance of the targets explained by the line (L, M)."""
        return (self.with_target * (self.inverse @ self.with_target)).sum(1)

    def trace(self, total: Tensor, center: Tensor, squares: Tensor) -> Tensor:
        """Return the trace of the line's part of ``(Σ α x xᵀ)⁻¹ Σ α² x xᵀ`` (L,).

        Given ``Σ α²`` (L, 1), ``Σ α² φ`` (L, T) and ``Σ α² φ φᵀ`` (L, T, T).
        """
        about = self._about(total, center, squares)
        return (self.inverse * (self.terms @ about @ self.terms.mT)).sum((1, 2))

    def noise(self, total: Tensor, center: Tensor, squares: Tensor) -> Tensor:
        """Return the sum of squared weights with the line, ``Σ α² (1 + d·(φ − c))²`` (L,); arguments as of trace."""
        d = self.terms.mT @ self.inverse @ self._away()
        first = (center - total * self.center).unsqueeze(1) @ d
        second = d.mT @ self._about(total, center, squares) @ d
        return total[:, 0] + (2 * first + second)[:, 0, 0]

    def _about(self, total: Tensor, center: Tensor, squares: Tensor) -> Tensor:
        """Return ``Σ α² (φ − c) (φ − c)ᵀ`` (L, T, T) for the mean c of the points."""
        outer = center.unsqueeze(2) * self.center.unsqueeze(1)
        return squares - outer - outer.mT + total.unsqueeze(2) * self.center.unsqueeze(2) * self.center.unsqueeze(1)

    def distance(self) -> Tensor:
        """Return the squared distance of the query from the mean of the points, by their covariance (..., L)."""
        away = self._away()
        return (away.mT @ self.inverse @ away)[..., 0, 0]

    def slope(self, count: int) -> Tensor:
        """Return the slopes at the query, the coefficients of the first terms (L, count, M); NaN where unknown."""
        return torch.where(self.known()[..., None], (self.inverse @ self.with_target)[:, :count], torch.nan)

    def difference(self, key: Tensor) -> Tensor:
        """Return the line at points with regressors (N, T) minus that at the query (M, L, N)."""
        slope = self.terms.mT @ self.inverse @ self.with_target  # (L, T, M)
        return slope.permute(2, 0, 1) @ key.T - torch.einsum("lt,ltm->ml", self.query, slope)[..., None]

    def leverage(self, key: Tensor) -> Tensor:
        """Return the relative change of each point's weight by the line, for regressors of points (N, T): (L, N)."""
        direction = (self._away().mT @ self.inverse @ self.terms)[:, 0]
        return direction @ key.T - (direction * self.center).sum(1, keepdim=True)
