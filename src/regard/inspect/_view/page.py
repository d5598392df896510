"""The page that shows a record: its data, its overview of large matrices, and one HTML file.

Dimensions: H query heads, L queries, S keys, E width of a head. ``viewer/src/schema.ts`` declares the same data.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from regard._utils.errors import rejected
from regard._utils.files import write_out
from regard.inspect._record.calls import AttentionCall, dense_mask
from regard.inspect._record.head_summary import summaries_of
from regard.inspect._record.layer_record import AttentionRecord, LayerRecord
from regard.inspect._record.recording import Recording
from regard.inspect._record.rollout import flow, left_out, rollout
from regard.inspect._record.summary import AttentionSummary
from regard.inspect._record.texts import Patches, Text, scheme_of, texts_of, words_of
from regard.inspect._view.plots import Alignment, drawable

if TYPE_CHECKING:
    from regard.inspect._record.summary import AttentionSummary, Level


# The data of the page: a description in JSON, and blocks of numbers that it loads on demand ---------------------------


#: The largest size of queries and keys sent as float32 (bytes), and of a matrix sent whole (pairs).
_EXACT, _LARGEST = 8 << 20, 1 << 24
#: A key with at least this share of all attention is a sink, in a matrix with more rows and columns than this.
_SINK, _SMALL = 0.3, 3
#: The most and the fewest queries that the summaries of heads read.
_QUERIES, _FEWEST = 64, 16
#: The largest record (bytes) all of whose sequences and runs go into a file.
_OTHERS = 8 << 20
#: The largest matrix (pairs) that is read whole for its overview, and how many queries share a block of log-sum-exps
#: in a larger one.
_READ, _CHUNK = 1 << 28, 1024
#: The longest sequence with a rollout when blocks are loaded on demand, and in a file; and the same for a flow, which
#: takes S² maximum flows.
_ROLLED, _ROLLED_INSIDE = 4096, 256
_FLOWED, _FLOWED_INSIDE = 48, 32


@dataclass
class PageData:
    """A page's description, and its blocks, each computed on demand."""

    described: dict[str, Any]
    blocks: list[Callable[[], bytes]] = field(default_factory=list)
    _texts: dict[Text, int] = field(default_factory=dict)
    _spans: dict[bytes, int] = field(default_factory=dict)

    def block(self, make: Callable[[], bytes]) -> int:
        """Add a block, and return its number."""
        self.blocks.append(make)
        return len(self.blocks) - 1

    def span(self, bounds: Tensor) -> int:
        """Return the number of a block of bounds, which layers with the same mask share."""
        made = _bytes(bounds)
        if made not in self._spans:
            self._spans[made] = self.block(lambda: made)
        return self._spans[made]

    def text(self, text: Text) -> int:
        """Return the number of a text; add it if it is new."""
        if text not in self._texts:
            self._texts[text] = len(self._texts)
            self.described["texts"].append(_text(text))
        return self._texts[text]

    def add_note(self, note: str) -> None:
        """Put a sentence in front of the footer, once."""
        if note not in self.described["note"]:
            self.described["note"] = f"{note} {self.described['note']}".strip()


def page_data(
    shown: Sequence[Recording | Alignment], *, title: str, note: str, batch: int = 0, served: bool = False
) -> PageData:
    """Return the page's data for records or alignments.

    Parameters
    ----------
    shown : sequence of Record or of Alignment
    title, note : str
    batch : int
        Which sequence of a record's batch the page opens on.
    served : bool
        Whether blocks are loaded on demand, so that the size of the page does not matter.

    Raises
    ------
    ValueError
        If there is nothing to show, texts do not match, or a matrix is too large to send whole.
    """
    described: dict[str, Any] = {
        "version": 2,
        "title": title,
        "note": note,
        "records": [],
        "models": [],
        "runs": [],
        "texts": [],
    }
    data = PageData(described | {"layers": [], "heads": []})
    records = data.described["records"]
    for each in shown:
        if isinstance(each, Alignment):
            data.described["records"] = data.described["models"] = [""]
            data.described["runs"] = [{"record": 0, "sequence": 0, "run": 0, "name": ""}]
            _add_alignment(data, each)
        else:
            records.append(each.title or f"record {len(records) + 1}")
            data.described["models"].append(each.model)
            _add_record(data, each, batch, served=served)
    if not data.described["heads"]:
        raise rejected("page", "record", "hold attention", "none")
    return data


def _add_record(data: PageData, record: Recording, batch: int, *, served: bool) -> None:
    """Add the runs of a record: first that of the given sequence, then the others if there is room for them."""
    layers = [record.runs(layer) for layer in record.layers]
    runs = max(map(len, layers), default=1)
    sequences = max((run.shape[0] for each in layers for run in each), default=1)
    if not 0 <= batch < (least := min((each[-1].shape[0] for each in layers), default=batch + 1)):
        raise rejected("page", "batch", f"be below {least}, the batch size", batch)
    wanted = [(sequence, run) for run in range(runs) for sequence in range(sequences)]
    wanted.sort(key=lambda each: (each[0] != batch, each[1] != runs - 1, each))
    if not served and record.nbytes > _OTHERS and len(wanted) > 1:
        data.add_note(
            f"This file holds one of {len(wanted)} sequences and runs; regard view and a notebook's widget show all."
        )
        wanted = wanted[:1]
    for sequence, number in wanted:
        # The last runs of all layers belong together.
        found = [(at, each[number - runs]) for at, each in enumerate(layers) if len(each) >= runs - number]
        found = [(at, run) for at, run in found if sequence < run.shape[0]]
        place = {"record": len(data.described["records"]) - 1, "run": len(data.described["runs"])}
        named = {"sequence": sequence, "run": number, "name": f"run {number + 1} of {runs}" if runs > 1 else ""}
        data.described["runs"].append({"record": place["record"]} | named)
        for at, run in found:
            texts = _texts_of(record, run, sequence, strict=(sequence, number) == wanted[0])
            _add_layer(data, run, texts, place | {"number": at}, sequence)
            if (sequence, number) == wanted[0]:
                _add_summaries(data, run, texts, sequence)
        rolled = _rolled(record, served=served) if number == runs - 1 else None
        if rolled is not None:
            texts = record.texts_of(rolled, sequence)
            _add_stacked(data, record, texts, place | {"number": len(layers)}, sequence, served=served)


def _texts_of(record: Recording, run: LayerRecord, sequence: int, *, strict: bool) -> tuple[Text, Text]:
    """Return the texts of a run; an earlier run of another length shows the numbers of its tokens."""
    try:
        return record.texts_of(run, sequence)
    except ValueError:
        if strict:
            raise
        return texts_of((), run)


def _rolled(record: Recording, *, served: bool) -> LayerRecord | None:
    """Return a layer of a record that rollout applies to; None if it does not, or its matrix is too large."""
    runs = list(record)
    most = _ROLLED if served else _ROLLED_INSIDE
    apart = any(isinstance(run, AttentionSummary) or run.kind != "self" or run.windows > 1 for run in runs)
    if len(runs) < 2 or apart or len({run.shape[2:] for run in runs}) > 1 or runs[0].shape[2] != runs[0].shape[3]:
        return None
    calls = [each for run in runs if isinstance(run, AttentionRecord) for each in run.calls]
    signed = any(each.given is not None or each.order != 0 for each in calls)
    return None if signed or runs[0].shape[3] > most else runs[0]


def _add_stacked(
    data: PageData, record: Recording, texts: tuple[Text, Text], place: dict[str, int], batch: int, *, served: bool
) -> None:
    """Add the rollout of all layers, and their flow if it is quick."""
    S = len(texts[1].tokens)
    texts_at = {"queries": data.text(texts[0]), "keys": data.text(texts[1])}
    through = f"layers {', '.join(record.labels)} alone" if left_out(record) else "all layers"
    computed: list[tuple[str, str, Callable[[], Tensor]]] = [
        ("rollout", f"Rollout: how much each output depends on each input through {through}, as a product of their "
         "weights mixed with the residual connection", lambda: rollout(record, batch=batch, layers=record.layers)),
    ]  # fmt: skip
    if (_FLOWED if served else _FLOWED_INSIDE) >= S and find_spec("scipy"):
        computed.append((
            "flow", f"Flow: how much can flow from each input to each output through {through}, with weights as "
            "capacities; each row is divided by its sum",
            lambda: F.normalize(flow(record, batch=batch, layers=record.layers), p=1.0, dim=1),
        ))  # fmt: skip
    causal = all(_is_causal(run, batch) for run in record)
    seen = torch.stack([torch.zeros(S, dtype=torch.int), *2 * [torch.arange(1, S + 1)]]) if causal else None
    for kind, name, compute in computed:
        weights = cache(partial(_above_diagonal, compute) if causal else compute)
        read = partial(_rows_of, weights)
        lazy = _LazyOverview(partial(overview, read, (1, S, S), seen=lambda: seen), _no_sinks, texts[1].special)
        layer = place | {"name": name, "kind": kind, "shape": [S, S]} | texts_at
        _add_whole(data, layer, lazy, [_table(data, weights, None)])


def _rows_of(weights: Callable[[], Tensor], first: int, last: int) -> Tensor:
    return weights()[None, first:last]


def _is_causal(run: LayerRecord, batch: int) -> bool:
    """Return whether no query of a run sees a key after it."""
    spans = _spans(run, batch) if isinstance(run, AttentionRecord) else None
    return spans is not None and bool((spans[1].cpu() <= torch.arange(1, run.shape[2] + 1)).all())


def _above_diagonal(compute: Callable[[], Tensor]) -> Tensor:
    """Return weights of causal layers, with −0 where these are masked."""
    weights = compute()
    return torch.where(torch.ones_like(weights, dtype=torch.bool).triu(1), -0.0, weights)


def _add_layer(data: PageData, run: LayerRecord, texts: tuple[Text, Text], place: dict[str, int], batch: int) -> None:
    _, H, L, S = run.shape
    if min(H, L, S) == 0:
        got = f"{H} heads, {L} queries and {S} keys"
        raise rejected("page", run.name or "the layer", "have heads, queries and keys", got)
    queries, keys = texts
    texts_at = {"queries": data.text(queries), "keys": data.text(keys)}
    layer = place | {"name": run.name, "kind": run.kind, "shape": [L, S]} | texts_at
    if isinstance(run, AttentionSummary):
        lazy = _LazyOverview(
            partial(summary_overview, run, batch),
            partial(_received, run, batch),
            keys.special,
            small=min(L, S) <= _SMALL,
        )
        small, size = summary_thumbnail(run), run.pyramid()[0].size
        thumbnail = small.max.shape[2:], (small.size, small.size)
        _add_heads(data, layer, lazy, _largest(data, run, batch), thumbnail, (size, size), is_pooled=True)
        return
    assert isinstance(run, AttentionRecord)

    def rows(first: int, last: int) -> Tensor:
        weights = run.weights(batch=batch, rows=slice(first, last))
        return torch.cat([weights, weights.mean(0, keepdim=True)]) if H > 1 else weights

    spans = _spans(run, batch)
    masked = cache(lambda: _masked(run, batch)) if spans is None else None

    def seen() -> Tensor | None:
        if spans is not None:
            return torch.stack([*spans, (spans[1] - spans[0]).clamp_min(0)])
        assert masked is not None
        hidden = masked()
        if hidden is None:
            return None
        visible, at = (~hidden).any(0), torch.arange(1, S + 1)
        stop = (visible * at).amax(-1)
        start = torch.where(visible, at, S + 1).amin(-1) - 1
        return torch.stack([start, stop, visible.sum(-1)])

    large = spans is not None and L * S > _READ and run.calls[0].sinks is None
    sampled = _Sampled(run, batch, spans, pooled_block(L)) if spans is not None and large else None
    weights = None if spans is None else _products(data, run, batch, spans, sampled)
    if weights is None:
        weights = [_table(data, partial(_marked, run, batch, head, masked), run) for head in range(H)]
    compute: Callable[[Sequence[Sequence[int]]], Overview] = partial(
        overview, rows, (H + (H > 1), L, S), seen=seen, masked=masked
    )
    received: Callable[[], tuple[Tensor, Tensor]] = partial(_received, run, batch)
    if sampled is not None:
        compute, received = sampled.overview, sampled.received
        data.add_note(f"From afar, the largest matrices show one of {sampled.every} queries; zoomed in, they show all.")
    lazy = _LazyOverview(compute, received, keys.special, small=min(L, S) <= _SMALL)
    _add_whole(data, layer | {"mean": H > 1}, lazy, weights)


def _received(run: LayerRecord, batch: int) -> tuple[Tensor, Tensor]:
    """Return, for each head and for their mean, the share of the key that receives most, and the key."""
    received = run.received()[batch] / run.shape[2]
    if isinstance(run, AttentionRecord) and len(received) > 1:
        received = torch.cat([received, received.mean(0, keepdim=True)])
    largest, at = received.max(-1)
    return largest, at


def _no_sinks() -> tuple[Tensor, Tensor]:
    """Return that no key of a single matrix is a sink."""
    return torch.zeros(1), torch.zeros(1, dtype=torch.long)


def _add_summaries(data: PageData, run: LayerRecord, texts: tuple[Text, Text], batch: int) -> None:
    """Add what each head of the latest layer does, in words, where a definition fits."""
    _, H, _, S = run.shape
    found = summaries_of(run, texts, batch, max(min(_QUERIES, _AT_ONCE // (H * S)), _FEWEST))
    for head, each in zip(data.described["heads"][-H:], found):
        if each.label:
            head["summary"] = {"label": each.label, "score": round(each.score, 4), "text": each.text}
            if each.second:
                head["summary"]["second"] = [each.second, round(each.measures[each.second].score, 4)]


def _add_alignment(data: PageData, alignment: Alignment) -> None:
    L, S = alignment.weights.shape
    weights = alignment.weights.detach().float().cpu()
    compute = partial(overview, lambda first, last: weights[None, first:last], (1, L, S))
    lazy = _LazyOverview(compute, _no_sinks, ())
    queries, keys = Text(alignment.target), Text(alignment.source, patches=alignment.patches)
    layer = {
        "record": 0, "run": 0, "number": len(data.described["layers"]), "name": alignment.title, "kind": "picture",
        "queries": data.text(queries), "keys": data.text(keys), "shape": [L, S],
    }  # fmt: skip
    table = _table(data, lambda: weights, None) | {"signed": bool((weights < 0).any())}
    _add_whole(data, layer, lazy, [table])


@dataclass
class _LazyOverview:
    """A layer's overview and its sinks, computed on first use."""

    compute: Callable[[Sequence[Sequence[int]]], Overview]
    find_received: Callable[[], tuple[Tensor, Tensor]]
    special: tuple[int, ...]
    small: bool = False

    @cached_property
    def received(self) -> tuple[Tensor, Tensor]:
        return self.find_received()

    @cached_property
    def sinks(self) -> list[int]:
        """The sink of each head; −1 where there is none."""
        share, at = self.received
        return torch.where((share > _SINK) & (not self.small), at, -1).tolist()

    @cached_property
    def all(self) -> Overview:
        return self.compute([sorted({*self.special, *([sink] if sink >= 0 else [])}) for sink in self.sinks])

    def encoded(self) -> bytes:
        """Return what the page's grid needs, concatenated."""
        found = self.all
        numbers = torch.stack([found.entropy, self.received[0].float().cpu(), found.diagonal, found.hidden])
        sinks = torch.tensor(self.sinks, dtype=torch.int32)
        parts = (numbers, sinks, found.spans.int(), found.spread, found.thumbnails, *found.bare)
        return b"".join(map(_bytes, parts))

    def rows(self, head: int) -> bytes:
        """Return the largest weight of each row, with and without sinks, and its entropy."""
        found = self.all
        return _bytes(torch.stack([found.row_max[head], found.bare_max[head], found.row_entropy[head]]), torch.float16)


def _add_whole(data: PageData, layer: dict[str, Any], lazy: _LazyOverview, weights: list[dict[str, Any]]) -> None:
    """Add heads with complete matrices."""
    L, S = layer["shape"]
    block = thumbnail_block(L), thumbnail_block(S)
    thumbnail = (-(-L // block[0]), -(-S // block[1])), block
    size = pooled_block(L), pooled_block(S)
    _add_heads(data, layer, lazy, weights, thumbnail, size, is_pooled=max(size) > 1)


def _add_heads(
    data: PageData, layer: dict[str, Any], lazy: _LazyOverview, weights: list[dict[str, Any]],
    thumbnail: tuple[Sequence[int], Sequence[int]], size: tuple[int, int], *, is_pooled: bool,
) -> None:  # fmt: skip
    """Add a layer's heads; its thumbnails have this shape, and blocks of this size."""
    number = len(data.described["layers"])

    def facts(head: int) -> dict[str, Any]:
        pooled = None
        if is_pooled:
            blocks = data.block(lambda: _bytes(lazy.all.pooled[head]))
            pooled = {"size": list(size), "blocks": blocks, "sinks": data.block(lambda: _bytes(lazy.all.sinks[head]))}
        return {"rows": data.block(partial(lazy.rows, head)), "pooled": pooled}

    shape, block = map(list, thumbnail)
    layer = layer | {"overview": data.block(lazy.encoded), "thumbnail": shape, "block": block}
    data.described["layers"].append(layer)
    for head, described in enumerate(weights):
        data.described["heads"].append({"layer": number, "head": head, "weights": described} | facts(head))
    layer["mean"] = facts(len(weights)) if layer.get("mean") else None


def _sinks(call: AttentionCall, batch: int) -> Tensor:
    """Return the scores (H, L) of the learned sinks for each query of a sequence."""
    B, H, L, _ = call.query.shape
    assert call.sinks is not None
    return call.sinks.float().expand(B, H, L)[batch]


def _spans(run: AttentionRecord, batch: int) -> tuple[Tensor, Tensor] | None:
    """Return the first visible key of each query and the one after its last; None for other masks."""
    found = [each.intervals() for each in run.calls]
    starts, stops = ([each[i][batch] + call.first for each, call in zip(found, run.calls) if each] for i in (0, 1))
    return None if len(starts) < len(run.calls) else (torch.cat(starts), torch.cat(stops))


def _masked(run: AttentionRecord, batch: int) -> Tensor | None:
    """Return which pairs (H, L, S) are masked, (1, L, S) if heads share one mask; None if the calls do not say."""
    S, parts = run.shape[3], []
    for call in run.calls:
        if call.given is not None or call.order != 0:
            return None
        L, keys = call.query.shape[2], call.key.shape[2]
        mask = dense_mask(call)
        hidden = torch.zeros(1, L, keys, dtype=torch.bool)
        if mask is not None:
            mask = mask[batch if mask.shape[0] > 1 else 0].cpu()
            least = None if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
            hidden = (~mask if least is None else mask <= least).expand(-1, L, keys)
        if call.is_causal:
            hidden = hidden | torch.ones(L, keys, dtype=torch.bool).triu(1)
        parts.append(F.pad(hidden, (call.first, S - call.first - keys), value=True))
    parts = [each[:1] if bool((each == each[:1]).all()) else each for each in parts]
    heads = max(len(each) for each in parts)
    return torch.cat([each.expand(heads, -1, -1) for each in parts], 1)


def _marked(run: AttentionRecord, batch: int, head: int, masked: Callable[[], Tensor | None] | None) -> Tensor:
    """Return a head's weights, with −0 for those that are masked."""
    weights = run.weights(batch=batch, head=head)
    hidden = None if masked is None else masked()
    if hidden is None:
        return weights
    return torch.where(hidden[head % len(hidden)] & (weights == 0), -0.0, weights)


@dataclass
class _Sampled:
    """Some queries of a softmax of dot products that is too large to read whole, evenly spaced."""

    run: AttentionRecord
    batch: int
    spans: tuple[Tensor, Tensor]
    every: int

    @cached_property
    def key(self) -> Tensor:
        return self.run.key[self.batch].float()

    @cached_property
    def query(self) -> Tensor:
        return torch.cat([each.query[self.batch] for each in self.run.calls], 1)

    def scored(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores (H, n, s) of n queries, up to the last key that they see, and their log-sum-exp (H, n)."""
        call, (G, _, E) = self.run.calls[0], self.key.shape
        start, stop = (each[at, None] for each in self.spans)
        keys = torch.arange(int(stop.max()))
        query = self.query[:, at].float() * (1 / math.sqrt(E) if call.scale is None else call.scale)
        scores = (query.unflatten(0, (G, -1)) @ self.key[:, None, : len(keys)].mT).flatten(0, 1)
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        scores = scores.masked_fill_((keys < start) | (keys >= stop), -math.inf)
        return scores, scores.logsumexp(-1)

    def lse(self, head: int, first: int) -> bytes:
        """Return the log-sum-exps of a chunk of a head's queries."""
        return _bytes(self._chunk(first)[head])

    def _chunk(self, first: int) -> Tensor:
        if first not in self._chunks:
            at = torch.arange(first, min(first + _CHUNK, self.query.shape[1]))
            self._chunks[first] = torch.cat([self.scored(each)[1] for each in at.split(self._step)], 1)
        return self._chunks[first]

    def __post_init__(self) -> None:
        self._chunks: dict[int, Tensor] = {}
        self._step = max(_AT_ONCE // (self.run.shape[1] * self.run.shape[3]), 1)

    @property
    def positions(self) -> Tensor:
        return torch.arange(self.every // 2, self.query.shape[1], self.every)

    def rows(self, at: Tensor) -> Tensor:
        """Return the weights of queries (H, n, S), and their mean over heads as the last."""
        scores, lse = self.scored(at)
        weights = torch.where(lse.isinf()[..., None], 0.0, (scores - lse[..., None]).exp_())
        weights = F.pad(weights, (0, self.key.shape[1] - weights.shape[-1]))
        return torch.cat([weights, weights.mean(0, keepdim=True)]) if len(weights) > 1 else weights

    def received(self) -> tuple[Tensor, Tensor]:
        """Estimate the share of the key that receives most, and which it is, from few queries."""
        at = self.positions[:: max(len(self.positions) // 256, 1)]
        total = torch.stack([self.rows(each).sum(1) for each in at.split(self._step)]).sum(0)
        share, key = (total / len(at)).max(-1)
        return share, key

    def overview(self, hidden: Sequence[Sequence[int]]) -> Overview:
        """Return the overview of these queries, each for those around it."""
        at, (_, H, L, S) = self.positions, self.run.shape
        starts, stops = (each[at] for each in self.spans)
        seen = torch.stack([starts, stops, (stops - starts).clamp_min(0)])
        shape = H + (H > 1), len(at), S
        found = overview(lambda first, last: self.rows(at[first:last]), shape, hidden, seen=lambda: seen)
        of = torch.arange(L).div(self.every, rounding_mode="floor").clamp_max(len(at) - 1)
        names = ("row_max", "bare_max", "row_entropy")
        return replace(found, **{name: getattr(found, name)[:, of] for name in names})


def _products(
    data: PageData, run: AttentionRecord, batch: int, spans: tuple[Tensor, Tensor], sampled: _Sampled | None
) -> list[dict[str, Any]] | None:
    """Describe each head by its queries and keys; None if its weights are not exp(score − lse) of dot products."""
    calls = run.calls
    first = calls[0]
    E, H, G = first.query.shape[-1], run.shape[1], first.key.shape[1]
    for each in calls:
        plain = each.score in (None, "scaled_dot") and each.normalizer == "softmax"
        if (
            each.changes
            or each.given is not None
            or each.order != 0
            or not (plain and E)
            or (each.scale, each.softcap) != (first.scale, first.softcap)
        ):
            return None
    dtype = torch.float32 if run.nbytes <= _EXACT and first.query.dtype == torch.float32 else torch.float16

    def queries(head: int) -> bytes:
        return _bytes(torch.cat([each.query[batch, head] for each in calls]), dtype)

    @cache
    def lse() -> Tensor:
        found = run.lse()[batch]
        if first.sinks is None:
            return found
        return torch.logaddexp(found, torch.cat([_sinks(each, batch) for each in calls], 1))

    def lse_at(head: int) -> int | list[int]:
        if sampled is None:
            return data.block(lambda: _bytes(lse()[head]))
        return [data.block(partial(sampled.lse, head, at)) for at in range(0, run.shape[2], _CHUNK)]

    span = [data.span(each.int()) for each in spans]
    groups = [data.block(partial(_bytes, run.key[batch, group], dtype)) for group in range(G)]
    return [
        {
            "kind": "products", "key": groups[head * G // H],
            "query": data.block(partial(queries, head)),
            "lse": lse_at(head), "start": span[0], "stop": span[1], "width": E,
            "format": "float32" if dtype == torch.float32 else "float16",
            "scale": 1 / math.sqrt(E) if first.scale is None else float(first.scale),
            "softcap": None if first.softcap is None else float(first.softcap),
        }
        for head in range(H)
    ]  # fmt: skip


def _largest(data: PageData, run: AttentionSummary, batch: int) -> list[dict[str, Any]]:
    """Describe each head of a summary by the largest weights of each query."""
    data.add_note(
        f"Summaries show only the {run.k} largest weights of each query; zoomed out, they show the largest weight "
        "of each block."
    )
    top = run.topk(run.k)
    return [
        {
            "kind": "largest", "count": run.k,
            "weights": data.block(partial(_bytes, top.weights[batch, head])),
            "keys": data.block(partial(_bytes, top.indices[batch, head].int())),
        }
        for head in range(run.shape[1])
    ]  # fmt: skip


def _table(data: PageData, weights: Callable[[], Tensor], run: LayerRecord | None) -> dict[str, Any]:
    if run is not None and run.shape[2] * run.shape[3] > _LARGEST:
        expected = f"be a softmax of dot products with one interval of keys for each query beyond {_LARGEST:,} pairs"
        raise rejected("page", run.name or "the layer", expected, f"{run.shape[2]} × {run.shape[3]}")
    signed = isinstance(run, AttentionRecord) and any(
        each.order != 0 or (each.given is not None and bool((each.given < 0).any())) for each in run.calls
    )
    return {"kind": "table", "signed": signed, "block": data.block(lambda: _bytes(weights(), torch.float16))}


def _bytes(values: Tensor, dtype: torch.dtype | None = None) -> bytes:
    """Return numbers as the page reads them, little-endian and contiguous."""
    array = values.detach().to("cpu", dtype or values.dtype).contiguous().numpy()
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _text(text: Text) -> dict[str, Any]:
    described: dict[str, Any] = {"tokens": list(text.tokens), "special": list(text.special)}
    if text.seconds:
        described["seconds"] = [None if each is None else list(each) for each in text.seconds]
    if not text.patches:
        return described | _words(text, set())
    images: dict[tuple[str, bytes], dict[str, Any]] = {}
    grains: dict[int, list[tuple[float, float]]] = {}
    places: list[dict[str, Any] | None] = [None] * len(text.tokens)
    for patches in text.patches:
        key = patches.name, patches.image
        if key not in images:
            width, height = patches.size
            name = patches.name or f"image {len(images) + 1}"
            images[key] = {"name": name, "width": width, "height": height, "data": _address(patches)}
        shared: dict[str, Any] = {"image": list(images).index(key)}
        grain = _grain(patches, grains.setdefault(shared["image"], []))
        shared |= {"grain": grain} if grain else {}
        shared |= {} if patches.seconds is None else {"seconds": patches.seconds}
        for place in patches.places():
            rectangle = {name: round(getattr(place, name), 2) for name in ("x", "y", "width", "height")}
            places[place.token] = shared | rectangle
    placed = {at for at, each in enumerate(places) if each is not None}
    return described | {"images": list(images.values()), "places": places} | _words(text, placed)


def _grain(patches: Patches, known: list[tuple[float, float]]) -> int:
    """Return which size of patches of an image a grid has: those of tiles lie on those of an overview."""
    _, _, width, height = patches.box or (0.0, 0.0, *patches.size)
    size = width / patches.cols, height / patches.rows
    for number, other in enumerate(known):
        if all(math.isclose(a, b, rel_tol=0.1) for a, b in zip(size, other)):
            return number
    known.append(size)
    return len(known) - 1


def _address(patches: Patches) -> str:
    return f"data:{patches.media_type};base64,{base64.b64encode(patches.image).decode()}"


def _words(text: Text, placed: set[int]) -> dict[str, Any]:
    """Return how tokens read without their tokenizer's marks, and the words that they form; nothing without marks.

    Patches of an image (``placed``) stay apart.
    """
    tokens = [each.encode(errors="replace").decode() for each in text.tokens]
    scheme = scheme_of(tokens)
    if scheme == "none":
        if not any(each[:1] == " " and each.strip() for each in tokens):
            return {}
        tokens, scheme = [each.replace(" ", "▁") for each in tokens], "sentencepiece"
    alone = {each: words_of([each], scheme)[1][0] for each in set(tokens)}
    labels = [each if "�" in alone[each] else alone[each] for each in tokens]
    groups, words = words_of(tokens, scheme)
    apart = [(group, i if i in placed else -1) for i, group in enumerate(groups)]
    starts = [i for i, each in enumerate(apart) if i == 0 or each != apart[i - 1]]
    ranges = [[first, last] for first, last in zip(starts, [*starts[1:], len(groups)])]
    texts = [words[groups[first]] if first not in placed else labels[first] for first in starts]
    return {"labels": labels, "words": ranges, "wordTexts": texts}


# An overview of a matrix of any size: the entropy of its rows, and the largest weights of blocks ----------------------
# Dimensions: H heads, L queries, S keys.


#: The most blocks along the longer side of a thumbnail, and of a pooled matrix; and the most weights read at once.
_THUMBNAIL, _POOLED = 48, 2048
_AT_ONCE = 1 << 23
#: Weights below 2 to this power count as zero.
_LEAST = -24


@dataclass(frozen=True)
class Overview:
    """An overview of a layer's heads, the last of which may be their mean.

    Attributes
    ----------
    entropy : Tensor (H,)
        The mean entropy of the rows, in nats.
    diagonal : Tensor (H,)
        The mean weight within one position of the query's own; NaN unless queries and keys are as many.
    hidden : Tensor (H,)
        The mean weight of a query on sinks and special tokens.
    row_max, bare_max, row_entropy : Tensor (H, L)
        The largest weight of each row, with and without sinks, and its entropy in nats.
    spans : Tensor (3, rows)
        The first key that queries of each row of a thumbnail see, the one after the last, and their mean number.
    spread : Tensor (H, rows) of uint8
        The mean entropy of each row of a thumbnail, in 255ths of the logarithm of the number of keys.
    thumbnails : Tensor (H, rows, cols) of uint8
        The largest weights of the blocks of a thumbnail, as :func:`codes`; 0 where all pairs are masked.
    bare : tuple of H Tensors (rows, number of blocks) of uint8
        The same without sinks, for the columns of a thumbnail that have any; 0 where there are only sinks. Empty if
        each block is one column.
    pooled : Tensor (H, rows, cols) of uint8
        The largest weights of the blocks of a pooled matrix without sinks, as :func:`codes`; empty if it is small.
    sinks : tuple of H Tensors (rows, number of sinks) of uint8
        The largest weights of each sink in these blocks.
    """

    entropy: Tensor
    diagonal: Tensor
    hidden: Tensor
    row_max: Tensor
    bare_max: Tensor
    row_entropy: Tensor
    spans: Tensor
    spread: Tensor
    thumbnails: Tensor
    bare: tuple[Tensor, ...]
    pooled: Tensor
    sinks: tuple[Tensor, ...]


def codes(weights: Tensor) -> Tensor:
    """Return weights as bytes: 1 for zero, then even steps of the logarithm from 2⁻²⁴ to 1; 0 is for masked pairs.

    A step is a factor of 2^(24/253), so a weight is off by at most 3.4 %.
    """
    steps = 2 + torch.round(253 * (1 - weights.abs().clamp_min(2.0**_LEAST).log2() / _LEAST))
    return torch.where(weights.abs() < 2.0**_LEAST, 1, steps.clamp(2, 255)).to(torch.uint8)


def thumbnail_block(length: int) -> int:
    """Return how many of a side's cells a block of a thumbnail covers."""
    return max(-(-length // _THUMBNAIL), 1)


def pooled_block(length: int) -> int:
    """Return how many of a side's cells a pooled block covers: a power of two, 1 for a short side."""
    return 1 if length <= _POOLED else 1 << (length - 1).bit_length() - _POOLED.bit_length() + 1


def overview(
    rows: Callable[[int, int], Tensor], shape: tuple[int, int, int], hidden: Sequence[Sequence[int]],
    seen: Callable[[], Tensor | None] = lambda: None, masked: Callable[[], Tensor | None] | None = None,
) -> Overview:  # fmt: skip
    """Read a layer's matrices once, some rows at a time.

    Parameters
    ----------
    rows : callable
        Returns the weights (H, last − first, S) of the queries ``first`` to ``last`` − 1.
    shape : (int, int, int)
        H, L and S.
    hidden : sequence of sequences of int
        For each head, the keys that are sinks, sorted.
    seen : callable
        Returns the first key that each query sees, the one after its last, and how many it sees (3, L); None if all.
    masked : callable, optional
        Returns which pairs (H − 1 or H or 1, L, S) are masked, for masks with gaps; None if unknown.
    """
    H, L, S = shape
    size, small = (pooled_block(L), pooled_block(S)), (thumbnail_block(L), thumbnail_block(S))
    diagonal = torch.zeros(H) if L == S else torch.full((H,), math.nan)
    row_max, bare_max, row_entropy = (torch.zeros(H, L) for _ in range(3))
    thumbnails = torch.zeros(H, -(-L // small[0]), -(-S // small[1]))
    large = max(size) > 1
    pooled = torch.zeros(H, -(-L // size[0]) if large else 0, -(-S // size[1]))
    sinks = [torch.zeros(pooled.shape[1], len(each)) for each in hidden]
    hidden_share = torch.zeros(H)
    partly = [sorted({each // small[1] for each in columns}) if small[1] > 1 else [] for columns in hidden]
    bare = [torch.zeros(thumbnails.shape[1], len(each)) for each in partly]
    step = max(_AT_ONCE // (H * S), 1)
    for first in range(0, L, step):
        last = min(first + step, L)
        weights = rows(first, last).float().abs()
        row_entropy[:, first:last] = torch.special.entr(weights).sum(2)
        row_max[:, first:last] = weights.amax(2)
        if L == S:
            for offset in (-1, 0, 1):
                diagonal += weights.diagonal(first + offset, 1, 2).sum(1)
        _fold(thumbnails, first, small, weights)
        for head, columns in enumerate(hidden):
            if columns:
                if large:
                    _fold(sinks[head][None], first, (size[0], 1), weights[head : head + 1, :, list(columns)])
                hidden_share[head] += weights[head, :, list(columns)].sum() / max(L, 1)
                weights[head, :, list(columns)] = 0
            for i, block in enumerate(partly[head]):
                part = weights[head : head + 1, :, block * small[1] : (block + 1) * small[1]]
                _fold(bare[head][None, :, i : i + 1], first, small, part)
        bare_max[:, first:last] = weights.amax(2)
        if large:
            _fold(pooled, first, size, weights)
    diagonal /= max(L, 1)
    spans, spread = _spread(row_entropy, _all_of(L, S) if (some := seen()) is None else some.cpu(), thumbnails.shape[1])
    coded = [codes(thumbnails), codes(pooled)]
    gaps = masked() if masked is not None else None
    if gaps is not None:
        coded = [_without_gaps(each, ~gaps, by) for each, by in zip(coded, (small, size))]
    bared = [codes(each) for each in bare]
    for head, columns in enumerate(hidden):
        for i, block in enumerate(partly[head]):
            if set(range(block * small[1], min((block + 1) * small[1], S))) <= set(columns):
                bared[head][:, i] = 0
    return Overview(
        row_entropy.sum(1) / max(L, 1), diagonal, hidden_share, row_max, bare_max, row_entropy, spans, spread,
        coded[0], tuple(bared), coded[1], tuple(map(codes, sinks)),
    )  # fmt: skip


def _without_gaps(coded: Tensor, visible: Tensor, size: tuple[int, int]) -> Tensor:
    """Return codes of blocks (H, rows, cols) with 0 where no pair of the mask (heads, L, S) is visible."""
    if not coded.numel():
        return coded
    found = torch.zeros(len(visible), *coded.shape[1:])
    _fold(found, 0, size, visible.float())
    if 1 < len(found) < len(coded):  # the mean of all heads is the last
        found = torch.cat([found, found.amax(0, keepdim=True)])
    return coded.masked_fill(found == 0, 0)


def _all_of(L: int, S: int) -> Tensor:
    """Return the first key, the one after the last, and the number of keys (3, L) of queries that see all."""
    return torch.tensor([0, S, S])[:, None].expand(3, L)


def _spread(entropy: Tensor, seen: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return which keys queries see in each row of a thumbnail (3, rows), and how even they are (H, rows).

    Parameters
    ----------
    entropy : Tensor (H, L)
    seen : Tensor (3, L)
        The first key that each query sees, the one after its last, and how many it sees.
    rows : int
    """
    L = seen.shape[1]
    if L == 0:
        return torch.zeros(3, 0), torch.zeros(len(entropy), 0, dtype=torch.uint8)
    at = torch.arange(L) // -(-L // rows)
    starts, stops, counts = seen.float()
    share = (entropy / counts.clamp_min(2).log()).clamp(0, 1)
    size = torch.bincount(at, minlength=rows)
    spread = torch.zeros(len(entropy), rows).index_add(1, at, share) / size
    found = torch.stack([
        torch.zeros(rows).scatter_reduce(0, at, starts, "amin", include_self=False),
        torch.zeros(rows).scatter_reduce(0, at, stops, "amax", include_self=False),
        torch.zeros(rows).index_add(0, at, counts) / size,
    ])  # fmt: skip
    return found, (255 * spread).round().to(torch.uint8)


def summary_thumbnail(run: AttentionSummary) -> Level:
    """Return the level of a summary's pyramid that serves as a thumbnail."""
    levels = run.pyramid()
    return next((each for each in levels if max(each.max.shape[2:]) <= _THUMBNAIL), levels[-1])


def summary_overview(run: AttentionSummary, batch: int, hidden: Sequence[Sequence[int]]) -> Overview:
    """Return the overview of a summary; the blocks of its pyramid include sinks."""
    top, base = run.topk(run.k), run.pyramid()[0].max[batch]
    weights, keys = top.weights[batch], top.indices[batch]
    without = torch.stack([
        each.masked_fill(torch.isin(at, torch.tensor(list(columns), dtype=at.dtype)), 0.0).amax(-1)
        for each, at, columns in zip(weights, keys, hidden)
    ])  # fmt: skip
    sinks = tuple(torch.zeros(base.shape[1], len(columns), dtype=torch.uint8) for columns in hidden)
    entropy, small = run.entropy()[batch].float(), summary_thumbnail(run).max[batch]
    H, L = entropy.shape
    spans, spread = _spread(entropy, _all_of(L, run.shape[3]), small.shape[1])
    apart = (keys - torch.arange(L)[:, None]).abs() <= 1
    near = (weights * apart).sum((1, 2)) / L if run.shape[3] == L else torch.full((H,), math.nan)
    received = run.received()[batch].float().cpu() / L
    share = torch.stack([each[list(columns)].sum() for each, columns in zip(received, hidden)])
    level = summary_thumbnail(run).size
    bare = tuple(_bare_blocks(*each, level, small.shape[1]) for each in zip(weights, keys, hidden))
    return Overview(
        entropy.mean(-1), near, share, weights.amax(-1), without, entropy, spans, spread, codes(small), bare,
        codes(base), sinks,
    )  # fmt: skip


def _bare_blocks(weights: Tensor, keys: Tensor, columns: Sequence[int], size: int, rows: int) -> Tensor:
    """Return the largest known weights of a head's blocks that have sinks (rows, number of blocks), without these.

    Known are the largest weights of each query and their keys (L, k).
    """
    partly = sorted({each // size for each in columns}) if size > 1 else []
    weights = weights.masked_fill(torch.isin(keys, torch.tensor(list(columns), dtype=keys.dtype)), 0.0)
    found = torch.zeros(rows, len(partly))
    for i, block in enumerate(partly):
        inside = (weights * (keys.div(size, rounding_mode="floor") == block)).amax(-1)
        _fold(found[None, :, i : i + 1], 0, (size, 1), inside[None, :, None])
    return codes(found)


def _fold(into: Tensor, first: int, size: tuple[int, int], weights: Tensor) -> None:
    """Update the largest weights of blocks with more rows."""
    down, across = size
    blocks = F.pad(weights, (0, -weights.shape[-1] % across)).unflatten(-1, (-1, across)).amax(-1)
    lead = first % down  # earlier rows of the first block
    blocks = F.pad(blocks, (0, 0, lead, -(lead + blocks.shape[1]) % down)).unflatten(1, (-1, down)).amax(2)
    at = slice(first // down, first // down + blocks.shape[1])
    torch.maximum(into[:, at], blocks, out=into[:, at])


# The page for records or alignments: one HTML file that needs no network ----------------------------------------------


#: The footer of every page.
HONEST = (
    "A weight shows how much of a value enters a sum, not why a model gives an answer: "
    "test what a picture suggests with regard.inspect.ablate."
)
#: The most characters of data in one HTML file.
_LONGEST = 400 << 20


#: What a page shows.
Shown: TypeAlias = Recording | Alignment | Sequence[Recording] | Sequence[Alignment]


def render_html(shown: Shown, *, heading: str = "", note: str = "", batch: int = 0) -> str:
    """Return an interactive HTML page that shows attention, in one file that needs no network.

    It contains queries and keys, or weights, and computes the visible part of a matrix of any size. Texts are never
    run as code, and the page makes no requests.

    Parameters
    ----------
    shown : Record or Alignment, or sequence of either
        The heads of two records are shown side by side.
    heading, note : str
        The page's title, and a sentence for its footer.
    batch : int
        Which sequence of a record's batch.

    Returns
    -------
    str

    Raises
    ------
    ValueError
        If there is nothing to show, or it is too large for one file (``regard view`` loads data on demand).

    Examples
    --------
    >>> import torch
    >>> page = render_html([Alignment(("<",), ("K",), torch.ones(1, 1))])
    >>> "u003c" in page, "src=" in page, "connect-src" in page
    (True, False, False)
    """
    data = describe_page(shown, heading=heading, note=note, batch=batch, served=False)
    made: dict[int, str] = {}
    total = 0
    for number, block in enumerate(data.blocks):
        made[number] = base64.b64encode(block()).decode()
        total += len(made[number])
        if total > _LONGEST:
            expected = f"fit in a file of {_LONGEST >> 20} MB (regard view has no such limit)"
            raise rejected("page", "record", expected, "more")
    blocks = "\n".join(
        f'<script type="text/plain" id="block-{number}">{each}</script>' for number, each in made.items()
    )
    return document(data, blocks)


def save_html(
    shown: Shown, path: str | Path, *, heading: str = "",
    note: str = "", batch: int = 0,
) -> Path:  # fmt: skip
    """Write :func:`render_html` to a file.

    Raises
    ------
    ValueError
        If there is nothing to show, or it is too large for one file.
    OSError
        If the file cannot be written.
    """
    write_out(Path(path), render_html(shown, heading=heading, note=note, batch=batch).encode())
    return Path(path)


def describe_page(
    shown: Shown, *, heading: str = "", note: str = "", batch: int = 0,
    served: bool = True,
) -> PageData:  # fmt: skip
    """Return the data of a page for records or alignments, whose blocks are loaded on demand or written to a file."""
    every: Sequence[Recording | Alignment] = [shown] if isinstance(shown, Recording | Alignment) else shown
    if all(isinstance(each, Alignment) for each in every):
        every = drawable(every, "page")  # type: ignore[arg-type]
        title = "Alignments"
    else:
        title = " and ".join(each.title for each in every if each.title) or "Attention"
    return page_data(every, title=heading or title, note=f"{note} {HONEST}".strip(), batch=batch, served=served)


def document(data: PageData, blocks: str = "", *, served: bool = False) -> str:
    """Return the page's HTML, with its blocks inside or loaded from the server."""
    script, style = (bundled(name) for name in ("page.js", "page.css"))
    # Only this script may run, and only these sources may be loaded.
    rules = f"default-src 'none'; script-src {_digest(script)}; style-src 'unsafe-inline'; img-src data: blob:"
    rules += "; base-uri 'none'; form-action 'none'" + ("; connect-src 'self'" if served else "")
    description = data.described | {"blocks": "served" if served else "inside"}
    described = json.dumps(description, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{rules}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(data.described['title'])}</title>\n"
        f"<style>html, body, #app {{ height: 100%; margin: 0; }}\n{style}</style>\n</head>\n<body>\n"
        f'<div id="app"></div>\n<noscript>This page computes what it shows; it needs JavaScript.</noscript>\n'
        f'<script type="application/json" id="page">{described}</script>\n{blocks}\n<script>{script}</script>\n'
        f"</body>\n</html>\n"
    )


@cache
def bundled(name: str) -> str:
    """Return a file built from ``viewer/``."""
    text = files("regard.inspect").joinpath("bundle", name).read_text(encoding="utf-8").strip()
    assert "</script" not in text.lower()
    return text


def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
