"""The one error template: which argument of which function, what was expected, what came."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from types import FunctionType

import numpy as np
import torch
from torch import Tensor


class RegardWarning(UserWarning):
    """Something the caller should know, though the result is right."""


def rejected(function: str, argument: str, expected: str, got: object, kind: type[Exception] = ValueError) -> Exception:
    """Return the error to raise, in the one template.

    Examples
    --------
    >>> rejected("attention", "dropout_p", "be in [0, 1]", 2.0)
    ValueError('attention: dropout_p must be in [0, 1], got 2.0.')
    """
    return kind(f"{function}: {argument} must {expected}, got {got}.")


def unknown_name(function: str, argument: str, name: str, known: Iterable[str]) -> Exception:
    """Return the error for a name that no table has, with the nearest name that one has."""
    known = sorted(known)
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return rejected(function, argument, f"be one of {', '.join(map(repr, known))}", f"{name!r}{hint}")


def described(value: object) -> str:
    """Return what a value is, for an error message."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{'an' if dtype.startswith('int') else 'a'} {dtype} tensor of shape {shape(value)}"
    if isinstance(value, type):
        return f"the class {value.__name__} (make an instance: {value.__name__}(...))"
    if isinstance(value, np.ndarray):
        return f"a numpy {value.dtype} array (torch.from_numpy makes it a tensor)"
    if value is None or isinstance(value, (int, float, str, np.number, torch.dtype)):
        return repr(value)
    if isinstance(value, FunctionType):
        return f"the function {value.__name__}"
    return f"an object of type {type(value).__name__}"


def shape(tensor: object) -> str:
    """Return a tensor's shape as Python prints a tuple."""
    return str(tuple(tensor.shape))  # type: ignore[attr-defined]
