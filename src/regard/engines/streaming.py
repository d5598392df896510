"""Engine ``streaming``: tiles in plain torch. Any score, mask and device, in O(L + S) memory, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard._utils.torch_private import is_jit_tracing
from regard._utils.tracing import in_transform, is_traced
from regard.engines import dense, lines, nonfinite
from regard.engines.aux import AuxRequest
from regard.engines.base import Cost, Engine, EngineOutput, Runner
from regard.engines.problem import Problem
from regard.engines.tiles import Grid, OnlineSoftmax, Tiles, tile_shape
from regard.masks.base import MIXED
from regard.normalizers.base import Statistic


class Streaming(Engine):
    """Online softmax over tiles; other normalizers first compute their row statistic in sweeps.

    Lines (``order=1``) are fitted to a few rows at a time, of which all keys are held. The backward pass recomputes
    each tile. Under ``torch.compile``, ``torch.func`` transforms and forward mode, in
    second derivatives, and if a score uses tensors that are not attributes, autograd records the tiles instead, in
    memory that grows with L×S.
    """

    name = "streaming"
    twice_differentiable = True
    fits_lines = True

    def refusal(self, problem: Problem) -> str | None:
        if not problem.normalizer.streams:
            return f"{type(problem.normalizer).__name__} declares no streaming rule (Normalizer.streams)"
        return None

    def grows(self, problem: Problem) -> bool:  # noqa: ARG002
        return False

    def cost(self, problem: Problem) -> Cost:
        B, H, L, S = problem.extent
        E, V = problem.query.shape[-1], problem.value.shape[-1]
        sweeps = 1 if problem.normalizer.online or problem.normalizer.needs_whole_row else 2
        size = problem.compute_dtype.itemsize
        line = 0 if problem.order is None else problem.order.pair_flops(E)
        flops = B * H * L * S * (sweeps * problem.score.pair_flops(E) + 2 * V + 8 + line)
        pair = problem.score.pair_size(E)
        rows, cols = tile_shape(problem, pair)
        tile = B * H * min(rows, L) * min(cols, S) * (pair + 4) * size
        if problem.order is not None:
            tile += B * H * min(rows, L) * (4 * S * E + 3 * E * E) * size
        moved = problem.bytes_read
        kept = moved * size / problem.query.itemsize + B * H * L * (V + 4) * size
        return Cost(float(flops), float(moved), float(tile + kept), grows=self.grows(problem))

    def prepare(self, problem: Problem, request: AuxRequest | None) -> Runner:  # noqa: ARG002
        if 0 in problem.extent:
            return dense.attend_nothing
        fixed, grid = problem.mask is None or problem.mask.is_fixed, None
        traced = torch.compiler.is_compiling() or in_transform() or is_jit_tracing()
        if problem.order is not None:
            fit = partial(_fit_lines, recorded=traced)
            return fit if is_traced(problem.query) else partial(nonfinite.fitted, attend=fit)
        listed = traced or _lists_its_tensors(problem)

        def run(problem: Problem) -> EngineOutput:
            nonlocal grid
            tiles = Tiles.of(problem, dense.needs_care(problem), grid)
            grid = tiles.grid if fixed else None
            if len(tiles.rows) == len(tiles.cols) == 1 and not traced:
                return dense.attend(problem, tiles)
            if traced or (not listed and _captures(tiles)):
                output, row = _forward(tiles, _plain_dropout(problem.dropout_p))
                output = output if output.requires_grad else dense.attached(output, problem)
            else:
                spec = _Spec(tiles, problem.dropout_p, _draw_seed() if problem.dropout_p else 0)
                given = (tiles.query, tiles.key, tiles.value, *tiles.tensors())
                output, shift, offset = _Streamed.apply(spec, *given)
                row = Statistic(shift, offset)
            lse = None
            if problem.normalizer.online:
                lse = (row.shift + row.offset).squeeze(-1).masked_fill(_empty(row), -torch.inf)
            return EngineOutput(output.to(problem.query.dtype), lse)

        return run if is_traced(problem.query) else partial(nonfinite.fitted, attend=run)

    def partial_backward(
        self,
        problem: Problem,
        output: Tensor,
        lse: Tensor,
        runner: Runner | None = None,  # noqa: ARG002
    ) -> Tensor | None:
        normalizer = problem.normalizer
        if (normalizer.row_normalized and not normalizer.online) or problem.dropout_p:
            return None
        tiles = Tiles.of(problem, dense.needs_care(problem))
        lse = lse.unsqueeze(-1)
        precomputed = output, _statistic(torch.where(lse == -torch.inf, 0.0, lse), lse == -torch.inf)
        if not normalizer.online:  # each weight depends only on its own score
            precomputed = output, Statistic(torch.zeros_like(lse), torch.zeros_like(lse))
        given = (tiles.query, tiles.key, tiles.value, *tiles.tensors())
        attached: Tensor = _Streamed.apply(_Spec(tiles, 0.0, 0, precomputed), *given)[0]
        return attached


def _fit_lines(problem: Problem, recorded: bool) -> EngineOutput:
    output = lines.attend(problem, dense.needs_care(problem), recorded)
    return EngineOutput(output if output.requires_grad else dense.attached(output, problem))


def _statistic(lse: Tensor, empty: Tensor) -> Statistic:
    """Return the statistic for a log-sum-exp; recomputed weights of empty rows are exactly 0."""
    return Statistic(lse, torch.where(empty, torch.inf, 0.0).to(lse.dtype))


def _empty(row: Statistic) -> Tensor:
    return row.offset.squeeze(-1) == torch.inf


Dropout = Callable[[Tensor, int, int], Tensor]


def _plain_dropout(p: float) -> Dropout:
    def drop(weights: Tensor, row: int, col: int) -> Tensor:  # noqa: ARG001
        return F.dropout(weights, p) if p else weights

    return drop


def _seeded_dropout(p: float, seed: int) -> Dropout:
    """Return dropout with a reproducible mask per tile."""

    def drop(weights: Tensor, row: int, col: int) -> Tensor:
        if not p:
            return weights
        generator = torch.Generator(weights.device).manual_seed(hash((seed, row, col)) & (2**63 - 1))
        keep = torch.rand(weights.shape, generator=generator, device=weights.device) >= p
        return weights * keep / (1 - p) if p < 1 else weights * 0.0

    return drop


def _draw_seed() -> int:
    return int(torch.randint(2**62, (), device="cpu"))


def _lists_its_tensors(problem: Problem) -> bool:
    """Whether the parts use only tensors that are attributes: they are regard's own and hold no functions."""
    parts = [part for part in (problem.score, problem.mask) if part is not None]
    return all(type(part).__module__.startswith("regard.") and not part.calls_a_function() for part in parts)


def _captures(tiles: Tiles) -> bool:
    """Whether the score or mask uses tensors that require gradients and are not attributes."""
    if not torch.is_grad_enabled():
        return False
    detached = tiles.around(*(t.detach() for t in (tiles.query, tiles.key, tiles.value, *tiles.tensors())))
    first = detached.rows[0]._replace(stop=detached.rows[0].start + 1), detached.cols[0]._replace(stop=1)
    corner = Grid([first[0]], [first[1]], None if tiles.states is None else [[MIXED]])
    return replace(detached, grid=corner).scores(0, 0).requires_grad


def _forward(tiles: Tiles, dropout: Dropout) -> tuple[Tensor, Statistic]:
    """Return the output and the row statistic, one row of tiles at a time."""
    outputs, shifts, offsets = [], [], []
    for row in range(len(tiles.rows)):
        output, statistic = (_online if tiles.normalizer.online else _swept)(tiles, row, dropout)
        outputs.append(output)
        shifts.append(statistic.shift)
        offsets.append(statistic.offset)
    return torch.cat(outputs, 2), Statistic(torch.cat(shifts, 2), torch.cat(offsets, 2))


def _online(tiles: Tiles, row: int, dropout: Dropout) -> tuple[Tensor, Statistic]:
    state = OnlineSoftmax(tiles.like(tiles.rows[row]), tiles.value.shape[-1])
    for col, _ in tiles.visible_cols(row):
        scores = tiles.scores(row, col)
        visible = None if tiles.spill is None else scores != -torch.inf

        def read(weights: Tensor, col: int = col, visible: Tensor | None = visible) -> Tensor:
            return tiles.read(dropout(weights, row, col), col, visible)

        state.update(scores, read)
    output, _ = state.finish()
    empty = state.peak == -torch.inf
    # An offset of inf makes recomputed weights of empty rows exactly 0.
    offset = torch.where(empty, torch.inf, torch.where(empty, 1.0, state.total).log())
    return output, Statistic(torch.where(empty, 0.0, state.peak), offset)


def _swept(tiles: Tiles, row: int, dropout: Dropout) -> tuple[Tensor, Statistic]:
    held = (
        {col: tiles.scores(row, col) for col, _ in tiles.visible_cols(row)} if tiles.normalizer.needs_whole_row else {}
    )

    def scores_of(col: int) -> Tensor:
        return held[col] if col in held else tiles.scores(row, col)

    def sweep(visit: Callable[[Tensor, Tensor], None]) -> None:
        for col, _ in tiles.visible_cols(row):
            visit(scores_of(col), tiles.kv_idx(col))

    like = tiles.like(tiles.rows[row])
    statistic = tiles.normalizer.statistic(sweep, like)
    output = like.new_zeros(*like.shape[:-1], tiles.value.shape[-1])
    for col, _ in tiles.visible_cols(row):
        scores = scores_of(col)
        weights = tiles.normalizer.tile_weights(scores, statistic, tiles.kv_idx(col))
        visible = None if tiles.spill is None else scores != -torch.inf
        output = output + tiles.read(dropout(weights, row, col), col, visible)
    return output, statistic


@dataclass(eq=False, repr=False)
class _Spec:
    """The non-tensor arguments of the custom function; ``tiles`` is rebuilt around the saved tensors.

    ``precomputed`` holds an output and its row statistic that were computed elsewhere.
    """

    tiles: Tiles
    dropout_p: float
    seed: int
    precomputed: tuple[Tensor, Statistic] | None = None


class _Streamed(torch.autograd.Function):
    """Streamed attention with a backward pass that recomputes tiles and is itself differentiable."""

    @staticmethod
    def forward(
        ctx: Any, spec: _Spec, query: Tensor, key: Tensor, value: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        tiles = spec.tiles.around(query, key, value, *tensors)
        if spec.precomputed is None:
            output, row = _forward(tiles, _seeded_dropout(spec.dropout_p, spec.seed))
        else:
            output, row = spec.precomputed[0].detach(), spec.precomputed[1]
        detached = tiles.around(*(t.detach() for t in (query, key, value, *tensors)))
        ctx.spec = replace(spec, precomputed=None, tiles=detached)
        ctx.save_for_backward(query, key, value, output, row.shift, row.offset, *tensors)
        ctx.mark_non_differentiable(row.shift)
        ctx.set_materialize_grads(False)
        return output, row.shift, row.offset

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None, grad_offset: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, output, shift, offset, *tensors = ctx.saved_tensors
        spec: _Spec = ctx.spec
        twice = torch.is_grad_enabled()  # second derivatives need everything in the graph
        if twice:
            # Aliases: gradients of a part's tensor must not also flow through the projected rows.
            query, key, value, *tensors = (t.view_as(t) for t in (query, key, value, *tensors))
        else:
            given = [t.detach() for t in (query, key, value, *tensors)]
            query, key, value, *tensors = (t.requires_grad_() if t.is_floating_point() else t for t in given)
        tiles = spec.tiles.around(query, key, value, *tensors)
        grad = torch.zeros_like(output) if grad is None else grad
        rows = Statistic(shift, offset)
        needed = [i for i, wants in enumerate(ctx.needs_input_grad[1:]) if wants]
        dropout = _seeded_dropout(spec.dropout_p, spec.seed)
        grads = _Backward(tiles, rows, output, grad, grad_offset, dropout, needed, twice).run()
        return None, *grads


@dataclass(eq=False, repr=False)
class _Compared:
    """A recomputed tile of the forward pass, and the gradient of its weights.

    ``scores`` have a graph to the tile's rows; ``constant_scores`` are detached, except for second derivatives.
    """

    query: Tensor
    key: Tensor
    scores: Tensor
    constant_scores: Tensor
    weights: Tensor
    d_weights: Tensor


@dataclass(eq=False, repr=False)
class _Backward:
    """The backward pass of streamed attention, tile by tile."""

    tiles: Tiles
    rows: Statistic
    output: Tensor
    grad: Tensor
    grad_offset: Tensor | None
    dropout: Dropout
    needed: list[int]
    twice: bool

    def run(self) -> list[Tensor | None]:
        tiles = self.tiles
        sources = [tiles.query, tiles.key, tiles.value, *tiles.tensors()]
        sums: list[Tensor | None] = [torch.zeros_like(s) if i in self.needed else None for i, s in enumerate(sources)]
        for row, rows in enumerate(tiles.rows):
            statistic = Statistic(self.rows.shift[:, :, rows.slice], self.rows.offset[:, :, rows.slice])
            cols = [col for col, _ in tiles.visible_cols(row)]
            compared: Callable[[int], _Compared] = partial(self._compared, row, statistic)
            if tiles.normalizer.needs_whole_row:  # hold all tiles of a row at once
                compared = {col: compared(col) for col in cols}.__getitem__
            delta = self._delta(row, cols, compared)
            self._pull_normalizer(statistic, delta, sums)
            for col in cols:
                self._tile(row, col, compared(col), delta, sums)
        return sums

    def _compared(self, row: int, statistic: Statistic, col: int) -> _Compared:
        """Recompute a tile of the forward pass, and the gradient of its weights."""
        tiles, rows, cols = self.tiles, self.tiles.rows[row].slice, self.tiles.cols[col].slice
        with torch.enable_grad():
            query, key = tiles.query[:, :, rows], tiles.key[:, :, cols]
            scores = tiles.scores(row, col, query, key)
        constant = scores if self.twice else scores.detach()
        weights = tiles.normalizer.tile_weights(constant, statistic, tiles.kv_idx(col))
        d_weights = tiles.unfold(tiles.fold(self.grad[:, :, rows]) @ tiles.value[:, :, cols].mT)
        return _Compared(query, key, scores, constant, weights, self.dropout(d_weights, row, col))

    def _delta(self, row: int, cols: list[int], compared: Callable[[int], _Compared]) -> tuple[Tensor, Tensor | None]:
        """Return the term δ that each row subtracts from d weight, and the term from the statistic's own gradient."""
        tiles, part = self.tiles, self.tiles.rows[row].slice
        grad, like = self.grad[:, :, part], tiles.like(tiles.rows[row])
        own = None if self.grad_offset is None else self.grad_offset[:, :, part]
        if not tiles.normalizer.row_normalized:
            return like, None
        if tiles.normalizer.online:
            return (grad * self.output[:, :, part]).sum(-1, keepdim=True), own
        total, weighted = like, like
        for col in cols:
            tile = compared(col)
            slope = tiles.normalizer.tile_slope(tile.weights)
            total = total + slope.sum(-1, keepdim=True)
            weighted = weighted + torch.where(slope == 0, 0.0, slope * tile.d_weights).sum(-1, keepdim=True)
        total = tiles.normalizer.slope_total(total)
        safe = torch.where(total == 0, 1, total)
        return weighted / safe, None if own is None else own / safe

    def _pull_normalizer(self, row: Statistic, delta: tuple[Tensor, Tensor | None], sums: list[Tensor | None]) -> None:
        """Accumulate the gradients of the normalizer's tensors from that of a row's statistic."""
        normalizer = self.tiles.normalizer
        first = len(sums) - len(normalizer.tensors())
        if any(total is not None for total in sums[first:]):
            grad = -delta[0] if delta[1] is None else delta[1] - delta[0]
            for i, part in enumerate(normalizer.pull(row, grad), first):
                sums[i] = None if sums[i] is None else _added(sums[i], part, None, self.twice)

    def _tile(
        self, row: int, col: int, tile: _Compared, delta: tuple[Tensor, Tensor | None], sums: list[Tensor | None]
    ) -> None:
        """Accumulate the gradients of one tile."""
        tiles, rows, cols = self.tiles, self.tiles.rows[row].slice, self.tiles.cols[col].slice
        if sums[2] is not None:
            d_value = tiles.fold(self.dropout(tile.weights, row, col)).mT @ tiles.fold(self.grad[:, :, rows])
            sums[2] = _added(sums[2], d_value, cols, self.twice)
        wanted = [(i, t) for i, t in enumerate((tile.query, tile.key)) if i in self.needed]
        wanted += [(i, t) for i, t in enumerate(tiles.tensors(), 3) if i in self.needed]
        if not wanted or not tile.scores.requires_grad:
            return
        change = tile.d_weights - delta[0]
        if delta[1] is not None:
            change = change + delta[1]
        hidden = tile.constant_scores == -torch.inf  # NaN is not hidden: it propagates to gradients
        d_scores = torch.where(hidden, 0.0, tiles.normalizer.tile_slope(tile.weights) * change)
        found = torch.autograd.grad(
            tile.scores, [t for _, t in wanted], d_scores, create_graph=self.twice, allow_unused=True
        )
        for (i, _), gradient in zip(wanted, found):
            if gradient is not None:
                where = (rows, cols)[i] if i < 2 else None
                sums[i] = _added(sums[i], gradient, where, self.twice)


def _added(total: Tensor | None, part: Tensor, where: slice | None, twice: bool) -> Tensor:
    """Return ``total`` with ``part`` added at rows ``where``; in place unless a graph is kept."""
    assert total is not None
    if not twice:
        (total if where is None else total[:, :, where]).add_(part)
        return total
    if where is None:
        return total + part
    return torch.slice_scatter(total, total[:, :, where] + part, 2, where.start, where.stop)
