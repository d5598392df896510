"""Relative position biases of scores: T5's buckets, Shaw's distance embeddings, ALiBi's slopes.

Each layer returns a :class:`regard.masks.Mask` that hides nothing and adds a bias. Pass it as ``attn_mask``, alone or
composed: ``masks.causal() & bias()``. Query i is at key position i + offset; ``offset`` and ``align`` are those of
:mod:`regard.masks`, and one of them is required if the numbers of queries and keys differ. No layer builds an L×S
matrix. For encodings that are added to the rows, see :mod:`regard.nn.positions.encodings`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import masks
from regard._utils.constraints import Integer, Number, flag, floats, integer, size
from regard._utils.errors import rejected
from regard._utils.mechanism import mechanism
from regard._utils.part import brief
from regard.masks import Extent, Mask
from regard.masks.band import Offset, checked
from regard.masks.base import Sizes, lookup
from regard.masks.biases import PositionBias, geometric
from regard.nn._base import Layer, parameter
from regard.nn.positions.encodings import wide


def _edges(exact: int, count: int, reach: int) -> list[int]:
    """Return the first distance of each bucket after ``exact``: the least n with (n/exact)^count ≥ (reach/exact)^j.

    In integer arithmetic: distances such as 16, 32 and 64 lie exactly on an edge, where a rounded logarithm may be off.
    """
    edges = []
    for j in range(1, count):
        n = max(exact, math.floor(exact * (reach / exact) ** (j / count)) - 1)
        while n**count * exact**j < reach**j * exact**count:
            n += 1
        edges.append(n)
    return edges


class BiasLayer(Layer, ABC):
    """Base of layers that make a bias of positions; subclasses define :meth:`mask`."""

    def forward(self, offset: Offset = None, *, align: str | None = None) -> Mask:
        """Return the bias as a mask.

        Parameters
        ----------
        offset, align : optional
            Positions of the queries; see :func:`regard.masks.causal`.

        Returns
        -------
        Mask
        """
        return self.mask(align, offset)

    @abstractmethod
    def mask(self, align: str | None, offset: Offset) -> Mask:
        """Return the bias for queries at these positions."""


@mechanism(
    formula="s(q, k) + w[bucket(k − q), h]",
    sources=("raffel2020",),
    learned="w (N, H)",
    cost="O(L·S)",
)
class RelativeBias(BiasLayer):
    """T5's learned bias per head and bucket of distances (Raffel 2020, arXiv 1910.10683).

    With d = k − q, n = |d|, R = ``max_distance``, and m half of the C buckets of a side, rounded down, a side's bucket
    is n if n < m, else ``min(C − 1, m + ⌊(C − m) ln(n / m) / ln(R / m)⌋)``. Bidirectional: C = N/2, and d > 0 uses the
    upper half of the table. Otherwise C = N, and all d ≥ 0 use bucket 0. The sizes are those of the paper, the formula
    that of its code. Distances of at least R share one bucket, so there is no maximum length.

    ``weight`` (N, H) has the layout of T5's ``relative_attention_bias.weight``. T5 does not scale scores: pass
    ``scale=1.0``.

    Parameters
    ----------
    num_heads : int
        Number of query heads H.
    num_buckets : int, default 32
        Number of buckets N: even and at least 4 if bidirectional, else at least 2.
    max_distance : int, default 128
        Distance R from which on all distances share a bucket; more than m.
    bidirectional : bool, default True
        Whether keys after the query have separate buckets.
    device, dtype : optional
        Device and dtype of the parameter.

    Examples
    --------
    >>> import torch, regard
    >>> from regard.nn import RelativeBias
    >>> q = torch.randn(2, 4, 5, 8)
    >>> bias = RelativeBias(4, bidirectional=False)
    >>> regard.attention(q, q, q, regard.masks.causal() & bias(), scale=1.0).shape
    torch.Size([2, 4, 5, 8])
    """

    buckets: Tensor

    def __init__(
        self,
        num_heads: int,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        flag(self, "bidirectional", bidirectional)
        self.num_heads, self.bidirectional = size(self, "num_heads", num_heads), bidirectional
        self.num_buckets = Integer(ge=4 if bidirectional else 2)(self, "num_buckets", num_buckets)
        if bidirectional and num_buckets % 2:
            raise rejected("RelativeBias", "num_buckets", "be even if bidirectional", num_buckets)
        self._side = num_buckets // 2 if bidirectional else num_buckets
        self.max_distance = Integer(ge=self._side // 2 + 1)(self, "max_distance", max_distance)
        self.weight = parameter(self.num_buckets, self.num_heads, device=device, dtype=dtype)
        # The buckets of distances −R … R; larger distances are clipped. Not persistent: T5's checkpoints lack it.
        places = torch.empty(2 * self.max_distance + 1, device=device, dtype=torch.int64)
        self.register_buffer("buckets", places, persistent=False)
        self.reset_parameters()

    def mask(self, align: str | None, offset: Offset) -> Mask:
        return masks.relative(F.embedding(self.buckets, self.weight).T, align, offset)

    def bucket(self, distance: int) -> int:
        """Return the bucket (row of ``weight``) of a distance k − q.

        Examples
        --------
        >>> from regard.nn import RelativeBias
        >>> [RelativeBias(1).bucket(distance) for distance in (-200, -16, -1, 0, 1, 8, 200)]
        [15, 10, 1, 0, 17, 24, 31]
        """
        exact = self._side // 2
        distance = integer("RelativeBias.bucket", "distance", distance)
        return self._bucket(distance, _edges(exact, self._side - exact, self.max_distance))

    def _bucket(self, distance: int, edges: list[int]) -> int:
        exact, n = self._side // 2, abs(distance) if self.bidirectional else max(0, -distance)
        upper = self._side if self.bidirectional and distance > 0 else 0
        return upper + (n if n < exact else exact + bisect_right(edges, n))

    def reset_parameters(self) -> None:
        """Re-initialize the table from a normal distribution with standard deviation 0.02."""
        nn.init.normal_(self.weight, std=0.02)
        exact, R = self._side // 2, self.max_distance
        edges = _edges(exact, self._side - exact, R)
        self.buckets.copy_(torch.tensor([self._bucket(distance, edges) for distance in range(-R, R + 1)]))

    def extra_repr(self) -> str:
        """Return the sizes."""
        settings = f"{self.num_heads}, num_buckets={self.num_buckets}, max_distance={self.max_distance}"
        return settings if self.bidirectional else f"{settings}, bidirectional=False"


@final
class ByQuery(PositionBias):
    """A bias per query and distance, clipped at R."""

    name = "relative_positions"

    def __init__(self, numbers: Tensor, align: str | None, offset: Offset, layer: str = "RelativePositions") -> None:
        super().__init__(align, offset)
        self.numbers, self.layer = numbers, layer  # (B, H, L, 2 R + 1), and for error messages

    def _twin(self) -> ByQuery:
        return ByQuery(self.numbers, self.align, self.offset, self.layer)

    def entry(self, b: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return the index of a key's distance."""
        reach = self.numbers.shape[-1] // 2
        return (kv_idx - self.positions(b, q_idx)).clamp(-reach, reach) + reach

    def bias(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:
        """Return the query's bias for the distance."""
        return lookup(self.numbers, b, h, q_idx, self.entry(b, q_idx, kv_idx))

    def fit(self, extent: Extent, device: torch.device) -> Mask:
        """Resolve the alignment; check the queries."""
        B, H, L = self.numbers.shape[:3]
        if not (B == 1 or extent.B == B) or not (H == 1 or extent.H == H) or extent.L != L:
            expected = f"be the query of the attention call, with B, H, L = {(extent.B, extent.H, extent.L)}"
            raise rejected(self.layer, "query", expected, (B, H, L))
        return super().fit(extent, device)

    def sizes(self) -> Sizes:
        """Return B, H and L."""
        B, H, L = self.numbers.shape[:3]
        return B, H, L, None

    def __repr__(self) -> str:
        return self._call(brief(self.numbers))


@mechanism(
    formula="softmax(q·(k + a[clip(k − q)]) / √D) (v + c[clip(k − q)])",
    sources=("shaw2018",),
    learned="a (2R + 1, D), c (2R + 1, V) if asked for",
    cost="O(L·R·D + L·S)",
)
class RelativePositions(Layer):
    """Learned embeddings of distances, added to keys and optionally to values (Shaw 2018, arXiv 1803.02155).

    The score is ``q·(k + a[clip(d, −R, R)]) / √D`` and the output ``Σ_k α (v + c[clip(d, −R, R)])``, with d = k − q.
    Heads share the embeddings. :meth:`forward` returns the term with a as a bias, in O(L·R) memory. :meth:`values`
    returns the term with c, from the L×S weights.

    Parameters
    ----------
    head_dim : int
        Width D of a head's queries and keys.
    max_distance : int
        Distance R at which distances are clipped.
    value_dim : int, optional
        Width V of a head's values; None for no value embeddings.
    scale : float, optional
        The ``scale`` of the attention call; defaults to 1/√D. Its ``softcap`` does not apply to a bias.
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch, regard
    >>> from regard.nn import RelativePositions
    >>> q, k, v = torch.randn(3, 2, 4, 5, 8).unbind(0)
    >>> positions = RelativePositions(8, max_distance=3, value_dim=8)
    >>> mask = regard.masks.causal() & positions(q)
    >>> out, aux = regard.attention(q, k, v, mask, return_aux=regard.AuxRequest(weights=True))
    >>> (out + positions.values(aux.weights)).shape
    torch.Size([2, 4, 5, 8])
    """

    def __init__(
        self,
        head_dim: int,
        max_distance: int,
        *,
        value_dim: int | None = None,
        scale: float | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.head_dim, self.max_distance = size(self, "head_dim", head_dim), size(self, "max_distance", max_distance)
        self.value_dim = None if value_dim is None else size(self, "value_dim", value_dim)
        if scale is not None:
            Number(note=" or None")(self, "scale", scale)
        self.scale = None if scale is None else float(scale)
        entries = 2 * self.max_distance + 1
        self.key_weight = parameter(entries, self.head_dim, device=device, dtype=dtype)
        self.value_weight = None
        if self.value_dim is not None:
            self.value_weight = parameter(entries, self.value_dim, device=device, dtype=dtype)
        self.reset_parameters()

    def forward(self, query: Tensor, offset: Offset = None, *, align: str | None = None) -> Mask:
        """Return the bias ``q·a[clip(k − q)] / √D`` of these queries as a mask.

        Parameters
        ----------
        query : Tensor (B, H, L, D)
            The queries of the attention call.
        offset, align : optional
            Positions of the queries; see :func:`regard.masks.causal`.

        Returns
        -------
        Mask
            Its tensor is (B, H, L, 2 R + 1).
        """
        query = floats(self, "query", query, "B", "H", "L", self.head_dim)
        dtype = wide(query.dtype)
        scale = 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale
        numbers = (query.to(dtype) * scale) @ self.key_weight.to(dtype).T
        return ByQuery(numbers, *checked("relative_positions", align, offset))

    def values(self, weights: Tensor, offset: Offset = None, *, align: str | None = None) -> Tensor:
        """Return ``Σ_k α c[clip(k − q)]``, to be added to the attention's output.

        Parameters
        ----------
        weights : Tensor (B, H, L, S)
            The weights from ``AuxRequest(weights=True)``: before dropout, with gradients.
        offset, align : optional
            Positions of the queries; see :func:`regard.masks.causal`.

        Returns
        -------
        Tensor (B, H, L, V)

        Raises
        ------
        ValueError
            If the layer was made without ``value_dim``.
        """
        if self.value_weight is None:
            raise rejected("RelativePositions", "value_dim", "be given for values", "None")
        weights = floats(self, "weights", weights, "B", "H", "L", "S")
        B, H, L, S = weights.shape
        b, q_idx, kv_idx = (torch.arange(n, device=weights.device) for n in (B, L, S))
        sums = weights.new_zeros(B, H, L, 2 * self.max_distance + 1)  # sums of weights per distance
        ruler = ByQuery(sums, *checked("relative_positions", align, offset)).fit(Extent(B, H, L, S), weights.device)
        assert isinstance(ruler, ByQuery), "fit returns the same type"
        entry = ruler.entry(b.view(-1, 1, 1, 1), q_idx.unsqueeze(1), kv_idx).expand(B, H, L, S)
        dtype = wide(weights.dtype)
        return sums.scatter_add(-1, entry, weights).to(dtype) @ self.value_weight.to(dtype)

    def reset_parameters(self) -> None:
        """Re-initialize both tables by Glorot's rule."""
        nn.init.xavier_uniform_(self.key_weight)
        if self.value_weight is not None:
            nn.init.xavier_uniform_(self.value_weight)

    def extra_repr(self) -> str:
        """Return the sizes, and the scale if it is not the default."""
        settings = [f"{self.head_dim}, max_distance={self.max_distance}"]
        settings += [f"value_dim={self.value_dim}"] if self.value_dim is not None else []
        return ", ".join([*settings, *([f"scale={self.scale}"] if self.scale is not None else [])])


@mechanism(
    formula="s(q, k) − m_h |k − q|",
    sources=("press2022",),
    learned="m (H) if asked for",
    cost="O(L·S)",
)
class AlibiBias(BiasLayer):
    """ALiBi: subtract the distance times the head's slope from scores (Press 2022, arXiv 2108.12409).

    The slopes are the paper's: ``2^(−8 i / H)`` for i = 1 … H if H is a power of two; otherwise see
    :func:`regard.masks.alibi`. The paper uses causal attention; without it, the bias is symmetric in the distance.

    Parameters
    ----------
    num_heads : int
        Number of query heads H.
    learn : bool, default False
        Whether the slopes are a parameter, initialized to the paper's, rather than a buffer.
    device, dtype : optional
        Device and dtype of ``slopes`` (H,).

    Examples
    --------
    >>> import torch, regard
    >>> from regard.nn import AlibiBias
    >>> q = torch.randn(2, 4, 5, 8)
    >>> regard.attention(q, q, q, regard.masks.causal() & AlibiBias(4)()).shape
    torch.Size([2, 4, 5, 8])
    """

    slopes: Tensor

    def __init__(self, num_heads: int, learn: bool = False, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.num_heads = size(self, "num_heads", num_heads)
        flag(self, "learn", learn)
        self.learn = learn
        slopes = torch.empty(self.num_heads, device=device, dtype=dtype)
        if learn:
            self.slopes = nn.Parameter(slopes)
        else:
            self.register_buffer("slopes", slopes)
        self.reset_parameters()

    def mask(self, align: str | None, offset: Offset) -> Mask:
        return masks.alibi(self.slopes, align, offset)

    def reset_parameters(self) -> None:
        """Reset the slopes to the paper's."""
        with torch.no_grad():
            self.slopes.copy_(torch.tensor(geometric(self.num_heads)))

    def extra_repr(self) -> str:
        """Return the number of heads, and whether slopes are learned."""
        return f"{self.num_heads}, learn=True" if self.learn else f"{self.num_heads}"
