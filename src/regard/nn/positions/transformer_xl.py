"""Relative positions of Transformer-XL: scores of a query with projected sinusoids of the distance."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from regard._utils.constraints import floats, size
from regard._utils.errors import rejected
from regard._utils.mechanism import mechanism
from regard.masks import Mask
from regard.masks.band import Offset, checked
from regard.nn._base import Layer, parameter
from regard.nn.positions.encodings import angles, wide
from regard.nn.positions.relative import ByQuery


@mechanism(
    formula="((q + u)·k + (q + w)·W r[q − k]) / √D, r[d] = [sin(dθ), cos(dθ)]",
    sources=("dai2019",),
    learned="u, w (H, D), W (H·D, E)",
    cost="O(R·E²/D + L·R·E + L·S)",
)
class TransformerXLPositions(Layer):
    """Relative positions of Transformer-XL and XLNet (Dai 2019, arXiv 1901.02860).

    The score of a query and a key at distance d = q − k is ``((q + u)·k + (q + w)·W r[d]) / √D``, where ``r[d]`` (E)
    are E/2 sines, followed by E/2 cosines, of ``d · 10000^(−2i/E)``. The layer returns the queries plus u, and the
    second term as a mask. Distances are clipped at R, ``max_distance``: give at least the longest sequence for the
    paper's.

    The bias is computed per query and distance: a tensor (B, H, L, 2 R + 1), not of pairs.

    Parameters
    ----------
    num_heads, head_dim : int
        Number of query heads H and their width D.
    max_distance : int
        R.
    embed_dim : int, optional
        Width E of the sinusoids, even; defaults to H·D.
    device, dtype : optional
        Device and dtype of the parameters ``content_bias`` and ``position_bias`` (H, D), which are u and w and begin at
        0, and ``weight`` (H·D, E).

    Examples
    --------
    >>> import torch, regard
    >>> from regard.nn import TransformerXLPositions
    >>> q, k, v = torch.randn(3, 2, 4, 5, 8).unbind(0)
    >>> query, bias = TransformerXLPositions(4, 8, max_distance=5)(q)
    >>> regard.attention(query, k, v, regard.masks.causal() & bias).shape
    torch.Size([2, 4, 5, 8])
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        max_distance: int,
        *,
        embed_dim: int | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim = size(self, "num_heads", num_heads), size(self, "head_dim", head_dim)
        self.max_distance = size(self, "max_distance", max_distance)
        width = self.num_heads * self.head_dim if embed_dim is None else embed_dim
        self.embed_dim = size(self, "embed_dim", width)
        if self.embed_dim % 2:
            raise rejected("TransformerXLPositions", "embed_dim", "be even", width)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.content_bias = parameter(self.num_heads, self.head_dim, **where)
        self.position_bias = parameter(self.num_heads, self.head_dim, **where)
        self.weight = parameter(self.num_heads * self.head_dim, self.embed_dim, **where)
        self.reset_parameters()

    def forward(self, query: Tensor, offset: Offset = None, *, align: str | None = None) -> tuple[Tensor, Mask]:
        """Return the queries with their bias, and the score's second term as a mask.

        Parameters
        ----------
        query : Tensor (B, H, L, D)
            The queries of the attention call, whose ``scale`` must be 1/√D.
        offset, align : optional
            Positions of the queries; see :func:`regard.masks.causal`.

        Returns
        -------
        query : Tensor (B, H, L, D)
        bias : Mask
            Its tensor is (B, H, L, 2 R + 1).
        """
        query = floats(self, "query", query, "B", self.num_heads, "L", self.head_dim)
        dtype, R = wide(query.dtype), self.max_distance
        turn = angles(torch.arange(R, -R - 1, -1, device=query.device), self.embed_dim, 10000.0)  # of d, not of −d
        rows = torch.cat((turn.sin(), turn.cos()), -1).to(dtype) @ self.weight.to(dtype).mT  # (2 R + 1, H·D)
        rows = rows.unflatten(-1, (self.num_heads, -1)).permute(1, 2, 0)
        asked = query.to(dtype) + self.position_bias.to(dtype).unsqueeze(1)
        numbers = asked @ rows / math.sqrt(self.head_dim)
        biased = query + self.content_bias.to(query.dtype).unsqueeze(1)
        return biased, ByQuery(numbers, *checked("relative_positions", align, offset), "TransformerXLPositions")

    def reset_parameters(self) -> None:
        """Re-initialize the matrix by Glorot's rule, and set both biases to 0."""
        nn.init.zeros_(self.content_bias)
        nn.init.zeros_(self.position_bias)
        nn.init.xavier_uniform_(self.weight)

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"{self.num_heads}, {self.head_dim}, max_distance={self.max_distance}, embed_dim={self.embed_dim}"
