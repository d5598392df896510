"""Attention by definition, with the whole score matrix, for engines and fields that materialize it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard._utils.tracing import is_traced
from regard.engines import lines
from regard.engines.base import EngineOutput
from regard.engines.problem import Problem
from regard.engines.tiles import Grid, Tiles, weighed
from regard.masks import Dense
from regard.scores import Dot, ScaledDot

#: Drops weights (B, H, l, S) of queries from a first one on, of a number in all.
Drop = Callable[[Tensor, int, int], Tensor]

#: Maximum number of elements of torch's dot product.
MOST = 1 << 30
#: At least a norm over its value in bfloat16.
_ROUNDED = 1 + 2**-8


def needs_care(problem: Problem) -> bool:
    """Whether non-finite values, including products, could leak through a masked pair; True if unknown."""
    if problem.mask is None:
        return False
    if is_traced(problem.query):
        return True
    return not all(math.isfinite(square_sum(t)) for t in (problem.query, problem.key, problem.value))


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor has no NaN or infinity; may be False for huge finite values, whose sum overflows."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    total = tensor.sum(dtype=torch.float32) if tensor.itemsize < 4 else tensor.sum()
    return math.isfinite(total.item())


def square_sum(tensor: Tensor) -> float:
    """Return the sum of squares of a tensor: not finite if an element is not or if it overflows.

    It takes one pass for any strides, and bounds products of two rows by the Cauchy–Schwarz inequality. For bfloat16 it
    is up to 2 % too large.
    """
    tensor, copies = tensor.detach(), 1
    if not tensor.is_contiguous():
        for dim in range(tensor.dim()):
            if tensor.stride(dim) == 0:
                copies *= tensor.shape[dim]
                tensor = tensor.narrow(dim, 0, min(tensor.shape[dim], 1))
        if _is_dense(tensor):
            tensor = tensor.as_strided((tensor.numel(),), (1,))
    flat = tensor.reshape(-1)
    if flat.dtype == torch.bfloat16:  # summed in float32 without a copy, and then rounded to 8 bits
        return copies * (_ROUNDED * float(torch.linalg.vector_norm(flat).item())) ** 2
    if flat.itemsize < 4:
        return copies * float(torch.linalg.vector_norm(flat, dtype=torch.float32).item()) ** 2
    if flat.numel() > MOST:
        return copies * sum(square_sum(part) for part in flat.split(MOST))
    return copies * float(torch.dot(flat, flat).item())


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements of a tensor fill a block of memory, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def bias_of(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of a dense mask as a contiguous bias with four dimensions, −inf where hidden."""
    return matrix(values, dtype).resolve_neg().contiguous()


def matrix(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of a dense mask as a bias with four dimensions, −inf where hidden."""
    values = values if values.dim() == 4 else values[(None,) * (4 - values.dim())]
    if values.dtype != torch.bool:
        return values.to(dtype)
    return torch.where(values, constant(0.0, dtype, values.device), constant(-torch.inf, dtype, values.device))


@lru_cache(64)
def constant(number: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a number as a tensor, which operations take faster."""
    return torch.tensor(number, dtype=dtype, device=device)


def whole(problem: Problem) -> Tiles:
    """Return the problem as a single tile."""
    return Tiles.of(problem, needs_care(problem), Grid.whole(problem))


def _scores_of_dot_products(problem: Problem) -> Tensor | None:
    """Return the scores (B, H, L, S) of softmax dot-product attention with a dense, causal or no mask; else None.

    A fast path in a few operations, without tiles, because call overhead dominates small problems.
    """
    mask, query, key = problem.mask, problem.query, problem.key
    if not problem.is_softmax or type(problem.score) not in (ScaledDot, Dot) or problem.softcap is not None:
        return None
    if query.dtype != problem.compute_dtype or query.shape[1] != key.shape[1]:
        return None
    if not (mask is None or type(mask) is Dense or mask.is_plain_causal(problem.extent)):
        return None
    scores = query @ key.mT
    if problem.scale != 1.0:
        scores = scores * problem.scale
    if mask is None:
        return scores
    values = mask.values if type(mask) is Dense else scores.new_ones(scores.shape[2:], dtype=torch.bool).tril()
    return torch.where(values, scores, -torch.inf) if values.dtype == torch.bool else scores + values.to(scores.dtype)


def attend(problem: Problem, tiles: Tiles | None = None) -> EngineOutput:
    """Run the definition: all scores, all weights, one product. Differentiable to any order by plain autograd.

    ``tiles`` is the problem as a single tile, if already computed.
    """
    extent, dtype = problem.extent, problem.query.dtype
    B, H, L, S = extent
    if 0 in extent:
        empty = problem.query.new_zeros(B, H, L, S, dtype=problem.compute_dtype)
        output = problem.query.new_zeros(B, H, L, problem.value.shape[-1])
        return EngineOutput(attached(output, problem), None, empty, empty)
    if problem.order is not None:
        tiles = lines.tiles_of(problem, needs_care(problem), Grid.whole(problem))
        row = lines.LineRow.of(tiles, 0)
        output = row.read(tiles, 0).to(dtype)
        of_lines, of_means = row.weights, row.scores
        if of_lines.shape[-1] != S:  # no tile of keys was computed, as all are hidden
            of_lines = of_lines.new_zeros(B, H, L, S)
            of_means = torch.full_like(of_lines, -torch.inf)
        return EngineOutput(output if output.requires_grad else attached(output, problem), None, of_lines, of_means)
    if tiles is None and not needs_care(problem) and (scores := _scores_of_dot_products(problem)) is not None:
        weights = weighed(problem.normalizer, scores)
        dropped = F.dropout(weights, problem.dropout_p) if problem.dropout_p else weights
        return EngineOutput(dropped @ problem.value, None, weights, scores)
    tiles = whole(problem) if tiles is None else tiles
    scores = tiles.scores(0, 0)
    weights = weighed(tiles.normalizer, scores)
    dropped = F.dropout(weights, problem.dropout_p) if problem.dropout_p else weights
    visible = None if tiles.spill is None else scores != -torch.inf
    return EngineOutput(tiles.read(dropped, 0, visible).to(dtype), None, weights, scores)


def attend_nothing(problem: Problem) -> EngineOutput:
    """Run a problem with few or no pairs, without auxiliary outputs."""
    return replace(attend(problem), weights=None, scores=None)


def attached(output: Tensor, problem: Problem) -> Tensor:
    """Connect an output that does not depend on the inputs to their graph, so that gradients are 0 rather than None."""
    inputs = (problem.query, problem.key, problem.value, *problem.score.tensors(), *problem.normalizer.tensors())
    inputs += () if problem.mask is None else tuple(problem.mask.tensors())
    for tensor in inputs:
        if tensor.requires_grad:
            output = output + tensor.flatten()[:0].sum().to(output.dtype)  # an empty sum: 0 with a graph
    return output


def attend_by_rows(problem: Problem, drop: Drop | None = None) -> EngineOutput:
    """Run the definition on a few rows at a time, forward and backward, without leaking non-finite values.

    ``drop`` is the engine's own dropout, torch's by default.
    """
    if problem.order is not None:
        output = lines.attend(problem, problem.mask is not None, recorded=False)
        return EngineOutput(output if output.requires_grad else attached(output, problem))
    tiles = Tiles.of(problem, problem.mask is not None, Grid.of(problem, (64, max(problem.extent.S, 1))))

    p = problem.dropout_p

    def attend(row: int) -> Tensor:
        scores = tiles.scores(row, 0)
        weights = weighed(tiles.normalizer, scores)
        if p:
            weights = F.dropout(weights, p) if drop is None else drop(weights, tiles.rows[row].start, problem.extent.L)
        return tiles.read(weights, 0, scores != -torch.inf)

    run = partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=p > 0) if problem.wants_grad else attend
    outputs = [run(row) for row in range(len(tiles.rows))]
    return EngineOutput(torch.cat(outputs, 2).to(problem.query.dtype))


def attend_few(problem: Problem) -> EngineOutput:
    """Run the definition on few rows; non-finite values may leak through masked pairs as NaN."""
    if (scores := _scores_of_dot_products(problem)) is not None:
        return EngineOutput(weighed(problem.normalizer, scores) @ problem.value)
    tiles = Tiles.of(problem, False, Grid.whole(problem))
    weights = weighed(tiles.normalizer, tiles.scores(0, 0))
    return EngineOutput(tiles.read(weights, 0).to(problem.query.dtype))
