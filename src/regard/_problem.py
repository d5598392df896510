"""A call of ``attention``, validated and brought into one form that every engine reads."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from regard import _autocast, _checks, masks, scores
from regard._errors import described, rejected, shape, unknown_name
from regard._part import Part
from regard._tracing import is_blind
from regard.masks.base import EMPTY, Extent, Mask, MaskLike
from regard.normalizers.base import TABLE as NORMALIZERS
from regard.normalizers.base import Normalizer
from regard.scores.base import TABLE as SCORES
from regard.scores.base import Score

#: The side of the tiles by which the visible share of a mask that is no interval is measured.
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
    extent: Extent
    lead: tuple[int, ...]
    headless: bool

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype to calculate in: float32 for narrower inputs."""
        return self.query.dtype if self.query.dtype == torch.float64 else torch.float32

    @property
    def wants_grad(self) -> bool:
        """Whether a backward pass may follow."""
        if not torch.is_grad_enabled():
            return False
        if self.query.requires_grad or self.key.requires_grad or self.value.requires_grad:
            return True
        parts = (self.score,) if self.mask is None else (self.score, self.mask)
        return any(tensor.requires_grad for part in parts for tensor in part.tensors())

    @cached_property
    def intervals(self) -> tuple[Tensor, Tensor] | None:
        """The interval of keys that each query sees, as :meth:`Mask.intervals` tells; None also without a mask."""
        return None if self.mask is None else self.mask.intervals(self.extent)

    @cached_property
    def visible_share(self) -> float:
        """About which share of the pairs may meet; 1 where values cannot be looked at."""
        extent = self.extent
        if self.mask is None or is_blind(self.query) or not self.mask.hides or 0 in (*self.query.shape[:3], extent.S):
            return 1.0
        if self.intervals is not None:
            start, stop = self.intervals
            return float((stop - start).double().mean()) / extent.S
        kinds = self.mask.tiles(extent, SHARE_TILE, SHARE_TILE)
        return float((kinds != EMPTY).double().mean())

    def snapshot(self) -> Problem:
        """Return the problem with copies of its parts, which keep their settings; tensors are shared."""
        mask = None if self.mask is None else self.mask.snapshot()
        return replace(self, score=self.score.snapshot(), mask=mask, normalizer=self.normalizer.snapshot())

    def restore(self, tensor: Tensor) -> Tensor:
        """Return a (B, H, ...) result in the caller's leading dimensions."""
        tail = tensor.shape[2:]
        return tensor.reshape(tail) if self.headless else tensor.reshape(*self.lead, tensor.shape[1], *tail)


def build(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: MaskLike | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    score: object,
    normalizer: object,
    softcap: float | None,
) -> Problem:
    """Validate a call's arguments and return the problem they state."""
    _checks.tensors(query, key, value)
    _checks.flag("is_causal", is_causal)
    _checks.flag("enable_gqa", enable_gqa)
    dropout_p, scale, softcap = _checks.numbers(dropout_p, scale, softcap)
    query, key, value = _autocast.cast(query, key, value)
    _checks.dtypes(query, key, value)
    given = query, key
    lead, query, key, value, headless = canonical(query, key, value, enable_gqa)
    the_score = as_score(score, query, key)
    if not the_score.mixed_widths:
        _checks.widths(*given)
    _checks.device("score", the_score.tensors(), query)
    the_score.check(query, key)
    B, H, L, E = query.shape
    extent = Extent(B, H, L, key.shape[2])
    return Problem(
        query,
        key,
        value,
        the_score,
        bound_mask(attn_mask, is_causal, query, key, extent, lead),
        as_normalizer(normalizer),
        the_score.default_scale(E) if scale is None else scale,
        softcap,
        dropout_p,
        extent,
        lead,
        headless,
    )


def as_score(score: object, query: Tensor, key: Tensor) -> Score:
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
            expected = f"be given with its parameters, as regard.scores.{SCORES[score].__name__}(...)"
            raise rejected("attention", "score", expected, repr(score)) from None
    if isinstance(score, (type, Part)) or not callable(score):
        expected = "be a name, a Score or a score_mod(score, b, h, q_idx, kv_idx)"
        raise rejected("attention", "score", expected, described(score), TypeError)
    expected = "be a name, a Score or a score_mod(score, b, h, q_idx, kv_idx) that returns a float tensor"
    _checks.elementwise("score", expected, score, query, key, scored=True)
    return scores.ScoreMod(score)


def as_normalizer(normalizer: object) -> Normalizer:
    """Return the normalizer that a name or a Normalizer stands for."""
    if isinstance(normalizer, Normalizer):
        return normalizer
    if not isinstance(normalizer, str):
        raise rejected("attention", "normalizer", "be a name or a Normalizer", described(normalizer), TypeError)
    if normalizer not in NORMALIZERS:
        raise unknown_name("attention", "normalizer", normalizer, NORMALIZERS)
    return NORMALIZERS[normalizer]()


def canonical(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[tuple[int, ...], Tensor, Tensor, Tensor, bool]:
    """Return the leading dimensions, the three tensors as (B, heads, length, width), and whether heads were absent."""
    headless = max(query.dim(), key.dim(), value.dim()) == 2
    given = query, key, value
    query, key, value = (t.unsqueeze(0) if t.dim() == 2 else t for t in given)
    _checks.heads(query, key, value, enable_gqa)
    H, G, G_v = query.shape[-3], key.shape[-3], value.shape[-3]
    kv_heads = max(G, G_v) if 0 not in (G, G_v) else 0
    if len(query.shape) == len(key.shape) == len(value.shape) == 4:
        same = query.shape[0] == key.shape[0] == value.shape[0]
        if same and kv_heads == G == G_v and (kv_heads == H or enable_gqa):
            return tuple(query.shape[:1]), query, key, value, False  # the usual case, as it is
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
    """Return the mask of a call, bound to its extent; None where its structure says that it hides nothing."""
    found = unbound_mask(mask, is_causal, query, key, lead)
    if found is None:
        return None
    bound = found.bind(extent, query.device)
    return None if bound.shows_everything(extent) else bound


def unbound_mask(
    mask: MaskLike | None, is_causal: bool, query: Tensor, key: Tensor, lead: tuple[int, ...]
) -> Mask | None:
    """Return the mask of a call, for any lengths."""
    found = _as_mask(mask, query, key, lead)
    if not is_causal:
        return found
    causal = masks.causal(align="upper_left")
    return causal if found is None else causal & found


def _as_mask(mask: MaskLike | None, query: Tensor, key: Tensor, lead: tuple[int, ...]) -> Mask | None:
    """Return the mask that an ``attn_mask`` stands for, a tensor's leading dimensions flattened as the inputs' were."""
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
        expected = "be a Mask, a tensor, or a mask_mod(b, h, q_idx, kv_idx) that returns a bool tensor"
        _checks.elementwise("attn_mask", expected, mask, query, key, scored=False)
    return found
