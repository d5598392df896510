"""Attention to blocks of keys that the queries choose: mixture of block attention and native sparse attention."""

from __future__ import annotations

from functools import partial
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import masks
from regard._utils.constraints import Integer, size
from regard._utils.mechanism import mechanism
from regard._utils.tracing import is_symbolic
from regard.functional import attention
from regard.masks import Mask
from regard.nn._base import draw_linear
from regard.nn.heads.causal import CausalOptions, CausalSelfAttention

#: Number of scores of blocks that are held at once.
HELD = 1 << 22

# Dimensions: B batch, L queries, S keys, E width, H heads, G groups, D width of a head, N blocks, C keys of a block.


class BlockAttention(CausalSelfAttention):
    """Base of causal self-attention in which each query chooses blocks of earlier keys."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        block_size: int,
        device: Any = None,
        dtype: Any = None,
        **options: Unpack[CausalOptions],
    ) -> None:
        super().__init__(embed_dim, num_heads, device=device, dtype=dtype, **options)
        self.block_size = size(self, "block_size", block_size)

    def _places(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the positions (L,) of the queries among the keys."""
        L, S = query.shape[2], key.shape[2]
        return torch.arange(S - L, S, device=query.device)

    def _means(self, rows: Tensor) -> Tensor:
        """Return the means (B, G, N, D) of the complete blocks of rows (B, G, S, D)."""
        count = rows.shape[2] // self.block_size
        return rows[:, :, : count * self.block_size].unflatten(2, (count, self.block_size)).mean(3)

    def _tiles(self, L: int, S: int, B: int) -> list[tuple[int, int]]:
        """Return the first and one past the last row of tiles for which scores of all blocks may be held.

        One tile of all rows where a compiler does not know how many there are.
        """
        if is_symbolic(L) or is_symbolic(S) or is_symbolic(B):
            return [(0, L)]
        step = max(HELD // max(B * self.num_heads * (S // self.block_size + 1), 1), 1)
        return [(first, min(first + step, L)) for first in range(0, L, step)]

    def extra_repr(self) -> str:
        """Return the sizes and the settings that differ from the defaults."""
        return f"{super().extra_repr()}, block_size={self.block_size}"


def _grouped(query: Tensor, key: Tensor) -> Tensor:
    """Return the dot products (B, H, L, N) of queries (B, H, L, D) with the keys (B, G, N, D) of their groups."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    rows = query.to(dtype).unflatten(1, (key.shape[1], -1))
    return (rows @ key.to(dtype).unsqueeze(2).transpose(3, 4)).flatten(1, 2)


@mechanism(
    formula="softmax over the keys of k blocks: the query's own, and the earlier ones with the largest q·mean(K_block)",
    sources=("lu2025",),
    learned="W_QKV ((H + 2·G)·D, E), W_O (E, H·D), biases",
    cost="O(L·E² + L·H·D·(L/C + k·C)) for blocks of C keys",
    causal="yes",
    cache="2·G·D per token",
)
class MixtureOfBlockAttention(BlockAttention):
    """Mixture of block attention (MoBA): each query and head attends to the k blocks of keys that suit it best.

    Keys are divided into blocks of C. A query sees its own block causally, and the k − 1 earlier blocks whose mean key
    has the largest dot product with it, or all if there are fewer (Lu 2025, arXiv 2502.13189). One softmax covers all
    visible keys, in :func:`regard.masks.selected`; there are no parameters besides those of self-attention. The choice
    has no gradient. No L × S matrix is kept, but lists of k blocks, or of k · C keys in engine ``fused``.

    A step with a cache chooses blocks in the same way, where the paper decodes with full attention.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of heads H.
    block_size : int
        Number C of keys of a block (``moba_chunk_size``).
    topk : int
        Number k of blocks, the own one included (``moba_topk``).
    num_kv_heads, head_dim, bias, rotary, engine, device, dtype : optional
        See :class:`SelfAttention`; there is no ``bias`` by default.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import KVCache, MixtureOfBlockAttention, SelfAttention
    >>> layer = MixtureOfBlockAttention(16, 2, block_size=4, topk=2).eval()
    >>> x, cache = torch.randn(3, 11, 16), KVCache()
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
        block_size: int,
        topk: int,
        device: Any = None,
        dtype: Any = None,
        **options: Unpack[CausalOptions],
    ) -> None:
        super().__init__(embed_dim, num_heads, block_size=block_size, device=device, dtype=dtype, **options)
        self.topk = size(self, "topk", topk)
        self.reset_parameters()

    def attended(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, visible: Mask) -> Tensor:  # noqa: ARG002
        """Return the heads' outputs (B, H, L, D)."""
        chosen = masks.selected(self.chosen(query, key), self.block_size)
        return attention(query, key, value, chosen & visible, enable_gqa=True, engine=self.engine)

    @torch.no_grad()
    def chosen(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the blocks (B, H, L, k) of each query: its own, then the best earlier ones; −1 for none."""
        own = self._places(query, key) // self.block_size  # (L,)
        means = self._means(key)
        N = means.shape[2]
        k = min(self.topk - 1, N)
        blocks, found = torch.arange(N, device=query.device), []
        for first, last in self._tiles(query.shape[2], key.shape[2], query.shape[0]):
            scores = _grouped(query[:, :, first:last], means)
            scores = scores.masked_fill(blocks >= own[first:last, None], -torch.inf)
            best = scores.topk(k, -1)
            earlier = best.indices.masked_fill(best.values == -torch.inf, -1)
            found.append(torch.cat((own[first:last, None].expand(*earlier.shape[:3], 1), earlier), -1))
        return torch.cat(found, 2) if found else own.new_zeros(*query.shape[:3], k + 1)

    def extra_repr(self) -> str:
        """Return the sizes and the settings that differ from the defaults."""
        return f"{super().extra_repr()}, topk={self.topk}"


@mechanism(
    formula="σ(x W₁)·attn(q, mean K, mean V) + σ(x W₂)·attn(q, K, V; best blocks) + σ(x W₃)·attn(q, K, V; window)",
    sources=("yuan2025",),
    learned="W_QKV ((H + 2·G)·D, E), W_gate (3·H, E), W_O (E, H·D), biases",
    cost="O(L·E² + L·H·D·(L/C + k·C + window)) for blocks of C keys",
    causal="yes",
    cache="2·G·D per token",
)
class NativeSparseAttention(BlockAttention):
    """Native sparse attention (NSA): the gated sum of compressed, selected and sliding attention.

    Keys are divided into blocks of C (Yuan 2025, arXiv 2502.11089). For each head:

    - *compressed*: attention to the mean key and mean value of each block that ended at or before the query;
    - *selected*: causal attention to the keys of k blocks, the same for all heads of a group: the first block, the
      query's own and the one before it, and those with the largest weight in the compressed attention, averaged over
      the heads of the group;
    - *sliding*: attention to the last ``window`` keys, the query's own included.

    Each branch is multiplied by a gate ``σ(x W)`` per head. These are the conventions of flash-linear-attention: plain
    means over blocks of one size that do not overlap, and the same rotated keys in all branches. The paper compresses
    overlapping blocks by a learned network with keys of its own in each branch. A query before the end of the first
    block has 0 from the compressed branch. The choice has no gradient.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of heads H.
    block_size : int
        Number C of keys of a block.
    num_blocks : int
        Number k of blocks that a query selects, at least 3.
    window : int
        Number of keys of the sliding branch.
    num_kv_heads, head_dim, bias, rotary, engine, device, dtype : optional
        See :class:`SelfAttention`; there is no ``bias`` by default, and gates have none.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import KVCache, NativeSparseAttention
    >>> layer = NativeSparseAttention(16, 4, block_size=4, num_blocks=3, window=5, num_kv_heads=2).eval()
    >>> x, cache = torch.randn(3, 19, 16), KVCache()
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
        block_size: int,
        num_blocks: int,
        window: int,
        device: Any = None,
        dtype: Any = None,
        **options: Unpack[CausalOptions],
    ) -> None:
        super().__init__(embed_dim, num_heads, block_size=block_size, device=device, dtype=dtype, **options)
        self.num_blocks = Integer(ge=3)(self, "num_blocks", num_blocks)
        self.window = size(self, "window", window)
        self.gate = nn.Linear(self.embed_dim, 3 * self.num_heads, bias=False, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Re-initialize the weights by Glorot's rule and set biases to 0."""
        super().reset_parameters()
        draw_linear(self.gate)

    def attended(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, visible: Mask) -> Tensor:
        """Return the heads' outputs (B, H, L, D)."""
        attend = partial(attention, enable_gqa=True, engine=self.engine)
        keys, values = self._means(key), self._means(value)
        ended = (self._places(query, key) + 1) // self.block_size  # blocks that ended, (L,)
        compressed = attend(query, keys, values, masks.padding(ended.expand(query.shape[0], -1)))
        chosen = masks.selected(self.chosen(query, key, keys, ended), self.block_size)
        selected = attend(query, key, value, chosen & visible)
        near = masks.window(self.window - 1, 0, align="lower_right")
        sliding = attend(query, key, value, near & visible)
        gates = torch.sigmoid(self.gate(x)).unflatten(2, (self.num_heads, 3)).transpose(1, 2)  # (B, H, L, 3)
        return compressed * gates[..., :1] + selected * gates[..., 1:2] + sliding * gates[..., 2:]

    @torch.no_grad()
    def chosen(self, query: Tensor, key: Tensor, means: Tensor, ended: Tensor) -> Tensor:
        """Return the blocks (B, G, L, k) of each query and group; −1 where there are fewer."""
        N, G = (key.shape[2] + self.block_size - 1) // self.block_size, key.shape[1]  # ONNX rounds −S // C up
        blocks, found, k = torch.arange(N, device=query.device), [], min(self.num_blocks, N)
        places = self._places(query, key)
        for first, last in self._tiles(query.shape[2], key.shape[2], query.shape[0]):
            past, own = ended[first:last, None], places[first:last, None] // self.block_size
            scores = F.pad(_grouped(query[:, :, first:last], means) * self.head_dim**-0.5, (0, N - means.shape[2]))
            scores = scores.masked_fill(blocks >= past, -torch.inf).softmax(-1).nan_to_num(0.0)
            shared = scores.unflatten(1, (G, -1)).mean(2)  # (B, G, l, N)
            shared = shared.masked_fill(blocks >= past, -1.0)
            forced = (blocks == 0) | (blocks == own) | (blocks == own - 1)
            best = torch.where(forced, 2.0, shared).topk(k, -1)  # above every mean of weights
            found.append(best.indices.masked_fill(best.values < 0, -1))
        return torch.cat(found, 2) if found else blocks.new_zeros(query.shape[0], G, query.shape[2], k)

    def extra_repr(self) -> str:
        """Return the sizes and the settings that differ from the defaults."""
        return f"{super().extra_repr()}, num_blocks={self.num_blocks}, window={self.window}"
