"""Local attention: a window of keys around a given or predicted position."""

from __future__ import annotations

import math
from typing import Any, Literal, final, get_args

import torch
from torch import Tensor, nn

from regard import masks
from regard._utils.constraints import OneOf, flag, probability, size
from regard._utils.errors import described, rejected, shape
from regard._utils.mechanism import mechanism
from regard.engines import EngineLike
from regard.engines.aux import Aux, AuxRequest
from regard.functional import attention
from regard.masks import Mask, MaskLike
from regard.nn._base import Layer, attention_inputs, combined_mask, parameter, resolve_part
from regard.nn.heads.scored import without_heads
from regard.nn.heads.stochastic import scorer
from regard.normalizers import Normalizer, NormalizerLike, Softmax

Mode = Literal["predictive", "monotonic"]

#: Names of scores.
ScorerName = Literal["general", "dot", "concat"]


def _log_gaussian(center: Tensor, keys: int, sigma: float) -> Tensor:
    """Return ``−(s − p)² / (2σ²)`` (..., L, S) for centers (..., L) and positions 0 … S − 1."""
    positions = torch.arange(keys, device=center.device, dtype=center.dtype)
    return -(((positions - center.unsqueeze(-1)) / sigma) ** 2) / 2


@final
class _Damped(Normalizer):
    """Softmax times a Gaussian of the distance between key and window center (B, 1, L); sums to at most 1."""

    convex = False

    def __init__(self, center: Tensor, sigma: float) -> None:
        self.center, self.sigma = center, sigma

    def weights(self, scores: Tensor) -> Tensor:
        return Softmax().weights(scores) * _log_gaussian(self.center, scores.shape[-1], self.sigma).exp()


@mechanism(
    formula="softmax(score(q, K) within |s − p| ≤ D) · exp(−(s − p)² / (2 (D/2)²)) V, p = S σ(v_pᵀ tanh(W_p q))",
    sources=("luong2015",),
    learned="v_p (C), W_p (C, Eq), and those of the score",
    cost="O(L·Eq·C + L·S·(E + V))",
)
class LocalAttention(Layer):
    """Luong's local attention: a window of keys within D of an aligned position p (2015, arXiv 1508.04025).

    ``mode="monotonic"`` (local-m): p is the query's position t, or given; weights are the softmax over the window.

    ``mode="predictive"`` (local-p): p is predicted, and a Gaussian with σ = D/2 favours keys near it::

        p_t = S · sigmoid(v_pᵀ tanh(W_p q_t))        α_t(s) = softmax_s(score(q_t, k_s)) · exp(−(s − p_t)² / (2σ²))

    The softmax runs over the window ``|s − p_t| ≤ D``, s starts at 0, and S is the valid length. As in the paper, the
    Gaussian multiplies the weights after the softmax, so they sum to less than 1. It provides the gradient to p_t.

    Parameters
    ----------
    query_size : int
        Width Eq of queries.
    window : int
        Number of keys D on each side of p.
    key_size : int, optional
        Width of keys; defaults to ``query_size``.
    hidden_size : int, optional
        Features C of the prediction and of a concat score; defaults to ``query_size``.
    dropout : float, default 0.0
        Probability of dropping a weight, in training.
    mode : {"predictive", "monotonic"}, default "predictive"
    score : {"general", "dot", "concat"}, default "general"
        The score; "dot" is not scaled.
    renormalize : bool, default False
        Normalize predictive weights to sum to 1, by adding the log of the Gaussian to the scores.
    engine : str, default "auto"
        See :func:`regard.attention`.
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch, regard
    >>> from regard.nn import LocalAttention
    >>> layer = LocalAttention(4, window=2, mode="monotonic")
    >>> output, aux = layer(torch.randn(1, 5, 4), return_aux=regard.AuxRequest(weights=True))
    >>> (aux.weights[0] > 0).int()
    tensor([[1, 1, 1, 0, 0],
            [1, 1, 1, 1, 0],
            [1, 1, 1, 1, 1],
            [0, 1, 1, 1, 1],
            [0, 0, 1, 1, 1]], dtype=torch.int32)
    """

    def __init__(
        self,
        query_size: int,
        window: int,
        key_size: int | None = None,
        hidden_size: int | None = None,
        dropout: float = 0.0,
        *,
        mode: Mode = "predictive",
        score: ScorerName = "general",
        renormalize: bool = False,
        engine: EngineLike = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        query_size, self.window = size(self, "query_size", query_size), size(self, "window", window)
        key_size = query_size if key_size is None else size(self, "key_size", key_size)
        hidden_size = query_size if hidden_size is None else size(self, "hidden_size", hidden_size)
        self.dropout, self.engine = probability(self, "dropout", dropout), engine
        self.mode = OneOf(get_args(Mode))(self, "mode", mode)
        flag(self, "renormalize", renormalize)
        self.renormalize = renormalize
        kind, where = OneOf(get_args(ScorerName))(self, "score", score), {"device": device, "dtype": dtype}
        self.scorer = scorer(self, kind, (query_size, key_size, hidden_size), **where)
        self.w_p: nn.Parameter | None = None
        self.v_p: nn.Parameter | None = None
        if self.mode == "predictive":
            self.w_p, self.v_p = parameter(hidden_size, query_size, **where), parameter(hidden_size, **where)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the score's parameters, W_p by Glorot's rule, and v_p uniformly in ±1/√C."""
        self.scorer.reset_parameters()
        if self.w_p is not None and self.v_p is not None:
            nn.init.xavier_uniform_(self.w_p)
            bound = 1 / math.sqrt(len(self.v_p))
            nn.init.uniform_(self.v_p, -bound, bound)

    def predict(self, query: Tensor, lengths: Tensor | int) -> Tensor:
        """Predict the positions p (B, L) of queries, between 0 and the length.

        Parameters
        ----------
        query : Tensor (B, L, Eq)
        lengths : int, or Tensor that broadcasts to (B, L)
            Number of keys.

        Returns
        -------
        Tensor (B, L)
            In at least single precision.
        """
        if self.w_p is None or self.v_p is None:
            raise rejected("LocalAttention.predict", "mode", "be 'predictive'", repr(self.mode))
        logits = torch.tanh(query @ self.w_p.mT) @ self.v_p
        return lengths * torch.sigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32)))

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        valid_lens: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        attn_mask: MaskLike | None = None,
        is_causal: bool = False,
        return_aux: AuxRequest | None = None,
    ) -> Tensor | tuple[Tensor, Aux]:
        """Return the weighted sums of values near each query's position.

        Parameters
        ----------
        query : Tensor (B, L, Eq)
        key : Tensor (B, S, Ek), optional
            Defaults to ``query``.
        value : Tensor (B, S, V), optional
            Defaults to ``key``.
        valid_lens : Tensor (B,) or (B, L) of int, optional
            Number of valid keys per sequence, or per query: S in the formula.
        positions : Tensor (L,) or (B, L), optional
            Centers p of the windows; by default given by the mode. A decoding step passes its own t.
        attn_mask : Tensor, Mask or callable, optional
            See :func:`regard.attention`; a tensor (L, S), (B, L, S) or (B, 1, L, S), True where visible.
        is_causal : bool, default False
            Also hide keys after the query.
        return_aux : AuxRequest, optional
            Auxiliary outputs to return; weights include the Gaussian.

        Returns
        -------
        output : Tensor (B, L, V)
            0 if the window lies beyond the sequence.
        aux : Aux
            Only if requested; its fields have no head dimension.
        """
        q, k, v = attention_inputs(self, query, key, value, valid_lens)
        given = combined_mask(self, valid_lens, attn_mask)
        center = self._centers(q.squeeze(1), k.shape[2], valid_lens, positions)
        mask = self._near(center) if given is None else self._near(center) & given
        normalizer: NormalizerLike = "softmax"
        if self.mode == "predictive" and self.renormalize:
            mask &= masks.dense(_log_gaussian(center, k.shape[2], self.window / 2).unsqueeze(1))
        elif self.mode == "predictive":
            normalizer = _Damped(center.unsqueeze(1), self.window / 2)
        answer = attention(
            q,
            k,
            v,
            mask,
            self.dropout if self.training else 0.0,
            is_causal,
            self.scorer.scale,
            score=resolve_part(self.scorer.score()),
            normalizer=normalizer,
            engine=self.engine,
            return_aux=return_aux,
        )
        if isinstance(answer, Tensor):
            return answer.squeeze(1)
        return answer[0].squeeze(1), without_heads(answer[1])

    def _centers(self, query: Tensor, keys: int, valid_lens: Tensor | None, positions: Tensor | None) -> Tensor:
        """Return p (B, L): given, predicted, or the query's position."""
        B, L, _ = query.shape
        if positions is not None:
            if not isinstance(positions, Tensor) or positions.dtype == torch.bool or positions.is_complex():
                expected = "be a tensor of numbers (L,) or (B, L)"
                raise rejected("LocalAttention", "positions", expected, described(positions), TypeError)
            if tuple(positions.shape) not in ((L,), (B, L)):
                expected = f"have shape (L,) = {(L,)} or (B, L) = {(B, L)}"
                raise rejected("LocalAttention", "positions", expected, shape(positions))
            wide = positions.dtype if positions.dtype == torch.float64 else torch.float32
            return positions.to(wide).expand(B, L)
        if self.mode == "monotonic":
            return torch.arange(L, device=query.device, dtype=torch.float32).expand(B, L)
        if valid_lens is None:
            return self.predict(query, keys)
        lengths = valid_lens.clamp(0, keys)
        return self.predict(query, lengths if lengths.dim() == 2 else lengths.unsqueeze(1))

    def _near(self, center: Tensor) -> Mask:
        """Return the mask that shows keys with |s − p| ≤ D."""
        start = torch.ceil(center.detach() - self.window).long()
        stop = torch.floor(center.detach() + self.window).long() + 1
        return masks.padding(stop) & masks.NotMask(masks.padding(start))  # ``~`` cannot be traced by torch.compile

    def extra_repr(self) -> str:
        """Return the settings, without the score's."""
        settings = f"window={self.window}, mode={self.mode!r}"
        settings += ", renormalize=True" if self.renormalize else ""
        return f"{settings}, dropout={self.dropout}" if self.dropout else settings
