"""The kernels as autograd functions, and as operators for compilers and transforms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import attrgetter, is_not
from typing import Any

import torch
from torch import Tensor

from regard._utils.operators import define
from regard.engines.fused import run
from regard.engines.fused.families import Rows, is_direct, rows_of
from regard.engines.fused.rules import Rule
from regard.engines.fused.run import Dropout, ForwardRequest, ForwardResult, Passes
from regard.engines.fused.visible_keys import VisibleKeys
from regard.masks.base import Extent

# The kernels as a differentiable function of projected rows, values, parameters and the mask's tensors ----------------


@dataclass(eq=False, repr=False)
class StaticArguments:
    """The non-differentiable arguments of a call.

    Attributes
    ----------
    family, kind, scale, softcap, rule, inverse : see :func:`rows_of`
    visible : VisibleKeys
    wants : ForwardRequest
    passes : dict
        Prepared passes of earlier calls with the same ``visible``.
    precomputed : ForwardResult or None
        Results of a forward pass over more keys, if computed elsewhere.
    dropout : Dropout or None
    """

    family: str
    kind: int
    scale: float
    softcap: float
    rule: Rule
    visible: VisibleKeys
    wants: ForwardRequest
    inverse: tuple[Tensor, Tensor] | None = None
    passes: Passes = field(default_factory=dict)
    precomputed: ForwardResult | None = None
    dropout: Dropout | None = None

    def together(self, tensor: Tensor) -> Tensor:
        """Return (B, heads, ...) as the kernels take it: (1, B · heads, ...) where rows are gathered."""
        return tensor if self.visible.query_rows is None else tensor.flatten(0, 1).unsqueeze(0)

    @cached_property
    def is_direct(self) -> bool:
        """Whether the kernels compute weights instead of scores."""
        return is_direct(self.kind, self.scale, self.softcap, self.visible.plain, self.rule)

    def rows(self, query: Tensor, key: Tensor, weight: Tensor, own_width: Tensor | None = None) -> Rows:
        """Return the inputs of the kernels."""
        return rows_of(
            self.family,
            query,
            key,
            weight,
            self.scale,
            self.softcap,
            self.kind,
            self.visible.plain,
            self.rule,
            self.inverse,
            own_width,
        )


class Fused(torch.autograd.Function):
    """Fused attention of query (B, H, L, C), key (B, G, S, C) and value (B, G, S, V), float32 or float64.

    ``sink`` (B, H, 1) are the logits of sinks, or None. It returns the output, whether that is finite, and the
    statistics of :class:`ForwardResult`, which are not differentiable.
    """

    @staticmethod
    def forward(
        ctx: Any,
        setting: StaticArguments,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        weight: Tensor,
        sink: Tensor | None,
        *tensors: Tensor,
    ) -> tuple[Any, ...]:
        inputs = _inputs(setting, query, key, value, weight)
        found = setting.precomputed or _computed(setting, inputs, query.shape[0], sink)
        statistics = [t for t in (found.peak, found.total, *_optional(found)) if t is not None]
        ctx.setting, ctx.inputs = setting, inputs  # needed for the backward pass; as large as the inputs
        ctx.save_for_backward(query, key, value, weight, found.sink_share, found.output, *found.shares, *tensors)
        ctx.mark_non_differentiable(*statistics)
        return found.output, found.is_finite, *statistics

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        query, key, value, _, share, output, peak, total, *tensors = ctx.saved_tensors
        setting, wanted, (rows, values) = ctx.setting, list(ctx.needs_input_grad[6:]), ctx.inputs
        visible = setting.visible.with_tensors(tensors)
        d_sink = _to_sink(share, grad, output) if ctx.needs_input_grad[5] else None
        found = ForwardResult(*map(setting.together, (output, peak, total)))
        grad = setting.together(grad)
        pulled = run.backward(rows, values, visible, found, grad, wanted, setting.passes, setting.dropout)
        d_query, d_key, d_weight = pulled.rows.finished(rows, query.shape[-1], setting.scale)
        ends = d_query.reshape(query.shape), d_key.reshape(key.shape), pulled.value.reshape(value.shape)
        masks = [g if want else None for g, want in zip(pulled.mask, wanted)]
        return None, *ends, d_weight.unflatten(0, (-1, query.shape[1])).sum(0), d_sink, *masks


def _computed(
    setting: StaticArguments, inputs: tuple[Rows, Tensor], sequences: int, sink: Tensor | None
) -> ForwardResult:
    """Run the forward pass."""
    sink = None if sink is None else setting.together(sink)
    found = run.forward(*inputs, setting.visible, setting.wants, setting.passes, sink, setting.dropout)
    if setting.visible.query_rows is None or sequences == 1:
        return found
    return found.by_row(lambda rows: rows.squeeze(0).unflatten(0, (sequences, -1)))


def _inputs(
    setting: StaticArguments,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    own_width: Tensor | None = None,
) -> tuple[Rows, Tensor]:
    """Return the rows and values that the kernels take."""
    if setting.visible.query_rows is not None:
        weight = weight.repeat(query.shape[0], 1)
        query, key, value = (setting.together(t) for t in (query, key, value))
    return setting.rows(query, key, weight, own_width), value.contiguous()


def _optional(found: ForwardResult) -> tuple[Tensor | None, ...]:
    return found.top, found.entropy, found.received, found.best, found.best_key


def _to_sink(share: Tensor, grad: Tensor, output: Tensor) -> Tensor:
    """Return the gradient of sinks (B, H, 1) that have shares (B, H, L) of the weight."""
    return -(share * (grad * output).sum(-1)).sum(-1, keepdim=True)


_requires_grad, _is_given = attrgetter("requires_grad"), partial(is_not, None)


def attend_differentiably(
    setting: StaticArguments,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    sink: Tensor | None = None,
    own_width: Tensor | None = None,
) -> ForwardResult:
    """Run the kernels; the output is differentiable, except with widths per query (B, H, L)."""
    given = [query, key, value, weight, sink, *setting.visible.tensors()]
    if not torch.is_grad_enabled() or not any(map(_requires_grad, filter(_is_given, given))):
        return _computed(setting, _inputs(setting, query, key, value, weight, own_width), query.shape[0], sink)
    output, is_finite, peak, total, *rest = Fused.apply(setting, *given)
    wants = setting.wants
    requested = (wants.top, wants.entropy, wants.received, bool(wants.k), bool(wants.k))
    remaining = iter(rest)
    top, entropy, received, best, best_key = (next(remaining) if wanted else None for wanted in requested)
    logits = None if sink is None else sink.detach().expand(peak.shape)
    return ForwardResult(
        output, peak, total, top, entropy, received, best, best_key, logits, setting.is_direct, is_finite
    )


# The kernels as operators of ``torch.library``: opaque to compilers, exporters and transforms -------------------------
# In traced calls no Python runs between operators, so masks are passed as tensors: an interval of keys per row, or a
# bias per score. ``weight`` (H, C) is that of :func:`rows_of`, ``sink`` (B, H, 1) that of :class:`Fused`.


def _visible_keys(
    query: Tensor, key: Tensor, start: Tensor | None, stop: Tensor | None, added: Tensor | None
) -> VisibleKeys:
    B, H, L, _ = query.shape
    extent = Extent(B, H, L, key.shape[2])
    if start is None or stop is None:
        return VisibleKeys(extent, bias=added)
    return VisibleKeys.between(extent, start, stop, added)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    start: Tensor | None,
    stop: Tensor | None,
    added: Tensor | None,
    sink: Tensor | None,
    family: str,
    kind: int,
    scale: float,
    softcap: float,
    normalizer: int,
    alpha: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output (B, H, L, V), and peak and total (B, H, L) of :class:`ForwardResult`."""
    visible = _visible_keys(query, key, start, stop, added)
    rows = rows_of(family, query, key, weight, scale, softcap, kind, visible.plain, Rule(normalizer, alpha))
    found = run.forward(rows, value.contiguous(), visible, ForwardRequest(), {}, sink)
    return found.output, found.peak, found.total


def _forward_shapes(query, key, value, *rest):  # type: ignore[no-untyped-def]  # noqa: ARG001
    shape = query.shape[:3]
    return query.new_empty(*shape, value.shape[-1]), query.new_empty(shape), query.new_empty(shape)


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    start: Tensor | None,
    stop: Tensor | None,
    added: Tensor | None,
    sink: Tensor | None,
    output: Tensor,
    peak: Tensor,
    total: Tensor,
    wants_added: bool,
    family: str,
    kind: int,
    scale: float,
    softcap: float,
    normalizer: int,
    alpha: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value, weight, added (empty if not needed) and sink (empty without one)."""
    visible = _visible_keys(query, key, start, stop, added)
    rows = rows_of(family, query, key, weight, scale, softcap, kind, visible.plain, Rule(normalizer, alpha))
    logits = None if sink is None else sink.expand(peak.shape)
    found = ForwardResult(output.contiguous(), peak, total, sink=logits, direct=rows.is_direct)
    share = found.sink_share
    d_sink = value.new_empty(0) if share is None else _to_sink(share, grad, output)
    peak, total = (t.contiguous() for t in found.shares)
    whole = ForwardResult(found.output, peak, total)
    pulled = run.backward(rows, value.contiguous(), visible, whole, grad, [wants_added], {})
    d_query, d_key, d_weight = pulled.rows.finished(rows, query.shape[-1], scale)
    d_added = pulled.mask[0] if wants_added else value.new_empty(0)
    assert d_added is not None
    return d_query.contiguous(), d_key.contiguous(), pulled.value.contiguous(), d_weight.contiguous(), d_added, d_sink


def _backward_shapes(grad, query, key, value, weight, start, stop, added, sink, *rest):  # type: ignore[no-untyped-def]  # noqa: ARG001
    wants_added = rest[3]
    like = torch.empty_like
    plain = torch.contiguous_format
    d_added = like(added, memory_format=plain) if wants_added else value.new_empty(0)
    d_sink = value.new_empty(0) if sink is None else like(sink, memory_format=plain)
    return *(like(t, memory_format=plain) for t in (query, key, value, weight)), d_added, d_sink


def _fold(tensor: Tensor | None, dim: int | None, count: int, heads: int) -> Tensor | None:
    """Fold a vmapped dimension of (B, heads, ...) tensors into the heads: (B, count · heads, ...)."""
    if tensor is None:
        return None
    if dim is None:
        if tensor.shape[1] == 1 != heads:
            return tensor
        return tensor.repeat(1, count, *[1] * (tensor.dim() - 2))
    moved = tensor.movedim(dim, 1)  # (B, N, heads or 1, ...)
    return moved.expand(-1, -1, heads, *moved.shape[3:]).flatten(1, 2)


def _fold_weight(weight: Tensor, dim: int | None, count: int) -> Tensor:
    return weight.repeat(count, 1) if dim is None else weight.movedim(dim, 0).flatten(0, 1)


def _unfold(tensor: Tensor, count: int) -> Tensor:
    return tensor.unflatten(1, (count, -1))


def _heads(tensor: Tensor, dim: int | None) -> int:
    return tensor.shape[1] if dim is None else tensor.movedim(dim, 0).shape[2]


def _forward_batch(info, in_dims, query, key, value, weight, start, stop, added, sink, *constants):  # type: ignore[no-untyped-def]
    N, H, G = info.batch_size, _heads(query, in_dims[0]), _heads(key, in_dims[1])
    rows = [_fold(t, d, N, n) for t, d, n in zip((query, key, value), in_dims, (H, G, G))]
    hidden = [_fold(t, d, N, H) for t, d in zip((start, stop, added, sink), in_dims[4:8])]
    folded = _fold_weight(weight, in_dims[3], N)
    output, peak, total = fused_forward(*rows, folded, *hidden, *constants)
    return tuple(_unfold(t, N) for t in (output, peak, total)), (1, 1, 1)


def _backward_batch(  # type: ignore[no-untyped-def]
    info,
    in_dims,
    grad,
    query,
    key,
    value,
    weight,
    start,
    stop,
    added,
    sink,
    output,
    peak,
    total,
    wants_added,
    *constants,
):
    N, H, G = info.batch_size, _heads(query, in_dims[1]), _heads(key, in_dims[2])
    ends: Sequence[Tensor | None] = [
        _fold(t, d, N, n) for t, d, n in zip((grad, query, key, value), in_dims, (H, H, G, G))
    ]
    folded = _fold_weight(weight, in_dims[4], N)
    hidden = [_fold(t, d, N, H) for t, d in zip((start, stop), in_dims[5:7])]
    shared = False
    if wants_added:  # for each of the batch
        each = added.unsqueeze(0).expand(N, *added.shape) if in_dims[7] is None else added.movedim(in_dims[7], 0)
        hidden.append(each.expand(-1, -1, H, *each.shape[3:]).movedim(0, 1).flatten(1, 2))
        shared = each.shape[2] == 1 != H
    else:
        hidden.append(_fold(added, in_dims[7], N, H))
    found = [_fold(t, d, N, H) for t, d in zip((sink, output, peak, total), in_dims[8:12])]
    d_query, d_key, d_value, d_weight, d_added, d_sink = fused_backward(
        *ends, folded, *hidden, *found, wants_added, *constants
    )
    rows = [_unfold(t, N) for t in (d_query, d_key, d_value)]
    d_weight = d_weight.unflatten(0, (N, -1))
    d_sink, sink_dim = (d_sink, None) if sink is None else (_unfold(d_sink, N), 1)
    if not wants_added:
        return (*rows, d_weight, d_added, d_sink), (1, 1, 1, 0, None, sink_dim)
    d_added = _unfold(d_added, N)
    d_added = d_added.sum(2, keepdim=True) if shared else d_added
    return (*rows, d_weight, d_added, d_sink), (1, 1, 1, 0, 1, sink_dim)


# ``custom_op`` does not work: its autograd does not support ``torch.func`` transforms. Torch gives an operator without
# a gradient a node that leads to all its inputs, so that a second derivative raises, but only if autograd has recorded
# nothing inside it; hence ``no_grad``.
_without_grad = torch.no_grad()
fused_forward = define("fused_forward", _without_grad(_forward), _forward_shapes, "CPU", _forward_batch)
fused_backward = define("fused_backward", _without_grad(_backward), _backward_shapes, "CPU", _backward_batch)


class Traced(torch.autograd.Function):
    """:func:`fused_forward` with its gradient, for every transform of ``torch.func`` and for compilers."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return fused_forward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        tensors, ctx.constants = inputs[:8], inputs[8:]
        ctx.save_for_backward(*tensors, *output)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Any:
        wants_added = ctx.needs_input_grad[6]
        found = fused_backward(grad, *ctx.saved_tensors, wants_added, *ctx.constants)
        d_query, d_key, d_value, d_weight, d_added, d_sink = found
        d_added, d_sink = d_added if wants_added else None, d_sink if ctx.needs_input_grad[7] else None
        return d_query, d_key, d_value, d_weight, None, None, d_added, d_sink, *[None] * len(ctx.constants)
