"""Grouped-tied attention: one row is a group's value and half of its key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from regard._utils.errors import rejected
from regard._utils.mechanism import mechanism
from regard.functional import attention
from regard.masks import Mask
from regard.nn.heads.causal import CausalOptions, CausalSelfAttention


@mechanism(
    formula="concat_h softmax([q_h; R(q'_h)] [s_g; R(W_R x)]ᵀ / √D) [s_g; t_g] · W_O, [s_g; t_g] = W_g x",
    sources=("zadouri2025",),
    learned="W_Q (H·D, E), W_g (D, E) of each group, W_R (D/2, E), W_O (E, H·D), biases",
    cost="O(L·E² + L²·E)",
    causal="yes",
    cache="G·D + D/2 per token",
)
class GroupedTiedAttention(CausalSelfAttention):
    """Grouped-tied attention (GTA): keys and values of a group are one row (Zadouri 2025, arXiv 2505.21487).

    The row of group g is ``W_g x``, of width D. It is the value; its first half is the first half of the key. The other
    half of the key has rotary positions, and is the same for all groups. A cache holds about half of what grouped-query
    attention with as many groups keeps.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of heads H.
    num_kv_heads : int, optional
        Number of groups G, which divides H; defaults to H.
    head_dim : int, optional
        Width D of a head, even; defaults to E/H.
    bias : bool, default False
        Whether the projections have a bias.
    rotary : Rotary, optional
        Rotary encoding of width D/2 for the second halves of queries and keys.
    engine : str or Engine, default "auto"
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import GroupedTiedAttention, KVCache, Rotary
    >>> layer, cache = GroupedTiedAttention(16, 4, num_kv_heads=2, rotary=Rotary(2)).eval(), KVCache()
    >>> x = torch.randn(3, 5, 16)
    >>> steps = [layer(t, cache=cache) for t in x.split(1, 1)]
    >>> torch.allclose(torch.cat(steps, 1), layer(x), atol=1e-5)
    True
    >>> cache.key.shape, cache.value.shape  # 2·4 + 2 numbers of a token
    (torch.Size([3, 1, 5, 10]), torch.Size([3, 1, 5, 0]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        device: Any = None,
        dtype: Any = None,
        **options: Unpack[CausalOptions],
    ) -> None:
        super().__init__(embed_dim, num_heads, device=device, dtype=dtype, **options)
        D, rotary, bias = self.head_dim, self.rotary, self.out.bias is not None
        where = {"device": device, "dtype": dtype}
        if D % 2:
            raise rejected("GroupedTiedAttention", "head_dim", "be even", D)
        if rotary is not None and rotary.head_dim != D // 2:
            raise rejected("GroupedTiedAttention", "rotary", f"have width head_dim / 2, {D // 2}", rotary.head_dim)
        queries = nn.Linear(self.embed_dim, self.num_heads * D, bias=bias, **where)
        rows = nn.Linear(self.embed_dim, self.num_kv_heads * D + D // 2, bias=bias, **where)
        self.qkv = nn.ModuleDict({"queries": queries, "rows": rows})
        self.reset_parameters()

    def projected(self, x: Tensor, turn: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, H, L, D), what a cache keeps (B, 1, L, G·D + D/2), and values of width 0."""
        queries, tied = self.qkv.children()
        query: Tensor = queries(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        rows: Tensor = tied(x).unsqueeze(1)
        if turn is not None:
            half = self.head_dim // 2
            query = torch.cat((query[..., :half], turn(query[..., half:])), -1)
            rows = torch.cat((rows[..., :-half], turn(rows[..., -half:])), -1)
        return query, rows, rows[..., :0]

    def attended(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, visible: Mask) -> Tensor:  # noqa: ARG002
        """Return the heads' outputs (B, H, L, D)."""
        half = self.head_dim // 2
        tied = key[..., :-half].squeeze(1).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2)
        keys = torch.cat((tied[..., :half], key[..., -half:].expand(-1, self.num_kv_heads, -1, -1)), -1)
        return attention(query, keys, tied, visible, enable_gqa=True, engine=self.engine)
