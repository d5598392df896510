"""How a function says that it is a kernel; free of Numba, so that reading it costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, TypeVar, cast, get_args

Type = Literal["real*", "int*", "byte*", "real", "int"]
TYPES: Final = frozenset(get_args(Type))

Function = TypeVar("Function", bound=Callable[..., None])


def kernel(*types: Type) -> Callable[[Function], Function]:
    """
    Mark a plain function as a kernel that ``compiler.load`` can compile.

    Parameters
    ----------
    types : {"real*", "int*", "byte*", "real", "int"}
        One per argument: pointers to the compute dtype (float32 or float64), to int64 and to uint8; a scalar of the
        compute dtype, and an int64.

    Returns
    -------
    Callable
        A decorator that stores `types` as the function's ``signature`` and leaves the function as it is.
    """
    unknown = [type for type in types if type not in TYPES]
    assert not unknown, f"a kernel's types must be among {sorted(TYPES)}, got {unknown} instead"

    def mark(function: Function) -> Function:
        cast(Any, function).signature = types
        return function

    return mark
