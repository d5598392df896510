"""Talking heads: scores and weights of a pair are mixed over the heads."""

from __future__ import annotations

import torch
from torch import Tensor

from regard._utils.constraints import TensorOf
from regard._utils.errors import rejected, shape
from regard._utils.mechanism import mechanism
from regard.normalizers.base import Normalizer, register
from regard.normalizers.softmax import Softmax


@register("talking_heads")
@mechanism(
    formula="Σ_h B_gh softmax_i(Σ_h' A_hh' s_h'i)",
    sources=("shazeer2020heads",),
    learned="A, B (H, H)",
    cost="O(L·S·H)",
)
class TalkingHeads(Normalizer):
    """Talking heads: mix scores over the heads, take softmax, mix weights over the heads (Shazeer 2020, 2003.02436).

    Head g reads ``Σ_h B[g, h] softmax(Σ_h' A[h, h'] s_h')``. A pair that is hidden in one head alone stays hidden
    there, and counts as a score of 0 in the others. Biases of masks are mixed with the scores, unlike in the paper,
    which adds them afterwards.

    All heads and keys of a query are needed at once, in memory that grows with H·L·S, and H² products for each pair.

    Parameters
    ----------
    before, after : Tensor (H, H), optional
        A and B; None for no mixing. Begin with the identity, ``nn.Parameter(torch.eye(H))``.

    Examples
    --------
    >>> import torch
    >>> swapped = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    >>> scores = torch.tensor([[[0.0, 0.0]], [[999.0, 0.0]]])  # of two heads
    >>> TalkingHeads(after=swapped).weights(scores).squeeze(1)
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])
    """

    convex = False
    monotone = False
    mixes_heads = True

    def __init__(self, before: Tensor | None = None, after: Tensor | None = None) -> None:
        self.before, self.after = (
            None if each is None else TensorOf(("H", "H"))(self, name, each)
            for name, each in (("before", before), ("after", after))
        )

    def check(self, heads: int) -> None:
        for name, matrix in (("before", self.before), ("after", self.after)):
            if matrix is not None and tuple(matrix.shape) != (heads, heads):
                expected = f"have shape {(heads, heads)}, for query's heads"
                raise rejected("TalkingHeads", name, expected, shape(matrix))

    def weights(self, scores: Tensor) -> Tensor:
        hidden = scores == -torch.inf
        if self.before is not None:
            mixed = _mixed(self.before, torch.where(hidden, 0.0, scores))
            scores = torch.where(hidden, -torch.inf, mixed)
        weights = Softmax().weights(scores)
        return weights if self.after is None else torch.where(hidden, 0.0, _mixed(self.after, weights))


def _mixed(matrix: Tensor, pairs: Tensor) -> Tensor:
    """Return pairs (..., H, L, S) mixed over heads."""
    return (matrix.to(pairs.dtype) @ pairs.flatten(-2)).unflatten(-1, pairs.shape[-2:])
