"""Cross-entropy over some of a large vocabulary: the symbols of a batch, and others that are drawn.

Dimensions: B rows, T steps, P features, N vocabulary, M candidates.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from regard._utils.errors import rejected

#: Symbols are drawn by their frequency to this power, as in skip-gram (Mikolov 2013): rare ones are told apart, too.
POWER = 0.75

#: The matrix (N, P) and the bias (N,), if there is one, that make logits of features.
Projection = tuple[Tensor, Tensor | None]


class SampledSoftmax:
    """Choose candidates among the symbols of a vocabulary, with the bias that makes up for the choice.

    A step costs time and memory for M candidates in place of N symbols. They are the symbols of the batch itself, which
    others see as drawn by their frequency f, and K more, drawn by q ∝ f^0.75. With n symbols in the batch, symbol i is
    among them with probability::

        π_i = 1 − (1 − f_i)ⁿ (1 − q_i)ᴷ

    and its logit is z_i − log π_i: what is summed then estimates the sum over all symbols (Bengio & Senécal 2008; Jean
    2015, arXiv 1412.2007), and with many draws it is the same.

    Parameters
    ----------
    counts : ndarray (N,)
        How often each symbol stands in the text that is learned; each counts as if it stood there once more.
    draws : int
        K.

    Raises
    ------
    ValueError
        If there are no counts, one is negative, or draws is below 1.

    Examples
    --------
    >>> sampled = SampledSoftmax(np.array([4, 2, 1, 1]), draws=2)
    >>> projection, targets = sampled.among((torch.eye(4), None), torch.tensor([[1, 0, -100]]), ignore_index=-100)
    >>> len(projection[0]) <= 4, projection[0][targets[0, :2]].argmax(1).tolist(), int(targets[0, 2])
    (True, [1, 0], -100)
    """

    def __init__(self, counts: np.ndarray, draws: int) -> None:
        if counts.ndim != 1 or not len(counts) or counts.min() < 0:
            raise rejected("SampledSoftmax", "counts", "be one count, 0 or more, for each symbol", counts.shape)
        if draws < 1:
            raise rejected("SampledSoftmax", "draws", "be at least 1", draws)
        self.draws = draws
        frequencies = torch.from_numpy(counts.astype(np.float64) + 1)
        frequencies = frequencies / frequencies.sum()
        drawn = frequencies**POWER
        drawn = drawn / drawn.sum()
        # A draw is a search among sums, where torch.multinomial goes through the whole vocabulary.
        self._sums = drawn.cumsum(0)
        # log(1 − f) and log(1 − q), also of a vocabulary of one symbol.
        self._missed = tuple(torch.log1p(-each.clamp(max=1 - 1e-12)) for each in (frequencies, drawn))

    def among(self, projection: Projection, targets: Tensor, ignore_index: int) -> tuple[Projection, Tensor]:
        """Return the projection (M, P) on candidates, with a bias (M,), and where targets stand among them.

        Parameters
        ----------
        projection : Tensor (N, P), Tensor (N,) or None
        targets : Tensor (B, T) of int
        ignore_index : int
            The target of what is not to be predicted, which stays what it is.
        """
        weight, bias = projection
        device, real = targets.device, targets != ignore_index
        symbols = targets[real]
        places = torch.rand(self.draws, dtype=torch.float64)
        drawn = torch.searchsorted(self._sums, places).clamp(max=len(self._sums) - 1).to(device)
        candidates, at = torch.unique(torch.cat([symbols, drawn]), return_inverse=True)
        by_batch, by_draws = (each[candidates.cpu()] for each in self._missed)
        missing = -torch.log(-torch.expm1(len(symbols) * by_batch + self.draws * by_draws))  # −log π
        missing = missing.to(device, weight.dtype)
        placed = torch.full_like(targets, ignore_index)
        placed[real] = at[: len(symbols)]
        some = missing if bias is None else bias[candidates] + missing
        return (weight[candidates], some), placed
