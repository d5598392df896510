"""The base of scores, masks and normalizers: the tensors inside them can be listed and replaced."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import Parameter

#: Attributes that are as good in the key of a plan as they are.
PLAIN = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size))


class Part:
    """An immutable piece of an attention call, whose attributes may be tensors, other parts, or tuples of these.

    Engines list a part's tensors to pass them through autograd, and rebuild the part around replacements
    (detached, cast, or vmapped tensors). A subclass gets both for nothing by storing tensors as attributes.
    """

    #: Attributes that must agree with others of their class, and which others. A subclass that overrides one of
    #: the others and not the attribute gets the attribute's default: engines take no shortcut past an override.
    shortcuts: ClassVar[Mapping[str, frozenset[str]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__bases__:
            if vars(base).get("__final__"):
                root = next(part for part in base.__mro__ if Part in part.__bases__)
                raise TypeError(f"{base.__name__} is final and cannot be subclassed; subclass {root.__name__}.")
        own = vars(cls)
        for name, others in cls.shortcuts.items():
            if name not in own and not others.isdisjoint(own):
                setattr(cls, name, next(vars(base)[name] for base in reversed(cls.__mro__) if name in vars(base)))

    def tensors(self) -> list[Tensor]:
        """Return every tensor inside, in attribute order, those of inner parts included."""
        found: list[Tensor] = []
        for value in vars(self).values():
            if isinstance(value, Tensor):
                found.append(value)
            elif isinstance(value, (Part, tuple)):
                found += _tensors_in(value)
        return found

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """Return the same tensors with their names; ``inner.weight`` is that of a part that is the attribute inner."""
        found: list[tuple[str, Tensor]] = []
        for name, value in vars(self).items():
            _collect(name, value, found)
        return found

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return a copy in which each tensor ``t`` of :meth:`tensors` is ``function(t)``, called in that order."""
        twin = copy.copy(self)
        for name, value in vars(self).items():
            if _holds_parts(value):
                twin.__dict__[name] = _mapped(value, function)
        return twin

    def cast(self, dtype: torch.dtype) -> Self:
        """Return the part with floating-point tensors of this dtype, linked to its own by autograd."""
        if not self.differs(dtype):
            return self
        twin = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, (Tensor, Part, tuple)):
                twin.__dict__[name] = _cast(value, dtype)
        return twin

    def differs(self, dtype: torch.dtype) -> bool:
        """Whether something inside is calculated in another dtype."""
        return any(_differs(value, dtype) for value in vars(self).values())

    def with_tensors(self, tensors: list[Tensor]) -> Self:
        """Return a copy whose tensors are these, in the order of :meth:`tensors`."""
        remaining = list(tensors)
        return self.map_tensors(lambda _: remaining.pop(0))

    def structure(self) -> tuple[Any, ...] | None:
        """Return all that does not depend on the contents of the tensors inside, as a key for what is planned.

        None where that is not known: a class defined inside a function, one with ``__slots__``, or a function, may
        hold anything.
        """
        kind: Any = type(self)
        if not _is_open(kind):
            return None
        held = self.__dict__.values()
        return (kind, *held) if PLAIN.issuperset(map(type, held)) else _structures(kind, held)

    def calls_a_function(self) -> bool:
        """Whether a function is inside, which may use tensors that are not attributes."""
        return any(_calls_a_function(value) for value in vars(self).values())

    @property
    def is_fixed(self) -> bool:
        """Whether all that the part says follows from its :meth:`structure`, and from no tensor or function."""
        return all(_is_fixed(value) for value in vars(self).values())

    def snapshot(self) -> Self:
        """Return a copy that keeps its settings when this part's attributes are changed; tensors are shared."""
        twin = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, (Part, tuple)):
                twin.__dict__[name] = _frozen(value)
        return twin

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={brief(value)}" for name, value in vars(self).items() if not name.startswith("_"))
        return f"{type(self).__name__}({inside})"


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Part):
        return value.tensors()
    if isinstance(value, tuple):
        return [tensor for item in value for tensor in _tensors_in(item)]
    return [value] if isinstance(value, Tensor) else []


def _collect(name: str, value: Any, found: list[tuple[str, Tensor]]) -> None:
    if isinstance(value, Tensor):
        found.append((name, value))
    elif isinstance(value, Part):
        found.extend((f"{name}.{inner}", tensor) for inner, tensor in value.named_tensors())
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            _collect(f"{name}.{i}", item, found)


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Part):
        return value.map_tensors(function)
    if _holds_parts(value):
        return tuple(_mapped(item, function) for item in value)
    return value


def _differs(value: Any, dtype: torch.dtype) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point() and value.dtype != dtype
    if isinstance(value, Part):
        return value.differs(dtype)
    return isinstance(value, tuple) and any(_differs(item, dtype) for item in value)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Part):
        return value.cast(dtype)
    if _holds_parts(value):
        return tuple([_cast(item, dtype) for item in value])
    return value


def _frozen(value: Any) -> Any:
    if isinstance(value, Part):
        return value.snapshot()
    return tuple(_frozen(item) for item in value) if type(value) is tuple else value


def _calls_a_function(value: Any) -> bool:
    if isinstance(value, Part):
        return value.calls_a_function()
    if isinstance(value, tuple):
        return any(map(_calls_a_function, value))
    return not isinstance(value, Tensor) and callable(value)


def _is_fixed(value: Any) -> bool:
    if isinstance(value, Part):
        return value.is_fixed
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    return not isinstance(value, Tensor) and not callable(value)


def _holds_parts(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(_holds_parts(item) for item in value)
    return isinstance(value, (Tensor, Part))


def _structure_of(value: Any) -> tuple[Any, ...] | None:
    if isinstance(value, Part):
        return value.structure()
    kind = type(value)
    if kind is Tensor or kind is Parameter:
        return kind, value.shape, value.dtype, value.device, value.requires_grad
    return _structures(kind, value) if kind is tuple else None


def _structures(kind: type, held: Iterable[Any]) -> tuple[Any, ...] | None:
    found: list[Any] = [kind]
    for item in held:
        if type(item) in PLAIN:
            found.append(item)
        elif (inner := _structure_of(item)) is not None:
            found.append(inner)
        else:
            return None
    return tuple(found)


@lru_cache(1024)
def _is_open(kind: Any) -> bool:
    """Whether all that instances of a class hold is in their ``__dict__``, or in the module of the class."""
    return "<locals>" not in kind.__qualname__ and not any(vars(base).get("__slots__") for base in kind.__mro__)


def brief(value: Any) -> str:
    """Return a value as it is shown inside a repr; a tensor by its shape, in brackets: ``tensor(3)`` is a number."""
    if isinstance(value, Tensor):
        return f"tensor[{', '.join(map(str, value.shape))}]"
    if callable(value) and hasattr(value, "__name__"):
        return str(value.__name__)
    return repr(value)
