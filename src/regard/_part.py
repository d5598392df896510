"""The base of scores, masks and normalizers: the tensors inside them can be listed and replaced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Self

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
        for tensor in self.tensors():
            if tensor.dtype != dtype and tensor.is_floating_point():
                return self.map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
        return self

    def with_tensors(self, tensors: list[Tensor]) -> Self:
        """Return a copy whose tensors are these, in the order of :meth:`tensors`."""
        remaining = list(tensors)
        return self.map_tensors(lambda _: remaining.pop(0))

    def structure(self) -> tuple[Any, ...] | None:
        """Return all that does not depend on the contents of the tensors inside, as a key for what is planned.

        None where that is not known: a class defined inside a function, or a function, may hold anything.
        """
        return _structure_of(self)

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


def _holds_parts(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(_holds_parts(item) for item in value)
    return isinstance(value, (Tensor, Part))


def _structure_of(value: Any) -> tuple[Any, ...] | None:
    kind = type(value)
    found: list[Any] = [kind]
    if kind is Tensor or kind is Parameter:
        return kind, value.shape, value.dtype, value.device, value.requires_grad
    if kind is tuple:
        held: Any = value
    elif isinstance(value, Part) and "<locals>" not in kind.__qualname__:
        held = value.__dict__.values()
    else:
        return None
    for item in held:
        if type(item) in PLAIN:
            found.append(item)
        elif (inner := _structure_of(item)) is not None:
            found.append(inner)
        else:
            return None
    return tuple(found)


def brief(value: Any) -> str:
    """Return a value as it is shown inside a repr; a tensor by its shape, in brackets: ``tensor(3)`` is a number."""
    if isinstance(value, Tensor):
        return f"tensor[{', '.join(map(str, value.shape))}]"
    if callable(value) and hasattr(value, "__name__"):
        return str(value.__name__)
    return repr(value)
