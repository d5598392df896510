"""Criss-cross attention: each pixel attends to its row and its column.

Dimensions: B images, C channels, H height, W width, D features of queries and keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard import masks
from regard._utils.constraints import size
from regard._utils.mechanism import mechanism
from regard.engines import EngineLike
from regard.engines.aux import AuxRequest
from regard.functional import attention
from regard.nn._base import Layer, parameter
from regard.nn.image.channels import image

#: What a pixel sees of its column: not itself, which is in its row. Made once, as compilers do not trace ``~``.
_OTHERS = ~masks.window(0, 0)


@mechanism(
    formula="x + γ Σ_j softmax_j(q_i·k_j) v_j over the pixels j of i's row and column",
    sources=("huang2019",),
    learned="W_q, W_k (C/k, C), W_v (C, C), biases, γ",
    cost="O(rounds·N·((H + W)·C + C²)), N = H·W",
    reads="dot",
)
class CrissCrossAttention(Layer):
    """Criss-cross attention: a pixel attends to its row and its column (Huang 2019, arXiv 1811.11721).

    ``x_i + γ Σ_j softmax_j(q_i·k_j) v_j`` with one softmax over the H + W − 1 pixels of row and column; maps W_q and
    W_k have C/k features, and γ starts at 0. In a second round with the same parameters every pixel reaches every
    other, as in the paper's network. A round is two calls of :func:`regard.attention`, over rows and over columns,
    joined by their log-sum-exp.

    Parameters
    ----------
    channels : int
        Number of channels C.
    reduction : int, default 8
        Reduction k: queries and keys have max(1, C // k) features.
    rounds : int, default 2
    engine : str or Engine, default "auto"
        See :func:`regard.attention`.
    device, dtype : optional
        Device and dtype of the parameters.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import CrissCrossAttention
    >>> x = torch.randn(2, 16, 5, 7)
    >>> torch.equal(CrissCrossAttention(16)(x), x)
    True
    """

    def __init__(
        self,
        channels: int,
        reduction: int = 8,
        *,
        rounds: int = 2,
        engine: EngineLike = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        C = self.channels = size(self, "channels", channels)
        hidden = max(1, C // size(self, "reduction", reduction))
        self.rounds, self.engine = size(self, "rounds", rounds), engine
        self.query = nn.Conv2d(C, hidden, 1, device=device, dtype=dtype)
        self.key = nn.Conv2d(C, hidden, 1, device=device, dtype=dtype)
        self.value = nn.Conv2d(C, C, 1, device=device, dtype=dtype)
        self.gamma = parameter(device=device, dtype=dtype)
        nn.init.zeros_(self.gamma)

    def reset_parameters(self) -> None:
        """Re-initialize the maps as ``nn.Conv2d`` does, and γ to 0."""
        for part in (self.query, self.key, self.value):
            part.reset_parameters()
        nn.init.zeros_(self.gamma)

    def forward(self, x: Tensor) -> Tensor:
        """Return the image (B, C, H, W) plus what its pixels read, after all rounds."""
        x = image(self, "x", x, self.channels)
        for _ in range(self.rounds):
            x = x + self.gamma * self._read(x)
        return x

    def _read(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).permute(0, 2, 3, 1) for each in (self.query, self.key, self.value))  # (B, H, W, D)
        wanted = AuxRequest(lse="grad")
        across, row = attention(q, k, v, scale=1.0, engine=self.engine, return_aux=wanted)
        turned_q, turned_k, turned_v = (each.transpose(1, 2) for each in (q, k, v))
        down, column = attention(
            turned_q, turned_k, turned_v, _OTHERS, scale=1.0, engine=self.engine, return_aux=wanted
        )
        assert row.lse is not None and column.lse is not None
        share = torch.sigmoid(row.lse - column.lse.transpose(1, 2)).unsqueeze(3)
        read = share * across + (1 - share) * down.transpose(1, 2)
        return read.permute(0, 3, 1, 2).to(v.dtype)

    def extra_repr(self) -> str:
        """Return the rounds."""
        return f"rounds={self.rounds}"
