"""The kernels as autograd functions, and as operators for compilers and transforms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from regard.engines.fused import run
from regard.engines.fused.families import Rows, is_direct, rows_of
from regard.engines.fused.rules import Rule
from regard.engines.fused.run import ForwardRequest, ForwardResult, Passes
from regard.engines.fused.visible_keys import VisibleKeys
from regard.masks.base import Extent

# The kernels as a differentiable function of projected rows, values, parameters and the mask's tensors ----------------


@dataclass(frozen=True)
class StaticArguments:
    """The non-differentiable arguments of a call.

    Attributes
    ----------
    family, kind, scale, rule, inverse : see :func:`rows_of`
    visible : VisibleKeys
    wants : ForwardRequest
    passes : dict
        Prepared passes of earlier calls with the same ``visible``.
    precomputed : ForwardResult or None
        Results of a forward pass over more keys, if computed elsewhere.
    """

    family: str
    kind: int
    scale: float
    rule: Rule
    visible: VisibleKeys
    wants: ForwardRequest
    inverse: tuple[Tensor, Tensor] | None = None
    passes: Passes = field(default_factory=dict)
    precomputed: ForwardResult | None = None

    @cached_property
    def is_direct(self) -> bool:
        """Whether the kernels compute weights instead of scores."""
        return is_direct(self.kind, self.scale, self.visible.plain, self.rule)

    def rows(self, query: Tensor, key: Tensor, weight: Tensor) -> Rows:
        """Return the inputs of the kernels."""
        return rows_of(self.family, query, key, weight, self.scale, self.kind, self.is_direct, self.rule, self.inverse)


class Fused(torch.autograd.Function):
    """Fused attention of query (B, H, L, C), key (B, G, S, C) and value (B, G, S, V), float32 or float64.

    It returns the output, and the statistics of :class:`ForwardResult`, which are not differentiable.
    """

    @staticmethod
    def forward(
        ctx: Any, setting: StaticArguments, query: Tensor, key: Tensor, value: Tensor, weight: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        value, rows = value.contiguous(), setting.rows(query, key, weight)
        found = setting.precomputed
        if found is None:
            found = run.forward(rows, value, setting.visible, setting.wants, setting.passes)
        statistics = [t for t in (found.peak, found.total, *_optional(found)) if t is not None]
        ctx.setting, ctx.rows = setting, rows  # needed for the backward pass; as large as the inputs
        ctx.save_for_backward(query, key, value, weight, found.output, found.peak, found.total, *tensors)
        ctx.mark_non_differentiable(*statistics)
        return found.output, *statistics

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        query, _key, value, _weight, output, peak, total, *tensors = ctx.saved_tensors
        setting, wanted = ctx.setting, list(ctx.needs_input_grad[5:])
        visible = setting.visible
        if visible.mask is not None:
            visible = replace(visible, mask=visible.mask.with_tensors(tensors))
        rows: Rows = ctx.rows
        pulled = run.backward(
            rows, value, visible, ForwardResult(output, peak, total), grad, tensors, wanted, setting.passes
        )
        d_query, d_key, d_weight = pulled.rows.finished(rows, query.shape[-1], setting.scale)
        masks = [g if want else None for g, want in zip(pulled.added, wanted)]
        return None, d_query, d_key, pulled.value, d_weight, *masks


_requires_grad = attrgetter("requires_grad")


def _optional(found: ForwardResult) -> tuple[Tensor | None, ...]:
    return found.top, found.entropy, found.received, found.best, found.best_key


def attend_differentiably(
    setting: StaticArguments, query: Tensor, key: Tensor, value: Tensor, weight: Tensor
) -> ForwardResult:
    """Run the kernels; the output is differentiable."""
    given = [query, key, value, weight]
    if setting.visible.mask is not None:
        given += setting.visible.mask.tensors()
    if not torch.is_grad_enabled() or not any(map(_requires_grad, given)):
        rows = setting.rows(query, key, weight)
        return run.forward(rows, value.contiguous(), setting.visible, setting.wants, setting.passes)
    output, peak, total, *rest = Fused.apply(setting, *given)
    wants = setting.wants
    requested = (wants.top, wants.entropy, wants.received, bool(wants.k), bool(wants.k))
    remaining = iter(rest)
    top, entropy, received, best, best_key = (next(remaining) if wanted else None for wanted in requested)
    return ForwardResult(output, peak, total, top, entropy, received, best, best_key, setting.is_direct)


# The kernels as operators of ``torch.library``: opaque to compilers, exporters and transforms -------------------------
# In traced calls no Python runs between operators, so masks are passed as tensors: an interval of keys per row, or a
# bias per score. ``weight`` (H, C) is that of :func:`rows_of`.


def _visible_keys(
    query: Tensor, key: Tensor, start: Tensor | None, stop: Tensor | None, added: Tensor | None
) -> VisibleKeys:
    B, H, L, _ = query.shape
    extent = Extent(B, H, L, key.shape[2])
    if start is None or stop is None:
        return VisibleKeys(extent, added=None if added is None else added.contiguous())
    return VisibleKeys.between(extent, start, stop)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    start: Tensor | None,
    stop: Tensor | None,
    added: Tensor | None,
    family: str,
    kind: int,
    scale: float,
    normalizer: int,
    alpha: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output (B, H, L, V), and peak and total (B, H, L) of :class:`ForwardResult`."""
    visible = _visible_keys(query, key, start, stop, added)
    rule = Rule(normalizer, alpha)
    rows = rows_of(family, query, key, weight, scale, kind, is_direct(kind, scale, visible.plain, rule), rule)
    found = run.forward(rows, value.contiguous(), visible, ForwardRequest(), {})
    return found.output, found.peak, found.total


def _forward_shapes(query, key, value, weight, start, stop, added, family, kind, scale, normalizer, alpha):  # type: ignore[no-untyped-def]  # noqa: ARG001
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
    output: Tensor,
    peak: Tensor,
    total: Tensor,
    wants_added: bool,
    family: str,
    kind: int,
    scale: float,
    normalizer: int,
    alpha: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value, weight and added (empty if not needed)."""
    visible = _visible_keys(query, key, start, stop, added)
    rule = Rule(normalizer, alpha)
    rows = rows_of(family, query, key, weight, scale, kind, is_direct(kind, scale, visible.plain, rule), rule)
    found = ForwardResult(output.contiguous(), peak.contiguous(), total.contiguous())
    pulled = run.backward(rows, value.contiguous(), visible, found, grad, [], [wants_added], {})
    d_query, d_key, d_weight = pulled.rows.finished(rows, query.shape[-1], scale)
    d_added = pulled.added[0] if wants_added else value.new_empty(0)
    assert d_added is not None
    return d_query.contiguous(), d_key.contiguous(), pulled.value, d_weight.contiguous(), d_added


def _backward_shapes(grad, query, key, value, weight, start, stop, added, *rest):  # type: ignore[no-untyped-def]  # noqa: ARG001
    wants_added = rest[3]
    like = torch.empty_like
    plain = torch.contiguous_format
    d_added = like(added, memory_format=plain) if wants_added else value.new_empty(0)
    return *(like(t, memory_format=plain) for t in (query, key, value, weight)), d_added


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


def _forward_batch(info, in_dims, query, key, value, weight, start, stop, added, *constants):  # type: ignore[no-untyped-def]
    N, H, G = info.batch_size, _heads(query, in_dims[0]), _heads(key, in_dims[1])
    rows = [_fold(t, d, N, n) for t, d, n in zip((query, key, value), in_dims, (H, G, G))]
    hidden = [_fold(t, d, N, H) for t, d in zip((start, stop, added), in_dims[4:7])]
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
    found = [_fold(t, d, N, H) for t, d in zip((output, peak, total), in_dims[8:11])]
    d_query, d_key, d_value, d_weight, d_added = fused_backward(*ends, folded, *hidden, *found, wants_added, *constants)
    rows = [_unfold(t, N) for t in (d_query, d_key, d_value)]
    d_weight = d_weight.unflatten(0, (N, -1))
    if not wants_added:
        return (*rows, d_weight, d_added), (1, 1, 1, 0, None)
    d_added = _unfold(d_added, N)
    d_added = d_added.sum(2, keepdim=True) if shared else d_added
    return (*rows, d_weight, d_added), (1, 1, 1, 0, 1)


def _defined(name: str, function: Any, shapes: Any, batch: Any) -> Any:
    """Define an operator. ``custom_op`` does not work: its autograd does not support ``torch.func`` transforms.

    Torch gives an operator without a gradient a node that leads to all its inputs, so that a second derivative raises,
    but only if autograd has recorded nothing inside it; hence ``no_grad``.
    """
    torch.library.define(name, torch.library.infer_schema(function, mutates_args=()))
    torch.library.impl(name, "cpu", torch.no_grad()(function))
    torch.library.register_fake(name, shapes)
    torch.library.register_vmap(name, batch)
    return getattr(torch.ops.regard, name.split("::")[1])


fused_forward = _defined("regard::fused_forward", _forward, _forward_shapes, _forward_batch)
fused_backward = _defined("regard::fused_backward", _backward, _backward_shapes, _backward_batch)


class Traced(torch.autograd.Function):
    """:func:`fused_forward` with its gradient, for every transform of ``torch.func`` and for compilers."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return fused_forward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        tensors, ctx.constants = inputs[:7], inputs[7:]
        ctx.save_for_backward(*tensors, *output)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Any:
        wants_added = ctx.needs_input_grad[6]
        found = fused_backward(grad, *ctx.saved_tensors, wants_added, *ctx.constants)
        d_query, d_key, d_value, d_weight, d_added = found
        rest = d_added if wants_added else None, *[None] * len(ctx.constants)
        return d_query, d_key, d_value, d_weight, None, None, *rest
