"""Sequences packed into one row: when their positions say so, and the mask that keeps them apart.

transformers tells its mask function of them only where there is no cache and no padding. Here they are kept apart
wherever that is certain; ``packed=True`` and ``packed=False`` decide it.

Dimensions: B batch, L queries, S keys, N sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard import masks
from regard._errors import rejected, shape
from regard._torch import assert_when_it_runs
from regard.integrations.transformers.model_mask import Structure
from regard.masks import Mask


def packed_mask(
    given: Structure,
    positions: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    packed: bool | None,
    causal: bool,
    query: Tensor,
    S: int,
) -> Mask | None:
    """Return the mask that keeps packed sequences apart; None where there are none, or the given mask does it.

    Parameters
    ----------
    given : Structure
        The layer's mask.
    positions : Tensor (B or 1, L), optional
    cu_q, cu_k : Tensor (N + 1,), optional
        Where sequences begin.
    packed : bool, optional
        Whether positions speak of packed sequences; None finds out.
    causal : bool
        Whether no query sees a later key. Of other layers positions alone say nothing, as in transformers.
    query : Tensor (B, H, L, E)
    S : int
    """
    if given.packed or packed is False:
        return None
    if cu_q is not None and len(cu_q) > 2:
        return masks.from_cu_seqlens(cu_q, cu_k)
    B, L = query.shape[0], query.shape[2]
    if positions is None or positions.dim() != 2 or L == 1 or positions.shape[1] != L:
        return None
    if packed is None and not causal:
        return None
    if torch.compiler.is_compiling():
        if packed:
            return masks.document((positions == 0).cumsum(1).expand(B, -1))
        _refuse_when_it_runs(positions)
        return None
    if packed is None and not given.from_model:
        return None  # who writes a mask of pairs says what may meet
    if packed not in given.kept:
        begins = _begins(given, positions, L, S, bool(packed))
        given.kept[packed] = None if begins is None else masks.document(begins.cumsum(1).expand(B, -1))
    return given.kept[packed]


def _begins(given: Structure, positions: Tensor, L: int, S: int, certain: bool) -> Tensor | None:
    """Return where sequences begin, (B or 1, L), behind the first one; None where none does."""
    first = max(given.first_query, 0)
    begins = positions == 0
    if given.real is None:
        begins = begins & (torch.arange(first, first + L, device=positions.device) > 0)
    else:  # positions of padding mean nothing, and what comes behind it begins nothing new
        before = given.real.cumsum(1) - given.real.long()
        here = slice(first - given.first_key, first - given.first_key + L)
        begins = begins & given.real[:, here] & (before[:, here] > 0)
    if first and not certain:  # a chunk whose positions start from 0, as those behind a soft prompt, is one sequence
        begins[:, 0] = False
    if not certain and not bool((begins[:, :-1] & (positions[:, 1:] == 1)).any()):
        return None  # such as positions that are all 0
    if not bool(begins.any()):
        return None
    if first or L != S:
        expected = (
            "rise throughout where a cache holds earlier keys, of which nothing says which sequence they are of "
            "(packed=False takes them for one sequence)"
        )
        raise rejected("regard", "position_ids", expected, f"several sequences in {shape(positions)}")
    return begins


def _refuse_when_it_runs(positions: Tensor) -> None:
    """Let a compiled model fail on positions such as 2, 0, 1, which are those of no padding."""
    ends, starts, goes_on = positions[:, :-2] >= 2, positions[:, 1:-1] == 0, positions[:, 2:] == 1
    assert_when_it_runs(
        ~(ends & starts & goes_on).any(),
        "regard: position_ids must rise throughout in a compiled model, got several sequences; "
        "pass packed=True to keep them apart, packed=False to take them for one.",
    )
