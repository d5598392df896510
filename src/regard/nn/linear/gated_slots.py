"""Gated slot attention: keys and values are kept in slots, which softmax reads.

Dimensions: B batch, L steps, E width, H heads, M slots, K width of a key, V of a value.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._utils.constraints import positive, size
from regard._utils.mechanism import mechanism
from regard.nn.linear.gated import gated_recurrence
from regard.nn.linear.layout import Layout
from regard.nn.linear.operator import recur
from regard.nn.linear.recurrence import document_starts
from regard.nn.linear.recurrence_weights import gated_recurrence_weights
from regard.nn.linear.recurrent_attention import Made, RecurrentAttention, Terms, heads
from regard.nn.linear.short_convolution import ShortConvolution
from regard.nn.linear.steps import Steps
from regard.nn.positions.rotary import Rotation


@mechanism(
    formula="K̃ ← α K̃ + (1 − α) kᵀ, Ṽ alike, α = σ(W_α x)^(1/τ); y = norm(SiLU(Ṽᵀ softmax(K̃ q))) · W_O",
    sources=("zhang2024gsa",),
    learned="W_QKV (H·(2·K + V), E), W_α (H·M, E), norm (H·V), W_O (E, H·V)",
    cost="O(L·E² + L·E·M)",
    causal="yes",
    cache="H·M·(K + V)",
)
class GatedSlotAttention(RecurrentAttention):
    """Gated slot attention (GSA): softmax over M slots, each a running mean of keys and of values (Zhang 2024).

    Slot m of a head forgets by a gate of its own and takes in what it forgets of the new key and value,
    ``K̃_m ← α_m K̃_m + (1 − α_m) k`` and ``Ṽ_m ← α_m Ṽ_m + (1 − α_m) v``, with ``α = σ(W_α x)^(1/τ)``. The head reads
    ``Ṽᵀ softmax(K̃ q)`` (arXiv 2409.07146). Queries, keys and values pass SiLU, and so does what is read, before one RMS
    norm over all heads. As in flash-linear-attention's layer, scores have no factor 1/√K.

    These are two gated recurrences with a softmax between. The first is read along its slots, not along its keys, so
    that each slot runs as a head with a value of one column: it takes ten times as long as the second.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of heads H.
    num_slots : int, optional
        Slots M of a head; defaults to K.
    key_dim, value_dim : int, optional
        Widths K and V of a head; K defaults to E/H, V to K.
    damping : float, default 8.0
        τ: the larger, the longer slots remember.
    conv_size : int, optional
        Steps that a short convolution of queries, keys and values reads, which ends in a SiLU of its own. None is no
        convolution, as in the paper.
    norm_eps : float, default 1e-5
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import GatedSlotAttention, LinearCache
    >>> layer, x, cache = GatedSlotAttention(16, 2, num_slots=4).eval(), torch.randn(3, 5, 16), LinearCache()
    >>> with torch.no_grad():
    ...     steps = [layer(t, cache=cache) for t in x.split(1, 1)]
    >>> torch.allclose(torch.cat(steps, 1), layer(x), atol=1e-5)
    True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_slots: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        damping: float = 8.0,
        conv_size: int | None = None,
        norm_eps: float = 1e-5,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        where = {"device": device, "dtype": dtype}
        super().__init__(embed_dim, num_heads)
        E, H, self.key_dim = self.embed_dim, self.num_heads, self.head_width("key_dim", key_dim)
        self.value_dim = self.key_dim if value_dim is None else size(self, "value_dim", value_dim)
        self.num_slots = self.key_dim if num_slots is None else size(self, "num_slots", num_slots)
        self.damping = positive(self, "damping", damping)
        self.qkv = nn.Linear(E, sum(self._widths), bias=False, **where)
        self.slots = nn.Linear(E, H * self.num_slots, bias=False, **where)
        width = None if conv_size is None else size(self, "conv_size", conv_size)
        self.conv = None if width is None else ShortConvolution(sum(self._widths), width, **where)
        self.norm = nn.RMSNorm(H * self.value_dim, eps=positive(self, "norm_eps", norm_eps), **where)
        self.out = nn.Linear(H * self.value_dim, E, bias=False, **where)
        self.reset_parameters()

    @property
    def _widths(self) -> tuple[int, int, int]:
        """Widths of all queries, keys and values."""
        return self.num_heads * self.key_dim, self.num_heads * self.key_dim, self.num_heads * self.value_dim

    def terms(self, x: Tensor, past: Tensor | None, layout: Layout, rotation: Rotation | None) -> Made:  # noqa: ARG002
        """Return the terms of the recurrences; keys and values are those of slots."""
        rows, end, wide = self.qkv(x), x[:, :0], torch.promote_types(x.dtype, torch.float32)
        if self.conv is not None:
            rows, end = self.conv.run(rows, past, layout)
        query, key, value = (heads(F.silu(each.to(wide)), self.num_heads) for each in rows.split(self._widths, -1))
        log_decay = F.logsigmoid(heads(self.slots(x), self.num_heads).to(wide)) / self.damping
        return Terms(query, key, value, log_decay), end

    def recur(self, terms: Terms, layout: Layout, before: int, *state: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:  # noqa: ARG002
        """Return what each head reads (B, H, L, V), and the keys and values (B, H, M, K + V) of the slots."""
        widths = self.key_dim, self.value_dim
        keys, values = state[0].split(widths, -1) if state else (None, None)
        weights, keys = self._weights(terms, layout, keys)
        assert terms.log_decay is not None
        read, values = gated_recurrence(
            weights,
            -torch.expm1(terms.log_decay),
            terms.value,
            log_decay=terms.log_decay,
            scale=1.0,
            state=values,
            documents=layout.runs,
            return_state=True,
        )
        # Padding has weights, too.
        return layout.clear(read.transpose(1, 2)).transpose(1, 2), (torch.cat([keys, values], -1),)

    def _weights(self, terms: Terms, layout: Layout, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the weights of slots (B, H, L, M), and their keys (B, H, M, K) after the last step.

        A slot is a head of the recurrence here: what it takes in of a key is a value of one column.
        """
        assert terms.log_decay is not None
        # Contiguous: compilers take the transposed tensor for a view otherwise.
        log_decay = terms.log_decay.transpose(2, 3).contiguous().flatten(1, 2).unsqueeze(-1)
        starts = document_starts("GatedSlotAttention", layout.runs, terms.key)
        steps = Steps(terms.query, terms.key, -torch.expm1(log_decay), log_decay, resets=starts)
        keys = None if keys is None else keys.flatten(1, 2).unsqueeze(-1)
        scores, end = recur(steps, keys, form="auto", chunk=64)
        slots = self.num_heads, self.num_slots
        scores, end = (each.squeeze(-1).unflatten(1, slots) for each in (scores, end))
        # The inspector takes a softmax for attention to keys; here it is the query of a recurrence, which it records.
        return scores.transpose(2, 3).log_softmax(-1).exp(), end

    def weights(self, terms: Terms, layout: Layout, *state: Tensor) -> Tensor:
        """Return the effective weights (B, H, L, L): outputs are linear in the values."""
        assert terms.log_decay is not None
        weights, _ = self._weights(terms, layout, state[0][..., : self.key_dim] if state else None)
        written = -torch.expm1(terms.log_decay)
        return gated_recurrence_weights(weights, written, log_decay=terms.log_decay, scale=1.0, documents=layout.runs)

    def normed(self, read: Tensor) -> Tensor:
        """Return what the heads read (B, L, H, V), after SiLU, normed over all of them, as rows (B, L, H · V)."""
        rows: Tensor = self.norm(F.silu(read).flatten(-2))
        return rows

    def extra_repr(self) -> str:
        """Return the sizes."""
        sizes = f"num_slots={self.num_slots}, key_dim={self.key_dim}, value_dim={self.value_dim}"
        return f"{super().extra_repr()}, {sizes}"
