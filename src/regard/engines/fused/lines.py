"""Order 1 for dot products and the Gaussian: kernels that fit a line at each query."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from regard import scores
from regard._utils.tracing import in_dispatch_mode, is_traced
from regard.engines import dense, nonfinite
from regard.engines.base import EngineOutput, Runner
from regard.engines.fused import library
from regard.engines.fused.arguments import PAD
from regard.engines.fused.pool import shared
from regard.engines.fused.visible_keys import compact, strides
from regard.engines.local_linear import LEAST_RIDGE
from regard.engines.problem import Problem
from regard.masks import Dense

#: How many tensors the forward pass keeps: slopes, centers, means, factors and states, block by block.
_KEPT = 5
#: Scores whose rows, as they are compared, lie where a line is fitted.
_SCORES = (scores.Dot, scores.ScaledDot, scores.General, scores.Cosine, scores.Gaussian)


def refusal(problem: Problem) -> str | None:
    """Return why the kernels cannot fit the lines of a problem, or None."""
    order, score, mask = problem.order, problem.score, problem.mask
    assert order is not None
    if order.solver != "exact":
        return "lines by the exact solver only (engines 'streaming' and 'reference' take steps)"
    if type(score) not in _SCORES:
        return f"lines with dot products and the Gaussian only, not with {type(score).__name__}"
    if problem.softcap is not None:
        return "no softcap with lines"
    if 0 in (problem.query.shape[-1], problem.key.shape[-1]):
        return "lines need a feature"
    if is_traced(problem.query) or in_dispatch_mode():
        return "no lines in traced calls (engines 'streaming' and 'reference' have them)"
    if mask is None:
        return None
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in mask.tensors()):
        return "no gradient to a bias with lines"
    if not isinstance(mask, Dense) and (mask.has_bias or problem.intervals is None):
        return "lines under intervals of keys or one matrix only"
    return None


def prepare(problem: Problem) -> Runner:
    """Return a runner."""
    differentiated = problem.wants_grad and problem.mask is not None

    def run(problem: Problem) -> EngineOutput:
        # A backward pass multiplies hidden values by 0, which leaks NaN.
        if differentiated and dense.needs_care(problem):
            return nonfinite.contained(problem, _attend)
        return nonfinite.recomputed(problem, _attend)

    return run


def _attend(problem: Problem) -> EngineOutput:
    dtype, order, mask = problem.compute_dtype, problem.order, problem.mask
    assert order is not None
    query, key, value = (t.to(dtype) for t in (problem.query, problem.key, problem.value))
    score = problem.score.cast(dtype)
    used = None
    if mask is not None:  # keys that no query sees must not move the origin
        (B, H), (_, G, S) = query.shape[:2], key.shape[:3]
        used = mask.visible_keys(problem.extent).expand(B, H, S).reshape(B, G, -1, S).any(2).unsqueeze(-1)
        key = torch.where(used, key, 0.0)
    places = score.positions(query, key)
    assert places is not None
    place, key = places
    # A unit of length near that of the data, and the mean of all keys as the origin; neither changes the result.
    unit = _unit(key.detach(), place.detach())
    place, key = place / unit, key / unit
    gaussian, scale, width = isinstance(score, scores.Gaussian), problem.scale * unit, None
    if isinstance(score, scores.Gaussian):
        scale *= unit
        if not (isinstance(score.width, Tensor) and score.width.dim()):
            # Distances are divided by the width, not places, whose differences would lose digits. Lines are the same in
            # every unit of length, so the width gets its gradient from scores alone.
            width = score.width if isinstance(score.width, Tensor) else None
            scale /= float(score.width if width is None else width.detach()) ** 2
    start = stop = bias = None
    if isinstance(mask, Dense):
        bias = mask.values[(None,) * (4 - mask.values.dim())].detach()
        bias = torch.where(bias, 0.0, -torch.inf).to(dtype) if bias.dtype == torch.bool else bias.to(dtype)
        bias = compact(bias, 4).resolve_neg().contiguous()
    elif problem.intervals is not None:
        start, stop = (t.contiguous() for t in torch.broadcast_tensors(*problem.intervals))
    ridge = max(order.ridge / max(key.shape[-1], 1), LEAST_RIDGE * torch.finfo(dtype).eps)
    compared = width if gaussian else score.project(query, problem.key.to(dtype))[0]
    fit = _Fit(scale, ridge, gaussian, _center(key.detach(), used), start, stop, bias)
    output: Tensor = FusedLines.apply(fit, compared, place, key, value)
    return EngineOutput(output.to(problem.query.dtype))


def _center(key: Tensor, used: Tensor | None) -> Tensor:
    """Return the mean (B, G, 1, C) of the keys that any query sees."""
    if used is None:
        return key.mean(-2, keepdim=True)
    return (key * used).sum(-2, keepdim=True) / used.sum(-2, keepdim=True).clamp(min=1)


def _unit(*rows: Tensor) -> float:
    """Return a power of 2 that is as large as the largest number, 1 if that is not finite or 0."""
    largest = max((float(t.abs().amax()) for t in rows if t.numel()), default=0.0)
    return 2.0 ** math.frexp(largest)[1] if 0 < largest < math.inf else 1.0


@lru_cache(256)
def _sizes(C: int, V: int, S: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Return the queries of a block, the numbers of its factors, and the numbers of scratch memory."""
    sizes = torch.empty(3, dtype=torch.int64, device="cpu")
    library.load("lines.sizes", dtype)(C, V, S, sizes.data_ptr())
    block, factors, room = sizes.tolist()
    return block, factors, room


@dataclass(eq=False, repr=False)
class _Fit:
    """The constant arguments of a call.

    Attributes
    ----------
    scale : float
        Factor of the scores of rows in units of length.
    ridge : float
        λ / D.
    gaussian : bool
        Whether scores are −½ times squared distances of places; else they are dot products of queries and keys.
    origin : Tensor (B, G, 1, C)
        The mean of the keys that any query sees.
    start, stop : Tensor (B or 1, H or 1, L or 1), int64, or None
    bias : Tensor (B or 1, H or 1, L or 1, S or 1), or None
        −inf where masked.
    """

    scale: float
    ridge: float
    gaussian: bool
    origin: Tensor
    start: Tensor | None
    stop: Tensor | None
    bias: Tensor | None

    def numbers(
        self,
        query: Tensor | None,
        place: Tensor,
        key: Tensor,
        centred: Tensor,
        value: Tensor,
        output: Tensor | None,
        kept: Sequence[Tensor],
    ) -> Tensor:
        """Return the numbers of the kernels: see ``RECORDS``; ``kept`` is empty or all of that."""
        (B, H, L, C), (_, G, S, V) = place.shape, value.shape
        arrays = [query, place, key, centred, self.origin, value, self.bias, self.start, self.stop, output]
        pointers = [0 if t is None else t.data_ptr() for t in arrays]
        pointers += [t.data_ptr() for t in kept] or [0] * _KEPT
        intervals = [0, 0, 0] if self.start is None else strides(self.start.shape)
        biases = [0, 0, 0, 0] if self.bias is None else strides(self.bias.shape)
        return torch.tensor([*pointers, B, H, G, L, S, C, V, int(self.gaussian), *intervals, *biases], device="cpu")


class FusedLines(torch.autograd.Function):
    """Lines at query (B, H, L, C), or with the Gaussian at places alone, through key (B, G, S, C), value (B, G, S, V).

    ``place`` (B, H, L, C) is where the line is read. With the Gaussian ``query`` is the width (), by which distances
    are divided, or None if that is no tensor or one for each feature, in whose units places and keys are.
    """

    @staticmethod
    def forward(ctx: Any, fit: _Fit, query: Tensor | None, place: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query = None if query is None else query.contiguous()
        place, key, value = (t.contiguous() for t in (place, key, value))
        (B, H, L, C), (_, _, S, V) = place.shape, value.shape
        block, factors, room = _sizes(C, V, S, place.dtype)
        items = B * H * -(-L // block)
        new = place.new_empty
        sizes = ((C, block), (C, block), (C, block), (factors,), (4, block))
        kept = [new(items, *size) for size in sizes] if any(ctx.needs_input_grad) else []
        output = new(B, H, L, V)
        centred = key - fit.origin
        numbers = fit.numbers(query, place, key, centred, value, output, kept)
        function = library.load("lines.forward", place.dtype)

        def run(first: int, last: int) -> None:
            memory = new(room)
            function(numbers.data_ptr(), fit.scale, fit.ridge, first, last, memory.data_ptr())

        shared(run, items)
        ctx.fit = fit
        ctx.save_for_backward(query, place, key, value, *kept)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, place, key, value, *kept = ctx.saved_tensors
        fit: _Fit = ctx.fit
        (B, H, L, C), (_, G, S, V) = place.shape, value.shape
        block, _, room = _sizes(C, V, S, place.dtype)
        grad = grad.resolve_neg().contiguous()
        shares = min(-(-torch.get_num_threads() // (B * G)), H // G * -(-L // block))
        wide_C, wide_V = (-(-width // PAD) * PAD for width in (C, V))
        d_query = place.new_empty((B, H, L, 1 if fit.gaussian else C))
        d_place = torch.empty_like(place)
        d_key, d_value = (key.new_zeros(shares, B, G, S, width) for width in (wide_C, wide_V))
        centred = key - fit.origin
        numbers = fit.numbers(query, place, key, centred, value, None, kept)
        function = library.load("lines.backward", place.dtype)

        def run(first: int, last: int) -> None:
            memory = place.new_empty(room)
            arrays = [t.data_ptr() for t in (grad, d_query, d_place, d_key, d_value, memory)]
            function(numbers.data_ptr(), fit.scale, fit.ridge, first, last, shares, *arrays)

        shared(run, B * G * shares)
        given = d_query if not fit.gaussian else None if query is None else d_query.sum() / query
        return None, given, d_place, d_key.sum(0)[..., :C], d_value.sum(0)[..., :V]
