"""A mask as torch's fused CPU kernel takes it: nothing, its own causal mask, a matrix, or blocks of queries."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from regard import masks
from regard._problem import Problem
from regard.engines import query_blocks
from regard.engines.tiles import Span
from regard.masks.base import Extent, Mask

#: Queries so few that their scores are made at once: keys are read once, and what is masked is cut out of them.
FEW = 4
#: Pairs of a mask that is a matrix for the kernel, where blocks of it would not save what more calls cost.
MATRIX = 256 * 256
#: Numbers of such a mask over all sequences and heads.
MATRICES = 64 * MATRIX
#: Numbers of one that is kept for later calls.
KEPT = 8 * MATRIX


@dataclass(frozen=True)
class KernelMask:
    """A mask in the form that torch's kernel takes.

    Attributes
    ----------
    hides : bool
        Whether a mask is still to be taken into account.
    causal : bool
        Whether the kernel's own causal mask is part of it.
    keys : slice, or None
        The keys that are read; None is all.
    added : Tensor (1 or B, 1 or H, 1 or L, S), or None
        What is added to the scores.
    empty : Tensor (1 or B, 1 or H, 1 or L), or None
        Where a row sees nothing; None where none does, or the log-sum-exp is not requested.
    blocks : list of QueryBlock, or None
    """

    hides: bool = False
    causal: bool = False
    keys: slice | None = None
    added: Tensor | None = None
    empty: Tensor | None = None
    blocks: list[query_blocks.QueryBlock] | None = None

    @classmethod
    def of(cls, problem: Problem, told: bool = True, fixed: Tensor | None = None) -> KernelMask:
        """Return what a problem's mask means.

        Parameters
        ----------
        problem : Problem
        told : bool
            Whether the log-sum-exp is asked for.
        fixed : Tensor (1, 1 or H, 1 or L, S), optional
            What the fixed parts of the mask add, as :func:`fixed_part` says.
        """
        mask, extent = problem.mask, problem.extent
        if mask is None:
            return cls()
        if isinstance(mask, masks.Dense):
            return GIVEN
        if is_causal(problem):
            # Later keys are seen by no query; a seed drops the same weights only where as many numbers are drawn.
            keys = slice(extent.L) if extent.L < extent.S and not problem.dropout_p else None
            return cls(hides=True, causal=True, keys=keys)
        kept = mask.is_fixed
        keys = _shared_keys(problem) if kept and not mask.has_bias else None
        if keys is not None:
            return cls(keys=None if keys == slice(0, extent.S) else keys)
        if FEW < extent.L <= MATRIX // extent.S:
            causal, rest = _split(mask, extent)
            added = _matrix_of(problem, rest if fixed is None else _among(rest, fixed=False))
            added = added if fixed is None else fixed + added
            if added.numel() <= (KEPT if kept else MATRICES):
                return cls(
                    hides=True, causal=causal, added=added, empty=_empty(mask, causal, added, extent) if told else None
                )
        return cls(hides=True, blocks=query_blocks.query_blocks(mask, extent))


#: A matrix that the caller wrote out.
GIVEN = KernelMask(hides=True)
#: One that is cut out of scores made at once, where nothing of a masked key is left.
AT_ONCE = KernelMask(hides=True)


def _shared_keys(problem: Problem) -> slice | None:
    """Return the keys that every query sees, where these are all that any query sees, and more than one."""
    if problem.intervals is None:
        return None
    (first, last), (least, most) = ((int(edge.min()), int(edge.max())) for edge in problem.intervals)
    return slice(first, most) if first == last and least == most and most - first > 1 else None


def fixed_part(problem: Problem) -> Tensor | None:
    """Return what the fixed parts of a short mask add, which is the same in every call of a structure.

    None where the mask does not consist of such parts and others, or is no matrix for the kernel.
    """
    mask, extent = problem.mask, problem.extent
    if not isinstance(mask, masks.AndMask) or not FEW < extent.L <= MATRIX // extent.S or is_causal(problem):
        return None
    rest = _split(mask, extent)[1]
    if not isinstance(rest, masks.AndMask) or len({part.is_fixed for part in rest.masks}) < 2:
        return None
    added = _matrix_of(problem, _among(rest, fixed=True))
    return added if added.numel() <= KEPT else None


def _split(mask: Mask, extent: Extent) -> tuple[bool, Mask]:
    """Return whether the kernel's own causal mask is part of a mask, and the rest of it."""
    if not isinstance(mask, masks.AndMask):
        return False, mask
    rest = tuple([part for part in mask.masks if not part.is_plain_causal(extent)])
    if len(rest) == len(mask.masks):
        return False, mask
    return True, rest[0] if len(rest) == 1 else masks.AndMask(rest)


def _among(mask: Mask, fixed: bool) -> Mask:
    """Return the parts of a composed mask that are fixed, or those that are not."""
    assert isinstance(mask, masks.AndMask)
    return masks.AndMask(tuple([part for part in mask.masks if part.is_fixed == fixed]))


def _empty(mask: Mask, causal: bool, added: Tensor, extent: Extent) -> Tensor | None:
    """Return which rows (1 or B, 1 or H, 1 or L) see nothing; None where all see something."""
    if not mask.hides:
        return None
    hidden = added == -torch.inf
    if causal:
        hidden = hidden | torch.ones(extent.L, extent.S, dtype=torch.bool, device=hidden.device).triu(1)
    return hidden.all(-1)


def _matrix_of(problem: Problem, mask: Mask) -> Tensor:
    """Return what a mask adds to the scores, −inf where it hides: (1 or B, 1 or H, 1 or L, S)."""
    extent, dtype = problem.extent, wide_dtype(problem.query.dtype)
    index = indices(problem, Span(0, extent.L), Span(0, extent.S))
    visible, bias = mask.visible(*index), mask.cast(dtype).bias(*index) if mask.has_bias else None
    if bias is None:
        bias = _constant(0.0, dtype, problem.query.device)
    added = bias if visible is None else torch.where(visible, bias, _constant(-torch.inf, dtype, bias.device))
    added = added.detach()[(None,) * (4 - added.dim())]
    return added.expand(*added.shape[:3], extent.S).contiguous()


def is_causal(problem: Problem) -> bool:
    """Whether a mask is the kernel's own causal one."""
    return problem.mask is not None and problem.mask.is_plain_causal(problem.extent)


def matrix(mask: masks.Dense, dtype: torch.dtype) -> Tensor:
    """Return what a dense mask adds to the scores, with four dimensions."""
    values = mask.values
    values = values if values.dim() == 4 else values[(None,) * (4 - values.dim())]
    if values.dtype != torch.bool:
        return values.to(dtype)
    return torch.where(values, _constant(0.0, dtype, values.device), _constant(-torch.inf, dtype, values.device))


@lru_cache(64)
def _constant(number: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(number, dtype=dtype, device=device)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which torch's kernels add to scores of these features: float32 for narrower ones."""
    return torch.promote_types(dtype, torch.float32)


def indices(problem: Problem, rows: Span, cols: Span) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return b (B, 1, 1, 1), h (H, 1, 1), q_idx (l, 1) and kv_idx (s,), as masks take them."""
    device, extent = problem.query.device, problem.extent
    b = torch.arange(extent.B, device=device).view(-1, 1, 1, 1)
    h = torch.arange(extent.H, device=device).view(-1, 1, 1)
    q_idx = torch.arange(rows.start, rows.stop, device=device).unsqueeze(1)
    return b, h, q_idx, torch.arange(cols.start, cols.stop, device=device)
