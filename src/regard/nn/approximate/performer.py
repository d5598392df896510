"""Performer: softmax attention approximated by products of positive random features (FAVOR+).

Dimensions: B sequences, N rows, H heads, E width of a head, F random features.
"""

from __future__ import annotations

from typing import Any, Literal, Unpack, get_args

import torch
from torch import Tensor

from regard._utils.constraints import OneOf, flag, size
from regard._utils.mechanism import mechanism
from regard._utils.tracing import autocast_suspended
from regard.nn.approximate.base import ApproximateAttention
from regard.nn.heads.self_heads import SelfHeadsOptions
from regard.nn.linear.attention import linear_attention

Kernel = Literal["softmax", "relu"]

#: What keeps the features of the ReLU kernel positive, as in the authors' code.
_ABOVE_ZERO = 1e-3


def draw_projection(features: int, width: int, orthogonal: bool) -> Tensor:
    """Return random directions (F, E) in float32, of standard normal rows.

    If ``orthogonal``, each block of E rows is orthogonal, and each row keeps the length of a normal vector.
    """
    if not orthogonal:
        return torch.randn(features, width)
    q, r = torch.linalg.qr(torch.randn(-(-features // width), width, width))
    # QR fixes the signs of q, so that its rows are not uniform on the sphere; those of r's diagonal make them so.
    rows = (q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).mT.flatten(0, 1)[:features]
    return rows * torch.randn(features, width).norm(dim=1, keepdim=True)


@mechanism(
    formula="φ(Q)(φ(K)ᵀV) / φ(Q)(φ(K)ᵀ1), φ(x) = exp(W x' − ‖x'‖²/2) / √F, x' = x / E^¼; E φ(q)·φ(k) = exp(q·k / √E)",
    sources=("choromanski2021",),
    learned="W_q, W_k, W_v, W_o (C, C), biases; W (F, E) is random",
    cost="O(N·F·C + N·C²)",
)
class PerformerAttention(ApproximateAttention):
    """Performer: an unbiased approximation of the exponential by random features (Choromanski 2021, arXiv 2009.14794).

    ``exp(q·k / √E)`` is the mean of ``exp(w·q' − ‖q'‖²/2) exp(w·k' − ‖k'‖²/2)`` over normal w, with ``x' = x / E^¼``.
    F features w, orthogonal in blocks of E, make it :func:`linear_attention`: time and memory are linear in N. The
    features are positive, so that the sum of weights is, too. **This is an approximation**: the error falls as 1/√F and
    grows exponentially with the squared lengths of queries and keys; :meth:`exact` computes what is approximated.

    With ``kernel="relu"``, features are ``ReLU(W x') + 0.001``, the authors' generalized attention. That does not
    approximate the softmax.

    Parameters
    ----------
    embed_dim : int
        Width C of the rows.
    num_heads : int
        Number of heads H, which divides ``embed_dim``.
    num_features : int, default 256
        Number F of random features. The authors take E·log E.
    kernel : {"softmax", "relu"}
    orthogonal : bool, default True
        Whether features are orthogonal in blocks, which lowers the variance.
    bias, engine, device, dtype
        See :class:`~regard.nn.heads.self_heads.SelfHeads`; ``engine`` is that of :meth:`exact`.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid.

    Notes
    -----
    Features are computed in float32 or better. Queries are shifted by the maximum over their features, which cancels.
    Other implementations also shift all keys by one maximum; a causal call then depends on later keys by rounding. Here
    nothing does. Features of keys are at most exp(‖w‖²/2), finite in float32 for heads of width 64 at any input; keys
    of more than 13·E^¼ times unit length have features that round to 0.

    Examples
    --------
    The relative error, with more and more features:

    >>> import torch
    >>> from regard.nn import PerformerAttention
    >>> x = torch.randn(1, 512, 64, generator=torch.Generator().manual_seed(0)) / 2
    >>> for features in (16, 256, 4096):
    ...     _ = torch.manual_seed(0)
    ...     layer = PerformerAttention(64, 4, num_features=features)
    ...     exact = layer.exact(x, is_causal=True)
    ...     print(features, f"{((layer(x, is_causal=True) - exact).norm() / exact.norm()).item():.2f}")
    16 0.48
    256 0.16
    4096 0.04
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_features: int = 256,
        kernel: Kernel = "softmax",
        orthogonal: bool = True,
        device: Any = None,
        dtype: Any = None,
        **options: Unpack[SelfHeadsOptions],
    ) -> None:
        super().__init__(embed_dim, num_heads, device=device, dtype=dtype, **options)
        OneOf(get_args(Kernel))(self, "kernel", kernel)
        flag(self, "orthogonal", orthogonal)
        self.num_features, self.kernel, self.orthogonal = size(self, "num_features", num_features), kernel, orthogonal
        self.projection: Tensor
        self.register_buffer("projection", torch.empty(num_features, self.head_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Re-initialize the parameters, and draw the features anew."""
        super().reset_parameters()
        self.redraw()

    @torch.no_grad()
    def redraw(self) -> None:
        """Draw the random features anew, as the authors do from time to time in training."""
        self.projection.copy_(draw_projection(self.num_features, self.head_dim, self.orthogonal))

    def approximate(self, q: Tensor, k: Tensor, v: Tensor, valid_lens: Tensor | None, is_causal: bool) -> Tensor:
        with autocast_suspended(q.device.type):
            wide = torch.promote_types(q.dtype, torch.float32)
            query, key = self.features(q.to(wide), is_query=True), self.features(k.to(wide))
            read = linear_attention(
                query, key, v.to(wide), feature_map="identity", is_causal=is_causal, valid_lens=valid_lens
            )
        return read.to(v.dtype)

    def features(self, rows: Tensor, *, is_query: bool = False) -> Tensor:
        """Return the features (B, H, N, F) of rows (B, H, N, E); those of queries up to a positive factor per row."""
        rows = rows * self.head_dim**-0.25
        moved = rows @ self.projection.to(rows.dtype).mT
        if self.kernel == "relu":
            return torch.relu(moved) + _ABOVE_ZERO
        if is_query:
            return (moved - moved.amax(-1, keepdim=True).detach()).exp()
        return (moved - rows.square().sum(-1, keepdim=True) / 2).exp() * self.num_features**-0.5

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"{super().extra_repr()}, num_features={self.num_features}, kernel={self.kernel!r}"
