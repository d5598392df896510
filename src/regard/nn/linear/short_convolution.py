"""The short convolution over time that recurrent layers put before their state."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._utils.constraints import flag, floats, size
from regard._utils.errors import described, rejected
from regard._utils.mechanism import mechanism
from regard.nn._base import Layer, parameter
from regard.nn.linear.layout import Layout, layout_of


@mechanism(
    formula="SiLU(Σ_{j<w} c_j ⊙ x_{t−j} + b)",
    sources=("gu2023",),
    learned="c (C, 1, w), and b (C) if wanted",
    cost="O(L·C·w)",
    causal="yes",
)
class ShortConvolution(Layer):
    """Causal depthwise convolution over the last w steps, ``SiLU(Σ_{j<w} c_j ⊙ x_{t−j} + b)``.

    Mamba puts it before its state (Gu 2023, arXiv 2312.00752), and most gated recurrences followed. Its weight has the
    layout of a depthwise ``torch.nn.Conv1d``: ``weight[c, 0, -1]`` multiplies the step itself.

    Parameters
    ----------
    channels : int
        Width C of the rows.
    width : int, default 4
        Number of steps w that each step reads, itself included.
    bias : bool, default False
    activation : bool, default True
        Whether to apply SiLU.
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import ShortConvolution
    >>> layer, x = ShortConvolution(8), torch.randn(2, 5, 8)
    >>> first, past = layer(x[:, :3], return_state=True)
    >>> then = layer(x[:, 3:], state=past)
    >>> torch.allclose(torch.cat([first, then], 1), layer(x), atol=1e-6)
    True
    """

    def __init__(
        self,
        channels: int,
        width: int = 4,
        *,
        bias: bool = False,
        activation: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.channels, self.width = size(self, "channels", channels), size(self, "width", width)
        flag(self, "bias", bias)
        flag(self, "activation", activation)
        self.activation = activation
        where = {"device": device, "dtype": dtype}
        self.weight = parameter(self.channels, 1, self.width, **where)
        self.bias = parameter(self.channels, **where) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew, as ``torch.nn.Conv1d`` does."""
        bound = 1 / math.sqrt(self.width)
        for each in self.parameters():
            nn.init.uniform_(each, -bound, bound)

    def forward(
        self,
        x: Tensor,
        valid_lens: Tensor | None = None,
        *,
        documents: Tensor | None = None,
        state: Tensor | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the convolved rows (B, L, C).

        Parameters
        ----------
        x : Tensor (B, L, C)
        valid_lens : Tensor (B,) of int, optional
            Number of valid steps per sequence; later steps count as zeros.
        documents : Tensor (L,) or (B, L) of int, optional
            Document of each step: runs of equal numbers. A step reads its own document only.
        state : Tensor (B, w − 1, C), optional
            The rows before ``x``, of its first document; zeros by default.
        return_state : bool, default False
            Whether to also return the rows that the next steps read: the last valid ones.
        """
        x = floats(self, "x", x, "B", "L", self.channels)
        layout = layout_of(self, x, None, valid_lens, documents)
        rows, past = self.run(x, state, layout)
        return (rows, past) if return_state else rows

    def run(self, x: Tensor, past: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor]:
        """Return the convolved rows (B, L, C), and the rows (B, w − 1, C) that come next; padding counts as zeros."""
        x = layout.clear(x)  # a projection's bias, of rows of zeros
        B, length, before = x.shape[0], x.shape[1], self.width - 1
        if past is None:
            past = x.new_zeros(B, before, self.channels)
        elif past.shape != (B, before, self.channels):
            expected = f"be a tensor of shape ({B}, {before}, {self.channels})"
            raise rejected("ShortConvolution", "state", expected, described(past))
        rows = torch.cat([past.to(x.dtype), x], 1)
        runs = None if layout.runs is None else F.pad(layout.runs, (before, 0))
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.squeeze(1).to(wide)  # (C, w)
        total = torch.zeros((), dtype=wide, device=x.device) if self.bias is None else self.bias.to(wide)
        for j in range(self.width):
            read = rows[:, j : j + length].to(wide)
            if runs is not None and j < before:
                read = torch.where((runs[:, j : j + length] == runs[:, before:]).unsqueeze(-1), read, 0.0)
            total = torch.addcmul(total, read, weight[:, j])
        total = F.silu(total) if self.activation else total
        return total.to(x.dtype), layout.last(rows, before)

    def extra_repr(self) -> str:
        """Return the sizes and the settings that differ from the defaults."""
        settings = [f"{self.channels}, width={self.width}"]
        settings += ["bias=True"] if self.bias is not None else []
        return ", ".join([*settings, *([] if self.activation else ["activation=False"])])
