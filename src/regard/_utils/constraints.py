"""What a value must be: small constraints, each with its sentence, declared where an argument or an option is declared.

They are what ``_parameter_constraints`` are in scikit-learn. A constraint is called with the name of the function (or
with the layer) whose argument it is, the argument's name and the value. Bounds have the names of annotated-types and
pydantic: ``ge``, ``gt``, ``le``, ``lt``.
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
from regard._utils.tracing import values_unavailable

#: The types of integer tensors.
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Constraint(ABC):
    """A condition on a value, and its sentence."""

    #: The end of the error message, after "must".
    expected: str

    def __call__(self, owner: object, argument: str, value: Any) -> Any:
        """Return the value; raise TypeError for a wrong type, ValueError for a wrong value."""
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
        """Return whether a value of the right type is allowed."""
        return True

    def normalized(self, value: Any) -> Any:
        """Return an accepted value in the type that the code continues with."""
        return value


class Of(Constraint):
    """A value of one type."""

    def __init__(self, kind: type, expected: str) -> None:
        self.kind, self.expected = kind, f"be {expected}"

    def is_kind(self, value: Any) -> bool:
        return isinstance(value, self.kind)


class Texts(Of):
    """A list of strings."""

    def __init__(self) -> None:
        super().__init__(list, "a list of strings")

    def is_kind(self, value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(each, str) for each in value)


class Integer(Constraint):
    """An integer of at least ``ge`` and at most ``le``; ``note`` is added to messages."""

    def __init__(self, ge: int | None = None, le: int | None = None, note: str = "") -> None:
        self.ge, self.le, self.note = ge, le, note

    @property
    def expected(self) -> str:  # type: ignore[override]
        if self.le is not None:
            return f"be an int from {self.ge:,} to {self.le:,}{self.note}"
        return f"be an int{'' if self.ge is None else f' of at least {self.ge:,}'}{self.note}"

    def __call__(self, owner: object, argument: str, value: Any) -> Any:
        if type(value) is int and self.allows(value):  # the usual case, with fewer calls
            return value
        return super().__call__(owner, argument, value)

    def is_kind(self, value: Any) -> bool:
        return isinstance(value, Integral | torch.SymInt) and not isinstance(value, bool)

    def allows(self, value: Any) -> bool:
        return bool((self.ge is None or value >= self.ge) and (self.le is None or value <= self.le))

    def normalized(self, value: Any) -> Any:
        return value if isinstance(value, torch.SymInt) else int(value)


class Number(Constraint):
    """A finite number within bounds: at least ``ge`` or above ``gt``, at most ``le`` or below ``lt``.

    ``noun`` names the number in messages, and ``note`` is added to them.
    """

    def __init__(
        self,
        *,
        ge: float | None = None,
        gt: float | None = None,
        le: float | None = None,
        lt: float | None = None,
        noun: str = "number",
        note: str = "",
    ) -> None:
        self.ge, self.gt, self.le, self.lt = ge, gt, le, lt
        if le is not None or lt is not None:
            low = f"({-math.inf if gt is None else gt:g}" if ge is None else f"[{ge:g}"
            text = f"a {noun} in {low}, {f'{lt:g})' if le is None else f'{le:g}]'}"
        elif ge is not None:
            text = f"a finite {noun} of at least {ge:g}"
        elif gt is None:
            text = f"a finite {noun}"
        else:
            text = f"a positive finite {noun}" if gt == 0 else f"a finite {noun} above {gt:g}"
        self.expected = f"be {text}{note}"

    def is_kind(self, value: Any) -> bool:
        return isinstance(value, Real) and not isinstance(value, bool)

    def allows(self, value: Any) -> bool:
        try:
            finite = math.isfinite(value)
        except OverflowError:
            finite = False
        return bool(
            finite
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    def normalized(self, value: Any) -> float:
        return float(value)


class OneOf(Constraint):
    """One of a few values."""

    def __init__(self, choices: Iterable[Any]) -> None:
        self.choices = tuple(choices)
        self.expected = f"be one of {', '.join(sorted(map(repr, self.choices)))}"

    def is_kind(self, value: Any) -> bool:
        return isinstance(value, tuple({type(each) for each in self.choices})) and not isinstance(value, bool)

    def allows(self, value: Any) -> bool:
        return value in self.choices

    def error(self, function: str, argument: str, value: Any, kind: type[Exception]) -> Exception:
        if isinstance(value, str) and all(isinstance(each, str) for each in self.choices):
            return unknown_name(function, argument, value, self.choices)
        return super().error(function, argument, value, kind)


class TensorOf(Constraint):
    """A tensor of floats, or of integers, of one of some shapes; a string in a shape stands for any size."""

    def __init__(self, *shapes: tuple[str | int, ...], integer: bool = False, other: str = "") -> None:
        self.shapes, self.integer, self.other = shapes, integer, other
        #: Numbers of dimensions for which all sizes are free.
        self.free = frozenset(len(shape) for shape in shapes if all(isinstance(size, str) for size in shape))

    def __call__(self, owner: object, argument: str, value: Any) -> Any:
        if self.is_kind(value) and (value.dim() in self.free or self.allows(value)):
            return value
        return super().__call__(owner, argument, value)

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
        # The text is formatted only when raised: in traced calls, sizes may be symbols.
        wanted = " or ".join(f"({', '.join(map(str, s))}{',' * (len(s) == 1)})" for s in self.shapes)
        if kind is ValueError:
            return rejected(function, argument, f"have shape {wanted}", shape(value))
        expected = f"be {self.other}{'an integer' if self.integer else 'a float'} tensor {wanted}"
        return rejected(function, argument, expected, described(value), kind)


def floats(owner: object, argument: str, value: Any, *sizes: str | int) -> Tensor:
    """Return a float tensor of one shape, as :class:`TensorOf` takes it, or raise."""
    return TensorOf(sizes)(owner, argument, value)


def lengths(owner: object, argument: str, value: Any, batch: int, most: int | None = None) -> Tensor:
    """Return an integer tensor (B,), one length for each sequence, or raise; on the CPU also if it exceeds ``most``."""
    given = TensorOf((batch,), integer=True)(owner, argument, value)
    if most is not None and batch and given.is_cpu and not values_unavailable(given):
        least, longest = (int(each) for each in given.aminmax())
        if least < 0 or longest > most:
            name = owner if isinstance(owner, str) else type(owner).__name__
            wrong = least if least < 0 else longest
            raise rejected(name, argument, f"be from 0 to {most}, the length of the sequences", wrong)
    return given


flag = Of(bool, "a bool")
integer, count, size = Integer(), Integer(ge=0), Integer(ge=1)
#: Positions that are seen on a side.
reach = Integer(ge=-1, note=" (-1 is no bound)")
#: Where positions begin, as a tensor: for all sequences, or for each.
offsets = TensorOf((), ("B",), integer=True, other="an int, or ")
positive = Number(gt=0)
probability = Number(ge=0, le=1, noun="probability")
