"""Find the layer that makes a call of attention, from stack frames instead of hooks, and the run that it continues.

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
    """The module that makes a call of attention.

    Attributes
    ----------
    name : str
        The name of the innermost running module of the model; empty if there is none.
    model_pass : frame, optional
        The frame in which the outermost module was called.
    reads : str, optional
        "self" or "cross" attention; None if unknown.
    windows : int
        How many windows each sequence of the batch is cut into.
    """

    name: str
    model_pass: FrameType | None
    reads: str | None = None
    windows: int = 1


def caller_of(names: Mapping[int, str], part: str = "") -> Caller:
    """Return the module that makes the running call; ``part`` is the name of the attention inside that module."""
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
    """One run of a layer, which later calls may continue.

    Attributes
    ----------
    layer : str
        The name of a module; name#1, name#2 and so on if the module runs several times in one forward pass.
    number : int
        The number of the run in its layer, from 0.
    heads : int
        Query heads.
    marks : Tensor (B, G, S, 2)
        Two numbers that identify each key so far.
    thread : int
        The thread that runs it.
    """

    layer: str
    number: int
    heads: int
    marks: Tensor | None
    thread: int

    def continued_at(self, query: Tensor, marks: Tensor) -> int | None:
        """Return the position of a call's first key among this run's keys if the call continues it; None otherwise.

        A call continues the run if its keys are the previous ones (or, with a sliding window, the last of them)
        followed by one new key for each query; or if a single query reads the very same keys. In the latter case,
        sequences with equal keys, such as the beams of one source, cannot be matched to rows.
        """
        L, S = query.shape[2], marks.shape[2]
        if self.marks is None or self.heads != query.shape[1] or self.marks.shape[:2] != marks.shape[:2]:
            return None
        keys = self.marks.shape[2]
        if L == 1 < keys == S and torch.equal(self.marks, marks):
            return None if _repeated(marks) else 0
        again = S - L  # repeated keys; a beam that replaced another one has different keys
        if 0 < again <= keys and torch.equal(self.marks[:, :, keys - again :], marks[:, :, :again]):
            return keys - again
        return None

    def has_keys(self, marks: Tensor) -> bool:
        """Whether a call reads the same keys as this run."""
        return self.marks is not None and self.marks.shape == marks.shape and torch.equal(self.marks, marks)

    def extend(self, marks: Tensor, first: int) -> None:
        """Add the keys of a call, which begin at position ``first``."""
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
        #: For each thread, the latest forward pass and the number of calls of each module in it.
        self._passes: dict[int, tuple[FrameType | None, dict[str, int]]] = {}
        #: Layers whose rows may have changed beams, so that each call is a separate run.
        self.ambiguous: set[str] = set()

    @torch.no_grad()
    def run_of(self, caller: Caller, query: Tensor | None, marks: Tensor | None) -> tuple[Run, int | None]:
        """Return the run of a call, and the position of its first key in that run; None if it begins a new run.

        A call without queries (B, H, L, E) or key marks (B, G, S, 2) always begins a new run.
        """
        runs = self._runs.setdefault(caller.name, [])
        if query is not None and marks is not None:
            own = [run for run in reversed(runs) if run.thread == threading.get_ident()]
            for run in own:
                if (first := run.continued_at(query, marks)) is not None:
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
        """Add a run of a layer that no later call continues."""
        runs = self._runs.setdefault(name, [])
        runs.append(Run(layer, sum(each.layer == layer for each in runs), 0, None, threading.get_ident()))

    def layer_of(self, caller: Caller) -> str:
        """Return the name of the layer for a call that begins a run, and count the call."""
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
        """Release the latest forward passes, whose frames keep the model's inputs and outputs alive."""
        self._passes.clear()


def _repeated(marks: Tensor) -> bool:
    """Whether two sequences of a batch have the same keys, as beams of one source do."""
    rows = marks.flatten(1)
    return len(rows) > 1 and len(torch.unique(rows, dim=0)) < len(rows)


def module_of(layer: str) -> str:
    """Return the name of a layer's module: "name" for "name#3"."""
    name, sign, number = layer.rpartition("#")
    return name if sign and number.isdecimal() else layer


def runs_of_module(runs: Mapping[str, list[_T]], module: str) -> list[_T]:
    """Return the runs of all layers of a module, one forward pass after the other."""
    layers = [each for layer, each in runs.items() if module_of(layer) == module]
    return [run for together in zip_longest(*layers) for run in together if run is not None]


def chosen(layer: str, layers: list[str], wanted: int | str) -> bool:
    """Whether ``wanted`` selects a layer: by its number, its name, or the name of a module that is or contains it."""
    if isinstance(wanted, int):
        return layers[wanted : wanted + 1 or None] == [layer]
    return wanted in (layer, module_of(layer)) or layer.startswith(f"{wanted}.")
