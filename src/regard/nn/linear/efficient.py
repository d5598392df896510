"""Efficient attention: softmax over the channels of queries and over the positions of keys, in place of one over pairs.

Dimensions: B sequences, N rows, C width, H heads, E = C/H width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard._utils.mechanism import mechanism
from regard.nn.heads.self_heads import SelfHeads, real_rows


@mechanism(
    formula="softmax_E(Q) (softmax_N(K)ᵀ V) in each head",
    sources=("shen2021",),
    learned="W_q, W_k, W_v, W_o (C, C), biases",
    cost="O(N·C²/H + N·C²)",
)
class EfficientAttention(SelfHeads):
    """Efficient attention, ``softmax_E(Q) (softmax_N(K)ᵀ V)``, at a cost linear in N (Shen 2021, arXiv 1812.01243).

    Each of the E channels of a key is a softmax over the rows, which gathers one mean of the values; each row mixes the
    E means with the softmax of its query over the channels. The weights of a row sum to 1. Every row enters the softmax
    of the keys, so that there is no causal form. It does not approximate softmax attention.

    Parameters
    ----------
    embed_dim : int
        Width C of the rows.
    num_heads : int
        Number of heads H, which divides ``embed_dim``.
    bias : bool, default True
        Whether the projections have a bias.
    device, dtype : optional
        Device and dtype of the parameters.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import EfficientAttention
    >>> EfficientAttention(16, 2)(torch.randn(3, 100, 16), torch.tensor([100, 20, 1])).shape
    torch.Size([3, 100, 16])
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, bias: bool = True, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__(embed_dim, num_heads, bias=bias, device=device, dtype=dtype)
        self.reset_parameters()

    def forward(self, x: Tensor, valid_lens: Tensor | None = None) -> Tensor:
        """Return rows (B, N, C) for rows (B, N, C), of which ``valid_lens`` (B,) are valid; others are ignored."""
        q, k, v = self.projected(x, valid_lens)
        real = real_rows(k, valid_lens)
        if real is not None:
            k = k.masked_fill(~real, torch.finfo(k.dtype).min)
        share = k.softmax(2)
        if real is not None:
            share = torch.where(real, share, 0.0)  # a sequence without rows gathers 0
        return self.merged(q.softmax(3).to(v.dtype) @ (share.to(v.dtype).mT @ v))
