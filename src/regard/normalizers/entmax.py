"""α-entmax, entmax-1.5 and sparsemax: weights that are zero below a threshold of each row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard._utils.constraints import Number
from regard._utils.errors import described, rejected, shape
from regard._utils.mechanism import mechanism
from regard._utils.operators import define
from regard._utils.tracing import in_transform, is_exported_to_onnx, values_unavailable
from regard.normalizers.base import Normalizer, Statistic, Sweep, register

# The threshold of α-entmax: where the weights of a row, ``[(α−1)(s − t)]₊^{1/(α−1)}``, sum to 1 -----------------------


#: Rows up to this length are sorted whole; longer rows first drop keys that cannot have weight.
FEW = 64
#: Size of the groups whose maxima give a lower bound for the threshold of a long row.
GROUP = 8
#: Relative margin of that bound, for rounding.
MARGIN = 2.0**-7
#: Maximum number of steps; bisection alone would converge in as many.
STEPS = 128
#: Number of steps under tracing, where convergence cannot be checked: the bits of float32, plus final Newton steps.
TRACED_STEPS = 32
#: Number of Newton steps that refine a float64 threshold.
POLISH = 2
#: Halvings of the interval that has the threshold: the bits of float64.
HALVINGS = 60
#: Below this logit α is 1 + 1.2e-4: softmax, but for rounding.
LEAST_LOGIT = -9.0


def threshold(scores: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Return the threshold of rows (..., S) as a sum of two numbers (..., 1), a shift and an offset.

    The shift is the rounded threshold, the offset its rounding error: ``(score − shift) − offset`` then has a small
    *relative* error even near 0, and so do small weights. Only the offset carries the derivative,
    ``∂t/∂s_i = slope_i / Σ slope``, where slope_i is the derivative of a weight with respect to its own score. Any
    order and both forward and backward mode work.
    """
    if not (in_transform() or (torch.is_grad_enabled() and scores.requires_grad)):
        return solve(scores, alpha)
    # Dynamo cannot trace a function with a forward-mode rule, and never needs one.
    function = Threshold if torch.compiler.is_compiling() else ThresholdBothWays
    found: tuple[Tensor, Tensor] = function.apply(scores, alpha)
    return found


def powers(scores: Tensor, shift: Tensor, offset: Tensor, alpha: float) -> Tensor:
    """Return the weights for a threshold; NaN stays NaN, and derivatives at weight 0 are 0 to every order."""
    base = scores - shift - offset
    base = torch.relu(base if alpha == 2 else base * (alpha - 1))
    if alpha == 2:
        return base
    if alpha == 1.5:
        return base.square()
    none = base <= 0
    return torch.where(none, 0.0, torch.where(none, 1.0, base) ** (1 / (alpha - 1)))


def slopes(weights: Tensor, alpha: float) -> Tensor:
    """Return the derivative of each weight with respect to its own score: ``weight^{2−α}``, 0 at weight 0."""
    if alpha == 2:
        return torch.where(weights > 0, 1.0, weights.detach())
    none = weights <= 0
    return torch.where(none, 0.0, torch.where(none, 1.0, weights) ** (2 - alpha))


class Threshold(torch.autograd.Function):
    """:func:`solve` with an implicit derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(scores: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
        return solve(scores, alpha)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        scores, ctx.alpha = inputs
        ctx.mark_non_differentiable(output[0])
        ctx.save_for_backward(scores, *output)
        ctx.save_for_forward(scores, *output)

    @staticmethod
    def backward(ctx: Any, _: Tensor, grad: Tensor) -> tuple[Tensor, None]:
        return grad * _derivative(ctx.saved_tensors, ctx.alpha), None


class ThresholdBothWays(Threshold):
    """:class:`Threshold` with a forward-mode derivative."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> tuple[None, Tensor]:
        derivative = _derivative(ctx.saved_tensors, ctx.alpha)
        return None, torch.where(derivative == 0, 0.0, derivative * tangent).sum(-1, keepdim=True)


def _derivative(saved: tuple[Tensor, Tensor, Tensor], alpha: float) -> Tensor:
    """Return the derivative of the threshold with respect to each score."""
    slope = slopes(powers(*saved, alpha), alpha)
    total = slope.sum(-1, keepdim=True)
    return slope / torch.where(total == 0, 1, total)


# The solver -----------------------------------------------------------------------------------------------------------


def solve(scores: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Return :func:`threshold`, without a derivative."""
    scores = scores.detach()
    if scores.is_meta or scores.numel() == 0:
        like = scores.new_zeros(*scores.shape[:-1], 1)
        return like, like - 1 / (alpha - 1)
    traced = values_unavailable(scores)
    if traced and alpha not in _BY_SORTING and not is_exported_to_onnx():
        shift, offset = torch.ops.regard.entmax_threshold(scores, alpha)
        return shift, offset
    least = torch.finfo(scores.dtype).min  # the peak of a fully masked row
    if alpha in _BY_SORTING and (traced or scores.shape[-1] <= FEW):
        ordered = _wide(scores.sort(-1, descending=True).values)
        peak = ordered[..., :1].clamp(min=least)
        t = _BY_SORTING[alpha](ordered - peak)
    elif traced:
        peak = _wide(scores.amax(-1, keepdim=True).clamp(min=least))
        t = _by_newton(_wide(scores) - peak, alpha, traced)
    else:
        peak = scores.amax(-1, keepdim=True).clamp(min=least)
        t = _root(scores.flatten(0, -2), peak.flatten(0, -2), alpha).view(peak.shape)
        peak = _wide(peak)
    shift = (peak + t).to(scores.dtype)
    offset = (peak - shift + t).to(scores.dtype)
    if alpha > 2 and scores.dtype == torch.float64 and not traced:
        offset = _polished(scores - shift, offset, alpha)
    return shift, offset


def _polished(rows: Tensor, offset: Tensor, alpha: float) -> Tensor:
    """Refine the offset by Newton steps on scores relative to the shift, which have full precision near the threshold.

    For α > 2 weights are infinitely steep at the threshold.
    """
    for _ in range(POLISH):
        total, slope = _sums(rows, offset, alpha)
        step = _step(total, slope, alpha)
        # Ignore steps larger than rounding errors: Newton's method can be far off where a weight reaches 0.
        offset = offset + torch.where(step.abs() <= 4 * torch.finfo(rows.dtype).eps, step, 0.0)
    return offset


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.device.type == "mps" else tensor.double()


def _root(rows: Tensor, peak: Tensor, alpha: float) -> Tensor:
    """Return the thresholds (N, 1) of rows (N, S) relative to ``peak``; control flow depends on values."""
    if rows.shape[-1] > FEW:
        # The threshold of a subset of a row is a lower bound for that of the row: keys below it have no weight.
        part = rows.shape[-1] // GROUP
        some = rows[:, : part * GROUP].unflatten(-1, (GROUP, part)).amax(1)
        bound = _root(some, peak, alpha) * (1 + MARGIN)
        rows = _compacted(rows, ~(rows - peak <= bound.to(rows.dtype)))
    rows = _wide(rows) - _wide(peak)
    if alpha in _BY_SORTING and rows.shape[-1] <= FEW:
        return _BY_SORTING[alpha](rows.sort(-1, descending=True).values)
    return _by_newton(rows, alpha)


def _compacted(rows: Tensor, keep: Tensor) -> Tensor:
    """Move the entries to keep of each row (N, S) to its start: (N, K), padded with −inf."""
    row, col = keep.nonzero(as_tuple=True)
    counts = torch.bincount(row, minlength=len(rows))
    widest = max(int(counts.max()), 1)
    if widest > rows.shape[-1] // 2:
        return rows
    place = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    found = rows.new_full((len(rows), widest), -torch.inf)
    found[row, place] = rows[row, col]
    return found


def _sorted_2(ordered: Tensor) -> Tensor:
    """Return the threshold of sparsemax: the largest threshold of the first k entries, over all k."""
    each = (ordered.cumsum(-1) - 1) / _counts(ordered)
    return each.amax(-1, keepdim=True).clamp(min=-1.0)


def _sorted_15(ordered: Tensor) -> Tensor:
    """Return the threshold of entmax-1.5: Σ (x − τ)² = 1 over the first k of x = s/2 is a quadratic equation in τ.

    A solution that does not exceed the k-th entry is the threshold of the first k, and thus a lower bound.
    """
    half, count = ordered / 2, _counts(ordered)
    total = half.cumsum(-1)
    mean = total / count
    left = 1 - half.square().cumsum(-1) + total * mean  # 1 − Σ (x − mean)²
    each = mean - (left.relu() / count).sqrt()
    t = 2 * torch.where(each <= half, each, -torch.inf).amax(-1, keepdim=True)
    return t.clamp(min=-2.0)


def _counts(ordered: Tensor) -> Tensor:
    return torch.arange(1, ordered.shape[-1] + 1, device=ordered.device, dtype=ordered.dtype)


_BY_SORTING = {2.0: _sorted_2, 1.5: _sorted_15}


def _by_newton(rows: Tensor, alpha: float, traced: bool = False) -> Tensor:
    """Find the threshold by Newton's method on the norm ``(Σ weights)^{α−1}``, within a bracket.

    For α ≤ 2 the norm is convex and decreasing in t, so the steps rise to the root without overshooting. For α > 2
    a step that leaves the bracket or does not halve it is replaced by bisection. When ``traced``, the number of steps
    is fixed.
    """
    peak = rows.amax(-1, keepdim=True)
    high = torch.where(peak == -torch.inf, 0.0, peak)
    t = low = high - 1 / (alpha - 1)
    fine = 4 * torch.finfo(rows.dtype).eps
    for _ in range(TRACED_STEPS if traced else STEPS):
        total, slope = _sums(rows, t, alpha)
        gap = high - low
        low, high = torch.where(total >= 1, t, low), torch.where(total < 1, t, high)
        new = t + _step(total, slope, alpha)
        trusted = (new >= low) & (new <= high)
        if alpha > 2:
            trusted &= 2 * (high - low) <= gap
        new = torch.where(trusted, new, (low + high) / 2)
        moved, t = (new - t).abs(), new
        if not traced and not (moved > fine * t.abs()).any():
            break
    return t


def _sums(rows: Tensor, t: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Return Σ weights and Σ slopes of each row, (N, 1)."""
    base = ((rows - t) * (alpha - 1)).relu_()
    if alpha == 2:
        return base.sum(-1, keepdim=True), (base > 0).sum(-1, keepdim=True).to(base.dtype)
    if alpha == 1.5:
        return base.square().sum(-1, keepdim=True), base.sum(-1, keepdim=True)
    weights = base ** (1 / (alpha - 1))
    return weights.sum(-1, keepdim=True), torch.where(base > 0, weights / base, 0.0).sum(-1, keepdim=True)


def _step(total: Tensor, slope: Tensor, alpha: float) -> Tensor:
    """Return the Newton step for ``total^{α−1} = 1``."""
    return (total - total ** (2 - alpha)) / ((alpha - 1) * slope)


# The solver as one operator, for tracing ------------------------------------------------------------------------------


def _shapes(scores: Tensor, alpha: float) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return scores.new_empty(*scores.shape[:-1], 1), scores.new_empty(*scores.shape[:-1], 1)


def _batch(info: Any, in_dims: Any, scores: Tensor, alpha: float) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:  # noqa: ARG001
    return torch.ops.regard.entmax_threshold(scores.movedim(in_dims[0], 0), alpha), (0, 0)


def _operator(scores: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    return solve(scores, alpha)


define("entmax_threshold", _operator, _shapes, batch=_batch)


# The normalizers ------------------------------------------------------------------------------------------------------


class _Threshold(Normalizer):
    """``weight = [(α−1)(s − t)]₊^{1/(α−1)}``, with a threshold t for each row that makes the weights sum to 1."""

    streams = True
    needs_whole_row = True
    alpha: float

    def weights(self, scores: Tensor) -> Tensor:
        return powers(scores, *threshold(scores, self.alpha), self.alpha)

    def statistic(self, sweep: Sweep, like: Tensor) -> Statistic:
        """Compute the threshold, as a shift and an offset, in one sweep."""
        tiles: list[Tensor] = []
        sweep(lambda scores, kv_idx: tiles.append(scores))  # noqa: ARG005
        scores = tiles[0] if len(tiles) == 1 else torch.cat(tiles, -1) if tiles else like[..., :0]
        return Statistic(*threshold(scores, self.alpha))

    def tile_weights(self, scores: Tensor, row: Statistic, kv_idx: Tensor) -> Tensor:  # noqa: ARG002
        return powers(scores, row.shift, row.offset, self.alpha)

    def tile_slope(self, weights: Tensor) -> Tensor:
        return slopes(weights, self.alpha)


@register("sparsemax")
@mechanism(
    formula="max(0, s_i − τ), which sum to 1",
    sources=("martins2016",),
    cost="O(L·S)",
)
class Sparsemax(_Threshold):
    """Sparsemax: the Euclidean projection of the scores onto the simplex (Martins & Astudillo 2016, arXiv 1602.02068).

    Examples
    --------
    >>> import torch
    >>> Sparsemax().weights(torch.tensor([[1.0, 0.5, -1.0]]))
    tensor([[0.7500, 0.2500, 0.0000]])
    """

    alpha = 2.0


@register("entmax15")
@mechanism(
    formula="max(0, s_i / 2 − τ)², which sum to 1",
    sources=("peters2019",),
    cost="O(L·S)",
)
class Entmax15(_Threshold):
    """Entmax with α = 1.5, between softmax and sparsemax (Peters et al. 2019, arXiv 1905.05702).

    Examples
    --------
    >>> import torch
    >>> Entmax15().weights(torch.tensor([[0.0, 0.0, -9.0]]))
    tensor([[0.5000, 0.5000, 0.0000]])
    """

    alpha = 1.5


@register("entmax")
@mechanism(
    formula="max(0, (α − 1) s_i − τ)^(1 / (α − 1)), which sum to 1",
    sources=("peters2019",),
    cost="O(L·S)",
)
class Entmax(_Threshold):
    """α-entmax for any α > 1: α → 1 is softmax, 2 sparsemax (Peters et al. 2019, arXiv 1905.05702).

    Parameters
    ----------
    alpha : float, default 1.5
        Sparsity; greater than 1.

    Examples
    --------
    >>> import torch
    >>> Entmax(1.2).weights(torch.tensor([[1.0, 1.0, 1.0, 1.0]]))
    tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """

    def __init__(self, alpha: float = 1.5) -> None:
        Number(gt=1, note=" (1 is softmax)")(self, "alpha", alpha)
        self.alpha = float(alpha)

    @classmethod
    def sample(cls, generator: torch.Generator) -> Entmax:
        alphas = (1.3, 1.05, 1.5, 1.8, 2.0, 3.0, 8.0)
        return cls(alphas[int(torch.randint(len(alphas), (), generator=generator))])


# A learned α, one for each head ---------------------------------------------------------------------------------------


@register("learned_entmax")
@mechanism(
    formula="max(0, (α − 1) s_i − τ)^(1 / (α − 1)), which sum to 1, α = 1 + σ(a)",
    sources=("correia2019",),
    learned="a, or one for each head",
    cost="O(L·S)",
)
class LearnedEntmax(Normalizer):
    """α-entmax with a learned α, ``α = 1 + σ(a)``: heads between softmax and sparsemax (Correia 2019, 1909.00015).

    The gradient in a is exact. α differs between heads and with training, so weights are computed from whole rows, in
    float64 and in memory that grows with L×S; for a fixed α use :class:`Entmax`, which streams.

    Parameters
    ----------
    logit : Tensor (), (1,) or (H,), optional
        a; it gets a gradient. The default is 0, α = 1.5. Below −9, where weights are softmax's, it counts as −9.

    Examples
    --------
    >>> import torch
    >>> LearnedEntmax(torch.tensor([-9.0, 9.0])).weights(torch.tensor([[[2.0, 0.0]], [[2.0, 0.0]]])).squeeze(1)
    tensor([[0.8808, 0.1192],
            [1.0000, 0.0000]])
    """

    def __init__(self, logit: Tensor | None = None) -> None:
        logit = torch.zeros(()) if logit is None else logit
        if not isinstance(logit, Tensor) or not logit.is_floating_point() or logit.dim() > 1:
            expected = "be a floating-point tensor of one number, or one for each head"
            raise rejected("LearnedEntmax", "logit", expected, described(logit))
        self.logit = logit

    def check(self, heads: int) -> None:
        if self.logit.numel() not in (1, heads):
            expected = f"have one number, or one for each of query's {heads} heads"
            raise rejected("LearnedEntmax", "logit", expected, shape(self.logit))

    def weights(self, scores: Tensor) -> Tensor:
        wide = torch.float32 if scores.device.type == "mps" else torch.float64
        rest = torch.sigmoid(self.logit.to(scores.device, wide).clamp(min=LEAST_LOGIT))  # α − 1
        rest = rest.view(-1, 1, 1) if rest.dim() else rest
        hidden = scores == -torch.inf
        given = torch.where(hidden, 0.0, scores.to(wide))
        t = _bisected(given.detach(), hidden, rest.detach())
        for _ in range(2):  # Newton steps from the root: they carry its first and second derivatives
            weights, slopes = _sides(given, hidden, t, rest)
            slope = slopes.sum(-1, keepdim=True)
            t = t + (weights.sum(-1, keepdim=True) - 1) / torch.where(slope == 0, 1.0, slope)
        return _sides(given, hidden, t, rest)[0].to(scores.dtype)

    @classmethod
    def sample(cls, generator: torch.Generator) -> LearnedEntmax:
        return cls(2 * torch.randn((), generator=generator))


def _bisected(scores: Tensor, hidden: Tensor, rest: Tensor) -> Tensor:
    """Return the thresholds (..., 1), by bisection: one for each row, where the largest weight is 1 to 1/S."""
    peak = torch.where(hidden, -torch.inf, scores).amax(-1, keepdim=True) if scores.shape[-1] else scores.sum(-1, True)
    peak = torch.where(peak == -torch.inf, 0.0, peak)
    low, high = peak - 1 / rest, peak - max(scores.shape[-1], 1) ** -rest / rest
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        above = _sides(scores, hidden, middle, rest)[0].sum(-1, keepdim=True) >= 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return low


def _sides(scores: Tensor, hidden: Tensor, t: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights for a threshold, and their slopes, ``weight^(2−α)``; both 0 where hidden."""
    base = rest * (scores - t)
    none = hidden | (base <= 0)
    base = torch.where(none, 1.0, base)
    weights, slopes = base ** (1 / rest), base ** ((1 - rest) / rest)
    return torch.where(none, 0.0, weights), torch.where(none, 0.0, slopes)
