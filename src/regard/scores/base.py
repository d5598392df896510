"""The score interface: the log-weight of a query and a key."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Self, TypeVar

import torch
from torch import Tensor

from regard._utils.part import Part


@dataclass(eq=False)
class DotForm:
    """A score written as a plain dot product: ``score(q, k) = query·key + offset(q)``.

    Softmax cancels the offset, which depends only on the query; ``lse`` and ``max`` still need it.

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

    A subclass defines :meth:`compare`; everything else has a default. ``project`` does per-row work once, in
    O(L + S). Engines call ``compare`` on tiles of its results, so each score must depend only on its own query and
    key. Both are ordinary differentiable torch code.

    Learned parameters are tensors stored as attributes; they get gradients. A :mod:`regard.nn` layer registers the
    parameters of its score as its own. In a module of your own, register the parameters yourself and build the score
    in ``forward``.

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
    #: Whether query and key may differ in width.
    mixed_widths: ClassVar[bool] = False
    #: Whether :meth:`compare` may return −inf, which masks the pair.
    can_return_neg_inf: ClassVar[bool] = False
    #: Whether the score depends on the position of the key, so that permuting the keys changes it.
    positional: ClassVar[bool] = False

    def default_scale(self, width: int) -> float:  # noqa: ARG002
        """Return the default ``scale``; ``width`` is the query's."""
        return 1.0

    def check(self, query: Tensor, key: Tensor) -> None:
        """Raise ValueError if queries (B, H, L, E) and keys (B, G, S, E) do not match the score's tensors."""

    def project(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs of :meth:`compare`: rows (B, H, L, C) and (B, G, S, C')."""
        return query, key

    @abstractmethod
    def compare(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the scores (..., l, s) of projected rows (..., l, C) and (..., s, C')."""

    def modify(self, scores: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG002
        """Modify scaled scores (B, H, l, s) by position; the indices broadcast against them."""
        return scores

    def positions(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor] | None:  # noqa: ARG002
        """Return where queries (B, H, L, D) and keys (B, G, S, D) lie in one space, for ``order=1``; None if nowhere.

        The rows are (B, H, L, E) and (B, G, S, E), before :meth:`project`.
        """
        return None

    def at(self, first_query: int, first_key: int) -> Score | None:
        """Return the score for a slice of longer sequences that starts at these positions.

        A score that ignores positions returns itself. None if the score depends on positions and cannot be shifted.
        """
        positional = self.positional or type(self).modify is not Score.modify
        return None if positional and (first_query or first_key) else self

    def dot_refusal(self, dtype: torch.dtype) -> str | None:  # noqa: ARG002
        """Return why this score is not a plain dot product in this dtype, or None if :meth:`as_dot` works."""
        return f"{type(self).__name__} is not a dot product of features of the query and of the key"

    def as_dot(self, query: Tensor, key: Tensor) -> DotForm:
        """Return rows whose plain dot product gives the same weights, for rows (B, H, L, E) and (B, G, S, E)."""
        raise NotImplementedError(self.dot_refusal(query.dtype))

    @property
    def per_head(self) -> bool:
        """Whether :meth:`compare` uses tensors that differ per query head, so that heads cannot be folded into rows."""
        return False

    def pair_size(self, width: int) -> int:  # noqa: ARG002
        """Return the workspace of :meth:`compare`: numbers per pair of projected rows of this width."""
        return 1

    def pair_flops(self, width: int) -> int:
        """Return the operations of :meth:`compare` per pair of projected rows of this width."""
        return 2 * width

    @classmethod
    def sample(cls, query_width: int, key_width: int, keys: int, generator: torch.Generator) -> Self:  # noqa: ARG003
        """Return an instance for tests with these widths and this number of keys, with parameters in float32."""
        return cls()


#: The names in :data:`TABLE`, for editors and type checkers; kernels first.
KernelName = Literal["boxcar", "epanechnikov", "gaussian", "laplacian", "triangular"]
ScoreName = Literal[KernelName, "additive", "concat", "constant", "cosine", "dot", "general", "location", "scaled_dot"]

#: A FlexAttention ``score_mod``: (score, b, h, q_idx, kv_idx) -> score, elementwise.
ScoreModFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

#: A name, including names registered elsewhere, a Score, or a ``score_mod``.
ScoreLike = ScoreName | str | Score | ScoreModFunction

_S = TypeVar("_S", bound=type[Score])

#: Every registered score by name. The conformance suite tests each of them.
TABLE: dict[str, type[Score]] = {}


def register(name: str) -> Callable[[_S], _S]:
    """Class decorator: register a score, so that ``score="name"`` finds it and the conformance suite tests it."""

    def add(cls: _S) -> _S:
        TABLE[name] = cls
        return cls

    return add
