"""torch's fused CPU kernel, with fixes for three kinds of wrong results."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard._utils.torch_private import flash_attention as kernel
from regard.engines.dense import is_finite, square_sum
from regard.normalizers import Softmax

#: With fewer keys (less than a SIMD vector), the kernel treats a row of NaN and −inf as a row without visible keys.
FEW_KEYS = 16
#: Block size of the kernel. If a masked score in a block is NaN, a row may lose the whole block.
BLOCK_OF_KEYS = 512
#: Above this log-sum-exp, its rounding affects the weights that the kernel's backward pass recomputes from it.
LARGE_LSE = 1024.0
#: Number of rows to compute by definition at once.
ROWS = 64


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool = False,
    added: Tensor | None = None,
    scale: float = 1.0,
    *,
    fits: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return output (B, H, L, E) and log-sum-exp (B, H, L), both 0 in rows without visible keys; all widths are equal.

    The output is NaN if the kernel may have lost visible keys because masked scores are not finite.

    Parameters
    ----------
    query, key, value : Tensor (B, H, L, E), (B, H, S, E), (B, H, S, E)
    causal : bool
    added : Tensor (1 or B, 1 or H, 1 or L, S), optional
        Added to the scores; −inf masks. May be combined with ``causal``.
    scale : float
    fits : bool
        Whether all scores are known to be finite.
    """
    output, lse = kernel(query, key, value, 0.0, causal, attn_mask=added, scale=scale)
    few = (min(key.shape[2], query.shape[2]) if causal else key.shape[2]) < FEW_KEYS
    # Of few keys the kernel takes rows of NaN for empty ones, in 16 bits also rows of infinity.
    doubtful = (few or query.itemsize < 4) and not _lost_nothing(key, lse)
    if doubtful and not (is_finite(query) and (not few or is_finite(key))):
        output = output.masked_fill(_is_nan(query, key, causal, added), torch.nan)
    if added is None:
        return output, lse
    if not (fits or _lost_nothing(key, lse) or scores_fit(query, key, scale)):
        return torch.full_like(output, torch.nan), lse
    if not output.requires_grad:
        return output, lse
    lost = lse.detach().abs() > LARGE_LSE
    if bool(lost.any()):  # large scores, as opposed to large biases, lose no more than this rounding
        added_most = (added + _later(query, key, slice(0, query.shape[2])) if causal else added).amax(-1)
        lost = lost & (added_most.abs() > LARGE_LSE / 2)
    if not bool(lost.any()):
        return output, lse
    return _recovered(query, key, value, causal, added, scale, output, lost), lse


def _is_nan(query: Tensor, key: Tensor, causal: bool, added: Tensor | None) -> Tensor:
    """Return which rows (B, H, L, 1) are NaN: those with a visible score that is NaN or infinity."""
    strips: list[Tensor] = []
    wide = torch.promote_types(query.dtype, torch.float32)  # in which 16-bit numbers have finite products
    features = key.detach().mT.to(wide)
    for rows in query.detach().split(ROWS, 2):
        found = ~(rows.to(wide) @ features < torch.inf)
        if causal:
            first = sum(each.shape[2] for each in strips)
            found = found & (_later(query, key, slice(first, first + rows.shape[2])) == 0)
        if added is not None:
            seen = added != -torch.inf
            found = found & (seen if added.shape[-2] == 1 else seen.split(ROWS, -2)[len(strips)])
        strips.append(found.any(-1, keepdim=True))
    return torch.cat(strips, 2)


def _lost_nothing(key: Tensor, lse: Tensor) -> bool:
    """Whether the log-sum-exps prove that no row lost keys: there is one block of keys, and no row lost it."""
    if key.itemsize < 4 or key.shape[2] > BLOCK_OF_KEYS:
        return False
    return lse.count_nonzero().item() == lse.numel()  # half as long as all()


def scores_fit(query: Tensor, key: Tensor, scale: float) -> bool:
    """Whether all scores are finite, from the norms of queries and keys."""
    bound = square_sum(query) * square_sum(key) * max(scale * scale, 1.0)
    largest = float(torch.finfo(torch.promote_types(query.dtype, torch.float32)).max)
    return math.sqrt(bound) <= largest if bound < math.inf else False


def _later(query: Tensor, key: Tensor, rows: slice) -> Tensor:
    """Return −inf where a key (…, S) comes after a query (…, rows, 1), else 0."""
    shape = len(range(query.shape[2])[rows]), key.shape[2]
    return torch.full(shape, -torch.inf, dtype=query.dtype, device=query.device).triu(1 + rows.start)


def _recovered(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, added: Tensor, scale: float, output: Tensor, lost: Tensor
) -> Tensor:
    """Recompute rows ``lost`` (B, H, L) of the output by definition, so that their gradients are right.

    With a bias like −1e9, the log-sum-exp of a row has no precision left, so the kernel's backward pass cannot
    recompute the weights from it. Narrow dtypes are computed in float32, as in the kernel: in float16, products with
    hidden keys may be infinite, and 0 times infinity is NaN.
    """
    wide = torch.promote_types(query.dtype, torch.float32)

    def attend(rows: slice) -> Tensor:
        scores = query[:, :, rows].to(wide) @ key.to(wide).mT * scale
        scores = scores + (added if added.shape[2] == 1 else added[:, :, rows])
        if causal:
            scores = scores + _later(query, key, rows)
        return (Softmax().weights(scores).to(wide) @ value.to(wide)).to(value.dtype)

    blocks = []
    for start in range(0, query.shape[2], ROWS):
        rows = slice(start, start + ROWS)
        if bool(lost[:, :, rows].any()):
            defined = checkpoint(attend, rows, use_reentrant=False, preserve_rng_state=False)
            blocks.append(torch.where(lost[:, :, rows].unsqueeze(-1), defined, output[:, :, rows]))
        else:
            blocks.append(output[:, :, rows])
    return torch.cat(blocks, 2)
