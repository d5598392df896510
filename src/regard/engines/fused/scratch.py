"""Scratch memory of the kernels: how much of it a task needs, and lending it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from regard.engines.fused.families import Rows
from regard.engines.fused.kernels.fields import BAND, BLOCK, CHUNK, GROUP, PAD, ROW

#: Bytes of a scratch buffer that is kept for the next call.
KEPT = 4 << 20
#: Buffers that nobody uses, by size.
_spare: dict[int, list[Tensor]] = {}


def padded(count: int) -> int:
    """Return ``count`` rounded up to a whole number of vectors."""
    return -(-count // PAD) * PAD


class Scratch:
    """The parts of one task's scratch memory."""

    def __init__(self, sizes: dict[str, int], dtype: torch.dtype) -> None:
        self.places: dict[str, int] = {}
        place = 0
        for name, size in sizes.items():
            self.places[f"at_{name}"] = place
            place += padded(size)
        self.size, self.dtype = place, dtype

    @contextmanager
    def lent(self) -> Iterator[int]:
        """Lend the address of scratch memory; what was used before is used again, as its pages are there already."""
        size = 1 << (self.size * self.dtype.itemsize + 64).bit_length()
        spare = _spare.setdefault(size, [])
        try:
            buffer = spare.pop()
        except IndexError:
            buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        try:
            yield -(-buffer.data_ptr() // 64) * 64
        finally:
            if size <= KEPT and len(spare) < torch.get_num_threads():
                spare.append(buffer)


def scratch_sizes(rows: Rows, V: int, backward: bool, value_lanes: bool) -> dict[str, int]:
    """Return how many numbers each part of the scratch memory of a pass holds."""
    C = rows.width
    v_chunks, c_chunks = -(-V // CHUNK), -(-C // CHUNK)
    spare = 4 * CHUNK
    key = rows.planes * C * ROW + ROW + (4 + 2 * BLOCK // GROUP) * C
    common = {"score": (2 * GROUP + 1) * ROW, "query": GROUP * C}
    if not backward:
        value = v_chunks * ROW * CHUNK + spare if value_lanes else V * ROW
        return common | {
            "key": key,
            "weight": GROUP * ROW,
            "value": value,
            "state": 4 * BLOCK,
            "output": max(v_chunks, 1) * BLOCK * CHUNK,
        }
    linear = rows.family == "dot"
    sides = c_chunks * BLOCK * CHUNK if linear else 0
    return common | {
        "key": key + (c_chunks * ROW * CHUNK + spare if linear else 0),
        "value": V * ROW,
        "state": v_chunks * BLOCK * CHUNK,
        "output": v_chunks * ROW * CHUNK + spare,
        "rows": sides,
        "d_key": c_chunks * ROW * CHUNK + spare if linear else C * ROW,
        "weight": BAND * ROW,
        "d_score": BAND * ROW,
        "d_query": sides,
        "delta": BLOCK,
    }
