"""The modules that run in each thread during a capture: their inputs, and what was seen of their attention.

Dimensions: B batch, L queries, S keys, C width of a row.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from regard._utils.torch_private import Observer, in_backward, is_compiled_frame, is_jit_tracing

#: Names of arguments that hold the other sequence of cross-attention.
_CROSS_INPUTS = ("encoder_hidden_states", "key_value_states", "cross_attention_states")
#: Parts of the names of arguments that do not hold a sequence.
_NO_SEQUENCES = ("mask", "bias", "position", "cache", "past")


@dataclass(eq=False)
class Running:
    """A module that runs.

    Attributes
    ----------
    module : Module
    inputs : dict of str to object
        Its arguments; positional ones are numbered.
    recorded, missed : int
        How many calls were recorded, and modules missed, in its thread before it began.
    pending : list of functions
        Each adds what was seen of its attention to the record; called when it has finished.
    reasons : list of str
        Why its attention cannot be recorded.
    hints : list of str
        Likely reasons, in case nothing is recorded.
    leave : list of functions
        Called when it has finished.
    combined : bool
        Whether the weights of a differential layer are recorded.
    """

    module: nn.Module
    inputs: dict[str, Any]
    recorded: int
    missed: int
    pending: list[Callable[[], None]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    leave: list[Callable[[], object]] = field(default_factory=list)
    combined: bool = False

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the sequences among its inputs: (B, L, C), (L, B, C), (L, C) or an image (B, C, H, W)."""
        for name, each in self.inputs.items():
            is_sequence = not any(part in name for part in _NO_SEQUENCES)
            if is_sequence and isinstance(each, Tensor) and each.is_floating_point():
                yield name, each

    def positions(self) -> set[int]:
        """Return the possible row counts of its inputs."""
        found: set[int] = set()
        for _, each in self.tensors():
            if each.dim() in (2, 3):  # also (B, C, L)
                found |= set(each.shape[:-1]) if each.dim() == 2 else set(each.shape)
            elif each.dim() == 4:  # (B, C, H, W) or (B, H, W, C)
                found |= {each.shape[2] * each.shape[3], each.shape[1] * each.shape[2]}
        return found

    def reads(self, L: int, S: int) -> str | None:
        """Return "self" or "cross", whichever the attention is; None if the inputs do not show it."""
        if any(isinstance(self.inputs.get(name), Tensor) for name in _CROSS_INPUTS):
            return "cross"
        if L == S:
            return None
        sizes = [each.shape[:-1] for _, each in self.tensors() if each.dim() in (2, 3)]
        if not sizes:
            return None
        return "cross" if any(S in each for each in sizes[1:]) and S not in sizes[0] else "self"


class Thread(threading.local):
    """The state of one thread."""

    def __init__(self) -> None:
        self.stack: list[Running] = []
        self.recorded = 0
        self.missed = 0
        self.observers = 0
        self.observer: Observer | None = None
        #: The state of the observer.
        self.products: Any = None


thread = Thread()


class Observing:
    """The observer of a thread, entered once no matter how many captures need it."""

    def __init__(self, make: Callable[[], Observer]) -> None:
        self._make = make

    def __enter__(self) -> None:
        if thread.observers == 0:
            thread.observer = self._make().__enter__()
        thread.observers += 1

    def __exit__(self, *raised: object) -> None:
        thread.observers -= 1
        if thread.observers == 0 and thread.observer is not None:
            thread.observer.__exit__(*raised)
            thread.products = None


@contextmanager
def _unobserved() -> Iterator[None]:
    """Suspend the observer of this thread."""
    observer, thread.observer = thread.observer, None
    if observer is not None:
        observer.__exit__(None, None, None)
    try:
        yield
    finally:
        thread.observer = None if observer is None else observer.__enter__()


def in_compiled_code() -> bool:
    """Whether the innermost code is compiled, with no followed module inside it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == __file__ and "running" in frame.f_locals:
            return False
        if is_compiled_frame(frame):
            return True
        frame = frame.f_back
    return False


class ModuleCalls:
    """Reports the beginning and end of each call of a module.

    It replaces ``nn.Module.__call__``, as torch's tracers do: compiled code bypasses this method, and torch warns of
    global hooks when it compiles a module.

    Parameters
    ----------
    follows : callable
        Whether to follow a module that begins to run.
    begun, ended : callable
        Called with each followed module.
    """

    def __init__(
        self, follows: Callable[[nn.Module], bool], begun: Callable[[Running], None], ended: Callable[[Running], None]
    ) -> None:
        self._follows, self._begun, self._ended = follows, begun, ended

    def replace(self) -> Callable[[], None]:
        """Replace the method, and return a function that puts it back."""
        original = nn.Module.__call__

        @functools.wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or in_backward() or not self._follows(module):
                return original(module, *args, **kwargs)
            if is_jit_tracing() or isinstance(module, torch.jit.ScriptModule):  # these turn numbers into tensors
                with _unobserved():
                    return original(module, *args, **kwargs)
            inputs = {str(i): each for i, each in enumerate(args)} | kwargs
            running = Running(module, inputs, thread.recorded, thread.missed)
            thread.stack.append(running)
            self._begun(running)
            try:
                return original(module, *args, **kwargs)
            finally:
                thread.stack.pop()
                self._ended(running)

        def put_back() -> None:
            nn.Module.__call__ = original  # type: ignore[method-assign]

        nn.Module.__call__ = call  # type: ignore[method-assign]
        return put_back
