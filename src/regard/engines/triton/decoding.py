"""Launch the kernels of a step of decoding, over keys that lie in a row or in pages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from regard.engines.triton.families import DOT, SOFTMAX
from regard.engines.triton.launch import (
    LOG2_E,
    Setting,
    is_interpreted,
    kernels,
    padded,
    reals,
    run_kernel,
    strides,
)
from regard.engines.triton.visible import VisibleKeys

#: The most queries of a step, and how many times as many keys it has at least.
MOST_QUERIES, KEYS = 16, 4
#: The most splits of the keys, and programs of a processor that there should be.
MOST_SPLITS, PROGRAMS = 64, 4
#: Processors that Triton's interpreter is said to have.
INTERPRETED_PROCESSORS = 3


@dataclass(frozen=True)
class Pages:
    """Where the keys of each sequence are.

    Attributes
    ----------
    table : Tensor (B, N), int32
        The pages of each sequence, in order; those that no query sees may be any.
    size : int
        Keys of a page.
    """

    table: Tensor
    size: int


@dataclass(frozen=True)
class StepShape:
    """The sizes of the tiles of a step.

    Attributes
    ----------
    rows, cols : int
        Queries of a group and keys of a tile.
    warps, stages : int
    """

    rows: int
    cols: int
    warps: int
    stages: int


INTERPRETED_SHAPE = StepShape(4, 4, 4, 1)


def is_step(family: int | None, rule: int, dropout_p: float, L: int, S: int) -> bool:
    """Whether the kernels of decoding run a call of L queries and S keys."""
    return family == DOT and rule == SOFTMAX and dropout_p == 0 and L <= MOST_QUERIES and S >= KEYS * L


def step_shape(dtype: torch.dtype, C: int, V: int, queries: int, paged: bool = False) -> StepShape:
    """Return the tiles for this many queries of a group.

    Triton shares the stages of a loop among loads of pages and of the keys in them.
    """
    width, rows = max(padded(C), padded(V), 64), 16 if queries <= 16 else 32
    if dtype.itemsize == 8:
        return StepShape(16, 16, 4, 1)
    cols = (1 << 16) // (rows * width)
    if dtype.itemsize == 4:
        return StepShape(rows, max(cols // 2, 16), 8 if width > 128 else 4, 2)
    stages = 4 if width > 64 else 3
    return StepShape(rows, max(cols, 16), 8 if rows * width > 4096 else 4, stages + 1 if paged else stages)


def run_step(
    setting: Setting, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, visible: VisibleKeys,
    pages: Pages | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output (B, H, L, V) and the log-sum-exp (B, H, L) of keys.

    Parameters
    ----------
    key, value : Tensor (B, G, S, C) and (B, G, S, V), or with ``pages`` (pages, G, size, C) and (pages, G, size, V)
    visible : VisibleKeys
        An interval for each query, a bias, or both.
    """
    (B, H, L, C), G, V = query.shape, key.shape[1], value.shape[-1]
    S, R = key.shape[2] if pages is None else pages.table.shape[1] * pages.size, H // G
    wide = torch.float64 if value.dtype == torch.float64 else torch.float32
    biased, tl = visible.bias is not None, kernels().tl
    shape = INTERPRETED_SHAPE if is_interpreted() else step_shape(value.dtype, C, V, R * L, pages is not None)
    blocks = -(-R * L // shape.rows)
    splits = splits_of(B * G * blocks, -(-S // shape.cols), _processors(query.device))
    parts = query.new_empty(B, H, L, splits, V, dtype=wide)
    statistics = query.new_empty(B, H, L, splits, 2, dtype=wide)
    output, lse = value.new_empty(B, H, L, V), query.new_empty(B, H, L, dtype=wide)
    base_2 = setting.base_2(biased)
    shared = {
        "parts": parts, "statistics": statistics, "H": H, "L": L, "V": V, "splits": splits, "BASE2": base_2,
        "WIDE": tl.float64 if wide == torch.float64 else tl.float32, "LARGEST": torch.finfo(value.dtype).max,
        "BV": padded(V),
    }  # fmt: skip
    narrow = value.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    given: dict[str, Any] = {
        **shared, "query": query, "key": key, "value": value, "table": query if pages is None else pages.table,
        "start": query if visible.start is None else visible.start,
        "stop": query if visible.stop is None else visible.stop,
        "bias": query if visible.bias is None else visible.bias,
        "p_b": 0 if pages is None else pages.table.stride(0), "R": R, "S": S, "C": C, "blocks": blocks,
        **reals({"scale": setting.scale * (LOG2_E if base_2 else 1.0), "softcap": setting.softcap or 1.0}, wide),
        "SOFTCAP": bool(setting.softcap), "SPANS": visible.start is not None, "BIAS": biased,
        "PAGE": 0 if pages is None else pages.size, "PRECISION": "tf32" if narrow else "ieee",
        "BM": shape.rows, "BN": shape.cols, "BC": padded(C),
        **strides("s", visible.start, 3), **strides("b", visible.bias, 4),
    }  # fmt: skip
    for letter, tensor in zip("qkv", (query, key, value)):
        given.update(zip((f"{letter}_b", f"{letter}_h", f"{letter}_r", f"{letter}_c"), tensor.stride()))
    run_kernel(step_kernels().decode, B * G * blocks * splits, given, shape.warps, shape.stages)
    merged = {
        **shared, "output": output, "statistic": lse, "sink": query if sink is None else sink,
        "SINK": sink is not None, "BS": 1 << (splits - 1).bit_length(), **strides("z", sink, 2),
    }  # fmt: skip
    run_kernel(step_kernels().merge, B * H * L, merged, 4, 1)
    return output, lse


def splits_of(programs: int, tiles: int, processors: int) -> int:
    """Return the number of splits of keys: enough for all processors, and no more than tiles."""
    return max(min(MOST_SPLITS, tiles, -(-PROGRAMS * processors // programs)), 1)


@cache
def step_kernels() -> Any:
    """Return the module of the kernels, which imports Triton."""
    return import_module("regard.engines.triton.decoding_kernels")


@cache
def _processors(device: torch.device) -> int:
    if device.type == "cpu":
        return INTERPRETED_PROCESSORS
    found = torch.get_device_module(device.type).get_device_properties(device)
    return int(getattr(found, "multi_processor_count", 0) or found.max_compute_units)
