"""A Triton kernel with the types of its arguments, to compile it ahead of time for a device that is not there."""

from __future__ import annotations

from typing import Any, NamedTuple


class Compilation(NamedTuple):
    """What ``triton.compiler.ASTSource`` takes.

    Attributes
    ----------
    name : str
    kernel : triton.JITFunction
    signature, constants : dict
        The type of each argument, and the values of those that are constant.
    attributes : dict
        Which arguments are multiples of 16.
    warps, stages : int
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int, ...], Any]
    warps: int
    stages: int
