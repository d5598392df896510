"""Scores tile by tile: the tile states of a mask, the scores of tiles, and the online softmax over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from regard._utils.errors import described, rejected, shape
from regard._utils.torch_private import is_fake
from regard._utils.tracing import is_symbolic, is_traced
from regard.engines.local_linear import LocalLinear
from regard.engines.problem import Problem
from regard.masks.base import EMPTY, FULL, MIXED, Extent, Mask
from regard.normalizers.base import Normalizer
from regard.scores.base import Score
from regard.scores.dot_products import DotLike

# Block states of a mask -----------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """Consecutive blocks of keys with the same state, EMPTY, MIXED or FULL: keys ``start ≤ k < stop``."""

    start: int
    stop: int
    state: int


@dataclass(eq=False, repr=False)
class BlockMask:
    """The state of every block of a bound mask.

    Attributes
    ----------
    states : Tensor (B or 1, H or 1, nq, nk), int8
        EMPTY, MIXED or FULL; sizes of 1 broadcast.
    q_block, kv_block : int
        Block size; the last blocks may be smaller.
    extent : Extent
    """

    states: Tensor
    q_block: int
    kv_block: int
    extent: Extent

    @classmethod
    def of(cls, mask: Mask, extent: Extent, q_block: int, kv_block: int) -> BlockMask:
        """Compute the block states of a bound mask."""
        return cls(mask.tiles(extent, q_block, kv_block, device="cpu"), q_block, kv_block, extent)

    @property
    def differs(self) -> tuple[bool, bool]:
        """Whether block states differ between sequences, and between heads."""
        return self.states.shape[0] > 1, self.states.shape[1] > 1

    def over_heads(self) -> list[list[int]]:
        """Return the states over all sequences and heads: EMPTY or FULL only if all of them agree."""
        if 0 in self.states.shape[:2]:
            return []
        low, high = self.states.amin((0, 1)), self.states.amax((0, 1))
        return torch.where(low == high, low, MIXED).tolist()

    def rows(self, sequences: int, heads: int) -> Iterator[tuple[int, int, int, list[Run]]]:
        """Yield sequence, head, row of blocks and its runs, equal ones repeated for ``sequences`` and ``heads``."""
        states = self.states.expand(sequences, heads, -1, -1)
        for b, of_batch in enumerate(states.tolist()):
            for h, of_head in enumerate(of_batch):
                for row, line in enumerate(of_head):
                    yield b, h, row, self._runs(line)

    def _runs(self, line: list[int]) -> list[Run]:
        runs, first = [], 0
        for state, group in groupby(line):
            last = first + len(list(group))
            runs.append(Run(first * self.kv_block, min(last * self.kv_block, self.extent.S), state))
            first = last
        return runs


# Online softmax -------------------------------------------------------------------------------------------------------


class OnlineSoftmax:
    """Running maximum, denominator ``Σ exp(s − max)`` and output ``Σ exp(s − max) v`` over the keys so far.

    The initial state is (−inf, 0, 0). Rescaling factors are constants to autograd, because the finished output does not
    depend on the maximum.

    Attributes
    ----------
    peak : Tensor (B, H, l, 1)
    total : Tensor (B, H, l, 1)
    out : Tensor (B, H, l, V)
    """

    def __init__(self, like: Tensor, width: int) -> None:
        self.peak = torch.full_like(like, -torch.inf)
        self.total = torch.zeros_like(like)
        self.out = like.new_zeros(*like.shape[:-1], width)

    def update(self, scores: Tensor, read: Callable[[Tensor], Tensor]) -> None:
        """Add a tile of scores (B, H, l, s); ``read`` multiplies unnormalized weights by the values."""
        shift = self._move(scores.detach().amax(-1, keepdim=True))
        weights = torch.exp(scores - shift)
        self.total = self.total + weights.sum(-1, keepdim=True)
        self.out = self.out + read(weights)

    def merge(self, out: Tensor, lse: Tensor) -> None:
        """Merge a finished output (B, H, l, V) and log-sum-exp (B, H, l, 1) over other keys."""
        weight = torch.exp(lse - self._move(lse))
        self.total = self.total + weight
        self.out = self.out + weight * out

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return the output, 0 in empty rows, and the log-sum-exp (B, H, l, 1), −inf in empty rows."""
        total = torch.where(self.total == 0, 1, self.total)
        return self.out / total, self.peak + total.log()

    def _move(self, peak: Tensor) -> Tensor:
        """Update the maximum and rescale; return the shift of scores, which is finite even in empty rows."""
        peak = torch.maximum(self.peak, peak)
        shift = torch.where(peak == -torch.inf, 0.0, peak)
        factor = torch.exp(self.peak - shift)
        self.peak, self.total, self.out = peak, self.total * factor, self.out * factor
        return shift


# Tiles of scores ------------------------------------------------------------------------------------------------------


#: Maximum number of elements of a tile: small enough for the cache, large enough to hide call overhead.
TILE_SIZE = 1 << 20
#: Minimum number of rows and columns of a tile.
TILE_SIDE = 16


class Span(NamedTuple):
    """A range of rows or columns."""

    start: int
    stop: int

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


def spans(length: int, step: int) -> list[Span]:
    """Split ``range(length)`` into ranges of ``step``; a symbolic length is one range."""
    if is_symbolic(length):
        return [Span(0, length)]
    return [Span(start, min(start + step, length)) for start in range(0, length, step)]


def tile_shape(problem: Problem, pair_size: int) -> tuple[int, int]:
    """Return the number of rows and columns of a tile, powers of two.

    For a normalizer that needs whole rows, all tiles of a row together have the size of one tile. For lines, so have
    the positions of its keys relative to each query.
    """
    extent = problem.extent
    B, H, S = (1 if is_symbolic(n) else n for n in (extent.B, extent.H, extent.S))
    pairs = max(TILE_SIZE // max(B * H * pair_size, 1), 1)
    rows = min(max(1 << (pairs.bit_length() - 1) // 2, TILE_SIDE), 256)
    if problem.normalizer.needs_whole_row:
        held = max(TILE_SIZE // max(B * H * S, 1), 1)
        rows = min(rows, 1 << held.bit_length() - 1)
    if problem.order is not None:
        width = problem.key.shape[-1]
        held = max(TILE_SIZE // max(B * H * S * (1 if is_symbolic(width) else max(width, 1)), 1), 1)
        rows = min(rows, 1 << held.bit_length() - 1)
    cols = min(max(1 << (max(pairs // rows, 1)).bit_length() - 1, TILE_SIDE), 4096)
    return rows, cols


class Grid(NamedTuple):
    """The partition of a problem into tiles, and their states.

    Attributes
    ----------
    rows, cols : list of Span
    states : list of list of int, or None
        EMPTY, MIXED or FULL for each tile; None without a mask.
    """

    rows: list[Span]
    cols: list[Span]
    states: list[list[int]] | None

    @classmethod
    def of(cls, problem: Problem, shape: tuple[int, int]) -> Grid:
        """Split a problem into tiles of this shape."""
        extent, mask = problem.extent, problem.mask
        rows, cols = spans(extent.L, shape[0]), spans(extent.S, shape[1])
        return cls(rows, cols, None if mask is None else states_of(mask, problem, shape, (len(rows), len(cols))))

    @classmethod
    def whole(cls, problem: Problem) -> Grid:
        """Return the grid of a single tile."""
        return cls.of(problem, (max(problem.extent.L, 1), max(problem.extent.S, 1)))


@dataclass(eq=False, repr=False)
class Tiles:
    """A problem with projected rows, split into tiles.

    ``query`` (B, H, L, C) and ``key`` (B, G, S, C') are the inputs of ``score.compare``; ``value`` is (B, G, S, V). All
    are in the compute dtype, as are the tensors of the parts. ``exact_key`` is set only if keys or values may not be
    finite: then ``key`` and ``value`` have zeros in place of non-finite elements, ``exact_key`` does not, ``bad``
    (B, G, S) marks the affected keys, and ``spill`` (3, B, G, S, V) marks the values that were NaN, inf and −inf.
    ``places`` are the positions (B, H, L, D) and (B, G, S, D) between which ``order`` fits lines.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    score: Score
    mask: Mask | None
    normalizer: Normalizer
    scale: float
    softcap: float | None
    grid: Grid
    exact_key: Tensor | None = None
    bad: Tensor | None = None
    spill: Tensor | None = None
    order: LocalLinear | None = None
    places: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, problem: Problem, careful: bool, grid: Grid | None = None) -> Tiles:
        """Project the rows; ``careful`` prevents non-finite values from leaking through weights of 0.

        Without a grid, tiles are sized for the cache.
        """
        dtype = problem.compute_dtype
        query, key, value = problem.query, problem.key, problem.value
        if query.dtype != dtype or value.dtype != dtype:
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        score, normalizer = problem.score.cast(dtype), problem.normalizer.cast(dtype)
        mask = None if problem.mask is None else problem.mask.cast(dtype)
        exact_key = bad = spill = None
        if careful:
            bad = ~(key.isfinite().all(-1) & value.isfinite().all(-1))
            spill = torch.stack([value.isnan(), value == torch.inf, value == -torch.inf])
            with torch.no_grad():
                exact_key = score.project(query, key)[1]
            key, value = (torch.where(t.isfinite(), t, 0.0) for t in _zero_unused(key, value, problem))
            query = _cleared(query, problem)
        places = None if problem.order is None else score.positions(query, key)
        query, key = score.project(query, key)
        R = problem.query.shape[1] // max(problem.key.shape[1], 1)
        if score.per_head and R > 1:
            key, value = (t.repeat_interleave(R, 1) for t in (key, value))
            exact_key, bad = (None if t is None else t.repeat_interleave(R, 1) for t in (exact_key, bad))
            spill = None if spill is None else spill.repeat_interleave(R, 2)
            places = None if places is None else (places[0], places[1].repeat_interleave(R, 1))
        grid = grid or Grid.of(problem, tile_shape(problem, score.pair_size(query.shape[-1])))
        return cls(
            query,
            key,
            value,
            score,
            mask,
            normalizer,
            problem.scale,
            problem.softcap,
            grid,
            exact_key,
            bad,
            spill,
            problem.order,
            places,
        )

    @property
    def rows(self) -> list[Span]:
        """The rows of each row of tiles."""
        return self.grid.rows

    @property
    def cols(self) -> list[Span]:
        """The columns of each column of tiles."""
        return self.grid.cols

    @property
    def states(self) -> list[list[int]] | None:
        """The state of each tile."""
        return self.grid.states

    def visible_cols(self, row: int) -> Iterator[tuple[int, Span]]:
        """Yield the column tiles that are not empty for row tile ``row``."""
        for col, span in enumerate(self.cols):
            if self.states is None or self.states[row][col] != EMPTY:
                yield col, span

    def like(self, rows: Span) -> Tensor:
        """Return zeros (B, H, l, 1)."""
        B, H = self.query.shape[:2]
        return self.query.new_zeros(B, H, rows.stop - rows.start, 1)

    def scores(self, row: int, col: int, query: Tensor | None = None, key: Tensor | None = None) -> Tensor:
        """Return the scores (B, H, l, s) of a tile after scale, softcap, mask and bias; −inf where masked.

        ``query`` and ``key`` replace the tile's own rows, to compute gradients of these only.
        """
        rows, cols = self.rows[row], self.cols[col]
        query = self.query[:, :, rows.slice] if query is None else query
        scores = clean = self._compared(query, self.key[:, :, cols.slice] if key is None else key)
        if self.exact_key is not None and self.bad is not None:
            bad = self.bad[:, :, cols.slice].repeat_interleave(self._group, 1).unsqueeze(-2)
            with torch.no_grad():
                exact = self._compared(query.detach(), self.exact_key[:, :, cols.slice])
            scores = torch.where(bad, exact, scores)
        excluded = None
        if self.score.can_return_neg_inf:
            excluded = scores == -torch.inf
            scores = torch.where(excluded, 0.0, scores)  # −inf times a scale of 0 or −1 would be wrong
        if self.scale != 1.0:
            scores = scores * self.scale
        plain = type(self.score).modify is Score.modify
        index = () if plain and self.mask is None else self.indices(rows, cols)
        if not plain:
            scores = self.score.modify(scores, *index)
        if self.softcap is not None:
            capped = self.softcap * torch.tanh(scores / self.softcap)
            scores = torch.where(scores == -torch.inf, scores, capped) if self.score.can_return_neg_inf else capped
        if excluded is not None:
            scores = torch.where(excluded, -torch.inf, scores)
        scores = self._masked(scores, row, col, index)
        if self.exact_key is None:
            return scores
        # Visible NaN scores use the graph of the zeroed rows, so that NaN propagates to gradients.
        return torch.where(scores.isnan(), scores.detach() + (clean - clean.detach()), scores)

    def lifted_key(self) -> Tensor | None:
        """Return keys (B, G, S, C + 1) with an extra feature of ones if scores are plain dot products, else None."""
        kind = type(self.score)
        is_product = isinstance(self.score, DotLike) and kind.compare is DotLike.compare
        if not is_product or kind.modify is not Score.modify or self.softcap is not None or self.exact_key is not None:
            return None
        return torch.cat((self.key, self.key.new_ones(*self.key.shape[:-1], 1)), -1)

    def scores_minus(self, row: int, col: int, base: Tensor, out: Tensor, lifted: Tensor | None) -> None:
        """Write the scores of a tile minus ``base`` (B, H, l, 1) to ``out`` (B, H, l, s), without a graph.

        With :meth:`lifted_key`, this is one matrix product for a full tile.
        """
        biased = self.mask is not None and self.mask.has_bias
        free = self.states is None or (self.states[row][col] == FULL and not biased)
        if lifted is None or not free or not out.is_contiguous():
            torch.sub(self.scores(row, col), base, out=out)
            return
        query = torch.cat((self.query[:, :, self.rows[row].slice] * self.scale, -base), -1)
        query, key = self.fold(query).flatten(0, 1), lifted[:, :, self.cols[col].slice].flatten(0, 1)
        torch.bmm(query, key.mT, out=out.view(key.shape[0], query.shape[1], key.shape[1]))

    def indices(self, rows: Span, cols: Span) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return b (B, 1, 1, 1), h (H, 1, 1), q_idx (l, 1) and kv_idx (s,) of a tile."""
        B, H = self.query.shape[:2]
        device = self.query.device
        b, h = torch.arange(B, device=device).view(B, 1, 1, 1), torch.arange(H, device=device).view(H, 1, 1)
        q_idx = torch.arange(rows.start, rows.stop, device=device).unsqueeze(1)
        return b, h, q_idx, torch.arange(cols.start, cols.stop, device=device)

    def kv_idx(self, col: int) -> Tensor:
        """Return the key indices (s,) of a column tile."""
        span = self.cols[col]
        return torch.arange(span.start, span.stop, device=self.query.device)

    def read(self, weights: Tensor, col: int, visible: Tensor | None = None) -> Tensor:
        """Return weights (B, H, l, s) times the tile's values: (B, H, l, V).

        ``visible`` (B, H, l, s) is needed only in careful mode: non-finite values affect only the rows that see them.
        """
        cols = self.cols[col].slice
        if self.spill is not None and visible is not None:
            weights = torch.where(visible, weights, 0.0)  # already 0; this also zeroes the gradient of hidden weights
        out = self.fold(weights) @ self.value[:, :, cols]
        out = self.unfold(out)
        if self.spill is None or visible is None:
            return out
        folded = self.fold(visible.to(weights.dtype))
        counts = folded @ self.spill[:, :, :, cols].to(weights.dtype)  # (3, B, G, R·l, V)
        nan, plus, minus = (self.unfold(count) > 0 for count in counts)
        return (
            out
            + torch.where(nan, torch.nan, 0.0)
            + torch.where(plus, torch.inf, 0.0)
            - torch.where(minus, torch.inf, 0.0)
        )

    @property
    def _group(self) -> int:
        return self.query.shape[1] // max(self.key.shape[1], 1)

    def fold(self, tensor: Tensor) -> Tensor:
        """Return (B, H, l, x) as (B, G, R·l, x): the query heads of a group become rows of its key head."""
        B, H, rows, width = tensor.shape
        G = self.key.shape[1]
        return tensor if G in (H, 0) else tensor.reshape(B, G, H // G * rows, width)

    def unfold(self, tensor: Tensor) -> Tensor:
        """Undo :meth:`fold`."""
        B, G, rows, width = tensor.shape
        H = self.query.shape[1]
        return tensor if G in (H, 0) else tensor.reshape(B, H, rows // (H // G), width)

    def _compared(self, query: Tensor, key: Tensor) -> Tensor:
        query = self.fold(query)
        found = self.score.compare(query, key)
        if not isinstance(found, Tensor) or found.shape != (*query.shape[:3], key.shape[2]):
            expected = f"return scores (..., L, S) of query {shape(query)} and key {shape(key)}"
            raise _wrong(f"{type(self.score).__name__}.compare", expected, found)
        return self.unfold(found)

    def _masked(self, scores: Tensor, row: int, col: int, index: tuple[Tensor, ...]) -> Tensor:
        if self.mask is None or self.states is None:
            return scores
        if self.mask.has_bias:
            bias = self.mask.bias(*index)
            scores = scores if bias is None else scores + bias
        if self.states[row][col] == FULL:
            return scores
        visible = self.mask.visible(*index)
        return scores if visible is None else torch.where(visible, scores, -torch.inf)

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the parts."""
        parts = [part for part in (self.score, self.mask, self.normalizer) if part is not None]
        return [tensor for part in parts for tensor in part.tensors()]

    def around(self, query: Tensor, key: Tensor, value: Tensor, *tensors: Tensor) -> Tiles:
        """Return the same tiles around other tensors, in the order of :meth:`tensors`."""
        remaining = list(tensors)

        def take(_: Tensor) -> Tensor:
            return remaining.pop(0)

        score = self.score.map_tensors(take)
        mask = None if self.mask is None else self.mask.map_tensors(take)
        normalizer = self.normalizer.map_tensors(take)
        return replace(self, query=query, key=key, value=value, score=score, mask=mask, normalizer=normalizer)


def is_harmless(tensor: Tensor) -> Tensor:
    """Return which elements are finite and too small for products to overflow."""
    limit = torch.finfo(tensor.dtype).max
    return tensor.abs() <= (limit if tensor.dtype == torch.float16 else limit**0.5)


def _zero_unused(key: Tensor, value: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """Zero keys and values that no query sees, if some are so large that products overflow."""
    mask, large = problem.mask, [bool((t.isfinite() & ~is_harmless(t)).any()) for t in (key, value) if not is_traced(t)]
    if mask is None or not any(large):
        return key, value
    B, G, S = key.shape[:3]
    used = mask.visible_keys(problem.extent).to(key.device)  # a mask without tensors answers on the CPU
    used = used.expand(B, problem.extent.H, S).reshape(B, G, -1, S).any(2).unsqueeze(-1)
    return torch.where(used, key, 0.0), torch.where(used, value, 0.0)


def _cleared(query: Tensor, problem: Problem) -> Tensor:
    """Zero non-finite elements of queries without visible keys."""
    if problem.mask is None or is_traced(query) or bool(query.isfinite().all()):
        return query
    some = problem.mask.nonempty_rows(problem.extent).to(query.device).unsqueeze(-1)
    return torch.where(query.isfinite() | some, query, 0.0)


def states_of(mask: Mask, problem: Problem, shape: tuple[int, int], counts: tuple[int, int]) -> list[list[int]]:
    """Return the state of each tile over all sequences and heads: EMPTY or FULL only if all of them agree."""
    extent = problem.extent
    query = problem.query
    unknown = torch.compiler.is_compiling() or is_fake(query) or (is_traced(query) and not mask.is_structural)
    if unknown:  # control flow cannot depend on values
        return [[MIXED] * counts[1]] * counts[0]
    return BlockMask.of(mask, extent, *shape).over_heads()


# What parts of the user's own return ----------------------------------------------------------------------------------


def weighed(normalizer: Normalizer, scores: Tensor) -> Tensor:
    """Return the weights of whole rows of scores; raise if the normalizer returns anything else."""
    found = normalizer.weights(scores)
    if not isinstance(found, Tensor) or found.shape != scores.shape:
        raise _wrong(
            f"{type(normalizer).__name__}.weights", f"return weights in the shape of scores, {shape(scores)}", found
        )
    return found


def _wrong(method: str, expected: str, found: object) -> Exception:
    got = f"shape {shape(found)}" if isinstance(found, Tensor) else described(found)
    return rejected("attention", method, expected, got, ValueError if isinstance(found, Tensor) else TypeError)
