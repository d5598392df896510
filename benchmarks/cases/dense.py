"""Without a mask: the call that torch has, and a step of decoding."""

from __future__ import annotations

import torch

from benchmarks.cases.contenders import by_regard, by_torch, seeded
from benchmarks.registry import Case, Goal, Point, register
from benchmarks.work import Visible, Work

SDPA = "torch SDPA"


def _causal(size: int) -> Visible:
    return lambda rows: (torch.arange(size) <= rows.unsqueeze(-1))[None, None]


def _plain(point: Point) -> Work:
    return Work(*seeded(*[(1, 8, point.size, 64)] * 3), backward=point.backward)


def _tiny(point: Point) -> Work:
    visible = _causal(point.size) if point.variant else None
    return Work(*seeded(*[(1, 1, point.size, 8)] * 3), backward=point.backward, visible=visible)


#: The dtypes of a cache.
CACHES = {"": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _decode(point: Point) -> Work:
    keys, dtype = (1, 8, point.size, 128), CACHES[point.variant]
    return Work(*(t.to(dtype) for t in seeded((1, 32, 1, 128), keys, keys)))


register(
    Case(
        name="plain",
        title="Scaled dot products without a mask, 8 heads of 64",
        unit="queries and keys",
        build=_plain,
        contenders={SDPA: by_torch(), "regard": by_regard()},
        baseline=SDPA,
        points=(Point(2048), Point(2048, backward=True)),
        quick=32,
        goals=(Goal("plain", "time", 1.03, 2048), Goal("plain-backward", "time", 1.03, 2048, backward=True)),
    )
)

register(
    Case(
        name="tiny",
        title="A tiny call: one head of 8",
        unit="queries and keys",
        build=_tiny,
        contenders={
            SDPA: by_torch(lambda work: {"is_causal": work.visible is not None}),
            "regard": by_regard(lambda work: {"is_causal": work.visible is not None}),
        },
        baseline=SDPA,
        points=(Point(8), Point(8, backward=True), Point(8, variant="is_causal=True")),
        quick=4,
        goals=(Goal("tiny", "overhead", 10, 8),),
        bound="",
    )
)

register(
    Case(
        name="gqa-decode",
        title="One step of decoding: 32 query heads, 8 key heads of 128, one query",
        unit="keys",
        build=_decode,
        contenders={
            SDPA: by_torch(lambda _: {"enable_gqa": True}),
            "regard": by_regard(lambda _: {"enable_gqa": True}),
        },
        baseline=SDPA,
        points=tuple(Point(16384, variant=dtype) for dtype in CACHES),
        quick=32,
        goals=(Goal("decode", "speed", 1.3, 16384, share=0.8),),
        bound="bytes",
        notes="The limit is reading keys and values once, at the rate of a copy.",
    )
)
