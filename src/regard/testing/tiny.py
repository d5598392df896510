"""Tiny tiles: with them, a problem of a dozen keys crosses every border that one of thousands does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from regard import _plan
from regard.engines import aux_pass, query_blocks, tiles
from regard.normalizers import threshold


@contextmanager
def tiny_tiles(rows: int = 4, cols: int = 4) -> Iterator[None]:
    """Make engines that cut a problem into tiles cut it into tiles of this size, for a ``with`` block.

    Examples
    --------
    >>> import torch, regard
    >>> q = torch.randn(1, 1, 10, 3)
    >>> with tiny_tiles(3, 5):
    ...     regard.attention(q, q, q, engine="streaming").shape
    torch.Size([1, 1, 10, 3])
    """

    def shape(*_: Any, **__: Any) -> tuple[int, int]:
        return rows, cols

    with (
        patch.object(tiles, "tile_shape", shape),
        patch.multiple(query_blocks, ROWS=rows, BLOCK=max(cols // 2, 1), FULL_RUN=2, MASKED_RUN=3),
        patch.object(aux_pass, "GROUP", 2),
        patch.multiple(threshold, FEW=4, GROUP=2),
    ):
        _plan.forget()
        try:
            yield
        finally:
            _plan.forget()
