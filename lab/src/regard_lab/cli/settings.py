"""``--set NAME=VALUE``: any option of a command by its place."""

from __future__ import annotations

import tomllib
from typing import Any

from regard._utils.errors import rejected
from regard_lab.data.toml import parsed_toml


def parse_setting(text: str, example: str = "training.clip=0.5") -> tuple[str, Any]:
    """Return the place and the value of ``NAME=VALUE``; a value that is no TOML is text."""
    name, mark, value = text.partition("=")
    if not mark or not name.strip():
        raise rejected("train", "--set", f"be NAME=VALUE, such as {example}", repr(text))
    try:
        return name.strip(), parsed_toml(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name.strip(), value.strip()
