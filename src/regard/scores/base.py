"""The interface of a score: how a query and a key compare, as a log-weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Self, TypeVar

import torch
from torch import Tensor

from regard._utils.part import Part


@dataclass(frozen=True)
class DotForm:
    """A score written as a plain dot product: ``score(q, k) = query·key + offset(q)``.

    Softmax cancels the offset, which depends on the query alone; ``lse`` and ``max`` do not, so it is kept.

    Attributes
    ----------
    query : Tensor (B, H, L, C)
    key : Tensor (B, G, S, C)
    offset : Tensor (B, H, L) or None
    """

    query: Tensor
    key: Tensor
    offset: Tensor | None = None


class Score(Part, ABC):
    """A comparison of queries and keys: the log-weight of every (query, key) pair.

    A subclass defines :meth:`compare`; everything else has a default. ``project`` does per-row work once
    (O(L + S)); ``compare`` is called on tiles of its results and must treat each pair by itself, so that a
    tile's scores do not depend on what else is in the tile. Both are ordinary differentiable torch code.

    Learned parameters are tensors stored as attributes; they get gradients. A layer of :mod:`regard.nn` that is given
    a score makes its parameters those of the layer. A Module of your own keeps them itself, and makes the score of
    them in ``forward``.

    Examples
    --------
    >>> class Laplace(Score):
    ...     def compare(self, query, key):
    ...         return -torch.cdist(query, key, p=1)
    >>> import regard
    >>> q = torch.zeros(1, 1, 2, 3)
    >>> regard.attention(q, q, q, score=Laplace()).shape
    torch.Size([1, 1, 2, 3])
    """

    shortcuts: ClassVar[Mapping[str, frozenset[str]]] = dict.fromkeys(
        ("as_dot", "dot_refusal"),
        frozenset({"project", "compare", "modify", "difference", "log_weight", "log_profile"}),
    )
    #: True when query and key may differ in width.
    mixed_widths: ClassVar[bool] = False
    #: True when :meth:`compare` may answer −inf for a pair that is too far apart: such a pair never meets.
    can_return_neg_inf: ClassVar[bool] = False
    #: True when the score depends on where the key stands, so that permuting the keys changes it.
    positional: ClassVar[bool] = False

    def default_scale(self, width: int) -> float:  # noqa: ARG002
        """Return the factor that multiplies the score when the caller gives no ``scale``; ``width`` is the query's."""
        return 1.0

    def check(self, query: Tensor, key: Tensor) -> None:
        """Raise ValueError when these (B, H, L, E) queries and (B, G, S, E) keys do not fit the score's tensors."""

    def project(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return what :meth:`compare` works on: (B, H, L, C) and (B, G, S, C'), one row for each row given."""
        return query, key

    @abstractmethod
    def compare(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the scores (..., l, s) of projected rows (..., l, C) and (..., s, C')."""

    def modify(self, scores: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG002
        """Return scaled scores (B, H, l, s) changed by position; the indices broadcast against them."""
        return scores

    def at(self, first_query: int, first_key: int) -> Score | None:
        """Return the score of queries and keys that are a part of longer sequences, and begin there.

        A score that does not look at positions is the same everywhere; None where it does, and does not know.
        """
        looks = self.positional or type(self).modify is not Score.modify
        return None if looks and (first_query or first_key) else self

    def dot_refusal(self, dtype: torch.dtype) -> str | None:  # noqa: ARG002
        """Return why this score is no plain dot product of inputs of this dtype, or None when :meth:`as_dot` works."""
        return f"{type(self).__name__} is not a dot product of features of the query and of the key"

    def as_dot(self, query: Tensor, key: Tensor) -> DotForm:
        """Return the same weights as a plain dot product of rows (B, H, L, E) and (B, G, S, E)."""
        raise NotImplementedError(self.dot_refusal(query.dtype))

    @property
    def per_head(self) -> bool:
        """True where :meth:`compare` uses tensors that differ per query head: heads cannot be folded into rows."""
        return False

    def pair_size(self, width: int) -> int:  # noqa: ARG002
        """Return how many numbers :meth:`compare` holds at once for one pair of projected rows of this width."""
        return 1

    def pair_flops(self, width: int) -> int:
        """Return the operations that :meth:`compare` costs for one pair of projected rows of this width."""
        return 2 * width

    @classmethod
    def sample(cls, query_width: int, key_width: int, keys: int, generator: torch.Generator) -> Self:  # noqa: ARG003
        """Return an instance for tests that fits these widths and this number of keys (parameters in float32)."""
        return cls()


#: The names of :data:`TABLE`, for editors and type checkers; first those of the kernels.
KernelName = Literal["boxcar", "epanechikov", "gaussian", "laplacian", "triangular"]
ScoreName = Literal[KernelName, "additive", "concat", "constant", "cosine", "dot", "general", "location", "scaled_dot"]

#: A FlexAttention ``score_mod``: (score, b, h, q_idx, kv_idx) -> score, elementwise.
ScoreModFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

#: What stands for a score: a name (also one that was registered elsewhere), a Score, or a ``score_mod``.
ScoreLike = ScoreName | str | Score | ScoreModFunction

_S = TypeVar("_S", bound=type[Score])

#: Every registered score by name. The conformance suite runs the laws on each of them.
TABLE: dict[str, type[Score]] = {}


def register(name: str) -> Callable[[_S], _S]:
    """Class decorator: put a score into the table, so that ``score="name"`` finds it and the laws are tested on it."""

    def add(cls: _S) -> _S:
        TABLE[name] = cls
        return cls

    return add
