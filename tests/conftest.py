"""What every test has in common, and the tiers: all tests, the usual ones, and few for a change under way."""

from __future__ import annotations

import gc
import os
import random
from collections import defaultdict
from collections.abc import Generator, Iterator

import numpy as np
import pytest
import tiers
import torch
from _pytest.doctest import DoctestModule
from hypothesis import settings
from pairwise import covering

from regard._call import plan as _plan
from regard.engines.flex import MODE

#: Compiling FlexAttention takes ten seconds for each kind of call on a CPU: all tests but those in engines/test_flex.py
#: compute what it is documented to. It is part of the environment, so that processes started by tests do the same.
os.environ[MODE] = "uncompiled"

#: Cases of one test that the quick tier runs.
FEW = 2
GOLDEN = (5**0.5 - 1) / 2


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the tiers."""
    parser.addoption("--usual", action="store_true", help="of tests marked campaign as many cases as they keep")
    parser.addoption("--quick", action="store_true", help="a few cases of each test, and none that is marked slow")


def pytest_configure(config: pytest.Config) -> None:
    """Set how many cases tests draw that draw them."""
    whole = not (config.getoption("--quick") or config.getoption("--usual"))
    tiers.WHOLE.set(whole)
    settings.register_profile("whole", deadline=None)  # a machine may be busy
    # The same examples in each run: what fails, fails again. All tests together draw others each time.
    settings.register_profile("usual", deadline=None, max_examples=tiers.examples(100), derandomize=True)
    settings.load_profile("whole" if whole else "usual")
    gc.disable()  # until tests are collected, of which nothing is garbage


def pytest_collection_finish() -> None:
    """Spare the collector what lives as long as the process, packages and tests, and let it look less often."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Seek no doctests in files of tests, which have none: it takes as long as to read them."""
    found = yield
    return [each for each in found if not isinstance(each, DoctestModule)]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what a tier does not run."""
    quick = config.getoption("--quick")
    if not quick and not config.getoption("--usual"):
        return
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    chosen = {item for each in cases.values() for item in (_few(each) if quick else _usual(each))}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def _few(cases: list[pytest.Item]) -> list[pytest.Item]:
    mark = cases[0].get_closest_marker("quick")
    short = [item for item in cases if not any(map(item.get_closest_marker, ("slow", "campaign")))]
    return _spread(short, FEW if mark is None else mark.kwargs["keep"])


def _usual(cases: list[pytest.Item]) -> list[pytest.Item]:
    mark = cases[0].get_closest_marker("campaign")
    return cases if mark is None else _spread(cases, mark.kwargs.get("keep", 0))


def _spread(cases: list[pytest.Item], most: int) -> list[pytest.Item]:
    """Return so many of the cases: those that have the most pairs of values of parameters that none before had."""
    if len(cases) <= most or not most:
        return cases[:most]
    # In an order of the golden ratio, neighbours lie far apart: those that cover as much as the first are as good.
    order = sorted(range(len(cases)), key=lambda i: i * GOLDEN % 1)
    indices = [sorted(cases[i].callspec.indices.items()) for i in order]
    chosen = dict.fromkeys([*covering(indices, most), *range(len(cases))])
    return [cases[i] for i in sorted(order[i] for i in list(chosen)[:most])]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Let what fixtures draw not depend on which tests ran before."""
    _seed()


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


@pytest.fixture(autouse=True)
def _draws_of_its_own() -> None:
    """Let what a test draws not depend on which tests ran before, nor on which of them made the fixtures."""
    _seed()


@pytest.fixture(autouse=True)
def _no_plan_of_another_test() -> Iterator[None]:
    """Plans are made by what tests patch: sizes of tiles, engines, costs."""
    _plan.clear_plans()
    yield
    _plan.clear_plans()
