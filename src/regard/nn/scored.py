"""Attention with one head, by its score: dot product, general, additive, concat, location, cosine."""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from regard import scores
from regard._catalogue import mechanism
from regard._constraints import positive, size
from regard.nn._base import parameter
from regard.nn._scored import ScoredAttention, ScoredParts


@mechanism(
    formula="softmax(QKᵀ / √E) V",
    sources=("luong2015", "vaswani2017"),
    cost="O(L·S·(E + V))",
    reads="scaled_dot",
)
class DotProductAttention(ScoredAttention):
    """Attention by the scaled dot product, ``softmax(QKᵀ / √E) V``; nothing is learned.

    ``scale=1.0`` is Luong's dot score (2015, arXiv 1508.04025), None that of Vaswani (2017, arXiv 1706.03762).

    Parameters
    ----------
    dropout, normalizer, scale, engine
        As :class:`ScoredAttention` has them.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import DotProductAttention
    >>> layer = DotProductAttention()
    >>> layer(torch.randn(2, 1, 2), torch.randn(2, 10, 2), torch.randn(2, 10, 4), torch.tensor([2, 6])).shape
    torch.Size([2, 1, 4])
    """

    def score(self) -> scores.Score:
        return scores.ScaledDot()

    def reset_parameters(self) -> None:
        """Do nothing: there are none."""


@mechanism(
    formula="softmax(Q W Kᵀ) V",
    sources=("luong2015",),
    learned="W (Eq, Ek)",
    cost="O(L·Eq·Ek + L·S·(Ek + V))",
    reads="general",
)
class GeneralAttention(ScoredAttention):
    """Attention by a learned bilinear form, ``qᵀ W k`` (Luong 2015, arXiv 1508.04025).

    Parameters
    ----------
    query_size : int
        Width E of queries.
    key_size : int, optional
        Width of keys; that of queries where it is not given.
    dropout, normalizer, scale, engine
        As :class:`ScoredAttention` has them.
    device, dtype : optional
        Of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import GeneralAttention
    >>> GeneralAttention(4, 6)(torch.randn(2, 3, 4), torch.randn(2, 5, 6)).shape
    torch.Size([2, 3, 6])
    """

    def __init__(
        self,
        query_size: int,
        key_size: int | None = None,
        dropout: float = 0.0,
        *,
        device: Any = None,
        dtype: Any = None,
        **parts: Unpack[ScoredParts],
    ) -> None:
        super().__init__(dropout, **parts)
        self.query_size = size(self, "query_size", query_size)
        self.key_size = self.query_size if key_size is None else size(self, "key_size", key_size)
        self.weight = parameter(self.query_size, self.key_size, device=device, dtype=dtype)
        self.reset_parameters()

    def score(self) -> scores.Score:
        return scores.General(self.weight)

    def reset_parameters(self) -> None:
        """Draw ``W`` uniformly, so that scores of unit rows have unit variance (Glorot)."""
        nn.init.xavier_uniform_(self.weight)


@mechanism(
    formula="softmax(w_vᵀ tanh(W_q q + W_k k)) V",
    sources=("bahdanau2014",),
    learned="W_q (C, Eq), W_k (C, Ek), w_v (C)",
    cost="O((L·Eq + S·Ek)·C + L·S·(C + V))",
    reads="additive",
)
class AdditiveAttention(ScoredAttention):
    """Bahdanau's attention, ``w_vᵀ tanh(W_q q + W_k k)`` (2014, arXiv 1409.0473).

    Parameters
    ----------
    query_size, key_size : int
        Widths of queries and keys.
    hidden_size : int
        How many features C the two are projected to.
    dropout, normalizer, scale, engine
        As :class:`ScoredAttention` has them.
    device, dtype : optional
        Of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import AdditiveAttention
    >>> layer = AdditiveAttention(20, 2, 8, dropout=0.1).eval()
    >>> layer(torch.randn(2, 1, 20), torch.ones(2, 10, 2), torch.randn(2, 10, 4), torch.tensor([2, 6])).shape
    torch.Size([2, 1, 4])
    """

    def __init__(
        self,
        query_size: int,
        key_size: int,
        hidden_size: int,
        dropout: float = 0.0,
        *,
        device: Any = None,
        dtype: Any = None,
        **parts: Unpack[ScoredParts],
    ) -> None:
        super().__init__(dropout, **parts)
        self.query_size, self.key_size = size(self, "query_size", query_size), size(self, "key_size", key_size)
        self.hidden_size = size(self, "hidden_size", hidden_size)
        self.w_q = parameter(self.hidden_size, self.query_size, device=device, dtype=dtype)
        self.w_k = parameter(self.hidden_size, self.key_size, device=device, dtype=dtype)
        self.w_v = parameter(self.hidden_size, device=device, dtype=dtype)
        self.reset_parameters()

    def score(self) -> scores.Score:
        return scores.Additive(self.w_v, self.w_q, self.w_k)

    def reset_parameters(self) -> None:
        """Draw both projections by Glorot's rule, and w_v uniformly in ±1/√C."""
        nn.init.xavier_uniform_(self.w_q)
        nn.init.xavier_uniform_(self.w_k)
        bound = 1 / math.sqrt(self.hidden_size)
        nn.init.uniform_(self.w_v, -bound, bound)


@mechanism(
    formula="softmax(w_vᵀ tanh(W [q; k])) V",
    sources=("luong2015",),
    learned="W (C, Eq + Ek), w_v (C)",
    cost="O((L·Eq + S·Ek)·C + L·S·(C + V))",
    reads="concat",
)
class ConcatAttention(ScoredAttention):
    """Luong's concat score, ``w_vᵀ tanh(W [q; k])`` (2015, arXiv 1508.04025): additive, its projections one matrix.

    Parameters
    ----------
    query_size, key_size : int
        Widths of queries and keys.
    hidden_size : int
        How many features C.
    dropout, normalizer, scale, engine
        As :class:`ScoredAttention` has them.
    device, dtype : optional
        Of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import ConcatAttention
    >>> ConcatAttention(4, 6, 8)(torch.randn(2, 3, 4), torch.randn(2, 5, 6)).shape
    torch.Size([2, 3, 6])
    """

    def __init__(
        self,
        query_size: int,
        key_size: int,
        hidden_size: int,
        dropout: float = 0.0,
        *,
        device: Any = None,
        dtype: Any = None,
        **parts: Unpack[ScoredParts],
    ) -> None:
        super().__init__(dropout, **parts)
        self.query_size, self.key_size = size(self, "query_size", query_size), size(self, "key_size", key_size)
        self.hidden_size = size(self, "hidden_size", hidden_size)
        self.weight = parameter(self.hidden_size, self.query_size + self.key_size, device=device, dtype=dtype)
        self.w_v = parameter(self.hidden_size, device=device, dtype=dtype)
        self.reset_parameters()

    def score(self) -> scores.Score:
        return scores.Concat(self.w_v, self.weight)

    def reset_parameters(self) -> None:
        """Draw the projection by Glorot's rule, and w_v uniformly in ±1/√C."""
        nn.init.xavier_uniform_(self.weight)
        bound = 1 / math.sqrt(self.hidden_size)
        nn.init.uniform_(self.w_v, -bound, bound)


@mechanism(
    formula="softmax(W q) V",
    sources=("luong2015",),
    learned="W (S, Eq)",
    cost="O(L·S·(Eq + V))",
    reads="location",
)
class LocationAttention(ScoredAttention):
    """Luong's location score, ``(W q)_i``: what a key holds does not matter, where it stands does (arXiv 1508.04025).

    Parameters
    ----------
    query_size : int
        Width of queries.
    max_length : int
        How many positions of keys there are; sequences may be shorter.
    dropout, normalizer, scale, engine
        As :class:`ScoredAttention` has them.
    device, dtype : optional
        Of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import LocationAttention
    >>> LocationAttention(4, 10)(torch.randn(2, 3, 4), torch.randn(2, 5, 6)).shape
    torch.Size([2, 3, 6])
    """

    def __init__(
        self,
        query_size: int,
        max_length: int,
        dropout: float = 0.0,
        *,
        device: Any = None,
        dtype: Any = None,
        **parts: Unpack[ScoredParts],
    ) -> None:
        super().__init__(dropout, **parts)
        self.query_size, self.max_length = size(self, "query_size", query_size), size(self, "max_length", max_length)
        self.weight = parameter(self.max_length, self.query_size, device=device, dtype=dtype)
        self.reset_parameters()

    def score(self) -> scores.Score:
        return scores.Location(self.weight)

    def reset_parameters(self) -> None:
        """Draw ``W`` by Glorot's rule."""
        nn.init.xavier_uniform_(self.weight)

    def _sizes(self) -> list[str]:
        return [*super()._sizes(), f"max_length={self.max_length}"]


@mechanism(
    formula="softmax(β cos(q, k)) V",
    sources=("graves2014",),
    learned="log β",
    cost="O(L·S·(E + V))",
    reads="cosine",
)
class CosineAttention(ScoredAttention):
    """Attention by the cosine, ``β cos(q, k)``: content addressing (Graves 2014, arXiv 1410.5401).

    A row of zeros has cosine 0 with everything.

    Parameters
    ----------
    beta : float, default 1.0
        The sharpness at first, positive.
    learn_beta : bool, default True
        Whether log β is a parameter; else a buffer.
    dropout, normalizer, scale, engine
        As :class:`ScoredAttention` has them.
    device, dtype : optional
        Of ``beta``.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import CosineAttention
    >>> CosineAttention(10.0)(torch.randn(2, 3, 4), torch.randn(2, 5, 4)).shape
    torch.Size([2, 3, 4])
    """

    log_beta: Tensor

    def __init__(
        self,
        beta: float = 1.0,
        dropout: float = 0.0,
        *,
        learn_beta: bool = True,
        device: Any = None,
        dtype: Any = None,
        **parts: Unpack[ScoredParts],
    ) -> None:
        super().__init__(dropout, **parts)
        positive(self, "beta", beta)
        self.initial = float(beta)
        value = torch.empty(1, device=device, dtype=dtype)
        if learn_beta:
            self.log_beta = nn.Parameter(value)
        else:
            self.register_buffer("log_beta", value)
        self.reset_parameters()

    @property
    def beta(self) -> Tensor:
        """Return β, (1,)."""
        return self.log_beta.exp()

    def score(self) -> scores.Score:
        return scores.Cosine((-self.log_beta).exp())

    def reset_parameters(self) -> None:
        """Set β to its first value."""
        nn.init.constant_(self.log_beta, math.log(self.initial))

    def _sizes(self) -> list[str]:
        return [f"beta={self.initial}"]
