"""Modern Hopfield networks: attention that is iterated until a state settles on a stored pattern.

Dimensions: B sequences, L states, S stored patterns, E, Ek widths of states and patterns, H heads, D width of a head.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from regard._utils.constraints import flag, positive, probability, size
from regard._utils.errors import rejected, shape
from regard._utils.mechanism import mechanism
from regard.engines import EngineLike
from regard.engines.aux import Aux, AuxRequest
from regard.functional import attention
from regard.masks import MaskLike
from regard.nn._base import Layer, combined_mask, head_sizes, reset_children, sequences, zero_padding


@mechanism(
    formula="softmax(β ξ Kᵀ) Y W_v W_o, after ξ ← softmax(β ξ Kᵀ) K, ξ_0 = X W_q, K = Y W_k",
    sources=("ramsauer2021",),
    learned="W_q (E, HD), W_k, W_v (Ek, HD), W_o (HD, E), biases, layer norms",
    cost="O(rounds·L·S·E + (L + S)·E²)",
    reads="scaled_dot",
)
class HopfieldAttention(Layer):
    """Modern Hopfield layer: states retrieve stored patterns, in one or more rounds (Ramsauer 2021, arXiv 2008.02217).

    Each round but the last moves the states, ``ξ ← softmax(β ξ Kᵀ) K``, which never raises their energy
    ``½ ‖ξ‖² − log Σ_j exp(β k_j·ξ) / β``. The last reads values, ``softmax(β ξ Kᵀ) V``. One round with β = 1/√D is
    attention. A large β retrieves single patterns; a small one their means. States start as ``LN(X) W_q``, keys and
    values are ``LN(Y) W_k`` and ``LN(Y) W_v``. In the paper ``V = Y W_k W_v``, which is a product of two such matrices.

    Parameters
    ----------
    embed_dim : int
        Width E of states and outputs.
    num_heads : int, default 1
        Number of heads H.
    pattern_dim : int, optional
        Width Ek of the stored patterns; defaults to E.
    head_dim : int, optional
        Width D of a head, the space of association; defaults to E/H.
    rounds : int, default 1
        Number of reads; only the last one reads values.
    beta : float, optional
        Inverse temperature β; defaults to 1/√D.
    layer_norm : bool, default True
        Whether layer norms are applied to states and patterns before the projections.
    bias : bool, default True
        Whether the projections have a bias.
    dropout : float, default 0.0
        Probability of dropping a weight of the last round, in training.
    engine : str or Engine, default "auto"
        See :func:`regard.attention`.
    device, dtype : optional
        Device and dtype of the parameters.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid.

    Examples
    --------
    A damaged pattern is completed:

    >>> import torch
    >>> from regard.nn import HopfieldAttention
    >>> layer = HopfieldAttention(8, rounds=3, beta=4.0, layer_norm=False, bias=False)
    >>> for each in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj):
    ...     _ = torch.nn.init.eye_(each.weight)
    >>> patterns = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0)).sign()
    >>> damaged = patterns[:, 3:4].clone()
    >>> damaged[..., :2] = 0
    >>> torch.allclose(layer(damaged, patterns), patterns[:, 3:4], atol=1e-3)
    True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int = 1,
        *,
        pattern_dim: int | None = None,
        head_dim: int | None = None,
        rounds: int = 1,
        beta: float | None = None,
        layer_norm: bool = True,
        bias: bool = True,
        dropout: float = 0.0,
        engine: EngineLike = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        E, H, self.head_dim = head_sizes(self, embed_dim, num_heads, head_dim)
        self.embed_dim, self.num_heads = E, H
        self.pattern_dim = E if pattern_dim is None else size(self, "pattern_dim", pattern_dim)
        self.rounds, self.beta = size(self, "rounds", rounds), None if beta is None else positive(self, "beta", beta)
        self.dropout, self.engine = probability(self, "dropout", dropout), engine
        flag(self, "layer_norm", layer_norm)
        flag(self, "bias", bias)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        width = H * self.head_dim
        self.state_norm = nn.LayerNorm(E, **where) if layer_norm else None
        self.pattern_norm = nn.LayerNorm(self.pattern_dim, **where) if layer_norm else None
        self.q_proj = nn.Linear(E, width, bias, **where)
        self.k_proj = nn.Linear(self.pattern_dim, width, bias, **where)
        self.v_proj = nn.Linear(self.pattern_dim, width, bias, **where)
        self.out_proj = nn.Linear(width, E, bias, **where)

    def reset_parameters(self) -> None:
        """Re-initialize projections as ``nn.Linear`` does, and norms to the identity."""
        reset_children(self)

    def forward(
        self,
        x: Tensor,
        patterns: Tensor | None = None,
        valid_lens: Tensor | None = None,
        *,
        attn_mask: MaskLike | None = None,
        return_aux: AuxRequest | None = None,
    ) -> Tensor | tuple[Tensor, Aux]:
        """Return what the states retrieve.

        Parameters
        ----------
        x : Tensor (B, L, E)
            The states.
        patterns : Tensor (B, S, Ek), optional
            The stored patterns Y; defaults to the states, whose padding then counts as zeros.
        valid_lens : Tensor (B,) of int, optional
            Number of valid patterns per sequence; later ones are ignored. Reading no patterns gives 0.
        attn_mask : Tensor, Mask or callable, optional
            See :func:`regard.attention`; three dimensions are (B, L, S).
        return_aux : AuxRequest, optional
            Auxiliary outputs of the last round to return, per head.

        Returns
        -------
        output : Tensor (B, L, E)
        aux : Aux
            Only if requested.
        """
        x = sequences(self, "x", x, self.embed_dim)
        own = patterns is None
        patterns = sequences(self, "patterns", x if own else patterns, self.pattern_dim)
        if patterns.shape[0] != x.shape[0]:
            came = f"{patterns.shape[0]} (patterns {shape(patterns)})"
            raise rejected(type(self).__name__, "patterns", f"have {x.shape[0]} sequences, as x", came)
        mask = combined_mask(self, valid_lens, attn_mask)
        if valid_lens is not None:
            real = valid_lens if valid_lens.dim() == 1 else valid_lens.amax(1)
            patterns = zero_padding(patterns, real)
            x = patterns if own else x
        states = x if self.state_norm is None else self.state_norm(x)
        stored = patterns if self.pattern_norm is None else self.pattern_norm(patterns)
        projected = (self.q_proj(states), self.k_proj(stored), self.v_proj(stored))
        q, k, v = (each.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2) for each in projected)
        for _ in range(self.rounds - 1):
            q = attention(q, k, k, mask, scale=self.beta, engine=self.engine)
        dropout = self.dropout if self.training else 0.0
        answer = attention(q, k, v, mask, dropout, scale=self.beta, engine=self.engine, return_aux=return_aux)
        read = answer if isinstance(answer, Tensor) else answer[0]
        output: Tensor = self.out_proj(read.transpose(1, 2).flatten(2))
        return output if isinstance(answer, Tensor) else (output, answer[1])

    def extra_repr(self) -> str:
        """Return the settings that the projections do not show."""
        settings = [f"num_heads={self.num_heads}", f"rounds={self.rounds}"]
        settings += [] if self.beta is None else [f"beta={self.beta}"]
        return ", ".join(settings + ([f"dropout={self.dropout}"] if self.dropout else []))
