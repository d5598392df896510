"""The error templates: an argument with its expected and actual value, and an argument without effect."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from types import FunctionType
from typing import Self

import numpy as np
import torch
from torch import Tensor

#: Maximum number of characters of a quoted value.
_LONGEST = 500


class RegardWarning(UserWarning):
    """A condition that the caller should know about; the result is still correct."""


@dataclass(eq=False, repr=False)
class Rejection:
    """The parts of an error message; the command line formats them in its own way."""

    function: str
    argument: str
    expected: str
    got: str

    def worded(self, function: str, named: Callable[[str], str]) -> str:
        """Return the message with other names for the function and its arguments."""
        return f"{function}: {named(self.argument)} must {self.expected}, got {self.got}."

    def within(self, section: str) -> Self:
        """Return the same rejection with argument names that are prefixed with a section."""
        return replace(self, argument=f"{section}.{self.argument}")

    def __str__(self) -> str:
        return self.worded(self.function, str)


@dataclass(eq=False, repr=False)
class WithoutEffect(Rejection):
    """The parts of the message for an argument that has no effect, and the argument to set, if any."""

    where: str
    needed: str

    def worded(self, function: str, named: Callable[[str], str]) -> str:
        remedy = f"; set {named(self.needed)}" if self.needed else ""
        return f"{function}: {named(self.argument)} has no effect {self.where}{remedy}."

    def within(self, section: str) -> Self:
        return replace(super().within(section), needed=self.needed and f"{section}.{self.needed}")


def rejected(function: str, argument: str, expected: str, got: object, kind: type[Exception] = ValueError) -> Exception:
    """Return the error to raise for an invalid argument.

    Examples
    --------
    >>> rejected("attention", "dropout_p", "be in [0, 1]", 2.0)
    ValueError('attention: dropout_p must be in [0, 1], got 2.0.')
    """
    return _exception(Rejection(function, _cut(argument), expected, _cut(str(got))), kind)


def without_effect(function: str, argument: str, where: str, got: object, needed: str = "") -> Exception:
    """Return the error to raise for an argument that has no effect, with the argument that is needed, if any.

    Examples
    --------
    >>> without_effect("sampling", "top_k", "at temperature 0", 5, "temperature")
    ValueError('sampling: top_k has no effect at temperature 0; set temperature.')
    """
    return _exception(WithoutEffect(function, argument, f"be left out {where}", str(got), where, needed), ValueError)


def rejection(error: BaseException) -> Rejection | None:
    """Return the parts of an error made by :func:`rejected`; None for other errors."""
    return getattr(error, "rejection", None)


@contextmanager
def in_section(section: str) -> Iterator[None]:
    """Prefix argument names in errors with a section: ``clip`` in the section ``training`` is ``training.clip``.

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
        parts = rejection(error)
        if parts is None or "." in parts.argument:
            raise
        raise _exception(parts.within(section), type(error)) from None


def _cut(text: str) -> str:
    """Truncate a quoted value, which may be as long as a file."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _exception(parts: Rejection, kind: type[Exception]) -> Exception:
    error = kind(str(parts))
    error.rejection = parts  # type: ignore[attr-defined]
    return error


def unknown_name(function: str, argument: str, name: str, known: Iterable[str]) -> Exception:
    """Return the error for an unknown name, with the closest known name as a hint."""
    known = sorted(known)
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return rejected(function, argument, f"be one of {', '.join(map(repr, known))}", f"{name!r}{hint}")


def described(value: object) -> str:
    """Describe a value for an error message."""
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
    """Format a tensor's shape as a tuple."""
    return str(tuple(tensor.shape))  # type: ignore[attr-defined]


# Failed allocations ---------------------------------------------------------------------------------------------------


@contextmanager
def fitting(sentence: str, kind: type[Exception] = MemoryError) -> Iterator[None]:
    """Raise an error of this kind with this message if an allocation fails."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_memory_error(error):
            raise
        raise kind(sentence) from error


def is_memory_error(error: Exception) -> bool:
    """Whether an allocation failed."""
    text = str(error).lower()
    typed = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return typed or "can't allocate memory" in text or "out of memory" in text


def available_memory() -> int | None:
    """Return the available memory in bytes, without swapping; None if the system does not report it."""
    try:
        with Path("/proc/meminfo").open() as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None
