"""Intercept calls of attention while a model runs, to record, patch or ablate them.

Dimensions: B batch, H query heads, G key–value heads, L queries, S keys, E width of a head.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, FrameType, FunctionType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

import regard
from regard import Aux
from regard._utils.errors import described, rejected, shape
from regard._utils.torch_private import (
    fused_attention,
    fused_layer,
    in_backward,
    is_batched,
    is_fake,
    is_jit_tracing,
    is_proxied,
    uncompiled,
)
from regard._utils.tracing import observing_calls
from regard.inspect._capture.products import FEATURES, PARTS, ProductObserver, Read, kernels, matrices
from regard.inspect._capture.record import Record
from regard.inspect._capture.recurrences import NOT_ASKED, Weights, of_trained, recurrences
from regard.inspect._capture.running import ModuleCalls, Observing, Running, in_compiled_code, thread
from regard.inspect._record.calls import (
    AttentionCall,
    Change,
    OutputGradient,
    Projected,
    before_projection,
    heads_first,
    lengths_of,
    visible_pairs,
)
from regard.inspect._record.layer_record import LayerRecord
from regard.inspect._record.numbering import found_layers, known_name, listed, matching, names_cross_attention
from regard.inspect._record.recording import (
    UNKNOWN,
    Caller,
    LayerTracker,
    caller_of,
    looks_like_attention,
)
from regard.masks import Extent, Submatrix, as_mask
from regard.scores import ScoreMod, ScoreModFunction

# Turn the arguments of each function that computes attention into an AttentionCall ------------------------------------


#: The block size by which FlexAttention says "no mask".
_UNLIMITED = 1 << 30


def of_sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,  # noqa: ARG001
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,  # noqa: ARG001
) -> AttentionCall:  # fmt: skip
    """``scaled_dot_product_attention``."""
    return AttentionCall(query, key, attn_mask, is_causal=is_causal, scale=scale, value=value)


def of_kernel(given: Mapping[str, Any]) -> AttentionCall:
    """One of the operators that ``scaled_dot_product_attention`` dispatches to, with its arguments by name."""
    mask = given.get("attn_mask", given.get("attn_bias"))
    return AttentionCall(
        given["query"], given["key"], mask, is_causal=bool(given.get("is_causal", False)), scale=given.get("scale"),
        value=given["value"],
    )  # fmt: skip


def of_regard(signature: inspect.Signature, *args: Any, **kwargs: Any) -> AttentionCall:
    """:func:`regard.attention`; the first argument is its signature."""
    given = signature.bind(*args, **kwargs)
    given.apply_defaults()
    names = ("query", "key", "value", "is_causal", "scale", "score", "normalizer", "softcap", "order")
    return AttentionCall(mask=given.arguments["attn_mask"], **{name: given.arguments[name] for name in names})


def of_flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreModFunction | None = None, block_mask: Any = None,
    scale: float | None = None, *_: Any, **__: Any,
) -> AttentionCall:  # fmt: skip
    """Torch's ``flex_attention``; a mask of a single block of unlimited size hides nothing."""
    score = None if score_mod is None else ScoreMod(score_mod)
    hides = block_mask is not None and max(block_mask.BLOCK_SIZE) < _UNLIMITED
    mask = as_mask(block_mask) if hides else None
    return AttentionCall(query, key, mask, scale=scale, score=score, value=value)


def of_fused_attention(query: Tensor, key: Tensor, *others: Any) -> Projected:
    """Torch's fused attention: (value, width, heads, weight, bias, out, out, mask, needs weights, average, kind)."""
    width, heads, weight, bias = others[1:5]
    mask, kind = others[7], others[10]
    if query.is_nested:
        key = query
    return _projected(query, key, width, heads, weight, bias, mask, kind)


def of_fused_layer(source: Tensor, width: int, heads: int, weight: Tensor, bias: Tensor, *others: Any) -> Projected:
    """Torch's fused layer: (out, out, act, first, eps, norm, norm, norm, norm, 4 of the hidden layer, mask, kind)."""
    first, eps, norm, shift = others[3:7]
    mask, kind = (*others[13:15], None, None)[:2]
    rows = F.layer_norm(source, (width,), norm, shift, eps) if first else source
    return _projected(rows, rows, width, heads, weight, bias, mask, kind)


def _projected(
    query: Tensor, key: Tensor, width: int, heads: int, weight: Tensor, bias: Tensor, mask: Tensor | None, kind: Any
) -> Projected:
    if query.is_nested:  # a batch without padding
        lengths = lengths_of(query)
        query = key = torch.nested.to_padded_tensor(query, 0.0)
        mask = visible_pairs(lengths, lengths)
    elif mask is not None:  # True hides; kind 0 masks pairs, kind 1 masks keys
        mask = ~mask if mask.dtype == torch.bool else mask
        mask = mask[:, None, None] if kind == 1 and mask.dim() == 2 else mask
    return Projected(query, key, weight[: 2 * width], bias[: 2 * width], heads, mask)


def of_transformers(
    kind: Literal["eager", "regard", "other"],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *_: Any,
    **kwargs: Any,
) -> AttentionCall | str:
    """Any attention function of transformers: the model's own ("eager"), ours ("regard"), or another.

    A reason instead if the call has a keyword with an unknown effect on the weights.
    """
    from regard.integrations.transformers.attention_function import layer_inputs, unknown_keyword
    from regard.integrations.transformers.configuration import parts_of

    if unknown_keyword(kwargs) is not None:
        return _UNKNOWN
    causal = kwargs.get("is_causal")
    if kind == "eager":
        causal = False
        if isinstance(attention_mask, Tensor) and attention_mask.dtype == torch.bool:  # eager adds it to the scores
            attention_mask = attention_mask.to(query.dtype)
    elif kind == "other" and causal is None:  # transformers then calls torch's kernel with is_causal
        causal = bool(getattr(module, "is_causal", True))
    if kind != "regard":  # the masks of transformers already cover packed positions
        kwargs["packed"] = False
    names = inspect.signature(layer_inputs).parameters.keys() - {"is_causal", "others"}
    inputs = layer_inputs(
        module, query, key, attention_mask, causal, **{name: kwargs[name] for name in names if name in kwargs}
    )
    mask = inputs.mask
    if getattr(module, "is_causal", False):
        key, mask = _seen(query, key, mask)
    parts, scale, sinks = parts_of(module), kwargs.get("scaling"), inputs.sink
    if sinks is not None and sinks.dim() == 1:
        sinks = sinks.view(1, -1, 1)
    return AttentionCall(
        query, key, mask, scale=scale, softcap=kwargs.get("softcap"), score=parts.score, normalizer=parts.normalizer,
        sinks=sinks, value=value[:, :, : key.shape[2]], difference=_difference(module),
    )  # fmt: skip


@torch.no_grad()
def _difference(module: nn.Module) -> float | None:
    """Return λ of a differential layer (Ye et al. 2024, arXiv 2410.05258); None for any other layer."""
    names = [f"lambda_{name}" for name in ("q1", "k1", "q2", "k2", "init")]
    if not all(hasattr(module, name) for name in names):
        return None
    *pairs, start = (getattr(module, name) for name in names)
    first, second = (torch.exp((one * other).sum(dtype=torch.float32)) for one, other in zip(pairs[::2], pairs[1::2]))
    return float(first - second + start)


def _seen(query: Tensor, key: Tensor, mask: Any) -> tuple[Tensor, Any]:
    """Return the keys and their mask without the unused end of a static cache."""
    (B, H, L, _), S = query.shape, key.shape[2]
    if mask is None or S <= L:
        return key, mask
    extent = Extent(B, H, L, S)
    bound = as_mask(mask).bind(extent, query.device)
    if isinstance(mask, Tensor):
        shown = (mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min).flatten(0, -2).any(0)
        stop = int((shown * torch.arange(1, len(shown) + 1, device=mask.device)).max())
    else:
        span = bound.intervals(extent)
        stop = S if span is None else int(span[1].max())
    return (key, mask) if stop >= S else (key[:, :, :stop], Submatrix(bound, extent, 0, 0))


# Observe every call of attention without changing its result ----------------------------------------------------------
# During a capture, wrappers replace the functions that compute attention, in every Python module that holds them by
# name; a wrapper calls the function and then reports the call. Calls that bypass these functions are seen operator by
# operator: torch's attention kernels, and softmaxes that are multiplied with values (products.py). The calls of modules
# show which ones run in each thread (running.py). An intervention applies to its own thread or task only; a capture
# also follows its model into other threads.


@dataclass(frozen=True)
class _Watch:
    """What to do with the calls of a thread or task: a record to fill, and interventions to apply."""

    record: Record | None = None
    #: The records of the captures around it, the innermost last.
    records: tuple[Record, ...] = ()
    interventions: tuple[Intervention, ...] = ()
    #: Receives the output gradient of the next call, which runs a second time.
    output: OutputGradient | None = None


#: No capture in this thread or task; and a call inside another that is already recorded as a whole.
_INACTIVE, _NESTED = _Watch(), _Watch()
_active: ContextVar[_Watch] = ContextVar("watch", default=_INACTIVE)
#: The records being filled, with their models.
_captures: dict[int, tuple[Record, nn.Module | None]] = {}
#: The code of :func:`regard.attention`, whatever name it is called by.
_OURS = regard.attention.__code__
_FUNCTIONS = (FunctionType, BuiltinFunctionType, staticmethod)
#: Python modules whose calls are not replaced: they run inside a recorded call, or when a record is read.
_INNER = ("regard.functional", "regard.engines", "regard.inspect", "regard.nn.linear.recurrence_weights")


class _Replacement:
    """The installed wrappers, as long as any thread has a capture or an intervention."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches = 0
        self._undo: list[Callable[[], None]] = []
        #: A factory of wrappers for each function, by its id; and the ids of the wrappers made.
        self._makers: dict[int, Callable[[Any], Any]] = {}
        self._made: set[int] = set()

    @contextmanager
    def around(self, model: nn.Module | None) -> Iterator[None]:
        """Replace the functions, including those that a model's modules hold as attributes; restore them at the end."""
        with self._lock:
            if not self._watches:
                self._makers = _makers()
                for held, key in _holders(self._makers):
                    self._put(vars(held), key, functools.partial(setattr, held, key))
                _replace_fused(self._undo)
                self._undo.append(_module_calls.replace())
            for owner, key in () if model is None else _attributes(model):
                self._put(vars(owner), key, functools.partial(setattr, owner, key))
            self._watches += 1
        try:
            with observing_calls():
                yield
        finally:
            with self._lock:
                self._watches -= 1
                while self._undo and not self._watches:
                    self._undo.pop()()
                if not self._watches:  # other functions may get the ids of the wrappers
                    self._made.clear()

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
def recording(record: Record, model: nn.Module | None) -> Iterator[None]:
    """Add the calls of attention in the block to a record."""
    watch = _active.get()
    outer = watch.records
    watch = replace(watch, record=record, records=(*outer, record))
    _captures[id(record)] = (record, model)
    try:
        with _replacement.around(model), _watching(watch), _observing():
            yield
    finally:
        del _captures[id(record)]
        record.tracker.forget()
        for each in outer if len(record) else ():
            is_shared = not each.names or not record.names or bool(each.names.keys() & record.names.keys())
            each.ledger.shadowed |= is_shared


@contextmanager
def intervening(intervention: Intervention, model: nn.Module) -> Iterator[None]:
    """Apply an intervention to the calls of one layer in the block."""
    watch = _active.get()
    watch = replace(watch, interventions=(*watch.interventions, intervention))
    with _replacement.around(model), _watching(watch):
        yield


def _makers() -> dict[int, Callable[[Any], Any]]:
    parsers: list[tuple[Callable[..., Any], Callable[..., AttentionCall | str]]] = [
        (F.scaled_dot_product_attention, of_sdpa),
        (regard.attention, functools.partial(of_regard, inspect.signature(regard.attention))),
    ]
    if (flex := sys.modules.get("torch.nn.attention.flex_attention")) is not None:  # whose import takes seconds
        parsers.append((flex.flex_attention, of_flex_attention))
    found: dict[int, Callable[[Any], Any]] = {
        id(function): functools.partial(_wrapped, parse=parse) for function, parse in parsers
    }
    found |= {id(each): functools.partial(_wrapped_recurrence, weights=weights) for each, weights in recurrences()}
    return found | {id(F.multi_head_attention_forward): _wrapped_multi_head}


def _replace_fused(undo: list[Callable[[], None]]) -> None:
    wrappers: list[tuple[Any, str, Any]] = [
        (torch, fused_attention.__name__, functools.partial(_wrapped, parse=of_fused_attention)),
        (torch, fused_layer.__name__, functools.partial(_wrapped, parse=of_fused_layer, part="self_attn")),
        (torch.backends.mha, "get_fastpath_enabled", _without_fast_path),
    ]
    if (modeling := sys.modules.get("transformers.modeling_utils")) is not None:
        wrappers.append((modeling.AttentionInterface, "get_interface", _interface))
    if (generation := sys.modules.get("transformers.generation.utils")) is not None:
        from regard.integrations.transformers.generation import beam_search_name

        if (name := beam_search_name(generation.GenerationMixin)) is not None:
            wrappers.append((generation.GenerationMixin, name, _beam_search))
    for owner, name, make in wrappers:
        original = vars(owner)[name]
        undo.append(functools.partial(setattr, owner, name, original))
        setattr(owner, name, make(original))


#: For each Python module: the id and size of its namespace, the number of functions searched for, and the names found.
_scanned: dict[str, tuple[int, int, int, tuple[str, ...]]] = {}


def _holders(functions: Collection[int]) -> Iterator[tuple[Any, str]]:
    """Yield each Python module that holds one of the functions (given by their ids), with the name; skip inner ones.

    A module is scanned once, and again when its namespace changes: thousands of modules are loaded.
    """
    for name, module in list(sys.modules.items()):
        if module is None or name.startswith(_INNER):
            continue
        held = getattr(module, "__dict__", {})
        scan, now = _scanned.get(name), (id(held), len(held), len(functions))
        if scan is None or name == "__main__" or scan[:3] != now:
            keys = tuple(key for key, value in list(held.items()) if id(uncompiled(value)) in functions)
            _scanned[name] = scan = (*now, keys)
        yield from ((module, key) for key in scan[3] if key in held)


def _attributes(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """Yield the modules of a model and their classes, with the name of each attribute that may hold a function."""
    classes = {each for module in model.modules() for each in type(module).__mro__} - {nn.Module, object}
    for owner in (*model.modules(), *classes):
        yield from ((owner, key) for key, value in list(vars(owner).items()) if isinstance(value, _FUNCTIONS))


def _wrapped(
    function: Callable[..., Any],
    parse: Callable[..., AttentionCall | Projected | str],
    *,
    part: str = "",
    rows_first: bool = False,
) -> Callable[..., Any]:
    """Return a wrapper that calls a function, records the call, and applies the interventions of its thread.

    ``parse`` turns the arguments into an AttentionCall, or says why it cannot, ``part`` is the name of the attention
    inside its module, and ``rows_first`` means that outputs are (B, L, H, V).
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        watch = _INACTIVE if torch.compiler.is_compiling() else _active.get()
        # With activation checkpointing, the backward pass runs recorded layers again.
        record = None if watch is _INACTIVE or in_backward() else watch.record
        if record is None and not watch.interventions:
            if watch is _INACTIVE and not torch.compiler.is_compiling():
                _count_other_thread()
            return function(*args, **kwargs)
        with _watching(_NESTED):
            answer = function(*args, **kwargs)
        if record is not None and (unreadable := _unreadable(answer)) is not None:
            record.ledger.skip(unreadable)
            record, thread.recorded = None, thread.recorded + 1
            if not watch.interventions:
                return answer
        attended = parse(*args, **kwargs)
        if isinstance(attended, str):
            if record is not None:
                record.ledger.skip(attended)
                thread.recorded += 1
            if watch.interventions:
                raise ValueError(f"A call of attention cannot be patched or ablated: it {attended}.")
            return answer
        for each in watch.interventions:
            assert isinstance(attended, AttentionCall)  # fused layers do not run during an intervention
            if each.concerns(caller_of(each.names, part), attended):
                answer, attended = _changed(each, answer, attended, rows_first)
        if record is None:
            return answer
        if isinstance(attended, AttentionCall) and attended.query.is_nested:
            attended = attended.padded()
        elif isinstance(attended, AttentionCall) and attended.difference is not None and thread.stack:
            if thread.stack[-1].combined:  # a second call applies the same weights to the other half of the values
                return answer
            thread.stack[-1].combined = True
            attended = attended.combined()
        elif record.gradients and isinstance(attended, AttentionCall):
            attended = replace(attended, output=watch.output or _output_gradient(answer, rows_first))
        _record_call(record, attended, part)
        return answer

    return call


def _wrapped_recurrence(function: Callable[..., Any], *, weights: Weights) -> Callable[..., Any]:
    """Return a wrapper that calls a recurrence, and records its effective weights if the capture asks for them."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        watch = _INACTIVE if torch.compiler.is_compiling() else _active.get()
        record = None if watch is _INACTIVE or in_backward() else watch.record
        if record is None:
            return function(*args, **kwargs)
        with _watching(_NESTED):
            answer = function(*args, **kwargs)
            if (unreadable := _unreadable(answer)) is not None:
                record.ledger.skip(unreadable)
                thread.recorded += 1
                return answer
            found = weights(function, *args, **kwargs) if record.recurrences or weights is of_trained else NOT_ASKED
        if isinstance(found, Tensor):
            _record_call(record, AttentionCall.of_weights(found.float()), reads="linear")
            return answer
        thread.missed += 1
        owner = next((each.module for each in reversed(thread.stack) if id(each.module) in record.names), None)
        if owner is None:
            record.ledger.skip(f"came from {found}")
        else:
            record.ledger.miss(record.names[id(owner)], type(owner).__name__, f"it is {found}")
        return answer

    return call


_TRACED = "ran under make_fx tracing and could not be recorded"
_BATCHED = "ran under torch.func.vmap and could not be recorded"
_UNKNOWN = "got keywords of unknown meaning from the model and could not be recorded"
_WITHOUT_VALUES = "had tensors without values (meta or fake tensors) and could not be recorded"


def _unreadable(answer: Any) -> str | None:
    """Return why the values of a call with this output cannot be read, or None if they can."""
    output = answer[0] if isinstance(answer, tuple) else answer
    if is_proxied():
        return _TRACED
    if not isinstance(output, Tensor):
        return None
    return _WITHOUT_VALUES if output.is_meta or is_fake(output) else _BATCHED if is_batched(output) else None


def _count_other_thread() -> None:
    """Count a call in a thread without a capture, for the captures that have no model to follow."""
    for record, model in tuple(_captures.values()):
        if model is None:
            record.ledger.skip("ran in other threads; capture(model) follows its model into any thread")


def _record_call(
    record: Record, attended: AttentionCall | Projected, part: str = "", running: Sequence[Running] | None = None,
    reads: str | None = None,
) -> None:  # fmt: skip
    """Add a call to a record, described by the modules that are running."""
    running = thread.stack if running is None else running
    caller = caller_of(record.names, part)
    if running is not thread.stack:
        named = (record.names[id(each.module)] for each in reversed(running) if id(each.module) in record.names)
        caller = replace(caller, name=next(named, caller.name))
    thread.recorded += 1
    caller = _described(caller, attended, running)
    record.add(caller if reads is None else replace(caller, reads=reads), attended)


def _described(caller: Caller, attended: AttentionCall | Projected, running: Sequence[Running]) -> Caller:
    if not running:
        return caller
    query, key = attended.query, attended.key
    L, S = (each.shape[1] if isinstance(attended, Projected) else each.shape[-2] for each in (query, key))
    B = math.prod(query.shape[:1] if isinstance(attended, Projected) else query.shape[:-3])
    return replace(caller, reads=running[-1].reads(L, S), windows=_windows(running[0], B))


def _windows(outer: Running, B: int) -> int:
    """Return how many windows each sequence is cut into; B is the batch size of the attention."""
    given = next((each for each in outer.inputs.values() if isinstance(each, Tensor) and each.dim() > 1), None)
    if given is None or not given.shape[0] or B % given.shape[0]:
        return 1
    if given.dim() < 4 and B in given.shape[:2]:  # also (L, B, C); for images, the second dimension is channels
        return 1
    return B // given.shape[0]


def _current_record() -> Record | None:
    """Return the record that the operators of this thread go to; None while they are not recorded."""
    watch = _active.get()
    if watch.record is None or torch.compiler.is_compiling() or in_backward() or is_jit_tracing() or is_proxied():
        return None
    return watch.record


def _read(read: Read) -> None:
    """Record a softmax that was multiplied with values, once its module has finished."""
    record = _current_record()
    assert record is not None
    if _is_skipped(record):
        return
    found = matrices(read)
    if found is None:
        if read.running:
            read.running[-1].reasons.append(PARTS)
        return
    weights, value = found
    owner = read.running[-1] if read.running else None
    positions = owner.positions() if owner is not None else set()
    if owner is not None and positions and not positions & set(weights.shape[2:]):
        owner.reasons.append(FEATURES)
        return
    attended = AttentionCall.of_weights(weights.detach().clone(), None if value is None else value.detach().clone())
    if owner is None:
        _record_call(record, attended, running=())
    else:
        caller = caller_of(record.names)
        named = (record.names[id(each.module)] for each in reversed(read.running) if id(each.module) in record.names)
        caller = _described(replace(caller, name=next(named, caller.name)), attended, read.running)
        owner.pending.append(functools.partial(record.add, caller, attended))


def _kernel(func: Any, args: Sequence[Any], kwargs: dict[str, Any], answer: Any) -> bool:
    """Record a call of one of torch's attention kernels that did not go through a wrapper."""
    if func not in _kernels():
        return False
    record = _current_record()
    assert record is not None
    if _is_skipped(record):
        return True
    if (unreadable := _unreadable(answer)) is not None:
        record.ledger.skip(unreadable)
        return True
    names = [each.name for each in func._schema.arguments]
    given = dict(zip(names, args)) | kwargs
    _record_call(record, of_kernel(given))
    return True


@functools.cache
def _kernels() -> frozenset[Any]:
    return frozenset(kernels())


def _is_skipped(record: Record) -> bool:
    """Whether the running call cannot be recorded at this point; if so, count it."""
    if in_compiled_code():
        record.ledger.skip("ran in compiled code, which hides its modules")
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _OURS:
        frame = frame.f_back
    if frame is None:
        return False
    record.ledger.skip("reached regard.attention through a partial or a closure, which capture cannot replace")
    return True


def _observing() -> Observing:
    return Observing(lambda: ProductObserver(lambda: _current_record() is not None, _read, _kernel))


def _begins(module: nn.Module) -> bool:
    """Whether to follow a module that begins to run: in a capture, or in another thread that runs a captured model."""
    watch = _active.get()
    record = _record_for(watch, module)
    if record is None or (isinstance(module, GraphModule) and id(module) not in record.names):  # compiled code
        return False
    return watch.record is not None or watch is _INACTIVE


def _record_for(watch: _Watch, module: nn.Module) -> Record | None:
    """Return the record for a module that begins to run: the innermost that has its model, or that of the block."""
    for record in reversed(watch.records):
        if not record.names or id(module) in record.names:
            return record
    captures = tuple(_captures.values())
    return next((record for record, _ in captures if id(module) in record.names), watch.record)


def _begun(running: Running) -> None:
    watch = _active.get()
    record = _record_for(watch, running.module)
    assert record is not None
    if record is not watch.record:  # in a thread or task other than the capture's, or in the block of another capture
        _active.set(replace(watch, record=record))
        running.leave.append(functools.partial(_active.set, watch))
    if id(running.module) in record.names or not record.names:
        record.ledger.modules += 1
    if thread.observers == 0:
        observing = _observing()
        observing.__enter__()
        running.leave.append(lambda: observing.__exit__(None, None, None))


def _ended(running: Running) -> None:
    """Record what was seen of a module that has finished, or note that nothing was seen."""
    record = _active.get().record
    leave = running.leave
    for each in reversed(leave):
        each()
    if record is None:
        return
    if not running.reasons:
        for add in running.pending:
            thread.recorded += 1
            add()
    name = record.names.get(id(running.module), "")
    whole = not running.reasons and PARTS not in running.hints
    if whole and (thread.recorded > running.recorded or thread.missed > running.missed):
        return
    if looks_like_attention(running.module, name):
        thread.missed += 1
        record.ledger.miss(name, type(running.module).__name__, next(iter((*running.reasons, *running.hints)), UNKNOWN))


_module_calls = ModuleCalls(_begins, _begun, _ended)


def _beam_search(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap transformers' beam search, so that the record gets the beam indices of each returned sequence."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def search(*args: Any, **kwargs: Any) -> Any:
        watch = _active.get()
        bound = signature.bind(*args, **kwargs)
        followed = watch is _INACTIVE or watch.record is not None
        record = _record_for(watch, bound.arguments["self"]) if followed else None
        if record is None:
            return original(*args, **kwargs)
        wanted = bound.arguments["generation_config"]
        bound.arguments["generation_config"] = changed = copy.copy(wanted)
        changed.return_dict_in_generate = True
        with record.beam_search() as found:
            answer = original(*bound.args, **bound.kwargs)
            found.indices = answer.beam_indices
        return answer if wanted.return_dict_in_generate else answer.sequences

    return search


def _output_gradient(answer: Any, rows_first: bool) -> OutputGradient | None:
    """Return a holder for the gradient of a function's output; None if the output requires no gradient."""
    output = answer[0] if isinstance(answer, tuple) else answer
    if not output.requires_grad:
        return None
    found = OutputGradient()
    found.watch(output, heads_first if rows_first else lambda gradient: gradient)
    return found


def _changed(
    intervention: Intervention, answer: Any, attended: AttentionCall, rows_first: bool
) -> tuple[Any, AttentionCall]:
    """Return a function's output and its call of attention after an intervention."""
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
    """Return a layer's weights (B, H, L, S) after a change, whose weights may cover only the first keys."""
    if change.weights is not None:
        change = replace(change, weights=F.pad(change.weights, (0, weights.shape[-1] - change.weights.shape[-1])))
    found = change.over(Aux(weights=weights), 0, weights.shape[2]).weights
    assert found is not None
    return found


def _wrapped_multi_head(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torch's multi-head attention, which with ``need_weights`` multiplies the matrices itself.

    Without it, it calls ``scaled_dot_product_attention``, which is wrapped and can be recorded and changed.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        watch = _INACTIVE if torch.compiler.is_compiling() else _active.get()
        if watch is _INACTIVE or watch is _NESTED:
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if not given["need_weights"] or (in_backward() and not watch.interventions):
            return original(*args, **kwargs)
        if not watch.interventions:
            return _recorded_with_weights(original, watch, given)
        latest = [each.latest for each in watch.interventions]
        with torch.random.fork_rng():  # in case no intervention concerns this layer and it runs again
            output, _ = original(**given | {"need_weights": False})
        interventions = [each for each, before in zip(watch.interventions, latest) if each.latest is not before]
        with _watching(_NESTED):
            if not interventions:
                return original(*args, **kwargs)
            _, weights = original(**given | {"average_attn_weights": False})
        batched = weights[(None,) * (4 - weights.dim())]
        for each in interventions:
            batched = _weights_with(each.latest, batched)
        weights = batched.reshape(weights.shape)
        return output, weights.mean(-3) if given["average_attn_weights"] else weights

    return call


def _recorded_with_weights(original: Callable[..., Any], watch: _Watch, given: dict[str, Any]) -> Any:
    """Return the output and weights of torch's multi-head attention, and record a second call without weights."""
    with _watching(_NESTED):
        answer = original(**given)
    output = None
    if watch.record is not None and watch.record.gradients and answer[0].requires_grad:
        output = OutputGradient()
        output.watch(answer[0], before_projection(given["out_proj_weight"], given["num_heads"]))
    with torch.no_grad(), _watching(replace(watch, output=output)):
        original(**given | {"need_weights": False, "dropout_p": 0.0})
    return answer


def _without_fast_path(original: Callable[[], bool]) -> Callable[[], bool]:
    """Wrap the check that allows the fast paths of torch's modules, to forbid them during an intervention."""

    @functools.wraps(original)
    def get_fastpath_enabled() -> bool:
        return original() and (torch.compiler.is_compiling() or not _active.get().interventions)

    return get_fastpath_enabled


def _interface(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap transformers' lookup of attention functions, so that the calls of each one are recorded."""

    @functools.wraps(original)
    def get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = original(self, attn_implementation, default)
        if _active.get() is _INACTIVE and not _captures:
            return function
        ours = getattr(function, "__module__", "").startswith("regard.")
        kind: Any = "eager" if function is default else "regard" if ours else "other"
        return _wrapped(function, functools.partial(of_transformers, kind), rows_first=True)

    return get_interface


# Change the attention of a layer while a model runs: remove heads, or replace their weights ---------------------------
# Dimensions: B batch, H query heads, L queries, S keys.


class Intervention:
    """A change to heads of one layer.

    Attributes
    ----------
    function : str
        The function that the user called, for error messages.
    names : mapping of int to str
        The names of the model's modules by ``id(module)``.
    latest : Change
        The change made to the last call.
    """

    def __init__(
        self,
        function: str,
        model: nn.Module,
        layer: int | str,
        head: int | Sequence[int] | None,
        runs: Sequence[Tensor | LayerRecord] = (),
    ) -> None:
        if not isinstance(model, nn.Module):
            raise rejected(function, "model", "be a torch.nn.Module", described(model), TypeError)
        self.function = function
        if isinstance(layer, bool) or not isinstance(layer, int | str):
            raise rejected(function, "layer", "be a number or a name", described(layer), TypeError)
        self.names: Mapping[int, str] = {id(module): name for name, module in model.named_modules()}
        self.latest = Change(())
        self._layer = known_name(self.names.values(), layer) if isinstance(layer, str) else layer
        self._crossed = any(map(names_cross_attention, self.names.values()))
        self._head, self._runs = head, runs
        self._tracker = LayerTracker()
        #: The positions of the layers that were changed.
        self._changed: set[int] = set()
        self._calls = 0

    def concerns(self, caller: Caller, attended: AttentionCall) -> bool:
        """Whether a call belongs to the layer."""
        if attended.query.is_nested:
            run, _ = self._tracker.run_of(caller, None, None)
        else:
            call = attended.flat()
            run, _ = self._tracker.run_of(caller, call.query, call.marks)
        at = self._tracker.layers.index(run.layer)
        if at not in matching(self._layer, self._tracker.named(), within=True, crossed=self._crossed):
            return False
        self._changed.add(at)
        return True

    def change(self, attended: AttentionCall) -> Change:
        """Return the change to make to a call."""
        if attended.query.is_nested:
            raise rejected(self.function, "layer", "use tensors that are not nested", repr(self._layer))
        *lead, H, L, _ = (1, 1, *attended.query.shape)
        B, S = torch.Size(torch.broadcast_shapes(lead, attended.key.shape[:-3])).numel(), attended.key.shape[-2]
        heads = self._heads(H)
        weights = None
        if self._runs:
            given = self._runs[self._calls % len(self._runs)]
            weights = given.weights() if isinstance(given, LayerRecord) else given
            if weights.dim() > 4 or weights.shape[-2:] != (L, S) or not _fits(weights.shape[:-2], (B, H)):
                expected = f"be of shape {(B, H, L, S)}, or without the first dimensions"
                raise rejected(self.function, "weights", expected, shape(weights))
            weights = weights.expand(B, H, L, S)[:, list(heads)]
        self._calls += 1
        self.latest = Change(heads, weights)
        return self.latest

    def _heads(self, H: int) -> tuple[int, ...]:
        if self._head is None:
            return tuple(range(H))
        heads = (self._head,) if isinstance(self._head, int) else tuple(self._head)
        for each in heads:
            if isinstance(each, bool) or not isinstance(each, int) or not -H <= each < H:
                raise rejected(self.function, "head", f"be one or more numbers below {H}", repr(self._head))
        return tuple(each % H for each in heads)

    def require_calls(self) -> None:
        """Raise if the layer did not run, or another one was changed."""
        self._tracker.forget()
        named = self._tracker.named()
        if not named:
            raise rejected(self.function, "layer", "run in the block", "no call of attention that could be intercepted")
        found = found_layers(self.function, self._layer, named, within=True)
        if set(found) != self._changed:
            expected = f"be a name, because the number was known only after the run, such as {listed(named, found)}"
            raise rejected(self.function, "layer", expected, repr(self._layer))


@contextmanager
def ablate(model: nn.Module, layer: int | str, head: int | Sequence[int] | None = None) -> Iterator[None]:
    """Remove heads of a layer while a ``with`` block runs: their output is zero (Michel 2019, arXiv 1905.10650).

    It works on the same models and functions as :func:`regard.inspect.capture`. Torch's modules do not use their fast
    paths in this thread meanwhile. The model itself is not changed.

    Parameters
    ----------
    model : Module
    layer : int or str
        The name or the number of a layer, as in a :class:`Record` and on its page: 3 is "model.layers.3.self_attn",
        and "cross 3" the cross-attention of an encoder–decoder. If a module runs as several layers, as in ALBERT, its
        name means all of them, and "module#3" the third. Names with and without the first part,
        "model.layers.0.self_attn" and "layers.0.self_attn", are the same, so that those of a model with a head fit the
        model without it. The name of a module that contains layers means all of them.
    head : int or sequence of int, optional
        All by default.

    Raises
    ------
    TypeError, ValueError
        If the model is not a module, the layer has no such head, or the layer did not run in the block. A model that
        was compiled before, for example, does not call the replaced functions.

    Notes
    -----
    Blocks nest; within one layer the inner block applies last. A capture of the same block records zero weights and
    the unchanged log-sum-exp of the scores. With activation checkpointing, run the backward pass inside the block too.

    Examples
    --------
    >>> import torch
    >>> from regard.inspect import ablate
    >>> model = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval()
    >>> x = torch.randn(1, 5, 16)
    >>> with ablate(model, 0):  # without any head, only the bias remains
    ...     out, _ = model(x, x, x)
    >>> torch.equal(out, model.out_proj.bias.expand(1, 5, 16))
    True
    """
    intervention = Intervention("ablate", model, layer, head)
    with intervening(intervention, model):
        yield
    intervention.require_calls()


@contextmanager
def patch(
    model: nn.Module,
    layer: int | str,
    weights: Tensor | LayerRecord | Record,
    head: int | Sequence[int] | None = None,
) -> Iterator[None]:
    """Replace the attention weights of a layer while a ``with`` block runs, by those of another run or any matrix.

    The output of a head is ``Σ_j weights[i, j] · v_j`` with the values of the current run, which receive gradients.
    Weights need not sum to one. Dropout does not apply to them.

    Parameters
    ----------
    model, layer, head
        As in :func:`ablate`.
    weights : Tensor (B, H, L, S), (H, L, S) or (L, S), LayerRecord or Record
        A record supplies the runs of the same layer: the first call in the block uses the first run, the second call
        the second, and so on, starting over after the last.

    Raises
    ------
    TypeError, ValueError
        As in :func:`ablate`, and if the shape of the weights does not match a call.

    Examples
    --------
    >>> import torch
    >>> from regard.inspect import capture, patch
    >>> model = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval()
    >>> x, other = torch.randn(2, 1, 5, 16)
    >>> with capture(model) as record:
    ...     out, _ = model(other, other, other)
    >>> with patch(model, 0, record, head=[1, 2]):
    ...     out, weights = model(x, x, x, average_attn_weights=False)
    >>> torch.equal(weights[:, 1:3], record[0].weights(head=slice(1, 3)))
    True
    """
    if isinstance(weights, Record):
        runs: Sequence[Tensor | LayerRecord] = weights.runs(layer)
    elif isinstance(weights, LayerRecord | Tensor):
        runs = [weights]
    else:
        raise rejected("patch", "weights", "be a Tensor or a record", described(weights), TypeError)
    intervention = Intervention("patch", model, layer, head, runs)
    with intervening(intervention, model):
        yield
    intervention.require_calls()


def _fits(lead: tuple[int, ...], whole: tuple[int, int]) -> bool:
    return all(each in (1, size) for each, size in zip(reversed(lead), reversed(whole)))
