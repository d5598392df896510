"""The page that shows a record: its data, and one HTML file.

Dimensions: H query heads, L queries, S keys, E width of a head. ``viewer/src/schema.ts`` declares the same data.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from regard._utils.errors import rejected
from regard._utils.files import write_out
from regard.inspect._record.calls import dense_mask
from regard.inspect._record.head_summary import summaries_of
from regard.inspect._record.layer_record import AttentionRecord, LayerRecord
from regard.inspect._record.recording import Recording
from regard.inspect._record.rollout import flow, left_out, rollout
from regard.inspect._record.summary import AttentionSummary
from regard.inspect._record.texts import Patches, Text, scheme_of, texts_of, words_of
from regard.inspect._record.tiles import Products, Tile, spans_of, tiles_of
from regard.inspect._view.overview import (
    Overview,
    likely_sinks,
    overview,
    pooled_block,
    summary_overview,
    summary_thumbnail,
    thumbnail_block,
)
from regard.inspect._view.plots import Alignment, drawable

# The data of the page: a description in JSON, and blocks of numbers that it loads on demand ---------------------------


#: The largest size of queries and keys sent as float32 (bytes), and of a matrix sent whole (pairs).
_EXACT, _LARGEST = 8 << 20, 1 << 24
#: The most and the fewest queries that the summaries of heads read.
_QUERIES, _FEWEST = 64, 16
#: The largest record (bytes) all of whose sequences and runs go into a file.
_OTHERS = 8 << 20
#: The most weights of which the summaries of heads read a few queries at once, and those of one tile of a matrix.
_AT_ONCE, _TILE = 1 << 23, 1 << 16
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
    if sequences == 0:
        raise rejected("page", "record", "hold a sequence", "an empty batch")
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
        weights = _once(partial(_above_diagonal, compute) if causal else compute)
        special = texts[1].special
        lazy = _LazyOverview(partial(overview, partial(_tiles, weights), (1, S, S), special=special, seen=lambda: seen))
        layer = place | {"name": name, "kind": kind, "shape": [S, S]} | texts_at
        _add_whole(data, layer, lazy, [_table(data, weights, None)])


def _tiles(weights: Callable[[], Tensor]) -> Iterator[Tile]:
    """Yield one matrix (L, S) some rows at a time."""
    L, S = weights().shape
    step = max(_TILE // max(S, 1), 1)
    for first in range(0, L if S else 0, step):
        yield Tile.of(0, first, weights()[None, first : first + step].clone())


def _is_causal(run: LayerRecord, batch: int) -> bool:
    """Return whether no query of a run sees a key after it."""
    spans = spans_of(run, batch) if isinstance(run, AttentionRecord) else None
    return spans is not None and bool((spans[1] <= torch.arange(1, run.shape[2] + 1)).all())


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
        lazy = _LazyOverview(partial(summary_overview, run, batch, keys.special))
        small, size = summary_thumbnail(run), run.pyramid()[0].size
        thumbnail = small.max.shape[2:], (small.size, small.size)
        _add_heads(data, layer, lazy, _largest(data, run, batch), thumbnail, (size, size), is_pooled=True)
        return
    assert isinstance(run, AttentionRecord)

    if not all(bool(each.sum(dtype=torch.float32).isfinite()) for each in (run.key, *(one.query for one in run.calls))):
        data.add_note("Some queries or keys are not finite: weights that are NaN are drawn like masked ones.")
    products = Products.of(run, batch)
    spans = spans_of(run, batch) if products is None else (products.start, products.stop)
    masked = _once(lambda: _masked(run, batch)) if spans is None else lambda: None
    seen = partial(_seen, spans, masked, S)
    if products is not None and L * S > _READ:
        every = pooled_block(L)
        data.add_note(f"From afar, the largest matrices show one of {every} queries; zoomed in, they show all.")
        lazy = _LazyOverview(partial(_sampled, products, every, keys.special))
    else:
        lazy = _LazyOverview(partial(_read, run, batch, products, keys.special, seen, masked))
    if products is None:
        weights = [_table(data, partial(_marked, run, batch, head, masked), run) for head in range(H)]
    else:
        weights = _products(data, products, lazy)
    _add_whole(data, layer | {"mean": H > 1}, lazy, weights)


def _seen(spans: tuple[Tensor, Tensor] | None, masked: Callable[[], Tensor | None], S: int) -> Tensor | None:
    """Return the first key that each query sees, the one after its last, and how many it sees (3, L); None if all."""
    if spans is not None:
        return torch.stack([*spans, (spans[1] - spans[0]).clamp_min(0)])
    if (hidden := masked()) is None:
        return None
    visible, at = (~hidden).any(0), torch.arange(1, S + 1)
    stop = (visible * at).amax(-1)
    start = torch.where(visible, at, S + 1).amin(-1) - 1
    return torch.stack([start, stop, visible.sum(-1)])


def _read(
    run: AttentionRecord, batch: int, products: Products | None, special: Sequence[int],
    seen: Callable[[], Tensor | None], masked: Callable[[], Tensor | None],
) -> Overview:  # fmt: skip
    """Return the overview of all weights of a run."""
    _, H, L, S = run.shape
    if products is None:
        likely = likely_sinks(_with_mean(run.received()[batch].float().cpu()), L)
        tiles: Callable[[], Iterator[Tile]] = partial(tiles_of, run, batch)
    else:
        likely, tiles = _likely(products, torch.arange(L)), products.tiles
    return overview(tiles, (H, L, S), special=special, likely=likely, mean=H > 1, seen=seen, masked=masked)


def _sampled(products: Products, every: int, special: Sequence[int]) -> Overview:
    """Return the overview of evenly spaced queries, each for those around it, of a matrix too large to read whole."""
    _, H, L, S = products.run.shape
    at = torch.arange(every // 2, L, every)
    found = overview(
        partial(products.tiles, at), (H, len(at), S), special=special, likely=_likely(products, at), mean=H > 1,
        seen=partial(_seen, (products.start[at], products.stop[at]), lambda: None, S),
    )  # fmt: skip
    of = torch.arange(L).div(every, rounding_mode="floor").clamp_max(len(at) - 1)
    names = ("row_max", "bare_max", "row_entropy")
    return replace(found, lse=None, **{name: getattr(found, name)[:, of] for name in names})


def _likely(products: Products, at: Tensor) -> Tensor:
    """Return the keys that may be sinks, from few of the queries at some places."""
    at = at[:: -(-len(at) // _QUERIES)]
    _, H, _, S = products.run.shape
    received = torch.zeros(H, S)
    for tile in products.tiles(at):
        received[tile.head, : tile.weights.shape[2]] += tile.weights[0].sum(0)
    return likely_sinks(_with_mean(received), len(at))


def _with_mean(received: Tensor) -> Tensor:
    """Return what keys receive from each head (H, S), followed by the mean of several heads."""
    return torch.cat([received, received.mean(0, keepdim=True)]) if len(received) > 1 else received


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
    lazy = _LazyOverview(partial(overview, partial(_tiles, lambda: weights), (1, L, S)))
    queries, keys = Text(alignment.target), Text(alignment.source, patches=alignment.patches)
    layer = {
        "record": 0, "run": 0, "number": len(data.described["layers"]), "name": alignment.title, "kind": "picture",
        "queries": data.text(queries), "keys": data.text(keys), "shape": [L, S],
    }  # fmt: skip
    table = _table(data, lambda: weights, None) | {"signed": bool((weights < 0).any())}
    _add_whole(data, layer, lazy, [table])


def _once(compute: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that computes something on first use, in one thread, and keeps it."""
    lock = threading.Lock()
    kept: list[Any] = []

    def read() -> Any:
        with lock:
            if not kept:
                kept.append(compute())
        return kept[0]

    return read


class _LazyOverview:
    """A layer's overview, computed on first use."""

    def __init__(self, compute: Callable[[], Overview]) -> None:
        self.all: Callable[[], Overview] = _once(compute)

    def encoded(self) -> bytes:
        """Return what the page's grid needs, concatenated."""
        found = self.all()
        numbers = torch.stack([found.entropy, found.received, found.diagonal, found.hidden])
        parts = (numbers, found.sinks, found.spans.int(), found.spread, found.thumbnails, *found.bare)
        return b"".join(map(_bytes, parts))

    def rows(self, head: int) -> bytes:
        """Return the largest weight of each row, with and without sinks, and its entropy."""
        found = self.all()
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
            blocks = data.block(lambda: _bytes(lazy.all().pooled[head]))
            pooled = {"size": list(size), "blocks": blocks, "sinks": data.block(lambda: _bytes(lazy.all().apart[head]))}
        return {"rows": data.block(partial(lazy.rows, head)), "pooled": pooled}

    shape, block = map(list, thumbnail)
    layer = layer | {"overview": data.block(lazy.encoded), "thumbnail": shape, "block": block}
    data.described["layers"].append(layer)
    for head, described in enumerate(weights):
        data.described["heads"].append({"layer": number, "head": head, "weights": described} | facts(head))
    layer["mean"] = facts(len(weights)) if layer.get("mean") else None


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


def _marked(run: AttentionRecord, batch: int, head: int, masked: Callable[[], Tensor | None]) -> Tensor:
    """Return a head's weights, with −0 for those that are masked."""
    weights = run.weights(batch=batch, head=head)
    hidden = masked()
    if hidden is None:
        return weights
    return torch.where(hidden[head % len(hidden)] & (weights == 0), -0.0, weights)


def _products(data: PageData, products: Products, lazy: _LazyOverview) -> list[dict[str, Any]]:
    """Describe each head by its queries and keys; of large matrices, log-sum-exps come in chunks."""
    run, batch, softcap = products.run, products.batch, products.softcap
    (_, H, L, S), query = run.shape, run.calls[0].query
    dtype = torch.float32 if run.nbytes <= _EXACT and query.dtype == torch.float32 else torch.float16
    chunks = [
        _once(partial(products.lse, torch.arange(first, min(first + _CHUNK, L)))) for first in range(0, L, _CHUNK)
    ]

    def queries(head: int) -> bytes:
        return _bytes(products.query(head), dtype)

    def lse(head: int, chunk: int | None = None) -> bytes:
        found = lazy.all().lse if chunk is None else chunks[chunk]()
        assert found is not None
        return _bytes(found[head])

    def lse_at(head: int) -> int | list[int]:
        if L * S <= _READ:
            return data.block(partial(lse, head))
        return [data.block(partial(lse, head, chunk)) for chunk in range(len(chunks))]

    span = [data.span(each.int()) for each in (products.start, products.stop)]
    G = run.key.shape[1]
    groups = [data.block(partial(_bytes, run.key[batch, group], dtype)) for group in range(G)]
    return [
        {
            "kind": "products", "key": groups[head * G // H],
            "query": data.block(partial(queries, head)),
            "lse": lse_at(head), "start": span[0], "stop": span[1], "width": query.shape[-1],
            "format": "float32" if dtype == torch.float32 else "float16",
            "scale": products.scale, "softcap": softcap,
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
