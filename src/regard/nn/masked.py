"""``masked_softmax``: weights of scores, as the core makes them, by lengths alone."""

from __future__ import annotations

import torch
from torch import Tensor

from regard import masks, normalizers
from regard._catalogue import mechanism
from regard._constraints import floats


@mechanism(formula="softmax(s_i for i < valid_lens), 0 beyond", cost="O(L·S)")
def masked_softmax(scores: Tensor, valid_lens: Tensor | None = None) -> Tensor:
    """Return the softmax of scores over the keys that are real; the others get exactly 0.

    Parameters
    ----------
    scores : Tensor (B, L, S)
    valid_lens : Tensor (B,) or (B, L) of int, optional
        How many keys are real, for each sequence or each query; None is all. Of 0 the weights are 0.

    Returns
    -------
    Tensor (B, L, S)

    Raises
    ------
    TypeError, ValueError
        If an argument has another type or shape.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import masked_softmax
    >>> masked_softmax(torch.zeros(2, 2, 4), torch.tensor([[1, 3], [2, 4]]))
    tensor([[[1.0000, 0.0000, 0.0000, 0.0000],
             [0.3333, 0.3333, 0.3333, 0.0000]],
    <BLANKLINE>
            [[0.5000, 0.5000, 0.0000, 0.0000],
             [0.2500, 0.2500, 0.2500, 0.2500]]])
    """
    floats("masked_softmax", "scores", scores, "B", "L", "S")
    if valid_lens is not None:
        B, L, S = scores.shape
        b, q_idx, kv_idx = (torch.arange(n, device=scores.device) for n in (B, L, S))
        mask = masks.padding(valid_lens).bind(masks.Extent(B, 1, L, S), scores.device)
        head = torch.zeros(1, 1, 1, dtype=torch.int64, device=scores.device)
        added = mask.matrix(b.view(-1, 1, 1, 1), head, q_idx.unsqueeze(1), kv_idx, scores.dtype)
        scores = torch.where(added.squeeze(1) == 0, scores, -torch.inf)
    return normalizers.Softmax().weights(scores)
