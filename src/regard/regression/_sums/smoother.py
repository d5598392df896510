"""Kernel averages, their moments and local lines, by one call of attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard import Aux, AuxRequest, attention, masks, scores
from regard._utils.errors import described, rejected, unknown_name
from regard.masks import Mask
from regard.regression._features import Features
from regard.scores import Score
from regard.scores.kernels import Distance, Radial, kernels

# Kernels by name or from a function: their scores, and the scale of their bandwidths ----------------------------------


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
        """Return how many times as wide as a Gaussian of the same standard deviation along each coordinate it is.

        1 for a kernel without a standard deviation.
        """
        variance = self.form.variance(features)
        return variance**-0.5 if variance < math.inf else 1.0

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


# Attention between pairs of queries and points, in place of all pairs -------------------------------------------------


@dataclass(frozen=True)
class Pairs:
    """Pairs of queries and points that are compared, instead of all.

    Attributes
    ----------
    rows : Tensor (P,), int64
        Queries, which ascend.
    points : Tensor (P,), int64
    count : int
        Of queries.
    """

    rows: Tensor
    points: Tensor
    count: int

    def attend(
        self, scorer: Callable[[Tensor], Score], query: Tensor, key: Tensor, value: Tensor, width: Tensor, scale: float
    ) -> tuple[Tensor, Aux]:
        """Return what queries (L, C) read of values (N, ·) by softmax of their pairs' scores, (L, ·), with lse and max.

        For several widths (W, C) of the score, it begins with W.
        """
        gap, here = (query[self.rows] - key[self.points])[:, None], torch.zeros_like(key[:1])
        each = [scorer(one).compare(gap, here)[:, 0, 0] for one in width.reshape(-1, key.shape[1])]
        return self._read(torch.stack(each, 1) * scale, value, width.shape[:-1])

    def _read(self, score: Tensor, value: Tensor, lead: torch.Size) -> tuple[Tensor, Aux]:
        """Return what is read by softmax of scores (P, W)."""
        shape = (*lead, self.count)
        if not len(self.rows):  # torch reduces no empty segments where there are no others
            nothing = score.new_full(shape, -torch.inf)
            return score.new_zeros(*shape, value.shape[1]), Aux(lse=nothing, max=nothing)
        counts = self.rows.bincount(minlength=self.count)
        peak = torch.segment_reduce(score.detach(), "max", lengths=counts, axis=0)  # (L, W)
        weight = (score - peak.clamp(min=torch.finfo(score.dtype).min)[self.rows]).exp()
        total = torch.segment_reduce(weight, "sum", lengths=counts, axis=0)
        terms = (weight[..., None] * value[self.points][:, None]).flatten(1)  # (P, W ·)
        read = torch.segment_reduce(terms, "sum", lengths=counts, axis=0).unflatten(1, (-1, value.shape[1]))
        read = read / torch.where(total > 0, total, 1.0)[..., None]
        aux = Aux(lse=(peak + total.log()).T.reshape(shape), max=peak.T.reshape(shape))
        return read.transpose(0, 1).reshape(*shape, -1), aux


# Weighted averages of targets, and the moments for a local line, by one call of attention -----------------------------


#: Pairs that one call compares, and queries that it has at least: about a second on two cores.
PAIRS, ROWS = 1 << 30, 4096
#: Numbers that are held at one time: weights where all are wanted, moments of a line, and columns that are averaged.
HELD, COLUMNS = 1 << 23, 1 << 24
#: The axis of an estimate's fields that queries lie along; several bandwidths come before it.
_QUERIES = {"mean": -2, "reached": -1, "peak": -1, "variance": -2}
#: Where every feature has a spread of 1, directions in which points spread less than this share have no slope.
FLAT = 1e-10

Report = Callable[[int, str], None]
#: Which points a query sees; all by default.
Seen = Mask | Pairs | None


@dataclass(frozen=True)
class Estimate:
    """The estimate at L queries.

    Attributes
    ----------
    mean : Tensor (L, M)
    reached : Tensor (L,), bool
        Whether any point has a weight; where not, the mean is 0.
    peak : Tensor (L,) or None
        Logarithm of the largest kernel weight of any point; None where it is not asked for.
    variance : Tensor (L, M) or None
        That of the targets about the mean, or about the local line; NaN where too few points have a weight to tell.
    """

    mean: Tensor
    reached: Tensor
    peak: Tensor | None = None
    variance: Tensor | None = None

    @classmethod
    def cat(cls, parts: list[Estimate]) -> Estimate:
        """Return the estimates at some queries after the other as one."""
        if len(parts) == 1:
            return parts[0]
        told = [name for name in _QUERIES if getattr(parts[0], name) is not None]
        return cls(**{name: torch.cat([getattr(part, name) for part in parts], _QUERIES[name]) for name in told})

    def at(self, rows: Tensor) -> Estimate:
        """Return the estimate at some of the queries, or at all of them in another order."""
        told = {name: value for name in _QUERIES if (value := getattr(self, name)) is not None}
        return Estimate(**{name: value.index_select(_QUERIES[name], rows) for name, value in told.items()})

    def replaced(self, rows: Tensor, other: Estimate) -> Estimate:
        """Return the estimate with that at some rows (r,) from another, differentiable."""
        pairs = {n: (getattr(self, n), getattr(other, n)) for n in _QUERIES if getattr(self, n) is not None}
        return Estimate(**{name: mine.index_put((rows,), theirs.to(mine)) for name, (mine, theirs) in pairs.items()})


@dataclass(frozen=True)
class Averages:
    """Averages at L queries, weighed by the kernel, of which an estimate is made.

    Attributes
    ----------
    query : Tensor (L, C)
    origin : Tensor () or (L, Z)
        What is taken from the coordinates z that a line has slopes along.
    reached : Tensor (L, 1), bool
    mean : Tensor (L, M)
        Of the targets y.
    moments : Tensor (L, ·)
        With a line, of z, of the upper triangle of z zᵀ, and of z yᵀ.
    squares : Tensor (L, M) or None
        Of y², for a variance.
    repeated : Tensor (L, ·) or None
        With ``squares``, ``Σ α²``, and with a line ``Σ α² z`` and the upper triangle of ``Σ α² z zᵀ``, of weights α
        that sum to 1.
    """

    query: Tensor
    origin: Tensor
    reached: Tensor
    mean: Tensor
    moments: Tensor
    squares: Tensor | None = None
    repeated: Tensor | None = None


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

    def estimate(
        self, query: Tensor, bandwidth: Tensor, mask: Seen = None, *, spread: bool = False, peak: bool = False
    ) -> Estimate:
        """Return the estimate at queries (L, C) for a bandwidth per feature, differentiable; all of them at once.

        The variance comes with ``spread``, the peak where it is asked for. For several bandwidths (W, n_features), of
        which no variance is told, all that is returned begins with W.
        """
        read, aux = self._averages(query, bandwidth, mask, AuxRequest(max=peak, lse=spread))
        total = read[..., :1]
        reached = total > 0
        read = torch.where(reached, read[..., 1:] / torch.where(reached, total, 1.0), 0.0)
        M = self.target.shape[1]
        mean, squares, moments = read.tensor_split([M, M + M * spread], -1)
        averages = Averages(query, query.new_zeros(()), reached, mean, moments)
        if spread:
            repeated = self._squared_weights(query, bandwidth, mask, aux.lse, total)
            averages = replace(averages, squares=squares, repeated=repeated)
        return replace(self.finish(averages), peak=aux.max.detach() if peak else None)

    def finish(self, averages: Averages) -> Estimate:
        """Return the estimate that averages at queries make: without a peak, with a variance if they have squares."""
        mean, reached = averages.mean, averages.reached
        line = self.line(averages) if self.order else None
        variance = None
        if averages.squares is not None:
            variance = averages.squares - mean.square() - (0.0 if line is None else line.explained())
            freedom = self._freedom(averages, line)
            known = reached[:, 0] & (freedom > torch.finfo(freedom.dtype).eps ** 0.5)
            variance = variance.clamp(min=0) / torch.where(known, freedom, torch.nan)[:, None]
        if line is not None:
            mean = torch.where(reached, mean + line.rise(), 0.0)
        return Estimate(mean, reached[..., 0], None, variance)

    def to(self, dtype: torch.dtype) -> Smoother:
        """Return the smoother in another dtype."""
        if self.key.dtype == dtype:
            return self
        weight = None if self.weight is None else self.weight.to(dtype)
        return replace(self, key=self.key.to(dtype), target=self.target.to(dtype), weight=weight)

    @property
    def rows_at_once(self) -> int:
        """Number of queries that one call should have, by time and by memory."""
        P = len(self.features.sloped_coordinates) if self.order else 0
        columns = 1 + 2 * self.target.shape[1] + P * (P + self.target.shape[1])
        return max(1, min(max(ROWS, PAIRS // max(len(self.key), 1)), HELD // (columns + 4 * P * P)))

    def _averages(self, query: Tensor, bandwidth: Tensor, mask: Seen, asked: AuxRequest) -> tuple[Tensor, Any]:
        """Return averages (..., L, ·) of weights, targets, their squares (with an lse), line moments; and aux fields.

        These are of products z zᵀ (the upper triangle) and z yᵀ, after those of z; each column is a product of two.
        """
        M, z, spread = self.target.shape[1], self._sloped, asked.lse
        factors = torch.cat([torch.ones_like(self.target[:, :1]), self.target, z], 1)
        y, c = torch.arange(1, 1 + M), torch.arange(1 + M, factors.shape[1])
        one, pairs = torch.zeros(1, dtype=torch.long), torch.triu_indices(len(c), len(c)) + 1 + M
        left = [one, one.expand(M), *([y] if spread else [])]
        right = [one, y, *([y] if spread else [])]
        if self.order:
            left += [one.expand(len(c)), pairs[0], c.repeat_interleave(M)]
            right += [c, pairs[1], y.repeat(len(c))]
        # Weights stand with the values, not as a bias of their logarithms, which is the same and keeps kernels plain.
        ones = self.point_weights()
        size = max(16, COLUMNS // max(len(self.key), 1))
        parts: list[tuple[Tensor, Any]] = []
        for a, b in zip(torch.cat(left).to(ones.device).split(size), torch.cat(right).to(ones.device).split(size)):
            value, request = ones * factors[:, a] * factors[:, b], AuxRequest() if parts else asked
            parts.append(self._attend(query, value, bandwidth, attn_mask=mask, return_aux=request))
        return torch.cat([part for part, _ in parts], -1), parts[0][1]

    def _squared_weights(self, query: Tensor, bandwidth: Tensor, mask: Seen, lse: Tensor, total: Tensor) -> Tensor:
        """Return Σ α², Σ α² z and the upper triangle of Σ α² z zᵀ, of weights α that sum to 1 (L, ·)."""
        z = self._sloped
        first, second = torch.triu_indices(z.shape[1], z.shape[1], device=z.device)
        value = self.point_weights().square() * torch.cat(
            [torch.ones_like(self.key[:, :1]), z, z[:, first] * z[:, second]], 1
        )
        request = AuxRequest(lse=True)
        read, aux = self._attend(query, value, bandwidth, attn_mask=mask, return_aux=request, scale=2.0)
        share = (aux.lse - 2 * lse).exp() / total[:, 0].square().clamp(min=torch.finfo(total.dtype).tiny)
        return read * share[:, None]

    def _freedom(self, averages: Averages, line: _Line | None) -> Tensor:
        """Return which share of the squares about the mean or line is left to the residuals on average (L,).

        With weights α that sum to 1 and regressors x, ``1 − tr((Σ α x xᵀ)⁻¹ Σ α² x xᵀ)`` (Fan and Gijbels 1996,
        section 4.3); without a line, ``1 − Σ α²``.
        """
        assert averages.repeated is not None
        Z = len(self.features.sloped_coordinates) if self.order else 0
        squares, center, triangle = averages.repeated.tensor_split([1, 1 + Z], 1)
        taken = squares[:, 0]
        return 1 - (taken if line is None else taken + line.trace(squares, center, symmetric(triangle, Z)))

    @property
    def _sloped(self) -> Tensor:
        """Return the coordinates (N, Z) that a line has slopes along; none without a line."""
        return self.key[:, self.features.sloped_coordinates if self.order else []]

    def concentration(self, query: Tensor, bandwidth: Tensor) -> Tensor:
        """Return Σ α², one over the effective number of points, of the kernel's weights α at each query (L,)."""
        ones = self.point_weights()
        found = []
        for rows in query.split(self.rows_at_once):
            (sums, lse), (squares, lse_squares) = (
                self._attend(rows, value, bandwidth, return_aux=AuxRequest(lse=True), scale=scale)
                for value, scale in ((ones, None), (ones.square(), 2.0))
            )
            share = (lse_squares.lse - 2 * lse.lse).exp()
            found.append(torch.where(sums[:, 0] > 0, share * squares[:, 0] / sums[:, 0].square(), 1.0))
        return torch.cat(found) if found else query.new_zeros(0)

    def top_k(self, query: Tensor, bandwidth: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest kernel weights of each query (L, k) and their points, −1 where there are fewer."""
        bias = None if self.weight is None else masks.dense(self.weight.log()[None])
        _, aux = self._attend(query, self.target[:, :0], bandwidth, attn_mask=bias, return_aux=AuxRequest(topk=k))
        return aux.topk.weights, aux.topk.indices

    def nearest(self, query: Tensor, bandwidth: Tensor, mask: Mask | None = None) -> Tensor:
        """Return the nearest point of each query (L,), distances measured in bandwidths; −1 where there is none."""
        width = self.coordinate_bandwidth(bandwidth)
        low, high = self.key.amin(0), self.key.amax(0)
        # In a unit in which no square overflows, however small the bandwidth is.
        width = width * ((high - low) / width).amax().clamp(min=1e-300)
        return self._attend_by_distance(query, width, mask, AuxRequest(topk=1)).topk.indices[:, 0]

    def closeness(self, query: Tensor, bandwidth: Tensor, mask: Mask | None = None) -> Tensor:
        """Return minus half the squared distance of the nearest point (L,), or for the Laplacian minus its distance.

        Distances are measured in bandwidths; −inf where there is no point.
        """
        return self._attend_by_distance(query, self.coordinate_bandwidth(bandwidth), mask, AuxRequest(max=True)).max

    def _attend_by_distance(self, query: Tensor, width: Tensor, mask: Mask | None, request: AuxRequest) -> Any:
        """Return what is asked of scores that fall with the distance, whatever the kernel."""
        score = self.kernel.distance_score(width)
        return attention(
            query, self.key, self.target[:, :0], mask, score=score, engine=self.engine, return_aux=request
        )[1]  # fmt: skip

    def effective_weights(self, query: Tensor, bandwidth: Tensor) -> Iterator[Tensor]:
        """Yield, for some queries after the other, effective weights (l, N).

        Their products with the targets are the estimate: with a local line they may be negative.
        """
        for rows, weights in self._kernel_weights(query, bandwidth):
            yield weights * (1 + self._local_line_of(rows, weights).leverage(self._sloped)) if self.order else weights

    def shifted_targets(self, query: Tensor, bandwidth: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, for some queries after the other, kernel weights (l, N) and targets (M, l, N) moved along the line.

        A target moves by the slope around the query times the distance from its point to the query.
        """
        z, columns = self._sloped, self.features.sloped_coordinates
        for rows, weights in self._kernel_weights(query, bandwidth):
            slope = self._local_line_of(rows, weights).slope()  # (l, Z, M)
            shift = slope.permute(2, 0, 1) @ z.T - torch.einsum("lz,lzm->ml", rows[:, columns], slope)[..., None]
            yield weights, self.target.T[:, None] - shift

    def _kernel_weights(self, query: Tensor, bandwidth: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield some queries (l, C) after the other with their kernel weights (l, N), which sum to 1 or are all 0."""
        for rows in query.split(max(1, HELD // max(len(self.key), 1))):
            _, aux = self._attend(rows, self.target[:, :0], bandwidth, return_aux=AuxRequest(weights=True))
            weights = aux.weights if self.weight is None else aux.weights * self.weight
            total = weights.sum(1, keepdim=True)
            yield rows, torch.where(total > 0, weights / torch.where(total > 0, total, 1.0), 0.0)

    def _local_line_of(self, query: Tensor, weights: Tensor) -> _Line:
        """Return the local line at queries (L, C) for kernel weights (L, N)."""
        z = self._sloped
        first, second = torch.triu_indices(z.shape[1], z.shape[1], device=z.device)
        cross = (z.unsqueeze(2) * self.target.unsqueeze(1)).flatten(1)
        moments = weights @ torch.cat([z, z[:, first] * z[:, second], cross], 1)
        reached = torch.ones_like(weights[:, :1], dtype=torch.bool)
        return self.line(Averages(query, query.new_zeros(()), reached, weights @ self.target, moments))

    def coordinate_bandwidth(self, bandwidth: Tensor) -> Tensor:
        """Return a bandwidth for each coordinate (..., C)."""
        return bandwidth[..., torch.from_numpy(self.features.owner).to(bandwidth.device)]

    def point_weights(self) -> Tensor:
        """Return how often each point counts (N, 1)."""
        return torch.ones_like(self.key[:, :1]) if self.weight is None else self.weight[:, None]

    def _attend(self, query: Tensor, value: Tensor, bandwidth: Tensor, **options: Any) -> tuple[Tensor, Any]:
        """Return what is read and what else was asked."""
        width, key = self.coordinate_bandwidth(bandwidth), self.key
        if isinstance(pairs := options.get("attn_mask"), Pairs):
            return pairs.attend(self.kernel.score, query, key, value, width, options.get("scale", 1.0))
        score = self.kernel.score(width if width.dim() == 1 else 1.0)
        if width.dim() > 1:  # one call for all of them, in units of each
            query, key, value = query / width[:, None], key / width[:, None], value.expand(len(width), -1, -1)
        return attention(query, key, value, score=score, engine=self.engine, **options)

    def line(self, averages: Averages) -> _Line:
        """Return the local line, from averages of z, z zᵀ and z yᵀ and of the targets."""
        columns = self.features.sloped_coordinates
        query, mean = averages.query, averages.mean
        Z, M = len(columns), mean.shape[-1]
        center, triangle, cross = averages.moments.tensor_split([Z, Z + Z * (Z + 1) // 2], -1)
        squares = symmetric(triangle, Z)
        covariance = squares - center.unsqueeze(-1) * center.unsqueeze(-2)
        with_target = cross.unflatten(-1, (Z, M)) - center.unsqueeze(-1) * mean.unsqueeze(-2)
        terms = self.features.tangents(query)
        squares, covariance, with_target = (
            terms @ squares @ terms.mT,
            terms @ covariance @ terms.mT,
            terms @ with_target,
        )
        # In units of the points' own spread. What a square loses when another is subtracted is noise, no spread.
        noise = 16 * torch.finfo(query.dtype).eps * squares.diagonal(dim1=-2, dim2=-1).detach()
        spread = covariance.diagonal(dim1=-2, dim2=-1).detach()
        flat = spread <= noise
        unit = torch.where(flat, 0.0, torch.where(flat, 1.0, spread).rsqrt())
        doubt = (noise * unit.square()).amax(-1) if unit.shape[-1] else noise.new_zeros(noise.shape[:-1])
        scaled = covariance * unit.unsqueeze(-1) * unit.unsqueeze(-2)
        inverse = torch.linalg.pinv(scaled, atol=doubt, rtol=torch.full_like(doubt, FLAT), hermitian=True)
        inverse = inverse * unit.unsqueeze(-1) * unit.unsqueeze(-2)
        return _Line(terms, query[:, columns] - averages.origin, center, inverse, with_target)


def symmetric(triangle: Tensor, width: int) -> Tensor:
    """Return symmetric matrices (..., width, width) of which ``triangle`` has the upper triangles in a row each."""
    first, second = torch.triu_indices(width, width, device=triangle.device)
    place = torch.empty(width, width, dtype=torch.long, device=triangle.device)
    place[first, second] = place[second, first] = torch.arange(len(first), device=triangle.device)
    return triangle[..., place.flatten()].unflatten(-1, (width, width))


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
        return self.terms @ (self.query - self.center).unsqueeze(-1)

    def rise(self) -> Tensor:
        """Return what the line adds to the points' average target (L, M)."""
        return (self._away().mT @ self.inverse @ self.with_target)[..., 0, :]

    def explained(self) -> Tensor:
        """Return the variance of the targets along the line (L, M)."""
        return (self.with_target * (self.inverse @ self.with_target)).sum(1)

    def trace(self, total: Tensor, center: Tensor, squares: Tensor) -> Tensor:
        """Return the trace of the line's part of ``(Σ α x xᵀ)⁻¹ Σ α² x xᵀ`` (L,).

        Given ``Σ α²`` (L, 1), ``Σ α² z`` (L, Z) and ``Σ α² z zᵀ`` (L, Z, Z).
        """
        outer = center.unsqueeze(2) * self.center.unsqueeze(1)
        about = squares - outer - outer.mT + total.unsqueeze(2) * self.center.unsqueeze(2) * self.center.unsqueeze(1)
        return (self.inverse * (self.terms @ about @ self.terms.mT)).sum((1, 2))

    def slope(self) -> Tensor:
        """Return the slope of each target along each coordinate (L, Z, M)."""
        return self.terms.mT @ self.inverse @ self.with_target

    def leverage(self, key: Tensor) -> Tensor:
        """Return by what share the line changes the weight of each point (N, Z): (L, N)."""
        direction = (self._away().mT @ self.inverse @ self.terms)[:, 0]
        return direction @ key.T - (direction * self.center).sum(1, keepdim=True)
