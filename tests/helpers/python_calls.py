"""How many Python functions of the package a call runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import regard


def python_calls(function: Callable[[], object]) -> int:
    """Return the number of calls of Python functions of ``regard`` in the second call of a function."""
    count, package = 0, str(Path(regard.__file__).parent)

    def watch(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(package)

    function()
    sys.setprofile(watch)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count
