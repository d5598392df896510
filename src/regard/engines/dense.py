"""The whole score matrix at once: the definition of attention, for engines and fields that materialize it."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from regard._problem import Problem
from regard._tracing import is_traced
from regard.engines.base import Outcome
from regard.engines.tiles import Grid, Tiles


def needs_care(problem: Problem) -> bool:
    """Whether something that is not finite could leak through a masked pair; where values cannot be seen, yes."""
    if problem.mask is None:
        return False
    if is_traced(problem.query):
        return True
    return not (is_finite(problem.key) and is_finite(problem.value))


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds no NaN and no infinity; rarely, for huge values, False without need."""
    # A sum is finite where its terms are, unless it overflows: then the careful path is taken without need.
    return math.isfinite(tensor.detach().sum(dtype=torch.float32 if tensor.itemsize < 4 else None).item())


def whole(problem: Problem) -> Tiles:
    """Return the problem as a single tile."""
    return Tiles.of(problem, needs_care(problem), Grid.whole(problem))


def attend(problem: Problem, tiles: Tiles | None = None) -> Outcome:
    """Run the definition: all scores, all weights, one product. Differentiable to any order by plain autograd.

    ``tiles`` are the problem as a single tile, where that was made before.
    """
    extent, dtype = problem.extent, problem.query.dtype
    B, H, L, S = extent.B, extent.H, extent.L, extent.S
    if 0 in (B, H, L, S):
        empty = problem.query.new_zeros(B, H, L, S, dtype=problem.compute_dtype)
        output = problem.query.new_zeros(B, H, L, problem.value.shape[-1])
        return Outcome(attached(output, problem), None, empty, empty)
    tiles = whole(problem) if tiles is None else tiles
    scores = tiles.scores(0, 0)
    weights = tiles.normalizer.weights(scores)
    dropped = F.dropout(weights, problem.dropout_p) if problem.dropout_p else weights
    visible = None if tiles.spill is None else scores > -torch.inf
    return Outcome(tiles.read(dropped, 0, visible).to(dtype), None, weights, scores)


def attend_nothing(problem: Problem) -> Outcome:
    """Run where there are no pairs, or next to none, and tell nothing of them."""
    return replace(attend(problem), weights=None, scores=None)


def attached(output: Tensor, problem: Problem) -> Tensor:
    """Return an output that was made without reading any input as a part of their graph, so that gradients are 0."""
    inputs = (problem.query, problem.key, problem.value, *problem.score.tensors())
    inputs += () if problem.mask is None else tuple(problem.mask.tensors())
    for tensor in inputs:
        if tensor.requires_grad:
            output = output + tensor.flatten()[:0].sum().to(output.dtype)  # an empty sum: zero, but tied to its tensor
    return output


def attend_by_rows(problem: Problem) -> Outcome:
    """Run the definition on a few rows at a time, with care for what is not finite."""
    tiles = Tiles.of(problem, True, Grid.of(problem, (64, max(problem.extent.S, 1))))
    outputs = []
    for row in range(len(tiles.rows)):
        scores = tiles.scores(row, 0)
        outputs.append(tiles.read(tiles.normalizer.weights(scores), 0, scores > -torch.inf))
    return Outcome(torch.cat(outputs, 2).to(problem.query.dtype))


def attend_few(problem: Problem) -> Outcome:
    """Run the definition on few rows, without care for values that are not finite: they show as NaN in the output."""
    tiles = Tiles.of(problem, False, Grid.whole(problem))
    weights = tiles.normalizer.weights(tiles.scores(0, 0))
    return Outcome(tiles.read(weights, 0).to(problem.query.dtype))
