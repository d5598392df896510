"""Projections of self-attention with heads of one width, which several layers share.

Dimensions: B sequences, N rows, C width, H heads, E = C/H width of a head.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor, nn

from regard._utils.constraints import flag, lengths
from regard.engines import EngineLike
from regard.nn._base import Layer, draw_linear, head_sizes, sequences, zero_padding


class SelfHeadsOptions(TypedDict, total=False):
    """Keyword arguments that every layer of :class:`SelfHeads` takes."""

    bias: bool
    engine: EngineLike


class SelfHeads(Layer):
    """Base of multi-head self-attention layers: query, key, value and output projections of C features.

    Parameters
    ----------
    embed_dim : int
        Width C of the rows.
    num_heads : int
        Number of heads H, which divides ``embed_dim``.
    bias : bool, default True
        Whether the projections have a bias.
    engine : str or Engine, default "auto"
        See :func:`regard.attention`.
    device, dtype : optional
        Device and dtype of the parameters.
    """

    #: Whether queries are the keys, too.
    shared: ClassVar[bool] = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        bias: bool = True,
        engine: EngineLike = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        C, H, _ = head_sizes(self, embed_dim, num_heads)
        flag(self, "bias", bias)
        self.embed_dim, self.num_heads, self.engine = C, H, engine
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(C, C, bias, **where)
        self.k_proj = None if self.shared else nn.Linear(C, C, bias, **where)
        self.v_proj = nn.Linear(C, C, bias, **where)
        self.out_proj = nn.Linear(C, C, bias, **where)

    @property
    def head_dim(self) -> int:
        """Width E of a head."""
        return self.embed_dim // self.num_heads

    def reset_parameters(self) -> None:
        """Re-initialize weights by Glorot's rule and biases to 0."""
        draw_linear(self.q_proj, self.k_proj, self.v_proj, self.out_proj)

    def projected(self, x: Any, valid_lens: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values (B, H, N, E) of rows (B, N, C), whose padding counts as zeros."""
        x = sequences(self, "x", x, self.embed_dim)
        if valid_lens is not None:
            x = zero_padding(x, lengths(self, "valid_lens", valid_lens, *x.shape[:2]))
        q = self._split(self.q_proj(x))
        return q, q if self.k_proj is None else self._split(self.k_proj(x)), self._split(self.v_proj(x))

    def merged(self, heads: Tensor) -> Tensor:
        """Return rows (B, N, C) of the heads' outputs (B, H, N, E)."""
        rows: Tensor = self.out_proj(heads.transpose(1, 2).flatten(2))
        return rows

    def _split(self, rows: Tensor) -> Tensor:
        return rows.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2)

    def extra_repr(self) -> str:
        """Return the width and the number of heads."""
        return f"{self.embed_dim}, num_heads={self.num_heads}"


def real_rows(rows: Tensor, valid_lens: Tensor | None) -> Tensor | None:
    """Return which rows of heads (B, H, N, E) are valid, (B, 1, N, 1); None for all."""
    if valid_lens is None:
        return None
    real = torch.arange(rows.shape[2], device=rows.device) < valid_lens.to(rows.device).view(-1, 1)
    return real[:, None, :, None]


def segments(rows: Tensor, valid_lens: Tensor | None, parts: int) -> tuple[Tensor, Tensor]:
    """Return what takes means over segments of the sequence, and which segments have rows.

    Parameters
    ----------
    rows : Tensor (B, H, N, E)
        For its sizes and dtype.
    valid_lens : Tensor (B,) of int, or None
        Row j of the n valid rows is in segment ⌊j·parts / n⌋.
    parts : int
        Number M of segments.

    Returns
    -------
    share : Tensor (B, 1, M, N)
        ``share @ rows`` are the means.
    seen : Tensor (B, M) of bool
    """
    B, N, device = rows.shape[0], rows.shape[2], rows.device
    n = torch.full((B, 1), N, device=device) if valid_lens is None else valid_lens.to(device).view(B, 1)
    index = torch.arange(N, device=device).expand(B, N)
    segment = torch.where(index < n, index * parts // n.clamp(min=1), parts)
    inside = segment.unsqueeze(1) == torch.arange(parts, device=device).view(1, parts, 1)  # (B, M, N)
    amount = inside.sum(2, keepdim=True)
    return (inside.to(rows.dtype) / amount.clamp(min=1)).unsqueeze(1), amount.squeeze(2) > 0
