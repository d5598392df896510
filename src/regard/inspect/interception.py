"""Calls of attention, noticed wherever they are made, without changing what they compute.

While something is captured, the functions that compute attention are replaced, in every module that holds them by
name, by wrappers that call them and then tell of the call. No hook and no mode is set, so that torch's fast paths stay
as they are. A wrapper tells the capture of its own thread or task alone.
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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard._errors import RegardWarning
from regard._torch import in_backward
from regard.inspect.calls import Attended, Projected
from regard.inspect.multi_head import multi_head
from regard.inspect.record import Record
from regard.masks import Extent, Submatrix, as_mask

_active: ContextVar[Record | None] = ContextVar("capture", default=None)
#: Modules that compute what the call of another tells of.
_INNER = ("regard._attention", "regard.engines", __name__)


class _Replacement:
    """The wrappers in place of the functions, as long as there is a capture in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._captures = 0
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        with self._lock:
            if not self._captures:
                _replace(self._undo)
            self._captures += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._captures -= 1
            while self._undo and not self._captures:
                self._undo.pop()()


_replacement = _Replacement()


@contextmanager
def telling(record: Record) -> Iterator[None]:
    """Let calls of attention tell a record of themselves."""
    with _replacement:
        token = _active.set(record)
        try:
            yield
        finally:
            _active.reset(token)


def _replace(undo: list[Callable[[], None]]) -> None:
    ours = functools.partial(_ours, inspect.signature(regard.attention))
    sdpa, forward = F.scaled_dot_product_attention, F.multi_head_attention_forward
    wrappers = {id(sdpa): _wrapped(sdpa, _sdpa), id(regard.attention): _wrapped(regard.attention, ours)}
    wrappers[id(forward)] = _forward(forward)
    for held, key in _holders(wrappers.keys()):
        _set(undo, held, key, wrappers[id(held[key])])
    for name, tell in (("_native_multi_head_attention", _native), ("_transformer_encoder_layer_fwd", _encoder_layer)):
        _set(undo, vars(torch), name, _wrapped(getattr(torch, name), tell))
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


def _wrapped(function: Callable[..., Any], tell: Callable[..., Attended | Projected]) -> Callable[..., Any]:
    """Return a function that calls another, and tells the record of its thread."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        record = None if torch.compiler.is_compiling() else _active.get()
        if record is None or in_backward():  # where checkpointed layers compute again what was recorded
            return function(*args, **kwargs)
        token = _active.set(None)
        try:
            answer = function(*args, **kwargs)
        finally:
            _active.reset(token)
        attended = tell(*args, **kwargs)
        if attended.query.is_nested:
            message = (
                "capture: a call of attention on nested tensors is left out, whose sequences have no common length."
            )
            warnings.warn(message, RegardWarning, stacklevel=2)
        else:
            names = (_caller(record.names), "self_attn" if tell is _encoder_layer else "")
            record.add(".".join(filter(None, names)), attended)
        return answer

    return call


def _caller(names: Mapping[int, str]) -> str:
    """Return the name of the innermost module of the model that runs: frames know it, so that no hook is needed."""
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self":
            owner = frame.f_locals.get("self")
            if id(owner) in names and isinstance(owner, nn.Module):
                return names[id(owner)]
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,  # noqa: ARG001
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,  # noqa: ARG001
) -> Attended:  # fmt: skip
    return Attended(query, key, attn_mask, is_causal=is_causal, scale=scale)


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's function of a multi-head layer, whose calls tell of themselves where no other does.

    It multiplies queries and keys itself where somebody asks for weights.
    """
    signature = inspect.signature(original)

    def bound(*args: Any, **kwargs: Any) -> dict[str, Any]:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        return given.arguments

    telling = _wrapped(original, lambda *args, **kwargs: multi_head(bound(*args, **kwargs)))

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (telling if bound(*args, **kwargs)["need_weights"] else original)(*args, **kwargs)

    return call


def _ours(signature: inspect.Signature, *args: Any, **kwargs: Any) -> Attended:
    given = signature.bind(*args, **kwargs)
    given.apply_defaults()
    names = ("is_causal", "scale", "score", "normalizer", "softcap")
    told = {name: given.arguments[name] for name in names}
    return Attended(given.arguments["query"], given.arguments["key"], given.arguments["attn_mask"], **told)


def _native(query: Tensor, key: Tensor, *others: Any) -> Projected:
    """Torch's fused attention: (value, width, heads, weight, bias, out, out, mask, needs weights, average, kind)."""
    width, heads, weight, bias = others[1:5]
    mask, kind = others[7], others[10]
    return _projected(query, key, width, heads, weight, bias, mask, kind)


def _encoder_layer(source: Tensor, width: int, heads: int, weight: Tensor, bias: Tensor, *others: Any) -> Projected:
    """Torch's fused layer: (out, out, act, first, eps, norm, norm, norm, norm, 4 of the hidden layer, mask, kind)."""
    first, eps, norm, shift = others[3:7]
    mask, kind = (*others[13:15], None, None)[:2]
    rows = F.layer_norm(source, (width,), norm, shift, eps) if first else source
    return _projected(rows, rows, width, heads, weight, bias, mask, kind)


def _projected(
    query: Tensor, key: Tensor, width: int, heads: int, weight: Tensor, bias: Tensor, mask: Tensor | None, kind: Any
) -> Projected:
    if mask is not None:  # True hides; kind 0 is of pairs, 1 of keys
        mask = ~mask if mask.dtype == torch.bool else mask
        mask = mask[:, None, None] if kind == 1 and mask.dim() == 2 else mask
    return Projected(query, key, weight[: 2 * width], bias[: 2 * width], heads, mask)


def _interface(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return transformers' choice of an attention function, whose calls tell of themselves."""

    @functools.wraps(original)
    def get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = original(self, attn_implementation, default)
        return (
            function if _active.get() is None else _wrapped(function, functools.partial(_hugged, function is default))
        )

    return get_interface


def _hugged(
    eager: bool,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,  # noqa: ARG001
    attention_mask: Any,
    *_: Any,
    **kwargs: Any,
) -> Attended:
    from regard.integrations.transformers.attention_function import layer_mask
    from regard.integrations.transformers.configuration import parts_of

    causal = False if eager else kwargs.get("is_causal")
    names = ("position_bias", "sliding_window", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k")
    mask = layer_mask(
        module, query, key, attention_mask, causal, **{name: kwargs[name] for name in names if name in kwargs}
    )
    if getattr(module, "is_causal", False):
        key, mask = _seen(query, key, mask)
    parts, scale = parts_of(module), kwargs.get("scaling")
    return Attended(
        query, key, mask, scale=scale, softcap=kwargs.get("softcap"), score=parts.score, normalizer=parts.normalizer,
        sinks=kwargs.get("s_aux", getattr(module, "sinks", None)),
    )  # fmt: skip


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
