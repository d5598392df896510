"""The page that shows a record: its data, its overview of large matrices, and one HTML file.

Dimensions: H query heads, L queries, S keys, E width of a head. ``viewer/src/schema.ts`` declares the same data.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard._utils.errors import rejected
from regard._utils.files import write_out
from regard.inspect._record.calls import AttentionCall
from regard.inspect._record.head_summary import summaries_of
from regard.inspect._record.layer_record import AttentionRecord, LayerRecord
from regard.inspect._record.recording import Recording
from regard.inspect._record.summary import AttentionSummary
from regard.inspect._record.texts import Patches, Text
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


@dataclass
class PageData:
    """A page's description, and its blocks, each computed on demand."""

    described: dict[str, Any]
    blocks: list[Callable[[], bytes]] = field(default_factory=list)
    _texts: dict[Text, int] = field(default_factory=dict)

    def block(self, make: Callable[[], bytes]) -> int:
        """Add a block, and return its number."""
        self.blocks.append(make)
        return len(self.blocks) - 1

    def text(self, text: Text) -> int:
        """Return the number of a text; add it if it is new."""
        if text not in self._texts:
            self._texts[text] = len(self._texts)
            self.described["texts"].append(_text(text))
        return self._texts[text]


def page_data(shown: Sequence[Recording | Alignment], *, title: str, note: str, batch: int = 0) -> PageData:
    """Return the page's data for records or alignments.

    Parameters
    ----------
    shown : sequence of Record or of Alignment
    title, note : str
    batch : int
        Which sequence of a record's batch.

    Raises
    ------
    ValueError
        If there is nothing to show, texts do not match, or a matrix is too large to send whole.
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
                texts = each.texts_of(run, batch)
                _add_layer(data, run, texts, {"record": len(records) - 1, "number": number}, batch)
                _add_summaries(data, run, texts, batch)
    if not data.described["heads"]:
        raise rejected("page", "record", "hold attention", "none")
    return data


def _add_layer(data: PageData, run: LayerRecord, texts: tuple[Text, Text], place: dict[str, int], batch: int) -> None:
    B, H, L, S = run.shape
    if not 0 <= batch < B:
        raise rejected("page", "batch", f"be below {B}, the batch size", batch)
    if min(L, S) == 0:
        raise rejected("page", run.name or "the layer", "have queries and keys", f"{L} queries and {S} keys")
    queries, keys = texts

    def sinks() -> list[int | None]:
        largest, at = (run.received()[batch] / L).max(-1)
        least = _SINK if min(L, S) > _SMALL else math.inf
        return [key if share > least else None for share, key in zip(largest.tolist(), at.tolist())]

    if isinstance(run, AttentionSummary):
        compute = partial(summary_overview, run, batch)
    else:
        compute = partial(overview, lambda first, last: run.weights(batch=batch, rows=slice(first, last)), (H, L, S))
    lazy = _LazyOverview(compute, sinks, keys.special)
    texts_at = {"queries": data.text(queries), "keys": data.text(keys)}
    layer = place | {"name": run.name, "kind": run.kind, "shape": [L, S]} | texts_at
    if isinstance(run, AttentionSummary):
        thumbnail, size = summary_thumbnail(run).max.shape[2:], run.pyramid()[0].size
        _add_heads(data, layer, lazy, _largest(data, run, batch), thumbnail, size, is_pooled=True)
        return
    assert isinstance(run, AttentionRecord)
    weights = _products(data, run, batch)
    if weights is None:
        weights = [_table(data, partial(run.weights, batch=batch, head=head), run) for head in range(H)]
    _add_whole(data, layer, lazy, weights)


def _add_summaries(data: PageData, run: LayerRecord, texts: tuple[Text, Text], batch: int) -> None:
    """Add what each head of the latest layer does, in words, where a definition fits."""
    _, H, _, S = run.shape
    found = summaries_of(run, texts, batch, max(min(_QUERIES, _AT_ONCE // (H * S)), _FEWEST))
    for head, each in zip(data.described["heads"][-H:], found):
        if each.label:
            head["summary"] = {"label": each.label, "score": round(each.score, 4), "text": each.text}


def _add_alignment(data: PageData, alignment: Alignment) -> None:
    L, S = alignment.weights.shape
    weights = alignment.weights.detach().float().cpu()
    compute = partial(overview, lambda first, last: weights[None, first:last], (1, L, S))
    lazy = _LazyOverview(compute, lambda: [None], ())
    queries, keys = Text(alignment.target), Text(alignment.source, patches=alignment.patches)
    layer = {
        "record": 0, "number": len(data.described["layers"]), "name": alignment.title, "kind": "picture",
        "queries": data.text(queries), "keys": data.text(keys), "shape": [L, S],
    }  # fmt: skip
    table = _table(data, lambda: weights, None) | {"signed": bool((weights < 0).any())}
    _add_whole(data, layer, lazy, [table])


@dataclass
class _LazyOverview:
    """A layer's overview and its sinks, computed on first use."""

    compute: Callable[[list[list[int]]], Overview]
    find_sinks: Callable[[], list[int | None]]
    special: tuple[int, ...]

    @cached_property
    def sinks(self) -> list[int | None]:
        return self.find_sinks()

    @cached_property
    def all(self) -> Overview:
        hidden = [sorted({*self.special, *([] if sink is None else [sink])}) for sink in self.sinks]
        return self.compute(hidden)

    def encoded(self) -> bytes:
        """Return entropies, sinks and thumbnails, concatenated."""
        sinks = torch.tensor([-1 if each is None else each for each in self.sinks], dtype=torch.int32)
        return _bytes(self.all.entropy) + _bytes(sinks) + _bytes(self.all.thumbnails)


def _add_whole(data: PageData, layer: dict[str, Any], lazy: _LazyOverview, weights: list[dict[str, Any]]) -> None:
    """Add heads with complete matrices."""
    L, S = layer["shape"]
    thumbnail, size = [-(-each // thumbnail_block(L, S)) for each in (L, S)], pooled_block(L, S)
    _add_heads(data, layer, lazy, weights, thumbnail, size, is_pooled=size > 1)


def _add_heads(
    data: PageData, layer: dict[str, Any], lazy: _LazyOverview, weights: list[dict[str, Any]],
    thumbnail: Sequence[int], size: int, *, is_pooled: bool,
) -> None:  # fmt: skip
    number = len(data.described["layers"])
    data.described["layers"].append(layer | {"overview": data.block(lazy.encoded), "thumbnail": list(thumbnail)})
    for head, described in enumerate(weights):
        largest = [
            data.block(lambda head=head: _bytes(lazy.all.row_max[head])),
            data.block(lambda head=head: _bytes(lazy.all.bare_max[head])),
        ]
        pooled = None
        if is_pooled:
            blocks = data.block(lambda head=head: _bytes(lazy.all.pooled[head]))
            pooled = {
                "size": size,
                "blocks": blocks,
                "sinks": data.block(lambda head=head: _bytes(lazy.all.sinks[head])),
            }
        data.described["heads"].append(
            {"layer": number, "head": head, "rowMax": largest, "weights": described, "pooled": pooled}
        )


def _sinks(call: AttentionCall, batch: int) -> Tensor:
    """Return the scores (H, L) of the learned sinks for each query of a sequence."""
    B, H, L, _ = call.query.shape
    assert call.sinks is not None
    return call.sinks.float().expand(B, H, L)[batch]


def _products(data: PageData, run: AttentionRecord, batch: int) -> list[dict[str, Any]] | None:
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
    note = (
        f"Summaries show only the {run.k} largest weights of each query; zoomed out, they show the largest weight "
        "of each block."
    )
    if note not in data.described["note"]:
        data.described["note"] = f"{note} {data.described['note']}".strip()
    top = run.topk(run.k)
    return [
        {
            "kind": "largest", "count": run.k,
            "weights": data.block(partial(_bytes, top.weights[batch, head])),
            "keys": data.block(partial(_bytes, top.indices[batch, head].int())),
        }
        for head in range(run.shape[1])
    ]  # fmt: skip


def _span(call: AttentionCall, batch: int) -> tuple[Tensor, Tensor] | None:
    """Return the first visible key of each query of a sequence and the one after its last; None for other masks."""
    found = call.intervals()
    return None if found is None else (found[0][batch], found[1][batch])


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
    described: dict[str, Any] = {"tokens": list(text.tokens), "special": list(text.special), "image": None}
    if text.seconds:
        described["seconds"] = [None if each is None else list(each) for each in text.seconds]
    if not text.patches:
        return described
    images: dict[tuple[str, bytes], dict[str, Any]] = {}
    places: list[dict[str, Any] | None] = [None] * len(text.tokens)
    for patches in text.patches:
        key = patches.name, patches.image
        if key not in images:
            width, height = patches.size
            name = patches.name or f"image {len(images) + 1}"
            images[key] = {"name": name, "width": width, "height": height, "data": _address(patches)}
        shared: dict[str, Any] = {"image": list(images).index(key)}
        shared |= {} if patches.seconds is None else {"seconds": patches.seconds}
        for place in patches.places():
            rectangle = {name: round(getattr(place, name), 2) for name in ("x", "y", "width", "height")}
            places[place.token] = shared | rectangle
    first = text.patches[0]
    if len(text.patches) == 1 and first.box is None and first.step is None:
        described["image"] = {"source": _address(first), "rows": first.rows, "cols": first.cols, "first": first.first}
    return described | {"images": list(images.values()), "places": places}


def _address(patches: Patches) -> str:
    return f"data:{patches.media_type};base64,{base64.b64encode(patches.image).decode()}"


# An overview of a matrix of any size: the entropy of its rows, and the largest weights of blocks ----------------------
# Dimensions: H heads, L queries, S keys.


#: The most blocks along the longer side of a thumbnail, and of a pooled matrix; and the most weights read at once.
_THUMBNAIL, _POOLED = 48, 2048
_AT_ONCE = 1 << 23
#: Weights below 2 to this power count as zero.
_LEAST = -24


@dataclass(frozen=True)
class Overview:
    """An overview of a layer's heads.

    Attributes
    ----------
    entropy : Tensor (H,)
        The mean entropy of the rows, in nats.
    row_max, bare_max : Tensor (H, L)
        The largest weight of each row, with and without sinks.
    thumbnails : Tensor (H, rows, cols) of uint8
        The largest weights of the blocks of a thumbnail, as :func:`codes`.
    pooled : Tensor (H, rows, cols) of uint8
        The largest weights of the blocks of a pooled matrix without sinks, as :func:`codes`; empty if it is small.
    sinks : tuple of H Tensors (rows, number of sinks) of uint8
        The largest weights of each sink in these blocks.
    """

    entropy: Tensor
    row_max: Tensor
    bare_max: Tensor
    thumbnails: Tensor
    pooled: Tensor
    sinks: tuple[Tensor, ...]


def codes(weights: Tensor) -> Tensor:
    """Return weights as bytes: 0 for none, then even steps of the logarithm from 2⁻²⁴ to 1.

    A step is a factor of 2^(24/254), so a weight is off by at most 3.4 %.
    """
    steps = 1 + torch.round(254 * (1 - weights.abs().clamp_min(2.0**_LEAST).log2() / _LEAST))
    return torch.where(weights.abs() < 2.0**_LEAST, 0, steps.clamp(1, 255)).to(torch.uint8)


def thumbnail_block(L: int, S: int) -> int:
    """Return the number of cells along the side of a thumbnail's block."""
    return max(-(-max(L, S) // _THUMBNAIL), 1)


def pooled_block(L: int, S: int) -> int:
    """Return the number of cells along the side of a pooled block: a power of two, 1 for small matrices."""
    return 1 if max(L, S) <= _POOLED else 1 << (max(L, S) - 1).bit_length() - _POOLED.bit_length() + 1


def overview(
    rows: Callable[[int, int], Tensor], shape: tuple[int, int, int], hidden: Sequence[Sequence[int]]
) -> Overview:
    """Read a layer's matrices once, some rows at a time.

    Parameters
    ----------
    rows : callable
        Returns the weights (H, last − first, S) of the queries ``first`` to ``last`` − 1.
    shape : (int, int, int)
        H, L and S.
    hidden : sequence of sequences of int
        For each head, the keys that are sinks, sorted.
    """
    H, L, S = shape
    size, small = pooled_block(L, S), thumbnail_block(L, S)
    entropy = torch.zeros(H)
    row_max, bare_max = torch.zeros(H, L), torch.zeros(H, L)
    thumbnails = torch.zeros(H, -(-L // small), -(-S // small))
    pooled = torch.zeros(H, -(-L // size) if size > 1 else 0, -(-S // size))
    sinks = [torch.zeros(pooled.shape[1], len(each)) for each in hidden]
    step = max(_AT_ONCE // (H * S), 1)
    for first in range(0, L, step):
        last = min(first + step, L)
        weights = rows(first, last).float().abs()
        entropy += torch.special.entr(weights).sum((1, 2))
        row_max[:, first:last] = weights.amax(2)
        _fold(thumbnails, first, small, weights)
        for head, columns in enumerate(hidden):
            if columns:
                if size > 1:
                    _fold(sinks[head][None], first, size, weights[head : head + 1, :, list(columns)], across=1)
                weights[head, :, list(columns)] = 0
        bare_max[:, first:last] = weights.amax(2)
        if size > 1:
            _fold(pooled, first, size, weights)
    entropy /= max(L, 1)
    return Overview(entropy, row_max, bare_max, codes(thumbnails), codes(pooled), tuple(map(codes, sinks)))


def summary_thumbnail(run: AttentionSummary) -> Level:
    """Return the level of a summary's pyramid that serves as a thumbnail."""
    levels = run.pyramid()
    return next((each for each in levels if max(each.max.shape[2:]) <= _THUMBNAIL), levels[-1])


def summary_overview(run: AttentionSummary, batch: int, hidden: Sequence[Sequence[int]]) -> Overview:
    """Return the overview of a summary; the blocks of its pyramid include sinks."""
    top, base = run.topk(run.k), run.pyramid()[0].max[batch]
    weights, keys = top.weights[batch], top.indices[batch]
    bare = torch.stack([
        each.masked_fill(torch.isin(at, torch.tensor(list(columns), dtype=at.dtype)), 0.0).amax(-1)
        for each, at, columns in zip(weights, keys, hidden)
    ])  # fmt: skip
    sinks = tuple(torch.zeros(base.shape[1], len(columns), dtype=torch.uint8) for columns in hidden)
    entropy, small = run.entropy()[batch].mean(-1), summary_thumbnail(run).max[batch]
    return Overview(entropy, weights.amax(-1), bare, codes(small), codes(base), sinks)


def _fold(into: Tensor, first: int, size: int, weights: Tensor, across: int | None = None) -> None:
    """Update the largest weights of blocks with more rows."""
    across = size if across is None else across
    blocks = F.pad(weights, (0, -weights.shape[-1] % across)).unflatten(-1, (-1, across)).amax(-1)
    lead = first % size  # earlier rows of the first block
    blocks = F.pad(blocks, (0, 0, lead, -(lead + blocks.shape[1]) % size)).unflatten(1, (-1, size)).amax(2)
    at = slice(first // size, first // size + blocks.shape[1])
    torch.maximum(into[:, at], blocks, out=into[:, at])


# The page for records or alignments: one HTML file that needs no network ----------------------------------------------


#: The footer of every page.
HONEST = (
    "A weight shows how much of a value enters a sum, not why a model gives an answer: "
    "test what a picture suggests with regard.inspect.ablate."
)
#: The most characters of data in one HTML file.
_LONGEST = 400 << 20


def render_html(
    shown: Recording | Sequence[Recording] | Sequence[Alignment], *, heading: str = "", note: str = "", batch: int = 0
) -> str:
    """Return an interactive HTML page that shows attention, in one file that needs no network.

    It contains queries and keys, or weights, and computes the visible part of a matrix of any size. Texts are never
    run as code, and the page makes no requests.

    Parameters
    ----------
    shown : Record, or sequence of Record or of Alignment
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
    data = describe_page(shown, heading=heading, note=note, batch=batch)
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
    shown: Recording | Sequence[Recording] | Sequence[Alignment], path: str | Path, *, heading: str = "",
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
    shown: Recording | Sequence[Recording] | Sequence[Alignment], *, heading: str = "", note: str = "", batch: int = 0
) -> PageData:
    """Return the data of a page for records or alignments."""
    if isinstance(shown, Recording):
        shown = [shown]
    if all(isinstance(each, Alignment) for each in shown):
        shown = drawable(shown, "page")  # type: ignore[arg-type]
        title = "Alignments"
    else:
        title = " and ".join(each.title for each in shown if each.title) or "Attention"
    return page_data(shown, title=heading or title, note=f"{note} {HONEST}".strip(), batch=batch)


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
