"""What a call can tell beside its output, in a second pass that never materializes L×S unless asked to."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard._aux import Aux, AuxRequest, TopK
from regard._problem import Problem
from regard.engines import dense
from regard.engines.base import Outcome
from regard.engines.tiles import Tiles
from regard.normalizers.base import Statistic

#: Keys of a tile are compared in this many strided groups to find the largest: a group's maximum is cheap.
GROUP = 16


def look(problem: Problem, outcome: Outcome, request: AuxRequest) -> Aux:
    """Return the fields asked for, in the caller's leading dimensions.

    ``weights`` and ``scores`` are part of the autograd graph; the other fields are observations, detached from it.
    """
    materialized = request.weights or request.scores
    if outcome.weights is None and (materialized or not problem.normalizer.streams or 0 in _sizes(problem)):
        outcome = dense.attend(problem)
    with torch.no_grad():
        if outcome.weights is not None and outcome.scores is not None:
            found = _from_whole(outcome.scores.detach(), outcome.weights.detach(), request, problem.normalizer.random)
        else:
            found = _Survey(problem, outcome, request).run()
    if request.weights:
        found["weights"] = outcome.weights
    if request.scores:
        found["scores"] = outcome.scores
    restored = {name: None if t is None else problem.restore(t) for name, t in found.items() if name != "topk"}
    topk = found.get("topk")
    if isinstance(topk, TopK):
        restored["topk"] = TopK(problem.restore(topk.weights), problem.restore(topk.indices))
    return Aux(**restored)


def _sizes(problem: Problem) -> tuple[int, int, int, int]:
    extent = problem.extent
    return extent.B, extent.H, extent.L, extent.S


def _entropy(weights: Tensor) -> Tensor:
    return -torch.special.xlogy(weights, weights).sum(-1)


def _from_whole(scores: Tensor, weights: Tensor, request: AuxRequest, drawn: bool) -> dict[str, Tensor | TopK | None]:
    found: dict[str, Tensor | TopK | None] = {}
    if request.lse:
        found["lse"] = torch.logsumexp(scores, -1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)
    if request.max:
        found["max"] = scores.amax(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)
    if request.entropy:
        found["entropy"] = _entropy(weights)
    if request.received:
        found["received"] = weights.sum(-2)
    if request.topk:
        # Weights rise with scores, which also order those whose weight is 0; a draw has an order of its own.
        indices = (weights if drawn else scores).topk(min(request.topk, scores.shape[-1]), -1).indices
        hidden = scores.gather(-1, indices) == -torch.inf
        found["topk"] = TopK(weights.gather(-1, indices), indices.masked_fill(hidden, -1))
    return found


@dataclass
class _Best:
    """The largest scores of some rows so far, and their keys."""

    k: int
    scores: Tensor | None = None
    keys: Tensor = field(default_factory=lambda: torch.empty(0))

    def add(self, scores: Tensor, start: int) -> None:
        """Take a tile of scores (B, H, l, s) into account, whose first key is ``start``."""
        width = scores.shape[-1]
        groups = width // GROUP
        if groups >= 2 * self.k and width % GROUP == 0:
            # The k largest stand in the k groups with the largest maxima.
            grouped = scores.unflatten(-1, (GROUP, groups))
            chosen = grouped.amax(-2).topk(self.k, -1).indices  # (B, H, l, k)
            index = chosen.unsqueeze(-2) + torch.arange(GROUP, device=scores.device).unsqueeze(-1) * groups
            index = index.flatten(-2)
            scores = scores.gather(-1, index)
            keys = index + start
        else:
            keys = torch.arange(start, start + width, device=scores.device).expand(scores.shape)
        if self.scores is not None:
            scores, keys = torch.cat((self.scores, scores), -1), torch.cat((self.keys, keys), -1)
        self.scores, index = scores.topk(min(self.k, scores.shape[-1]), -1)
        self.keys = keys.gather(-1, index)


@dataclass
class _Survey:
    """The second pass: row tile by row tile, the scores once more."""

    problem: Problem
    outcome: Outcome
    request: AuxRequest

    def run(self) -> dict[str, Tensor | TopK | None]:
        request, tiles = self.request, Tiles.of(self.problem, dense.needs_care(self.problem))
        B, H, _, S = _sizes(self.problem)
        received = tiles.query.new_zeros(B, H, S) if request.received else None
        rows = [self._row(tiles, row, received) for row in range(len(tiles.rows))]
        found: dict[str, Tensor | TopK | None] = {
            name: torch.cat([row[name] for row in rows], 2) for name in ("lse", "max", "entropy") if name in rows[0]
        }
        if received is not None:
            found["received"] = received
        if request.topk:
            top, keys = (torch.cat([row[name] for row in rows], 2) for name in ("top", "keys"))
            found["topk"] = TopK(top, keys)
        return found

    def _row(self, tiles: Tiles, row: int, received: Tensor | None) -> dict[str, Tensor]:
        """Return the fields of one row tile, and add its weights to ``received``."""
        request, like = self.request, tiles.like(tiles.rows[row])
        found: dict[str, Tensor] = {}
        statistic, peak, lse = self._statistic(tiles, row)
        best = _Best(min(request.topk, self.problem.extent.S))
        entropy = torch.zeros_like(like)
        needs_weights = request.entropy or received is not None
        if needs_weights or request.topk:
            for col, cols in tiles.visible_cols(row):
                scores = tiles.scores(row, col)
                if request.topk:
                    best.add(scores, cols.start)
                if needs_weights:
                    weights = tiles.normalizer.tile_weights(scores, statistic, tiles.kv_idx(col))
                    if received is not None:
                        received[:, :, cols.slice] += weights.sum(-2)
                    if request.entropy:
                        entropy = entropy + self._entropy(scores, weights, lse)
        if request.lse:
            found["lse"] = lse.squeeze(-1)
        if request.max:
            found["max"] = peak.squeeze(-1)
        if request.entropy:
            found["entropy"] = entropy.squeeze(-1)
        if request.topk:
            found["top"], found["keys"] = self._top(tiles, best, statistic)
        return found

    def _entropy(self, scores: Tensor, weights: Tensor, lse: Tensor) -> Tensor:
        if self.problem.normalizer.online:  # −log weight is at hand: lse − score
            surprise = torch.where(weights > 0, lse - scores, 0.0)
            return torch.linalg.vecdot(weights, surprise).unsqueeze(-1)
        return _entropy(weights).unsqueeze(-1)

    def _top(self, tiles: Tiles, best: _Best, statistic: Statistic) -> tuple[Tensor, Tensor]:
        like = statistic.offset
        if best.scores is None:  # rows that see nothing
            width = best.k
            return like.expand(*like.shape[:-1], width) * 0, like.new_full((*like.shape[:-1], width), -1, dtype=torch.long)
        short = best.k - best.scores.shape[-1]  # fewer visible tiles than k keys
        scores = torch.nn.functional.pad(best.scores, (0, short), value=-torch.inf)
        keys = torch.nn.functional.pad(best.keys, (0, short), value=-1)
        if tiles.normalizer.couples or not tiles.normalizer.convex:
            weights = tiles.normalizer.tile_weights(scores, statistic, keys)
        else:
            weights = (keys == statistic.shift).to(scores.dtype)
        hidden = scores == -torch.inf
        return weights.masked_fill(hidden, 0.0), keys.masked_fill(hidden, -1)

    def _statistic(self, tiles: Tiles, row: int) -> tuple[Statistic, Tensor, Tensor]:
        """Return the row statistic, the maximum and the log-sum-exp, sweeping only for what is not known."""
        like, request = tiles.like(tiles.rows[row]), self.request
        known = None if self.outcome.lse is None else self.outcome.lse[:, :, tiles.rows[row].slice].unsqueeze(-1).to(like)
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
            return Statistic(like, like), peak, lse

        def sweep(visit_tile: object) -> None:
            for col, _ in tiles.visible_cols(row):
                visit_tile(tiles.scores(row, col), tiles.kv_idx(col))  # type: ignore[operator]

        return tiles.normalizer.statistic(sweep, like), peak, lse
