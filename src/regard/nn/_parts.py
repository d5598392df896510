"""Scores and normalizers that a layer is given: their tensors become its parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from regard._errors import rejected, shape
from regard._part import Part
from regard.nn._layer import Layer


class PartModule(nn.Module):
    """A score or normalizer with tensors, as a module: trained, saved, moved and copied with the layer that has it.

    Parameters of the part are parameters here, under the names of its attributes; other tensors are buffers; modules
    that it holds are modules here. What the part itself holds is not kept, so that nothing can be out of date.

    Parameters
    ----------
    layer : Module
        Whose part it is, for errors.
    argument : str
        What the layer calls it.
    part : Part

    Raises
    ------
    ValueError
        If a tensor of the part could not be registered.
    """

    def __init__(self, layer: nn.Module, argument: str, part: Part) -> None:
        super().__init__()
        who = type(layer).__name__
        for path in _unlisted(part):
            expected = "hold tensors and modules as attributes, or in tuples"
            raise rejected(who, argument, expected, f"{type(part).__name__}.{path}, which holds some")
        self._paths = []
        for path, tensor in part.named_tensors():
            if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                expected = "be made of nn.Parameter and of tensors that require no gradient"
                raise rejected(who, argument, expected, f"{type(part).__name__}.{path} {shape(tensor)}")
            module, name = self._place(path)
            if isinstance(tensor, nn.Parameter):
                module.register_parameter(name, tensor)
            else:
                module.register_buffer(name, tensor)
            self._paths.append(path)
        for path, inner in _modules_of(part):
            module, name = self._place(path)
            module.add_module(name, inner)
        self._form = part.map_tensors(lambda tensor: torch.empty_like(tensor, device="meta", requires_grad=False))

    def _place(self, path: str) -> tuple[nn.Module, str]:
        """Return the module for a dotted path, made where there is none, and the name in it."""
        module: nn.Module = self
        *outer, name = path.split(".")
        for each in outer:
            if each not in module._modules:
                module.add_module(each, nn.Module())
            module = module.get_submodule(each)
        return module, name

    def part(self) -> Any:
        """Return the part around the parameters and buffers as they are now."""
        return self._form.with_tensors([self._tensor(path) for path in self._paths])

    def _tensor(self, path: str) -> Tensor:
        found: Any = self
        for name in path.split("."):
            found = getattr(found, name)
        return found

    def __repr__(self) -> str:
        return repr(self._form)


class PartLayer(Layer):
    """A layer that may be given scores and normalizers with tensors: as attributes, these become modules."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(self.__dict__.get("_modules", {}).get(name), PartModule):
            delattr(self, name)  # torch replaces a module by nothing but a module
        if isinstance(value, Part) and (value.tensors() or any(_modules_of(value)) or any(_unlisted(value))):
            value = PartModule(self, name, value)
        super().__setattr__(name, value)


def current(part: Any) -> Any:
    """Return what :func:`regard.attention` takes for an attribute of a :class:`PartLayer`."""
    return part.part() if isinstance(part, PartModule) else part


def unusual(layer: nn.Module, name: str, usual: object) -> list[str]:
    """Return what a layer prints of an attribute: nothing of the usual value, nor of a module, which torch prints."""
    value = getattr(layer, name)
    return [] if value == usual or isinstance(value, nn.Module) else [f"{name}={value!r}"]


def _modules_of(value: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a part holds, with their paths."""
    for path, item in _items(value):
        if isinstance(item, nn.Module):
            yield path, item
        elif isinstance(item, (Part, tuple)):
            yield from ((f"{path}.{inner}", module) for inner, module in _modules_of(item))


def _unlisted(value: Any) -> Iterator[str]:
    """Yield the paths of containers in a part that hold what :meth:`Part.tensors` does not find."""
    for path, item in _items(value):
        if isinstance(item, (Part, tuple)):
            yield from (f"{path}.{inner}" for inner in _unlisted(item))
        elif isinstance(item, (list, set, dict)):
            inside = item.values() if isinstance(item, dict) else item
            if any(isinstance(each, (Tensor, nn.Module, Part)) for each in inside):
                yield path


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Part):
        yield from vars(value).items()
    elif isinstance(value, tuple):
        yield from ((str(i), item) for i, item in enumerate(value))
