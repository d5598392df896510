"""Polar positions: what a feature is and where it is, kept apart as length and angle."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._utils.constraints import positive, size
from regard._utils.mechanism import mechanism
from regard.nn._base import parameter
from regard.nn.positions.encodings import angles, wide
from regard.nn.positions.rotary import HeadPositions, Rotation


@mechanism(
    formula="s(q, k) = Σ_c softplus(q_c) softplus(k_c) cos((p_k − p_q) ω_c + b_c) / √D, ω_c = base^(−c/D)",
    sources=("gopalakrishnan2025",),
    learned="b (G, D)",
    cost="O(L·E)",
)
class PolarPositions(HeadPositions):
    """PoPE: lengths of features from contents, angles from positions (Gopalakrishnan 2025, arXiv 2509.10534).

    Feature c of a query at position p becomes ``softplus(q_c) (cos pω_c, sin pω_c)``, that of a key ``softplus(k_c)
    (cos(pω_c + b_c), sin(pω_c + b_c))`` with ``ω_c = base^(−c/D)`` and learned phases b in [−2π, 0]. Their product is
    ``softplus(q_c) softplus(k_c) cos((p_k − p_q) ω_c + b_c)``. Queries and keys get twice the width, 2·D. Queries are
    multiplied by √2, so that the default scale 1/√(2·D) of the attention call amounts to 1/√D.

    Parameters
    ----------
    num_kv_heads, head_dim : int
        Number of key heads G and their width D.
    base : float, default 10000.0
    device, dtype : optional
        Of the phases ``phase`` (G, D), which begin at 0. Values outside [−2π, 0] count as the nearest bound.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import PolarPositions, SelfAttention
    >>> layer = SelfAttention(16, 4, num_kv_heads=2, rotary=PolarPositions(2, 4))
    >>> layer(torch.randn(3, 5, 16), is_causal=True).shape
    torch.Size([3, 5, 16])
    """

    symmetric = False

    def __init__(
        self, num_kv_heads: int, head_dim: int, base: float = 10000.0, *, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        self.num_kv_heads, self.head_dim = size(self, "num_kv_heads", num_kv_heads), size(self, "head_dim", head_dim)
        self.base = positive(self, "base", base)
        self.phase = parameter(self.num_kv_heads, self.head_dim, device=device, dtype=dtype)
        self.reset_parameters()

    def rotation(self, positions: Tensor, dtype: torch.dtype, length: int | Tensor | None = None) -> Rotation:  # noqa: ARG002
        """Return the cosines and sines (L, D) or (B, 1, L, D) of each row's angles, without phases."""
        turn = angles(positions, 2 * self.head_dim, self.base)
        turn = turn.unsqueeze(1) if turn.dim() == 3 else turn
        return turn.cos().to(wide(dtype)), turn.sin().to(wide(dtype))

    def turn(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Return queries (B, H, L, 2·D)."""
        cos, sin = rotation
        rows = math.sqrt(2) * F.softplus(x.to(cos.dtype))
        return torch.cat((rows * cos, rows * sin), -1).to(x.dtype)

    def turn_keys(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Return keys (B, G, L, 2·D)."""
        cos, sin = rotation
        phase = self.phase.to(cos.dtype).clamp(-2 * math.pi, 0).unsqueeze(1)
        rows, lead, lag = F.softplus(x.to(cos.dtype)), phase.cos(), phase.sin()
        turned = rows * (cos * lead - sin * lag), rows * (sin * lead + cos * lag)
        return torch.cat(turned, -1).to(x.dtype)

    def reset_parameters(self) -> None:
        """Reset the phases to 0."""
        nn.init.zeros_(self.phase)

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"{self.num_kv_heads}, {self.head_dim}" + (f", base={self.base:g}" if self.base != 10000 else "")
