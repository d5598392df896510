"""Dot products with the keys in a list per query, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from regard.engines.fused import library, pool
from regard.engines.fused.arguments import BUCKET, PAD
from regard.masks.base import Extent, Mask

#: Queries that a part has at most, as few as are worth it, and bytes that a thread holds for their pairs.
_ROWS, _FEW_ROWS, _PAIRS = 512, 64, 12 << 20
#: Indices of keys that are held at once.
_HELD = 1 << 24
#: Tasks per thread, so that none waits long for another.
_TASKS = 4


@dataclass(eq=False)
class KeyLists:
    """The keys that the queries of a call see, as lists that are made for some queries at a time."""

    mask: Mask
    extent: Extent

    def parts(self) -> list[tuple[int, int]]:
        """Return the first query of each part, and one past its last."""
        L = self.extent.L
        step = _HELD // max(self.extent.B * self.extent.H * (self.mask.listed_keys or 0), 1) // _ROWS * _ROWS or _ROWS
        return [(first, min(first + step, L)) for first in range(0, L, step)]

    def of(self, first: int, last: int) -> Tensor:
        """Return the lists (B or 1, H or 1, last - first, K) of int32; −1 is no key."""
        lists = self.mask.key_lists(self.extent, first, last)
        assert lists is not None
        return lists.to(torch.int32).contiguous()


class SelectedKeys(torch.autograd.Function):
    """Softmax attention of query (B, H, L, C) to the listed rows of key (B, G, S, C) and value (B, G, S, V).

    Returns the output (B, H, L, V) and the log-sum-exp of the scores (B, H, L), which is not differentiable.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, lists: KeyLists, scale: float
    ) -> tuple[Tensor, Tensor]:
        query, key, value = (x.detach().contiguous() for x in (query, key, value))
        found = [_forward(_Part(query, key, value, lists, part, scale)) for part in lists.parts()]
        output, lse = found[0] if len(found) == 1 else (torch.cat(each, 2) for each in zip(*found))
        ctx.lists, ctx.scale = lists, scale
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.mark_non_differentiable(lse)
        return output, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        rows = grad, lse, (grad * output).sum(-1)
        heads = key.shape[0] * key.shape[1]
        shares = min(-(-torch.get_num_threads() // heads), -(-query.shape[2] // _FEW_ROWS))
        sums = [x.new_zeros(shares, *x.shape) for x in (key, value)]
        found = []
        for first, last in ctx.lists.parts():
            call = _Part(query, key, value, ctx.lists, (first, last), ctx.scale)
            found.append(_backward(call, [x[:, :, first:last].contiguous() for x in rows], sums))
        d_query = found[0] if len(found) == 1 else torch.cat(found, 2)
        return d_query, *(x.sum(0) if shares > 1 else x[0] for x in sums), None, None


class _Part:
    """The arrays and sizes of the kernels for some of the queries."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, lists: KeyLists, part: tuple[int, int], scale: float
    ) -> None:
        self.query, self.key, self.value = query[:, :, slice(*part)].contiguous(), key, value
        self.lists = lists.of(*part)
        (B, H, L, C), (_, G, S, V) = self.query.shape, value.shape
        strides = [0 if n == 1 else stride for n, stride in zip(self.lists.shape[:2], self.lists.stride())]
        K, threads = self.lists.shape[-1], torch.get_num_threads()
        row, buckets = -(-K // PAD) * PAD + PAD, -(-S // BUCKET)
        pair = 2 * value.element_size() + 4  # two numbers and an index
        enough = max(-(-L // threads), _FEW_ROWS)
        rows = max(min(_ROWS, _PAIRS // (row * pair), enough, L), 1)
        blocks = -(-L // rows)
        # Heads that share a list have it ordered once, if that leaves work for all threads.
        together = 1 if strides[1] else H if B * blocks >= threads else H // G
        #: Number of work items of the forward pass.
        self.items = B * H // together * blocks
        sizes = [B, H, G, L, S, C, V, K, *strides, rows, together]
        self.sizes = torch.tensor(sizes, device="cpu")
        bits = -(-S // (64 * PAD)) * PAD * 8
        # As in Room of csrc/selected.h; a whole number of words, as it begins with words.
        self.room = -(-(bits + rows * (row * pair + 4 * buckets)) // 8) * 8
        arrays = self.query, key, value, self.lists, self.sizes
        self.given = *(x.data_ptr() for x in arrays), scale

    def scratch(self) -> Tensor:
        """Return scratch memory for one thread."""
        return torch.empty(self.room, dtype=torch.uint8, device="cpu")


def _forward(call: _Part) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of some of the queries."""
    query = call.query
    B, H, L = query.shape[:3]
    output = query.new_empty(B, H, L, call.value.shape[-1])
    peak, total = query.new_empty(B, H, L), query.new_empty(B, H, L)
    function = library.load("selected.forward", query.dtype)

    def run(first: int, last: int) -> None:
        memory = call.scratch()
        function(*call.given, first, last, *(x.data_ptr() for x in (output, peak, total, memory)))

    shared(run, call.items)
    empty = total == 0
    return output, torch.where(empty, -torch.inf, peak + torch.where(empty, 1.0, total).log())


def _backward(call: _Part, rows: list[Tensor], sums: list[Tensor]) -> Tensor:
    """Return the gradient of some of the queries, and add theirs to those of keys and values (shares, B, G, S, ·).

    ``rows`` are the gradient of their output, their log-sum-exp, and the products of gradient and output.
    """
    d_query, shares = torch.zeros_like(call.query), sums[0].shape[0]
    function = library.load("selected.backward", call.query.dtype)

    def run(first: int, last: int) -> None:
        memory = call.scratch()
        arrays = [x.data_ptr() for x in (*rows, d_query, *sums, memory)]
        function(*call.given, first, last, shares, *arrays)

    shared(run, call.key.shape[0] * call.key.shape[1] * shares)
    return d_query


def shared(run: Callable[[int, int], None], items: int) -> None:
    """Let threads run parts of so many work items."""
    tasks = min(items, _TASKS * torch.get_num_threads()) if torch.get_num_threads() > 1 else 1
    cuts = pairwise([items * i // tasks for i in range(tasks + 1)])
    if tasks == 1:
        run(0, items)
    else:
        pool.run([lambda first=first, last=last: run(first, last) for first, last in cuts])
