"""A call of ``attention``, validated and brought into one form that every engine reads."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard import _autocast, masks, scores
from regard._errors import rejected, shape, unknown_name
from regard.masks.base import Extent, Mask
from regard.normalizers.base import TABLE as NORMALIZERS
from regard.normalizers.base import Normalizer
from regard.scores.base import TABLE as SCORES
from regard.scores.base import Score


@dataclass(frozen=True)
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
    lead : tuple of int
        What B was before it was flattened.
    headless : bool
        Whether query, key and value came as single matrices, without a head dimension.
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
    lead: tuple[int, ...]
    headless: bool

    @property
    def extent(self) -> Extent:
        """B, H, L and S."""
        B, H, L, _ = self.query.shape
        return Extent(B, H, L, self.key.shape[2])

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype to calculate in: float32 for narrower inputs."""
        return self.query.dtype if self.query.dtype == torch.float64 else torch.float32

    def restore(self, tensor: Tensor) -> Tensor:
        """Return a (B, H, ...) result in the caller's leading dimensions."""
        tail = tensor.shape[2:]
        return tensor.reshape(tail) if self.headless else tensor.reshape(*self.lead, tensor.shape[1], *tail)


def build(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: object,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    score: object,
    normalizer: object,
    softcap: float | None,
) -> Problem:
    """Validate a call's arguments and return the problem they state."""
    _check_tensors(query, key, value)
    query, key, value = _autocast.cast(query, key, value)
    lead, query, key, value, headless = _canonical(query, key, value, enable_gqa)
    _check_numbers(dropout_p, scale, softcap)
    the_score = as_score(score)
    _check_device("score", the_score.tensors(), query)
    the_score.check(query, key)
    B, H, L, E = query.shape
    extent = Extent(B, H, L, key.shape[2])
    mask = None if attn_mask is None else masks.as_mask(_flat_mask(attn_mask, lead), "attention", "attn_mask")
    if is_causal:
        causal = masks.causal(align="upper_left")
        mask = causal if mask is None else causal & mask
    return Problem(
        query,
        key,
        value,
        the_score,
        None if mask is None else mask.bind(extent, query.device),
        as_normalizer(normalizer),
        the_score.default_scale(E) if scale is None else float(scale),
        None if softcap is None else float(softcap),
        float(dropout_p),
        lead,
        headless,
    )


def as_score(score: object) -> Score:
    """Return the score that a name, a Score, a ``score_mod`` function or None stands for."""
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
            cls = SCORES[score].__name__
            raise rejected(
                "attention", "score", f"be given with its parameters, as regard.scores.{cls}(...)", repr(score)
            ) from None
    if isinstance(score, type) or not callable(score):
        kind = score.__name__ if isinstance(score, type) else type(score).__name__
        raise rejected("attention", "score", "be a name, a Score or a score_mod function", kind, TypeError)
    return scores.ScoreMod(score)


def as_normalizer(normalizer: object) -> Normalizer:
    """Return the normalizer that a name or a Normalizer stands for."""
    if isinstance(normalizer, Normalizer):
        return normalizer
    if not isinstance(normalizer, str):
        raise rejected("attention", "normalizer", "be a name or a Normalizer", type(normalizer).__name__, TypeError)
    if normalizer not in NORMALIZERS:
        raise unknown_name("attention", "normalizer", normalizer, NORMALIZERS)
    return NORMALIZERS[normalizer]()


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise rejected("attention", name, "be a tensor", type(tensor).__name__, TypeError)
        if not tensor.is_floating_point():
            raise rejected("attention", name, "be a floating-point tensor", tensor.dtype, TypeError)
        if tensor.dim() < 2:
            raise rejected("attention", name, "have at least 2 dimensions, (..., heads, length, width)", shape(tensor))
        if tensor.device != query.device:
            raise rejected("attention", name, f"be on query's device {query.device}", tensor.device)
        if tensor.dtype != query.dtype and not _autocast.is_active(query.device.type):
            raise rejected("attention", name, f"have query's dtype {query.dtype}", tensor.dtype, TypeError)
    if key.shape[-2] != value.shape[-2]:
        raise rejected(
            "attention",
            "value",
            f"have key's length {key.shape[-2]}",
            f"{value.shape[-2]} (key {shape(key)}, value {shape(value)})",
        )


def _canonical(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[tuple[int, ...], Tensor, Tensor, Tensor, bool]:
    """Return the leading dimensions, the three tensors as (B, heads, length, width), and whether heads were absent."""
    headless = max(query.dim(), key.dim(), value.dim()) == 2
    given = query, key, value
    query, key, value = (t.unsqueeze(0) if t.dim() == 2 else t for t in given)
    H, G, G_v = query.shape[-3], key.shape[-3], value.shape[-3]
    if G_v != G and 1 not in (G, G_v):
        raise rejected("attention", "value", f"have key's {G} heads", f"{G_v} (key {shape(key)}, value {shape(value)})")
    kv_heads = max(G, G_v) if 0 not in (G, G_v) else 0
    if kv_heads != H and not (enable_gqa and kv_heads and H % kv_heads == 0) and kv_heads != 1 and H != 1:
        came = f"{kv_heads} (query {shape(query)}, key {shape(key)})"
        if enable_gqa:
            raise rejected("attention", "key", f"have a number of heads that divides query's {H}", came)
        raise rejected("attention", "key", f"have query's {H} heads (or enable_gqa=True)", came)
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


def _flat_mask(mask: object, lead: tuple[int, ...]) -> object:
    """Return a mask tensor whose leading dimensions, if it has several, are flattened as the inputs' were."""
    if not isinstance(mask, Tensor) or mask.dim() <= 4:
        return mask
    try:
        mask = mask.expand(*lead, *mask.shape[-3:])
    except RuntimeError:
        expected = f"have leading dimensions that broadcast to {lead}"
        raise rejected("attention", "attn_mask", expected, shape(mask)) from None
    return mask.reshape(-1, *mask.shape[-3:])


def _check_numbers(dropout_p: float, scale: float | None, softcap: float | None) -> None:
    if not isinstance(dropout_p, (int, float)) or not 0.0 <= dropout_p <= 1.0:
        raise rejected("attention", "dropout_p", "be a probability in [0, 1]", repr(dropout_p))
    if scale is not None and not (isinstance(scale, (int, float)) and math.isfinite(scale)):
        raise rejected("attention", "scale", "be a finite number or None", _told(scale), _kind(scale))
    if softcap is not None and not (isinstance(softcap, (int, float)) and 0 < softcap < math.inf):
        raise rejected("attention", "softcap", "be a positive finite number or None", _told(softcap), _kind(softcap))


def _told(value: object) -> str:
    return repr(value) if isinstance(value, (int, float)) else type(value).__name__


def _kind(value: object) -> type[Exception]:
    return ValueError if isinstance(value, (int, float)) else TypeError


def _check_device(what: str, tensors: list[Tensor], query: Tensor) -> None:
    for tensor in tensors:
        if tensor.device != query.device and tensor.dim():
            raise rejected("attention", what, f"hold tensors on query's device {query.device}", tensor.device)
