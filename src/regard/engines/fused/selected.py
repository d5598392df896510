"""Dot products with the keys in a list per query, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.engines.fused import library
from regard.engines.fused.arguments import PAD
from regard.engines.fused.pages import in_large_pages
from regard.engines.fused.pool import shared
from regard.masks.base import Extent, Mask

#: Queries that a part has at most, as few as are worth it, and bytes that a thread holds for them.
_ROWS, _FEW_ROWS, _BYTES = 512, 64, 4 << 20
#: Queries whose keys a task marks, as MARKED of csrc/selected.h.
_MARKED = 64
#: Keys of a word of bits; keys that a query should have in a bucket, and words that this has at most.
_WORD, _KEYS, _WORDS = 64, 32, 8
#: Indices of keys, or words of as many bits, that are held at once.
_HELD = 1 << 24


@dataclass(eq=False, repr=False)
class KeyLists:
    """The keys that the queries of a call see, as lists that are made for some queries at a time."""

    mask: Mask
    extent: Extent

    def parts(self) -> list[tuple[int, int]]:
        """Return the first query of each part, and one past its last."""
        L, row = self.extent.L, max(self.mask.listed_keys or 0, self.extent.S // 32)
        step = _HELD // max(self.extent.B * self.extent.H * row, 1) // _ROWS * _ROWS or _ROWS
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
        # The backward pass reads the mask's tensors again, so torch must refuse it if they changed: an index of no key
        # would be one of other memory.
        ctx.save_for_backward(query, key, value, output, lse, *lists.mask.tensors())
        ctx.mark_non_differentiable(lse)
        return output, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors[:5]
        grad = grad.resolve_neg()
        rows = grad, lse, (grad * output).sum(-1)
        heads = key.shape[0] * key.shape[1]
        shares = min(-(-torch.get_num_threads() // heads), -(-query.shape[2] // _FEW_ROWS))
        sums = [in_large_pages(x.new_empty(shares, *x.shape)) for x in (key, value)]
        found = []
        for first, last in ctx.lists.parts():
            call = _Part(query, key, value, ctx.lists, (first, last), ctx.scale)
            found.append(_backward(call, [x[:, :, first:last].contiguous() for x in rows], sums, fresh=first == 0))
        d_query = found[0] if len(found) == 1 else torch.cat(found, 2)
        return d_query, *(x.sum(0) if shares > 1 else x[0] for x in sums), None, None


class _Part:
    """The arrays and sizes of the kernels for some of the queries."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, lists: KeyLists, part: tuple[int, int], scale: float
    ) -> None:
        self.query, self.key, self.value = query[:, :, slice(*part)].contiguous(), key, value
        keys = lists.of(*part)
        (B, H, L, C), (_, G, S, V) = self.query.shape, value.shape
        (list_b, list_h), K, words = keys.shape[:2], keys.shape[-1], -(-S // _WORD)
        strides = [0 if list_b == 1 else list_h, 0 if list_h == 1 else 1]
        bucket = min(max(_KEYS * words // max(K, 1), 1), _WORDS)
        pair = 2 * value.element_size() + 4  # two numbers and an index
        row = -(-min(K, bucket * _WORD) // PAD) * PAD * pair + 8
        # Parts are large, since each of them reads all keys, but no fewer than the threads that share a head of keys.
        threads = -(-torch.get_num_threads() // max(B * G, 1))
        rows = max(min(_ROWS, _BYTES // row, max(-(-L // threads), _FEW_ROWS), L), 1)
        blocks = max(-(-L // rows), 1)
        rows = max(-(-L // blocks), 1)
        #: Number of work items of the forward pass.
        self.items = B * H * blocks
        self.sizes = torch.tensor([B, H, G, L, S, C, V, K, *strides, rows, bucket], device="cpu")
        # As in Bucket and Selection of csrc/selected.h.
        self.room = rows * row + PAD * pair
        bits = keys.new_empty(list_b * list_h * blocks, words, -(-rows // 8) * 8 + 8, dtype=torch.int64)
        mark, ends = library.load("selected.mark", query.dtype), (bits.data_ptr(), self.sizes.data_ptr())
        marked = list_b * list_h * blocks * -(-rows // _MARKED)
        shared(lambda first, last: mark(*ends, first, last, keys.data_ptr()), marked)
        self.arrays = self.query, key, value, bits, self.sizes
        self.given = *(x.data_ptr() for x in self.arrays), scale

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


def _backward(call: _Part, rows: list[Tensor], sums: list[Tensor], *, fresh: bool) -> Tensor:
    """Return the gradient of some of the queries, and add theirs to those of keys and values (shares, B, G, S, ·).

    ``rows`` are the gradient of their output, their log-sum-exp, and the products of gradient and output. ``fresh``
    sums hold nothing yet.
    """
    d_query, shares = torch.zeros_like(call.query), sums[0].shape[0]
    function = library.load("selected.backward", call.query.dtype)

    def run(first: int, last: int) -> None:
        memory = call.scratch()
        arrays = [x.data_ptr() for x in (*rows, d_query, *sums, memory)]
        function(*call.given, first, last, shares, fresh, *arrays)

    shared(run, call.key.shape[0] * call.key.shape[1] * shares)
    return d_query
