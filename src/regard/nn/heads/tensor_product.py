"""Tensor product attention: queries, keys and values are sums of products of two short factors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from regard._utils.constraints import size
from regard._utils.mechanism import mechanism
from regard.functional import attention
from regard.masks import Mask
from regard.nn.heads.causal import CausalSelfAttention, UngroupedOptions


@mechanism(
    formula="concat_h softmax(q_h k_hᵀ / √D) v_h · W_O, q_h = Σ_r a_rh(x) R(b_r(x)) / R_q, k and v likewise",
    sources=("zhang2025tpa",),
    learned="W_a (R·H, E) and W_b (R·D, E) for each of queries, keys and values, W_O (E, H·D), biases",
    cost="O(L·E·R·(H+D) + L·R·H·D + L²·E)",
    causal="yes",
    cache="(R_k + R_v)·(H + D) per token",
)
class TensorProductAttention(CausalSelfAttention):
    """Tensor product attention (TPA): the cache holds factors of keys and values (Zhang 2025, arXiv 2501.06425).

    The keys of all heads are a matrix (H, D), the mean of R products: ``k_h = Σ_r a_rh(x) R(b_r(x)) / R``, with
    ``a(x)`` (R, H) and ``b(x)`` (R, D) linear in x. So are queries and values, each with its own R. Rotary positions R
    turn b, which is the same as to turn the keys. A step computes the keys and values of all earlier tokens anew.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of heads H.
    query_rank : int, default 6
        Number of products for queries.
    key_rank, value_rank : int, default 2
        Number of products for keys and for values.
    head_dim, bias, rotary, engine, device, dtype : optional
        See :class:`SelfAttention`; there is no ``bias`` by default.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import KVCache, Rotary, TensorProductAttention
    >>> layer, cache = TensorProductAttention(16, 4, rotary=Rotary(4)).eval(), KVCache()
    >>> x = torch.randn(3, 5, 16)
    >>> steps = [layer(t, cache=cache) for t in x.split(1, 1)]
    >>> torch.allclose(torch.cat(steps, 1), layer(x), atol=1e-5)
    True
    >>> cache.key.shape  # 2·(4 + 4) numbers for the keys of a token
    torch.Size([3, 1, 5, 16])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        query_rank: int = 6,
        key_rank: int = 2,
        value_rank: int = 2,
        device: Any = None,
        dtype: Any = None,
        **options: Unpack[UngroupedOptions],
    ) -> None:
        super().__init__(embed_dim, num_heads, device=device, dtype=dtype, **options)
        self.query_rank, self.key_rank = size(self, "query_rank", query_rank), size(self, "key_rank", key_rank)
        self.value_rank, width = size(self, "value_rank", value_rank), self.num_heads + self.head_dim
        bias = self.out.bias is not None
        self.qkv = nn.ModuleList(
            nn.Linear(self.embed_dim, rank * width, bias=bias, device=device, dtype=dtype) for rank in self._ranks
        )
        self.reset_parameters()

    @property
    def _ranks(self) -> tuple[int, int, int]:
        return self.query_rank, self.key_rank, self.value_rank

    def projected(self, x: Tensor, turn: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, H, L, D), and the factors of keys and values (B, 1, L, R·(H + D))."""
        made = []
        for i, (layer, rank) in enumerate(zip(self.qkv.children(), self._ranks)):
            rows: Tensor = layer(x)
            if turn is not None and i < 2:
                by_head, by_channel = rows.split((rank * self.num_heads, rank * self.head_dim), -1)
                turned = turn(by_channel.unflatten(-1, (rank, -1)).transpose(1, 2))
                rows = torch.cat((by_head, turned.transpose(1, 2).flatten(2)), -1)
            made.append(rows.unsqueeze(1))
        return self._product(made[0], self.query_rank), made[1], made[2]

    def _product(self, factors: Tensor, rank: int) -> Tensor:
        """Return the rows (B, H, L, D) of factors (B, 1, L, R·(H + D))."""
        by_head, by_channel = factors.squeeze(1).split((rank * self.num_heads, rank * self.head_dim), -1)
        by_head, by_channel = by_head.unflatten(-1, (rank, -1)), by_channel.unflatten(-1, (rank, -1))
        return (by_head.mT @ by_channel / rank).transpose(1, 2)

    def attended(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, visible: Mask) -> Tensor:  # noqa: ARG002
        """Return the heads' outputs (B, H, L, D)."""
        key, value = self._product(key, self.key_rank), self._product(value, self.value_rank)
        return attention(query, key, value, visible, engine=self.engine)

    def extra_repr(self) -> str:
        """Return the sizes and the settings that differ from the defaults."""
        ranks = [f"{name}={getattr(self, name)}" for name in ("query_rank", "key_rank", "value_rank")]
        return ", ".join([super().extra_repr(), *ranks])
