"""Calls of attention, noticed wherever they are made, without changing what they compute.

While something is captured, the functions that compute attention are replaced, in every module that holds them by
name, by wrappers that call them and then tell of the call. No hook and no mode is set, so that torch's fast paths stay
as they are. A wrapper knows of the capture and the interventions of its own thread or task alone.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard import Aux
from regard._errors import RegardWarning
from regard._torch import fused_attention, fused_layer, in_backward
from regard.inspect import arguments
from regard.inspect.calls import Attended, Change, Projected
from regard.inspect.record import Record

if TYPE_CHECKING:
    from regard.inspect.intervention import Intervention


@dataclass(frozen=True)
class _Watch:
    """Who wants to know of calls."""

    record: Record | None = None
    interventions: tuple[Intervention, ...] = ()


_NOBODY = _Watch()
_active: ContextVar[_Watch] = ContextVar("watch", default=_NOBODY)
#: Modules that compute what the call of another tells of, or what somebody reads of a record.
_INNER = ("regard._attention", "regard.engines", "regard.inspect")


class _Replacement:
    """The wrappers in place of the functions, as long as somebody watches in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches = 0
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        with self._lock:
            if not self._watches:
                _replace(self._undo)
            self._watches += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._watches -= 1
            while self._undo and not self._watches:
                self._undo.pop()()


_replacement = _Replacement()


@contextmanager
def _watching(watch: _Watch) -> Iterator[None]:
    token = _active.set(watch)
    try:
        yield
    finally:
        _active.reset(token)


@contextmanager
def telling(record: Record) -> Iterator[None]:
    """Let calls of attention tell a record of themselves."""
    with _replacement, _watching(replace(_active.get(), record=record)):
        yield


@contextmanager
def intervening(intervention: Intervention) -> Iterator[None]:
    """Let calls of attention of one layer give what an intervention makes of their outputs."""
    watch = _active.get()
    with _replacement, _watching(replace(watch, interventions=(*watch.interventions, intervention))):
        yield


def _replace(undo: list[Callable[[], None]]) -> None:
    ours = functools.partial(arguments.of_regard, inspect.signature(regard.attention))
    sdpa, weighing = F.scaled_dot_product_attention, F.multi_head_attention_forward
    wrappers = {
        id(sdpa): _wrapped(sdpa, arguments.of_sdpa),
        id(regard.attention): _wrapped(regard.attention, ours),
        id(weighing): _weighing(weighing),
    }
    for held, key in _holders(wrappers.keys()):
        _set(undo, held, key, wrappers[id(held[key])])
    fused = {
        fused_attention: _wrapped(fused_attention, arguments.of_fused_attention),
        fused_layer: _wrapped(fused_layer, arguments.of_fused_layer, part="self_attn"),
    }
    for function, wrapper in fused.items():
        _set(undo, vars(torch), function.__name__, wrapper)
    _set(undo, vars(torch.backends.mha), "get_fastpath_enabled", _slow(torch.backends.mha.get_fastpath_enabled))
    if (modeling := sys.modules.get("transformers.modeling_utils")) is not None:
        interface = modeling.AttentionInterface
        original = interface.get_interface
        interface.get_interface = _interface(original)
        undo.append(functools.partial(setattr, interface, "get_interface", original))


#: Of each module: its namespace, how many names that had, and which of them held a function.
_scanned: dict[str, tuple[int, int, tuple[str, ...]]] = {}


def _holders(functions: Collection[int]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the namespaces that hold functions, given by their identities, and the names; not those that compute them.

    A module is looked through once, and again when it has other names: thousands are loaded.
    """
    for name, module in list(sys.modules.items()):
        if module is None or name.startswith(_INNER):
            continue
        held = getattr(module, "__dict__", {})
        known = _scanned.get(name)
        if known is None or name == "__main__" or known[:2] != (id(held), len(held)):
            keys = tuple(key for key, value in list(held.items()) if id(value) in functions)
            _scanned[name] = known = (id(held), len(held), keys)
        yield from ((held, key) for key in known[2] if id(held.get(key)) in functions)


def _set(undo: list[Callable[[], None]], held: dict[str, Any], key: str, value: Any) -> None:
    undo.append(functools.partial(held.__setitem__, key, held[key]))
    held[key] = value


def _wrapped(
    function: Callable[..., Any],
    tell: Callable[..., Attended | Projected],
    *,
    part: str = "",
    rows_first: bool = False,
) -> Callable[..., Any]:
    """Return a function that calls another, and tells those of its thread that watch.

    ``part`` is what a module calls the attention within it, and ``rows_first`` says that outputs are (B, L, H, V).
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        watch = _NOBODY if torch.compiler.is_compiling() else _active.get()
        # Layers that are checkpointed compute again, in a backward pass, what was recorded.
        record = None if watch is _NOBODY or in_backward() else watch.record
        interventions = _concerned(watch, part)
        if record is None and not interventions:
            return function(*args, **kwargs)
        with _watching(_NOBODY):
            answer = function(*args, **kwargs)
        attended = tell(*args, **kwargs)
        for each in interventions:
            answer, attended = _changed(each, answer, attended, rows_first)
        if record is None:
            return answer
        if attended.query.is_nested:
            message = (
                "capture: a call of attention on nested tensors is left out, whose sequences have no common length."
            )
            warnings.warn(message, RegardWarning, stacklevel=2)
        else:
            record.add(_joined(_caller(record.names), part), attended)
        return answer

    return call


def _concerned(watch: _Watch, part: str = "") -> list[Intervention]:
    """Return the interventions in the layer that calls."""
    return [each for each in watch.interventions if each.concerns(_joined(_caller(each.names), part))]


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))


def _changed(
    intervention: Intervention, answer: Any, attended: Attended | Projected, rows_first: bool
) -> tuple[Any, Attended]:
    """Return what a function answers, and what it attended to, after an intervention."""
    assert isinstance(attended, Attended)  # fused layers do not run while somebody intervenes
    change = intervention.change(attended)
    output, *rest = answer if isinstance(answer, tuple) else (answer,)
    assert attended.value is not None
    if rows_first:
        output = change.output(output.transpose(1, 2), attended.value).transpose(1, 2).contiguous()
    else:
        output = change.output(output, attended.value)
    attended = replace(attended, changes=(*attended.changes, change))
    if not isinstance(answer, tuple):
        return output, attended
    if rest and isinstance(rest[0], Aux):
        rest[0] = change.over(rest[0], 0, attended.query.shape[-2])
    elif rows_first and isinstance(rest[0], Tensor):
        rest[0] = _weights_with(change, rest[0])
    return (output, *rest), attended


def _weights_with(change: Change, weights: Tensor) -> Tensor:
    """Return a layer's weights (B, H, L, S) after a change of a part of its keys, or of all."""
    if change.weights is not None:
        change = replace(change, weights=F.pad(change.weights, (0, weights.shape[-1] - change.weights.shape[-1])))
    found = change.over(Aux(weights=weights), 0, weights.shape[2]).weights
    assert found is not None
    return found


def _weighing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's multi-head attention, which multiplies matrices by itself where weights are asked for.

    Where they are not it calls ``scaled_dot_product_attention``, which tells, and in which one can intervene.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        watch = _NOBODY if torch.compiler.is_compiling() else _active.get()
        if watch is _NOBODY:
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        interventions = _concerned(watch)
        if not given["need_weights"] or (in_backward() and not interventions):
            return original(*args, **kwargs)
        if not interventions:
            with _watching(_NOBODY):
                answer = original(*args, **kwargs)
            with torch.no_grad():
                original(**given | {"need_weights": False, "dropout_p": 0.0})
            return answer
        output, _ = original(**given | {"need_weights": False})
        with _watching(_NOBODY):
            _, weights = original(**given | {"average_attn_weights": False})
        batched = weights[(None,) * (4 - weights.dim())]
        for each in interventions:
            batched = _weights_with(each.latest, batched)
        weights = batched.reshape(weights.shape)
        return output, weights.mean(-3) if given["average_attn_weights"] else weights

    return call


def _slow(original: Callable[[], bool]) -> Callable[[], bool]:
    """Return whether torch's modules may take their fast paths, which nobody can look into: not in an intervention."""

    @functools.wraps(original)
    def get_fastpath_enabled() -> bool:
        return original() and (torch.compiler.is_compiling() or not _active.get().interventions)

    return get_fastpath_enabled


def _caller(names: Mapping[int, str]) -> str:
    """Return the name of the innermost module of the model that runs: frames know it, so that no hook is needed."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self":
            owner = frame.f_locals.get("self")
            if id(owner) in names and isinstance(owner, nn.Module):
                return names[id(owner)]
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _interface(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return transformers' choice of an attention function, whose calls tell of themselves."""

    @functools.wraps(original)
    def get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = original(self, attn_implementation, default)
        if _active.get() is _NOBODY:
            return function
        tell = functools.partial(arguments.of_transformers, function is default)
        return _wrapped(function, tell, rows_first=True)

    return get_interface
