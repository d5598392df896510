"""Calls of attention that are intercepted while a model runs: recorded, patched or ablated.

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
from regard._utils.errors import described, rejected, shape, unknown_name
from regard._utils.torch_private import (
    fused_attention,
    fused_layer,
    in_backward,
    is_fake,
    is_jit_tracing,
    is_proxied,
    uncompiled,
)
from regard._utils.tracing import observing_calls
from regard.inspect._capture.products import FEATURES, PARTS, ProductObserver, Read, kernels, matrices
from regard.inspect._capture.record import Record
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
from regard.inspect._record.layer_tracker import Caller, LayerTracker, caller_of, chosen
from regard.inspect._record.recording import UNKNOWN, looks_like_attention
from regard.masks import Extent, Submatrix, as_mask
from regard.scores import ScoreMod, ScoreModFunction

# What a call of each function that computes attention says: its arguments as one call of attention --------------------


#: The side of a block of FlexAttention's that stands for no mask.
_UNLIMITED = 1 << 30


def of_sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,  # noqa: ARG001
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,  # noqa: ARG001
) -> AttentionCall:  # fmt: skip
    """``scaled_dot_product_attention``."""
    return AttentionCall(query, key, attn_mask, is_causal=is_causal, scale=scale, value=value)


def of_kernel(given: Mapping[str, Any]) -> AttentionCall:
    """One of torch's operators that ``scaled_dot_product_attention`` chooses from, with its arguments by name."""
    mask = given.get("attn_mask", given.get("attn_bias"))
    return AttentionCall(
        given["query"], given["key"], mask, is_causal=bool(given.get("is_causal", False)), scale=given.get("scale"),
        value=given["value"],
    )  # fmt: skip


def of_regard(signature: inspect.Signature, *args: Any, **kwargs: Any) -> AttentionCall:
    """:func:`regard.attention`, whose signature comes first."""
    given = signature.bind(*args, **kwargs)
    given.apply_defaults()
    names = ("query", "key", "value", "is_causal", "scale", "score", "normalizer", "softcap")
    return AttentionCall(mask=given.arguments["attn_mask"], **{name: given.arguments[name] for name in names})


def of_flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreModFunction | None = None, block_mask: Any = None,
    scale: float | None = None, *_: Any, **__: Any,
) -> AttentionCall:  # fmt: skip
    """Torch's ``flex_attention``; a mask of one block of unlimited size hides nothing."""
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
    if query.is_nested:  # whose padding was taken out
        lengths = lengths_of(query)
        query = key = torch.nested.to_padded_tensor(query, 0.0)
        mask = visible_pairs(lengths, lengths)
    elif mask is not None:  # True hides; kind 0 is of pairs, 1 of keys
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
) -> AttentionCall | None:
    """Any attention function of transformers; first comes which: a model's own ("eager"), ours, or another.

    None where a keyword may change what is attended to in a way that is not known.
    """
    from regard.integrations.transformers.attention_function import layer_inputs, unknown_keyword
    from regard.integrations.transformers.configuration import parts_of

    if unknown_keyword(kwargs) is not None:
        return None
    causal = kwargs.get("is_causal")
    if kind == "eager":
        causal = False
        if isinstance(attention_mask, Tensor) and attention_mask.dtype == torch.bool:  # which is added like any other
            attention_mask = attention_mask.to(query.dtype)
    elif kind == "other" and causal is None:  # as torch's kernel is called: no mask is a causal one
        causal = bool(getattr(module, "is_causal", True))
    if kind != "regard":  # their masks say what is seen, whatever positions are
        kwargs["packed"] = False
    names = inspect.signature(layer_inputs).parameters.keys() - {"is_causal", "others"}
    inputs = layer_inputs(
        module, query, key, attention_mask, causal, **{name: kwargs[name] for name in names if name in kwargs}
    )
    mask = inputs.mask
    if getattr(module, "is_causal", False):
        key, mask = _seen(query, key, mask)
    parts, scale = parts_of(module), kwargs.get("scaling")
    return AttentionCall(
        query, key, mask, scale=scale, softcap=kwargs.get("softcap"), score=parts.score, normalizer=parts.normalizer,
        sinks=inputs.sink, value=value[:, :, : key.shape[2]], difference=_difference(module),
    )  # fmt: skip


@torch.no_grad()
def _difference(module: nn.Module) -> float | None:
    """Return λ of a differential layer (Ye et al. 2024, arXiv 2410.05258); None of any other."""
    names = [f"lambda_{name}" for name in ("q1", "k1", "q2", "k2", "init")]
    if not all(hasattr(module, name) for name in names):
        return None
    *pairs, start = (getattr(module, name) for name in names)
    first, second = (torch.exp((one * other).sum(dtype=torch.float32)) for one, other in zip(pairs[::2], pairs[1::2]))
    return float(first - second + start)


def _seen(query: Tensor, key: Tensor, mask: Any) -> tuple[Tensor, Any]:
    """Return the keys, and the mask of them, without the room that a static cache has behind those that are there."""
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


# Calls of attention, noticed wherever they are made, without changing what they compute -------------------------------
# While something is captured, the functions that compute attention are replaced, in every module that holds them by
# name, by wrappers that call them and then report the call. What reaches torch without these functions is seen operator
# by operator: torch's kernels of attention, and softmaxes that are multiplied with values (products.py). Which modules
# run, in every thread, is known by their calls (running.py). An intervention is of its own thread or task alone; a
# capture also follows its model into other threads.


@dataclass(frozen=True)
class _Watch:
    """Who wants to know of calls."""

    record: Record | None = None
    interventions: tuple[Intervention, ...] = ()
    #: Of the output that the next call computes a second time, where somebody wants it.
    output: OutputGradient | None = None


#: Of a thread or task that knows of no capture, and of a call within another that is seen as a whole.
_NOBODY, _SILENT = _Watch(), _Watch()
_active: ContextVar[_Watch] = ContextVar("watch", default=_NOBODY)
#: The records that are filled now, with their models.
_captures: dict[int, tuple[Record, nn.Module | None]] = {}
#: The code of :func:`regard.attention`, by whatever name it is called.
_OURS = regard.attention.__code__
_FUNCTIONS = (FunctionType, BuiltinFunctionType, staticmethod)
#: Modules that compute what the call of another tells of, or what somebody reads of a record.
_INNER = ("regard.functional", "regard.engines", "regard.inspect")


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
    _captures[id(record)] = (record, model)
    try:
        with _replacement.around(model), _watching(replace(_active.get(), record=record)), _observing():
            yield
    finally:
        del _captures[id(record)]
        record.tracker.forget()


@contextmanager
def intervening(intervention: Intervention, model: nn.Module) -> Iterator[None]:
    """Let calls of attention of one layer give what an intervention makes of their outputs."""
    watch = _active.get()
    watch = replace(watch, interventions=(*watch.interventions, intervention))
    with _replacement.around(model), _watching(watch):
        yield


def _makers() -> dict[int, Callable[[Any], Any]]:
    tells: list[tuple[Callable[..., Any], Callable[..., AttentionCall]]] = [
        (F.scaled_dot_product_attention, of_sdpa),
        (regard.attention, functools.partial(of_regard, inspect.signature(regard.attention))),
    ]
    if (flex := sys.modules.get("torch.nn.attention.flex_attention")) is not None:  # whose import takes seconds
        tells.append((flex.flex_attention, of_flex_attention))
    found: dict[int, Callable[[Any], Any]] = {
        id(function): functools.partial(_wrapped, tell=tell) for function, tell in tells
    }
    return found | {id(F.multi_head_attention_forward): _weighing}


def _replace_fused(undo: list[Callable[[], None]]) -> None:
    wrappers: list[tuple[Any, str, Any]] = [
        (torch, fused_attention.__name__, functools.partial(_wrapped, tell=of_fused_attention)),
        (torch, fused_layer.__name__, functools.partial(_wrapped, tell=of_fused_layer, part="self_attn")),
        (torch.backends.mha, "get_fastpath_enabled", _slow),
    ]
    if (modeling := sys.modules.get("transformers.modeling_utils")) is not None:
        wrappers.append((modeling.AttentionInterface, "get_interface", _interface))
    if (generation := sys.modules.get("transformers.generation.utils")) is not None:
        from regard.integrations.transformers._interfaces import beam_search_name

        if (name := beam_search_name(generation.GenerationMixin)) is not None:
            wrappers.append((generation.GenerationMixin, name, _beam_search))
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
    tell: Callable[..., AttentionCall | Projected | None],
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
            if watch is _NOBODY and not torch.compiler.is_compiling():
                _elsewhere()
            return function(*args, **kwargs)
        with _watching(_SILENT):
            answer = function(*args, **kwargs)
        if record is not None and (is_proxied() or _is_empty(answer)):
            record.ledger.leave_out(_TRACED if is_proxied() else _WITHOUT_VALUES)
            record, thread.recorded = None, thread.recorded + 1
            if not watch.interventions:
                return answer
        attended = tell(*args, **kwargs)
        if attended is None:
            if record is not None:
                record.ledger.leave_out(_UNKNOWN)
                thread.recorded += 1
            if watch.interventions:
                raise ValueError(f"a call of attention {_UNKNOWN}, nor changed.")
            return answer
        for each in watch.interventions:
            assert isinstance(attended, AttentionCall)  # fused layers do not run while somebody intervenes
            if each.concerns(caller_of(each.names, part), attended):
                answer, attended = _changed(each, answer, attended, rows_first)
        if record is None:
            return answer
        if isinstance(attended, AttentionCall) and attended.query.is_nested:
            attended = attended.padded()
        elif isinstance(attended, AttentionCall) and attended.difference is not None and thread.stack:
            if thread.stack[-1].combined:  # it reads the other half of the values with the same weights
                return answer
            thread.stack[-1].combined = True
            attended = attended.combined()
        elif record.gradients and isinstance(attended, AttentionCall):
            attended = replace(attended, output=watch.output or _output_gradient(answer, rows_first))
        _tell(record, attended, part)
        return answer

    return call


_TRACED = "ran while make_fx traced it, and could not be recorded"
_UNKNOWN = "got keywords of its model whose meaning is not known, and could not be recorded"
_WITHOUT_VALUES = "had tensors without values, as those on the meta device are, and could not be recorded"


def _is_empty(answer: Any) -> bool:
    """Whether an output has a shape and no values."""
    output = answer[0] if isinstance(answer, tuple) else answer
    return isinstance(output, Tensor) and (output.is_meta or is_fake(output))


def _elsewhere() -> None:
    """Count a call of a thread that no capture follows, for those that were given no model to follow."""
    for record, model in tuple(_captures.values()):
        if model is None:
            record.ledger.leave_out("ran in other threads; capture(model) follows its model into any thread")


def _tell(
    record: Record, attended: AttentionCall | Projected, part: str = "", running: Sequence[Running] | None = None
) -> None:
    """Add a call to a record, with what the modules that run say of it."""
    running = thread.stack if running is None else running
    caller = caller_of(record.names, part)
    if running is not thread.stack:
        named = (record.names[id(each.module)] for each in reversed(running) if id(each.module) in record.names)
        caller = replace(caller, name=next(named, caller.name))
    thread.recorded += 1
    record.add(_described(caller, attended, running), attended)


def _described(caller: Caller, attended: AttentionCall | Projected, running: Sequence[Running]) -> Caller:
    if not running:
        return caller
    query, key = attended.query, attended.key
    L, S = (each.shape[1] if isinstance(attended, Projected) else each.shape[-2] for each in (query, key))
    B = math.prod(query.shape[:1] if isinstance(attended, Projected) else query.shape[:-3])
    return replace(caller, reads=running[-1].reads(L, S), windows=_windows(running[0], B))


def _windows(outer: Running, B: int) -> int:
    """Return into how many windows each sequence of a batch is cut, of which B are attended to."""
    given = next((each for each in outer.inputs.values() if isinstance(each, Tensor) and each.dim() > 1), None)
    if given is None or not given.shape[0] or B % given.shape[0]:
        return 1
    if given.dim() < 4 and B in given.shape[:2]:  # (L, B, C) too; of an image, the second are channels
        return 1
    return B // given.shape[0]


def _heard() -> Record | None:
    """Return the record that the operators of this thread are for now."""
    watch = _active.get()
    if watch.record is None or torch.compiler.is_compiling() or in_backward() or is_jit_tracing() or is_proxied():
        return None
    return watch.record


def _read(read: Read) -> None:
    """Record a softmax that was multiplied with values, once its module has run whole."""
    record = _heard()
    assert record is not None
    if _is_left_out(record):
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
        _tell(record, attended, running=())
    else:
        caller = caller_of(record.names)
        named = (record.names[id(each.module)] for each in reversed(read.running) if id(each.module) in record.names)
        caller = _described(replace(caller, name=next(named, caller.name)), attended, read.running)
        owner.pending.append(functools.partial(record.add, caller, attended))


def _kernel(func: Any, args: Sequence[Any], kwargs: dict[str, Any], answer: Any) -> bool:
    """Record a call of one of torch's kernels, made by a function that holds no name that could be replaced."""
    if func not in _kernels():
        return False
    record = _heard()
    assert record is not None
    if _is_left_out(record):
        return True
    if _is_empty(answer):
        record.ledger.leave_out(_WITHOUT_VALUES)
        return True
    names = [each.name for each in func._schema.arguments]
    given = dict(zip(names, args)) | kwargs
    _tell(record, of_kernel(given))
    return True


@functools.cache
def _kernels() -> frozenset[Any]:
    return frozenset(kernels())


def _is_left_out(record: Record) -> bool:
    """Whether the call that is under way cannot be recorded where it is seen; count it if so."""
    if in_compiled_code():
        record.ledger.leave_out("ran in compiled code, where no module is known")
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _OURS:
        frame = frame.f_back
    if frame is None:
        return False
    record.ledger.leave_out(
        "ran in regard.attention by a reference that is not replaced, as a partial or a closure holds one"
    )
    return True


def _observing() -> Observing:
    return Observing(lambda: ProductObserver(lambda: _heard() is not None, _read, _kernel))


def _begins(module: nn.Module) -> bool:
    """Whether to follow a module that begins to run: where something is captured, or its model runs elsewhere."""
    watch = _active.get()
    known = _record_of(module) if watch.record is None else watch.record
    if known is None or (isinstance(module, GraphModule) and id(module) not in known.names):  # what is compiled
        return False
    return watch.record is not None or watch is _NOBODY


def _record_of(module: nn.Module) -> Record | None:
    """Return the record of the model that a module belongs to."""
    return next((record for record, _ in tuple(_captures.values()) if id(module) in record.names), None)


def _begun(running: Running) -> None:
    watch = _active.get()
    if watch is _NOBODY:  # in a thread or task that the capture was not begun in
        record = _record_of(running.module)
        _active.set(replace(watch, record=record))
        running.leave.append(_leave_record)
    record = _active.get().record
    assert record is not None
    if id(running.module) in record.names or not record.names:
        record.ledger.modules += 1
    if thread.observers == 0:
        observing = _observing()
        observing.__enter__()
        running.leave.append(lambda: observing.__exit__(None, None, None))


def _leave_record() -> None:
    _active.set(_NOBODY)


def _ended(running: Running) -> None:
    """Record what was seen of a module that has run, or note that nothing was."""
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
    """Return transformers' beam search, of which a record learns by which beams sequences came."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def search(*args: Any, **kwargs: Any) -> Any:
        watch = _active.get()
        bound = signature.bind(*args, **kwargs)
        record = _record_of(bound.arguments["self"]) if watch is _NOBODY else watch.record
        if record is None:
            return original(*args, **kwargs)
        wanted = bound.arguments["generation_config"]
        bound.arguments["generation_config"] = told = copy.copy(wanted)
        told.return_dict_in_generate = True
        with record.beam_search() as found:
            answer = original(*bound.args, **bound.kwargs)
            found.indices = answer.beam_indices
        return answer if wanted.return_dict_in_generate else answer.sequences

    return search


def _output_gradient(answer: Any, rows_first: bool) -> OutputGradient | None:
    """Return what will hold the gradient of a function's output, where that has one."""
    output = answer[0] if isinstance(answer, tuple) else answer
    if not output.requires_grad:
        return None
    found = OutputGradient()
    found.watch(output, heads_first if rows_first else lambda gradient: gradient)
    return found


def _changed(
    intervention: Intervention, answer: Any, attended: AttentionCall, rows_first: bool
) -> tuple[Any, AttentionCall]:
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
        if watch is _NOBODY or watch is _SILENT:
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
        with _watching(_SILENT):
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
    with _watching(_SILENT):
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
        if _active.get() is _NOBODY and not _captures:
            return function
        ours = getattr(function, "__module__", "").startswith("regard.")
        kind: Any = "eager" if function is default else "regard" if ours else "other"
        tell = functools.partial(of_transformers, kind)
        return _wrapped(function, tell, rows_first=True)

    return get_interface


# Change what a layer attends to while a model runs: remove heads, or give them other weights --------------------------
# Dimensions: B batch, H query heads, L queries, S keys.


class Intervention:
    """What becomes of one layer's heads.

    Attributes
    ----------
    function : str
        Who asked for it, for errors.
    names : mapping of int to str
        The model's modules, by their identities.
    latest : Change
        That of the last call.
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
        self.names: Mapping[int, str] = {id(module): name for name, module in model.named_modules()}
        self.latest = Change(())
        self._layer, self._head, self._runs = layer, head, runs
        self._tracker = LayerTracker()
        self._calls = 0

    def concerns(self, caller: Caller, attended: AttentionCall) -> bool:
        """Whether a call is of the layer."""
        if attended.query.is_nested:
            run, _ = self._tracker.run_of(caller, None, None)
        else:
            call = attended.flat()
            run, _ = self._tracker.run_of(caller, call.query, call.marks)
        return chosen(run.layer, self._tracker.layers, self._layer)

    def change(self, attended: AttentionCall) -> Change:
        """Return the weights of a call."""
        if attended.query.is_nested:
            raise rejected(self.function, "layer", "attend in tensors that are not nested", repr(self._layer))
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
        """Raise where the layer was not among those that ran."""
        self._tracker.forget()
        if self._calls:
            return
        if not self._tracker.layers:
            raise rejected(self.function, "layer", "run in the block", "no call of attention that is seen")
        if isinstance(self._layer, str):
            raise unknown_name(self.function, "layer", self._layer, self._tracker.layers)
        raise rejected(
            self.function, "layer", f"be below {len(self._tracker.layers)}, as many as ran", repr(self._layer)
        )


@contextmanager
def ablate(model: nn.Module, layer: int | str, head: int | Sequence[int] | None = None) -> Iterator[None]:
    """Remove heads of a layer while a ``with`` block runs: their output is zero (Michel 2019, arXiv 1905.10650).

    Seen are the models and functions that :func:`regard.inspect.capture` sees; torch's modules leave their fast paths
    in this thread. The model itself is not changed.

    Parameters
    ----------
    model : Module
    layer : int or str
        A layer as a :class:`Record` has it: its name, or its number in the order in which layers run in the block. A
        module that is several layers, as ALBERT's is, means all of them, and "module#3" the third.
    head : int or sequence of int, optional
        All by default.

    Raises
    ------
    TypeError, ValueError
        If the model is none, a head is not there, or the block ends without a call of the layer: a model compiled
        before, for example, does not call what is replaced here.

    Notes
    -----
    Blocks nest: in one layer the inner one comes last. A capture of the same block records the weights as zero, and
    the log-sum-exp of the scores as it was. A backward pass that computes checkpointed layers again belongs in the
    block.

    Examples
    --------
    >>> import torch
    >>> from regard.inspect import ablate
    >>> model = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval()
    >>> x = torch.randn(1, 5, 16)
    >>> with ablate(model, 0):  # all heads: what is left is the bias
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
    """Let a layer use other weights while a ``with`` block runs: those of another run, or any matrix.

    The output of a head is ``Σ_j weights[i, j] · v_j``, with the values of the run; gradients flow to them. Weights
    need not sum to one. Dropout does not apply to them.

    Parameters
    ----------
    model, layer, head
        As :func:`ablate` takes them.
    weights : Tensor (B, H, L, S), (H, L, S) or (L, S), LayerRecord or Record
        Of a record, those of the layer of this name or number: its first call in the block takes its first run, the
        next one the next, and after the last comes the first again.

    Raises
    ------
    TypeError, ValueError
        As :func:`ablate` does, and if the weights are not of the shape of a call.

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
