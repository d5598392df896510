"""Cross-covariance attention: the channels of a sequence attend to each other.

Dimensions: B sequences, N rows, C width, H heads, E = C/H width of a head.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard._utils.mechanism import mechanism
from regard.engines.aux import Aux, AuxRequest
from regard.functional import attention
from regard.nn._base import parameter
from regard.nn.heads.self_heads import SelfHeads, SelfHeadsOptions, real_rows


@mechanism(
    formula="(softmax(τ Q̂ᵀ K̂) Vᵀ)ᵀ in each head, Q̂, K̂: columns of unit length",
    sources=("elnouby2021",),
    learned="W_q, W_k, W_v, W_o (C, C), τ (H), biases",
    cost="O(N·C²/H + N·C²)",
    reads="dot",
)
class CrossCovarianceAttention(SelfHeads):
    """Cross-covariance attention (XCA): channels attend to channels, at a cost linear in N (El-Nouby 2021).

    The queries, keys and values of :func:`regard.attention` are the E channels of a head, as vectors over the N rows:
    ``y = (softmax(τ Q̂ᵀ K̂) Vᵀ)ᵀ``, with the columns of Q and K divided by their lengths and a learned τ for each head
    (arXiv 2106.09681). Each row enters the weights of all rows, so that there is no causal form.

    Parameters
    ----------
    embed_dim : int
        Width C of the rows.
    num_heads : int
        Number of heads H, which divides ``embed_dim``.
    bias, engine, device, dtype : optional
        See :class:`~regard.nn.heads.self_heads.SelfHeads`.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid.

    Examples
    --------
    >>> import torch
    >>> from regard import AuxRequest
    >>> from regard.nn import CrossCovarianceAttention
    >>> layer = CrossCovarianceAttention(16, 2)
    >>> y, aux = layer(torch.randn(3, 100, 16), return_aux=AuxRequest(weights=True))
    >>> y.shape, aux.weights.shape
    (torch.Size([3, 100, 16]), torch.Size([3, 2, 8, 8]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        device: Any = None,
        dtype: Any = None,
        **options: Unpack[SelfHeadsOptions],
    ) -> None:
        super().__init__(embed_dim, num_heads, device=device, dtype=dtype, **options)
        self.temperature = parameter(self.num_heads, 1, 1, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Re-initialize the projections by Glorot's rule, and τ to 1."""
        super().reset_parameters()
        nn.init.ones_(self.temperature)

    def forward(
        self, x: Tensor, valid_lens: Tensor | None = None, *, return_aux: AuxRequest | None = None
    ) -> Tensor | tuple[Tensor, Aux]:
        """Return the rows whose channels have read each other.

        Parameters
        ----------
        x : Tensor (B, N, C)
        valid_lens : Tensor (B,) of int, optional
            Number of valid rows per sequence; later rows are ignored, and their output is that of zeros.
        return_aux : AuxRequest, optional
            Auxiliary outputs to return, between channels: weights (B, H, E, E).

        Returns
        -------
        output : Tensor (B, N, C)
        aux : Aux
            Only if requested.
        """
        rows = self.projected(x, valid_lens)
        if (real := real_rows(rows[0], valid_lens)) is not None:
            rows = tuple(torch.where(real, each, 0.0) for each in rows)  # type: ignore[assignment]
        q, k, v = (each.mT for each in rows)  # (B, H, E, N)
        q, k = F.normalize(q, dim=-1) * self.temperature.to(q.dtype), F.normalize(k, dim=-1)
        answer = attention(q, k, v, scale=1.0, engine=self.engine, return_aux=return_aux)
        read = answer if isinstance(answer, Tensor) else answer[0]
        output = self.merged(read.mT)
        return output if isinstance(answer, Tensor) else (output, answer[1])
