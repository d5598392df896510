"""Which layer a call of attention is of, and which matrix it goes on with: frames know the caller, without a hook.

Dimensions: B batch, H query heads, G key–value heads, L queries, S keys, E width of a head.
"""

from __future__ import annotations

import sys
import threading
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
    reads : str, optional
        Whether the module reads its own sequence, "self", or another, "cross"; None where that is not known.
    windows : int
        Into how many windows each sequence of the batch is cut.
    """

    name: str
    model_pass: FrameType | None
    reads: str | None = None
    windows: int = 1


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
    thread : int
        The thread that runs it.
    """

    layer: str
    number: int
    heads: int
    marks: Tensor | None
    thread: int

    def goes_on(self, query: Tensor, marks: Tensor) -> int | None:
        """Return where the first key of a call stands among this run's keys, if the call goes on with it.

        Its keys are those before and as many more as there are queries, or the last of those before, where a window
        slides; or all the same, where one query reads them. Where sequences of the batch have the same keys, as the
        beams of a source have, these do not say which row goes on with which.
        """
        L, S = query.shape[2], marks.shape[2]
        if self.marks is None or self.heads != query.shape[1] or self.marks.shape[:2] != marks.shape[:2]:
            return None
        keys = self.marks.shape[2]
        if L == 1 < keys == S and torch.equal(self.marks, marks):
            return None if _repeated(marks) else 0
        again = S - L  # keys that were there before; a beam that took the place of another has others
        if 0 < again <= keys and torch.equal(self.marks[:, :, keys - again :], marks[:, :, :again]):
            return keys - again
        return None

    def has_keys(self, marks: Tensor) -> bool:
        """Whether a call reads the very keys of this run."""
        return self.marks is not None and self.marks.shape == marks.shape and torch.equal(self.marks, marks)

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
        #: Of each thread, the latest pass of a model and how often its modules have called in it.
        self._passes: dict[int, tuple[FrameType | None, dict[str, int]]] = {}
        #: Layers whose rows may be of other beams than those before, and are runs of their own therefore.
        self.ambiguous: set[str] = set()

    @torch.no_grad()
    def run_of(self, caller: Caller, query: Tensor | None, marks: Tensor | None) -> tuple[Run, int | None]:
        """Return the run that a call is of, and where its first key stands in that; None where it begins the run.

        A call without queries (B, H, L, E) and marks of its keys (B, G, S, 2) goes on with nothing.
        """
        runs = self._runs.setdefault(caller.name, [])
        if query is not None and marks is not None:
            own = [run for run in reversed(runs) if run.thread == threading.get_ident()]
            for run in own:
                if (first := run.goes_on(query, marks)) is not None:
                    run.extend(marks, first)
                    return run, first
            if query.shape[2] == 1 and _repeated(marks) and any(run.has_keys(marks) for run in own):
                self.ambiguous.add(caller.name)
        layer = self.layer_of(caller)
        heads = 0 if query is None else query.shape[1]
        number = sum(each.layer == layer for each in runs)
        run = Run(layer, number, heads, None if marks is None else marks.clone(), threading.get_ident())
        runs.append(run)
        return run, None

    def begin(self, name: str, layer: str) -> None:
        """Note a run of a layer, a module by its name, which no call goes on with."""
        runs = self._runs.setdefault(name, [])
        runs.append(Run(layer, sum(each.layer == layer for each in runs), 0, None, threading.get_ident()))

    def layer_of(self, caller: Caller) -> str:
        """Return the layer that a module is in a call that begins a run, and count the call."""
        name = caller.name
        latest, counts = self._passes.get(threading.get_ident(), (None, {}))
        if caller.model_pass is None or caller.model_pass is not latest:
            counts = {}
            self._passes[threading.get_ident()] = (caller.model_pass, counts)
        count = counts.get(name, 0) + 1 if caller.model_pass is not None else 1
        counts[name] = count
        first = f"{name}#1"
        if count == 1:
            layer = first if first in self.layers else name
        else:
            layer = f"{name}#{count}"
            self.layers = [first if each == name else each for each in self.layers]
            for run in self._runs.get(name, ()):
                run.layer = first if run.layer == name else run.layer
        if layer not in self.layers:
            self.layers.append(layer)
        return layer

    def forget(self) -> None:
        """Let go of the latest passes, whose frames hold what the model was given and has returned."""
        self._passes.clear()


def _repeated(marks: Tensor) -> bool:
    """Whether two sequences of a batch have the same keys, as the beams of a source have."""
    rows = marks.flatten(1)
    return len(rows) > 1 and len(torch.unique(rows, dim=0)) < len(rows)


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
