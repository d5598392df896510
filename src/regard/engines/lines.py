"""Order 1 on rows of tiles: each fits lines to all of its keys at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.engines.aux import AuxRequest, TopK
from regard.engines.problem import Problem
from regard.engines.tiles import Grid, Tiles, weighed


@dataclass(eq=False, repr=False)
class LineRow:
    """One row of tiles.

    Attributes
    ----------
    cols : list of int
        The columns of tiles that are not empty.
    scores, weights : Tensor (B, H, l, s)
        Of the keys of these columns, side by side; the weights are those of lines.
    """

    cols: list[int]
    scores: Tensor
    weights: Tensor

    @classmethod
    def of(cls, tiles: Tiles, row: int) -> LineRow:
        """Compute a row."""
        assert tiles.order is not None and tiles.places is not None
        cols = [col for col, _ in tiles.visible_cols(row)]
        rows = tiles.rows[row]
        if not cols:
            nothing = tiles.like(rows)[..., :0]
            return cls(cols, nothing, nothing)
        scores = torch.cat([tiles.scores(row, col) for col in cols], -1)
        query, key = tiles.places
        if len(cols) < len(tiles.cols):
            key = torch.cat([key[:, :, tiles.cols[col].slice] for col in cols], 2)
        hides = tiles.mask is not None or tiles.score.can_return_neg_inf
        visible = tiles.fold(scores != -torch.inf) if hides else None
        weights = tiles.fold(weighed(tiles.normalizer, scores))
        lines = tiles.order.weights(weights, tiles.fold(query[:, :, rows.slice]), key, visible)
        return cls(cols, scores, tiles.unfold(lines))

    def read(self, tiles: Tiles, row: int) -> Tensor:
        """Return the output (B, H, l, V)."""
        like = tiles.like(tiles.rows[row])
        output = like.new_zeros(*like.shape[:-1], tiles.value.shape[-1])
        start = 0
        for col in self.cols:
            span = tiles.cols[col]
            part = slice(start, start + span.stop - span.start)
            visible = None if tiles.spill is None else self.scores[..., part] != -torch.inf
            output = output + tiles.read(self.weights[..., part], col, visible)
            start = part.stop
        return output

    def keys(self, tiles: Tiles) -> Tensor:
        """Return the indices (s,) of the keys."""
        return torch.cat([tiles.kv_idx(col) for col in self.cols])


def tiles_of(problem: Problem, careful: bool, grid: Grid | None = None) -> Tiles:
    """Return the tiles of a problem; a line through a value that is not finite is NaN."""
    tiles = Tiles.of(problem, careful, grid)
    if tiles.spill is None:
        return tiles
    bad, nothing = tiles.spill.any(0), torch.zeros_like(tiles.spill[0])
    return replace(tiles, spill=torch.stack((bad, nothing, nothing)))


def attend(problem: Problem, careful: bool, recorded: bool) -> Tensor:
    """Return the output, row by row; the backward pass computes rows anew, unless autograd is to record them all."""
    tiles = tiles_of(problem, careful)

    def row_output(row: int) -> Tensor:
        return LineRow.of(tiles, row).read(tiles, row)

    run = row_output
    if problem.wants_grad and not recorded:
        run = partial(checkpoint, row_output, use_reentrant=False, preserve_rng_state=False)
    outputs = [run(row) for row in range(len(tiles.rows))]
    return torch.cat(outputs, 2).to(problem.query.dtype)


def fields(problem: Problem, careful: bool, request: AuxRequest) -> dict[str, Tensor | TopK | None]:
    """Return the requested fields, row by row: all but entropy, and those of size L×S."""
    tiles = tiles_of(problem, careful)
    extent = problem.extent
    lse, peak = [], []
    k = min(request.topk, extent.S)
    best: list[tuple[Tensor, Tensor]] = []
    received = tiles.query.new_zeros(extent.B, extent.H, extent.S)
    for i in range(len(tiles.rows)):
        row = LineRow.of(tiles, i)
        like = tiles.like(tiles.rows[i])
        top, keys = (like.new_full((*like.shape[:-1], k), fill) for fill in (-torch.inf, -1))
        if not row.cols:
            lse.append(torch.full_like(like[..., 0], -torch.inf))
            peak.append(lse[-1])
            best.append((torch.zeros_like(top), keys.long()))
            continue
        peak.append(row.scores.amax(-1))
        safe = torch.where(peak[-1] == -torch.inf, 0.0, peak[-1])
        lse.append(torch.exp(row.scores - safe.unsqueeze(-1)).sum(-1).log() + safe)
        received.index_add_(2, row.keys(tiles), row.weights.sum(-2))
        if k:
            ranked = row.weights.masked_fill(row.scores == -torch.inf, -torch.inf)
            found = ranked.topk(min(k, ranked.shape[-1]), -1)
            top[..., : found.values.shape[-1]] = found.values
            keys = keys.long()
            keys[..., : found.values.shape[-1]] = row.keys(tiles)[found.indices]
            hidden = top == -torch.inf
            best.append((top.masked_fill(hidden, 0.0), keys.masked_fill(hidden, -1)))
    found_all: dict[str, Tensor | TopK | None] = {}
    if request.lse:
        found_all["lse"] = torch.cat(lse, 2)
    if request.max:
        found_all["max"] = torch.cat(peak, 2)
    if request.received:
        found_all["received"] = received
    if request.topk:
        weights, indices = (torch.cat(each, 2) for each in zip(*best)) if k else (received[..., :0], received[..., :0])
        found_all["topk"] = TopK(weights, indices)
    return found_all
