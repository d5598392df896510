"""Gaussian: nearness, as in Nadaraya–Watson regression."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard._catalogue import mechanism
from regard._tracing import is_exported_to_onnx
from regard.scores.base import DotForm, register
from regard.scores.distance import Radial


@register("gaussian")
@mechanism(
    formula="−‖(q − k) / σ‖² / 2",
    sources=(
        "nadaraya1964",
        "watson1964",
    ),
    learned="σ, or one for each feature",
    cost="O(L·S·E)",
)
class Gaussian(Radial):
    """Gaussian kernel as a log-weight, ``−½ ‖(q − k) / σ‖²`` (Nadaraya 1964; Watson 1964).

    With it, attention is Nadaraya–Watson regression: queries are points to predict at, keys the inputs seen,
    values their targets.

    Parameters
    ----------
    bandwidth : float or Tensor of shape () or (E,), default 1.0
        The width σ, one for all features or one for each; a tensor gets gradients.

    Examples
    --------
    >>> import torch, regard
    >>> x = torch.tensor([[0.0], [1.0], [2.0]])
    >>> regard.attention(torch.tensor([[1.0]]), x, x**2, score=Gaussian(0.1))
    tensor([[1.]])
    """

    unit = "bandwidth"

    def __init__(self, bandwidth: float | Tensor = 1.0) -> None:
        super().__init__(bandwidth)

    @staticmethod
    def log_profile(u: Any) -> Any:
        return -u * u / 2

    def log_weight(self, square: Tensor) -> Tensor:
        return -0.5 * square

    def dot_refusal(self, dtype: torch.dtype) -> str | None:
        if dtype == torch.float64:
            return "Gaussian as a dot product cancels, and there is no dtype wider than float64 to absorb that"
        if is_exported_to_onnx():
            return "Gaussian as a dot product needs a median, which cannot be written to ONNX"
        return None

    def as_dot(self, query: Tensor, key: Tensor) -> DotForm:
        """Lift the keys by one feature: ``−½‖q−k‖² = q·k − ½‖k‖² − ½‖q‖²``, in float64 because it cancels."""
        query, key = query.double(), key.double()
        width = self.width.double() if isinstance(self.width, Tensor) else self.width
        # Where the origin lies is free, and near the keys least is cancelled; a median is not moved by padding.
        origin = (
            key.detach().nanmedian(-2, keepdim=True).values if 0 not in key.shape else key.new_zeros(key.shape[1], 1, 1)
        )
        key = (key - origin) / width
        query = (query - origin.repeat_interleave(query.shape[1] // max(key.shape[1], 1), -3)) / width
        offset = -0.5 * (query * query).sum(-1)
        key = torch.cat((key, -0.5 * (key * key).sum(-1, keepdim=True)), -1)
        return DotForm(torch.cat((query, torch.ones_like(offset).unsqueeze(-1)), -1), key, offset)
