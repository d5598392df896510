"""Structured masks against the same mask as a bool matrix, and a learned bias of all pairs."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases.contenders import by_regard, by_torch, compiled, seeded
from benchmarks.registry import Call, Case, Contender, Goal, MissingError, Point, register
from benchmarks.work import Work
from regard import masks

LEFT = 256
DOCUMENTS = 32
#: Queries that select keys.
SELECTING = 512
DENSE, BIASED, FLEX = "torch SDPA, dense mask", "torch SDPA, same bias", "FlexAttention, compiled"
WINDOW = f"causal() & window({LEFT}, 0)"
FORWARD, STRIPS = "regard, forward alone", "regard, strips of torch SDPA"
MADE_BEFORE = "The bool matrix is made before the clock starts; regard's tiling is part of its call."


def _window(point: Point) -> Work:
    kv = torch.arange(point.size)

    def visible(rows: Tensor) -> Tensor:
        q = rows.unsqueeze(-1)
        return ((kv <= q) & (kv >= q - LEFT))[None, None]

    return Work(*seeded(*[(1, 8, point.size, 64)] * 3), backward=point.backward, visible=visible)


def _window_mask(_: Work) -> dict[str, Any]:
    return {"attn_mask": masks.causal() & masks.window(LEFT, 0)}


def _in_strips(options: Callable[[Work], dict[str, Any]]) -> Contender:
    """Return the other way to leave out what is hidden: torch's kernel on strips of queries and the keys they see."""
    return by_regard(lambda work: {**options(work), "engine": "sdpa"})


def _documents_mask(work: Work) -> dict[str, Any]:
    return {"attn_mask": masks.document(document_ids(work.query.shape[2]))}


def document_ids(size: int) -> Tensor:
    """Return ids (size,) of documents of very different lengths."""
    count = min(DOCUMENTS, size // 2)
    cuts = torch.randperm(size - 1, generator=torch.Generator().manual_seed(3))[: count - 1] + 1
    return torch.bucketize(torch.arange(size), cuts.sort().values, right=True)


def _documents(point: Point) -> Work:
    ids = document_ids(point.size)
    return Work(
        *seeded(*[(1, 8, point.size, 64)] * 3),
        backward=point.backward,
        visible=lambda rows: (ids[rows].unsqueeze(-1) == ids)[None, None],
    )


def padded_lengths(size: int) -> Tensor:
    """Return the lengths (4,) of four sequences."""
    return (torch.tensor([1.0, 0.8, 0.55, 0.3]) * size).long()


def _causal_padding(point: Point) -> Work:
    kv = torch.arange(point.size)
    lengths = padded_lengths(point.size).view(-1, 1, 1, 1)
    return Work(
        *seeded(*[(4, 8, point.size, 64)] * 3),
        backward=point.backward,
        visible=lambda rows: (kv <= rows.unsqueeze(-1)) & (kv < lengths),
    )


def _pair_bias(point: Point) -> Work:
    query, key, value, bias = seeded(*[(8, 4, point.size, 32)] * 3, (1, 4, point.size, point.size))
    return Work(query, key, value, backward=point.backward, bias=bias)


def _bias(work: Work) -> dict[str, Any]:
    return {"attn_mask": work.bias}


@cache
def _lists(keys: int) -> Tensor:
    """Return an eighth of the keys for each of a number of queries, at random: (L, K)."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(SELECTING, keys, generator=generator).argsort(-1)[:, : keys // 8].contiguous()


def _selected(point: Point) -> Work:
    marks = torch.zeros(SELECTING, point.size, dtype=torch.bool).scatter(-1, _lists(point.size), value=True)
    query, key, value = seeded((1, 8, SELECTING, 64), *[(1, 8, point.size, 64)] * 2)
    return Work(query, key, value, backward=point.backward, visible=lambda rows: marks[rows][None, None])


def _selected_mask(work: Work) -> dict[str, Any]:
    return {"attn_mask": masks.selected(_lists(work.key.shape[2]))}


def image_window(side: int) -> int:
    """Return the window of images of this side."""
    return 13 if side >= 112 else 7


def _neighbourhood(point: Point) -> Work:
    side, window = point.size, min(image_window(point.size), point.size)
    at = torch.arange(side)
    first = (at - window // 2).clamp(0, side - window).unsqueeze(-1)
    line = (at >= first) & (at < first + window)

    def visible(rows: Tensor) -> Tensor:
        return (line[rows // side].unsqueeze(-1) & line[rows % side].unsqueeze(-2)).flatten(-2)[None, None]

    return Work(*seeded(*[(1, 4, side * side, 32)] * 3), backward=point.backward, visible=visible)


def _neighbourhood_mask(work: Work) -> dict[str, Any]:
    side = math.isqrt(work.query.shape[2])
    return {"attn_mask": masks.neighbourhood((side, side), min(image_window(side), side))}


def _flex_window(work: Work) -> Call:
    try:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    except ImportError as error:
        raise MissingError(f"this torch has no FlexAttention ({error})") from error
    if work.backward:
        raise MissingError("FlexAttention has no backward pass on the CPU")
    L, S = work.query.shape[2], work.key.shape[2]

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:  # noqa: ARG001
        return (kv_idx <= q_idx) & (kv_idx >= q_idx - LEFT)

    block_mask = create_block_mask(mask_mod, None, None, L, S, device="cpu")
    return compiled(
        work, lambda q, k, v: flex_attention(q, k, v, block_mask=block_mask), work.query, work.key, work.value
    )


register(
    Case(
        name="window",
        title=f"A causal window of {LEFT}: {WINDOW}, 8 heads of 64",
        unit="queries and keys",
        build=_window,
        contenders={
            DENSE: by_torch(),
            "regard": by_regard(_window_mask),
            FORWARD: by_regard(_window_mask, forward=True),
            STRIPS: _in_strips(_window_mask),
            FLEX: Contender(_flex_window, compiles=True),
        },
        baseline=DENSE,
        points=(
            Point(128, only=(DENSE, "regard")),
            Point(512, only=(DENSE, "regard")),
            Point(2048, only=(DENSE, "regard", FLEX)),
            Point(8192, only=(DENSE, "regard", STRIPS, FLEX)),
            Point(32768, only=("regard",)),
            *(Point(size, backward=True, only=(DENSE, "regard")) for size in (128, 512, 2048)),
            Point(8192, backward=True, rounds=5),
            Point(32768, backward=True, only=("regard",), rounds=3),
        ),
        quick=320,
        goals=(
            Goal("window-flex", "speed", 1.2, 8192, against=FLEX),
            Goal("window-backward", "backward", 2.6, 8192, backward=True, against=FORWARD),
            Goal("window-dense", "speed", 8, 8192),
            Goal("window-dense-backward", "speed", 8, 8192, backward=True),
        ),
        notes=f"{MADE_BEFORE} So are FlexAttention's block mask and its compilation.",
    )
)

register(
    Case(
        name="documents",
        title=f"{DOCUMENTS} documents in one sequence, 8 heads of 64",
        unit="queries and keys",
        build=_documents,
        contenders={
            DENSE: by_torch(),
            "regard": by_regard(_documents_mask),
            STRIPS: _in_strips(_documents_mask),
        },
        baseline=DENSE,
        points=(Point(8192), Point(8192, backward=True, rounds=5)),
        quick=160,
        goals=(Goal("documents", "speed", 15, 8192),),
        notes=MADE_BEFORE,
    )
)

register(
    Case(
        name="causal-padding",
        title="Causal, with padding: 4 sequences of 100, 80, 55 and 30 % of the length, 8 heads of 64",
        unit="queries and keys",
        build=_causal_padding,
        contenders={
            DENSE: by_torch(),
            "regard": by_regard(
                lambda work: {"attn_mask": masks.causal() & masks.padding(padded_lengths(work.query.shape[2]))}
            ),
        },
        baseline=DENSE,
        points=(Point(2048), Point(2048, backward=True)),
        quick=160,
        notes=MADE_BEFORE,
    )
)

register(
    Case(
        name="pair-bias",
        title="A bias of each head and pair, which all 8 sequences share, and its gradient: 4 heads of 32",
        unit="queries and keys",
        build=_pair_bias,
        contenders={BIASED: by_torch(_bias), "regard": by_regard(_bias)},
        baseline=BIASED,
        points=(Point(1024), Point(256, backward=True), Point(1024, backward=True)),
        quick=160,
        goals=(
            Goal("pair-bias", "speed", 1.5, 1024, backward=True),
            Goal("pair-bias-memory", "memory", 100, 1024, backward=True),
        ),
        notes="The memory goal is less than one tensor of a score for each pair of each sequence and head: 134 MB.",
    )
)

register(
    Case(
        name="selected",
        title=f"{SELECTING} queries that each see another eighth of the keys: selected(indices), 8 heads of 64",
        unit="keys",
        build=_selected,
        contenders={DENSE: by_torch(), "regard": by_regard(_selected_mask)},
        baseline=DENSE,
        points=(Point(4096), Point(16384), Point(4096, backward=True), Point(16384, backward=True)),
        quick=160,
        goals=(Goal("selected", "speed", 4.0, 16384, backward=True),),
        notes=MADE_BEFORE,
    )
)

register(
    Case(
        name="neighbourhood",
        title="The neighbourhood of each pixel, 7 × 7, or 13 × 13 in images of 112 × 112: 4 heads of 32",
        unit="side of the image",
        build=_neighbourhood,
        contenders={
            DENSE: by_torch(),
            "regard": by_regard(_neighbourhood_mask),
            STRIPS: _in_strips(_neighbourhood_mask),
        },
        baseline=DENSE,
        points=(
            Point(56),
            Point(112, rounds=5),
            *(Point(side, backward=True) for side in (56, 57)),
            Point(112, backward=True, rounds=3),
        ),
        quick=9,
        goals=(
            Goal("neighbourhood", "speed", 15, 56, backward=True),
            Goal("neighbourhood-odd", "speed", 8, 57, backward=True),
            Goal("neighbourhood-wide", "speed", 20, 112, backward=True),
        ),
        notes=f"{MADE_BEFORE} Tiles do not divide 57 × 57.",
    )
)
