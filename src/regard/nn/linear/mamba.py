"""Mamba: a state space model with a decay for each channel, which is gated linear attention with heads of width 1."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._utils.constraints import flag, size
from regard._utils.mechanism import mechanism
from regard.nn._base import parameter
from regard.nn.linear.layout import Layout
from regard.nn.linear.recurrent_attention import Made, RecurrentAttention, Terms, draw_decay, heads
from regard.nn.linear.short_convolution import ShortConvolution
from regard.nn.positions.rotary import Rotation


@mechanism(
    formula="s_c ← e^(Δ_c a_c) ⊙ s_c + Δ_c x_c B; y = (Cᵀs + D x) ⊙ SiLU(z) · W_O, a = −e^A, Δ = softplus(W₂ W₁ x + b)",
    sources=("gu2023",),
    learned="W_in (2·I, E), W₁, W_B, W_C (R + 2·N, I), W₂ (I, R), b (I), A (I, N), D (I), convolution, W_O (E, I)",
    cost="O(L·E·I + L·I·N)",
    causal="yes",
    cache="I·N and the convolution's steps",
)
class Mamba(RecurrentAttention):
    """Mamba's mixer (S6): a state of N numbers for each channel, with decays of their own (Gu 2023, arXiv 2312.00752).

    A projection of the row gives values x and a gate z, of I columns each; x passes a short convolution with SiLU, and
    gives a key B, a query C and, through a matrix of low rank, a step size ``Δ = softplus(W₂ W₁ x + b)`` per channel.
    Channel c keeps ``s ← e^(Δ a) ⊙ s + Δ x B`` and reads ``Cᵀs + D x``, and the rows are projected from that times
    SiLU(z). So it is a gated linear attention with a head for each channel, whose values have width 1 and whose keys
    and queries are shared. It takes memory for the decays (B, I, L, N).

    Parameters
    ----------
    embed_dim : int
        Width E.
    inner_dim : int, optional
        Number of channels I; defaults to 2·E.
    state_dim : int, default 16
        Width N of a state.
    step_rank : int, optional
        Rank R of the step size; defaults to ⌈E/16⌉.
    conv_size : int, default 4
        Steps that the short convolution reads.
    conv_bias : bool, default True
    bias : bool, default False
        Whether the first and the last projection have a bias.
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import LinearCache, Mamba
    >>> layer, x, cache = Mamba(16).eval(), torch.randn(3, 5, 16), LinearCache()
    >>> with torch.no_grad():
    ...     steps = [layer(t, cache=cache) for t in x.split(1, 1)]
    >>> torch.allclose(torch.cat(steps, 1), layer(x), atol=1e-5)
    True
    """

    def __init__(
        self,
        embed_dim: int,
        *,
        inner_dim: int | None = None,
        state_dim: int = 16,
        step_rank: int | None = None,
        conv_size: int = 4,
        conv_bias: bool = True,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        where = {"device": device, "dtype": dtype}
        E = size(self, "embed_dim", embed_dim)
        super().__init__(E, 2 * E if inner_dim is None else size(self, "inner_dim", inner_dim))
        I, N = self.num_heads, size(self, "state_dim", state_dim)  # noqa: E741
        rank = math.ceil(E / 16) if step_rank is None else size(self, "step_rank", step_rank)
        self._widths = rank, N, N  # of step sizes, keys B and queries C
        self.proj = nn.Linear(E, 2 * I, bias=flag(self, "bias", bias), **where)
        self.conv = ShortConvolution(I, conv_size, bias=conv_bias, **where)
        self.selected = nn.Linear(I, sum(self._widths), bias=False, **where)
        self.step = nn.Linear(rank, I, **where)
        self.A_log, self.D = parameter(I, N, **where), parameter(I, **where)
        self.out = nn.Linear(I, E, bias=bias, **where)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the matrices by Glorot's rule and the step sizes as the paper does; a is −1 to −N, D is 1."""
        super().reset_parameters()
        draw_decay(self.A_log, self.step.bias)
        with torch.no_grad():
            self.A_log.copy_(torch.arange(1, self._widths[1] + 1).log().expand_as(self.A_log))
        nn.init.ones_(self.D)

    def terms(self, x: Tensor, past: Tensor | None, layout: Layout, rotation: Rotation | None) -> Made:  # noqa: ARG002
        """Return the terms of the recurrence."""
        rows, gate = self.proj(x).chunk(2, -1)
        rows, past = self.conv.run(rows, past, layout)
        low, key, query = self.selected(rows).split(self._widths, -1)
        wide = torch.promote_types(x.dtype, torch.float32)
        # Softplus, of whose gradient compilers get the layout wrong.
        rate = -F.logsigmoid(-self.step(low).to(wide))  # (B, L, I)
        log_decay = (rate.unsqueeze(-1) * -self.A_log.to(wide).exp()).transpose(1, 2)
        query, key, value = (heads(each.to(wide), n) for each, n in ((query, 1), (key, 1), (rows, self.num_heads)))
        return Terms(query, key, value, log_decay, rate.transpose(1, 2), scale=1.0, gate=gate), past

    def finish(self, read: Tensor, x: Tensor, terms: Terms) -> Tensor:
        """Return the rows."""
        value = terms.value.transpose(1, 2).flatten(-2)  # (B, L, I)
        assert terms.gate is not None
        rows: Tensor = self.out(((read.flatten(-2) + self.D * value) * F.silu(terms.gate)).to(x.dtype))
        return rows

    def weights(self, terms: Terms, layout: Layout, *state: Tensor) -> Tensor:  # noqa: ARG002
        """Return the effective weights (B, I, L, L) of each channel, with D on the diagonal."""
        found = super().weights(terms, layout)
        return found + torch.diag_embed(self.D.to(found.dtype).unsqueeze(-1).expand(-1, found.shape[-1]))

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"{self.embed_dim}, inner_dim={self.num_heads}, state_dim={self._widths[1]}"
