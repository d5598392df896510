"""What every test has in common, and the quick tier."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest

from regard import _plan

#: Doctests are not sought here: two files of this name cannot both be modules.
collect_ignore = ["conftest.py"]

#: Cases of one test that the quick tier runs, the first and the last of them among these.
FEW = 2


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of the quick tier."""
    parser.addoption("--quick", action="store_true", help="a few cases of each test, and none that is marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the quick tier does not run."""
    if not config.getoption("--quick"):
        return
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    chosen = set()
    for each in cases.values():
        fast = [item for item in each if item.get_closest_marker("slow") is None]
        step = max(len(fast) - 1, 1) / max(FEW - 1, 1)
        chosen |= {fast[round(i * step)] for i in range(min(FEW, len(fast)))}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


@pytest.fixture(autouse=True)
def _no_plan_of_another_test() -> Iterator[None]:
    """Plans are made by what tests patch: sizes of tiles, engines, costs."""
    _plan.forget()
    yield
    _plan.forget()
