"""Attention over point sets: points read their nearest neighbours, each channel with weights of its own.

Dimensions: B point sets, N points, P coordinates, C channels, K neighbours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard._utils.constraints import floats, lengths, size
from regard._utils.mechanism import mechanism
from regard.engines import EngineLike
from regard.functional import attention
from regard.nn._base import Layer, reset_children, sequences, zero_padding
from regard.nn.transformer import FeedForward


@mechanism(
    formula="Σ_j softmax_j(γ(q_i − k_j + δ_ij)) ⊙ (v_j + δ_ij), δ_ij = θ(p_i − p_j), over the K nearest points",
    sources=("zhao2021",),
    learned="W_q, W_k, W_v (C, C), networks γ (C → C) and θ (P → C), biases",
    cost="O(N²·P + N·K·C²)",
)
class PointTransformerAttention(Layer):
    """Vector attention of the Point Transformer: each channel has weights of its own (Zhao 2021, arXiv 2012.09164).

    Point i reads its K nearest points, itself included: ``Σ_j softmax_j(γ(q_i − k_j + δ_ij)) ⊙ (v_j + δ_ij)`` with
    ``δ_ij = θ(p_i − p_j)``, where γ and θ are networks of two layers and the softmax is taken channel by channel.
    Moving all points changes nothing, and permuting them permutes the outputs. It is :func:`regard.attention` with one
    head of width 1 for each channel, and N queries of K keys.

    Parameters
    ----------
    channels : int
        Number of channels C.
    num_neighbours : int, default 16
        Number K of neighbours; all points if there are fewer.
    num_coordinates : int, default 3
        Number P of coordinates.
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
    >>> import torch
    >>> from regard.nn import PointTransformerAttention
    >>> layer, x, places = PointTransformerAttention(8, 4), torch.randn(2, 50, 8), torch.rand(2, 50, 3)
    >>> y = layer(x, places)
    >>> y.shape, torch.allclose(y, layer(x, places + 1), atol=1e-4)
    (torch.Size([2, 50, 8]), True)
    """

    def __init__(
        self,
        channels: int,
        num_neighbours: int = 16,
        *,
        num_coordinates: int = 3,
        engine: EngineLike = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        C, P = size(self, "channels", channels), size(self, "num_coordinates", num_coordinates)
        self.channels, self.num_coordinates, self.engine = C, P, engine
        self.num_neighbours = size(self, "num_neighbours", num_neighbours)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(C, C, **where) for _ in range(3))
        self.score = FeedForward(C, C, "relu", **where)
        self.place_in, self.place_out = nn.Linear(P, P, **where), nn.Linear(P, C, **where)

    def reset_parameters(self) -> None:
        """Re-initialize all maps as ``nn.Linear`` does."""
        reset_children(self)

    def forward(self, x: Tensor, positions: Tensor, valid_lens: Tensor | None = None) -> Tensor:
        """Return what the points read.

        Parameters
        ----------
        x : Tensor (B, N, C)
            Features of the points.
        positions : Tensor (B, N, P)
            Their coordinates.
        valid_lens : Tensor (B,) of int, optional
            Number of valid points per set; later ones are not read, and count as zeros.

        Returns
        -------
        output : Tensor (B, N, C)
        """
        x = sequences(self, "x", x, self.channels)
        B, N, C = x.shape
        positions = floats(self, "positions", positions, B, N, self.num_coordinates)
        if valid_lens is not None:
            valid_lens = lengths(self, "valid_lens", valid_lens, B, N)
            x, positions = zero_padding(x, valid_lens), zero_padding(positions, valid_lens)
        near, seen = self._nearest(positions, valid_lens)
        index = near.flatten(1).unsqueeze(2)

        def gathered(rows: Tensor) -> Tensor:
            """Return the rows (B, N, K, C) of neighbours among rows (B, N, C)."""
            return rows.gather(1, index.expand(-1, -1, rows.shape[2])).unflatten(1, near.shape[1:])

        moved = positions.unsqueeze(2) - gathered(positions)
        place = self.place_out(torch.relu(self.place_in(moved)))  # δ (B, N, K, C)
        score = self.score(self.q_proj(x).unsqueeze(2) - gathered(self.k_proj(x)) + place)
        value = gathered(self.v_proj(x)) + place
        key, value = (each.flatten(0, 1).mT.unsqueeze(3) for each in (score, value))  # (B·N, C, K, 1)
        mask = None if seen is None else seen.flatten(0, 1)[:, None, None]
        read = attention(torch.ones_like(key[:, :, :1]), key, value, mask, scale=1.0, engine=self.engine)
        return read.reshape(B, N, C)

    @torch.no_grad()
    def _nearest(self, positions: Tensor, valid_lens: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the nearest points (B, N, K) of each, and which of them are valid."""
        wide = positions.to(torch.promote_types(positions.dtype, torch.float32))
        distance = torch.cdist(wide, wide, compute_mode="donot_use_mm_for_euclid_dist")
        N = positions.shape[1]
        if valid_lens is None:
            return distance.topk(min(self.num_neighbours, N), largest=False).indices, None
        beyond = torch.arange(N, device=positions.device) >= valid_lens.to(positions.device).view(-1, 1, 1)
        found = distance.masked_fill(beyond, torch.inf).topk(min(self.num_neighbours, N), largest=False)
        return found.indices, found.values.isfinite()

    def extra_repr(self) -> str:
        """Return the number of neighbours."""
        return f"num_neighbours={self.num_neighbours}"
