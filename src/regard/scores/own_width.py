"""A kernel whose width is each query's own."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from regard.scores.base import Score


@final
class OwnWidth(Score):
    """A score of the distance whose width is multiplied by a factor of the query's own: its last feature.

    Parameters
    ----------
    score : Score
        A score of ``q − k`` alone, such as a kernel.

    Examples
    --------
    >>> from regard.scores import Gaussian
    >>> query = torch.tensor([[0.0, 1.0], [0.0, 2.0]])
    >>> OwnWidth(Gaussian(1.0)).compare(query, torch.tensor([[2.0]]))
    tensor([[-2.0000],
            [-0.5000]])
    """

    mixed_widths = True
    can_return_neg_inf = True

    def __init__(self, score: Score) -> None:
        self.score = score

    def compare(self, query: Tensor, key: Tensor) -> Tensor:
        gap = (query[..., :-1].unsqueeze(-2) - key.unsqueeze(-3)) / query[..., -1:].unsqueeze(-2)
        return self.score.compare(gap.unsqueeze(-2), torch.zeros_like(key[..., :1, :])[..., None, None, :, :])[
            ..., 0, 0
        ]

    def pair_size(self, width: int) -> int:
        return 3 * width

    def pair_flops(self, width: int) -> int:
        return 6 * width
