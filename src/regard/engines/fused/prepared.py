"""A forward pass of which only addresses are missing: in small calls, finding arguments costs more than the kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.engines.fused import pool
from regard.engines.fused.arguments import FIELDS, F
from regard.engines.fused.families import Rows
from regard.engines.fused.run import KEPT, Pass, Passes, borrowed, cuts_of_items, give_back, padded
from regard.engines.fused.visible_keys import VisibleKeys
from regard.engines.problem import Problem
from regard.normalizers import Sigmoid, Softmax


def is_simple(problem: Problem) -> bool:
    """Whether the kernels of dot products take query, key and value as they are, and yield just the output."""
    if problem.wants_grad or problem.dropout_p or type(problem.normalizer) not in (Softmax, Sigmoid):
        return False
    return problem.query.dtype == problem.compute_dtype


#: Makes the bias of a dense mask and a dtype.
BiasOf = Callable[[Tensor, torch.dtype], Tensor]
#: Pairs × (features + values) that are worth a thread; and of the largest call, as nothing can interrupt a call.
WORTH, LARGEST = 1 << 19, 1 << 28
#: Shares of the work for each thread: another program may take a core from one of them.
SHARES = 2


class PreparedForward:
    """A forward pass for inputs of one structure, whose mask is intervals and a bias: a :data:`Shortcut`.

    Parameters
    ----------
    made : Pass
    rows : Rows
        Of an example: "dot", or "rows" if the kernel reads keys and values where they are.
    threads : int
        How many share the work.
    bias_of : callable or None
        Makes the bias of a call of its dense mask and a dtype, contiguous and in the shape of the example's; None if
        all calls have the same mask.
    query, key, value : Tensor (B, H, L, E), (B, G, S, E), (B, G, S, V)
        The example as callers give it; not kept.
    """

    def __init__(
        self, made: Pass, rows: Rows, threads: int, bias_of: BiasOf | None, query: Tensor, key: Tensor, value: Tensor
    ) -> None:
        call, visible, self._bias_of = made.call, made.visible, bias_of
        self._shape = (*query.shape[:3], value.shape[-1])
        self._is_like_query = self._shape == tuple(query.shape)
        self._copies = [not query.is_contiguous(), *(not _is_read(t, rows.in_place) for t in (key, value))]
        arrays = {"bias": visible.bias_array(), "own": visible.own}
        if rows.in_place:
            arrays |= {"key": _readable(key, self._copies[1]), "value": _readable(value, self._copies[2])}
        self._held = arrays["bias"], visible  # to which the arguments point
        self._key = F.key if rows.in_place else F.key_raw
        self._function, reals = call.function, type(call.reals)(rows.scale, rows.softcap)
        self._reals, self._at_reals = reals, ctypes.addressof(reals)
        # Behind the kernel's scratch memory, of each thread, are the peaks and totals of rows, which are not wanted.
        size, numbers, whole = call.dtype.itemsize, padded(query.shape[:3].numel()), call.sizes["items"]
        apart = made.memory.size * size
        self._threads, self._peaks, self._totals = threads, threads * apart, threads * apart + numbers * size
        self._scratch = self._totals + numbers * size
        self._arguments = call.filled(arrays, {"first": 0, "last": whole})
        if threads > 1:
            cuts = cuts_of_items(visible, made.order, SHARES * threads)
            function: Any = call.function
            address = ctypes.cast(function, ctypes.c_void_p).value or 0
            # The job that csrc/team.cpp describes, but for the address of the arguments.
            self._arguments.extend([address, 0, self._at_reals, len(cuts) - 1, apart, 0, 0, *cuts])
        self._arguments.append(0)  # set to 1 by the kernel if the output is not finite

    @classmethod
    def of(
        cls, problem: Problem, rows: Rows, visible: VisibleKeys, passes: Passes, bias_of: BiasOf | None = None
    ) -> PreparedForward | None:
        """Return the prepared pass of a problem; None if it is large, or has a mask that is evaluated by block."""
        (B, H, L, C), S, V = problem.query.shape, problem.extent.S, problem.value.shape[-1]
        work = B * H * L * S * (C + V)
        if visible.mask is not None or work > LARGEST:
            return None
        made = Pass.of(passes, "forward", rows, problem.value, visible)
        threads = max(min(torch.get_num_threads(), work // WORTH, made.call.sizes["items"]), 1)
        if threads * made.memory.size * made.call.dtype.itemsize > KEPT:  # would be allocated in every call
            return None
        return cls(made, rows, threads, bias_of, problem.query, problem.key, problem.value)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any) -> Tensor | None:
        """Return the output; None if it is not finite."""
        bias = None if self._bias_of is None else self._bias_of(attn_mask, query.dtype)
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
        if self._threads == 1:
            self._function(address, self._at_reals)
        else:
            arguments[len(FIELDS) + 1] = address
            pool.run_job(address + 8 * len(FIELDS), self._threads)
        give_back(buffer)
        return None if arguments[-1] else output


def _is_read(tensor: Tensor, in_place: bool) -> bool:
    """Whether a kernel reads keys or values with these strides."""
    return tensor.stride(-1) == 1 if in_place else tensor.is_contiguous()


def _readable(tensor: Tensor, copied: bool) -> Tensor:
    return tensor.contiguous() if copied else tensor
