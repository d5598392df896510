"""Auxiliary outputs of a call: the request and the result."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from torch import Tensor

from regard._utils.errors import described, rejected


@dataclass(frozen=True)
class AuxRequest:
    """The auxiliary outputs that :func:`regard.attention` returns. Requesting them leaves the output bit-identical.

    Attributes
    ----------
    lse : bool or "grad"
        Natural log-sum-exp of each row's scores, without a sink, (..., H, L). With "grad" it is differentiable in
        query, key and the tensors of score and mask, so that outputs over different keys can be merged differentiably.
    max : bool
        Largest score of each row, (..., H, L).
    entropy : bool
        Entropy of each row's weights in nats, (..., H, L).
    topk : int
        The k largest weights of each row and the indices of their keys, (..., H, L, k) each; 0 for none. Rows with
        fewer than k visible keys are padded with weights of 0 and indices of −1.
    received : bool
        The attention received by each key: the sum of its weights over queries, (..., H, S).
    weights : bool
        All weights, before dropout, (..., H, L, S). Takes O(L·S) memory.
    scores : bool
        All scores, after scale, softcap, mask and bias, (..., H, L, S). Takes O(L·S) memory.
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
        if self.topk >= 2**31:
            raise rejected("AuxRequest", "topk", "be below 2**31", self.topk)


#: Names of the fields, as a constant because compilers cannot trace ``dataclasses.fields``.
FIELDS = tuple(field.name for field in fields(AuxRequest))


@dataclass(frozen=True, eq=False)
class TopK:
    """The largest weights of each row: ``weights`` and key ``indices`` (..., H, L, k), padded with 0 and −1."""

    weights: Tensor
    indices: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Aux:
    """The auxiliary outputs requested by an :class:`AuxRequest`; all other fields are None.

    ``weights``, ``scores`` and, with ``lse="grad"``, ``lse`` are differentiable; the other fields are detached.
    """

    lse: Tensor | None = None
    max: Tensor | None = None
    entropy: Tensor | None = None
    topk: TopK | None = None
    received: Tensor | None = None
    weights: Tensor | None = None
    scores: Tensor | None = None

    def __repr__(self) -> str:
        values = {name: getattr(self, name) for name in FIELDS}
        return f"Aux({', '.join([f'{name}={value!r}' for name, value in values.items() if value is not None])})"
