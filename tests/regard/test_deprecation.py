"""Deprecated names: they warn, work as before, and go when they were said to go."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import regard
from regard._utils.deprecation import deprecated

ROOT = Path(__file__).parents[2]


def test_a_function_warns_where_it_is_called_and_works() -> None:
    @deprecated("regard.new", removed_in="99.0")
    def old(x: int, *, y: int = 1) -> int:
        """Return a sum."""
        return x + y

    with pytest.warns(
        DeprecationWarning, match=r"old is deprecated and will be removed in 99\.0: use regard\.new\."
    ) as found:
        assert old(2, y=3) == 5
    assert found[0].filename == __file__
    assert list(inspect.signature(old).parameters) == ["x", "y"]
    assert (old.__doc__ or "").startswith("Return a sum.") and "Use regard.new" in (old.__doc__ or "")


def test_a_class_warns_when_it_is_made_and_stays_a_class() -> None:
    @deprecated("regard.New", removed_in="99.0")
    class Old:
        """A pair."""

        def __init__(self, x: int) -> None:
            self.x = x

    class Derived(Old):
        pass

    with pytest.warns(DeprecationWarning, match="use regard.New"):
        assert Old(2).x == 2
    with pytest.warns(DeprecationWarning, match="use regard.New"):
        assert isinstance(Derived(3), Old)
    assert "deprecated" in (Old.__doc__ or "")


def test_nothing_outlives_the_release_that_removes_it() -> None:
    now, late = tuple(map(int, regard.__version__.split(".")[:2])), []
    for folder in ("src", "lab/src"):
        for path in (ROOT / folder).rglob("*.py"):
            code = re.sub(r"^ *(>>>|\.\.\.) .*$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
            releases = re.findall(r"@deprecated\([^)]*removed_in=\"([\d.]+)\"", code)
            late += [path for release in releases if tuple(map(int, release.split("."))) <= now]
    assert late == []
