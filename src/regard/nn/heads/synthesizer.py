"""Attention with weights that depend only on positions: a learned score matrix, or a low-rank one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from regard import masks, scores
from regard._utils.constraints import probability, size
from regard._utils.errors import rejected
from regard._utils.mechanism import mechanism
from regard.engines import EngineLike
from regard.engines.aux import Aux, AuxRequest
from regard.functional import attention
from regard.masks import Mask, MaskLike
from regard.nn._base import PartLayer, combined_mask, non_default, parameter, resolve_part, sequences
from regard.nn.heads.scored import without_heads
from regard.normalizers import NormalizerLike


class _Positional(PartLayer, ABC):
    """One head over a sequence (B, N, V); a subclass defines the scores of positions."""

    def __init__(self, max_length: int, dropout: float, normalizer: NormalizerLike, engine: EngineLike) -> None:
        super().__init__()
        self.max_length = size(self, "max_length", max_length)
        self.dropout = probability(self, "dropout", dropout)
        self.normalizer, self.engine = normalizer, engine

    @abstractmethod
    def reset_parameters(self) -> None:
        """Re-initialize the parameters."""

    @abstractmethod
    def _ends(self, value: Tensor) -> tuple[Tensor, Tensor, scores.Score, Mask | None]:
        """Return queries and keys (1, 1, N, C), their score, and a bias, for values (B, N, V)."""

    def forward(
        self,
        value: Tensor,
        valid_lens: Tensor | None = None,
        *,
        attn_mask: MaskLike | None = None,
        is_causal: bool = False,
        return_aux: AuxRequest | None = None,
    ) -> Tensor | tuple[Tensor, Aux]:
        """Return the weighted sum of values for each position.

        Parameters
        ----------
        value : Tensor (B, N, V)
            N is at most ``max_length``.
        valid_lens : Tensor (B,) or (B, N) of int, optional
            Number of valid values per sequence, or per position; later values are ignored.
        attn_mask : Tensor, Mask or callable, optional
            See :func:`regard.attention`; a tensor (N, N), (B, N, N) or (B, 1, N, N), True where visible.
        is_causal : bool, default False
            Also hide values after the position.
        return_aux : AuxRequest, optional
            Auxiliary outputs to return.

        Returns
        -------
        output : Tensor (B, N, V)
        aux : Aux
            Only if requested; its fields have no head dimension: weights (B, N, N).
        """
        sequences(self, "value", value)
        if value.shape[1] > self.max_length:
            expected = f"have at most {self.max_length} rows (max_length)"
            raise rejected(type(self).__name__, "value", expected, value.shape[1])
        query, key, score, bias = self._ends(value)
        mask = combined_mask(self, valid_lens, attn_mask)
        if bias is not None:
            mask = bias if mask is None else mask & bias
        answer = attention(
            query,
            key,
            value.unsqueeze(1),
            mask,
            self.dropout if self.training else 0.0,
            is_causal,
            score=score,
            normalizer=resolve_part(self.normalizer),
            engine=self.engine,
            return_aux=return_aux,
        )
        if isinstance(answer, Tensor):
            return answer.squeeze(1)
        return answer[0].squeeze(1), without_heads(answer[1])

    def extra_repr(self) -> str:
        """Return the sizes and the settings that differ from the defaults."""
        settings = [f"max_length={self.max_length}"]
        settings += [f"dropout={self.dropout}"] if self.dropout else []
        return ", ".join([*settings, *non_default(self, "normalizer", "softmax")])


@mechanism(
    formula="softmax(R[:N, :N]) V",
    sources=("tay2021",),
    learned="R (N_max, N_max)",
    cost="O(N²·V)",
    reads="constant",
)
class PositionalAttention(_Positional):
    """Attention with a learned score for every pair of positions, ``softmax(R) V`` (Tay 2021, arXiv 2005.00743).

    The weights do not depend on the contents of the sequence. This is a head of the "random" Synthesizer; as in the
    paper, project the values first.

    Parameters
    ----------
    max_length : int
        Number of positions. Shorter sequences use the first rows and columns of R.
    dropout : float, default 0.0
        Probability of dropping a weight, in training.
    normalizer : str or Normalizer, default "softmax"
    engine : str, default "auto"
        See :func:`regard.attention`.
    device, dtype : optional
        Device and dtype of the parameter.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import PositionalAttention
    >>> PositionalAttention(10)(torch.randn(2, 7, 4), torch.tensor([7, 5]), is_causal=True).shape
    torch.Size([2, 7, 4])
    """

    def __init__(
        self,
        max_length: int,
        dropout: float = 0.0,
        *,
        normalizer: NormalizerLike = "softmax",
        engine: EngineLike = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(max_length, dropout, normalizer, engine)
        self.weight = parameter(self.max_length, self.max_length, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize R by Glorot's rule."""
        nn.init.xavier_uniform_(self.weight)

    def _ends(self, value: Tensor) -> tuple[Tensor, Tensor, scores.Score, Mask | None]:
        N = value.shape[1]
        nothing = value.new_zeros(1, 1, N, 1)
        return nothing, nothing, scores.Constant(), masks.dense(self.weight[:N, :N])


@mechanism(
    formula="softmax(A[:N] B[:N]ᵀ) V",
    sources=("tay2021",),
    learned="A, B (N_max, r)",
    cost="O(N²·(r + V))",
    reads="dot",
)
class FactorizedPositionalAttention(_Positional):
    """Attention with low-rank scores of pairs of positions, ``softmax(A Bᵀ) V`` (Tay 2021, arXiv 2005.00743).

    The factorized "random" Synthesizer: :class:`PositionalAttention` with 2·N·r parameters instead of N². The scores
    are dot products, so the N × N matrix is never materialized.

    Parameters
    ----------
    max_length : int
        Number of positions. Shorter sequences use the first rows of A and B.
    rank : int, default 8
        Rank r, the width of both factors.
    dropout : float, default 0.0
        Probability of dropping a weight, in training.
    normalizer : str or Normalizer, default "softmax"
    engine : str, default "auto"
        See :func:`regard.attention`.
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import FactorizedPositionalAttention
    >>> layer = FactorizedPositionalAttention(100, rank=4)
    >>> layer(torch.randn(2, 7, 4)).shape, sum(p.numel() for p in layer.parameters())
    (torch.Size([2, 7, 4]), 800)
    """

    def __init__(
        self,
        max_length: int,
        rank: int = 8,
        dropout: float = 0.0,
        *,
        normalizer: NormalizerLike = "softmax",
        engine: EngineLike = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(max_length, dropout, normalizer, engine)
        self.rank = size(self, "rank", rank)
        self.rows = parameter(self.max_length, self.rank, device=device, dtype=dtype)
        self.columns = parameter(self.max_length, self.rank, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize both factors so that scores have the variance of a full matrix under Glorot's rule."""
        deviation = (self.max_length * self.rank) ** -0.25
        for factor in (self.rows, self.columns):
            bound = math.sqrt(3) * deviation
            nn.init.uniform_(factor, -bound, bound)

    def _ends(self, value: Tensor) -> tuple[Tensor, Tensor, scores.Score, Mask | None]:
        N = value.shape[1]
        return self.rows[None, None, :N], self.columns[None, None, :N], scores.Dot(), None

    def extra_repr(self) -> str:
        """Return the sizes and the settings that differ from the defaults."""
        return f"rank={self.rank}, {super().extra_repr()}"
