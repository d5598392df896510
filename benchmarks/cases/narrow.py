"""16-bit attention under a causal mask, as in mixed-precision training on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.cases.contenders import by_regard, by_torch, seeded
from benchmarks.registry import Case, Goal, Point, register
from benchmarks.work import Work
from regard import masks

TORCH, TOKENS, HEADS, WIDTH = "torch SDPA", 2048, 8, 64
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
SIZES = (32, 256, 1024)


def _build(point: Point) -> Work:
    ends = seeded(*[(TOKENS // point.size, HEADS, point.size, WIDTH)] * 3)
    query, key, value = (end.to(DTYPES[point.variant]) for end in ends)
    positions = torch.arange(point.size)

    def visible(rows: Tensor) -> Tensor:
        return (positions <= rows.unsqueeze(-1))[None, None]

    return Work(query, key, value, backward=point.backward, visible=visible, kernel=point.variant)


register(
    Case(
        name="narrow",
        title=f"16-bit causal attention: {TOKENS:,} tokens in sequences, {HEADS} heads of {WIDTH}",
        unit="tokens of a sequence",
        build=_build,
        contenders={
            TORCH: by_torch(lambda _: {"is_causal": True}),
            "regard": by_regard(lambda _: {"attn_mask": masks.causal()}),
        },
        baseline=TORCH,
        points=tuple(
            Point(size, backward=backward, variant=dtype)
            for dtype in DTYPES
            for size in SIZES
            for backward in (False, True)
        ),
        quick=32,
        goals=tuple(
            Goal(f"narrow-{dtype}-{size}", "time", 0.8, size, backward=True, against=TORCH, variant=dtype)
            for dtype in DTYPES
            for size in SIZES
        ),
        bound="",
    )
)
