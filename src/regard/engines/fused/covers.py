"""Problems as tiles of queries with a list of keys each: gathering rows, and what the queries of a tile see.

The tiles of all heads become sequences of their own: T sequences of B · H heads. Then the kernels run as they do on any
other problem, on the pairs of the tiles alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from regard.engines.fused.arguments import BLOCK
from regard.engines.fused.pages import in_large_pages
from regard.engines.fused.run import ForwardResult
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
#: Number of elements of the keys and values of tiles that are gathered together, if one head has no more.
TOGETHER = 1 << 22


@dataclass(frozen=True, eq=False)
class Places:
    """The places of queries and keys among the tiles of a cover.

    Attributes
    ----------
    extent : Extent
        That of the problem.
    cover : Cover
    of_queries : Tensor (L,)
        The place of each query.
    of_keys, first : Tensor (n,), Tensor (S,)
        The places of the first key, then of the second, and so on; and where those of each key begin.
    """

    extent: Extent
    cover: Cover
    of_queries: Tensor
    of_keys: Tensor
    first: Tensor

    @classmethod
    def of(cls, problem: Problem) -> Places | None:
        """Return the places if the mask of a problem has a cover of few pairs, else None."""
        mask, extent = problem.mask, problem.extent
        if mask is None or isinstance(problem.score, OwnWidth) or problem.dropout_p:  # dropout is by a key's own place
            return None
        cover = cover_of(mask, extent)
        if cover is None:
            return None
        if not mask.has_bias and problem.intervals is not None:
            return None
        if _added_size(mask, extent, cover) > LARGEST:
            return None
        keys = cover.keys.flatten()
        order = keys.sort(stable=True).indices
        counts = torch.bincount(keys + 1, minlength=extent.S + 1).cumsum(0)  # those of −1 come first
        return cls(extent, cover, _inverse(cover.queries, extent.L), order[counts[0] :], counts[:-1] - counts[0])

    def tiles(self, heads: int) -> Extent:
        """Return the extent of the tiles of so many heads as sequences."""
        (T, rows), keys = self.cover.queries.shape, self.cover.keys.shape[1]
        return Extent(T, heads, rows, keys)

    def parts(self, key: Tensor, value: Tensor) -> list[tuple[slice, slice]]:
        """Return the ranges of heads of queries, and of keys, whose tiles are gathered together, of all sequences."""
        heads = key.shape[0] * key.shape[1]
        group = self.extent.B * self.extent.H // heads
        most = max(TOGETHER // max(self.cover.keys.numel() * (key.shape[-1] + value.shape[-1]), 1), 1)
        count = -(-heads // most)
        cuts = pairwise([heads * i // count for i in range(count + 1)])
        return [(slice(start * group, stop * group), slice(start, stop)) for start, stop in cuts]

    def queries(self, rows: Tensor) -> Tensor:
        """Return rows (heads, L, C) of queries by tile: (T, heads, l, C); rows of no query are 0."""
        heads, L, C = rows.shape
        there = _by_head(self.cover.queries, heads, L)
        found = rows.reshape(heads * L, C).index_select(0, there.clamp(min=0).flatten()).view(*there.shape, C)
        none = self.cover.queries < 0
        return found.masked_fill_(none[:, None, :, None], 0) if bool(none.any()) else found

    def keys(self, rows: Tensor) -> Tensor:
        """Return rows (heads, S, C) of keys by tile: (T, heads, s, C); rows of no key are those of the first."""
        heads, S, C = rows.shape
        there = _by_head(self.cover.keys.clamp(min=0), heads, S)
        found = in_large_pages(rows.new_empty(there.numel(), C))
        torch.index_select(rows.reshape(heads * S, C), 0, there.flatten(), out=found)
        return found.view(*there.shape, C)

    def by_query(self, rows: Tensor) -> Tensor:
        """Return rows (T, heads, l, ...) of tiles in the order of the queries: (heads, L, ...)."""
        T, heads, count = rows.shape[:3]
        places = _among_heads(self.of_queries, count, heads)
        found = rows.reshape(T * heads * count, *rows.shape[3:]).index_select(0, places.flatten())
        return found.view(heads, self.extent.L, *rows.shape[3:])

    def by_key(self, rows: Tensor) -> Tensor:
        """Return the sums of what tiles have for each key: (T, heads, s, C) to (heads, S, C)."""
        T, heads, count, C = rows.shape
        places = _among_heads(self.of_keys, count, heads)
        first = self.first + torch.arange(heads, device="cpu").unsqueeze(1) * len(self.of_keys)
        flat = rows.reshape(T * heads * count, C)
        sums = torch.nn.functional.embedding_bag(places.flatten(), flat, first.flatten(), mode="sum")
        return sums.view(heads, self.extent.S, C)

    def tiled(self, found: ForwardResult, heads: slice) -> ForwardResult:
        """Return the results (B, H, L, ...) of some heads for the queries in the order of the tiles."""
        output = self.queries(found.output.flatten(0, 1)[heads])
        peak, total = (
            self.queries(t.flatten(0, 1)[heads].unsqueeze(-1)).squeeze(-1) for t in (found.peak, found.total)
        )
        return ForwardResult(output, peak, total)

    def restored(self, pieces: list[ForwardResult]) -> ForwardResult:
        """Return the results of tiles, for some heads after others, in the order of the queries and keys."""
        found: dict[str, Any] = {}
        for name in ("output", "peak", "total", "top", "entropy", "best", "best_key", "sink"):
            if getattr(pieces[0], name) is not None:
                rows = [self.by_query(self._named(getattr(piece, name), name)) for piece in pieces]
                whole = rows[0] if len(rows) == 1 else torch.cat(rows)
                found[name] = whole.unflatten(0, (self.extent.B, self.extent.H))
        if pieces[0].received is not None:
            parts = [(piece.peak.shape[:2], piece.received) for piece in pieces if piece.received is not None]
            found["received"] = torch.cat([self.by_key(t.view(*n, -1, 1)).squeeze(-1) for n, t in parts])
        return replace(pieces[0], **found, is_finite=all(piece.is_finite for piece in pieces))

    def _named(self, rows: Tensor, name: str) -> Tensor:
        """Return rows of a result; keys (T, heads, l, k) of tiles as keys of the problem, −1 stays."""
        if name != "best_key":
            return rows
        whole = self.cover.keys[:, None, None].expand(*rows.shape[:3], -1)
        return torch.where(rows < 0, -1, whole.gather(-1, rows.clamp(min=0)))

    def visible_keys(self, mask: Mask, dtype: torch.dtype) -> VisibleKeys:
        """Return what the queries of the tiles see of their keys."""
        cover, extent = self.cover, self.tiles(self.extent.B * self.extent.H)
        if cover.whole and not mask.has_bias:
            counts = (cover.keys >= 0).sum(1, keepdim=True)
            stop = torch.where(cover.queries >= 0, counts, 0).unsqueeze(1)
            if bool((stop == extent.S).all()):
                return VisibleKeys(extent)
            return VisibleKeys.between(extent, torch.zeros_like(stop), stop)
        planes, chosen = None, torch.arange(extent.B, device="cpu")
        if cover.kinds is not None and not mask.has_bias:
            first = {kind: tile for tile, kind in reversed(list(enumerate(cover.kinds.tolist())))}
            number = {kind: plane for plane, kind in enumerate(first)}
            chosen = torch.tensor(list(first.values()), device="cpu")
            planes = torch.tensor([number[kind] for kind in cover.kinds.tolist()], device="cpu")
        mask, parts = mask.cast(dtype), []
        for some in chosen.split(max(PAIRS_AT_ONCE // (extent.L * extent.S), 1)):
            parts.append(_added(mask, self.extent, cover.queries[some], cover.keys[some], dtype))
        added = torch.cat(parts)
        start, stop = _hull(added.detach() > -torch.inf)
        if planes is not None:
            start, stop = start[planes], stop[planes]
        return replace(VisibleKeys.between(extent, start, stop, added), planes=planes)


def cover_of(mask: Mask, extent: Extent) -> Cover | None:
    """Return the cover of a mask if it has few pairs, else None."""
    cover = mask.cover(extent, QUERIES)
    return None if cover is None or cover.pairs > FEW * extent.L * extent.S else cover


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


def _inverse(tokens: Tensor, count: int) -> Tensor:
    """Return the place of each of so many tokens in a tensor that holds each once, and −1."""
    flat = tokens.flatten()
    places = torch.arange(len(flat), device="cpu")
    found = torch.empty(count + 1, dtype=torch.int64, device="cpu")
    return found.scatter_(0, torch.where(flat < 0, count, flat), places)[:count]


def _by_head(tokens: Tensor, heads: int, count: int) -> Tensor:
    """Return tokens (T, n) as rows of an array (heads · count, ...), for all heads: (T, heads, n); −1 stays."""
    first = torch.arange(0, heads * count, max(count, 1), device="cpu").view(-1, 1)
    tokens = tokens.unsqueeze(1)
    return torch.where(tokens < 0, -1, tokens + first)


def _among_heads(places: Tensor, width: int, heads: int) -> Tensor:
    """Return places (n,) in an array (T, width) as rows of an array (T, heads, width): (heads, n)."""
    tile, place = places // width, places % width
    return (tile * heads + torch.arange(heads, device="cpu").unsqueeze(1)) * width + place
