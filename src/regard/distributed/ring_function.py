"""Ring attention as a differentiable function: keys and values travel, and their gradients travel with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard import _autocast
from regard.distributed.layouts import pieces_of
from regard.distributed.partial_results import Merged, Parts
from regard.distributed.ring import Pending, Ring
from regard.distributed.schedule import Region, Schedule


@dataclass(frozen=True)
class Call:
    """All of a call that is no tensor; ``wants_lse`` also where parts merge without it."""

    ring: Ring
    schedule: Schedule
    parts: Parts
    wants_lse: bool

    @property
    def online(self) -> bool:
        """Whether parts merge by their log-sum-exp."""
        return self.parts.normalizer.online

    def check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Raise if a region would be refused once messages have been sent, in the forward or the backward pass.

        Of queries, keys and values nothing is read but shapes, dtypes, devices, and whether gradients are wanted.
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
    """The keys and values of one rank, or their gradients, in one piece of memory that travels as one message.

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
        """Copy keys and values into one piece of memory."""
        return cls(torch.cat((key.detach().flatten(), value.detach().flatten())), key.shape, value.shape)

    def zeros(self, dtype: torch.dtype) -> Block:
        """Return a block of zeros of the same shapes."""
        return Block(torch.zeros_like(self.flat, dtype=dtype), *self.shapes)

    def to(self, dtype: torch.dtype) -> Block:
        """Return the block in a dtype."""
        return self if self.flat.dtype == dtype else Block(self.flat.to(dtype), *self.shapes)

    def arrived(self, pending: Pending) -> Block:
        """Return the block of the same shapes that another rank has sent."""
        return Block(pending.wait(), *self.shapes)


class RingAttention(torch.autograd.Function):
    """Attention of this rank's queries to the keys of all ranks; returns output (B, H, L, V) and log-sum-exp (B, H, L).

    The forward pass merges the results of the parts. The backward pass sends keys and values round once more, and finds
    each part's gradient by the output and the log-sum-exp of whole rows; so no part's results are kept.
    """

    @staticmethod
    def forward(
        ctx: Any, call: Call, query: Tensor, key: Tensor, value: Tensor, *tensors: Tensor
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
            raise RuntimeError("ring_attention: it has no second derivative (create_graph=True).")
        query, key, value, output, lse, *tensors = ctx.saved_tensors
        with _autocast.suspended(query.device.type):
            pulled = _Backward(ctx.call, query.to(ctx.wide), output, lse, grad.to(ctx.wide), tensors)
            grads = pulled.run(Block.of(key, value), list(ctx.needs_input_grad[1:]))
        given = (query, key, value, *tensors)
        return None, *(None if g is None else g.to(t.dtype) for g, t in zip(grads, given))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to calculate in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _constants(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the parts' tensors for a backward pass, those of floats in its dtype."""
    return [t.detach().to(dtype) if t.is_floating_point() else t for t in tensors]


def _leaves(tensors: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor]:
    """Return the tensors as leaves of a new graph, of which the wanted ones get gradients."""
    return [t.detach().requires_grad_(wants) for t, wants in zip(tensors, wanted)]


def _cut(region: Region, query: Tensor, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    rows, keys = slice(*region.rows), slice(*region.keys)
    return query[:, :, rows], block.key[:, :, keys], block.value[:, :, keys]


class _Backward:
    """The gradients of one call, region by region; all in the dtype to calculate in."""

    def __init__(self, call: Call, query: Tensor, output: Tensor, lse: Tensor, grad: Tensor, tensors: list[Tensor]):
        self.call, self.query, self.output, self.lse, self.grad = call, query, output, lse, grad
        self.d_query = torch.zeros_like(query)
        self.tensors = _constants(tensors, query.dtype)
        self.sums = [torch.zeros_like(t) for t in self.tensors]

    def run(self, block: Block, wanted: list[bool]) -> list[Tensor | None]:
        """Send the keys round once more; return the gradients to query, key, value and the parts' tensors."""
        ring, hops, wide = self.call.ring, self.call.schedule.hops, self.query.dtype
        pulls = wanted[1] or wanted[2]
        returning: Pending | None = None
        for hop in range(hops + 1):
            pending = ring.shift(block.flat) if hop < hops else None
            pulled = block.zeros(wide)
            for region in self.call.schedule.regions(ring.behind(hop)):
                self._add(region, block.to(wide), pulled, wanted)
            if pulls:
                # Behind the keys by one computation: what others found of these came while this rank computed.
                if returning is not None:
                    pulled.flat.add_(returning.wait())
                returning = ring.shift(pulled.flat) if hop < hops else None
            block = block if pending is None else block.arrived(pending)
        if pulls and hops:  # the last who needed these keys has all of their gradient
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
