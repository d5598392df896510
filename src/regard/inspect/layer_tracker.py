"""Which layer a call of attention is of, and which matrix it goes on with: frames know the caller, without a hook.

Dimensions: B batch, H query heads, G key–value heads, L queries, S keys, E width of a head.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from types import FrameType
from typing import TypeVar

import torch
from torch import Tensor, nn

_MODULE_CALL = nn.Module._call_impl.__code__
_T = TypeVar("_T")


@dataclass(frozen=True)
class Caller:
    """Who makes a call of attention.

    Attributes
    ----------
    name : str
        Of the innermost module of the model that runs; empty where there is none.
    model_pass : frame, optional
        That in which the outermost module was called.
    """

    name: str
    model_pass: FrameType | None


def caller_of(names: Mapping[int, str], part: str = "") -> Caller:
    """Return who makes the call that is under way; ``part`` is what the module calls the attention within it."""
    frame, name, model_pass = sys._getframe(1), None, None
    while frame is not None:
        code = frame.f_code
        outer = code is _MODULE_CALL
        if outer or (name is None and code.co_argcount and code.co_varnames[0] == "self"):
            owner = frame.f_locals.get("self")
            if id(owner) in names and isinstance(owner, nn.Module):
                name = names[id(owner)] if name is None else name
                model_pass = frame if outer else model_pass
        frame = frame.f_back  # type: ignore[assignment]
    return Caller(".".join(filter(None, (name, part))), model_pass)


@dataclass
class Run:
    """One run of a layer, which later calls may go on with.

    Attributes
    ----------
    layer : str
        A module's name; of one that calls again and again in a pass of its model, name#1, name#2 and so on.
    number : int
        Which run of the layer it is, from 0.
    heads : int
        Of queries.
    marks : Tensor (B, G, S, 2)
        Two numbers of each key that there has been.
    """

    layer: str
    number: int
    heads: int
    marks: Tensor | None

    def goes_on(self, query: Tensor, marks: Tensor) -> int | None:
        """Return where the first key of a call stands among this run's keys, if the call goes on with it.

        Its keys are those before and as many more as there are queries, or the last of those before, where a window
        slides; or all the same, where one query reads them.
        """
        L, S = query.shape[2], marks.shape[2]
        if self.marks is None or self.heads != query.shape[1] or self.marks.shape[:2] != marks.shape[:2]:
            return None
        keys = self.marks.shape[2]
        if L == 1 < keys == S and torch.equal(self.marks, marks):
            return 0
        again = S - L  # keys that were there before; a beam that took the place of another has others
        if 0 < again <= keys and torch.equal(self.marks[:, :, keys - again :], marks[:, :, :again]):
            return keys - again
        return None

    def extend(self, marks: Tensor, first: int) -> None:
        """Note the keys of a call, of which the first stands at a place."""
        self.marks = marks.clone() if self.marks is None else torch.cat((self.marks[:, :, :first], marks), 2)


class LayerTracker:
    """The layers of a model and their runs, in the order in which they are called.

    Attributes
    ----------
    layers : list of str
    """

    def __init__(self) -> None:
        self.layers: list[str] = []
        self._runs: dict[str, list[Run]] = {}
        self._pass: FrameType | None = None
        self._counts: dict[str, int] = {}

    @torch.no_grad()
    def run_of(self, caller: Caller, query: Tensor | None, key: Tensor | None) -> tuple[Run, int | None]:
        """Return the run that a call is of, and where its first key stands in that; None where it begins the run.

        A call without queries (B, H, L, E) and keys (B, G, S, E) goes on with nothing.
        """
        runs = self._runs.setdefault(caller.name, [])
        marks = None if key is None else key[..., [0, key.shape[-1] // 2]] if key.shape[-1] else key
        if query is not None and marks is not None:
            for run in reversed(runs):
                if (first := run.goes_on(query, marks)) is not None:
                    run.extend(marks, first)
                    return run, first
        layer = self._layer(caller)
        heads = 0 if query is None else query.shape[1]
        run = Run(layer, sum(each.layer == layer for each in runs), heads, None if marks is None else marks.clone())
        runs.append(run)
        return run, None

    def _layer(self, caller: Caller) -> str:
        """Return the layer that a module is in a call that begins a run, and count the call."""
        name = caller.name
        if caller.model_pass is None or caller.model_pass is not self._pass:
            self._pass, self._counts = caller.model_pass, {}
        count = self._counts.get(name, 0) + 1 if caller.model_pass is not None else 1
        self._counts[name] = count
        first = f"{name}#1"
        if count == 1:
            layer = first if first in self.layers else name
        else:
            layer = f"{name}#{count}"
            self.layers = [first if each == name else each for each in self.layers]
            for run in self._runs[name]:
                run.layer = first if run.layer == name else run.layer
        if layer not in self.layers:
            self.layers.append(layer)
        return layer

    def forget(self) -> None:
        """Let go of the latest pass, whose frame holds what the model was given and has returned."""
        self._pass, self._counts = None, {}


def module_of(layer: str) -> str:
    """Return the name of the module that a layer is, maybe as one of several: "name" of "name#3"."""
    name, sign, number = layer.rpartition("#")
    return name if sign and number.isdecimal() else layer


def runs_of_module(runs: Mapping[str, list[_T]], module: str) -> list[_T]:
    """Return the runs of all layers that a module is, pass by pass."""
    layers = [each for layer, each in runs.items() if module_of(layer) == module]
    return [run for together in zip_longest(*layers) for run in together if run is not None]


def chosen(layer: str, layers: list[str], wanted: int | str) -> bool:
    """Whether a layer is meant by a number, a layer's name, or that of a module that it is or that holds it."""
    if isinstance(wanted, int):
        return layers[wanted : wanted + 1 or None] == [layer]
    return wanted in (layer, module_of(layer)) or layer.startswith(f"{wanted}.")
