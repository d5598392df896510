"""Attention between pairs of queries and points, in place of all pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regard import Aux
from regard.scores import Score


@dataclass(frozen=True)
class Pairs:
    """Pairs of queries and points that are compared, instead of all.

    Attributes
    ----------
    rows : Tensor (P,), int64
        Queries, which ascend.
    points : Tensor (P,), int64
    count : int
        Of queries.
    """

    rows: Tensor
    points: Tensor
    count: int

    def attend(
        self, scorer: Callable[[Tensor], Score], query: Tensor, key: Tensor, value: Tensor, width: Tensor, scale: float
    ) -> tuple[Tensor, Aux]:
        """Return what queries (L, C) read of values (N, ·) by softmax of their pairs' scores, (L, ·), with lse and max.

        For several widths (W, C) of the score, it begins with W.
        """
        gap, here = (query[self.rows] - key[self.points])[:, None], torch.zeros_like(key[:1])
        each = [scorer(one).compare(gap, here)[:, 0, 0] for one in width.reshape(-1, key.shape[1])]
        return self._read(torch.stack(each, 1) * scale, value, width.shape[:-1])

    def _read(self, score: Tensor, value: Tensor, lead: torch.Size) -> tuple[Tensor, Aux]:
        """Return what is read by softmax of scores (P, W)."""
        shape = (*lead, self.count)
        if not len(self.rows):  # torch reduces no empty segments where there are no others
            nothing = score.new_full(shape, -torch.inf)
            return score.new_zeros(*shape, value.shape[1]), Aux(lse=nothing, max=nothing)
        counts = self.rows.bincount(minlength=self.count)
        peak = torch.segment_reduce(score.detach(), "max", lengths=counts, axis=0)  # (L, W)
        weight = (score - peak.clamp(min=torch.finfo(score.dtype).min)[self.rows]).exp()
        total = torch.segment_reduce(weight, "sum", lengths=counts, axis=0)
        terms = (weight[..., None] * value[self.points][:, None]).flatten(1)  # (P, W ·)
        read = torch.segment_reduce(terms, "sum", lengths=counts, axis=0).unflatten(1, (-1, value.shape[1]))
        read = read / torch.where(total > 0, total, 1.0)[..., None]
        aux = Aux(lse=(peak + total.log()).T.reshape(shape), max=peak.T.reshape(shape))
        return read.transpose(0, 1).reshape(*shape, -1), aux
