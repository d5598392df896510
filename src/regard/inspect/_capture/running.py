"""Which modules run in each thread, while something is captured: their inputs, and what was seen of their attention.

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

#: What models call the arguments that hold another sequence.
_OTHERS = ("encoder_hidden_states", "key_value_states", "cross_attention_states")
#: What arguments are called that do not hold a sequence.
_BESIDES = ("mask", "bias", "position", "cache", "past")


@dataclass(eq=False)
class Running:
    """A module that runs.

    Attributes
    ----------
    module : Module
    inputs : dict of str to object
        What it was called with; arguments without a name are numbered.
    recorded, missed : int
        How many calls were recorded, and modules missed, in its thread before.
    pending : list of functions
        That record what was seen of its attention, once it has run whole.
    reasons : list of str
        Why nothing of its attention can be recorded.
    hints : list of str
        Why nothing may have been recorded, if that is so.
    leave : list of functions
        That are called when it has run.
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
    leave: list[Callable[[], None]] = field(default_factory=list)
    combined: bool = False

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the sequences among its inputs: (B, L, C), (L, B, C), (L, C) or an image (B, C, H, W)."""
        for name, each in self.inputs.items():
            if isinstance(each, Tensor) and each.is_floating_point() and not any(part in name for part in _BESIDES):
                yield name, each

    def positions(self) -> set[int]:
        """Return how many rows each of its inputs may have."""
        found: set[int] = set()
        for _, each in self.tensors():
            if each.dim() in (2, 3):  # also (B, C, L)
                found |= set(each.shape[:-1]) if each.dim() == 2 else set(each.shape)
            elif each.dim() == 4:  # (B, C, H, W) or (B, H, W, C)
                found |= {each.shape[2] * each.shape[3], each.shape[1] * each.shape[2]}
        return found

    def reads(self, L: int, S: int) -> str | None:
        """Return whether it reads its own sequence, "self", or another, "cross"; None where inputs do not say."""
        if any(isinstance(self.inputs.get(name), Tensor) for name in _OTHERS):
            return "cross"
        if L == S:
            return None
        sizes = [each.shape[:-1] for _, each in self.tensors() if each.dim() in (2, 3)]
        if not sizes:
            return None
        return "cross" if any(S in each for each in sizes[1:]) and S not in sizes[0] else "self"


class Thread(threading.local):
    """What runs in a thread."""

    def __init__(self) -> None:
        self.stack: list[Running] = []
        self.recorded = 0
        self.missed = 0
        self.observers = 0
        self.observer: Observer | None = None
        #: What the observer follows.
        self.products: Any = None


thread = Thread()


class Observing:
    """The observer of a thread, once however many need it."""

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
    """Take the observer of this thread away for a while."""
    observer, thread.observer = thread.observer, None
    if observer is not None:
        observer.__exit__(None, None, None)
    try:
        yield
    finally:
        thread.observer = None if observer is None else observer.__enter__()


def in_compiled_code() -> bool:
    """Whether compiled code runs here, and no module that is followed within it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == __file__ and "running" in frame.f_locals:
            return False
        if is_compiled_frame(frame):
            return True
        frame = frame.f_back
    return False


class ModuleCalls:
    """All calls of modules, each of which is reported when it begins and when it has ended.

    ``nn.Module.__call__`` is replaced, as torch's tracers do it: a compiler calls what is behind it, and torch warns of
    global hooks where a module is compiled.

    Parameters
    ----------
    follows : callable
        Whether to follow a module that begins to run.
    begun, ended : callable
        Get what is followed.
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
            if is_jit_tracing() or isinstance(module, torch.jit.ScriptModule):  # which hand numbers on as tensors
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
