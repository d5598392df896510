"""A state that is the weights of a small network, which gradient descent trains on each block of steps.

Dimensions: B batch, L steps, H heads, D width of queries, keys and values, N blocks, C steps of a block, P numbers of
a head's network. The weights of a network are one matrix (K, V) for each of its layers, whose last row is the bias if
there is one; between layers is GELU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard._utils.tracing import is_traced
from regard.nn.linear.layout import Layout
from regard.nn.linear.recurrence import document_starts

#: One matrix (B, H, K, V) for each layer of the network.
Weights = tuple[Tensor, ...]


class Training(NamedTuple):
    """How the network learns.

    With W at the start of a block and the gradient ``g_j`` of step j's loss at W, after step t of the block

        A ← e^{log_decay} A + S,   S ← e^{log_momentum} S − rate · g_t          (A is W at the start of a block)

    and step t reads the network with weights ``W + share · (A − W)``. Those of its last step are W of the next block.
    Without momentum, S is the last term alone.

    Attributes
    ----------
    block : int
        Steps C of a block.
    rate : Tensor (B, H, L)
    log_decay, log_momentum : Tensor (B, H, L), optional
    share : Tensor (B, H, L), optional
        None is 1. Only without decay and momentum.
    bias : bool
        Whether the last row of each matrix is a bias.
    norm : pair of Tensor (H, D), optional
        Scale γ and shift β: the loss is ``½ |k + LN(f(k)) γ + β − v|²``; None is ``½ |f(k) − v|²``.
    norm_eps : float
    """

    block: int
    rate: Tensor
    log_decay: Tensor | None = None
    log_momentum: Tensor | None = None
    share: Tensor | None = None
    bias: bool = False
    norm: tuple[Tensor, Tensor] | None = None
    norm_eps: float = 1e-6


class Trained(NamedTuple):
    """The weights at the start of a block, those after the last step (None if they are the same), and the momentum."""

    start: Weights
    moved: Weights | None = None
    momentum: Weights | None = None

    @property
    def current(self) -> Weights:
        """The weights after the last step."""
        return self.start if self.moved is None else self.moved

    @classmethod
    def unpacked(cls, initial: Sequence[Tensor], batch: int, momentum: bool, state: Tensor | None) -> Trained:
        """Return the weights of a state (B, H, 2 or 3, P), differences to initial ones (H, K, V); None is zeros."""
        if state is None:
            first = tuple(each.expand(batch, *each.shape) for each in initial)
            return cls(first, None, tuple(torch.zeros_like(each) for each in first) if momentum else None)
        sizes = [each[0].numel() for each in initial]
        rows = [
            tuple(part.unflatten(-1, each.shape[1:]) for part, each in zip(row.split(sizes, -1), initial))
            for row in state.unbind(2)
        ]
        start, current = (tuple(a + b for a, b in zip(row, initial)) for row in rows[:2])
        return cls(start, current, rows[2] if momentum else None)

    def opened(self, initial: Sequence[Tensor], fresh: Tensor | None) -> Trained:
        """Return these weights, and the initial ones for the sequences (B,) that begin a document."""
        if fresh is None:
            return self
        return Trained.unpacked(initial, len(fresh), self.momentum is not None, None).where(fresh, self)

    def packed(self, initial: Sequence[Tensor]) -> Tensor:
        """Return the state (B, H, 2 or 3, P)."""
        rows = [[a - b for a, b in zip(row, initial)] for row in (self.start, self.current)]
        rows += [] if self.momentum is None else [list(self.momentum)]
        return torch.stack([torch.cat([each.flatten(-2) for each in row], -1) for row in rows], 2)

    def where(self, chosen: Tensor, other: Trained) -> Trained:
        """Return these weights for the sequences (B,) that are chosen, and others for the rest."""
        chosen = chosen.view(-1, 1, 1, 1)

        def mixed(a: Weights | None, b: Weights | None) -> Weights | None:
            return None if a is None or b is None else tuple(torch.where(chosen, x, y) for x, y in zip(a, b))

        start = mixed(self.start, other.start)
        assert start is not None
        moved = None if self.moved is None and other.moved is None else mixed(self.current, other.current)
        return Trained(start, moved, mixed(self.momentum, other.momentum))


# The network: its outputs, and the gradient of its loss ---------------------------------------------------------------


def _inputs(rows: Tensor, bias: bool) -> Tensor:
    """Return what a layer's matrix multiplies: rows, with a 1 for the bias."""
    return F.pad(rows, (0, 1), value=1.0) if bias else rows


def network(weights: Weights, rows: Tensor, bias: bool) -> Tensor:
    """Return the outputs (B, H, L, D) of the network for rows (B, H, L, D)."""
    for i, matrix in enumerate(weights):
        rows = _inputs(F.gelu(rows, approximate="tanh") if i else rows, bias) @ matrix
    return rows


def _slope(z: Tensor) -> Tensor:
    """Return the derivative of GELU in its tanh form."""
    root = math.sqrt(2 / math.pi)
    wave = torch.tanh(root * (z + 0.044715 * z**3))
    return 0.5 * (1 + wave) + 0.5 * z * (1 - wave.square()) * root * (1 + 3 * 0.044715 * z.square())


def _loss_gradient(found: Tensor, key: Tensor, value: Tensor, how: Training) -> Tensor:
    """Return the gradient of each step's loss (B, H, C, D) by the network's outputs."""
    if how.norm is None:
        return found - value
    scale, shift = (each.unsqueeze(-2) for each in how.norm)
    centred = found - found.mean(-1, keepdim=True)
    inverse = torch.rsqrt(centred.square().mean(-1, keepdim=True) + how.norm_eps)
    unit = centred * inverse
    grad = (unit * scale + shift - (value - key)) * scale
    return (grad - grad.mean(-1, keepdim=True) - unit * (grad * unit).mean(-1, keepdim=True)) * inverse


def _gradients(weights: Weights, key: Tensor, value: Tensor, how: Training) -> list[tuple[Tensor, Tensor]]:
    """Return rows x and g for each layer: step j's gradient by the layer's matrix is ``x_jᵀ g_j``."""
    inputs, sums = [], [key]
    for i, matrix in enumerate(weights):
        inputs.append(_inputs(F.gelu(sums[-1], approximate="tanh") if i else key, how.bias))
        sums.append(inputs[-1] @ matrix)
    found = [_loss_gradient(sums[-1], key, value, how)]
    for i in range(len(weights) - 1, 0, -1):
        matrix = weights[i][..., :-1, :] if how.bias else weights[i]
        found.append((found[-1] @ matrix.transpose(-2, -1)) * _slope(sums[i]))
    return list(zip(inputs, reversed(found)))


# What the steps of a block add up to ----------------------------------------------------------------------------------


class Sums(NamedTuple):
    """A and S after none, one, … and all C steps of a block, from those before it, written a and s, and gradients g.

    ``A_t = kept_t a + carried_t s − Σ_j written_tj g_j`` and ``S_t = left_t s − Σ_j pushed_tj g_j``.
    """

    written: Tensor  # (B, H, N, C + 1, C)
    kept: Tensor | None = None  # (B, H, N, C + 1)
    carried: Tensor | None = None
    left: Tensor | None = None
    pushed: Tensor | None = None

    def of(self, n: int) -> Sums:
        """Return those of one block."""
        return Sums(*(None if each is None else each[:, :, n] for each in self))  # type: ignore[arg-type]

    def at(self, step: Tensor | None) -> Sums:
        """Return those after so many steps (B,), with one row; None is all of them."""
        if step is None:
            return Sums(*(None if each is None else each[:, :, -1:] for each in self))  # type: ignore[arg-type]
        place = step.view(-1, 1, 1)
        found = []
        for each in self:
            if each is not None:
                wide = place if each.dim() == 3 else place.unsqueeze(-1)
                each = each.gather(2, wide.expand(*each.shape[:2], 1, *each.shape[3:]))
            found.append(each)
        return Sums(*found)  # type: ignore[arg-type]


def _spans(log: Tensor) -> Tensor:
    """Return the products (…, C, C) of exp(log) over steps from after j to i, 0 for j > i."""
    C = log.shape[-1]
    ones = torch.ones(C, C, dtype=torch.bool, device=log.device)
    total = torch.where(ones.tril(-1), log.unsqueeze(-1), 0.0).cumsum(-2)
    return torch.where(ones.tril(), total.exp(), 0.0)


def sums_of(rate: Tensor, log_decay: Tensor | None, log_momentum: Tensor | None) -> Sums:
    """Return the sums of blocks with these rates, decays and momenta (B, H, N, C)."""

    def begun(each: Tensor, value: float) -> Tensor:  # with the row of no step
        return F.pad(each, (1, 0), value=value) if each.dim() == rate.dim() else F.pad(each, (0, 0, 1, 0))

    pushed = rate.unsqueeze(-2) * (torch.ones_like(rate).diag_embed() if log_momentum is None else _spans(log_momentum))
    decay = torch.ones_like(pushed).tril() if log_decay is None else _spans(log_decay)
    made = Sums(begun(pushed.cumsum(-2) if log_decay is None else decay @ pushed, 0.0))
    if log_decay is not None:
        made = made._replace(kept=begun(log_decay.cumsum(-1).exp(), 1.0))
    if log_momentum is not None:
        left = log_momentum.cumsum(-1).exp()
        carried = (decay @ left.unsqueeze(-1)).squeeze(-1)
        made = made._replace(carried=begun(carried, 0.0), left=begun(left, 1.0), pushed=begun(pushed, 0.0))
    return made


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
    """

    def __init__(self, layout: Layout, rows: Tensor, block: int, before: Tensor | None) -> None:
        L = rows.shape[2]
        place, length = layout.places(rows, before)
        self.block, self.length, self.place, self.count = block, L, place % block, length % block
        self.width = width = min(block, L)
        self._source: Tensor | None = None
        self._fresh: Tensor | None = None
        self._before = before
        if layout.real is None and layout.runs is None and before is None:
            self.number = -(-L // block)
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
        B, N = rows.shape[0], self.number
        skipped = 0 if before is None else torch.where(ordinal == 0, before.unsqueeze(1), 0)
        self._target = torch.where(real, ordinal * width + self.place - skipped, N * width)
        steps = torch.arange(L, device=rows.device).expand(B, L)
        self._source = torch.full((B, N * width + 1), L, device=rows.device).scatter(1, self._target, steps)[:, :-1]
        held, none = torch.where(real, ordinal, N), torch.zeros(B, N + 1, dtype=torch.long, device=rows.device)
        self._steps = none.scatter_add(1, held, torch.ones_like(held))
        if layout.runs is not None:
            starts = document_starts("Blocks", layout.runs, rows)
            assert starts is not None
            self._fresh = none.scatter_add(1, torch.where(starts, ordinal, N), torch.ones_like(held)) > 0

    def split(self, rows: Tensor) -> Tensor:
        """Return rows (B, H, L, ...) by block, (B, H, N, C, ...); zeros in the places of no step."""
        rest = rows.shape[3:]
        if self._source is None:
            missing = self.number * self.width - self.length
            rows = F.pad(rows, (*[0, 0] * len(rest), 0, missing))
        else:
            rows = F.pad(rows, (*[0, 0] * len(rest), 0, 1))
            rows = rows.gather(2, _like(self._source, rows))
        return rows.unflatten(2, (self.number, self.width))

    def joined(self, blocks: list[Tensor], rows: Tensor) -> Tensor:
        """Return the rows (B, H, L, D) of blocks (B, H, C, D), which are like ``rows``; zeros in padding."""
        if not blocks:
            return torch.zeros_like(rows)
        found = torch.cat(blocks, 2)
        if self._source is None:
            return found[:, :, : self.length]
        return F.pad(found, (0, 0, 0, 1)).gather(2, _like(self._target, found))

    def steps(self, n: int) -> Tensor | None:
        """Return the number of steps (B,) of a block, or None for C."""
        if self._source is not None:
            return self._steps[:, n]
        missing = (n + 1) * self.block - self.length
        return None if missing <= 0 else self.count

    def ends(self, n: int) -> Tensor | None:
        """Return whether a block is complete (B,), or None if it is for all sequences."""
        steps = self.steps(n)
        if steps is None:
            return None
        return steps + self.begun(n) == self.block

    def begun(self, n: int) -> Tensor:
        """Return the number of earlier steps (B,) of a block, which the state knows."""
        return self._before if n == 0 and self._before is not None else torch.zeros_like(self.count)

    def fresh(self, n: int) -> Tensor | None:
        """Return whether a block begins a document (B,) and the state is not its own; None if none does."""
        return None if self._fresh is None else self._fresh[:, n]


def _like(places: Tensor, rows: Tensor) -> Tensor:
    """Return places (B, N) as an index of rows (B, H, L, ...)."""
    places = places.view(len(places), 1, -1, *[1] * (rows.dim() - 3))
    return places.expand(-1, rows.shape[1], -1, *rows.shape[3:])


def finite(layout: Layout, *rows: Tensor | None) -> tuple[list[Tensor | None], Tensor | None]:
    """Return rows (B, H, L, ...) without steps that are not finite, and which steps (B, H, L) are after one.

    A block would spread them to its earlier steps. With the steps after one, of the same document, count the step
    itself. None under tracers, which cannot afford it.
    """
    given = [each for each in rows if each is not None]
    if is_traced(given[0]):
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
    layout: Layout,
    state: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return what each step reads in the network that the steps up to it have trained, and the state.

    Parameters
    ----------
    query, key, value : Tensor (B, H, L, D)
    initial : sequence of Tensor (H, K, V)
        The weights before the first step of a document.
    how : Training
    layout : Layout
        Padding, which neither counts nor trains, and documents.
    state : pair of Tensor (B, H, 2 or 3, P) and (B,), optional
        After earlier steps: the weights at the start of the current block and now, less the initial ones, and the
        momentum; and how many steps of the block there were.

    Returns
    -------
    output : Tensor (B, H, L, D)
    state : pair of Tensor
    """
    blocks = Blocks(layout, key, how.block, None if state is None else state[1])
    given, spoiled = finite(layout, key, value, how.rate, how.log_decay, how.log_momentum, how.share)
    key, value, *gates = (None if each is None else blocks.split(each) for each in given)  # type: ignore[assignment]
    rate, log_decay, log_momentum, share = gates
    assert rate is not None
    sums, queries = sums_of(rate, log_decay, log_momentum), blocks.split(query)
    initial = [each.to(query.dtype) for each in initial]
    memory = Trained.unpacked(initial, len(query), log_momentum is not None, None if state is None else state[0])
    found = []
    for n in range(blocks.number):
        memory = memory.opened(initial, blocks.fresh(n))
        rows = queries[:, :, n], key[:, :, n], value[:, :, n]
        read, memory = learned(memory, *rows, sums.of(n), None if share is None else share[:, :, n], how, blocks, n)
        found.append(read)
    output, matrix = spoil(blocks.joined(found, query), memory.packed(initial), spoiled)
    return output, (matrix, blocks.count)


def spoil(output: Tensor, matrix: Tensor, steps: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return an output (B, H, L, D) and a state that are NaN from the first of some steps (B, H, L) on."""
    if steps is None or not output.shape[2]:
        return output, matrix
    output = torch.where(steps.unsqueeze(-1), torch.nan, output)
    return output, torch.where(steps[:, :, -1, None, None], torch.nan, matrix)


def learned(
    memory: Trained,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sums: Sums,
    share: Tensor | None,
    how: Training,
    blocks: Blocks,
    n: int,
) -> tuple[Tensor, Trained]:
    """Return what the steps of block n read (B, H, C, D), and the weights after them."""
    steps, ends = blocks.steps(n), blocks.ends(n)
    pairs = _gradients(memory.start, key, value, how)
    read = _read(memory, query, pairs, sums, share, how.bias)
    current, momentum = _moved(memory, pairs, sums.at(steps))
    start = current
    if share is not None:
        if steps is None:
            last = share[..., -1:]
        else:
            last = share.gather(-1, (steps - 1).clamp(min=0).view(-1, 1, 1).expand(*share.shape[:2], 1))
        last = last.unsqueeze(-1)
        start = tuple(a + last * (b - a) for a, b in zip(memory.start, current))
    after = Trained(start, None, momentum)
    return read, after if ends is None else after.where(ends, Trained(memory.start, current, momentum))


def _read(
    memory: Trained, rows: Tensor, pairs: list[tuple[Tensor, Tensor]], sums: Sums, share: Tensor | None, bias: bool
) -> Tensor:
    written = sums.written[:, :, 1:]
    for i, (inputs, grad) in enumerate(pairs):
        rows = _inputs(F.gelu(rows, approximate="tanh") if i else rows, bias)
        first = rows @ memory.start[i]
        found = first if memory.moved is None else rows @ memory.current[i]
        if sums.kept is not None:
            found = sums.kept[:, :, 1:, None] * found
        if sums.carried is not None and memory.momentum is not None:
            found = found + sums.carried[:, :, 1:, None] * (rows @ memory.momentum[i])
        found = found - (written * (rows @ inputs.transpose(-2, -1))) @ grad
        rows = found if share is None else first + share.unsqueeze(-1) * (found - first)
    return rows


def _moved(memory: Trained, pairs: list[tuple[Tensor, Tensor]], sums: Sums) -> tuple[Weights, Weights | None]:
    """Return the weights and the momentum after the steps that the sums (B, H, 1, ...) end with."""

    def factor(each: Tensor) -> Tensor:
        return each.unsqueeze(-1)

    current, momentum = [], []
    for i, (inputs, grad) in enumerate(pairs):
        keys = inputs.transpose(-2, -1)
        made = memory.current[i] if sums.kept is None else factor(sums.kept) * memory.current[i]
        if sums.carried is not None and sums.left is not None and sums.pushed is not None:
            assert memory.momentum is not None
            made = made + factor(sums.carried) * memory.momentum[i]
            momentum.append(factor(sums.left) * memory.momentum[i] - (keys * sums.pushed) @ grad)
        current.append(made - (keys * sums.written) @ grad)
    return tuple(current), tuple(momentum) if momentum else None
