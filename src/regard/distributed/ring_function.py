"""Ring attention as an autograd function that merges partial results by log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard._call.plan import choose_engine, resolve_engine, with_graph
from regard._utils.errors import rejected
from regard._utils.tracing import autocast_suspended
from regard.distributed.layouts import Region, Schedule, pieces_of
from regard.distributed.ring import Pending, Ring
from regard.engines import EngineLike
from regard.engines.aux import AuxRequest
from regard.engines.problem import Call, Problem
from regard.engines.tiles import OnlineSoftmax
from regard.functional import attention
from regard.masks import submatrix
from regard.masks.base import Extent, Mask
from regard.normalizers import Normalizer
from regard.scores import Score

# Partial results over some of the keys --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """The parts and settings of an attention call; the mask is bound to the whole problem.

    Attributes
    ----------
    score, mask, normalizer : the parts
    scale, softcap : float or None
    engine : str or Engine
    extent : Extent
        The size of the whole problem.
    """

    score: Score
    mask: Mask | None
    normalizer: Normalizer
    scale: float | None
    softcap: float | None
    engine: EngineLike
    extent: Extent

    @property
    def names_engine(self) -> bool:
        """Whether the caller names an engine, which may refuse; "auto" always finds one."""
        return resolve_engine(self.engine) is not None

    @property
    def moves(self) -> bool:
        """Whether the score depends on positions, and so differs between regions."""
        return self.score.at(0, 1) is not self.score

    def tensors(self) -> list[Tensor]:
        """Return the tensors of all parts."""
        held = (self.score, self.mask, self.normalizer)
        return [tensor for part in held if part is not None for tensor in part.tensors()]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Parts:
        """Return the same parts around other tensors, in the order of :meth:`tensors`."""
        remaining = list(tensors)

        def take(_: Tensor) -> Tensor:
            return remaining.pop(0)

        score = self.score.map_tensors(take)
        mask = None if self.mask is None else self.mask.map_tensors(take)
        return replace(self, score=score, mask=mask, normalizer=self.normalizer.map_tensors(take))

    def at(self, region: Region) -> tuple[Score, Mask | None]:
        """Return score and mask for a region."""
        score = self.score.at(region.first_query, region.first_key)
        if score is None:
            expected = "define Score.at, as it depends on positions"
            raise rejected("ring_attention", "score", expected, repr(self.score))
        if self.mask is None or not region.masked:
            return score, None
        rows = region.first_query, region.rows[1] - region.rows[0]
        keys = region.first_key, region.keys[1] - region.keys[0]
        return score, submatrix(self.mask, self.extent, rows, keys)

    def attend(
        self, region: Region, query: Tensor, key: Tensor, value: Tensor, wants_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output (B, H, l, V) of a region, and the log-sum-exp (B, H, l) of its scores."""
        score, mask = self.at(region)
        output, aux = attention(
            query, key, value, mask, scale=self.scale, enable_gqa=True, score=score, normalizer=self.normalizer,
            softcap=self.softcap, engine=self.engine, return_aux=AuxRequest(lse=wants_lse),
        )  # fmt: skip
        return output, aux.lse

    def attached(self, region: Region, ends: Sequence[Tensor], output: Tensor, lse: Tensor) -> Tensor:
        """Attach a region's rows of the whole output to the graph of the region; ``ends`` are query, key and value."""
        problem = self._problem(region, ends)
        made = with_graph(problem, choose_engine(problem, self.engine), output, lse)
        assert made is not None  # engine 'streaming' supports all mergeable normalizers
        return made

    def check_engine(self, region: Region, ends: Sequence[Tensor]) -> None:
        """Raise if the named engine refuses a region; ``ends`` are tensors like its query, key and value."""
        choose_engine(self._problem(region, ends), self.engine)

    def _problem(self, region: Region, ends: Sequence[Tensor]) -> Problem:
        (query, key, value), (score, mask) = ends, self.at(region)
        return Problem.of(
            Call(query, key, value, mask, 0.0, False, self.scale, True, score, self.normalizer, self.softcap)
        )


class Merged:
    """The rows of a rank, merged from the regions computed so far.

    Parameters
    ----------
    query : Tensor (B, H, L, E)
        In the compute dtype.
    width : int
        Width of the values.
    online : bool
        Whether to merge by log-sum-exp rather than as a plain sum.
    pieces : int
        Number of pieces of the rows; a region covers some of them.
    """

    def __init__(self, query: Tensor, width: int, online: bool, pieces: int) -> None:
        self.online = online
        self.step = query.shape[2] // pieces
        self.sum = query.new_zeros(*query.shape[:3], 0 if online else width)
        self.states = [
            OnlineSoftmax(query.new_zeros(*query.shape[:2], self.step, 1), width if online else 0)
            for _ in range(pieces)
        ]

    def add(self, region: Region, output: Tensor, lse: Tensor | None) -> None:
        """Add a region's output (B, H, l, V) and log-sum-exp (B, H, l)."""
        first, stop = region.rows
        if not self.online:
            self.sum[:, :, first:stop] += output
            output = output[..., :0]
        if lse is None:
            return
        for row in range(first, stop, self.step):
            part = slice(row - first, row - first + self.step)
            self.states[row // self.step].merge(output[:, :, part], lse[:, :, part].unsqueeze(-1))

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return the output (B, H, L, V), 0 in empty rows, and the log-sum-exp (B, H, L)."""
        found = [state.finish() for state in self.states]
        output, lse = (torch.cat(each, 2) for each in zip(*found))
        return output if self.online else self.sum, lse.squeeze(-1)


# The autograd function: keys and values go around the ring, and their gradients follow --------------------------------


@dataclass(frozen=True)
class RingCall:
    """The non-tensor arguments of a call; ``wants_lse`` requests the log-sum-exp even if merging does not need it."""

    ring: Ring
    schedule: Schedule
    parts: Parts
    wants_lse: bool

    @property
    def online(self) -> bool:
        """Whether partial results are merged by log-sum-exp."""
        return self.parts.normalizer.online

    def check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Raise before any message is sent if the engine would refuse a region, forward or backward.

        Values of the tensors are not read.
        """
        if not (self.parts.names_engine or self.parts.moves):
            return
        hops = range(self.schedule.hops + 1)
        regions = [region for hop in hops for region in self.schedule.regions(self.ring.behind(hop))]
        if not self.parts.names_engine:
            for region in regions:
                self.parts.at(region)
            return
        dtype, inside = _wide(query.dtype), self.parts.tensors()
        rows = query.detach() if query.dtype == dtype else torch.empty_like(query, dtype=dtype)
        block = Block(key.new_empty(key.numel() + value.numel(), dtype=dtype), key.shape, value.shape)
        wanted = [torch.is_grad_enabled() and t.requires_grad for t in (query, key, value, *inside)]
        learned = self.parts.with_tensors(_leaves(_constants(inside, dtype), wanted[3:]))
        for region in dict.fromkeys(map(self.schedule.representative, regions)):
            ends = _cut(region, rows, block)
            with torch.no_grad():
                self.parts.check_engine(region, ends)
            if any(wanted):
                learned.check_engine(region, _leaves(ends, wanted))


class Block:
    """The keys and values of one rank, or their gradients, in one buffer that is sent as one message.

    Parameters
    ----------
    flat : Tensor (N,)
    key, value : torch.Size
        (B, G, S, E) and (B, G, S, V).
    """

    def __init__(self, flat: Tensor, key: torch.Size, value: torch.Size) -> None:
        self.flat, self.shapes = flat, (key, value)
        self.key, self.value = flat[: key.numel()].view(key), flat[key.numel() :].view(value)

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> Block:
        """Copy keys and values into one buffer."""
        return cls(torch.cat((key.detach().flatten(), value.detach().flatten())), key.shape, value.shape)

    def zeros(self, dtype: torch.dtype) -> Block:
        """Return a block of zeros of the same shapes."""
        return Block(torch.zeros_like(self.flat, dtype=dtype), *self.shapes)

    def to(self, dtype: torch.dtype) -> Block:
        """Return the block in a dtype."""
        return self if self.flat.dtype == dtype else Block(self.flat.to(dtype), *self.shapes)

    def arrived(self, pending: Pending) -> Block:
        """Wait for a block of the same shapes from another rank."""
        return Block(pending.wait(), *self.shapes)


class RingAttention(torch.autograd.Function):
    """Attention of this rank's queries to the keys of all ranks; returns output (B, H, L, V) and log-sum-exp (B, H, L).

    The forward pass merges partial results. The backward pass sends keys and values around again, and computes each
    part's gradient from the output and log-sum-exp of whole rows, so partial results are not saved.
    """

    @staticmethod
    def forward(
        ctx: Any, call: RingCall, query: Tensor, key: Tensor, value: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        wide = _wide(query.dtype)
        pieces = len(pieces_of(call.ring.rank, call.ring.size, call.schedule.layout))
        rows = query.to(wide)
        merged = Merged(rows, value.shape[-1], call.online, pieces)
        block = Block.of(key, value)
        for hop in range(call.schedule.hops + 1):
            pending = call.ring.shift(block.flat) if hop < call.schedule.hops else None
            regions, here = call.schedule.regions(call.ring.behind(hop)), block.to(wide)
            for region in regions:
                found = call.parts.attend(region, *_cut(region, rows, here), call.online or call.wants_lse)
                merged.add(region, *found)
            block = block if pending is None else block.arrived(pending)
        output, lse = merged.finish()
        ctx.call, ctx.wide = call, wide
        ctx.save_for_backward(query, key, value, output, lse, *tensors)
        ctx.mark_non_differentiable(lse)
        return output.to(query.dtype), lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("ring_attention: second derivatives (create_graph=True) are not supported.")
        query, key, value, output, lse, *tensors = ctx.saved_tensors
        with autocast_suspended(query.device.type):
            pulled = _Backward(ctx.call, query.to(ctx.wide), output, lse, grad.to(ctx.wide), tensors)
            grads = pulled.run(Block.of(key, value), list(ctx.needs_input_grad[1:]))
        given = (query, key, value, *tensors)
        return None, *(None if g is None else g.to(t.dtype) for g, t in zip(grads, given))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the compute dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _constants(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Detach the parts' tensors, and cast floating-point ones to the compute dtype."""
    return [t.detach().to(dtype) if t.is_floating_point() else t for t in tensors]


def _leaves(tensors: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor]:
    """Return the tensors as leaves of a new graph; ``wanted`` says which require gradients."""
    return [t.detach().requires_grad_(wants) for t, wants in zip(tensors, wanted)]


def _cut(region: Region, query: Tensor, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    rows, keys = slice(*region.rows), slice(*region.keys)
    return query[:, :, rows], block.key[:, :, keys], block.value[:, :, keys]


class _Backward:
    """The backward pass of one call, region by region, in the compute dtype."""

    def __init__(self, call: RingCall, query: Tensor, output: Tensor, lse: Tensor, grad: Tensor, tensors: list[Tensor]):
        self.call, self.query, self.output, self.lse, self.grad = call, query, output, lse, grad
        self.d_query = torch.zeros_like(query)
        self.tensors = _constants(tensors, query.dtype)
        self.sums = [torch.zeros_like(t) for t in self.tensors]

    def run(self, block: Block, wanted: list[bool]) -> list[Tensor | None]:
        """Send the keys around again; return the gradients of query, key, value and the parts' tensors."""
        ring, hops, wide = self.call.ring, self.call.schedule.hops, self.query.dtype
        pulls = wanted[1] or wanted[2]
        returning: Pending | None = None
        for hop in range(hops + 1):
            pending = ring.shift(block.flat) if hop < hops else None
            pulled = block.zeros(wide)
            for region in self.call.schedule.regions(ring.behind(hop)):
                self._add(region, block.to(wide), pulled, wanted)
            if pulls:
                # Gradients follow one step behind the keys: those from other ranks arrived during the computation.
                if returning is not None:
                    pulled.flat.add_(returning.wait())
                returning = ring.shift(pulled.flat) if hop < hops else None
            block = block if pending is None else block.arrived(pending)
        if pulls and hops:  # return the complete gradients to the owner of the keys
            pulled = pulled.arrived(ring.exchange(pulled.flat, ring.behind(hops), ring.behind(-hops)))
        sums = [total if wants else None for total, wants in zip(self.sums, wanted[3:])]
        return [self.d_query, pulled.key, pulled.value, *sums]

    def _add(self, region: Region, block: Block, pulled: Block, wanted: list[bool]) -> None:
        """Add a region's gradients."""
        rows, targets = slice(*region.rows), _cut(region, self.d_query, pulled)
        ends, inside = _leaves(_cut(region, self.query, block), wanted), _leaves(self.tensors, wanted[3:])
        with torch.enable_grad():
            parts = self.call.parts.with_tensors(inside)
            output, lse = self.output[:, :, rows], self.lse[:, :, rows]
            made = parts.attached(region, ends, output, lse)
        sources = [(t, total) for t, total in zip((*ends, *inside), (*targets, *self.sums)) if t.requires_grad]
        found = torch.autograd.grad(made, [t for t, _ in sources], self.grad[:, :, rows], allow_unused=True)
        for (_, total), gradient in zip(sources, found):
            if gradient is not None:
                total += gradient
