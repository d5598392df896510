"""Nyström attention: softmax attention through a few landmarks, the means of segments of the sequence.

Dimensions: B sequences, N rows, M landmarks, H heads, E width of a head.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor, nn

from regard import masks
from regard._utils.constraints import count, size
from regard._utils.errors import rejected
from regard._utils.mechanism import mechanism
from regard._utils.tracing import autocast_suspended
from regard.functional import attention
from regard.masks import Mask
from regard.nn.approximate.base import ApproximateAttention
from regard.nn.heads.self_heads import SelfHeadsOptions, real_rows, segments


@mechanism(
    formula="softmax(Q K̃ᵀ / √E) pinv(softmax(Q̃ K̃ᵀ / √E)) softmax(Q̃ Kᵀ / √E) V, Q̃, K̃: means of M segments",
    sources=("xiong2021",),
    learned="W_q, W_k, W_v, W_o (C, C), biases, a convolution of values",
    cost="O(N·M·C + M³·H + N·C²)",
    reads="scaled_dot",
)
class NystromAttention(ApproximateAttention):
    """Nyströmformer: softmax attention through M landmarks, at a cost linear in N (Xiong 2021, arXiv 2102.03902).

    ``softmax(Q K̃ᵀ / √E) A⁺ softmax(Q̃ Kᵀ / √E) V`` with ``A = softmax(Q̃ K̃ᵀ / √E)``, where the landmarks Q̃ and K̃ are
    means of queries and keys over M segments of the sequence. A⁺ is the pseudo-inverse, by a few steps of an iteration.
    **This is an approximation**, good where rows of a segment are alike; its weights may be negative. :meth:`exact`
    computes what is approximated. Sequences of at most M rows are computed exactly.

    Row j of the n valid rows of a sequence is in segment ⌊j·M / n⌋. Segments without rows are left out.

    Parameters
    ----------
    embed_dim : int
        Width C of the rows.
    num_heads : int
        Number of heads H, which divides ``embed_dim``.
    num_landmarks : int, default 64
        Number M of landmarks.
    iterations : int, default 6
        Steps of the iteration for A⁺; 0 computes it by singular values.
    conv_size : int, optional
        Length of a convolution over the values of each head, an odd number, which is added to the output. The authors
        take 65; None adds nothing.
    bias, engine, device, dtype
        See :class:`~regard.nn.heads.self_heads.SelfHeads`.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid, or for a causal call: landmarks average over the whole sequence.

    Examples
    --------
    The relative error on random rows, and on rows that change slowly:

    >>> import torch
    >>> from regard.nn import NystromAttention
    >>> _ = torch.manual_seed(0)
    >>> layer = NystromAttention(64, 4, num_landmarks=32)
    >>> noise = torch.randn(1, 512, 64)
    >>> for x in (noise, noise.cumsum(1) / 16):
    ...     exact = layer.exact(x)
    ...     print(f"{((layer(x) - exact).norm() / exact.norm()).item():.3f}")
    0.754
    0.005
    """

    not_causal = "landmarks average over the whole sequence"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_landmarks: int = 64,
        iterations: int = 6,
        conv_size: int | None = None,
        device: Any = None,
        dtype: Any = None,
        **options: Unpack[SelfHeadsOptions],
    ) -> None:
        super().__init__(embed_dim, num_heads, device=device, dtype=dtype, **options)
        self.num_landmarks = size(self, "num_landmarks", num_landmarks)
        self.iterations = count(self, "iterations", iterations)
        self.conv = None
        if conv_size is not None:
            if size(self, "conv_size", conv_size) % 2 == 0:
                raise rejected(type(self).__name__, "conv_size", "be odd", conv_size)
            H, shape, around = self.num_heads, (conv_size, 1), (conv_size // 2, 0)
            self.conv = nn.Conv2d(H, H, shape, padding=around, groups=H, bias=False, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Re-initialize the projections by Glorot's rule, and the convolution as ``nn.Conv2d`` does."""
        super().reset_parameters()
        if self.conv is not None:
            self.conv.reset_parameters()

    def approximate(self, q: Tensor, k: Tensor, v: Tensor, valid_lens: Tensor | None, is_causal: bool) -> Tensor:
        mask = None if valid_lens is None else masks.padding(valid_lens)
        if (real := real_rows(v, valid_lens)) is not None:
            v = torch.where(real, v, 0.0)
        if q.shape[2] <= self.num_landmarks:
            read = self.attend(q, k, v, mask, is_causal)
        else:
            with autocast_suspended(q.device.type):  # 16 bits are too few for an inverse
                wide = torch.promote_types(q.dtype, torch.float32)
                read = self._through_landmarks(q.to(wide), k.to(wide), v.to(wide), mask, valid_lens).to(v.dtype)
        return read if self.conv is None or not v.shape[2] else read + self.conv(v)

    def _through_landmarks(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, valid_lens: Tensor | None
    ) -> Tensor:
        """Return the product of the three matrices and the values, from right to left."""
        share, seen = segments(q, valid_lens, self.num_landmarks)
        q_mean, k_mean = share @ q, share @ k  # (B, H, M, E)
        gathered = attention(q_mean, k, v, mask, engine=self.engine)
        shown = None if valid_lens is None else masks.key_padding(seen)
        return attention(q, k_mean, self._inverse(q_mean, k_mean, seen) @ gathered, shown, engine=self.engine)

    def _inverse(self, q_mean: Tensor, k_mean: Tensor, seen: Tensor) -> Tensor:
        """Return the pseudo-inverse (B, H, M, M) of softmax(Q̃ K̃ᵀ / √E) of the segments with rows; 0 for the others."""
        hidden = ~seen[:, None, None, :]
        scores = q_mean @ k_mean.mT * self.head_dim**-0.5
        A = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1)  # finite where all are hidden
        A = torch.where(hidden.mT | hidden, 0.0, A)
        if not self.iterations:
            return torch.linalg.pinv(A)
        # Rows of A sum to 1, so that its norms are bounded by 1 and by its largest column sum.
        z = A.mT / A.sum(-2).amax(-1).clamp(min=torch.finfo(A.dtype).tiny)[..., None, None]
        eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
        for _ in range(self.iterations):
            product = A @ z
            z = z @ (13 * eye - product @ (15 * eye - product @ (7 * eye - product))) / 4
        return z

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"{super().extra_repr()}, num_landmarks={self.num_landmarks}, iterations={self.iterations}"
