"""Dot products with the keys in a list per query, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from regard.engines.fused import library, pool
from regard.engines.fused.arguments import PAD
from regard.masks.base import Extent

#: Keys of a bucket, as in ``csrc/selected.h``.
BUCKET = 128
#: Queries that a part has at most, and bytes that say which keys they see.
_ROWS, _BITS = 128, 1 << 20
#: Tasks per thread, so that none waits long for another.
_TASKS = 4
#: Share of the keys that a list may name before evaluating all pairs is faster.
FEW = 0.3


class SelectedKeys(torch.autograd.Function):
    """Softmax attention of query (B, H, L, C) to the listed rows of key (B, G, S, C) and value (B, G, S, V).

    ``lists`` (B or 1, H or 1, L, K) of int32 holds indices of keys, −1 for none. Returns the output (B, H, L, V) and
    the log-sum-exp of the scores (B, H, L), which is not differentiable.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, lists: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        call = _Call(query, key, value, lists, scale)
        output, lse = call.forward()
        ctx.call = call
        ctx.save_for_backward(output, lse)
        ctx.mark_non_differentiable(lse)
        return output, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        output, lse = ctx.saved_tensors
        return *ctx.call.backward(grad.contiguous(), output, lse), None, None


class _Call:
    """The arrays of a call, and its two passes."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, lists: Tensor, scale: float) -> None:
        self.arrays = [x.detach().contiguous() for x in (query, key, value)]
        self.lists, self.scale = lists.contiguous(), scale
        (B, H, L, C), (_, G, S, V) = query.shape, value.shape
        strides = [0 if n == 1 else stride for n, stride in zip(self.lists.shape[:2], self.lists.stride())]
        buckets = -(-S // BUCKET)
        self.rows = max(8, min(_ROWS, _BITS // (BUCKET // 8 * buckets), L))
        self.parts, self.extent = -(-L // self.rows), Extent(B, H, L, S)
        self.sizes = torch.tensor([B, H, G, L, S, C, V, lists.shape[-1], *strides, self.rows], device="cpu")
        self.room = BUCKET // 8 * buckets * self.rows + 2 * 8 * (BUCKET + PAD)

    def forward(self) -> tuple[Tensor, Tensor]:
        query, key, value = self.arrays
        B, H, L = query.shape[:3]
        output = query.new_empty(B, H, L, value.shape[-1])
        peak, total = query.new_empty(B, H, L), query.new_empty(B, H, L)
        function = library.load("selected.forward", query.dtype)

        def run(first: int, last: int) -> None:
            memory = torch.empty(self.room, dtype=torch.uint8, device="cpu")
            results = [x.data_ptr() for x in (output, peak, total, memory)]
            function(*self._given(), first, last, *results)

        shared(run, B * key.shape[1] * self.parts)
        empty = total == 0
        return output, torch.where(empty, -torch.inf, peak + torch.where(empty, 1.0, total).log())

    def backward(self, grad: Tensor, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, _ = self.arrays
        heads = key.shape[0] * key.shape[1]
        shares = min(-(-torch.get_num_threads() // heads), self.parts)
        delta = (grad * output).sum(-1)
        d_query, d_key, d_value = (x.new_zeros(*n, *x.shape) for x, n in zip(self.arrays, ((), (shares,), (shares,))))
        function = library.load("selected.backward", query.dtype)

        def run(first: int, last: int) -> None:
            memory = torch.empty(self.room, dtype=torch.uint8, device="cpu")
            arrays = [x.data_ptr() for x in (grad, lse, delta, d_query, d_key, d_value, memory)]
            function(*self._given(), first, last, shares, *arrays)

        shared(run, heads * shares)
        return d_query, d_key.sum(0) if shares > 1 else d_key[0], d_value.sum(0) if shares > 1 else d_value[0]

    def _given(self) -> tuple[Any, ...]:
        return *(x.data_ptr() for x in (*self.arrays, self.lists, self.sizes)), self.scale


def shared(run: Callable[[int, int], None], items: int) -> None:
    """Let threads run parts of so many work items."""
    tasks = min(items, _TASKS * torch.get_num_threads()) if torch.get_num_threads() > 1 else 1
    cuts = pairwise([items * i // tasks for i in range(tasks + 1)])
    if tasks == 1:
        run(0, items)
    else:
        pool.run([lambda first=first, last=last: run(first, last) for first, last in cuts])
