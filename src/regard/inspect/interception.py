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
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard import Aux
from regard._errors import RegardWarning
from regard._torch import fused_attention, fused_layer, in_backward, uncompiled
from regard.inspect import arguments
from regard.inspect.calls import Attended, Change, Projected
from regard.inspect.gradients import OutputGradient, before_projection, heads_first
from regard.inspect.layer_tracker import caller_of
from regard.inspect.record import Record

if TYPE_CHECKING:
    from regard.inspect.intervention import Intervention


@dataclass(frozen=True)
class _Watch:
    """Who wants to know of calls."""

    record: Record | None = None
    interventions: tuple[Intervention, ...] = ()
    #: Of the output that the next call computes a second time, where somebody wants it.
    output: OutputGradient | None = None


_NOBODY = _Watch()
_active: ContextVar[_Watch] = ContextVar("watch", default=_NOBODY)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, staticmethod)
#: Modules that compute what the call of another tells of, or what somebody reads of a record.
_INNER = ("regard._attention", "regard.engines", "regard.inspect")


class _Replacement:
    """The wrappers in place of the functions, as long as somebody watches in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches = 0
        self._undo: list[Callable[[], None]] = []
        #: What makes a wrapper of each function, by its identity, and those that were made.
        self._makers: dict[int, Callable[[Any], Any]] = {}
        self._made: set[int] = set()

    @contextmanager
    def around(self, model: nn.Module | None) -> Iterator[None]:
        """Replace the functions, those that a model's modules hold as attributes included, and put them back."""
        with self._lock:
            if not self._watches:
                self._makers = _makers()
                for held, key in _holders(self._makers):
                    self._put(vars(held), key, functools.partial(setattr, held, key))
                _replace_fused(self._undo)
            for owner, key in () if model is None else _attributes(model):
                self._put(vars(owner), key, functools.partial(setattr, owner, key))
            self._watches += 1
        try:
            yield
        finally:
            with self._lock:
                self._watches -= 1
                while self._undo and not self._watches:
                    self._undo.pop()()

    def _put(self, held: Mapping[str, Any], key: str, put: Callable[[Any], None]) -> None:
        value = held[key]
        function = value.__func__ if isinstance(value, staticmethod) else value
        make = self._makers.get(id(uncompiled(function)))
        if make is None or id(function) in self._made:
            return
        wrapper = make(function)
        self._made.add(id(wrapper))
        self._undo.append(functools.partial(put, value))
        put(staticmethod(wrapper) if function is not value else wrapper)


_replacement = _Replacement()


@contextmanager
def _watching(watch: _Watch) -> Iterator[None]:
    token = _active.set(watch)
    try:
        yield
    finally:
        _active.reset(token)


@contextmanager
def telling(record: Record, model: nn.Module | None) -> Iterator[None]:
    """Let calls of attention tell a record of themselves."""
    try:
        with _replacement.around(model), _watching(replace(_active.get(), record=record)):
            yield
    finally:
        record.tracker.forget()


@contextmanager
def intervening(intervention: Intervention, model: nn.Module) -> Iterator[None]:
    """Let calls of attention of one layer give what an intervention makes of their outputs."""
    watch = _active.get()
    watch = replace(watch, interventions=(*watch.interventions, intervention))
    with _replacement.around(model), _watching(watch):
        yield


def _makers() -> dict[int, Callable[[Any], Any]]:
    tells: list[tuple[Callable[..., Any], Callable[..., Attended]]] = [
        (F.scaled_dot_product_attention, arguments.of_sdpa),
        (regard.attention, functools.partial(arguments.of_regard, inspect.signature(regard.attention))),
    ]
    if (flex := sys.modules.get("torch.nn.attention.flex_attention")) is not None:  # whose import takes seconds
        tells.append((flex.flex_attention, arguments.of_flex_attention))
    found: dict[int, Callable[[Any], Any]] = {
        id(function): functools.partial(_wrapped, tell=tell) for function, tell in tells
    }
    return found | {id(F.multi_head_attention_forward): _weighing}


def _replace_fused(undo: list[Callable[[], None]]) -> None:
    wrappers: list[tuple[Any, str, Any]] = [
        (torch, fused_attention.__name__, functools.partial(_wrapped, tell=arguments.of_fused_attention)),
        (torch, fused_layer.__name__, functools.partial(_wrapped, tell=arguments.of_fused_layer, part="self_attn")),
        (torch.backends.mha, "get_fastpath_enabled", _slow),
    ]
    if (modeling := sys.modules.get("transformers.modeling_utils")) is not None:
        wrappers.append((modeling.AttentionInterface, "get_interface", _interface))
    for owner, name, make in wrappers:
        original = vars(owner)[name]
        undo.append(functools.partial(setattr, owner, name, original))
        setattr(owner, name, make(original))


#: Of each module: its namespace, how many names that had, how many functions were looked for, and which names held one.
_scanned: dict[str, tuple[int, int, int, tuple[str, ...]]] = {}


def _holders(functions: Collection[int]) -> Iterator[tuple[Any, str]]:
    """Yield the modules that hold functions, given by their identities, and the names; not those that compute them.

    A module is looked through once, and again when it has other names: thousands are loaded.
    """
    for name, module in list(sys.modules.items()):
        if module is None or name.startswith(_INNER):
            continue
        held = getattr(module, "__dict__", {})
        known, now = _scanned.get(name), (id(held), len(held), len(functions))
        if known is None or name == "__main__" or known[:3] != now:
            keys = tuple(key for key, value in list(held.items()) if id(uncompiled(value)) in functions)
            _scanned[name] = known = (*now, keys)
        yield from ((module, key) for key in known[3] if key in held)


def _attributes(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """Yield what a model's modules and their classes hold that may be a function of somebody else's, and the names."""
    classes = {each for module in model.modules() for each in type(module).__mro__} - {nn.Module, object}
    for owner in (*model.modules(), *classes):
        yield from ((owner, key) for key, value in list(vars(owner).items()) if isinstance(value, _FUNCTIONS))


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
        if record is None and not watch.interventions:
            return function(*args, **kwargs)
        with _watching(_NOBODY):
            answer = function(*args, **kwargs)
        attended = tell(*args, **kwargs)
        for each in watch.interventions:
            assert isinstance(attended, Attended)  # fused layers do not run while somebody intervenes
            if each.concerns(caller_of(each.names, part), attended):
                answer, attended = _changed(each, answer, attended, rows_first)
        if record is None:
            return answer
        if attended.query.is_nested:
            message = (
                "capture: a call of attention on nested tensors is left out, whose sequences have no common length."
            )
            warnings.warn(message, RegardWarning, stacklevel=2)
        else:
            if record.gradients and isinstance(attended, Attended):
                attended = replace(attended, output=watch.output or _output_gradient(answer, rows_first))
            record.add(caller_of(record.names, part), attended)
        return answer

    return call


def _output_gradient(answer: Any, rows_first: bool) -> OutputGradient | None:
    """Return what will hold the gradient of a function's output, where that has one."""
    output = answer[0] if isinstance(answer, tuple) else answer
    if not output.requires_grad:
        return None
    found = OutputGradient()
    found.watch(output, heads_first if rows_first else lambda gradient: gradient)
    return found


def _changed(intervention: Intervention, answer: Any, attended: Attended, rows_first: bool) -> tuple[Any, Attended]:
    """Return what a function answers, and what it attended to, after an intervention."""
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
        if not given["need_weights"] or (in_backward() and not watch.interventions):
            return original(*args, **kwargs)
        if not watch.interventions:
            return _weighed(original, watch, given)
        latest = [each.latest for each in watch.interventions]
        with torch.random.fork_rng():  # for the case that nobody intervenes here
            output, _ = original(**given | {"need_weights": False})
        interventions = [each for each, before in zip(watch.interventions, latest) if each.latest is not before]
        with _watching(_NOBODY):
            if not interventions:
                return original(*args, **kwargs)
            _, weights = original(**given | {"average_attn_weights": False})
        batched = weights[(None,) * (4 - weights.dim())]
        for each in interventions:
            batched = _weights_with(each.latest, batched)
        weights = batched.reshape(weights.shape)
        return output, weights.mean(-3) if given["average_attn_weights"] else weights

    return call


def _weighed(original: Callable[..., Any], watch: _Watch, given: dict[str, Any]) -> Any:
    """Return what torch's multi-head attention gives with its weights, and let a call without them tell of it."""
    with _watching(_NOBODY):
        answer = original(**given)
    output = None
    if watch.record is not None and watch.record.gradients and answer[0].requires_grad:
        output = OutputGradient()
        output.watch(answer[0], before_projection(given["out_proj_weight"], given["num_heads"]))
    with torch.no_grad(), _watching(replace(watch, output=output)):
        original(**given | {"need_weights": False, "dropout_p": 0.0})
    return answer


def _slow(original: Callable[[], bool]) -> Callable[[], bool]:
    """Return whether torch's modules may take their fast paths, which nobody can look into: not in an intervention."""

    @functools.wraps(original)
    def get_fastpath_enabled() -> bool:
        return original() and (torch.compiler.is_compiling() or not _active.get().interventions)

    return get_fastpath_enabled


def _interface(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return transformers' choice of an attention function, whose calls tell of themselves."""

    @functools.wraps(original)
    def get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = original(self, attn_implementation, default)
        if _active.get() is _NOBODY:
            return function
        ours = getattr(function, "__module__", "").startswith("regard.")
        kind: Any = "eager" if function is default else "regard" if ours else "other"
        tell = functools.partial(arguments.of_transformers, kind)
        return _wrapped(function, tell, rows_first=True)

    return get_interface
