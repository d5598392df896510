"""Request and return fields beside the output of a call."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from torch import Tensor

from regard._utils.errors import described, rejected


@dataclass(frozen=True)
class AuxRequest:
    """The fields that :func:`regard.attention` returns with the output. Asking never changes the output by one bit.

    Attributes
    ----------
    lse : bool or "grad"
        Natural log of the sum of the exponentials of each row's scores, (..., H, L). With "grad" it has a gradient, to
        query, key and the tensors of score and mask: outputs over different keys then merge into one, differentiably.
    max : bool
        Largest score of each row, (..., H, L).
    entropy : bool
        Entropy of each row's weights in nats, (..., H, L).
    topk : int
        The k largest weights of each row and the indices of their keys, (..., H, L, k) each; 0 for none. A row that
        may attend to fewer keys than k ends in weights of 0 and indices of −1.
    received : bool
        How much each key is attended: the sum over queries of its weights, (..., H, S).
    weights : bool
        All weights, before dropout, (..., H, L, S). Materialized.
    scores : bool
        All scores, after scale, softcap, mask and bias, (..., H, L, S). Materialized.
    """

    lse: bool | Literal["grad"] = False
    max: bool = False
    entropy: bool = False
    topk: int = 0
    received: bool = False
    weights: bool = False
    scores: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "lse" and not (isinstance(value, bool) or value == "grad"):
                kind = ValueError if isinstance(value, str) else TypeError
                raise rejected("AuxRequest", "lse", "be a bool or 'grad'", described(value), kind)
            if field.name not in ("lse", "topk") and not isinstance(value, bool):
                raise rejected("AuxRequest", field.name, "be a bool", described(value), TypeError)
        if isinstance(self.topk, bool) or not isinstance(self.topk, int):
            raise rejected("AuxRequest", "topk", "be an int of at least 0", described(self.topk), TypeError)
        if self.topk < 0:
            raise rejected("AuxRequest", "topk", "be an int of at least 0", self.topk)


#: The names of the fields, which a compiler cannot ask a class for.
FIELDS = tuple(field.name for field in fields(AuxRequest))


@dataclass(frozen=True)
class TopK:
    """The largest weights of each row: ``weights`` (..., H, L, k) and key ``indices`` (..., H, L, k), −1 where none."""

    weights: Tensor
    indices: Tensor


@dataclass(frozen=True)
class Aux:
    """The answer to an :class:`AuxRequest`: the fields asked for, None for the others.

    ``weights``, ``scores`` and an ``lse`` that was asked for with "grad" have gradients; the other fields have none.
    """

    lse: Tensor | None = None
    max: Tensor | None = None
    entropy: Tensor | None = None
    topk: TopK | None = None
    received: Tensor | None = None
    weights: Tensor | None = None
    scores: Tensor | None = None

    def __repr__(self) -> str:
        asked = {name: getattr(self, name) for name in FIELDS}
        return f"Aux({', '.join([f'{name}={value!r}' for name, value in asked.items() if value is not None])})"
