"""Layers of a Transformer as one kernel, for few rows: a step of decoding, or short sequences to read.

Dimensions: R rows, E width, H heads of D features, F hidden features; M stored rows, Q rows of a table, T rows that one
names.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from regard.engines.fused import library, pool
from regard.engines.fused.arguments import PAD, RECORDS
from regard.engines.fused.panels import Panels, rounding_room

#: Numbers of a layer, and places of its keys and values among them.
_LAYER: Final = len(RECORDS["layer"])
_KEYS: Final = RECORDS["layer"].index("key")
_NO_TABLE: Final = (0, 0, 0, 0, 0)
#: Multiplications that are worth a thread.
_WORTH: Final = 1 << 20


class Linear(NamedTuple):
    """A matrix and its bias."""

    panels: Panels
    bias: Tensor | None


class LayerWeights(NamedTuple):
    """What a layer learned: ``x ← x + out(attend(query_key_value(x)))``, and so on.

    The layers share all sizes; cross-attention is None in an encoder.
    """

    norm_own: nn.LayerNorm
    query_key_value: Linear
    own_output: Linear
    norm_other: nn.LayerNorm | None
    other_query: Linear | None
    other_output: Linear | None
    norm_forward: nn.LayerNorm
    up: Linear
    down: Linear


class Table(NamedTuple):
    """Which rows of keys and values each query reads.

    Attributes
    ----------
    which : Tensor (R,) of int64, or None
        The query's row of the table; None if query r has row r.
    rows : Tensor (Q, T) of int64
    counts : Tensor (Q,) of int64, or None
        How many rows of the table's row are read; those behind are any. None if all are.
    """

    which: Tensor | None
    rows: Tensor
    counts: Tensor | None

    def numbers(self) -> tuple[int, int, int, int, int]:
        which, counts = (0 if each is None else each.data_ptr() for each in (self.which, self.counts))
        return which, self.rows.data_ptr(), self.rows.stride(0), counts, self.rows.shape[1]


class Pair(Protocol):
    """Keys and values."""

    @property
    def key(self) -> Tensor:
        """Keys (M, H, D)."""

    @property
    def value(self) -> Tensor:
        """Values (M, H, D), laid out as the keys."""


class Stored(NamedTuple):
    """Stored keys and values, and what each row attends to.

    Attributes
    ----------
    rows : Tensor (M, 2, ·, D)
        Keys and values; contiguous.
    table : Table
    shift : int
        Numbers by which a layer's keys and values follow those of the layer before; 0 if layers share their place.
    """

    rows: Tensor
    table: Table
    shift: int


class Layers:
    """Transformer layers with ReLU, softmax of scaled dot products and equal heads, in float32 on the CPU.

    It reads the parameters where they are: keep them alive and in place.

    Parameters
    ----------
    weights : sequence of LayerWeights
        At least one.
    heads : int
    norm_first : bool
        Norms precede the blocks, rather than follow the residual sums.
    last_norm : LayerNorm or None
    """

    def __init__(
        self, weights: Sequence[LayerWeights], heads: int, *, norm_first: bool, last_norm: nn.LayerNorm | None
    ) -> None:
        first = weights[0]
        self.count, self.width, self.heads, self.hidden = (
            len(weights),
            first.up.panels.inputs,
            heads,
            first.up.panels.outputs,
        )
        self.epsilon = first.norm_own.eps
        self._kept = weights, last_norm
        self._other: Sequence[Pair] = ()
        self._layers = array("q")
        for each in weights:
            norms = each.norm_own, each.norm_other, each.norm_forward
            linears = each.query_key_value, each.own_output, each.other_query, each.other_output, each.up, each.down
            for norm in norms:
                self._layers.extend(_norm(norm))
            for linear in linears:
                self._layers.extend(_linear(linear))
            self._layers.extend((0, 0, 0, 0))
        self._sizes = int(norm_first), self.width, self.heads, self.hidden
        self._last_norm = _norm(last_norm)
        self._multiplications = sum(
            linear.panels.outputs * linear.panels.inputs
            for each in weights
            for linear in each
            if isinstance(linear, Linear)
        )

    def run(
        self,
        x: Tensor,
        own: Stored,
        place: int,
        other: Sequence[Pair] = (),
        other_table: Table | None = None,
        *,
        cuts: Tensor | None = None,
    ) -> None:
        """Replace rows (R, E) by the output of the layers, in place.

        Parameters
        ----------
        x : Tensor (R, E)
            Contiguous.
        own : Stored
            The keys and values in which those of this call are written, and what each row attends to.
        place : int
            The stored row that row 0 is written to; the others follow.
        other : sequence of Pair, optional
            Each layer's keys and values of cross-attention, all equally laid out. It must not change.
        other_table : Table, optional
            What each row attends to among them.
        cuts : Tensor (B,) of int64, optional
            Where groups of rows end that attend to each other; by default, no row attends to another of this call.
        """
        R, layers, address = len(x), self._layers, self._layers.buffer_info()[0]
        key, shift = own.rows.data_ptr(), 4 * own.shift
        value = key + 4 * own.rows.stride(1)
        for i in range(self.count):
            at = i * _LAYER + _KEYS
            layers[at], layers[at + 1] = key + i * shift, value + i * shift
        if other is not self._other:
            for i, each in enumerate(other):
                at = i * _LAYER + _KEYS + 2
                layers[at], layers[at + 1] = each.key.data_ptr(), each.value.data_ptr()
            self._other = other
        seen, other_row, other_numbers = own.table.rows.shape[1], 0, _NO_TABLE
        if other_table is not None:
            seen, other_row = max(seen, other_table.rows.shape[1]), other[0].key.stride(0)
            other_numbers = other_table.numbers()
        numbers = array("q", (address, self.count, *self._sizes, own.rows.stride(0), other_row, place))
        numbers.extend((*own.table.numbers(), *other_numbers, *self._last_norm))
        function, call = library.load("layers.forward", torch.float32), numbers.buffer_info()[0]

        def part(first: int, last: int) -> None:
            room = x.new_empty(self._room(last - first, seen))
            function(call, self.epsilon, x.data_ptr(), first, last, seen, room.data_ptr())

        threads = min(R * self._multiplications // _WORTH, R)
        threads = min(threads, torch.get_num_threads()) if threads > 1 else 1
        if threads < 2:
            part(0, R)
            return
        ends = [R * i // threads for i in range(threads + 1)]
        if cuts is not None:  # the nearest end of a group
            ends = [0, *cuts[torch.searchsorted(cuts, torch.tensor(ends[1:])).clamp(max=len(cuts) - 1)].tolist()]
        pool.run([lambda a=a, b=b: part(a, b) for a, b in pairwise(ends) if a < b])

    def _room(self, rows: int, seen: int) -> int:
        """Return how many numbers of scratch memory the kernel needs."""
        E, wide = self.width, max(self.width, self.hidden)
        padded = -(-seen // PAD) * PAD
        made = rows * (2 * E + max(3 * E, self.hidden))
        return made + self.heads * (padded + PAD) + rounding_room(rows, wide) + PAD


def _norm(norm: nn.LayerNorm | None) -> tuple[int, int]:
    if norm is None:
        return 0, 0
    return norm.weight.data_ptr(), 0 if norm.bias is None else norm.bias.data_ptr()


def _linear(linear: Linear | None) -> tuple[int, int, int]:
    if linear is None:
        return 0, 0, 0
    panels, bias = linear
    scales = 0 if panels.scales is None else panels.scales.data_ptr()
    return panels.weights.data_ptr(), scales, 0 if bias is None else bias.data_ptr()
