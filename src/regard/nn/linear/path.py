"""PaTH attention: between a key and a query, each token's reflection turns the key."""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard import masks
from regard._utils.constraints import flag
from regard._utils.mechanism import mechanism
from regard._utils.tracing import autocast_suspended, is_observed, is_traced
from regard.functional import attention
from regard.masks import Mask
from regard.masks.base import AndMask
from regard.masks.padding import FirstKeys
from regard.nn.heads.causal import CausalSelfAttention, UnrotatedOptions
from regard.nn.linear.recurrence import substituted
from regard.nn.linear.recurrent_attention import heads, unit
from regard.nn.linear.short_convolution import ShortConvolution
from regard.nn.positions.encodings import wide


@mechanism(
    formula="softmax_{j ≤ t}(q_tᵀ (I − β_t w_t w_tᵀ) ⋯ (I − β_{j+1} w_{j+1} w_{j+1}ᵀ) k_j / √D) V · W_O",
    sources=("yang2025path",),
    learned="W_QKV ((H + 2·G)·D, E), W_w (G·D, E), convolution, W_β (G, E), b_β (G), W_O (E, H·D); W_f (H, E), b_f (H)",
    cost="O(L·E² + L²·E)",
    causal="yes",
    cache="G·(3·D + 1) per token",
)
class PathAttention(CausalSelfAttention):
    """PaTH attention: positions are products of reflections that depend on the tokens (Yang 2025, arXiv 2505.16381).

    Each token has a unit vector w, a short convolution of ``W_w x``, and a rate ``β = 2σ(W_β x + b_β)``. The key of
    token j meets the query of token t after the reflections ``I − β w wᵀ`` of the tokens j + 1 to t. Where tokens
    write nothing, β near 0, keys stay as they are; without any, this is attention without positions. With
    ``forget=True``, scores also fade as in :class:`ForgettingAttention` (PaTH-FoX).

    Queries pass the reflections of a block of 128 tokens at a time. Memory is that of the scores of one block of
    queries, (B, H, 128, L); compiled, exported and observed calls take all tokens as one block. A step with a cache
    computes the blocks again, in O(L·D) for each head.

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
        # Blocks multiply what comes later by zero: rows that are not finite are left out, and their readers become NaN.
        finite = torch.cat((key, axes, rate, *gates), -1).isfinite().all(-1, keepdim=True)
        key, axes, rate, *gates = (torch.where(finite, each, 0.0) for each in (key, axes, rate, *gates))
        fading = nn.functional.logsigmoid(gates[0].to(dtype)).transpose(2, 3).flatten(1, 2) if gates else None
        length, before = key.shape[2], key.shape[2] - query.shape[2]

        def run(blocks: list[_Block], query: Tensor, end: int) -> Tensor:
            """Return the outputs of queries, the last of which is at end − 1, from the blocks up to there."""
            with autocast_suspended(query.device.type):
                bias = _turned(query.unflatten(1, (G, H // G)).to(dtype), blocks).flatten(1, 2) * D**-0.5
            mask = _first(visible, end) & masks.dense(bias)
            if fading is not None:
                mask = mask & masks.forgetting(fading[:, :, :end], align="lower_right")
            return attention(query, key[:, :, :end], value[:, :, :end], mask, enable_gqa=True, engine=self.engine)

        whole = is_traced(query) or is_observed() or length <= _BLOCK
        rows = [(each,) if whole else each.split(_BLOCK, 2) for each in (axes, key.to(dtype), rate)]
        with autocast_suspended(query.device.type):
            blocks = [_Block.of(*each) for each in zip(*rows)]
        if whole:
            found = [run(blocks, query, length)]
        else:
            found = []
            for i in range(before // _BLOCK, len(blocks)):
                first, end = max(i * _BLOCK, before), min((i + 1) * _BLOCK, length)
                given = blocks[: i + 1], query[:, :, first - before : end - before], end
                if torch.is_grad_enabled():  # scores are computed again in the backward pass
                    found.append(checkpoint(run, *given, use_reentrant=False, preserve_rng_state=False))
                else:
                    found.append(run(*given))
        broken = ((~finite).cumsum(2) > 0)[:, :, before:].repeat_interleave(H // G, 1)
        return torch.where(broken, torch.nan, torch.cat(found, 2))

    def extra_repr(self) -> str:
        """Return the sizes and the settings that differ from the defaults."""
        return f"{super().extra_repr()}, conv_size={self.conv.width}"


def _first(visible: Mask, count: int) -> Mask:
    """Return a causal mask, perhaps with lengths of sequences, for so many keys."""
    if not isinstance(visible, AndMask):
        return visible
    causal, lengths = visible.masks
    assert isinstance(lengths, FirstKeys) and isinstance(lengths.n, Tensor), "the base makes these masks"
    return causal & masks.padding(lengths.n.clamp(max=count))


# Keys after reflections, block by block -------------------------------------------------------------------------------
# A block of reflections turns a query q into q − (q Wᵀ) X, and adds −(q Wᵀ) U to the scores of the block's own keys.
# There (I + A) X = β W, and (I + A) U is β W Kᵀ below the diagonal, where A is β W Wᵀ below the diagonal.


#: Tokens of a block.
_BLOCK = 128


class _Block(NamedTuple):
    """The reflections of consecutive tokens."""

    axes: Tensor  # W, (B, G, C, D)
    key: Tensor  # (B, G, C, D)
    turning: Tensor  # X, (B, G, C, D)
    moving: Tensor  # U, (B, G, C, C)

    @classmethod
    def of(cls, axes: Tensor, key: Tensor, rate: Tensor) -> _Block:
        scaled = rate * axes
        right = torch.cat((scaled, (scaled @ key.mT).tril(-1)), -1)
        turning, moving = substituted((scaled @ axes.mT).tril(-1), right).split((axes.shape[-1], axes.shape[-2]), -1)
        return cls(axes, key, turning, moving)


def _turned(query: Tensor, blocks: list[_Block]) -> Tensor:
    """Return what reflections add to the scores (B, G, H/G, C, S) of queries (B, G, H/G, C, D), the last rows of S."""
    found: list[Tensor] = []
    turned = query
    for block in reversed(blocks):
        along = turned @ block.axes.mT.unsqueeze(2)
        if not found:  # a query meets the reflections up to its own
            along = along.tril(along.shape[-1] - along.shape[-2])
        found.append((turned - query) @ block.key.mT.unsqueeze(2) - along @ block.moving.unsqueeze(2))
        turned = turned - along @ block.turning.unsqueeze(2)
    return torch.cat(found[::-1], -1)
