"""Single-head attention layers: dot product, general, additive, concat, location, cosine and kernels."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from regard import masks, normalizers, scores
from regard._utils.constraints import OneOf, floats, positive, probability, size
from regard._utils.mechanism import mechanism
from regard.engines import EngineLike
from regard.engines.aux import FIELDS, Aux, AuxRequest, TopK
from regard.functional import attention
from regard.masks import MaskLike
from regard.nn._base import PartLayer, attention_inputs, combined_mask, non_default, parameter, resolve_part
from regard.normalizers import NormalizerLike
from regard.scores.base import KernelName
from regard.scores.kernels import kernels

# Base class -----------------------------------------------------------------------------------------------------------


class ScoredParts(TypedDict, total=False):
    """Keyword arguments that every :class:`ScoredAttention` takes."""

    normalizer: NormalizerLike
    scale: float | None
    engine: EngineLike


class ScoredAttention(PartLayer, ABC):
    """Single-head attention over sequences (B, N, E); a subclass defines the score.

    Parameters
    ----------
    dropout : float, default 0.0
        Probability of dropping a weight, in training.
    normalizer : str or Normalizer, default "softmax"
    scale : float, optional
        Factor of the score; None is the score's default.
    engine : str, default "auto"
        See :func:`regard.attention`.
    """

    def __init__(
        self,
        dropout: float = 0.0,
        *,
        normalizer: NormalizerLike = "softmax",
        scale: float | None = None,
        engine: EngineLike = "auto",
    ) -> None:
        super().__init__()
        self.dropout = probability(self, "dropout", dropout)
        self.normalizer, self.scale, self.engine = normalizer, scale, engine

    @abstractmethod
    def score(self) -> scores.Score:
        """Return the score, with this layer's parameters."""

    @abstractmethod
    def reset_parameters(self) -> None:
        """Re-initialize the parameters."""

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        valid_lens: Tensor | None = None,
        *,
        attn_mask: MaskLike | None = None,
        is_causal: bool = False,
        return_aux: AuxRequest | None = None,
    ) -> Tensor | tuple[Tensor, Aux]:
        """Return the weighted sums of values.

        Parameters
        ----------
        query : Tensor (B, L, E)
        key : Tensor (B, S, Ek), optional
            Defaults to ``query``: self-attention, in which padded queries also count as zeros.
        value : Tensor (B, S, V), optional
            Defaults to ``key``.
        valid_lens : Tensor (B,) or (B, L) of int, optional
            Number of valid keys per sequence, or per query; later keys are ignored.
        attn_mask : Tensor, Mask or callable, optional
            See :func:`regard.attention`; a tensor (L, S), (B, L, S) or (B, 1, L, S), True where visible.
        is_causal : bool, default False
            Also hide keys after the query.
        return_aux : AuxRequest, optional
            Auxiliary outputs to return.

        Returns
        -------
        output : Tensor (B, L, V)
        aux : Aux
            Only if requested; its fields have no head dimension: weights (B, L, S), entropy (B, L) and so on.
        """
        mask = combined_mask(self, valid_lens, attn_mask)
        q, k, v = attention_inputs(self, query, key, value, valid_lens)
        answer = attention(
            q,
            k,
            v,
            mask,
            self.dropout if self.training else 0.0,
            is_causal,
            self.scale,
            score=resolve_part(self.score()),
            normalizer=resolve_part(self.normalizer),
            engine=self.engine,
            return_aux=return_aux,
        )
        if isinstance(answer, Tensor):
            return answer.squeeze(1)
        output, aux = answer
        return output.squeeze(1), without_heads(aux)

    def extra_repr(self) -> str:
        """Return the sizes and the settings that differ from the defaults."""
        settings = [f"dropout={self.dropout}"] if self.dropout else []
        settings += non_default(self, "normalizer", "softmax")
        return ", ".join([*self._sizes(), *settings, *([f"scale={self.scale}"] if self.scale is not None else [])])

    def _sizes(self) -> list[str]:
        return [f"{name}={value}" for name, value in vars(self).items() if name.endswith("_size")]


def without_heads(aux: Aux) -> Aux:
    """Remove the head dimension of size 1 from the fields."""
    found: dict[str, Any] = {}
    for name in FIELDS:
        field = getattr(aux, name)
        if isinstance(field, Tensor):
            found[name] = field.squeeze(1)
        elif isinstance(field, TopK):
            found[name] = TopK(field.weights.squeeze(1), field.indices.squeeze(1))
    return replace(aux, **found)


# Dot product, general, additive, concat, location, cosine -------------------------------------------------------------


@mechanism(
    formula="softmax(QKᵀ / √E) V",
    sources=("luong2015", "vaswani2017"),
    cost="O(L·S·(E + V))",
    reads="scaled_dot",
)
class DotProductAttention(ScoredAttention):
    """Scaled dot-product attention, ``softmax(QKᵀ / √E) V``, without parameters.

    ``scale=None`` is Vaswani's attention (2017, arXiv 1706.03762), ``scale=1.0`` Luong's dot score (2015, arXiv
    1508.04025).

    Parameters
    ----------
    dropout, normalizer, scale, engine
        See :class:`ScoredAttention`.

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
        """Do nothing: the layer has no parameters."""


@mechanism(
    formula="softmax(Q W Kᵀ) V",
    sources=("luong2015",),
    learned="W (Eq, Ek)",
    cost="O(L·Eq·Ek + L·S·(Ek + V))",
    reads="general",
)
class GeneralAttention(ScoredAttention):
    """Attention with a learned bilinear score, ``qᵀ W k`` (Luong 2015, arXiv 1508.04025).

    Parameters
    ----------
    query_size : int
        Width E of queries.
    key_size : int, optional
        Width of keys; defaults to ``query_size``.
    dropout, normalizer, scale, engine
        See :class:`ScoredAttention`.
    device, dtype : optional
        Device and dtype of the parameters.

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
        """Initialize ``W`` by Glorot's rule."""
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
        Number of features C of the projections.
    dropout, normalizer, scale, engine
        See :class:`ScoredAttention`.
    device, dtype : optional
        Device and dtype of the parameters.

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
        """Initialize both projections by Glorot's rule, and w_v uniformly in ±1/√C."""
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
    """Attention with Luong's concat score, ``w_vᵀ tanh(W [q; k])`` (2015, arXiv 1508.04025): additive, with one matrix.

    Parameters
    ----------
    query_size, key_size : int
        Widths of queries and keys.
    hidden_size : int
        Number of features C.
    dropout, normalizer, scale, engine
        See :class:`ScoredAttention`.
    device, dtype : optional
        Device and dtype of the parameters.

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
        """Initialize the projection by Glorot's rule, and w_v uniformly in ±1/√C."""
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
    """Attention with Luong's location score, ``(W q)_i``, which depends only on key positions (arXiv 1508.04025).

    Parameters
    ----------
    query_size : int
        Width of queries.
    max_length : int
        Number of key positions; sequences may be shorter.
    dropout, normalizer, scale, engine
        See :class:`ScoredAttention`.
    device, dtype : optional
        Device and dtype of the parameters.

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
        """Initialize ``W`` by Glorot's rule."""
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
    """Attention with the cosine score, ``β cos(q, k)``: content addressing (Graves 2014, arXiv 1410.5401).

    A row of zeros has cosine 0 with every row.

    Parameters
    ----------
    beta : float, default 1.0
        Initial sharpness β, positive.
    learn_beta : bool, default True
        Whether log β is a parameter rather than a buffer.
    dropout, normalizer, scale, engine
        See :class:`ScoredAttention`.
    device, dtype : optional
        Device and dtype of ``beta``.

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
        """The sharpness β, (1,)."""
        return self.log_beta.exp()

    def score(self) -> scores.Score:
        return scores.Cosine((-self.log_beta).exp())

    def reset_parameters(self) -> None:
        """Reset β to its initial value."""
        nn.init.constant_(self.log_beta, math.log(self.initial))

    def _sizes(self) -> list[str]:
        return [f"beta={self.initial}"]


# Kernels: Nadaraya–Watson regression as a layer -----------------------------------------------------------------------


@mechanism(
    formula="Σ_i K((q − k_i) / σ) v_i / Σ_j K((q − k_j) / σ)",
    sources=("nadaraya1964", "watson1964", "epanechnikov1969"),
    learned="log σ, or one for each feature",
    cost="O(L·S·(E + V))",
    reads="gaussian",
)
class KernelAttention(ScoredAttention):
    """Kernel regression, ``Σ_i K((q − k_i) / σ) v_i / Σ_j K((q − k_j) / σ)`` (Nadaraya 1964; Watson 1964).

    A kernel is the exponential of a distance score in :mod:`regard.scores`, such as :class:`~regard.scores.Gaussian` or
    :class:`~regard.scores.Epanechnikov`. A query with no key within the width of a compact kernel gets zeros.
    The boxcar's width has no gradient.

    Parameters
    ----------
    kernel : str, default "gaussian"
        Name of a distance score.
    width : float, default 1.0
        Initial width σ, in the units of queries and keys.
    num_features : int, optional
        Number of features E, to learn one width per feature; by default all features share one.
    learn_width : bool, default True
        Whether log σ is a parameter rather than a buffer.
    dropout, normalizer, scale, engine
        See :class:`ScoredAttention`.
    device, dtype : optional
        Device and dtype of the width.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import KernelAttention
    >>> x = torch.linspace(0, 5, 50).view(1, 50, 1)
    >>> layer = KernelAttention(width=0.3)
    >>> layer(torch.tensor([[[1.0], [2.0]]]), x, x.sin()).shape, layer.width
    (torch.Size([1, 2, 1]), tensor([0.3000], grad_fn=<ExpBackward0>))
    """

    log_width: Tensor

    def __init__(
        self,
        kernel: KernelName = "gaussian",
        width: float = 1.0,
        num_features: int | None = None,
        dropout: float = 0.0,
        *,
        learn_width: bool = True,
        device: Any = None,
        dtype: Any = None,
        **parts: Unpack[ScoredParts],
    ) -> None:
        super().__init__(dropout, **parts)
        self.kernel, self.initial = OneOf(kernels())(self, "kernel", kernel), positive(self, "width", width)
        count = 1 if num_features is None else size(self, "num_features", num_features)
        value = torch.empty(count, device=device, dtype=dtype)
        if learn_width:
            self.log_width = nn.Parameter(value)
        else:
            self.register_buffer("log_width", value)
        self.reset_parameters()

    @property
    def width(self) -> Tensor:
        """The width σ, (1,) or (E,)."""
        return self.log_width.exp()

    def score(self) -> scores.Score:
        return kernels()[self.kernel](self.width)

    def reset_parameters(self) -> None:
        """Reset the width to its initial value."""
        nn.init.constant_(self.log_width, math.log(self.initial))

    def _sizes(self) -> list[str]:
        return [repr(self.kernel), f"width={self.initial}"]


# masked_softmax -------------------------------------------------------------------------------------------------------


@mechanism(formula="softmax(s_i for i < valid_lens), 0 beyond", cost="O(L·S)")
def masked_softmax(scores: Tensor, valid_lens: Tensor | None = None) -> Tensor:
    """Return the softmax of scores over valid keys; all others get exactly 0.

    Parameters
    ----------
    scores : Tensor (B, L, S)
    valid_lens : Tensor (B,) or (B, L) of int, optional
        Number of valid keys per sequence, or per query; all by default. With 0 valid keys, all weights are 0.

    Returns
    -------
    Tensor (B, L, S)

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong type or shape.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import masked_softmax
    >>> masked_softmax(torch.zeros(2, 2, 4), torch.tensor([[1, 3], [2, 4]]))
    tensor([[[1.0000, 0.0000, 0.0000, 0.0000],
             [0.3333, 0.3333, 0.3333, 0.0000]],
    <BLANKLINE>
            [[0.5000, 0.5000, 0.0000, 0.0000],
             [0.2500, 0.2500, 0.2500, 0.2500]]])
    """
    floats("masked_softmax", "scores", scores, "B", "L", "S")
    if valid_lens is not None:
        B, L, S = scores.shape
        b, q_idx, kv_idx = (torch.arange(n, device=scores.device) for n in (B, L, S))
        mask = masks.padding(valid_lens).bind(masks.Extent(B, 1, L, S), scores.device)
        head = torch.zeros(1, 1, 1, dtype=torch.int64, device=scores.device)
        added = mask.matrix(b.view(-1, 1, 1, 1), head, q_idx.unsqueeze(1), kv_idx, scores.dtype)
        scores = torch.where(added.squeeze(1) == 0, scores, -torch.inf)
    return normalizers.Softmax().weights(scores)
