"""torch's fused CPU kernel, with care for the two things that it loses."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard._torch import flash_attention as kernel
from regard.engines.dense import is_finite
from regard.normalizers import Softmax

#: Keys below which the kernel takes a row of NaN for a row that sees nothing: fewer than the widest vectors hold.
FEW_KEYS = 16
#: Log-sum-exps so large that their rounding shows in weights made from them, as the kernel's backward pass makes them.
LARGE_LSE = 1024.0
#: Rows whose weights are held at one time where they are made by the definition.
ROWS = 64


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, causal: bool = False, added: Tensor | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return output (B, H, L, E) and log-sum-exp (B, H, L) of tensors of one width; 0 and 0 where a row sees nothing.

    Parameters
    ----------
    query, key, value : Tensor (B, H, L, E), (B, H, S, E), (B, H, S, E)
    causal : bool
    added : Tensor (1 or B, 1 or H, L, S), optional
        What is added to the scores; −inf masks.
    scale : float
    """
    output, lse = kernel(query, key, value, 0.0, causal, attn_mask=added, scale=scale)
    few = min(key.shape[2], query.shape[2]) if causal else key.shape[2]
    if few < FEW_KEYS and not is_finite(query):
        output = output.masked_fill(query.isnan().any(-1, keepdim=True), torch.nan)
    if added is None or not output.requires_grad:
        return output, lse
    lost = lse.detach().abs() > LARGE_LSE
    if bool(lost.any()):  # scores that are as large by themselves lose no more than that rounding
        lost = lost & (added.amax(-1).abs() > LARGE_LSE / 2)
    return (_recovered(query, key, value, added, scale, output, lost) if bool(lost.any()) else output), lse


def _recovered(
    query: Tensor, key: Tensor, value: Tensor, added: Tensor, scale: float, output: Tensor, lost: Tensor
) -> Tensor:
    """Return the output with rows ``lost`` (B, H, L) by the definition, so that their gradients are right.

    A row to which a number like −1e9 is added has weights that the kernel's backward pass cannot make of the row's
    log-sum-exp, in which no digit is left for the number of keys.
    """

    def attend(rows: slice) -> Tensor:
        scores = query[:, :, rows] @ key.mT * scale + (added if added.shape[2] == 1 else added[:, :, rows])
        return Softmax().weights(scores).to(value.dtype) @ value

    blocks = []
    for start in range(0, query.shape[2], ROWS):
        rows = slice(start, start + ROWS)
        if bool(lost[:, :, rows].any()):
            defined = checkpoint(attend, rows, use_reentrant=False, preserve_rng_state=False)
            blocks.append(torch.where(lost[:, :, rows].unsqueeze(-1), defined, output[:, :, rows]))
        else:
            blocks.append(output[:, :, rows])
    return torch.cat(blocks, 2)
