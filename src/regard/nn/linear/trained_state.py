"""A state that is the weights of a small network, which gradient descent trains on each block of steps.

Dimensions: B batch, L steps, H heads, M = B·H, D width of queries, keys and values, N blocks, C steps of a block, P
numbers of a head's network. The weights of a network are one matrix (K, V) for each of its layers, whose last row is
the bias if there is one; between layers is GELU. R is 2 where there is momentum, which lies below the weights in one
matrix (2·K, V), and else 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard._utils.tracing import is_traced
from regard.engines.dense import is_finite
from regard.nn.linear.layout import Layout
from regard.nn.linear.recurrence import document_starts, substituted

#: One matrix (M, R·K, V) for each layer of the network.
Weights = tuple[Tensor, ...]

#: Blocks read their networks together until these have so many numbers: copies cost memory, calls cost time.
_TOGETHER = 1 << 18


class Training(NamedTuple):
    """How the network learns.

    With W at the start of a block and the gradient ``g_j`` of step j's loss at W, after step t of the block

        A ← e^{log_decay} A + S,   S ← e^{log_momentum} S − rate · g_t          (A is W at the start of a block)

    and step t reads the network with weights ``W + share · (A − W)``. Those of its last step are W of the next block.
    Without momentum, S is the last term alone. Stepwise, ``g_t`` is the gradient at A before step t.

    Attributes
    ----------
    rate : Tensor (B, H, L)
    log_decay, log_momentum : Tensor (B, H, L), optional
        Both or neither.
    share : Tensor (B, H, L), optional
        None is 1. Only without decay and momentum.
    bias : bool
        Whether the last row of each matrix is a bias.
    norm : pair of Tensor (H, D), optional
        Scale γ and shift β: the loss is ``½ |k + LN(f(k)) γ + β − v|²``; None is ``½ |f(k) − v|²``.
    norm_eps : float
    stepwise : bool
        Only of one matrix with momentum, without bias and norm: then blocks are but a way to compute it.
    """

    rate: Tensor
    log_decay: Tensor | None = None
    log_momentum: Tensor | None = None
    share: Tensor | None = None
    bias: bool = False
    norm: tuple[Tensor, Tensor] | None = None
    norm_eps: float = 1e-6
    stepwise: bool = False


class Trained(NamedTuple):
    """The weights after the last step and the momentum, and the weights at the start of the block.

    Attributes
    ----------
    held : tuple of Tensor (M, R·K, V)
    start : tuple of Tensor (M, K, V) or (M, R·K, V), or None
        None if they are those of ``held``. A momentum is not read.
    """

    held: Weights
    start: Weights | None = None

    @classmethod
    def unpacked(cls, initial: Sequence[Tensor], batch: int, momentum: bool, state: Tensor | None) -> Trained:
        """Return the weights of a state (B, H, 2 or 3, P), differences to initial ones (H, K, V); None is zeros."""
        first = [each.expand(batch, *each.shape).flatten(0, 1) for each in initial]
        if state is None:
            return cls(tuple(F.pad(each, (0, 0, 0, each.shape[1])) if momentum else each for each in first))
        sizes = [each[0].numel() for each in first]
        *start, current = rows = [
            tuple(part.unflatten(-1, each.shape[1:]) for part, each in zip(row.split(sizes, -1), first))
            for row in state.flatten(0, 1).unbind(1)
        ]
        if momentum:
            *start, current, pushed = rows
        held = tuple(a + b for a, b in zip(current, first))
        if momentum:
            held = tuple(torch.cat(each, 1) for each in zip(held, pushed))
        return cls(held, tuple(a + b for a, b in zip(start[0], first)) if start else None)

    def packed(self, initial: Sequence[Tensor], batch: int, stepwise: bool = False) -> Tensor:
        """Return the state (B, H, R + 1, P): stepwise (B, H, R, P), as each block is complete."""
        H, sizes = len(initial[0]), [each.shape[1] for each in initial]
        first = [each.expand(batch, *each.shape).flatten(0, 1) for each in initial]
        parts = list(zip(*(each.split(size, 1) for each, size in zip(self.held, sizes))))
        current = [a - b for a, b in zip(parts[0], first)]
        start = current if self.start is None else [a[:, : b.shape[1]] - b for a, b in zip(self.start, first)]
        rows = [*([] if stepwise else [start]), current, *parts[1:]]
        flat = [torch.cat([each.flatten(1) for each in row], -1) for row in rows]
        return torch.stack(flat, 1).unflatten(0, (batch, H))

    def opened(self, initial: Sequence[Tensor], fresh: Tensor | None) -> Trained:
        """Return these weights, and the initial ones for the sequences (B,) that begin a document."""
        if fresh is None:
            return self
        momentum, batch = self.held[0].shape[1] > initial[0].shape[1], fresh.shape[0]
        first = Trained.unpacked(initial, batch, momentum, None).held
        start = None if self.start is None else _mixed(fresh, first, self.start)
        return Trained(_mixed(fresh, first, self.held), start)

    def after(self, found: Gradients, block: Block, ends: bool | Tensor) -> Trained:
        """Return the weights after a block with these gradients, which is complete in some of the sequences (B,)."""
        folded = block.last if ends is True and self.start is None else None
        current = []
        for i, (matrix, grad) in enumerate(zip(self.held, found.slopes)):
            rows = spread(found.inputs[i - 1], block.moved) if i else block.spread
            if block.transfer is not None:
                parts = matrix.unflatten(1, (block.transfer.shape[-1], -1)).flatten(2)
                matrix = (block.transfer @ parts).view_as(matrix)
            moved = grad if folded is None else grad * folded
            current.append(torch.baddbmm(matrix, rows.transpose(1, 2), moved, alpha=-1))
        held, start = tuple(current), self.held if self.start is None else self.start
        if block.last is None or folded is not None:
            after = held
        else:
            after = tuple(torch.lerp(a, b, block.last) for a, b in zip(start, held))
        if ends is True:
            return Trained(after)
        if ends is False:
            return Trained(held, start)
        return Trained(_mixed(ends, after, held), _mixed(ends, after, start))


def _mixed(chosen: Tensor, weights: Weights, others: Weights) -> Weights:
    """Return weights for the sequences (B,) that are chosen, and others for the rest; of both what the others have."""
    of_heads = chosen.repeat_interleave(others[0].shape[0] // chosen.shape[0] if chosen.shape[0] else 1).view(-1, 1, 1)
    return tuple(torch.where(of_heads, a[:, : b.shape[1]], b) for a, b in zip(weights, others))


# The network: its outputs, and the gradient of its loss ---------------------------------------------------------------


def with_bias(rows: Tensor, bias: bool) -> Tensor:
    """Return rows with a 1 for the bias, if there is one."""
    return F.pad(rows, (0, 1), value=1.0) if bias else rows


def heightened(rows: Tensor, matrix: Tensor) -> Tensor:
    """Return rows (…, C, K) with zeros for the momentum of a matrix (…, R·K, V): slices of it have slow gradients."""
    missing = matrix.shape[-2] - rows.shape[-1]
    return F.pad(rows, (0, missing)) if missing else rows


def recalled(memory: Trained, rows: Tensor) -> Tensor:
    """Return the outputs (M, C, D) of the network at the start of the block, which has no biases, for such rows."""
    for i, matrix in enumerate(memory.held if memory.start is None else memory.start):
        rows = F.gelu(rows, approximate="tanh") if i else rows
        rows = heightened(rows, matrix) @ matrix
    return rows


def _gelu(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return GELU in its tanh form, z · σ(z (a + b z²)), and its derivative."""
    a = 2 * math.sqrt(2 / math.pi)
    b, square = 0.044715 * a, z * z
    half = torch.sigmoid(z * (a + b * square))
    found = z * half
    return found, torch.addcmul(half, found * (1 - half), a + 3 * b * square)


class Targets(NamedTuple):
    """What the network's outputs should be, as far as it does not depend on them."""

    rows: Tensor  # (…, C, D)
    scale: Tensor | None = None  # (M, 1, D), squares of γ
    eps: float = 0.0

    @classmethod
    def of(cls, key: Tensor, value: Tensor, how: Training) -> Targets:
        """Return those of keys and values (…, M, C, D)."""
        if how.norm is None:
            return cls(value)
        scale, shift = (each.repeat(key.shape[-3] // len(each), 1).unsqueeze(1) for each in how.norm)
        return cls((key - value + shift) * scale, scale.square(), how.norm_eps)

    def gradient(self, found: Tensor, rows: Tensor) -> Tensor:
        """Return the gradient of each step's loss (M, C, D) by the outputs, where ``rows`` are those of the block."""
        if self.scale is None:
            return found - rows
        centred = found - found.mean(-1, keepdim=True)
        inverse = torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.eps)
        unit = centred * inverse
        grad = torch.addcmul(rows, unit, self.scale)
        grad = grad - grad.mean(-1, keepdim=True)
        return torch.addcmul(grad, unit, (grad * unit).mean(-1, keepdim=True), value=-1) * inverse


class Gradients(NamedTuple):
    """What a block's gradients are made of: step j's by a layer's matrix is ``x_jᵀ g_j``.

    Attributes
    ----------
    inputs : tuple of Tensor (M, C, K)
        Rows x of each layer but the first, whose are the keys.
    slopes : tuple of Tensor (M, C, V)
        Rows g of each layer.
    """

    inputs: tuple[Tensor, ...]
    slopes: tuple[Tensor, ...]


def gradients(memory: Trained, keys: Tensor, goal: Tensor, targets: Targets, bias: bool) -> Gradients:
    """Return the gradients of a block by the weights at its start.

    ``keys`` (M, C, R·K) are what the first matrix multiplies, ``goal`` is the block of the targets' rows.
    """
    matrices = memory.held if memory.start is None else memory.start
    sums, inputs, slopes = keys[..., : matrices[0].shape[1]] @ matrices[0], [], []
    for matrix in matrices[1:]:
        active, slope = _gelu(sums)
        inputs.append(with_bias(active, bias))
        slopes.append(slope)
        sums = heightened(inputs[-1], matrix) @ matrix
    found = [targets.gradient(sums, goal)]
    for matrix, slope in zip(matrices[:0:-1], reversed(slopes)):
        found.append((found[-1] @ matrix.transpose(1, 2))[..., : slope.shape[-1]] * slope)
    return Gradients(tuple(inputs), tuple(reversed(found)))


# What the steps of a block add up to ----------------------------------------------------------------------------------


class Block(NamedTuple):
    """How one block moves the matrices: rows of :class:`Sums`."""

    spread: Tensor  # (M, C, R·K), keys times ``moved``
    moved: Tensor  # (M, C, R)
    transfer: Tensor | None = None  # (M, R, R)
    last: Tensor | None = None  # (M, 1, 1), the share of the last step


class Sums(NamedTuple):
    """What reads and moves the matrices X (R·K, V) of blocks, whose steps have inputs x and gradients g.

    The weights that step t reads with are ``Σ_r kept_tr X_r − Σ_j written_tj x_jᵀ g_j``, and the matrix after the block
    is ``Σ_s transfer_rs X_s − Σ_j moved_jr x_jᵀ g_j``.
    """

    written: Tensor  # (N, M, C, C)
    moved: Tensor  # (N, M, C, R)
    kept: Tensor | None = None  # (N, M, C, R); None is 1
    transfer: Tensor | None = None  # (N, M, R, R); None is 1
    share: Tensor | None = None  # (N, M, C, 1) of steps
    last: Tensor | None = None  # (N, M, 1, 1) of last steps

    def split(self, count: int) -> list[Sums]:
        """Return the sums of so many blocks each."""
        parts = ([None] * len(self.written) if each is None else each.split(count) for each in self)
        return [Sums(*each) for each in zip(*parts)]

    def blocks(self, keys: Tensor) -> list[Block]:
        """Return how each block moves the matrices, from what the first one multiplies (N, M, C, K)."""
        given = spread(keys, self.moved), self.moved, self.transfer, self.last
        parts = ([None] * len(keys) if each is None else each.unbind() for each in given)
        return [Block(*each) for each in zip(*parts)]


def _spans(log: Tensor) -> Tensor:
    """Return the products (…, C, C) of exp(log) over steps from after j to i, 0 for j > i."""
    C = log.shape[-1]
    if C == 1:
        return torch.ones_like(log).unsqueeze(-1)
    ones = torch.ones(C, C, dtype=torch.bool, device=log.device)
    total = torch.where(ones.tril(-1), log.unsqueeze(-1), 0.0).cumsum(-2)
    return torch.where(ones.tril(), total.exp(), 0.0)


def last_of(rows: Tensor, steps: Tensor) -> Tensor:
    """Return the row (N, M, 1, V) of the last of so many steps (N, M or 1); of none, the first."""
    if rows.shape[2] == 1:
        return rows
    index = (steps - 1).clamp(min=0).view(*steps.shape, 1, 1)
    return rows.gather(2, index.expand(*rows.shape[:2], 1, rows.shape[-1]))


def sums_of(
    rate: Tensor, log_decay: Tensor | None, log_momentum: Tensor | None, share: Tensor | None, steps: Tensor
) -> Sums:
    """Return the sums of blocks with rates, decays, momenta and shares (N, M, C), and so many steps (N, M or 1)."""
    some = (steps > 0).view(*steps.shape, 1, 1)
    if log_decay is None or log_momentum is None:
        written = rate.unsqueeze(-2) * torch.ones(rate.shape[-1:] * 2, dtype=rate.dtype, device=rate.device).tril()
        moved = torch.where(some, last_of(written, steps), 0.0).transpose(2, 3)
        if share is None:
            return Sums(written, moved)
        share = share.unsqueeze(-1)
        return Sums(share * written, moved, None, None, share, last_of(share, steps))
    pushed, decay = rate.unsqueeze(-2) * _spans(log_momentum), _spans(log_decay)
    left, kept = (each.cumsum(-1).exp().unsqueeze(-1) for each in (log_momentum, log_decay))
    written, kept = decay @ pushed, torch.cat([kept, decay @ left], -1)
    moved = torch.cat([last_of(written, steps), last_of(pushed, steps)], 2)
    transfer = torch.cat([last_of(kept, steps), F.pad(last_of(left, steps), (1, 0))], 2)
    one = torch.eye(2, dtype=rate.dtype, device=rate.device)
    return Sums(written, torch.where(some, moved, 0.0).transpose(2, 3), kept, torch.where(some, transfer, one))


def stepwise(keys: Tensor, values: Tensor, sums: Sums) -> tuple[Tensor, Tensor]:
    """Return rows a (N, M, C, 2·K) and b (N, M, C, V) of blocks with keys (N, M, C, K) and values.

    The gradients ``g = a X − b`` by one matrix X are then those at the weights before each step, ``g_t = k_t A_{t−1} −
    v_t``: as ``A_{t−1} = Σ_r kept_{t−1,r} X_r − Σ_{j<t} written_{t−1,j} k_jᵀ g_j``, they solve a triangular system.
    """
    assert sums.kept is not None
    if keys.shape[-2] == 1:
        return F.pad(keys, (0, keys.shape[-1])), values
    steps = torch.arange(keys.shape[-2], device=keys.device)
    before = (steps - 1).clamp(min=0)
    below = (sums.written.index_select(2, before) * (keys @ keys.transpose(-2, -1))).tril(-1)
    one = torch.tensor([1.0, 0.0], dtype=keys.dtype, device=keys.device)
    kept = torch.where(steps.unsqueeze(-1) > 0, sums.kept.index_select(2, before), one)
    rows = torch.cat([spread(keys, kept), values], -1)
    a, b = substituted(below, rows).split([2 * keys.shape[-1], values.shape[-1]], -1)
    return a, b


def spread(rows: Tensor, factors: Tensor) -> Tensor:
    """Return rows (…, C, R·K): rows (…, C, K) times each of the factors (…, C, R)."""
    found = [rows * each for each in factors.split(1, -1)]
    return found[0] if len(found) == 1 else torch.cat(found, -1)


def read(rows: Tensor, keys: Tensor, sums: Sums, memories: list[Trained], found: list[Gradients], bias: bool) -> Tensor:
    """Return what queries (N, M, C, D) read in the networks of N blocks, each as the steps up to its own have it.

    ``keys`` (N, M, C, K) are what the first matrix multiplies.
    """

    def together(tensors: list[Tensor]) -> Tensor:
        return torch.stack(tensors) if len(tensors) > 1 else tensors[0].unsqueeze(0)

    share = sums.share if any(each.start is not None for each in memories) else None
    for i in range(len(memories[0].held)):
        held = together([each.held[i] for each in memories])
        inputs = together([each.inputs[i - 1] for each in found]) if i else keys
        rows = with_bias(F.gelu(rows, approximate="tanh") if i else rows, bias)
        first = (rows if sums.kept is None else spread(rows, sums.kept)) @ held
        if share is not None:
            start = together([(each.held if each.start is None else each.start)[i] for each in memories])
            first = torch.lerp(rows @ start, first, share)
        rows = first - (sums.written * (rows @ inputs.transpose(-2, -1))) @ together([each.slopes[i] for each in found])
    return rows


# Blocks ---------------------------------------------------------------------------------------------------------------


class Blocks:
    """Where the steps of sequences lie within blocks, which begin anew with each document and leave out padding.

    Parameters
    ----------
    layout : Layout
    rows : Tensor (B, H, L, D)
        For sizes.
    block : int
        Steps C of a block.
    before : Tensor (B,) of int, optional
        Steps of the current block in the state.

    Attributes
    ----------
    place : Tensor (B, L)
        The number of each step within its block.
    count : Tensor (B,)
        Steps of the last block, from 0 to C − 1.
    number, width : int
        Number N of blocks, and most steps C of one in this call.
    steps : Tensor (N, B or 1)
        Number of steps of each block in this call.
    begun : Tensor (N, B or 1)
        Number of its earlier steps, which the state knows.
    ends : list of bool or Tensor (B,)
        Whether each block is complete.
    fresh : list of Tensor (B,), or None
        Whether each block begins a document and the state is not its own; None if none does.
    """

    def __init__(self, layout: Layout, rows: Tensor, block: int, before: Tensor | None) -> None:
        (B, H, L, _), device = rows.shape, rows.device
        place, length = layout.places(rows, before)
        self.layout, self.block, self.heads, self.length = layout, block, H, L
        self.place, self.count, self.width = place % block, length % block, min(block, L)
        self._source: Tensor | None = None
        self.fresh: list[Tensor | None]
        if layout.real is None and layout.runs is None and (before is None or L <= 1):
            self.number = N = 1 if 0 < L <= block else -(-L // block)
            self.steps = torch.full((N, 1), block, device=device)
            self.steps[-1:] = L - (N - 1) * block
            self.begun = torch.zeros_like(self.steps) if before is None else before.expand(N, B)
            self.fresh, complete = [None] * N, [True] * (N - 1) + [L % block == 0] * min(N, 1)
            self.ends = complete if before is None else _known(self.steps + self.begun == block)
            return
        real = torch.ones_like(place, dtype=torch.bool) if layout.real is None else layout.real
        begins = real & (self.place == 0)
        ordinal = begins.cumsum(1) if before is None else begins.cumsum(1) + (before > 0).unsqueeze(1)
        ordinal = (ordinal - 1).clamp(min=0)  # of each step's block
        if layout.runs is None:
            self.number = -(-(L + (0 if before is None else block - 1)) // block) if L else 0
        elif is_traced(rows):
            self.number = L  # as many as there can be
        else:
            self.number = int(ordinal.max()) + 1 if ordinal.numel() else 0
        N, width = self.number, self.width
        skipped = 0 if before is None else torch.where(ordinal == 0, before.unsqueeze(1), 0)
        self._target = torch.where(real, ordinal * width + self.place - skipped, N * width)
        steps = torch.arange(L, device=device).expand(B, L)
        self._source = torch.full((B, N * width + 1), L, device=device).scatter(1, self._target, steps)[:, :-1]
        held, none = torch.where(real, ordinal, N), torch.zeros(B, N + 1, dtype=torch.long, device=device)
        self.steps = none.scatter_add(1, held, torch.ones_like(held))[:, :N].T
        self.begun = torch.zeros_like(self.steps)
        if before is not None and N:
            self.begun = torch.cat([before.unsqueeze(0), self.begun[1:]])
        self.ends = _known(self.steps + self.begun == block)
        self.fresh = [None] * N
        if layout.runs is not None:
            starts = document_starts("Blocks", layout.runs, rows)
            assert starts is not None
            fresh = none.scatter_add(1, torch.where(starts, ordinal, N), torch.ones_like(held))[:, :N].T > 0
            self.fresh = [None if each is False else fresh[n] for n, each in enumerate(_known(fresh))]

    def split(self, rows: Tensor) -> Tensor:
        """Return rows (B, H, L, ...) by block, (N, M, C, ...); zeros in the places of no step."""
        rest = [0, 0] * (rows.dim() - 3)
        if self._source is not None:
            rows = F.pad(rows, (*rest, 0, 1))
            rows = rows.gather(2, _like(self._source, rows))
        elif missing := self.number * self.width - self.length:
            rows = F.pad(rows, (*rest, 0, missing))
        return rows.unflatten(2, (self.number, self.width)).movedim(2, 0).flatten(1, 2)

    def joined(self, blocks: list[Tensor], rows: Tensor) -> Tensor:
        """Return the rows (B, H, L, D) of blocks (N, M, C, D), which are like ``rows``; zeros in padding."""
        if not blocks:
            return torch.zeros_like(rows)
        found = torch.cat(blocks).unflatten(1, rows.shape[:2]).movedim(0, 2).flatten(2, 3)
        if self._source is None:
            return found[:, :, : self.length]
        return F.pad(found, (0, 0, 0, 1)).gather(2, _like(self._target, found))

    def of_heads(self, each: Tensor) -> Tensor:
        """Return what is said of sequences (..., B) for each of their heads (..., M)."""
        return each if each.shape[-1] == 1 else each.repeat_interleave(self.heads, -1)


def _known(each: Tensor) -> list[bool | Tensor]:
    """Return rows (N, B) as what all sequences have in common, where it can be read."""
    if is_traced(each):
        return list(each.unbind())
    kinds = zip(each.all(1).tolist(), each.any(1).tolist(), each.unbind())
    return [True if every else row if some else False for every, some, row in kinds]


def _like(places: Tensor, rows: Tensor) -> Tensor:
    """Return places (B, N) as an index of rows (B, H, L, ...)."""
    places = places.view(places.shape[0], 1, -1, *[1] * (rows.dim() - 3))
    return places.expand(-1, rows.shape[1], -1, *rows.shape[3:])


def finite(layout: Layout, *rows: Tensor | None) -> tuple[list[Tensor | None], Tensor | None]:
    """Return rows (B, H, L, ...) without steps that are not finite, and which steps (B, H, L) are after one.

    A block would spread them to its earlier steps. With the steps after one, of the same document, count the step
    itself. None if all are finite, and under tracers, which cannot afford it.
    """
    given = [each for each in rows if each is not None]
    if is_traced(given[0]) or (given[0].is_cpu and all(is_finite(each) for each in given)):
        return list(rows), None
    right = torch.stack([each.isfinite().flatten(3).all(-1) if each.dim() > 3 else each.isfinite() for each in given])
    right = right.all(0)
    cleared = [
        None if each is None else torch.where(right.view(*right.shape, *[1] * (each.dim() - 3)), each, 0.0)
        for each in rows
    ]
    steps = torch.arange(right.shape[-1], device=right.device)
    latest = torch.where(right, -1, steps).cummax(-1).values
    starts = document_starts("finite", layout.runs, given[0])
    first = 0 if starts is None else torch.where(starts, steps, 0).cummax(-1).values.unsqueeze(1)
    return cleared, latest >= first


def trained_recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    initial: Sequence[Tensor],
    how: Training,
    blocks: Blocks,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what each step reads in the network that the steps up to it have trained, and the state.

    Parameters
    ----------
    query, key, value : Tensor (B, H, L, D)
    initial : sequence of Tensor (H, K, V)
        The weights before the first step of a document.
    how : Training
    blocks : Blocks
    state : Tensor (B, H, 2 or 3, P), optional
        After earlier steps: the weights at the start of the current block (but stepwise) and now, less the initial
        ones, and the momentum.

    Returns
    -------
    output : Tensor (B, H, L, D)
    state : Tensor
    """
    given, spoiled = finite(blocks.layout, key, value, how.rate, how.log_decay, how.log_momentum, how.share)
    keys, values, *gates = (None if each is None else blocks.split(each) for each in given)
    rate, log_decay, log_momentum, share = gates
    assert keys is not None and values is not None and rate is not None
    steps, queries = blocks.of_heads(blocks.steps), blocks.split(query)
    sums = sums_of(rate, log_decay, log_momentum, share, steps)
    targets = Targets.of(keys, values, how)
    initial = [each.to(query.dtype) for each in initial]
    memory = Trained.unpacked(initial, query.shape[0], log_momentum is not None, state)
    inputs = with_bias(keys, how.bias)
    if how.stepwise:
        first, goals = stepwise(keys, values, sums)
    else:
        first, goals = heightened(inputs, memory.held[0]), targets.rows
    moves = sums.blocks(inputs)
    numbers = sum(each.numel() for each in memory.held) if blocks.number > 1 else _TOGETHER
    together = max(1, _TOGETHER // max(1, numbers))
    several = zip(queries.split(together), inputs.split(together), sums.split(together))
    output: list[Tensor] = []
    memories: list[Trained] = []
    found: list[Gradients] = []
    for n, (rows, goal, move) in enumerate(zip(first.unbind(), goals.unbind(), moves)):
        memory = memory.opened(initial, blocks.fresh[n])
        memories.append(memory)
        found.append(gradients(memory, rows, goal, targets, how.bias))
        memory = memory.after(found[-1], move, how.stepwise or blocks.ends[n])
        if len(memories) == together or n == blocks.number - 1:
            output.append(read(*next(several), memories, found, how.bias))
            memories, found = [], []
    return spoil(blocks.joined(output, query), memory.packed(initial, query.shape[0], how.stepwise), spoiled)


def spoil(output: Tensor, matrix: Tensor, steps: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return an output (B, H, L, D) and a state that are NaN from the first of some steps (B, H, L) on."""
    if steps is None or not output.shape[2]:
        return output, matrix
    output = torch.where(steps.unsqueeze(-1), torch.nan, output)
    return output, torch.where(steps[:, :, -1, None, None], torch.nan, matrix)
