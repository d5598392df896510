"""PaTH attention: between a key and a query, each token's reflection turns the key."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor, nn

from regard import masks
from regard._utils.constraints import flag
from regard._utils.mechanism import mechanism
from regard.functional import attention
from regard.masks import Mask
from regard.nn.heads.causal import CausalSelfAttention, UnrotatedOptions
from regard.nn.linear.recurrence import substituted
from regard.nn.linear.recurrent_attention import heads, unit
from regard.nn.linear.short_convolution import ShortConvolution
from regard.nn.positions.encodings import wide


@mechanism(
    formula="softmax_{j ≤ t}(q_tᵀ (I − β_t w_t w_tᵀ) ⋯ (I − β_{j+1} w_{j+1} w_{j+1}ᵀ) k_j / √D) V · W_O",
    sources=("yang2025path",),
    learned="W_QKV ((H + 2·G)·D, E), W_w (G·D, E), convolution, W_β (G, E), b_β (G), W_O (E, H·D); W_f (H, E), b_f (H)",
    cost="O(L·E² + L²·E + L³·G / 6)",
    causal="yes",
    cache="G·(3·D + 1) per token",
)
class PathAttention(CausalSelfAttention):
    """PaTH attention: positions are products of reflections that depend on the tokens (Yang 2025, arXiv 2505.16381).

    Each token has a unit vector w, a short convolution of ``W_w x``, and a rate ``β = 2σ(W_β x + b_β)``. The key of
    token j meets the query of token t after the reflections ``I − β w wᵀ`` of the tokens j + 1 to t. Where tokens
    write nothing, β near 0, keys stay as they are; without any, this is attention without positions. With
    ``forget=True``, scores also fade as in :class:`ForgettingAttention` (PaTH-FoX).

    The products are computed by one triangular system for all tokens: a matrix (B, G, L, L), and a bias
    (B, H, L, L) of the scores. A step with a cache solves it again.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of heads H.
    conv_size : int, default 3
        Tokens that the short convolution of w reads.
    forget : bool, default False
        Whether there are forget gates. Their log is not scaled by 1/√D.
    num_kv_heads, head_dim, bias, engine, device, dtype : optional
        See :class:`SelfAttention`; there is no ``bias`` by default. There is a reflection for each key–value head.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import KVCache, PathAttention
    >>> layer, x, cache = PathAttention(16, 4, num_kv_heads=2).eval(), torch.randn(3, 5, 16), KVCache()
    >>> steps = [layer(t, cache=cache) for t in x.split(1, 1)]
    >>> torch.allclose(torch.cat(steps, 1), layer(x), atol=1e-5)
    True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        conv_size: int = 3,
        forget: bool = False,
        device: Any = None,
        dtype: Any = None,
        **options: Unpack[UnrotatedOptions],
    ) -> None:
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(embed_dim, num_heads, **where, **options)
        width = self.num_kv_heads * self.head_dim
        self.turns = nn.Linear(self.embed_dim, width, bias=False, **where)
        self.conv = ShortConvolution(width, conv_size, **where)
        self.rate = nn.Linear(self.embed_dim, self.num_kv_heads, **where)
        self.forget = nn.Linear(self.embed_dim, self.num_heads, **where) if flag(self, "forget", forget) else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Re-initialize the weights by Glorot's rule, and biases to 0; that of forget gates to 5."""
        super().reset_parameters()
        for layer in (self.turns, self.rate, self.forget):
            if layer is not None:
                nn.init.xavier_uniform_(layer.weight)
        self.conv.reset_parameters()
        nn.init.zeros_(self.rate.bias)
        if self.forget is not None:
            nn.init.constant_(self.forget.bias, 5.0)

    def kept(self, x: Tensor, key: Tensor) -> Tensor:
        """Return keys (B, G, L, D) with what reflections and forget gates are made of behind them."""
        parts = [key, heads(self.turns(x), self.num_kv_heads), heads(self.rate(x), self.num_kv_heads)]
        if self.forget is not None:
            parts.append(heads(self.forget(x), self.num_kv_heads))
        return torch.cat(parts, -1)

    def attended(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, visible: Mask) -> Tensor:  # noqa: ARG002
        """Return the heads' outputs (B, H, L, D)."""
        H, G, D, dtype = self.num_heads, self.num_kv_heads, self.head_dim, wide(query.dtype)
        key, turns, rate, *gates = key.split((D, D, 1, *([] if self.forget is None else [H // G])), -1)
        turns = self.conv(turns.transpose(1, 2).flatten(2))
        axes, rate = unit(heads(turns, G)).to(dtype), 2 * rate.to(dtype).sigmoid()
        L, S = query.shape[2], key.shape[2]
        # u_sj = β_s w_s·(k_j after the reflections j + 1 to s − 1) solves (I + β w wᵀ below the diagonal) u = β w kᵀ.
        earlier = (rate * (axes @ axes.mT)).tril(-1)
        moved = substituted(earlier, (rate * (axes @ key.to(dtype).mT)).tril(-1))
        asked = query.unflatten(1, (G, H // G)).to(dtype) @ axes.mT.unsqueeze(2)  # (B, G, H/G, L, S)
        bias = asked.tril(S - L) @ moved.unsqueeze(2) * (-(D**-0.5))
        visible = visible & masks.dense(bias.flatten(1, 2))
        if gates:
            fading = nn.functional.logsigmoid(gates[0].to(dtype)).transpose(2, 3).flatten(1, 2)
            visible = visible & masks.forgetting(fading, align="lower_right")
        return attention(query, key, value, visible, enable_gqa=True, engine=self.engine)

    def extra_repr(self) -> str:
        """Return the sizes and the settings that differ from the defaults."""
        return f"{super().extra_repr()}, conv_size={self.conv.width}"
