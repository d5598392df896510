"""Problems as tiles of queries with a list of keys each: which problems, and what the queries of a tile see.

The tiles become sequences that share all heads: their kernels gather the rows of queries and keys, and put results
back. So they run as on any other problem, on the pairs of the tiles alone.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from regard.engines.fused.arguments import BLOCK
from regard.engines.fused.visible_keys import VisibleKeys
from regard.engines.problem import Problem
from regard.masks.base import PAIRS_AT_ONCE, Cover, Extent, Mask
from regard.scores.own_width import OwnWidth

#: Number of queries of a tile.
QUERIES = BLOCK
#: Share of the pairs that tiles may have before computing on blocks of queries in their order is faster.
FEW = 0.5
#: Maximum number of elements of what is added to the scores of tiles.
LARGEST = 1 << 25


def useful_cover(problem: Problem) -> Cover | None:
    """Return the cover of a problem's mask if it has few pairs and the kernels can use it, else None."""
    mask, extent = problem.mask, problem.extent
    if mask is None or isinstance(problem.score, OwnWidth) or problem.dropout_p:  # dropout is by a key's own place
        return None
    cover = mask.cover(extent, QUERIES)
    if cover is None or cover.pairs > FEW * extent.L * extent.S:
        return None
    if not mask.has_bias and problem.intervals is not None:
        return None
    return None if _added_size(mask, extent, cover) > LARGEST else cover


def visible_keys(cover: Cover, mask: Mask, extent: Extent, dtype: torch.dtype) -> VisibleKeys:
    """Return what the queries of a problem's tiles see of their keys."""
    (T, rows), keys = cover.queries.shape, cover.keys.shape[1]
    tiles = Extent(T, extent.B * extent.H, rows, keys)
    gathered = VisibleKeys(tiles, query_rows=cover.queries.contiguous(), key_rows=cover.keys.contiguous())
    if cover.whole and not mask.has_bias:
        counts = (cover.keys >= 0).sum(1, keepdim=True)
        stop = torch.where(cover.queries >= 0, counts, 0).unsqueeze(1)
        if bool((stop == keys).all()):
            return gathered
        return replace(gathered, start=torch.zeros_like(stop), stop=stop)
    planes, chosen = None, torch.arange(T, device="cpu")
    if cover.kinds is not None and not mask.has_bias:
        first = {kind: tile for tile, kind in reversed(list(enumerate(cover.kinds.tolist())))}
        number = {kind: plane for plane, kind in enumerate(first)}
        chosen = torch.tensor(list(first.values()), device="cpu")
        planes = torch.tensor([number[kind] for kind in cover.kinds.tolist()], device="cpu")
    mask, parts = mask.cast(dtype), []
    for some in chosen.split(max(PAIRS_AT_ONCE // (rows * keys), 1)):
        parts.append(_added(mask, extent, cover.queries[some], cover.keys[some], dtype))
    added = torch.cat(parts)
    start, stop = _hull(added.detach() > -torch.inf)
    if planes is not None:
        start, stop = start[planes], stop[planes]
    return replace(gathered, start=start.contiguous(), stop=stop.contiguous(), bias=added, planes=planes)


def _added_size(mask: Mask, extent: Extent, cover: Cover) -> int:
    """Return the number of elements of what is added to the scores of tiles."""
    if cover.whole and not mask.has_bias:
        return 0
    with torch.no_grad():
        of_one = _added(mask, extent, cover.queries[:1], cover.keys[:1], torch.float32).numel()
    alike = cover.kinds is not None and not mask.has_bias
    return of_one * (len(cover.kinds.unique()) if alike and cover.kinds is not None else len(cover.queries))


def _added(mask: Mask, extent: Extent, queries: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what a mask adds to the scores of tiles (t, 1 or B · H, l, s), −inf where it hides them."""
    heads = torch.arange(extent.B * extent.H, device="cpu").view(1, -1, 1, 1)
    index = (
        heads // extent.H,
        heads % extent.H,
        queries.clamp(min=0)[:, None, :, None],
        keys.clamp(min=0)[:, None, None],
    )
    exists = (queries >= 0)[:, None, :, None] & (keys >= 0)[:, None, None]
    visible = mask.visible(*index)
    bias = mask.bias(*index) if mask.has_bias else None
    added = torch.zeros((), dtype=dtype, device="cpu") if bias is None else bias.to(dtype)
    return torch.where(exists if visible is None else exists & visible, added, -torch.inf)


def _hull(visible: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first visible key of each row (t, h, l, s) and the one behind the last; 0 and 0 if there is none."""
    marks = visible.to(torch.uint8)
    last = marks.shape[-1] - marks.flip(-1).argmax(-1)
    return marks.argmax(-1), torch.where(visible.any(-1), last, 0)
