"""What every test has in common."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from regard import _plan


@pytest.fixture(autouse=True)
def _no_plan_of_another_test() -> Iterator[None]:
    """Plans are made by what tests patch: sizes of tiles, engines, costs."""
    _plan.forget()
    yield
    _plan.forget()
