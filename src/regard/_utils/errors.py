"""The one error template: which argument of which function, what was expected, what came."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import FunctionType

import numpy as np
import torch
from torch import Tensor

#: Characters of what is named in an error.
_LONGEST = 500


class RegardWarning(UserWarning):
    """Something the caller should know, though the result is right."""


@dataclass(frozen=True)
class Rejection:
    """The parts of an error's sentence; the command line says it in its own words."""

    function: str
    argument: str
    expected: str
    got: str

    def __str__(self) -> str:
        return f"{self.function}: {self.argument} must {self.expected}, got {self.got}."


def rejected(function: str, argument: str, expected: str, got: object, kind: type[Exception] = ValueError) -> Exception:
    """Return the error to raise, in the one template.

    Examples
    --------
    >>> rejected("attention", "dropout_p", "be in [0, 1]", 2.0)
    ValueError('attention: dropout_p must be in [0, 1], got 2.0.')
    """
    return _made(Rejection(function, _cut(argument), expected, _cut(str(got))), kind)


def rejection(error: BaseException) -> Rejection | None:
    """Return what an error that :func:`rejected` made is about; None for others."""
    return getattr(error, "rejection", None)


@contextmanager
def in_section(section: str) -> Iterator[None]:
    """Name arguments by their place in a table of options: ``clip`` in the section ``training`` is ``training.clip``.

    Examples
    --------
    >>> with in_section("training"):
    ...     raise rejected("options", "clip", "be at least 0", -1)
    Traceback (most recent call last):
    ValueError: options: training.clip must be at least 0, got -1.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        told = rejection(error)
        if told is None or "." in told.argument:
            raise
        placed = Rejection(told.function, f"{section}.{told.argument}", told.expected, told.got)
        raise _made(placed, type(error)) from None


def _cut(text: str) -> str:
    """Return a text of a length that an error can have: what came may be a file's megabyte."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _made(told: Rejection, kind: type[Exception]) -> Exception:
    error = kind(str(told))
    error.rejection = told  # type: ignore[attr-defined]
    return error


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


# Turn a failed allocation into an error of one sentence ---------------------------------------------------------------


@contextmanager
def fitting(sentence: str, kind: type[Exception] = MemoryError) -> Iterator[None]:
    """Raise an error of this kind with this sentence where an allocation fails."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_memory_error(error):
            raise
        raise kind(sentence) from error


def is_memory_error(error: Exception) -> bool:
    """Whether an allocation failed."""
    text = str(error).lower()
    known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return known or "can't allocate memory" in text or "out of memory" in text


def available_memory() -> int | None:
    """Return how many bytes of memory can be had without swapping; None where the system does not say."""
    try:
        with Path("/proc/meminfo").open() as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None
