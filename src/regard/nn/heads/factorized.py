"""Multi-matrix factorization attention: many wide heads that share one key and one value, with queries of low rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

from torch import Tensor, nn

from regard._utils.constraints import size
from regard._utils.mechanism import mechanism
from regard.functional import attention
from regard.masks import Mask
from regard.nn.heads.causal import CausalSelfAttention, UngroupedOptions


@mechanism(
    formula="concat_h softmax(R(X W_C W_hᵀ) R(X W_K)ᵀ / √D) X W_V · W_O",
    sources=("hu2024mfa",),
    learned="W_C (C, E), W_h (D, C) of each head, W_K, W_V (D, E), W_O (E, H·D), biases",
    cost="O(L·C·(E + H·D) + L·E·D·H + L²·H·D)",
    causal="yes",
    cache="2·D per token",
)
class MultiMatrixFactorizationAttention(CausalSelfAttention):
    """Multi-matrix factorization attention (MFA): wide heads with one key and value (Hu 2024, arXiv 2412.19255).

    Queries of all heads are linear in one row ``W_C x`` of width C, so that there can be more heads, and wider ones,
    than in multi-query attention with as many parameters. All heads read one key and one value of width D.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of heads H.
    query_rank : int, optional
        Width C; defaults to D.
    head_dim, bias, rotary, engine, device, dtype : optional
        See :class:`SelfAttention`; there is no ``bias`` by default. In the paper, ``head_dim`` is larger than E/H.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import KVCache, MultiMatrixFactorizationAttention, Rotary
    >>> layer, cache = MultiMatrixFactorizationAttention(16, 4, head_dim=8, rotary=Rotary(8)).eval(), KVCache()
    >>> x = torch.randn(3, 5, 16)
    >>> steps = [layer(t, cache=cache) for t in x.split(1, 1)]
    >>> torch.allclose(torch.cat(steps, 1), layer(x), atol=1e-5)
    True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        query_rank: int | None = None,
        device: Any = None,
        dtype: Any = None,
        **options: Unpack[UngroupedOptions],
    ) -> None:
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(embed_dim, num_heads, num_kv_heads=1, **where, **options)
        D, bias = self.head_dim, self.out.bias is not None
        self.query_rank = D if query_rank is None else size(self, "query_rank", query_rank)
        factors = nn.Linear(self.embed_dim, self.query_rank, bias=bias, **where)
        queries = nn.Linear(self.query_rank, self.num_heads * D, bias=bias, **where)
        keys_values = nn.Linear(self.embed_dim, 2 * D, bias=bias, **where)
        self.qkv = nn.ModuleDict({"factors": factors, "queries": queries, "keys_values": keys_values})
        self.reset_parameters()

    def projected(self, x: Tensor, turn: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, H, L, D), and the key and value of all heads (B, 1, L, D)."""
        factors, queries, keys_values = self.qkv.children()
        query: Tensor = queries(factors(x)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        key, value = keys_values(x).unsqueeze(1).chunk(2, -1)
        return (query, key, value) if turn is None else (turn(query), turn(key), value)

    def attended(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, visible: Mask) -> Tensor:  # noqa: ARG002
        """Return the heads' outputs (B, H, L, D)."""
        return attention(query, key, value, visible, enable_gqa=True, engine=self.engine)

    def extra_repr(self) -> str:
        """Return the sizes and the settings that differ from the defaults."""
        return f"{super().extra_repr()}, query_rank={self.query_rank}"
