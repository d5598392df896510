"""What the engines' tests share: tiles so small that a dozen keys cross every border."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from regard.engines import sdpa as query_blocks
from regard.engines import tiles


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Cut what streams into tiles of a few rows and columns."""

    def cut(size: int = 1, side: int = 4) -> None:
        monkeypatch.setattr(tiles, "TILE_SIZE", size)
        monkeypatch.setattr(tiles, "TILE_SIDE", side)

    return cut


@pytest.fixture
def small_strips(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Cut structured masks into small strips, ranges and runs."""

    def cut(strip: int = 4, block: int = 3, full_run: int = 2, masked_run: int = 2) -> None:
        for name, value in (("ROWS", strip), ("BLOCK", block), ("FULL_RUN", full_run), ("MASKED_RUN", masked_run)):
            monkeypatch.setattr(query_blocks, name, value)

    return cut
