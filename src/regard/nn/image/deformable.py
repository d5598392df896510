"""Deformable attention: queries sample a few points of feature maps, at places that they choose.

Dimensions: B images, L queries, S pixels of all maps, E width, H heads, M maps (levels), P points, D width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard._utils.constraints import TensorOf, size
from regard._utils.errors import described, rejected, shape
from regard._utils.mechanism import mechanism
from regard.nn._base import Layer, draw_linear, head_sizes, sequences


@mechanism(
    formula="Σ_m Σ_p a_{mp} W_v x_m(r + Δ_{mp}) W_o, a = softmax_{m,p}(W_a q), Δ = W_Δ q",
    sources=("zhu2021",),
    learned="W_Δ (2HMP, E), W_a (HMP, E), W_v (E, Ev), W_o (E, E), biases",
    cost="O(L·M·P·E + (L + S)·E²)",
)
class DeformableAttention(Layer):
    """Multi-scale deformable attention: each query samples P points of each of M maps (Zhu 2021, arXiv 2010.04159).

    Head h of a query q with reference point r reads ``Σ_m Σ_p a_{mp} v_m(r + Δ_{mp})``: ``v_m`` is the m-th map
    projected to values, interpolated bilinearly between its pixels and 0 outside, ``Δ = W_Δ q`` are offsets and
    ``a = softmax(W_a q)`` weights over all M·P points. Queries and pixels are not compared: there are no keys.

    Coordinates are (x, y) with (0, 0) the top left corner of a map and (1, 1) the bottom right. Around a point, offsets
    count pixels of each map. Around a box (x, y, width, height), P units are half its width and half its height.

    Parameters
    ----------
    embed_dim : int
        Width E of queries and outputs.
    num_heads : int, default 8
        Number of heads H, which divides ``embed_dim``.
    num_levels : int, default 4
        Number of maps M.
    num_points : int, default 4
        Number of points P in each map.
    value_dim : int, optional
        Width Ev of the maps; defaults to E.
    device, dtype : optional
        Device and dtype of the parameters.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid.

    Notes
    -----
    Names and shapes of parameters are those of the authors' code and of transformers.

    Examples
    --------
    Each pixel of two maps reads both maps around itself:

    >>> import torch
    >>> from regard.nn import DeformableAttention
    >>> layer, shapes = DeformableAttention(16, 4, num_levels=2), [(8, 6), (4, 3)]
    >>> maps, places = torch.randn(2, 8 * 6 + 4 * 3, 16), DeformableAttention.centers(shapes)
    >>> places.shape, layer(maps, maps, shapes, places).shape
    (torch.Size([60, 2]), torch.Size([2, 60, 16]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int = 8,
        *,
        num_levels: int = 4,
        num_points: int = 4,
        value_dim: int | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        E, H, _ = head_sizes(self, embed_dim, num_heads)
        self.embed_dim, self.num_heads = E, H
        self.num_levels, self.num_points = size(self, "num_levels", num_levels), size(self, "num_points", num_points)
        self.value_dim = E if value_dim is None else size(self, "value_dim", value_dim)
        points, where = H * self.num_levels * self.num_points, {"device": device, "dtype": dtype}
        self.sampling_offsets = nn.Linear(E, 2 * points, **where)
        self.attention_weights = nn.Linear(E, points, **where)
        self.value_proj = nn.Linear(self.value_dim, E, **where)
        self.output_proj = nn.Linear(E, E, **where)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start with equal weights and with the heads' points in H directions, the p-th at a distance of p pixels."""
        for each in (self.sampling_offsets, self.attention_weights):
            nn.init.zeros_(each.weight)
            nn.init.zeros_(each.bias)
        turn = torch.arange(self.num_heads) * (2 * math.pi / self.num_heads)
        directions = torch.stack([turn.cos(), turn.sin()], -1)
        directions = directions / directions.abs().amax(-1, keepdim=True)
        steps = torch.arange(1, self.num_points + 1).view(-1, 1)
        ring = directions[:, None, None] * steps  # (H, 1, P, 2)
        self.sampling_offsets.bias.copy_(ring.expand(-1, self.num_levels, -1, -1).reshape(-1))
        draw_linear(self.value_proj, self.output_proj)

    @staticmethod
    def centers(shapes: Sequence[tuple[int, int]], device: Any = None, dtype: Any = None) -> Tensor:
        """Return the centres (S, 2) of the pixels of all maps, as (x, y) from 0 to 1.

        Parameters
        ----------
        shapes : sequence of (int, int)
            Height and width of each map.
        device, dtype : optional
        """
        where = {"device": device, "dtype": dtype}
        found = []
        for H, W in shapes:
            y, x = ((torch.arange(n, **where) + 0.5) / n for n in (H, W))
            found.append(torch.stack([x.expand(H, W), y.unsqueeze(1).expand(H, W)], -1).flatten(0, 1))
        return torch.cat(found)

    def forward(
        self,
        query: Tensor,
        maps: Tensor,
        shapes: Sequence[tuple[int, int]],
        reference: Tensor,
        *,
        keep: Tensor | None = None,
        return_points: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Return what the queries read.

        Parameters
        ----------
        query : Tensor (B, L, E)
        maps : Tensor (B, S, Ev)
            The pixels of all maps, one map after another, each row by row.
        shapes : sequence of (int, int)
            Height and width of each map.
        reference : Tensor (L, 2), (B, L, 2) or (B, L, M, 2), or with 4 for boxes
            Reference points (x, y) or boxes (x, y, width, height) from 0 to 1; for all maps, or for each.
        keep : Tensor (B, S), bool, optional
            True for valid pixels; others count as 0.
        return_points : bool, default False
            Whether to also return the points and their weights.

        Returns
        -------
        output : Tensor (B, L, E)
        points : Tensor (B, L, H, M, P, 2)
            Only if requested: (x, y) of the points.
        weights : Tensor (B, L, H, M, P)
            Only if requested: they sum to 1 over M and P.
        """
        query, maps = sequences(self, "query", query, self.embed_dim), sequences(self, "maps", maps, self.value_dim)
        (B, L, _), S, M = query.shape, maps.shape[1], self.num_levels
        if maps.shape[0] != B:
            raise rejected("DeformableAttention", "maps", f"have {B} images, as query", f"{maps.shape[0]}")
        if len(shapes) != M:
            raise rejected("DeformableAttention", "shapes", f"have num_levels {M} pairs", len(shapes))
        if sum(H * W for H, W in shapes) != S:
            came = f"{list(shapes)} (maps {shape(maps)})"
            raise rejected("DeformableAttention", "shapes", f"have maps' {S} pixels together", came)
        reference = self._reference(reference, B, L)
        if keep is not None:
            if not isinstance(keep, Tensor) or keep.dtype != torch.bool or keep.shape != maps.shape[:2]:
                raise rejected("DeformableAttention", "keep", f"be a bool tensor ({B}, {S})", described(keep))
            maps = torch.where(keep.unsqueeze(2), maps, 0.0)
        value = self.value_proj(maps)
        if keep is not None:
            value = torch.where(keep.unsqueeze(2), value, 0.0)
        sizes = (B, L, self.num_heads, M, self.num_points)
        weights = self.attention_weights(query).view(*sizes[:3], -1).softmax(-1).view(sizes)
        offsets = self.sampling_offsets(query).view(*sizes, 2)
        center, extent = reference[:, :, None, :, None, :2], reference[:, :, None, :, None, 2:]
        if reference.shape[-1] == 2:
            pixels = torch.tensor([(W, H) for H, W in shapes], device=offsets.device, dtype=offsets.dtype)
            points = center + offsets / pixels.view(M, 1, 2)
        else:
            points = center + offsets / self.num_points * extent / 2
        output: Tensor = self.output_proj(self._sampled(value, shapes, points, weights))
        return (output, points, weights) if return_points else output

    def _reference(self, reference: Any, B: int, L: int) -> Tensor:
        """Return reference points or boxes as (B, L, M, 2 or 4)."""
        M = self.num_levels
        shapes = [s for n in (2, 4) for s in ((L, n), (B, L, n), (B, L, M, n))]
        reference = TensorOf(*shapes)(self, "reference", reference)
        if reference.dim() == 2:
            reference = reference.unsqueeze(0)
        if reference.dim() == 3:
            reference = reference.unsqueeze(2)
        return reference.expand(B, L, M, -1)

    def _sampled(self, value: Tensor, shapes: Sequence[tuple[int, int]], points: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sums (B, L, E) of values (B, S, E) at points (B, L, H, M, P, 2)."""
        B, L, H, M, P, _ = points.shape
        heads = value.unflatten(2, (H, -1)).permute(0, 2, 3, 1).flatten(0, 1)  # (B·H, D, S)
        grids = (2 * points - 1).transpose(1, 2).flatten(0, 1).to(value.dtype)  # (B·H, L, M, P, 2)
        maps = heads.split([h * w for h, w in shapes], 2)
        found = [
            F.grid_sample(x.unflatten(2, hw), grids[:, :, m], align_corners=False)  # (B·H, D, L, P)
            for m, (x, hw) in enumerate(zip(maps, shapes))
        ]
        each = weights.transpose(1, 2).reshape(B * H, 1, L, M * P)
        read = (torch.cat(found, -1) * each).sum(-1)  # (B·H, D, L)
        return read.view(B, -1, L).mT

    def extra_repr(self) -> str:
        """Return the sizes that the projections do not show."""
        return f"num_heads={self.num_heads}, num_levels={self.num_levels}, num_points={self.num_points}"
