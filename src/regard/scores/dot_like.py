"""Base of the scores that are a dot product of features of the query and of the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from regard.scores.base import DotForm, Score


class DotLike(Score):
    """A score that is the dot product of its projected rows; ``project`` is the identity by default."""

    # as_dot calls project, which may be overridden.
    shortcuts: ClassVar[Mapping[str, frozenset[str]]] = dict.fromkeys(
        ("as_dot", "dot_refusal"), frozenset({"compare", "modify"})
    )

    def compare(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.mT

    def dot_refusal(self, dtype: torch.dtype) -> str | None:  # noqa: ARG002
        return None

    def as_dot(self, query: Tensor, key: Tensor) -> DotForm:
        return DotForm(*self.project(query, key))
