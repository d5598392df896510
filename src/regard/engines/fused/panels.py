"""Matrices laid out in panels, and the products of few rows with them.

Dimensions: R rows, N outputs, E inputs, P panels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.engines.fused import library, pool

#: Outputs of a panel.
LANES: Final = 32
#: Multiplications that are worth a thread.
_WORTH: Final = 1 << 18


@dataclass(frozen=True)
class Panels:
    """A float32 matrix (N, E), or one rounded to int8, in the order in which products with few rows read it.

    Panels hold :data:`LANES` outputs side by side, input by input, zeros behind the last output. In int8, each output
    has a scale, and products round each row to 16 bits: their sums are exact.

    Attributes
    ----------
    weights : Tensor (P, E, LANES) of float32, or (P, ⌈E / 2⌉, LANES, 2) of int8
    scales : Tensor (P · LANES,) of float32, or None
    outputs, inputs : int
        N and E.

    Examples
    --------
    >>> weight, rows = torch.tensor([[1.0, 2.0], [0.0, -1.0]]), torch.tensor([[3.0, 4.0]])
    >>> Panels.of(weight).product(rows, torch.tensor([0.5, 0.0]))
    tensor([[11.5000, -4.0000]])
    """

    weights: Tensor
    scales: Tensor | None
    outputs: int
    inputs: int

    @classmethod
    def of(cls, weight: Tensor, *, int8: bool = False) -> Self:
        """Lay out a float32 matrix (N, E) on the CPU."""
        (N, E), scales = weight.shape, None
        padded = F.pad(weight.detach(), (0, E % 2 if int8 else 0, 0, -N % LANES))
        if int8:
            scales = (padded.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
            pairs = (padded / scales[:, None]).round().to(torch.int8).view(-1, LANES, (E + 1) // 2, 2)
            return cls(pairs.transpose(1, 2).contiguous(), scales, N, E)
        return cls(padded.view(-1, LANES, E).transpose(1, 2).contiguous(), scales, N, E)

    def dense(self) -> Tensor:
        """Return the matrix (N, E) in float32."""
        weight = self.weights.transpose(1, 2)
        if self.scales is not None:
            weight = weight.float() * self.scales.view(-1, LANES, 1, 1)
        return weight.flatten(2).flatten(0, 1)[: self.outputs, : self.inputs].contiguous()

    def rows(self, start: int, stop: int) -> Self:
        """Return some rows of the matrix (stop − start, E), without a copy if a panel begins with the first."""
        if start % LANES:
            return self.of(self.dense()[start:stop], int8=self.scales is not None)
        places = slice(start // LANES, -(-stop // LANES))
        scales = None if self.scales is None else self.scales[places.start * LANES : places.stop * LANES]
        return replace(self, weights=self.weights[places], scales=scales, outputs=stop - start)

    def product(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Return rows (R, E) of float32 times the transposed matrix, plus a bias (N,): (R, N)."""
        if library.problem() is not None:
            return F.linear(rows, self.dense(), bias)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        (R, E), N, P = rows.shape, self.outputs, len(self.weights)
        made = rows.new_empty(R, N)
        if bias is not None and (bias.dtype != torch.float32 or not bias.is_contiguous()):
            bias = bias.float().contiguous()
        function = library.load("panels.product", torch.float32)
        scales = 0 if self.scales is None else self.scales.data_ptr()
        matrix = self.weights.data_ptr(), scales, 0 if bias is None else bias.data_ptr(), N, E

        def part(first: int, last: int, begin: int, end: int) -> None:
            room = rows.new_empty(rounding_room(last - first, E)) if scales else rows
            function(
                *matrix, rows.data_ptr() + 4 * first * rows.stride(0), rows.stride(0), last - first,
                made.data_ptr() + 4 * first * N, begin, end, room.data_ptr(),
            )  # fmt: skip

        most = R * N * E // _WORTH
        if 8 * min(torch.get_num_threads(), most) > R:  # few rows: each thread reads its share of the matrix
            pool.shared(partial(part, 0, R), P, most)
        else:
            pool.shared(lambda first, last: part(first, last, 0, P), R, most)
        return made


def rounding_room(rows: int, inputs: int) -> int:
    """Return how many numbers of float32 a product in int8 needs to round its rows."""
    return rows + rows * ((inputs + 1) // 2)
