"""Compute auxiliary outputs in a second pass that materializes L×S only if weights or scores are requested."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard._utils.tracing import is_traced
from regard.engines import dense, lines
from regard.engines.aux import FIELDS, Aux, AuxRequest, TopK
from regard.engines.base import Engine, EngineOutput
from regard.engines.problem import Problem
from regard.engines.tiles import TILE_SIDE, Grid, Span, Tiles, tile_shape
from regard.normalizers.base import Statistic

#: Number of keys per group in the top-k search.
GROUP = 32
#: Number of tiles to collect before a top-k search.
PANEL = 4
#: A log-weight whose weight is 0 in every dtype.
FLOOR = -1e6


def aux_fields(problem: Problem, outcome: EngineOutput, request: AuxRequest, aux_engine: Engine | None = None) -> Aux:
    """Return the requested fields, in the caller's leading dimensions.

    A second pass computes fields that the outcome lacks: on ``aux_engine``, which computes all of them without reading
    values, or else in plain torch. ``weights``, ``scores`` and, with ``lse="grad"``, ``lse`` are part of the autograd
    graph; the other fields are detached.
    """
    if aux_engine is not None and outcome.weights is None and not _is_complete(outcome, request):
        with torch.no_grad():
            narrow = replace(problem, value=problem.value[..., :0])
            outcome = aux_engine.prepare(narrow, request)(narrow)
    if _is_complete(outcome, request):
        return _aux(problem, {name: getattr(outcome, name) for name in FIELDS if getattr(request, name)}, request)
    materialized = request.weights or request.scores
    whole = materialized or not problem.normalizer.streams or 0 in problem.extent or is_traced(problem.query)
    if outcome.weights is None and not whole:
        return _completed(problem, outcome, request)
    if outcome.weights is None or outcome.scores is None:  # traced calls cannot write to buffers
        outcome = dense.attend(problem)
    assert outcome.weights is not None and outcome.scores is not None
    with torch.no_grad():
        normalizer = problem.normalizer
        by_weight = normalizer.random or not normalizer.monotone or problem.order is not None
        found = _from_whole(outcome.scores.detach(), outcome.weights.detach(), request, by_weight)
    if request.lse == "grad":
        found["lse"] = _log_sum_exp(outcome.scores)
    found |= {"weights": outcome.weights} if request.weights else {}
    found |= {"scores": outcome.scores} if request.scores else {}
    return _aux(problem, found, request)


def _completed(problem: Problem, outcome: EngineOutput, request: AuxRequest) -> Aux:
    """Return the fields of the outcome, and compute the rest in a second pass."""
    requested = [name for name in FIELDS if getattr(request, name)]
    available = {name: field for name in requested if (field := getattr(outcome, name)) is not None}
    nothing: dict[str, Any] = {name: 0 if name == "topk" else False for name in available}
    rest = replace(request, **nothing)
    with torch.no_grad():
        if problem.order is not None:
            return _aux(problem, {**lines.fields(problem, dense.needs_care(problem), rest), **available}, request)
        return _aux(problem, {**_SecondPass(problem, outcome, rest).run(), **available}, request)


def _is_complete(outcome: EngineOutput, request: AuxRequest) -> bool:
    """Whether the outcome has all requested fields."""
    return all(getattr(outcome, name) is not None for name in FIELDS if getattr(request, name))


def _aux(problem: Problem, found: dict[str, Any], request: AuxRequest) -> Aux:
    """Return fields in the caller's leading dimensions, detached unless they are differentiable."""
    topk = found.pop("topk", None)
    graph = {"weights", "scores", "lse"} if request.lse == "grad" else {"weights", "scores"}
    tensors = {name: problem.restore(t if name in graph else t.detach()) for name, t in found.items()}
    return Aux(topk=None if topk is None else _ranked(problem, topk, request.topk), **tensors)


def _ranked(problem: Problem, topk: TopK, k: int) -> TopK:
    """Return the k best keys in the caller's leading dimensions, padded with weight 0 and index −1."""
    missing = (0, k - topk.weights.shape[-1])
    weights, indices = (pad(t, missing, value=fill) for t, fill in ((topk.weights, 0.0), (topk.indices, -1)))
    return TopK(problem.restore(weights), problem.restore(indices))


def _entropy(weights: Tensor) -> Tensor:
    return -torch.special.xlogy(weights, weights).sum(-1)


def _log_sum_exp(scores: Tensor) -> Tensor:
    """Return the log-sum-exp of rows of scores; −inf, with gradient 0, in fully masked rows."""
    if scores.shape[-1] == 0:
        return scores.sum(-1) - torch.inf
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    return torch.logsumexp(torch.where(empty, 0.0, scores), -1).masked_fill(empty.squeeze(-1), -torch.inf)


def _from_whole(
    scores: Tensor, weights: Tensor, request: AuxRequest, by_weight: bool
) -> dict[str, Tensor | TopK | None]:
    found: dict[str, Tensor | TopK | None] = {}
    if request.lse:
        found["lse"] = _log_sum_exp(scores)
    if request.max:
        found["max"] = scores.amax(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)
    if request.entropy:
        found["entropy"] = _entropy(weights)
    if request.received:
        found["received"] = weights.sum(-2)
    if request.topk:
        # Rank by scores, which also order keys of weight 0; or by weights, where these are in another order.
        ranked = weights.masked_fill(scores == -torch.inf, -torch.inf) if by_weight else scores
        indices = ranked.topk(min(request.topk, scores.shape[-1]), -1).indices
        hidden = scores.gather(-1, indices) == -torch.inf
        found["topk"] = TopK(weights.gather(-1, indices), indices.masked_fill(hidden, -1))
    return found


class _Best:
    """The k largest scores of each row of a row tile, and their keys.

    Tiles are collected in a panel. Its k largest scores lie in the k groups with the largest maxima, which are cheap to
    compute while a tile is in the cache; so each panel is searched once, in a few groups.
    """

    def __init__(self, k: int, panel: Tensor, like: Tensor) -> None:
        self.k, self.panel = k, panel  # (tiles, B, H, rows, cols)
        self.cols = panel.shape[-1]
        self.lanes = max(self.cols // GROUP, 1)
        self.top = like.new_full((*like.shape[:-1], k), -torch.inf)
        self.keys = torch.full_like(self.top, -1, dtype=torch.long)
        self.starts: list[int] = []
        self.maxima: list[Tensor] = []

    def place(self, rows: int, cols: int) -> Tensor:
        """Return where the next tile (B, H, rows, cols) is to be written."""
        tile = self.panel[len(self.starts)]
        if tile.shape[-1] > cols:
            tile[..., cols:] = -torch.inf
        return tile[:, :, :rows, :cols]

    def add(self, start: int) -> None:
        """Take the tile that was written into account, whose first key is ``start``."""
        rows = self.top.shape[2]
        tile = self.panel[len(self.starts), :, :, :rows]
        self.maxima.append(tile.unflatten(-1, (-1, self.lanes)).amax(-2))
        self.starts.append(start)
        if len(self.starts) == len(self.panel):
            self.search()

    def search(self) -> None:
        """Merge the largest scores of the panel into the result, and empty the panel."""
        if not self.starts:
            return
        maxima, device = torch.cat(self.maxima, -1), self.top.device
        B, H, rows = self.top.shape[:3]
        group = maxima.topk(min(self.k, maxima.shape[-1]), -1, sorted=False).indices.unsqueeze(-1)  # (B, H, l, k, 1)
        tile, lane = group // self.lanes, group % self.lanes
        col = lane + torch.arange(0, self.cols, self.lanes, device=device)  # (B, H, l, k, GROUP)
        row = torch.arange(B * H * self.panel.shape[3], device=device).view(B, H, -1, 1, 1)[:, :, :rows] * self.cols
        found = self.panel.take(tile * self.panel.stride(0) + row + col).flatten(-2)
        keys = (torch.tensor(self.starts, device=device)[tile] + col).flatten(-2)
        top, keys = torch.cat((self.top, found), -1), torch.cat((self.keys, keys), -1)
        self.top, index = top.topk(self.k, -1)
        self.keys = keys.gather(-1, index)
        self.starts, self.maxima = [], []


class _SecondPass:
    """The second pass: recompute the scores, one row of tiles at a time.

    Buffers are allocated once; all other large tensors live for one tile.
    """

    def __init__(self, problem: Problem, outcome: EngineOutput, request: AuxRequest) -> None:
        self.problem, self.outcome, self.request = problem, outcome, request
        B, H, L, S = problem.extent
        rows, cols = self._shape()
        self.tiles = tiles = Tiles.of(problem, dense.needs_care(problem), Grid.of(problem, (rows, cols)))
        self.lifted = tiles.lifted_key()
        self.k = min(request.topk, S)
        self.weighs = request.entropy or request.received
        new = tiles.query.new_empty
        self.panel = new(min(PANEL, len(tiles.cols)) if self.k else 1, B, H, min(rows, L), cols)
        self.scratch = new(self.panel.shape[1:])
        requested = {"lse": request.lse, "max": request.max, "entropy": request.entropy}
        self.found: dict[str, Tensor] = {name: new(B, H, L) for name, wanted in requested.items() if wanted}
        if request.received:
            self.found["received"] = tiles.query.new_zeros(B, H, S)
        self.top, self.keys = new(B, H, L, self.k), new(B, H, L, self.k, dtype=torch.long)

    def run(self) -> dict[str, Tensor | TopK | None]:
        for row in range(len(self.tiles.rows)):
            self._row(row)
        topk = TopK(self.top, self.keys) if self.k or self.request.topk else None
        return {**self.found, "topk": topk}

    def _shape(self) -> tuple[int, int]:
        """Return rows and columns of a tile: few rows and many columns, as searches cost time per row."""
        rows, cols = tile_shape(self.problem, self.problem.score.pair_size(self.problem.query.shape[-1]))
        S = self.problem.extent.S
        while rows > 2 * TILE_SIDE and cols < min(S, 4096):
            rows, cols = rows // 2, cols * 2
        cols = min(cols, S)
        return rows, -(-cols // GROUP) * GROUP

    def _row(self, row: int) -> None:
        """Compute the fields of one row of tiles."""
        tiles, span, found = self.tiles, self.tiles.rows[row], self.found
        like, count = tiles.like(span), span.stop - span.start
        statistic, peak, lse = self._statistic(row)
        base = statistic.offset if tiles.normalizer.online else like
        best = _Best(self.k, self.panel, like) if self.k else None
        entropy = like.new_zeros(like.shape[:-1])
        for col, cols in tiles.visible_cols(row) if self.weighs or best else ():
            size = count, cols.stop - cols.start
            scores = best.place(*size) if best else self.panel[0, :, :, : size[0], : size[1]]
            tiles.scores_minus(row, col, base, scores, self.lifted)  # for softmax, the log of the weight
            if self.weighs:
                entropy += self._weigh(scores, statistic, col, cols)
            if best:
                best.add(cols.start)
        for name, field in (("lse", lse.squeeze(-1)), ("max", peak.squeeze(-1)), ("entropy", entropy)):
            if name in found:
                found[name][:, :, span.slice] = field
        if best:
            best.search()
            self.top[:, :, span.slice], self.keys[:, :, span.slice] = self._top(best, statistic, base)

    def _weigh(self, scores: Tensor, statistic: Statistic, col: int, cols: Span) -> Tensor:
        """Add a tile's weights to ``received``, and return its contribution to the entropy (B, H, l)."""
        tiles, normalizer = self.tiles, self.tiles.normalizer
        weights = self.scratch[:, :, : scores.shape[2], : scores.shape[3]]
        if normalizer.online:
            torch.exp(scores, out=weights)
        else:
            weights.copy_(normalizer.tile_weights(scores, statistic, tiles.kv_idx(col)))
        if "received" in self.found:
            self.found["received"][:, :, cols.slice] += weights.sum(-2)
        if not self.request.entropy:
            return weights.new_zeros(())
        if not normalizer.online:
            return _entropy(weights)
        hides = tiles.states is not None or tiles.score.can_return_neg_inf
        scores = scores.clamp(min=FLOOR) if hides else scores  # avoid 0·−inf
        return -torch.mul(weights, scores, out=weights).sum(-1)

    def _top(self, best: _Best, statistic: Statistic, base: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and indices of the best keys, padded with 0 and −1."""
        tiles = self.tiles
        if tiles.normalizer.smooth:
            weights = tiles.normalizer.tile_weights(best.top + base, statistic, best.keys)
        else:
            weights = (best.keys == statistic.shift).to(best.top.dtype)
        hidden = best.top == -torch.inf
        return weights.masked_fill(hidden, 0.0), best.keys.masked_fill(hidden, -1)

    def _statistic(self, row: int) -> tuple[Statistic, Tensor, Tensor]:
        """Return the row statistic, the maximum and the log-sum-exp, with sweeps only as needed."""
        tiles, request = self.tiles, self.request
        like = tiles.like(tiles.rows[row])
        known = (
            None if self.outcome.lse is None else self.outcome.lse[:, :, tiles.rows[row].slice].unsqueeze(-1).to(like)
        )
        peak, total = torch.full_like(like, -torch.inf), torch.zeros_like(like)

        def visit(scores: Tensor, kv_idx: Tensor | None = None) -> None:  # noqa: ARG001
            nonlocal peak, total
            new = torch.maximum(peak, scores.amax(-1, keepdim=True))
            shift = torch.where(new == -torch.inf, 0.0, new)
            if known is None:
                total = total * torch.exp(peak - shift) + torch.exp(scores - shift).sum(-1, keepdim=True)
            peak = new

        online = tiles.normalizer.online
        if request.max or (known is None and (online or request.lse)):
            for col, _ in tiles.visible_cols(row):
                visit(tiles.scores(row, col))
        lse = known if known is not None else peak + torch.where(total == 0, 1, total).log()
        if online:
            safe = torch.where(lse == -torch.inf, torch.inf, lse)
            return Statistic(torch.zeros_like(like), safe), peak, lse
        if not (request.entropy or request.received or request.topk):
            return Statistic(like, like), peak, lse  # nothing needs weights

        def sweep(visit_tile: Callable[[Tensor, Tensor], None]) -> None:
            for col, _ in tiles.visible_cols(row):
                visit_tile(tiles.scores(row, col), tiles.kv_idx(col))

        return tiles.normalizer.statistic(sweep, like), peak, lse
