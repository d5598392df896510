"""What the page is given of a record: a description in JSON, and blocks of numbers that it reads when it needs them.

Dimensions: H query heads, L queries, S keys, E width of a head. ``viewer/src/schema.ts`` says the same to the page.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor

from regard._errors import rejected
from regard.inspect.alignment import Alignment
from regard.inspect.calls import Attended
from regard.inspect.layer_record import AttentionRecord, LayerRecord
from regard.inspect.overview import (
    Overview,
    overview,
    pooled_block,
    summary_overview,
    summary_thumbnail,
    thumbnail_block,
)
from regard.inspect.record import Record
from regard.inspect.summary import AttentionSummary
from regard.inspect.texts import Text

#: Bytes of queries and keys up to which float32 is sent, and pairs of a matrix that is sent as it is.
_EXACT, _LARGEST = 8 << 20, 1 << 24
#: The part of all attention from which a key is a sink, in a matrix of more rows and columns than these.
_SINK, _SMALL = 0.3, 3


@dataclass
class PageData:
    """A page's description, and its blocks, each of which is computed when it is asked for."""

    described: dict[str, Any]
    blocks: list[Callable[[], bytes]] = field(default_factory=list)
    _texts: dict[Text, int] = field(default_factory=dict)

    def block(self, make: Callable[[], bytes]) -> int:
        """Add a block, and return its number."""
        self.blocks.append(make)
        return len(self.blocks) - 1

    def text(self, text: Text) -> int:
        """Return the number of a text, which is added if it is new."""
        if text not in self._texts:
            self._texts[text] = len(self._texts)
            self.described["texts"].append(_text(text))
        return self._texts[text]


def page_data(shown: Sequence[Record | Alignment], *, title: str, note: str, batch: int = 0) -> PageData:
    """Describe records, or alignments, to the page.

    Parameters
    ----------
    shown : sequence of Record or of Alignment
    title, note : str
    batch : int
        Which sequence of a record's batch.

    Raises
    ------
    ValueError
        If there is nothing to show, or texts do not fit, or a matrix is too large to be sent as it is.
    """
    described: dict[str, Any] = {"version": 1, "title": title, "note": note, "records": [], "texts": []}
    data = PageData(described | {"layers": [], "heads": []})
    records = data.described["records"]
    for each in shown:
        if isinstance(each, Alignment):
            data.described["records"] = [""]
            _add_alignment(data, each)
        else:
            records.append(each.title or f"record {len(records) + 1}")
            for number, run in enumerate(each):
                _add_layer(data, run, each.texts_of(run, batch), {"record": len(records) - 1, "number": number}, batch)
    if not data.described["heads"]:
        raise rejected("page", "record", "hold attention", "none")
    return data


def _add_layer(data: PageData, run: LayerRecord, texts: tuple[Text, Text], place: dict[str, int], batch: int) -> None:
    B, H, L, S = run.shape
    if not 0 <= batch < B:
        raise rejected("page", "batch", f"be below {B}, as many sequences as there are", batch)
    if min(L, S) == 0:
        raise rejected("page", run.name or "the layer", "have queries and keys", f"{L} queries and {S} keys")
    queries, keys = texts

    def sinks() -> list[int | None]:
        largest, at = (run.received()[batch] / L).max(-1)
        least = _SINK if min(L, S) > _SMALL else math.inf
        return [key if share > least else None for share, key in zip(largest.tolist(), at.tolist())]

    if isinstance(run, AttentionSummary):
        look = partial(summary_overview, run, batch)
    else:
        look = partial(overview, lambda first, last: run.weights(batch=batch, rows=slice(first, last)), (H, L, S))
    seen = _Seen(look, sinks, keys.special)
    texts_at = {"queries": data.text(queries), "keys": data.text(keys)}
    layer = place | {"name": run.name, "kind": run.kind, "shape": [L, S]} | texts_at
    if isinstance(run, AttentionSummary):
        thumbnail, size = summary_thumbnail(run).max.shape[2:], run.pyramid()[0].size
        _add_heads(data, layer, seen, _largest(data, run, batch), thumbnail, size, is_pooled=True)
        return
    assert isinstance(run, AttentionRecord)
    weights = _products(data, run, batch)
    if weights is None:
        weights = [_table(data, partial(run.weights, batch=batch, head=head), run) for head in range(H)]
    _add_whole(data, layer, seen, weights)


def _add_alignment(data: PageData, alignment: Alignment) -> None:
    L, S = alignment.weights.shape
    weights = alignment.weights.detach().float().cpu()
    look = partial(overview, lambda first, last: weights[None, first:last], (1, L, S))
    seen = _Seen(look, lambda: [None], ())
    queries, keys = Text(alignment.target), Text(alignment.source, patches=alignment.patches)
    layer = {
        "record": 0, "number": len(data.described["layers"]), "name": alignment.title, "kind": "picture",
        "queries": data.text(queries), "keys": data.text(keys), "shape": [L, S],
    }  # fmt: skip
    table = _table(data, lambda: weights, None) | {"signed": bool((weights < 0).any())}
    _add_whole(data, layer, seen, [table])


@dataclass
class _Seen:
    """A layer's overview, and its sinks, once somebody asks."""

    look: Callable[[list[list[int]]], Overview]
    find_sinks: Callable[[], list[int | None]]
    special: tuple[int, ...]

    @cached_property
    def sinks(self) -> list[int | None]:
        return self.find_sinks()

    @cached_property
    def all(self) -> Overview:
        hidden = [sorted({*self.special, *([] if sink is None else [sink])}) for sink in self.sinks]
        return self.look(hidden)

    def told(self) -> bytes:
        """Return entropies, sinks and thumbnails, one behind the other."""
        sinks = torch.tensor([-1 if each is None else each for each in self.sinks], dtype=torch.int32)
        return _bytes(self.all.entropy) + _bytes(sinks) + _bytes(self.all.thumbnails)


def _add_whole(data: PageData, layer: dict[str, Any], seen: _Seen, weights: list[dict[str, Any]]) -> None:
    """Add heads of whose matrices everything is there."""
    L, S = layer["shape"]
    thumbnail, size = [-(-each // thumbnail_block(L, S)) for each in (L, S)], pooled_block(L, S)
    _add_heads(data, layer, seen, weights, thumbnail, size, is_pooled=size > 1)


def _add_heads(
    data: PageData, layer: dict[str, Any], seen: _Seen, weights: list[dict[str, Any]], thumbnail: Sequence[int],
    size: int, *, is_pooled: bool,
) -> None:  # fmt: skip
    number = len(data.described["layers"])
    data.described["layers"].append(layer | {"overview": data.block(seen.told), "thumbnail": list(thumbnail)})
    for head, described in enumerate(weights):
        largest = [
            data.block(lambda head=head: _bytes(seen.all.row_max[head])),
            data.block(lambda head=head: _bytes(seen.all.bare_max[head])),
        ]
        pooled = None
        if is_pooled:
            blocks = data.block(lambda head=head: _bytes(seen.all.pooled[head]))
            pooled = {
                "size": size,
                "blocks": blocks,
                "sinks": data.block(lambda head=head: _bytes(seen.all.sinks[head])),
            }
        data.described["heads"].append(
            {"layer": number, "head": head, "rowMax": largest, "weights": described, "pooled": pooled}
        )


def _sinks(call: Attended, batch: int) -> Tensor:
    """Return the scores (H, L) of the keys without values that each query of a sequence sees."""
    B, H, L, _ = call.query.shape
    assert call.sinks is not None
    return call.sinks.float().expand(B, H, L)[batch]


def _products(data: PageData, run: AttentionRecord, batch: int) -> list[dict[str, Any]] | None:
    """Describe each head by its queries and keys; None where weights are not exp(score − lse) of dot products."""
    calls = run.calls
    first = calls[0]
    E, H, G = first.query.shape[-1], run.shape[1], first.key.shape[1]
    for each in calls:
        plain = each.score in (None, "scaled_dot") and each.normalizer == "softmax"
        if (
            each.changes
            or each.given is not None
            or not (plain and E)
            or (each.scale, each.softcap) != (first.scale, first.softcap)
        ):
            return None
    spans = [_span(each, batch) for each in calls]
    starts, stops = ([each[i] + call.first for each, call in zip(spans, calls) if each] for i in (0, 1))
    if len(starts) < len(calls):
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

    span = [data.block(partial(_bytes, torch.cat(each).int())) for each in (starts, stops)]
    groups = [data.block(partial(_bytes, run.key[batch, group], dtype)) for group in range(G)]
    return [
        {
            "kind": "products", "key": groups[head * G // H],
            "query": data.block(partial(queries, head)),
            "lse": data.block(lambda head=head: _bytes(lse()[head])), "start": span[0], "stop": span[1], "width": E,
            "format": "float32" if dtype == torch.float32 else "float16",
            "scale": 1 / math.sqrt(E) if first.scale is None else float(first.scale),
            "softcap": None if first.softcap is None else float(first.softcap),
        }
        for head in range(H)
    ]  # fmt: skip


def _largest(data: PageData, run: AttentionSummary, batch: int) -> list[dict[str, Any]]:
    """Describe each head of a summary by the largest weights of each query."""
    told = f"Of summaries, the {run.k} largest weights of each query are there; from afar, the largest of each block."
    if told not in data.described["note"]:
        data.described["note"] = f"{told} {data.described['note']}".strip()
    top = run.topk(run.k)
    return [
        {
            "kind": "largest", "count": run.k,
            "weights": data.block(partial(_bytes, top.weights[batch, head])),
            "keys": data.block(partial(_bytes, top.indices[batch, head].int())),
        }
        for head in range(run.shape[1])
    ]  # fmt: skip


def _span(call: Attended, batch: int) -> tuple[Tensor, Tensor] | None:
    """Return the first key that each query of a sequence sees, and the one behind its last, where that says all."""
    found = call.intervals()
    return None if found is None else (found[0][batch], found[1][batch])


def _table(data: PageData, weights: Callable[[], Tensor], run: LayerRecord | None) -> dict[str, Any]:
    if run is not None and run.shape[2] * run.shape[3] > _LARGEST:
        expected = f"be a softmax of dot products with one run of keys for each query beyond {_LARGEST:,} pairs"
        raise rejected("page", run.name or "the layer", expected, f"{run.shape[2]} × {run.shape[3]}")
    signed = isinstance(run, AttentionRecord) and any(
        each.given is not None and bool((each.given < 0).any()) for each in run.calls
    )
    return {"kind": "table", "signed": signed, "block": data.block(lambda: _bytes(weights(), torch.float16))}


def _bytes(values: Tensor, dtype: torch.dtype | None = None) -> bytes:
    """Return numbers as the page reads them: little-endian, one after the other."""
    array = values.detach().to("cpu", dtype or values.dtype).contiguous().numpy()
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _text(text: Text) -> dict[str, Any]:
    image = None
    if (patches := text.patches) is not None:
        source = f"data:{patches.media_type};base64,{base64.b64encode(patches.image).decode()}"
        image = {"source": source, "rows": patches.rows, "cols": patches.cols, "first": patches.first}
    return {"tokens": list(text.tokens), "special": list(text.special), "image": image}
