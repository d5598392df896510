"""A recorded call of attention: everything that determines its weights.

Dimensions: B batch, H query heads, G key–value heads, L queries, S keys, E and V widths of a head, C width of the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import Aux, AuxRequest, LocalLinear, TopK, attention
from regard._utils.errors import rejected
from regard._utils.part import Part
from regard.engines.problem import as_score
from regard.masks import Extent, Mask, MaskLike, Submatrix, as_mask, causal
from regard.normalizers import NormalizerLike
from regard.scores import ScoreLike


@dataclass(frozen=True)
class AttentionCall:
    """A call of attention: everything that determines its weights.

    Attributes
    ----------
    query : Tensor (B, H, L, E)
    key : Tensor (B, G, S, E)
    mask : Tensor, Mask, callable or None
        As in :func:`regard.attention`.
    is_causal, scale, score, normalizer, softcap
        As in :func:`regard.attention`.
    sinks : Tensor (1 or B, H, 1 or L), optional
        Scores of a learned sink, a key without a value.
    value : Tensor (B, G, S, V), optional
        Kept if the output will receive a gradient.
    output : OutputGradient, optional
        Filled by a backward pass.
    first : int
        The position of the first key among the keys of the run.
    changes : tuple of Change
        The weights by which interventions replaced the layer's own, in order.
    given : Tensor (B, H, L, S), optional
        The weights themselves, if queries and keys are unknown: those have width 0 then, and ``value`` identifies the
        keys.
    difference : float, optional
        λ of a differential layer: the weights of its first half of heads, minus λ times those of the second half.
    order : int or LocalLinear
        As in :func:`regard.attention`; weights of order 1 may be negative.
    """

    query: Tensor
    key: Tensor
    mask: MaskLike | None = None
    is_causal: bool = False
    scale: float | None = None
    score: ScoreLike | None = None
    normalizer: NormalizerLike = "softmax"
    softcap: float | None = None
    sinks: Tensor | None = None
    value: Tensor | None = None
    changes: tuple[Change, ...] = ()
    output: OutputGradient | None = None
    first: int = 0
    given: Tensor | None = None
    difference: float | None = None
    order: int | LocalLinear = 0

    @classmethod
    def of_weights(cls, weights: Tensor, value: Tensor | None = None) -> AttentionCall:
        """Return a call with known weights (B, H, L, S), and optionally values (B, G, S, V), but no queries or keys."""
        B, H, L, S = weights.shape
        return cls(weights.new_empty(B, H, L, 0), weights.new_empty(B, H, S, 0), given=weights, value=value)

    @property
    def marks(self) -> Tensor | None:
        """Two numbers (B, G, S, 2) that identify each key; None if keys cannot be identified."""
        rows = self.value if self.given is not None else self.key
        return None if rows is None or not rows.shape[-1] else rows[..., [0, rows.shape[-1] // 2]]

    @torch.no_grad()
    def flat(self) -> AttentionCall:
        """Return the call in four dimensions, without unused values; no copy."""
        if self.given is not None:
            return self
        values = () if self.value is None or self.output is None else (self.value,)
        given = [each.detach()[(None,) * (4 - each.dim())] for each in (self.query, self.key, *values)]
        lead = torch.broadcast_shapes(*(each.shape[:-3] for each in given))
        query, key, *read = (each.expand(*lead, *each.shape[-3:]).flatten(0, -4) for each in given)
        mask = self.mask
        if isinstance(mask, Tensor) and mask.dim() > 4:
            mask = mask.expand(*lead, *mask.shape[-3:]).flatten(0, -4)
        return replace(self, query=query, key=key, mask=mask, value=read[0] if read else None)

    @torch.no_grad()
    def last(self, count: int) -> AttentionCall:
        """Return the call, in four dimensions, with its last queries only.

        No copy, except of the weights of scores that depend on positions in an unknown way.
        """
        B, H, L, _ = self.query.shape
        if count >= L:
            return self
        first, S = L - count, self.key.shape[2]
        score = None if self.score is None else as_score(self.score, self.query, self.key).at(first, 0)
        if self.score is not None and score is None:
            weights = self.rows(first, L, AuxRequest(weights=True)).weights
            assert weights is not None
            return AttentionCall.of_weights(weights, self.key.detach().clone())
        mask = self.mask
        if isinstance(mask, Tensor) and not self.is_causal:
            mask = mask[..., first:, :] if mask.dim() > 1 and mask.shape[-2] == L else mask
        elif (whole := self._mask()) is not None:
            extent = Extent(B, H, L, S)
            mask = Submatrix(whole.bind(extent, self.query.device), extent, first, 0)
        sinks = self.sinks if self.sinks is None or self.sinks.shape[2] == 1 else self.sinks[:, :, first:]
        changes = tuple(
            each if each.weights is None else replace(each, weights=each.weights[:, :, first:]) for each in self.changes
        )
        given = None if self.given is None else self.given[:, :, first:]
        return replace(
            self, query=self.query[:, :, first:], mask=mask, is_causal=False, score=score, sinks=sinks, changes=changes,
            given=given,
        )  # fmt: skip

    @torch.no_grad()
    def combined(self) -> AttentionCall:
        """Return the weights of a differential layer, ``softmax(first half) − λ · softmax(second half)`` of heads."""
        assert self.difference is not None
        call = self.flat()
        weights = call.rows(0, call.query.shape[2], AuxRequest(weights=True)).weights
        assert weights is not None
        first, second = weights.chunk(2, 1)
        return AttentionCall.of_weights(first - self.difference * second, call.key.detach().clone())

    @torch.no_grad()
    def padded(self) -> AttentionCall:
        """Return a call on nested tensors as one on padded tensors with a padding mask."""
        lengths, others = (lengths_of(each) for each in (self.query, self.key))
        query, key, value = (
            None if each is None else torch.nested.to_padded_tensor(each.detach(), 0.0)
            for each in (self.query, self.key, self.value)
        )
        assert query is not None and key is not None
        return replace(self, query=query, key=key, value=value, mask=visible_pairs(lengths, others))

    @torch.no_grad()
    def kept(self, dtype: torch.dtype) -> AttentionCall:
        """Return a copy in four dimensions that shares no memory with the original tensors."""
        if self.given is not None:
            return replace(self, given=self.given.to(dtype, copy=True), value=None)
        call = self.flat()
        query, key = (each.to(dtype, copy=True) for each in (call.query, call.key))
        value = None if call.value is None else _ungrouped(query, call.value.to(dtype, copy=True))
        parts = {name: _copied(getattr(self, name)) for name in ("score", "normalizer", "sinks")}
        key, changes = _ungrouped(query, key), tuple(each.copy() for each in self.changes)
        return replace(call, query=query, key=key, mask=_kept_mask(call.mask), value=value, changes=changes, **parts)

    @torch.no_grad()
    def rows(self, first: int, last: int, request: AuxRequest) -> Aux:
        """Return the requested auxiliary outputs of the queries ``first`` to ``last`` − 1, including learned sinks."""
        if self.given is not None:
            aux = _aux_of(self.given[:, :, first:last].float(), request)
            for change in self.changes:
                aux = change.over(aux, first, last)
            return aux
        B, H, L, _ = self.query.shape
        S, device = self.key.shape[2], self.query.device
        score = as_score(self.score, self.query, self.key).at(first, 0)
        if score is None:  # the score depends on positions and cannot be shifted
            return _cut(self.rows(0, last, request), first)
        mask, where = self._mask(), Extent(B, H, L, S)
        if mask is not None and (first, last) != (0, L):
            mask = Submatrix(mask.bind(where, device), where, first, 0)
        query, key = self.query[:, :, first:last].float(), self.key.float()
        asked = request
        if self.order != 0:  # other fields are those of the weights, not of the scores
            request = AuxRequest(weights=True)
        if self.sinks is not None:
            request = replace(request, lse=True, received=False, weights=request.weights or request.received)
        _, aux = attention(
            query, key, key[..., :1], mask, scale=self.scale, enable_gqa=key.shape[1] != H, score=score,
            normalizer=self.normalizer, softcap=self.softcap, order=self.order, return_aux=request,
            engine="reference" if request.weights else "auto",  # the reference engine computes the whole matrix anyway
        )  # fmt: skip
        if self.order != 0:
            assert aux.weights is not None
            aux = _aux_of(aux.weights, asked)
        if self.sinks is not None:
            aux = _with_sinks(aux, self.sinks if self.sinks.shape[2] == 1 else self.sinks[:, :, first:last])
        for change in self.changes:
            aux = change.over(aux, first, last)
        return aux

    def intervals(self) -> tuple[Tensor, Tensor] | None:
        """Return the first visible key of each query and the one after its last, (B, L) each.

        None if intervals cannot express the mask: it has gaps or a bias, or it differs between heads.
        """
        if self.given is not None:
            return None
        (B, H, L, _), S, device = self.query.shape, self.key.shape[2], self.query.device
        if isinstance(self.mask, Tensor) and not self.is_causal:
            seen = _runs_of(self.mask)
            return None if seen is None else (seen[0].expand(B, L), seen[1].expand(B, L))
        mask, extent = self._mask(), Extent(B, H, L, S)
        if mask is None:
            return torch.zeros(B, L, dtype=torch.long), torch.full((B, L), S)
        bound = mask.bind(extent, device)
        span = None if bound.has_bias else bound.intervals(extent)
        if span is None or any(each.shape[1] != 1 for each in span):
            return None
        start, stop = (each.expand(B, 1, L)[:, 0].clamp(0, S) for each in span)
        return start, stop

    def _mask(self) -> Mask | None:
        given = None if self.mask is None else as_mask(self.mask)
        if not self.is_causal:
            return given
        return causal(offset=0) if given is None else given & causal(offset=0)


@dataclass(frozen=True)
class Change:
    """Weights that replace those of a layer.

    Attributes
    ----------
    heads : tuple of int
        The heads to change.
    weights : Tensor (B, len(heads), L, S), optional
        None means zero.
    """

    heads: tuple[int, ...]
    weights: Tensor | None = None

    def copy(self) -> Change:
        """Return a float32 copy that shares no memory with the original tensors."""
        given = self.weights
        return self if given is None else Change(self.heads, given.detach().to(torch.float32, copy=True))

    def output(self, output: Tensor, value: Tensor) -> Tensor:
        """Return a layer's output (..., H, L, V), the changed heads computed from values (..., G, S, V)."""
        whole = output[(None,) * (4 - output.dim())]
        lead, whole = whole.shape[:-3], whole.flatten(0, -4)
        heads = torch.tensor(self.heads, device=output.device)
        if self.weights is None:
            read = torch.zeros_like(whole[:, : len(self.heads)])
        else:
            value = value[(None,) * (4 - value.dim())]
            value = value.expand(*lead, *value.shape[-3:]).flatten(0, -4)[:, :, : self.weights.shape[-1]]
            value = value[:, heads * value.shape[1] // whole.shape[1]]
            dtype = torch.promote_types(value.dtype, torch.float32)
            with torch.autocast(value.device.type, enabled=False):
                read = (self.weights.to(value.device, dtype) @ value.to(dtype)).to(output.dtype)
        return whole.index_copy(1, heads, read).reshape(output.shape)

    def over(self, aux: Aux, first: int, last: int) -> Aux:
        """Return auxiliary outputs of rows ``first`` to ``last`` − 1 after the change; the log-sum-exp stays.

        Fields may have any number of dimensions before the heads.
        """

        def put(field: Tensor, tail: int, changed: Tensor | float) -> Tensor:
            H = field.shape[-tail - 1] if field.dim() > tail else 1
            whole = field.reshape(-1, H, *field.shape[field.dim() - tail :]).clone()
            whole[:, list(self.heads)] = changed if isinstance(changed, float) else changed.to(whole)
            return whole.reshape(field.shape)

        fields: dict[str, Any] = {}
        weights = None if self.weights is None else self.weights[:, :, first:last]
        if aux.weights is not None:
            fields["weights"] = put(aux.weights, 2, 0.0 if weights is None else weights)
        if aux.entropy is not None:
            fields["entropy"] = put(aux.entropy, 1, 0.0 if weights is None else entropy_of(weights))
        if aux.received is not None:
            fields["received"] = put(aux.received, 1, 0.0 if weights is None else weights.sum(2))
        if aux.topk is not None:
            top = aux.topk
            new = None if weights is None else topk_of(weights, top.weights.shape[-1])
            fields["topk"] = TopK(
                put(top.weights, 2, 0.0 if new is None else new.weights),
                put(top.indices, 2, -1.0 if new is None else new.indices),
            )
        return replace(aux, **fields)


@dataclass(frozen=True)
class Projected:
    """A call of a fused layer, which exposes no queries and keys: its inputs and projections, multiplied on demand.

    Attributes
    ----------
    query, key : Tensor (B, L, C) and (B, S, C)
        The inputs.
    weight, bias : Tensor (2·C, C) and (2·C,)
        The projections to queries and keys.
    heads : int
    mask : Tensor, optional
    dtype : torch.dtype
        The dtype of the queries and keys.
    """

    query: Tensor
    key: Tensor
    weight: Tensor
    bias: Tensor
    heads: int
    mask: Tensor | None = None
    dtype: torch.dtype = torch.float32

    @torch.no_grad()
    def kept(self, dtype: torch.dtype) -> Projected:
        """Return a copy that shares no memory with the original tensors."""
        query = self.query.detach().clone()
        key = query if self.key is self.query else self.key.detach().clone()
        weight, bias = _copied(self.weight), _copied(self.bias)
        return Projected(query, key, weight, bias, self.heads, _kept_mask(self.mask), dtype)

    def last(self, count: int) -> Projected:
        """Return the call with its last queries only; no copy."""
        L = self.query.shape[1]
        if count >= L:
            return self
        mask = self.mask
        if mask is not None and mask.dim() > 1 and mask.shape[-2] == L:
            mask = mask[..., L - count :, :]
        return replace(self, query=self.query[:, L - count :], mask=mask)

    @torch.no_grad()
    def attended(self) -> AttentionCall:
        """Return the call with computed queries and keys."""
        query, key = (
            F.linear(rows, weight, bias).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for rows, weight, bias in zip((self.query, self.key), self.weight.chunk(2), self.bias.chunk(2))
        )
        return AttentionCall(query, key, self.mask).kept(self.dtype)


def lengths_of(nested: Tensor) -> Tensor:
    """Return the lengths (B,) of the sequences (..., L, C) in a nested tensor."""
    return torch.tensor([each.shape[-2] for each in nested.unbind()], device=nested.device)


def visible_pairs(lengths: Tensor, others: Tensor) -> Tensor:
    """Return which pairs (B, 1, L, S) of queries and keys are within sequences of these lengths."""
    rows, cols = (torch.arange(int(each.max()), device=each.device) < each[:, None] for each in (lengths, others))
    return rows[:, None, :, None] & cols[:, None, None, :]


@torch.no_grad()
def dense_mask(call: AttentionCall) -> Tensor | None:
    """Return a call's mask, without ``is_causal``, as a tensor that broadcasts to (B, H, L, S)."""
    if call.mask is None or isinstance(call.mask, Tensor):
        return call.mask if call.mask is None else call.mask[(None,) * (4 - call.mask.dim())]
    (B, H, L, _), S, device = call.query.shape, call.key.shape[2], call.query.device
    bound = as_mask(call.mask).bind(Extent(B, H, L, S), device)
    b, h = torch.arange(B, device=device)[:, None, None, None], torch.arange(H, device=device)[:, None, None]
    rows, cols = torch.arange(L, device=device)[:, None], torch.arange(S, device=device)
    if bound.has_bias:
        return bound.matrix(b, h, rows, cols, torch.float32)
    seen = bound.visible(b, h, rows, cols)
    if seen is None:
        return None
    seen = seen[(None,) * (4 - seen.dim())]
    return seen.expand(*seen.shape[:2], L, S)


def _runs_of(mask: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the first visible key of each query and the one after its last; None if a mask is not of this form."""
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.dtype == torch.bool:
        seen = mask
    else:
        seen = mask == 0
        # With an additive mask, a query that sees nothing spreads its weights over all keys.
        if not bool((seen | (mask <= torch.finfo(mask.dtype).min)).all() and seen.any(-1).all()):
            return None
    if not bool((seen == seen[:, :1]).all()):
        return None
    seen = seen[:, 0]
    at = torch.arange(1, seen.shape[-1] + 1, device=seen.device)
    stop = (seen * at).amax(-1)
    start = torch.where(seen.any(-1), torch.where(seen, at, at[-1] + 1).amin(-1) - 1, 0)
    return (start, stop) if bool((seen.sum(-1) == stop - start).all()) else None


def entropy_of(weights: Tensor) -> Tensor:
    """Return the entropy (B, H, L) in nats of weights (B, H, L, S); if some are negative, of |w| / Σ|w|."""
    if bool((weights < 0).any()):
        weights = weights.abs() / weights.abs().sum(-1, keepdim=True)
    return torch.special.entr(weights).sum(-1)


def topk_of(weights: Tensor, k: int) -> TopK:
    """Return the k largest of weights (B, H, L, S), padded with weight 0 and index −1."""
    top = weights.topk(min(k, weights.shape[-1]), -1)
    room = (0, k - top.values.shape[-1])
    return TopK(F.pad(top.values, room), F.pad(top.indices.where(top.values > 0, -1), room, value=-1))


def _aux_of(weights: Tensor, request: AuxRequest) -> Aux:
    """Return the requested auxiliary outputs of known weights (B, H, L, S)."""
    return Aux(
        weights=weights if request.weights else None,
        entropy=entropy_of(weights) if request.entropy else None,
        received=weights.sum(2) if request.received else None,
        topk=topk_of(weights, request.topk) if request.topk else None,
    )


def _with_sinks(aux: Aux, sinks: Tensor) -> Aux:
    """Return auxiliary outputs whose weights (B, H, L, S) leave a learned sink its share."""
    assert aux.lse is not None
    share = torch.sigmoid(aux.lse - sinks.float()).unsqueeze(-1)
    weights = None if aux.weights is None else aux.weights * share
    topk = None if aux.topk is None else TopK(aux.topk.weights * share, aux.topk.indices)
    return replace(aux, weights=weights, topk=topk, received=None if weights is None else weights.sum(2))


def _cut(aux: Aux, first: int) -> Aux:
    """Return the auxiliary outputs of the rows from ``first`` on."""
    topk = None if aux.topk is None else TopK(aux.topk.weights[..., first:, :], aux.topk.indices[..., first:, :])
    lse, entropy = (None if each is None else each[..., first:] for each in (aux.lse, aux.entropy))
    weights = None if aux.weights is None else aux.weights[..., first:, :]
    return replace(aux, weights=weights, topk=topk, lse=lse, entropy=entropy)


def _ungrouped(query: Tensor, key: Tensor) -> Tensor:
    """Return keys once per group, if the caller repeated them for its heads."""
    H = key.shape[1]
    if query.shape[1] != H or H == 1:
        return key
    for groups in range(1, H):
        if H % groups == 0:
            first = key.unflatten(1, (groups, H // groups))
            if torch.equal(first[:, :, :1].expand_as(first), first):
                return first[:, :, 0].contiguous()
    return key


def _kept_mask(mask: Any) -> Any:
    """Return a copy of a mask for float32 scores: finite float64 values outside the range of float32 stay finite."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.float64:
        return _copied(mask)
    most = torch.finfo(torch.float32).max
    return torch.where(mask.isinf(), mask, mask.clamp(-most, most)).float()


def _copied(given: Any) -> Any:
    if isinstance(given, Tensor):
        return given.detach().clone()
    return given.map_tensors(lambda tensor: tensor.detach().clone()) if isinstance(given, Part) else given


# Gradients of weights that are never stored: the product of an output's gradient with the values ----------------------
# Dimensions: B batch, H query heads, G heads of values, L queries, S keys, V width of a value, C width of a row.


class OutputGradient:
    """The gradient of a call's output, filled by a backward pass.

    Attributes
    ----------
    value : Tensor (B, H, L, V), optional
        The gradient of the latest backward pass.
    """

    def __init__(self, value: Tensor | None = None) -> None:
        self.value = value

    def watch(self, output: Tensor, arranged: Callable[[Tensor], Tensor]) -> None:
        """Keep the gradient of an output; ``arranged`` brings it into the shape (..., H, L, V)."""

        def keep(gradient: Tensor) -> None:
            found = arranged(gradient.detach())
            self.value = found[(None,) * (4 - found.dim())].flatten(0, -4).to(torch.float32, copy=True)

        output.register_hook(keep)

    @property
    def nbytes(self) -> int:
        """The size of the gradient in bytes."""
        return 0 if self.value is None else self.value.nbytes


def heads_first(gradient: Tensor) -> Tensor:
    """Return a gradient (B, L, H, V) as (B, H, L, V)."""
    return gradient.transpose(1, 2)


def before_projection(weight: Tensor, heads: int) -> Callable[[Tensor], Tensor]:
    """Return a function from the gradient (L, B, C) or (L, C) of a projected output to its heads' (B, H, L, V)."""
    matrix = weight.detach().clone()

    def arranged(gradient: Tensor) -> Tensor:
        rows = gradient @ matrix
        rows = rows.unsqueeze(1) if rows.dim() == 2 else rows
        return rows.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)

    return arranged


@torch.no_grad()
def gradients_of(call: AttentionCall, first: int, last: int) -> Tensor:
    """Return the gradients (B, H, last − first, S) with respect to a call's weights.

    Raises
    ------
    ValueError
        If values were not kept, or no gradient reached the call.
    """
    if call.given is not None:
        raise rejected("gradients", "record", "hold queries, keys and values of the layer", "only its weights")
    if call.value is None or call.output is None:
        raise rejected("gradients", "record", "be captured with gradients=True and with autograd enabled", "none")
    if call.output.value is None:
        raise rejected("gradients", "record", "be of a run with a backward pass", "none")
    rows = call.output.value[:, :, first:last]
    groups = rows.unflatten(1, (call.value.shape[1], -1))  # (B, G, H/G, l, V)
    return (groups @ call.value.float().mT.unsqueeze(2)).flatten(1, 2)
