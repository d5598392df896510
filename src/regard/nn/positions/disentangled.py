"""Disentangled relative positions of DeBERTa: content with position, and position with content."""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Any, final

import torch
from torch import Tensor, nn

from regard._utils.constraints import Integer, floats, integer, size
from regard._utils.errors import rejected
from regard._utils.mechanism import mechanism
from regard._utils.part import brief
from regard._utils.tracing import is_traced
from regard.masks import Extent, Mask, dense
from regard.masks.band import Offset, checked
from regard.masks.base import Sizes, lookup
from regard.masks.biases import PositionBias
from regard.nn._base import Layer, parameter
from regard.nn.positions.contextual import finite
from regard.nn.positions.encodings import wide


@final
class ByQueryAndKey(PositionBias):
    """A bias per query and bucket, plus one per key and bucket, of the distance clipped at R."""

    name = "disentangled_positions"

    def __init__(self, asked: Tensor, held: Tensor, buckets: Tensor, align: str | None, offset: Offset) -> None:
        super().__init__(align, offset)
        self.asked, self.held = asked, held  # (B, H, L, N) and (B, H, S, N)
        self.buckets = buckets  # (2 R + 1), of k − q from −R to R

    def _twin(self) -> ByQueryAndKey:
        return ByQueryAndKey(self.asked, self.held, self.buckets, self.align, self.offset)

    def bias(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:
        """Return the query's and the key's numbers for their distance."""
        reach = self.buckets.shape[0] // 2
        bucket = lookup(self.buckets, (kv_idx - self.positions(b, q_idx)).clamp(-reach, reach) + reach)
        return lookup(self.asked, b, h, q_idx, bucket) + lookup(self.held, b, h, kv_idx, bucket)

    def fit(self, extent: Extent, device: torch.device) -> Mask:
        """Resolve the alignment; check the queries and keys."""
        B, H, L = self.asked.shape[:3]
        S = self.held.shape[2]
        if not (B == 1 or extent.B == B) or not (H == 1 or extent.H == H) or extent.L != L or extent.S != S:
            expected = "be the query and key of the attention call, with B, H, L, S = "
            raise rejected("DisentangledPositions", "query", f"{expected}{tuple(extent)}", (B, H, L, S))
        return super().fit(extent, device)

    def sizes(self) -> Sizes:
        """Return B, H, L and S."""
        B, H, L = self.asked.shape[:3]
        return B, H, L, self.held.shape[2]

    def __repr__(self) -> str:
        return self._call(brief(self.asked))


def _edges(exact: int, reach: int) -> list[int]:
    """Return the last distance of each bucket after ``exact``: the largest n with (n/m)^(m−1) ≤ ((R−1)/m)^j.

    In integer arithmetic, as n = R − 1 lies exactly on the edge of the last bucket.
    """
    edges = []
    for j in range(1, exact):
        n = math.floor(exact * ((reach - 1) / exact) ** (j / (exact - 1))) + 1
        while n ** (exact - 1) * exact**j > (reach - 1) ** j * exact ** (exact - 1):
            n -= 1
        edges.append(n)
    return edges


@mechanism(
    formula="(q·k + q·c[δ] + k·p[δ]) / √(3D), δ = bucket(q − k), c = P W_cᵀ + b_c, p = P W_pᵀ + b_p",
    sources=("he2021",),
    learned="P (N, E), W_c, W_p (H·D, E), b_c, b_p (H·D)",
    cost="O(N·E·H·D + (L + S)·N·H·D + L·S)",
)
class DisentangledPositions(Layer):
    """Disentangled attention of DeBERTa: two learned biases of the distance (He 2021, arXiv 2006.03654).

    The score of a query and a key is ``(q·k + q·c[δ] + k·p[δ]) / √(3D)``: content with content, content with position,
    position with content. c and p (N, H·D) are projections of the embeddings ``weight`` of N buckets. Two layers share
    the embeddings, as all layers of DeBERTa do, after ``second.weight = first.weight``.

    The bucket of d = q − k is δ = clip(f(d) + m, 0, 2m − 1), with m = N/2. Without ``num_buckets``, f(d) = d and m is
    ``max_distance``. With it, as in DeBERTa's versions 2 and 3, f(d) = d if ``|d| ≤ m/2``, else
    ``sign(d) (m/2 + ⌈(m/2 − 1) ln(2|d|/m) / ln(2(R − 1)/m)⌉)`` with R = ``max_distance``.

    The bias is computed per query and bucket, and per key and bucket: tensors (B, H, L, N) and (B, H, S, N), not of
    pairs. For one query of a known place, as in decoding, it is computed per key. Each call projects the embeddings of
    the distances that occur, so a step is much faster with few buckets.

    Parameters
    ----------
    num_heads, head_dim : int
        Number of query heads H and their width D.
    max_distance : int
        R, the distance from which on all share a bucket; at least 2, and more than m with ``num_buckets``.
    num_buckets : int, optional
        Number of buckets N: a multiple of 4 and at least 8. transformers' ``position_buckets`` is m.
    embed_dim : int, optional
        Width E of the embeddings; defaults to H·D.
    device, dtype : optional
        Device and dtype of the parameters ``weight`` (N, E), ``key_weight``, ``query_weight`` (H·D, E), which are W_c
        and W_p, and of their biases (H·D), which begin at 0.

    Attributes
    ----------
    scale : float
        ``1/√(3D)``, the ``scale`` of the attention call. Its ``softcap`` does not apply to the biases.

    Examples
    --------
    >>> import torch, regard
    >>> from regard.nn import DisentangledPositions
    >>> q, k, v = torch.randn(3, 2, 4, 5, 8).unbind(0)
    >>> positions = DisentangledPositions(4, 8, max_distance=16, num_buckets=8)
    >>> regard.attention(q, k, v, positions(q, k), scale=positions.scale).shape
    torch.Size([2, 4, 5, 8])

    In a layer, whose scale is then that of the positions:

    >>> from regard.nn import SelfAttention
    >>> SelfAttention(32, 4, disentangled=positions)(torch.randn(2, 5, 32)).shape
    torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        max_distance: int,
        num_buckets: int | None = None,
        *,
        embed_dim: int | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim = size(self, "num_heads", num_heads), size(self, "head_dim", head_dim)
        if num_buckets is not None:
            Integer(ge=8, note=" or None")(self, "num_buckets", num_buckets)
            if num_buckets % 4:
                raise rejected("DisentangledPositions", "num_buckets", "be a multiple of 4", num_buckets)
        self.num_buckets = num_buckets
        least = 2 if num_buckets is None else num_buckets // 2 + 1
        self.max_distance = Integer(ge=least)(self, "max_distance", max_distance)
        width = self.num_heads * self.head_dim
        self.embed_dim = size(self, "embed_dim", width if embed_dim is None else embed_dim)
        self.scale = 1 / math.sqrt(3 * self.head_dim)
        self._half = self.max_distance if num_buckets is None else num_buckets // 2
        self._edges = [] if num_buckets is None else _edges(num_buckets // 4, self.max_distance)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = parameter(2 * self._half, self.embed_dim, **where)
        self.key_weight, self.key_bias = parameter(width, self.embed_dim, **where), parameter(width, **where)
        self.query_weight, self.query_bias = parameter(width, self.embed_dim, **where), parameter(width, **where)
        # The buckets of distances k − q from −R to R. No buffer: a layer from the meta device would get no values.
        R = self.max_distance
        self.buckets = torch.tensor([self._bucket(-gap) for gap in range(-R, R + 1)], device="cpu")
        self.reset_parameters()

    def forward(self, query: Tensor, key: Tensor, offset: Offset = None, *, align: str | None = None) -> Mask:
        """Return both biases of these queries and keys as a mask.

        Parameters
        ----------
        query : Tensor (B, H, L, D)
        key : Tensor (B, G, S, D)
            Those of the attention call, whose ``scale`` must be that of the layer.
        offset, align : optional
            Positions of the queries; see :func:`regard.masks.causal`.

        Returns
        -------
        Mask
            Its tensors are (B, H, L, N) and (B, H, S, N); that of one query is (B, H, 1, S).
        """
        query = floats(self, "query", query, "B", self.num_heads, "L", self.head_dim)
        key = floats(self, "key", key, query.shape[0], "G", "S", self.head_dim)
        if self.num_heads % max(key.shape[1], 1):
            expected = f"have a number of heads that divides {self.num_heads}"
            raise rejected("DisentangledPositions", "key", expected, key.shape[1])
        query, key = query.to(wide(query.dtype)), finite(key)
        align, offset = checked("disentangled_positions", align, offset)
        if query.shape[2] == 1 and (align is not None or offset is not None):
            known = key.shape[2] - 1 if align == "lower_right" else 0
            return self._of_one(query, key, known if offset is None else offset)
        key = key.repeat_interleave(self.num_heads // max(key.shape[1], 1), 1)
        asked = (query * self.scale) @ self._table(query, self.weight, self.key_weight, self.key_bias).mT
        held = (key * self.scale) @ self._table(key, self.weight, self.query_weight, self.query_bias).mT
        return ByQueryAndKey(asked, held, self.buckets.to(query.device), align, offset)

    def _table(self, like: Tensor, embeddings: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return projected embeddings (H, N, D)."""
        table = nn.functional.linear(*(each.to(like.dtype) for each in (embeddings, weight, bias)))
        return table.unflatten(-1, (self.num_heads, -1)).transpose(0, 1)

    def _of_one(self, query: Tensor, key: Tensor, place: int | Tensor) -> Mask:
        """Return the biases (B, H, 1, S) of one query, which is at key ``place``."""
        (B, G, S, _), R = key.shape, self.max_distance
        place = place.view(-1, 1) if isinstance(place, Tensor) else place
        gaps = torch.arange(S, device=key.device) - place  # (S) or (B or 1, S)
        buckets = self.buckets.to(key.device)
        embeddings: Tensor = self.weight
        if isinstance(place, int) and not is_traced(key):  # embeddings of distances that occur, which are neighbours
            first, last = self._bucket(place - S + 1), self._bucket(place)
            buckets, embeddings = buckets - first, embeddings[first : last + 1]
        bucket = buckets[gaps.clamp(-R, R) + R].view(-1, 1, S)
        asked = (query * self.scale) @ self._table(query, embeddings, self.key_weight, self.key_bias).mT
        asked = asked.squeeze(2).gather(2, bucket.expand(B, self.num_heads, S))
        table = self._table(key, embeddings, self.query_weight, self.query_bias)
        held = table[:, bucket.squeeze(1)].transpose(0, 1).unflatten(1, (G, -1)) * (key * self.scale).unsqueeze(2)
        return dense((asked + held.sum(-1).flatten(1, 2)).unsqueeze(2))

    def bucket(self, distance: int) -> int:
        """Return the bucket (row of ``weight``) of a distance q − k.

        Examples
        --------
        >>> from regard.nn import DisentangledPositions
        >>> layer = DisentangledPositions(1, 4, 128, num_buckets=16)
        >>> [layer.bucket(distance) for distance in (-200, -16, -1, 0, 1, 8, 200)]
        [0, 2, 7, 8, 9, 13, 15]
        """
        return self._bucket(integer("DisentangledPositions.bucket", "distance", distance))

    def _bucket(self, distance: int) -> int:
        n, half = abs(distance), self._half
        if self.num_buckets is not None and n > half // 2:
            n = half // 2 + 1 + bisect_left(self._edges, n)
        return min(max((n if distance > 0 else -n) + half, 0), 2 * half - 1)

    def reset_parameters(self) -> None:
        """Re-initialize the weights from a normal distribution with standard deviation 0.02, and set biases to 0."""
        for weight in (self.weight, self.key_weight, self.query_weight):
            nn.init.normal_(weight, std=0.02)
        for bias in (self.key_bias, self.query_bias):
            nn.init.zeros_(bias)

    def extra_repr(self) -> str:
        """Return the sizes."""
        settings = f"{self.num_heads}, {self.head_dim}, max_distance={self.max_distance}, embed_dim={self.embed_dim}"
        return settings if self.num_buckets is None else f"{settings}, num_buckets={self.num_buckets}"
