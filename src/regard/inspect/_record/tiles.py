"""The weights of a run, tile by tile: each is small enough to stay in the cache while it is read.

Dimensions: H query heads, G heads of keys, L queries, S keys, E width of a head; n queries, and h heads, l queries and
s keys of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._utils.errors import rejected
from regard.inspect._record.calls import AttentionCall
from regard.inspect._record.layer_record import AttentionRecord, LayerRecord, index_of

#: The number of weights of a tile that a core's cache holds with its scores; and the fewest and most queries of one.
_HELD, _FEWEST, _MOST = 1 << 17, 32, 128
#: A score relative to the largest whose exponential is 0 in float32; and a number whose logarithm is finite.
_LEAST, _TINY = -200.0, 1e-38
#: The number of weights that are computed together where each call costs more than the cache saves.
_TOGETHER = 1 << 23


@dataclass(frozen=True)
class Tile:
    """The weights of consecutive heads and queries.

    Attributes
    ----------
    head, first : int
        The first head, and the place of the first query among those that are read.
    weights : Tensor (h, l, s) of float32
        Over the first s keys; the others have weight 0. The reader may overwrite them.
    entropy : Tensor (h, l)
        The entropy of each query's weights in nats; of their sizes, if some are negative.
    lse : Tensor (h, l), optional
        The log-sum-exp of each query's scores, learned sinks included, if weights are exp(score − lse).
    """

    head: int
    first: int
    weights: Tensor
    entropy: Tensor
    lse: Tensor | None = None

    @classmethod
    def of(cls, head: int, first: int, weights: Tensor) -> Tile:
        """Return a tile of any weights."""
        sizes = weights.abs()
        return cls(head, first, weights, -torch.linalg.vecdot(sizes, sizes.clamp_min(_TINY).log_()))


def tiles_of(run: LayerRecord, batch: int) -> Iterator[Tile]:
    """Yield the weights of one sequence of a run, all heads of some queries before the next queries."""
    B, H, L, S = run.shape
    at = index_of("weights", "batch", batch, B)
    if not isinstance(at, int):
        raise rejected("weights", "batch", "be the number of one sequence", repr(batch))
    products = Products.of(run, at) if isinstance(run, AttentionRecord) else None
    if products is not None:
        yield from products.tiles()
        return
    step = max(_TOGETHER // max(H * S, 1), 1)
    for first in range(0, L, step):
        yield Tile.of(0, first, run.weights(batch=at, rows=slice(first, first + step)).float().cpu())


def spans_of(run: AttentionRecord, batch: int) -> tuple[Tensor, Tensor] | None:
    """Return the first visible key of each query (L,) and the one after its last; None for other masks."""
    found = [each.intervals() for each in run.calls]
    starts, stops = (
        [(each[i][batch] + call.first).cpu() for each, call in zip(found, run.calls) if each] for i in (0, 1)
    )
    return None if len(starts) < len(run.calls) else (torch.cat(starts), torch.cat(stops))


@dataclass(frozen=True)
class Products:
    """A softmax of dot products in which each query sees the keys of one interval.

    Attributes
    ----------
    run : AttentionRecord
    batch : int
        Which sequence.
    start, stop : Tensor (L,)
        The first visible key of each query and the one after its last.
    """

    run: AttentionRecord
    batch: int
    start: Tensor
    stop: Tensor

    @classmethod
    def of(cls, run: AttentionRecord, batch: int) -> Products | None:
        """Return the products of a sequence; None if its weights have another form."""
        first = run.calls[0]
        if not all(_is_plain(each, first) for each in run.calls) or (spans := spans_of(run, batch)) is None:
            return None
        return cls(run, batch, *spans)

    @property
    def scale(self) -> float:
        """The factor of the dot products."""
        call = self.run.calls[0]
        return 1 / math.sqrt(call.query.shape[-1]) if call.scale is None else float(call.scale)

    @property
    def softcap(self) -> float | None:
        """The bound of the scores."""
        softcap = self.run.calls[0].softcap
        return None if softcap is None else float(softcap)

    def query(self, head: int) -> Tensor:
        """Return the queries (L, E) of a head."""
        return torch.cat([each.query[self.batch, head] for each in self.run.calls])

    def tiles(self, at: Tensor | None = None) -> Iterator[Tile]:
        """Yield the weights of all queries, or of those at some places (n,) in ascending order."""
        for head, first, scores, stop in self._scores(at):
            peak = scores.amax(-1, keepdim=True)
            scores.sub_(peak).clamp_min_(_LEAST)  # weights of the smallest scores are 0, as are those of masked keys
            weights = scores.softmax(-1)
            log_total = -weights.amax(-1).log()
            weights, lse = weights[:, :stop], peak[:, 0] + log_total
            entropy = torch.addcmul(-torch.linalg.vecdot(weights, scores[:, :stop]), log_total, weights.sum(-1))
            if bool((empty := peak[:, 0] == -math.inf).any()):  # queries that see no key
                weights[empty], entropy[empty], lse[empty] = 0.0, 0.0, -math.inf
            yield Tile(head, first, weights[None], entropy[None], lse[None])

    def lse(self, at: Tensor) -> Tensor:
        """Return the log-sum-exp (H, n) of the scores of queries at some places, learned sinks included."""
        found = torch.empty(self.run.shape[1], len(at))
        for head, first, scores, _ in self._scores(at):
            found[head, first : first + len(scores)] = scores.logsumexp(-1)
        return found

    def _scores(self, at: Tensor | None) -> Iterator[tuple[int, int, Tensor, int]]:
        """Yield a head, the place of a first query, scores (l, s) of the first s keys and of a learned sink, and s."""
        H, S = self.run.shape[1], self.run.shape[3]
        queries, keys = torch.cat([each.query[self.batch] for each in self.run.calls], 1), self.run.key[self.batch]
        queries, keys = ((queries if at is None else queries[:, at]).float().cpu() * self.scale, keys.float().cpu().mT)
        starts, stops = (self.start, self.stop) if at is None else (self.start[at], self.stop[at])
        sinks = None if self.run.calls[0].sinks is None else self._sinks()[:, slice(None) if at is None else at]
        step = min(max(_HELD // max(S, 1), _FEWEST), _MOST)
        for first in range(0, queries.shape[1], step):
            chosen = slice(first, first + step)
            start, stop = starts[chosen, None], stops[chosen, None]
            end = max(int(stop.max()), 1)
            edge = 0 if int(start.max()) > 0 else max(min(int(stop.min()), end), 0)  # the first key hidden from some
            places = torch.arange(edge, end)
            hidden = (places < start) | (places >= stop)
            for head in range(H):
                scores = queries[head, chosen] @ keys[head * len(keys) // H, :, :end]
                if self.softcap is not None:
                    scores = scores.div_(self.softcap).tanh_().mul_(self.softcap)
                if edge < end:
                    scores[:, edge:].masked_fill_(hidden, -math.inf)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head, chosen, None]], 1)
                yield head, first, scores, end

    def _sinks(self) -> Tensor:
        """Return the scores (H, L) of the learned sinks for each query."""
        parts = []
        for each in self.run.calls:
            B, H, L, _ = each.query.shape
            assert each.sinks is not None
            parts.append(each.sinks.float().cpu().expand(B, H, L)[self.batch])
        return torch.cat(parts, 1)


def _is_plain(call: AttentionCall, first: AttentionCall) -> bool:
    """Whether a call is a softmax of dot products, with the numbers of a run's first call."""
    return (
        call.score in (None, "scaled_dot")
        and call.normalizer == "softmax"
        and not call.changes
        and call.given is None
        and call.order == 0
        and call.query.shape[-1] > 0
        and (call.scale, call.softcap, call.sinks is None) == (first.scale, first.softcap, first.sinks is None)
    )
