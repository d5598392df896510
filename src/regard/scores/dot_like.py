"""Base of the scores that are a dot product of features of the query and of the key."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.scores.base import DotForm, Score


class DotLike(Score):
    """A score that is the dot product of its projected rows; ``project`` is the identity by default."""

    def compare(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.mT

    def dot_refusal(self, dtype: torch.dtype) -> str | None:  # noqa: ARG002
        return None

    def as_dot(self, query: Tensor, key: Tensor) -> DotForm:
        return DotForm(*self.project(query, key))
