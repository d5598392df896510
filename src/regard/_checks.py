"""Checks of the arguments of ``attention``, each with the one error template."""

from __future__ import annotations

import math
from numbers import Real
from types import FunctionType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from regard._aux import AuxRequest
from regard._elementwise import Kind, per_element
from regard._errors import described, rejected, rejection, shape

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Check that the three are tensors that go together."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise rejected("attention", name, "be a tensor", described(tensor), TypeError)
        if tensor.dtype not in DTYPES or tensor.layout != torch.strided or tensor.is_nested:
            layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            came = described(tensor) if tensor.dtype not in DTYPES else f"a {layout} one"
            expected = "be a dense float16, bfloat16, float32 or float64 tensor"
            raise rejected("attention", name, expected, came, TypeError)
        if tensor.dim() < 2:
            raise rejected("attention", name, "have at least 2 dimensions, (..., heads, length, width)", shape(tensor))
        if tensor.device != query.device:
            raise rejected("attention", name, f"be on query's device {query.device}", tensor.device)
    if key.shape[-2] != value.shape[-2]:
        came = f"{value.shape[-2]} (key {shape(key)}, value {shape(value)})"
        raise rejected("attention", "value", f"have key's length {key.shape[-2]}", came)


def dtypes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Check that the three have one dtype, after autocast."""
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise rejected("attention", name, f"have query's dtype {query.dtype}", tensor.dtype, TypeError)


def heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    """Check that the head counts of (..., heads, length, width) tensors go together."""
    H, G, G_v = query.shape[-3], key.shape[-3], value.shape[-3]
    if G_v != G and 1 not in (G, G_v):
        raise rejected("attention", "value", f"have key's {G} heads", f"{G_v} (key {shape(key)}, value {shape(value)})")
    G = G_v if G == 1 else G
    divides = G > 0 and H % G == 0
    if H == G or (divides if enable_gqa else 1 in (H, G)):
        return
    came = f"{G} (query {shape(query)}, key {shape(key)})"
    if enable_gqa:
        raise rejected("attention", "key", f"have a number of heads that divides query's {H}", came)
    hint = " (or enable_gqa=True)" if divides else ""
    raise rejected("attention", "key", f"have query's {H} heads{hint}", came)


def widths(query: Tensor, key: Tensor) -> None:
    """Check that queries and keys are equally wide."""
    E, wide = query.shape[-1], key.shape[-1]
    if wide != E:
        came = f"{wide} (query {shape(query)}, key {shape(key)})"
        raise rejected("attention", "key", f"have query's head width {E}", came)


def flag(name: str, value: Any) -> None:
    """Check a bool."""
    if not isinstance(value, bool):
        raise rejected("attention", name, "be a bool", described(value), TypeError)


def number(name: str, value: Any, expected: str, low: float, high: float, closed: bool) -> float:
    """Return a real number between two bounds, or raise; a tensor () is a number, as in torch."""
    if isinstance(value, Tensor) and value.dim() == 0:
        if value.requires_grad:
            came = f"{described(value)} that requires gradients (a learned factor multiplies the query)"
            raise rejected("attention", name, expected, came, TypeError)
        value = value.item()
    if isinstance(value, torch.SymFloat):  # made of a dynamic size by torch.compile
        return value  # type: ignore[return-value]
    if isinstance(value, bool) or not isinstance(value, Real):
        raise rejected("attention", name, expected, described(value), TypeError)
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not (low <= found <= high if closed else low < found < high):
        raise rejected("attention", name, expected, described(value))
    return found


def numbers(dropout_p: Any, scale: Any, softcap: Any) -> tuple[float, float | None, float | None]:
    """Return the three numbers as floats, or raise."""
    return (
        number("dropout_p", dropout_p, "be a probability in [0, 1]", 0.0, 1.0, closed=True),
        None if scale is None else number("scale", scale, "be a finite number or None", -math.inf, math.inf, False),
        None if softcap is None else number("softcap", softcap, "be a positive finite number", 0.0, math.inf, False),
    )


#: Functions that were found to be a ``mask_mod``, and a ``score_mod``.
_known: tuple[WeakSet[Any], WeakSet[Any]] = WeakSet(), WeakSet()


def elementwise(name: str, expected: str, function: Any, query: Tensor, key: Tensor, scored: bool) -> None:
    """Check on a few pairs that a ``score_mod`` (``scored``) or ``mask_mod`` can be called, and what it answers."""
    rows, cols = min(query.shape[2], 2), min(key.shape[2], 3)
    if torch.compiler.is_compiling() or 0 in (*query.shape[:2], rows, cols):
        return
    remembered = type(function) is FunctionType
    if remembered and function in _known[scored]:
        return
    ranges = (1, (1, 1, 1, 1)), (1, (1, 1, 1)), (rows, (rows, 1)), (cols, (cols,))
    given = [torch.arange(size, device=query.device).view(shape) for size, shape in ranges]
    if scored:
        given.insert(0, query.new_zeros(1, 1, rows, cols))
    kind: Kind = "float" if scored else "bool"
    try:
        per_element(function, *given, kind=kind, blame=("attention", name), expected=expected)
    except TypeError as error:
        if rejection(error) is not None:
            raise
        raise rejected("attention", name, expected, f"{described(function)}: {error}", TypeError) from error
    if remembered:
        _known[scored].add(function)


def device(what: str, held: list[Tensor], query: Tensor) -> None:
    """Check that the tensors inside a part are where the query is."""
    for tensor in held:
        if tensor.device != query.device and tensor.dim():
            raise rejected("attention", what, f"hold tensors on query's device {query.device}", tensor.device)


def request(value: Any) -> None:
    """Check what is asked beside the output."""
    if value is not None and not isinstance(value, AuxRequest):
        raise rejected("attention", "return_aux", "be an AuxRequest or None", described(value), TypeError)
