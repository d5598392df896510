"""Linformer: keys and values are projected along the sequence to a fixed number of rows.

Dimensions: B sequences, N rows, S largest number of rows, K projected rows, H heads, E width of a head.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor, nn

from regard._utils.constraints import flag, size
from regard._utils.errors import rejected
from regard._utils.mechanism import mechanism
from regard.functional import attention
from regard.nn._base import parameter
from regard.nn.approximate.base import ApproximateAttention
from regard.nn.heads.self_heads import SelfHeadsOptions, real_rows


@mechanism(
    formula="softmax(Q (P_k K)ᵀ / √E) P_v V",
    sources=("wang2020linformer",),
    learned="P_k, P_v (K, S), W_q, W_k, W_v, W_o (C, C), biases",
    cost="O(N·K·C + N·C²)",
    reads="scaled_dot",
)
class LinformerAttention(ApproximateAttention):
    """Linformer: attention to K learned mixtures of the keys, at a cost linear in N (Wang 2020, arXiv 2006.04768).

    ``softmax(Q (P_k K)ᵀ / √E) P_v V`` with learned matrices P_k and P_v (K, S); a sequence of N rows uses their
    first N columns. The heads share them. **This is an approximation** of softmax attention only as far as its weights
    have low rank, and only once P_k and P_v are trained: they start as the random projections of the paper's theorem,
    normal with variance 1/K. :meth:`exact` computes what is approximated.

    Parameters
    ----------
    embed_dim : int
        Width C of the rows.
    num_heads : int
        Number of heads H, which divides ``embed_dim``.
    max_length : int
        Largest number S of rows.
    num_projected : int, default 64
        Number K of projected rows.
    share : bool, default False
        Whether P_v is P_k.
    bias, engine, device, dtype
        See :class:`~regard.nn.heads.self_heads.SelfHeads`.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid, for a longer sequence, or for a causal call: each projected row mixes the whole
        sequence.

    Examples
    --------
    The relative error untrained, and with projections that take means of neighbours, on rows that change slowly:

    >>> import torch
    >>> from regard.nn import LinformerAttention
    >>> _ = torch.manual_seed(0)
    >>> layer = LinformerAttention(64, 4, 512, num_projected=64, share=True)
    >>> x = torch.randn(1, 512, 64).cumsum(1) / 16
    >>> exact = layer.exact(x)
    >>> print(f"{((layer(x) - exact).norm() / exact.norm()).item():.3f}")
    3.603
    >>> with torch.no_grad():
    ...     _ = layer.key_mix.copy_(torch.eye(64).repeat_interleave(8, 1) / 8)
    >>> print(f"{((layer(x) - exact).norm() / exact.norm()).item():.3f}")
    0.001
    """

    not_causal = "each projected row mixes the whole sequence"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        max_length: int,
        *,
        num_projected: int = 64,
        share: bool = False,
        device: Any = None,
        dtype: Any = None,
        **options: Unpack[SelfHeadsOptions],
    ) -> None:
        super().__init__(embed_dim, num_heads, device=device, dtype=dtype, **options)
        self.max_length = size(self, "max_length", max_length)
        self.num_projected = size(self, "num_projected", num_projected)
        flag(self, "share", share)
        self.key_mix = parameter(num_projected, max_length, device=device, dtype=dtype)
        self.value_mix = None if share else parameter(num_projected, max_length, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Re-initialize the projections by Glorot's rule, and those along the sequence with variance 1/K."""
        super().reset_parameters()
        for mix in (self.key_mix, self.value_mix):
            if mix is not None:
                nn.init.normal_(mix, std=self.num_projected**-0.5)

    def approximate(self, q: Tensor, k: Tensor, v: Tensor, valid_lens: Tensor | None, is_causal: bool) -> Tensor:  # noqa: ARG002
        N = k.shape[2]
        if self.max_length < N:
            raise rejected(type(self).__name__, "x", f"have at most max_length {self.max_length} rows", f"{N} rows")
        if (real := real_rows(k, valid_lens)) is not None:
            k, v = (torch.where(real, each, 0.0) for each in (k, v))
        key_mix = self.key_mix[:, :N].to(k.dtype)
        value_mix = key_mix if self.value_mix is None else self.value_mix[:, :N].to(v.dtype)
        return attention(q, key_mix @ k, value_mix @ v, engine=self.engine)

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"{super().extra_repr()}, max_length={self.max_length}, num_projected={self.num_projected}"
