"""Few queries over many keys, as in decoding: the kernels read keys and values where they are, 16-bit ones too.

All queries of a key head are rows of one head, so that keys and values are read once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.engines import dense
from regard.engines.fused import run
from regard.engines.fused.families import Rows, family_of
from regard.engines.fused.run import ForwardRequest, ForwardResult, Passes
from regard.engines.fused.visible_keys import KEPT, VisibleKeys, compact
from regard.engines.problem import Problem
from regard.masks import Dense
from regard.masks.base import Extent


def applies(problem: Problem) -> bool:
    """Whether keys and values can be read in place."""
    mask, extent = problem.mask, problem.extent
    if not problem.is_step or family_of(problem.score) != "dot" or problem.softcap is not None or problem.dropout_p:
        return False
    if not problem.is_softmax:
        return False
    if mask is None or isinstance(mask, Dense) or extent.L * extent.S <= KEPT:
        return True
    return not mask.has_bias and problem.intervals is not None


def visible_keys(problem: Problem) -> VisibleKeys:
    """Convert the mask of a problem, for rows of key heads."""
    extent, mask, G = problem.extent, problem.mask, problem.key.shape[1]
    rows = Extent(extent.B, G, extent.H // G * extent.L, extent.S)
    if mask is None:
        return VisibleKeys(rows)
    if isinstance(mask, Dense):  # the kernel skips keys that it hides at either end
        return VisibleKeys(rows, bias=bias_of(mask.values, problem.compute_dtype, extent, G))
    intervals = None if mask.has_bias else problem.intervals
    if intervals is not None:
        return VisibleKeys.between(rows, *(_folded(t, extent, G) for t in intervals))
    dtype = problem.compute_dtype
    added = mask.cast(dtype).matrix(*extent.indices("cpu"), dtype)
    return VisibleKeys(rows, bias=_folded(compact(added, 4), extent, G))


def bias_of(values: Tensor, dtype: torch.dtype, extent: Extent, G: int) -> Tensor:
    """Return the values of a dense mask as a contiguous bias for rows of key heads, −inf where hidden."""
    return _folded(dense.bias_of(values, dtype), extent, G)


def _folded(tensor: Tensor, extent: Extent, G: int) -> Tensor:
    """Return (1 or B, 1 or H, 1 or L, ...) as (1 or B, G, H // G · L, ...); unchanged if all rows share it."""
    b, h, row, *rest = tensor.shape
    if h == row == 1:
        return tensor
    return tensor.expand(b, extent.H, extent.L, *rest).reshape(b, G, -1, *rest)


def rows_of(problem: Problem) -> Rows:
    """Return the inputs of the kernels, in the compute dtype except for keys."""
    (B, H, L, C), G, key = problem.query.shape, problem.key.shape[1], problem.key
    query = problem.query.to(problem.compute_dtype).reshape(B, G, H // G * L, C).contiguous()
    return Rows(
        "rows", C, {"query": query, "key": key if key.stride(-1) == 1 else key.contiguous()}, scale=problem.scale
    )


def forward(problem: Problem, visible: VisibleKeys, wants: ForwardRequest, kept: Passes) -> ForwardResult:
    """Run the forward kernel; the results are of the problem's heads and queries."""
    B, H, L, _ = problem.query.shape
    value = problem.value if problem.value.stride(-1) == 1 else problem.value.contiguous()
    found = run.forward(rows_of(problem), value, visible, wants, kept)
    return found.by_row(lambda t: t.view(B, H, L, *t.shape[3:]))
