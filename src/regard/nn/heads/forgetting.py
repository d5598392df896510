"""Forgetting attention: softmax attention whose scores decay by a forget gate of each position."""

from __future__ import annotations

from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import masks
from regard._utils.constraints import Number
from regard._utils.mechanism import mechanism
from regard.functional import attention
from regard.masks import Mask
from regard.nn._base import draw_linear
from regard.nn.heads.causal import CausalOptions, CausalSelfAttention


@mechanism(
    formula="softmax(QKᵀ / √D + c_t − c_j)V over j ≤ t, c = cumsum(log σ(x W_f + b_f))",
    sources=("lin2025",),
    learned="W_QKV ((H + 2·G)·D, E), W_f (H, E), b_f (H), W_O (E, H·D), biases",
    cost="O(L·E² + L²·E)",
    causal="yes",
    cache="2·G·D + H per token",
)
class ForgettingAttention(CausalSelfAttention):
    """Forgetting attention (FoX): causal self-attention in which a forget gate per head and position lowers scores.

    The gate of position i is ``f_i = σ(x_i W_f + b_f)``, and the score of key j for query t gets ``Σ log f_i`` over
    j < i ≤ t, after the scale (Lin 2025, arXiv 2503.02130): keys fade as the product of the gates since then. The bias
    is :func:`regard.masks.forgetting`, one number per position; gates are computed in at least float32. It needs no
    rotary encoding. A cache keeps the log gates of the heads of a group as columns behind the group's key, in the
    dtype of the keys.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of heads H.
    gate_bias : float, default 5.0
        Initial b_f. At 5, gates start near 0.993, and weights halve in about 100 positions.
    num_kv_heads, head_dim, bias, rotary, engine, device, dtype : optional
        See :class:`SelfAttention`; there is no ``bias`` by default.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import ForgettingAttention, KVCache
    >>> layer, x, cache = ForgettingAttention(16, 4, num_kv_heads=2).eval(), torch.randn(3, 5, 16), KVCache()
    >>> whole = layer(x)
    >>> steps = [layer(t, cache=cache) for t in x.split(1, 1)]
    >>> torch.allclose(torch.cat(steps, 1), whole, atol=1e-5)
    True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        gate_bias: float = 5.0,
        device: Any = None,
        dtype: Any = None,
        **options: Unpack[CausalOptions],
    ) -> None:
        super().__init__(embed_dim, num_heads, device=device, dtype=dtype, **options)
        self.gate_bias = Number()(self, "gate_bias", gate_bias)
        self.gate = nn.Linear(self.embed_dim, self.num_heads, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Re-initialize the weights by Glorot's rule, biases to 0 and those of gates to ``gate_bias``."""
        super().reset_parameters()
        draw_linear(self.gate)
        nn.init.constant_(self.gate.bias, self.gate_bias)

    def kept(self, x: Tensor, key: Tensor) -> Tensor:
        """Return keys (B, G, L, D) with the log gates of their group's heads behind them."""
        logits = self.gate(x)
        log_gates = F.logsigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32)))
        log_gates = log_gates.unflatten(2, (self.num_kv_heads, -1)).transpose(1, 2)  # (B, G, L, H/G)
        return torch.cat((key, log_gates.to(key.dtype)), -1)

    def attended(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, visible: Mask) -> Tensor:  # noqa: ARG002
        """Return the heads' outputs (B, H, L, D)."""
        key, log_gates = key.split((self.head_dim, self.num_heads // self.num_kv_heads), -1)
        fading = masks.forgetting(log_gates.transpose(2, 3).flatten(1, 2), align="lower_right")
        return attention(query, key, value, visible & fading, enable_gqa=True, engine=self.engine)
