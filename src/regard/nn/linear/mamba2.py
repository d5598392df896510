"""Mamba-2: a state space model with one decay per head and step, which is a gated linear attention."""

from __future__ import annotations

from typing import Any, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._utils.constraints import flag, positive, size
from regard._utils.errors import rejected
from regard._utils.mechanism import mechanism
from regard.nn._base import parameter
from regard.nn.linear.layout import Layout
from regard.nn.linear.recurrent_attention import (
    Made,
    RecurrentAttention,
    Terms,
    draw_decay,
    heads,
    mamba_decay,
)
from regard.nn.linear.short_convolution import ShortConvolution
from regard.nn.positions.rotary import Rotation


class Mamba2Options(TypedDict, total=False):
    """Keyword arguments that every :class:`Mamba2` takes."""

    head_dim: int | None
    state_dim: int
    num_groups: int
    conv_size: int
    conv_bias: bool
    bias: bool
    norm_eps: float
    device: Any
    dtype: Any


@mechanism(
    formula="S ← e^(−e^A Δ) S + Δ B xᵀ; y = norm((CᵀS + D x) ⊙ SiLU(z)) · W_O, Δ = softplus(w x + b)",
    sources=("dao2024",),
    learned="W_in (2·I + 2·G·N + H, E), A, b, D (H), convolution, norm (I), W_O (E, I)",
    cost="O(L·E·I + L·I·N)",
    causal="yes",
    cache="H·K·V and the convolution's steps",
)
class Mamba2(RecurrentAttention):
    """Mamba-2's mixer: a state of width N per channel, with one decay per head and step (Dao 2024, arXiv 2405.21060).

    A projection of the row gives a gate z and values x (I = H·D columns each), keys B and queries C (G groups of N),
    and a step size Δ = softplus(w + b) per head. Values, keys and queries pass a short convolution with SiLU. Then
    ``S ← e^(−e^A Δ) S + Δ B xᵀ`` and ``y = CᵀS + D x`` in each head, and the rows are projected from an RMS norm of
    ``y ⊙ SiLU(z)`` over each group's columns. Head h reads the keys and queries of group ``h // (H/G)``.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of heads H.
    head_dim : int, optional
        Width D of a head; defaults to 2·E/H.
    state_dim : int, default 128
        Width N of keys and queries.
    num_groups : int, default 1
        Number of groups G of keys and queries, which divides H.
    conv_size : int, default 4
        Steps that the short convolution reads.
    conv_bias : bool, default True
    bias : bool, default False
        Whether the two projections have a bias.
    norm_eps : float, default 1e-5
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import LinearCache, Mamba2
    >>> layer, x, cache = Mamba2(16, 4, state_dim=8).eval(), torch.randn(3, 5, 16), LinearCache()
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
        head_dim: int | None = None,
        state_dim: int = 128,
        num_groups: int = 1,
        conv_size: int = 4,
        conv_bias: bool = True,
        bias: bool = False,
        norm_eps: float = 1e-5,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        where = {"device": device, "dtype": dtype}
        super().__init__(embed_dim, num_heads)
        E, H, self.head_dim = self.embed_dim, self.num_heads, self.head_width("head_dim", head_dim, 2)
        self.state_dim = size(self, "state_dim", state_dim)
        self.num_groups = size(self, "num_groups", num_groups)
        if H % self.num_groups:
            raise rejected(type(self).__name__, "num_groups", f"divide num_heads {H}", num_groups)
        flag(self, "bias", bias)
        inner, keys = H * self.head_dim, self.num_groups * self.state_dim
        self._widths = inner, keys, keys  # of values x, keys B and queries C
        self.proj = nn.Linear(E, 2 * inner + 2 * keys + H, bias=bias, **where)
        self.conv = ShortConvolution(inner + 2 * keys, conv_size, bias=conv_bias, **where)
        self.A_log, self.dt_bias, self.D = (parameter(H, **where) for _ in range(3))
        self.norm_weight = parameter(inner, **where)
        self.norm_eps = positive(self, "norm_eps", norm_eps)
        self.out = nn.Linear(inner, E, bias=bias, **where)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the matrices by Glorot's rule, the decay as the paper does, and set D and the norm's scale to 1."""
        super().reset_parameters()
        draw_decay(self.A_log, self.dt_bias)
        nn.init.ones_(self.D)
        nn.init.ones_(self.norm_weight)

    def terms(self, x: Tensor, past: Tensor | None, layout: Layout, rotation: Rotation | None) -> Made:  # noqa: ARG002
        """Return the terms of the recurrence."""
        gate, rows, delta = self.proj(x).split((self._widths[0], sum(self._widths), self.num_heads), -1)
        rows, past = self.conv.run(rows, past, layout)
        value, key, query = rows.to(torch.promote_types(rows.dtype, torch.float32)).split(self._widths, -1)
        log_decay, rate = mamba_decay(delta, self.A_log, self.dt_bias)
        log_decay, rate = log_decay.transpose(1, 2), rate.transpose(1, 2)
        query, key = heads(query, self.num_groups), heads(key, self.num_groups)
        return Terms(query, key, heads(value, self.num_heads), log_decay, rate, scale=1.0, gate=gate), past

    def finish(self, read: Tensor, x: Tensor, terms: Terms) -> Tensor:
        """Return the rows."""
        value = terms.value.transpose(1, 2)  # (B, L, H, D)
        read = read.to(value.dtype) + self.D.to(value.dtype).unsqueeze(-1) * value
        assert terms.gate is not None
        gated = read.flatten(-2) * F.silu(terms.gate.to(value.dtype))
        grouped = gated.unflatten(-1, (self.num_groups, -1))
        normed = F.rms_norm(grouped, grouped.shape[-1:], eps=self.norm_eps).flatten(-2)
        rows: Tensor = self.out(self.norm_weight * normed.to(x.dtype))
        return rows

    def weights(self, terms: Terms, layout: Layout, *state: Tensor) -> Tensor:  # noqa: ARG002
        """Return the effective weights (B, H, L, L), with D on the diagonal."""
        found = super().weights(terms, layout)
        skip = self.D.to(found.dtype).view(-1, 1, 1) * torch.eye(
            found.shape[-1], dtype=found.dtype, device=found.device
        )
        return found + skip

    def extra_repr(self) -> str:
        """Return the sizes."""
        sizes = f"{super().extra_repr()}, head_dim={self.head_dim}, state_dim={self.state_dim}"
        return sizes + (f", num_groups={self.num_groups}" if self.num_groups > 1 else "")
