"""Checks of arguments, and the lookup, that several masks share."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from regard._errors import described, rejected


def as_int(function: str, argument: str, value: Any, least: int | None = None, note: str = "") -> int:
    """Return an int of at least ``least``, or raise."""
    expected = "be an int" if least is None else f"be an int of at least {least}{note}"
    if isinstance(value, bool) or not isinstance(value, (Integral, torch.SymInt)):
        raise rejected(function, argument, expected, described(value), TypeError)
    if least is not None and value < least:
        raise rejected(function, argument, expected, value)
    return value if isinstance(value, torch.SymInt) else int(value)  # type: ignore[return-value]


def int_tensor(function: str, argument: str, value: Any, expected: str, dims: tuple[int, ...]) -> Tensor:
    """Return an integer tensor of one of these numbers of dimensions, or raise."""
    if not isinstance(value, Tensor) or is_float(value) or value.dtype == torch.bool:
        raise rejected(function, argument, f"be {expected}", described(value), TypeError)
    if value.dim() not in dims:
        raise rejected(function, argument, f"be {expected}", described(value))
    return value


def is_float(tensor: Tensor) -> bool:
    """Whether a tensor holds real or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def lookup(table: Tensor, *index: Tensor) -> Tensor:
    """Return ``table[index]``, one index per dimension; a dimension of size 1 is shared and needs none.

    Unlike ``table[index]`` it reads no index's value in Python, so that 0-d indices work under vmap.
    """
    shared = [dim for dim, size in enumerate(table.shape) if size == 1]
    kept = [i for dim, i in enumerate(index) if dim not in shared]
    if shared:  # by number: a size that is known only when an exported program runs may be 1 then
        table = table.squeeze(shared)
    return torch.ops.aten.index.Tensor(table, kept) if kept else table
