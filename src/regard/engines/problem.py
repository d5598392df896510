"""A call of attention: its arguments, their checks, and the canonical form that engines run."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import Parameter

from regard import masks, scores
from regard._utils.elementwise import Kind, per_element
from regard._utils.errors import described, rejected, rejection, shape, unknown_name
from regard._utils.part import Part
from regard._utils.torch_private import is_autocast_enabled
from regard._utils.tracing import autocast_cast, autocast_is_active, values_unavailable
from regard.engines.aux import AuxRequest
from regard.engines.local_linear import LocalLinear, as_order
from regard.masks.base import EMPTY, AndMask, Extent, Mask, MaskLike
from regard.normalizers import Softmax
from regard.normalizers.base import TABLE as NORMALIZERS
from regard.normalizers.base import Normalizer
from regard.scores.base import TABLE as SCORES
from regard.scores.base import Score
from regard.scores.dot_products import DotLike

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Check types, dtypes, devices and lengths."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise rejected("attention", name, "be a tensor", described(tensor), TypeError)
        if tensor.dtype not in DTYPES or tensor.layout != torch.strided or tensor.is_nested:
            layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            got = described(tensor) if tensor.dtype not in DTYPES else f"a {layout} one"
            expected = "be a dense float16, bfloat16, float32 or float64 tensor"
            raise rejected("attention", name, expected, got, TypeError)
        if tensor.dim() < 2:
            raise rejected("attention", name, "have at least 2 dimensions, (..., heads, length, width)", shape(tensor))
        if tensor.device != query.device:
            raise rejected("attention", name, f"be on query's device {query.device}", tensor.device)
    if key.shape[-2] != value.shape[-2]:
        came = f"{value.shape[-2]} (key {shape(key)}, value {shape(value)})"
        raise rejected("attention", "value", f"have key's length {key.shape[-2]}", came)


def check_dtypes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Check that all tensors have the same dtype, after autocast."""
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise rejected("attention", name, f"have query's dtype {query.dtype}", tensor.dtype, TypeError)


def check_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    """Check that the numbers of heads of (..., heads, length, width) tensors are compatible."""
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


def check_widths(query: Tensor, key: Tensor) -> None:
    """Check that queries and keys have the same width."""
    E, wide = query.shape[-1], key.shape[-1]
    if wide != E:
        came = f"{wide} (query {shape(query)}, key {shape(key)})"
        raise rejected("attention", "key", f"have query's head width {E}", came)


def check_flag(name: str, value: Any) -> None:
    """Check a bool."""
    if not isinstance(value, bool):
        raise rejected("attention", name, "be a bool", described(value), TypeError)


def number(name: str, value: Any, expected: str, low: float, high: float, closed: bool) -> float:
    """Return a real number within bounds, or raise; as in torch, a 0-d tensor counts as a number."""
    if isinstance(value, Tensor) and value.dim() == 0:
        if value.requires_grad:
            came = f"{described(value)} that requires gradients (a learned factor multiplies the query)"
            raise rejected("attention", name, expected, came, TypeError)
        value = value.item()
    if isinstance(value, torch.SymFloat):  # derived from a dynamic size under torch.compile
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


def check_numbers(dropout_p: Any, scale: Any, softcap: Any) -> tuple[float, float | None, float | None]:
    """Check the three numbers and return them as floats."""
    return (
        number("dropout_p", dropout_p, "be a probability in [0, 1]", 0.0, 1.0, closed=True),
        None if scale is None else number("scale", scale, "be a finite number or None", -math.inf, math.inf, False),
        None if softcap is None else number("softcap", softcap, "be a positive finite number", 0.0, math.inf, False),
    )


#: Functions that passed :func:`check_elementwise` as a ``mask_mod``, and as a ``score_mod``.
_checked: tuple[WeakSet[Any], WeakSet[Any]] = WeakSet(), WeakSet()


def check_elementwise(name: str, expected: str, function: Any, query: Tensor, key: Tensor, scored: bool) -> None:
    """Check on a few pairs that a ``score_mod`` (``scored``) or ``mask_mod`` can be called, and its result type."""
    rows, cols = min(query.shape[2], 2), min(key.shape[2], 3)
    if torch.compiler.is_compiling() or 0 in (*query.shape[:2], rows, cols):
        return
    cacheable = type(function) is FunctionType
    if cacheable and function in _checked[scored]:
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
    if cacheable:
        _checked[scored].add(function)


def check_line(
    score: Score, normalizer: Normalizer, dropout_p: float, request: object, query: Tensor, key: Tensor
) -> None:
    """Check what a line can be fitted with, whose weights may be negative."""
    query, key = (rows[:, :, :0].float() for rows in (query, key))
    if score.cast(torch.float32).positions(query, key) is None:
        expected = "be a kernel of a distance or a dot product (a score with positions) with order=1"
        raise rejected("attention", "score", expected, repr(score))
    if type(normalizer) is not Softmax:
        raise rejected("attention", "normalizer", "be softmax with order=1", repr(normalizer))
    if dropout_p:
        raise rejected("attention", "dropout_p", "be 0 with order=1, whose weights may be negative", dropout_p)
    if isinstance(request, AuxRequest) and request.entropy:
        expected = "ask for no entropy with order=1, whose weights may be negative"
        raise rejected("attention", "return_aux", expected, "entropy=True")


def check_device(what: str, held: list[Tensor], query: Tensor) -> None:
    """Check that the tensors of a part are on the query's device."""
    for tensor in held:
        if tensor.device != query.device and tensor.dim():
            raise rejected("attention", what, f"hold tensors on query's device {query.device}", tensor.device)


def check_request(value: Any) -> None:
    """Check the request for auxiliary outputs."""
    if value is not None and not isinstance(value, AuxRequest):
        raise rejected("attention", "return_aux", "be an AuxRequest or None", described(value), TypeError)


# The arguments of a call ----------------------------------------------------------------------------------------------


#: Types of numeric arguments whose value can be part of a structure.
_NUMBERS = frozenset((int, float, type(None)))
_TENSORS = frozenset((Tensor, Parameter))
# Bound once, because every call uses them.
_is_grad_enabled, _get_num_threads = torch.is_grad_enabled, torch.get_num_threads


class Call(NamedTuple):
    """The arguments of one call of :func:`regard.attention`, unchecked.

    A named tuple: a frozen dataclass with as many fields takes three times as long.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Any = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    score: Any = None
    normalizer: Any = "softmax"
    softcap: float | None = None
    engine: Any = "auto"
    return_aux: AuxRequest | None = None
    order: Any = 0

    def structure(self) -> Hashable | None:
        """Return the key of the plan cache: everything a plan depends on. None if the call cannot be cached."""
        (
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, score, normalizer, softcap, engine,
            return_aux, order,
        ) = self  # fmt: skip
        if not (type(query) in _TENSORS and type(key) in _TENSORS and type(value) in _TENSORS):
            return None
        if query.is_neg() or key.is_neg() or value.is_neg():  # a plan reads the memory as it is
            return None
        if type(dropout_p) not in _NUMBERS or type(scale) not in _NUMBERS or type(softcap) not in _NUMBERS:
            return None
        if type(is_causal) is not bool or type(enable_gqa) is not bool:
            return None
        if type(engine) is not str and not hasattr(engine, "refusal"):
            return None
        if return_aux is not None and type(return_aux) is not AuxRequest:
            return None
        if attn_mask is not None:
            attn_mask = attn_mask.structure() if isinstance(attn_mask, Part) else _structure_of_mask(attn_mask)
            if attn_mask is None:
                return None
        if score is not None:
            # Names are resolved, as their registration may change.
            score = score.structure() if isinstance(score, Part) else SCORES.get(score) if type(score) is str else None
            if score is None:
                return None
        if type(normalizer) is str:
            normalizer = NORMALIZERS.get(normalizer)
        elif isinstance(normalizer, Part):
            normalizer = normalizer.structure()
        else:
            return None
        if normalizer is None:
            return None
        if type(order) is not int and (order := order.structure() if type(order) is LocalLinear else None) is None:
            return None
        autocast = None
        if is_autocast_enabled() and autocast_is_active(query.device.type):
            autocast = torch.get_autocast_dtype(query.device.type)
        try:
            return (
                query.shape, query.stride(), query.dtype, query.layout, query.requires_grad,
                key.shape, key.stride(), key.dtype, key.layout, key.requires_grad,
                value.shape, value.stride(), value.dtype, value.layout, value.requires_grad,
                # A bool is faster to hash and to compare than a device.
                query.is_cpu or query.device, key.is_cpu or key.device, value.is_cpu or value.device,
                attn_mask, dropout_p, is_causal, scale, enable_gqa, score, normalizer, softcap, engine, return_aux,
                order, autocast, _is_grad_enabled(), _get_num_threads(),
            )  # fmt: skip
        except RuntimeError:  # a nested tensor has no shape, and a compressed one no strides
            return None


def _structure_of_mask(mask: Any) -> Hashable | None:
    """Return the key of a mask that is a tensor or a function."""
    kind = type(mask)
    if kind in _TENSORS:
        if mask.is_nested:
            return None
        return mask.shape, mask.dtype, mask.is_cpu or mask.device, mask.requires_grad, mask.layout
    return masks.Predicate(mask).structure() if kind is FunctionType else None


# The canonical form of a call -----------------------------------------------------------------------------------------


#: Maximum number of queries of a key head in a step of decoding.
FEW_QUERIES = 16
#: Minimum number of keys for which torch's CPU kernel is slower in 16 bits than a kernel that converts in registers.
MANY_KEYS = 256


def is_narrow_step(query: Tensor, key: Tensor) -> bool:
    """Whether few queries read many keys of 16 bits on a CPU, which torch's kernel does slowly."""
    return query.itemsize == 2 and query.is_cpu and query.shape[2] <= FEW_QUERIES and key.shape[2] >= MANY_KEYS


#: Side of the tiles that estimate the visible share of a mask without intervals.
SHARE_TILE = 128


@dataclass(eq=False)
class Problem:
    """One attention, ready to run: leading dimensions flattened, parts resolved, everything checked.

    Attributes
    ----------
    query : Tensor (B, H, L, E)
    key : Tensor (B, G, S, Ek)
        H is a multiple of G; query head h reads key–value head ``h // (H // G)``.
    value : Tensor (B, G, S, V)
    score, normalizer : the parts
    mask : Mask or None
        Bound to this extent.
    scale : float
    softcap : float or None
    dropout_p : float
    extent : Extent
        B, H, L and S.
    lead : tuple of int
        The caller's leading dimensions, which are flattened to B.
    headless : bool
        Whether query, key and value had no head dimension.
    order : LocalLinear or None
        The line that is fitted at each query; None for order 0.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    score: Score
    mask: Mask | None
    normalizer: Normalizer
    scale: float
    softcap: float | None
    dropout_p: float
    extent: Extent
    lead: tuple[int, ...]
    headless: bool
    order: LocalLinear | None = None

    @classmethod
    def of(cls, call: Call) -> Problem:
        """Validate a call's arguments and build the problem."""
        check_tensors(call.query, call.key, call.value)
        check_flag("is_causal", call.is_causal)
        check_flag("enable_gqa", call.enable_gqa)
        dropout_p, scale, softcap = check_numbers(call.dropout_p, call.scale, call.softcap)
        query, key, value = (resolved(t) for t in autocast_cast(call.query, call.key, call.value))
        check_dtypes(query, key, value)
        given = query, key
        lead, query, key, value, headless = canonical(query, key, value, call.enable_gqa)
        score = as_score(call.score, query, key)
        if not score.mixed_widths:
            check_widths(*given)
        check_device("score", score.tensors(), query)
        score.check(query, key)
        B, H, L, E = query.shape
        extent = Extent(B, H, L, key.shape[2])
        mask = bound_mask(call.attn_mask, call.is_causal, query, key, extent, lead)
        scale = score.default_scale(E) if scale is None else scale
        normalizer = as_normalizer(call.normalizer)
        check_device("normalizer", normalizer.tensors(), query)
        normalizer.check(H)
        order = as_order(call.order)
        if order is not None:
            check_line(score, normalizer, dropout_p, call.return_aux, query, key)
        return cls(query, key, value, score, mask, normalizer, scale, softcap, dropout_p, extent, lead, headless, order)

    @property
    def is_softmax(self) -> bool:
        """Whether the normalizer is exactly softmax, not a subclass."""
        return type(self.normalizer) is Softmax

    @property
    def compute_dtype(self) -> torch.dtype:
        """The compute dtype: float32 for narrower inputs."""
        return self.query.dtype if self.query.dtype == torch.float64 else torch.float32

    @property
    def bytes_read(self) -> int:
        """The bytes of query, key and value."""
        return sum(t.numel() * t.element_size() for t in (self.query, self.key, self.value))

    @property
    def wants_grad(self) -> bool:
        """Whether a backward pass may follow."""
        if not torch.is_grad_enabled():
            return False
        if self.query.requires_grad or self.key.requires_grad or self.value.requires_grad:
            return True
        parts = (self.score, self.normalizer) if self.mask is None else (self.score, self.normalizer, self.mask)
        return any(tensor.requires_grad for part in parts for tensor in part.tensors())

    @property
    def is_step(self) -> bool:
        """Whether this is like a step of decoding: dot products of few queries as they are, without gradients."""
        score, extent = self.score, self.extent
        if FEW_QUERIES * self.key.shape[1] < extent.H * extent.L or not isinstance(score, DotLike):
            return False
        as_they_are = type(score).compare is DotLike.compare and type(score).project is Score.project
        return as_they_are and not score.tensors() and not self.wants_grad

    @cached_property
    def intervals(self) -> tuple[Tensor, Tensor] | None:
        """The interval of visible keys per query, from :meth:`Mask.intervals`; None without a mask."""
        return None if self.mask is None else self.mask.intervals(self.extent)

    @cached_property
    def visible_share(self) -> float:
        """The approximate share of visible pairs; 1 if values are unavailable."""
        extent = self.extent
        if self.mask is None or values_unavailable(self.query) or not self.mask.hides or 0 in extent:
            return 1.0
        if self.intervals is not None:
            start, stop = self.intervals
            return float((stop - start).double().mean()) / extent.S
        if self.mask.listed_keys is not None:
            return min(self.mask.listed_keys / extent.S, 1.0)
        if (cover := self.mask.cover(extent)) is not None:
            return min(cover.pairs / (extent.L * extent.S), 1.0)
        kinds = self.mask.tiles(extent, SHARE_TILE, SHARE_TILE)
        return float((kinds != EMPTY).double().mean())

    @cached_property
    def fixed_share(self) -> float:
        """The share of pairs that masks without tensors leave visible; 1 if they have no intervals."""
        parts = self.mask.masks if isinstance(self.mask, AndMask) else (self.mask,)
        fixed = tuple(part for part in parts if part is not None and part.is_fixed and part.hides)
        if not fixed or 0 in self.extent:
            return 1.0
        intervals = (AndMask(fixed) if len(fixed) > 1 else fixed[0]).intervals(self.extent)
        return 1.0 if intervals is None else float((intervals[1] - intervals[0]).double().mean()) / self.extent.S

    def snapshot(self) -> Problem:
        """Return the problem with copies of its parts, unaffected by later changes of settings; tensors are shared."""
        mask = None if self.mask is None else self.mask.snapshot()
        return replace(self, score=self.score.snapshot(), mask=mask, normalizer=self.normalizer.snapshot())

    def restore(self, tensor: Tensor) -> Tensor:
        """Return a (B, H, ...) result in the caller's leading dimensions."""
        tail = tensor.shape[2:]
        return tensor.reshape(tail) if self.headless else tensor.reshape(*self.lead, tensor.shape[1], *tail)


def as_score(score: object, query: Tensor, key: Tensor) -> Score:
    """Return the Score for a name, a Score, a ``score_mod`` function or None."""
    if score is None:
        return scores.ScaledDot()
    if isinstance(score, Score):
        return score
    if isinstance(score, str):
        if score not in SCORES:
            raise unknown_name("attention", "score", score, SCORES)
        try:
            return SCORES[score]()
        except TypeError:
            expected = f"be an instance with parameters, regard.scores.{SCORES[score].__name__}(...)"
            raise rejected("attention", "score", expected, repr(score)) from None
    if isinstance(score, (type, Part)) or not callable(score):
        expected = "be a name, a Score or a score_mod(score, b, h, q_idx, kv_idx)"
        raise rejected("attention", "score", expected, described(score), TypeError)
    expected = "be a name, a Score or a score_mod(score, b, h, q_idx, kv_idx) that returns a float tensor"
    check_elementwise("score", expected, score, query, key, scored=True)
    return scores.ScoreMod(score)


def as_normalizer(normalizer: object) -> Normalizer:
    """Return the Normalizer for a name or a Normalizer."""
    if isinstance(normalizer, Normalizer):
        return normalizer
    if not isinstance(normalizer, str):
        hint = "; derive a class from Normalizer, with it as weights" if isinstance(normalizer, FunctionType) else ""
        got = f"{described(normalizer)}{hint}"
        raise rejected("attention", "normalizer", "be a name or a Normalizer", got, TypeError)
    if normalizer not in NORMALIZERS:
        raise unknown_name("attention", "normalizer", normalizer, NORMALIZERS)
    return NORMALIZERS[normalizer]()


def resolved(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory holds its numbers; views such as ``z.conj().imag`` hold their negatives.

    Compilers cannot ask. What they record runs here again, or is made of torch's operations, which know such views.
    """
    return tensor if torch.compiler.is_compiling() or not tensor.is_neg() else tensor.resolve_neg()


def canonical(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[tuple[int, ...], Tensor, Tensor, Tensor, bool]:
    """Return the leading dimensions, (B, heads, length, width) tensors, and whether there was no head dimension."""
    headless = max(query.dim(), key.dim(), value.dim()) == 2
    given = query, key, value
    query, key, value = (t.unsqueeze(0) if t.dim() == 2 else t for t in given)
    check_heads(query, key, value, enable_gqa)
    H, G, G_v = query.shape[-3], key.shape[-3], value.shape[-3]
    kv_heads = max(G, G_v) if 0 not in (G, G_v) else 0
    if len(query.shape) == len(key.shape) == len(value.shape) == 4:
        same = query.shape[0] == key.shape[0] == value.shape[0]
        if same and kv_heads == G == G_v and (kv_heads == H or enable_gqa):
            return tuple(query.shape[:1]), query, key, value, False  # fast path: nothing to do
    try:
        lead = tuple(torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3]))
    except RuntimeError:
        came = f"query {shape(given[0])}, key {shape(given[1])}, value {shape(given[2])}"
        raise rejected(
            "attention", "key and value", "have leading dimensions that broadcast with query's", came
        ) from None
    heads = H if H != 1 or kv_heads == 0 else kv_heads
    flat = math.prod(lead)
    query = query.expand(*lead, heads, *query.shape[-2:]).reshape(flat, heads, *query.shape[-2:])
    key = key.expand(*lead, kv_heads, *key.shape[-2:]).reshape(flat, kv_heads, *key.shape[-2:])
    value = value.expand(*lead, kv_heads, *value.shape[-2:]).reshape(flat, kv_heads, *value.shape[-2:])
    return lead, query, key, value, headless


def bound_mask(
    mask: MaskLike | None, is_causal: bool, query: Tensor, key: Tensor, extent: Extent, lead: tuple[int, ...]
) -> Mask | None:
    """Return the mask of a call, bound to its extent; None if it certainly hides and adds nothing."""
    found = unbound_mask(mask, is_causal, query, key, lead)
    if found is None:
        return None
    bound = found.bind(extent, query.device)
    return None if bound.shows_everything(extent) else bound


def unbound_mask(
    mask: MaskLike | None, is_causal: bool, query: Tensor, key: Tensor, lead: tuple[int, ...]
) -> Mask | None:
    """Return the mask of a call before binding it to its lengths."""
    found = _as_mask(mask, query, key, lead)
    if not is_causal:
        return found
    causal = masks.causal(align="upper_left")
    return causal if found is None else causal & found


def _as_mask(mask: MaskLike | None, query: Tensor, key: Tensor, lead: tuple[int, ...]) -> Mask | None:
    """Convert ``attn_mask`` to a mask; leading dimensions of a tensor are flattened like those of the inputs."""
    if mask is None:
        return None
    if isinstance(mask, Tensor) and mask.dim() > 3 and (len(lead) > 1 or mask.dim() > 4):
        H, L, S = (*query.shape[1:3], key.shape[2])
        if not all(a in (1, b) for a, b in zip(mask.shape[-3:], (H, L, S))) or mask.dim() > len(lead) + 3:
            raise rejected("attention", "attn_mask", f"broadcast to (..., H, L, S) = {(*lead, H, L, S)}", shape(mask))
        try:
            mask = mask.expand(*lead, *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])
        except RuntimeError:
            expected = f"broadcast to (..., H, L, S) = {(*lead, H, L, S)}"
            raise rejected("attention", "attn_mask", expected, shape(mask)) from None
    found = masks.as_mask(mask, "attention", "attn_mask")
    if isinstance(found, masks.Predicate):
        if getattr(masks, getattr(mask, "__name__", ""), None) is mask:
            name = f"masks.{mask.__name__}"  # type: ignore[union-attr]
            raise rejected("attention", "attn_mask", "be a mask", f"the function {name}; call it: {name}(…)", TypeError)
        expected = "be a Mask, a tensor, or a mask_mod(b, h, q_idx, kv_idx) that returns a bool tensor"
        check_elementwise("attn_mask", expected, mask, query, key, scored=False)
    return found
