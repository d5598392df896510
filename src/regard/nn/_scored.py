"""Base of the layers with one head of attention, whose score is a part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, TypedDict

from torch import Tensor

from regard import scores
from regard._attention import attention
from regard._aux import FIELDS, Aux, AuxRequest, TopK
from regard._constraints import probability
from regard.engines import EngineLike
from regard.masks import MaskLike
from regard.nn._base import attention_inputs, combined_mask
from regard.nn._parts import PartLayer, current, unusual
from regard.normalizers import NormalizerLike


class ScoredParts(TypedDict, total=False):
    """Keyword arguments that every :class:`ScoredAttention` takes."""

    normalizer: NormalizerLike
    scale: float | None
    engine: EngineLike


class ScoredAttention(PartLayer, ABC):
    """One head of attention over sequences (B, N, E); a subclass says how a query and a key compare.

    Parameters
    ----------
    dropout : float, default 0.0
        Probability of dropping a weight, in training.
    normalizer : str or Normalizer, default "softmax"
    scale : float, optional
        Multiplies the score; None is the score's own.
    engine : str, default "auto"
        As :func:`regard.attention` takes it.
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
        """Return the score, with this layer's parameters in it."""

    @abstractmethod
    def reset_parameters(self) -> None:
        """Draw the parameters anew."""

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
            The queries where none are given: self-attention, where padded queries count as zeros, too.
        value : Tensor (B, S, V), optional
            The keys where none are given.
        valid_lens : Tensor (B,) or (B, L) of int, optional
            How many keys each sequence, or each query, may see; what is beyond has no influence.
        attn_mask : Tensor, Mask or callable, optional
            As :func:`regard.attention` takes it; a tensor (L, S), (B, L, S) or (B, 1, L, S), True where visible.
        is_causal : bool, default False
            Also hide keys after the query.
        return_aux : AuxRequest, optional
            Fields to return besides the output.

        Returns
        -------
        output : Tensor (B, L, V)
        aux : Aux
            Only where asked for; its fields have no head dimension: weights (B, L, S), entropy (B, L) and so on.
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
            score=current(self.score()),
            normalizer=current(self.normalizer),
            engine=self.engine,
            return_aux=return_aux,
        )
        if isinstance(answer, Tensor):
            return answer.squeeze(1)
        output, aux = answer
        return output.squeeze(1), without_heads(aux)

    def extra_repr(self) -> str:
        """Return what the layer prints: sizes first, then what is not the default."""
        settings = [f"dropout={self.dropout}"] if self.dropout else []
        settings += unusual(self, "normalizer", "softmax")
        return ", ".join([*self._sizes(), *settings, *([f"scale={self.scale}"] if self.scale is not None else [])])

    def _sizes(self) -> list[str]:
        return [f"{name}={value}" for name, value in vars(self).items() if name.endswith("_size")]


def without_heads(aux: Aux) -> Aux:
    """Return the fields of a single head without the dimension for it."""
    found: dict[str, Any] = {}
    for name in FIELDS:
        field = getattr(aux, name)
        if isinstance(field, Tensor):
            found[name] = field.squeeze(1)
        elif isinstance(field, TopK):
            found[name] = TopK(field.weights.squeeze(1), field.indices.squeeze(1))
    return replace(aux, **found)
