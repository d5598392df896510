"""A forward pass of which only addresses are missing: in small calls, finding arguments costs more than the kernel."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from regard.engines.fused.arguments import F
from regard.engines.fused.families import Rows
from regard.engines.fused.run import Pass, Passes, borrowed, give_back, padded
from regard.engines.fused.visible_keys import VisibleKeys
from regard.engines.problem import Problem
from regard.normalizers import Sigmoid, Softmax


def is_simple(problem: Problem) -> bool:
    """Whether the kernels of dot products take query, key and value as they are, and yield just the output."""
    if problem.wants_grad or problem.dropout_p or type(problem.normalizer) not in (Softmax, Sigmoid):
        return False
    return problem.query.dtype == problem.compute_dtype


class PreparedForward:
    """A forward pass of a single unit of work, for inputs of one structure.

    Parameters
    ----------
    made : Pass
    rows : Rows
        Of an example: "dot", or "rows" if the kernel reads keys and values where they are.
    query, key, value : Tensor (B, H, L, E), (B, G, S, E), (B, G, S, V)
        The example as callers give it; not kept.
    """

    def __init__(self, made: Pass, rows: Rows, query: Tensor, key: Tensor, value: Tensor) -> None:
        (share,), visible = made.partitions, made.visible
        (unit,) = share.units
        own, call = made.arguments(share, unit), made.call
        self._shape = (*query.shape[:3], value.shape[-1])
        self._is_like_query = self._shape == tuple(query.shape)
        self._copies = [not query.is_contiguous(), *(not _is_read(t, rows.in_place) for t in (key, value))]
        arrays = {**own.arrays, "bias": visible.bias_array(), "own": visible.own}
        if rows.in_place:
            arrays |= {"key": _readable(key, self._copies[1]), "value": _readable(value, self._copies[2])}
        self._arguments = call.filled(arrays, own.numbers, own.sizes)
        self._arguments.append(0)  # set to 1 by the kernel if the output is not finite
        self._held = own.arrays, arrays["bias"], visible  # to which the arguments point
        self._key = F.key if rows.in_place else F.key_raw
        self._function, self._reals = call.function, type(call.reals)(rows.scale, rows.softcap)
        # Behind the kernel's own scratch memory are the peaks and totals of rows, which are not wanted.
        size, numbers = call.dtype.itemsize, padded(query.shape[:3].numel())
        self._peaks, self._totals = made.memory.size * size, (made.memory.size + numbers) * size
        self._scratch = self._totals + numbers * size

    @classmethod
    def of(cls, problem: Problem, rows: Rows, visible: VisibleKeys, passes: Passes) -> PreparedForward | None:
        """Return the prepared pass of a problem; None if it has several units of work, or a mask evaluated by unit."""
        if visible.mask is not None:
            return None
        made = Pass.of(passes, "forward", rows, problem.value, visible)
        if sum(len(share.units) for share in made.partitions) != 1:
            return None
        return cls(made, rows, problem.query, problem.key, problem.value)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor | None:
        """Return the output; None if it is not finite.

        ``bias`` is contiguous, and has the shape of the one that ``visible`` had.
        """
        copies = self._copies
        if copies[0]:
            query = query.contiguous()
        if copies[1]:
            key = key.contiguous()
        if copies[2]:
            value = value.contiguous()
        output = torch.empty_like(query) if self._is_like_query else query.new_empty(self._shape)
        (buffer, scratch), arguments = borrowed(self._scratch), self._arguments[:]
        address, length = arguments.buffer_info()
        arguments[F.query] = query.data_ptr()
        arguments[self._key] = key.data_ptr()
        arguments[F.value] = value.data_ptr()
        arguments[F.output] = output.data_ptr()
        arguments[F.flawed] = address + 8 * (length - 1)
        arguments[F.scratch] = scratch
        arguments[F.peak] = scratch + self._peaks
        arguments[F.total] = scratch + self._totals
        if bias is not None:
            arguments[F.bias] = bias.data_ptr()
        self._function(address, ctypes.addressof(self._reals))
        give_back(buffer)
        return None if arguments[-1] else output


def _is_read(tensor: Tensor, in_place: bool) -> bool:
    """Whether a kernel reads keys or values with these strides."""
    return tensor.stride(-1) == 1 if in_place else tensor.is_contiguous()


def _readable(tensor: Tensor, copied: bool) -> Tensor:
    return tensor.contiguous() if copied else tensor
