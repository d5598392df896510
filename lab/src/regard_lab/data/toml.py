"""TOML files of options, read with limits."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from regard._utils.errors import rejected
from regard._utils.files import read_bytes

#: Maximum size of an options file in bytes; maximum nesting of tables and arrays.
_LARGEST, _DEPTH = 1 << 20, 8


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return what a TOML file says, or raise ValueError in one sentence."""
    try:
        return parsed_toml(read_bytes(path, "options", _LARGEST).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise rejected("options", str(path), "be TOML", f"something else ({error})") from None


def parsed_toml(text: str) -> dict[str, Any]:
    """Return what TOML says; raise tomllib.TOMLDecodeError where it is none, or nested beyond all options there are."""
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise tomllib.TOMLDecodeError("nested too deeply") from None
    except ValueError as error:  # such as an integer of thousands of digits
        raise tomllib.TOMLDecodeError(str(error)) from None
    level: list[Any] = [table]
    for _ in range(_DEPTH):
        level = [each for outer in level for each in (outer.values() if isinstance(outer, dict) else outer)]
        if any(isinstance(each, int) and each.bit_length() > 63 for each in level):
            raise tomllib.TOMLDecodeError("an integer of more than 64 bits")
        level = [each for each in level if isinstance(each, (dict, list))]
    if level:
        raise tomllib.TOMLDecodeError("nested too deeply")
    return table
