"""What an argument must be: small constraints, each with its sentence, declared where the argument is used.

They are for arguments what ``_parameter_constraints`` are in scikit-learn. A constraint is called with the name of the
function (or with the layer) whose argument it is, the argument's name and the value.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from regard._utils.errors import described, rejected, shape, unknown_name

#: The types of integer tensors.
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Constraint(ABC):
    """A condition on a value, and its sentence."""

    #: What stands behind "must".
    expected: str

    def __call__(self, owner: object, argument: str, value: Any) -> Any:
        """Return the value; raise TypeError where it is of another kind, ValueError where it is another value."""
        is_kind = self.is_kind(value)
        if is_kind and self.allows(value):
            return self.normalized(value)
        function = owner if isinstance(owner, str) else type(owner).__name__
        raise self.error(function, argument, value, ValueError if is_kind else TypeError)

    def error(self, function: str, argument: str, value: Any, kind: type[Exception]) -> Exception:
        """Return the error for a value that is wrong."""
        return rejected(function, argument, self.expected, described(value), kind)

    @abstractmethod
    def is_kind(self, value: Any) -> bool:
        """Return whether a value has the right type."""

    def allows(self, value: Any) -> bool:  # noqa: ARG002
        """Return whether a value of the right type is right."""
        return True

    def normalized(self, value: Any) -> Any:
        """Return a value that is right as everybody has it from here on."""
        return value


class Flag(Constraint):
    """A bool."""

    expected = "be a bool"

    def is_kind(self, value: Any) -> bool:
        return isinstance(value, bool)


class Integer(Constraint):
    """A whole number of at least ``low``."""

    def __init__(self, low: int, note: str = "") -> None:
        self.low, self.expected = low, f"be an int of at least {low}{note}"

    def is_kind(self, value: Any) -> bool:
        return isinstance(value, Integral) and not isinstance(value, bool)

    def allows(self, value: Any) -> bool:
        return bool(value >= self.low)

    def normalized(self, value: Any) -> int:
        return int(value)


class Interval(Constraint):
    """A finite number between two bounds, which belong to it as the brackets ``closed`` say: ``"[]"``, ``"(]"``, ...

    ``noun`` is what the number is called, ``note`` what else may be said.
    """

    def __init__(self, low: float, high: float, closed: str, noun: str = "number", note: str = "") -> None:
        self.low, self.high, self.closed = low, high, closed
        if high < math.inf:
            text = f"a {noun} in {closed[0]}{low:g}, {high:g}{closed[1]}"
        elif closed[0] == "[":
            text = f"a finite {noun} of at least {low:g}"
        elif low == -math.inf:
            text = f"a finite {noun}"
        else:
            text = f"a positive finite {noun}" if low == 0 else f"a finite {noun} above {low:g}"
        self.expected = f"be {text}{note}"

    def is_kind(self, value: Any) -> bool:
        return isinstance(value, Real) and not isinstance(value, bool)

    def allows(self, value: Any) -> bool:
        ends = (self.closed[0] == "[" and value == self.low) or (self.closed[1] == "]" and value == self.high)
        return bool(ends or self.low < value < self.high)

    def normalized(self, value: Any) -> float:
        return float(value)


class Options(Constraint):
    """One of a few values."""

    def __init__(self, known: Iterable[Any]) -> None:
        self.known = tuple(known)
        self.expected = f"be one of {', '.join(sorted(map(repr, self.known)))}"

    def is_kind(self, value: Any) -> bool:
        return isinstance(value, tuple({type(each) for each in self.known})) and not isinstance(value, bool)

    def allows(self, value: Any) -> bool:
        return value in self.known

    def error(self, function: str, argument: str, value: Any, kind: type[Exception]) -> Exception:
        if isinstance(value, str) and all(isinstance(each, str) for each in self.known):
            return unknown_name(function, argument, value, self.known)
        return super().error(function, argument, value, kind)


class TensorOf(Constraint):
    """A tensor of floats, or of integers, in one of some shapes: of sizes, and of names of sizes that are free."""

    def __init__(self, *shapes: tuple[str | int, ...], integer: bool = False) -> None:
        self.shapes, self.integer = shapes, integer

    def is_kind(self, value: Any) -> bool:
        if not isinstance(value, Tensor):
            return False
        return value.dtype in INTEGERS if self.integer else value.is_floating_point()

    def allows(self, value: Any) -> bool:
        return any(
            len(shape) == value.dim() and all(isinstance(n, str) or n == size for n, size in zip(shape, value.shape))
            for shape in self.shapes
        )

    def error(self, function: str, argument: str, value: Any, kind: type[Exception]) -> Exception:
        # The text is made here alone: where calls are traced, sizes may be symbols.
        wanted = " or ".join(f"({', '.join(map(str, s))}{',' * (len(s) == 1)})" for s in self.shapes)
        if kind is ValueError:
            return rejected(function, argument, f"have shape {wanted}", shape(value))
        return rejected(function, argument, f"be {'an integer' if self.integer else 'a float'} tensor {wanted}",
                        described(value), kind)  # fmt: skip


def floats(owner: object, argument: str, value: Any, *sizes: str | int) -> Tensor:
    """Return a float tensor of one shape, as :class:`TensorOf` takes it, or raise."""
    return TensorOf(sizes)(owner, argument, value)


def lengths(owner: object, argument: str, value: Any, batch: int) -> Tensor:
    """Return an integer tensor (B,) of one length for each sequence, or raise."""
    return TensorOf((batch,), integer=True)(owner, argument, value)


flag = Flag()
size = Integer(1)
positive = Interval(0, math.inf, "()")
probability = Interval(0, 1, "[]", "probability")
