"""Scores computed by a one-layer network from query and key: additive and concat."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from regard._utils.constraints import TensorOf, floats
from regard._utils.errors import rejected, shape
from regard._utils.mechanism import mechanism
from regard.scores.base import Score, register

# Additive: a one-layer network compares the query and the key ---------------------------------------------------------


def tanh_scores(query: Tensor, key: Tensor, w_v: Tensor) -> Tensor:
    """Return ``Σ_c w_v[c] tanh(query[c] + key[c])`` for rows (..., l, C) and (..., s, C), w_v (C,) or (H, C)."""
    hidden = torch.tanh(query.unsqueeze(-2) + key.unsqueeze(-3))  # (..., l, s, C)
    if w_v.dim() == 1:
        return hidden @ w_v
    return (hidden @ w_v[:, None, :, None]).squeeze(-1)  # (B, H, l, s, C) @ (H, 1, C, 1)


def check_heads(name: str, tensors: dict[str, Tensor | None], heads: int) -> None:
    """Raise ValueError if a tensor has a head dimension of a size other than ``heads``."""
    for argument, (tensor, plain) in ((a, (t, 1 if a == "w_v" else 2)) for a, t in tensors.items() if t is not None):
        if tensor.dim() == plain + 1 and tensor.shape[0] != heads:
            raise rejected(
                "attention", f"score {name}'s {argument}", f"have one entry per query head ({heads})", shape(tensor)
            )


@register("additive")
@mechanism(
    formula="w_vᵀ tanh(W_q q + W_k k)",
    sources=("bahdanau2014",),
    learned="W_q (C, Eq), W_k (C, Ek), w_v (C)",
    cost="O((L·Eq + S·Ek)·C + L·S·C)",
)
class Additive(Score):
    """Bahdanau's additive score, ``w_vᵀ tanh(W_q q + W_k k)`` (Bahdanau et al. 2014, arXiv 1409.0473).

    Parameters
    ----------
    w_v : Tensor (C,) or (H, C)
        Weight of each hidden feature.
    w_q : Tensor (C, Eq) or (H, C, Eq), optional
        Projection of the query, laid out as ``nn.Linear.weight``. None if queries are already projected (Eq = C).
    w_k : Tensor (C, Ek) or (H, C, Ek), optional
        Projection of the key. Per head only if keys have as many heads as queries. None if keys are already projected.

    Examples
    --------
    >>> import torch, regard
    >>> q, k, v = torch.randn(2, 1, 5, 8), torch.randn(2, 1, 7, 6), torch.randn(2, 1, 7, 3)
    >>> score = Additive(torch.randn(16), torch.randn(16, 8), torch.randn(16, 6))
    >>> regard.attention(q, k, v, score=score).shape
    torch.Size([2, 1, 5, 3])
    """

    mixed_widths = True

    def __init__(self, w_v: Tensor, w_q: Tensor | None = None, w_k: Tensor | None = None) -> None:
        width = TensorOf(("C",), ("H", "C"))(self, "w_v", w_v).shape[-1]
        for name, weight in (("w_q", w_q), ("w_k", w_k)):
            if weight is not None:
                TensorOf((width, "E"), ("H", width, "E"))(self, name, weight)
        self.w_v, self.w_q, self.w_k = w_v, w_q, w_k

    @property
    def per_head(self) -> bool:
        """Whether w_v differs per head."""
        return self.w_v.dim() == 2

    def check(self, query: Tensor, key: Tensor) -> None:
        for name, weight, rows, tensor in (("w_q", self.w_q, "query", query), ("w_k", self.w_k, "key", key)):
            wanted = self.w_v.shape[-1] if weight is None else weight.shape[-1]
            if tensor.shape[-1] != wanted:
                source = f"w_v's {wanted} features (no {name} given)" if weight is None else f"{name}'s width {wanted}"
                raise rejected("attention", rows, f"have {source}", f"{tensor.shape[-1]} ({rows} {shape(tensor)})")
        check_heads("Additive", {"w_v": self.w_v, "w_q": self.w_q}, query.shape[1])
        check_heads("Additive", {"w_k": self.w_k}, key.shape[1])

    def project(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        query = query if self.w_q is None else query @ self.w_q.mT
        return query, key if self.w_k is None else key @ self.w_k.mT

    def compare(self, query: Tensor, key: Tensor) -> Tensor:
        return tanh_scores(query, key, self.w_v)

    def pair_size(self, width: int) -> int:
        return width

    def pair_flops(self, width: int) -> int:
        return 4 * width  # add, tanh (one, by convention), multiply, add

    @classmethod
    def sample(cls, query_width: int, key_width: int, keys: int, generator: torch.Generator) -> Self:  # noqa: ARG003
        w_v, w_q, w_k = (torch.randn(*size, generator=generator) for size in ((4,), (4, query_width), (4, key_width)))
        return cls(w_v, w_q, w_k)


# Concat: the additive score with one matrix for the query and key joined ----------------------------------------------


@register("concat")
@mechanism(
    formula="w_vᵀ tanh(W [q; k])",
    sources=("luong2015",),
    learned="W (C, Eq + Ek), w_v (C)",
    cost="O((L·Eq + S·Ek)·C + L·S·C)",
)
class Concat(Score):
    """Luong's concat score, ``w_vᵀ tanh(W [q; k])`` (Luong et al. 2015, arXiv 1508.04025).

    It equals :class:`Additive` with the columns of W split between query and key.

    Parameters
    ----------
    w_v : Tensor (C,) or (H, C)
        Weight of each hidden feature.
    weight : Tensor (C, Eq + Ek)
        The matrix W, laid out as ``nn.Linear.weight``; its first Eq columns meet the query.

    Examples
    --------
    >>> import torch, regard
    >>> q, k = torch.randn(1, 1, 5, 8), torch.randn(1, 1, 7, 6)
    >>> regard.attention(q, k, k, score=Concat(torch.randn(16), torch.randn(16, 14))).shape
    torch.Size([1, 1, 5, 6])
    """

    mixed_widths = True

    def __init__(self, w_v: Tensor, weight: Tensor) -> None:
        width = TensorOf(("C",), ("H", "C"))(self, "w_v", w_v).shape[-1]
        floats(self, "weight", weight, width, "Eq + Ek")
        self.w_v, self.weight = w_v, weight

    @property
    def per_head(self) -> bool:
        """Whether w_v differs per head."""
        return self.w_v.dim() == 2

    def check(self, query: Tensor, key: Tensor) -> None:
        width = query.shape[-1] + key.shape[-1]
        if self.weight.shape[1] != width:
            expected = f"have {query.shape[-1]} + {key.shape[-1]} columns, the widths of query and key"
            raise rejected("attention", "score Concat's weight", expected, shape(self.weight))
        check_heads("Concat", {"w_v": self.w_v}, query.shape[1])

    def project(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        split = query.shape[-1]
        return query @ self.weight[:, :split].mT, key @ self.weight[:, split:].mT

    def compare(self, query: Tensor, key: Tensor) -> Tensor:
        return tanh_scores(query, key, self.w_v)

    def pair_size(self, width: int) -> int:
        return width

    def pair_flops(self, width: int) -> int:
        return 4 * width

    @classmethod
    def sample(cls, query_width: int, key_width: int, keys: int, generator: torch.Generator) -> Self:  # noqa: ARG003
        weight = torch.randn(4, query_width + key_width, generator=generator)
        return cls(torch.randn(4, generator=generator), weight)
