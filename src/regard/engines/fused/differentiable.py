"""The kernels as a differentiable function of projected rows, values, parameters and the mask's tensors."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from regard.engines.fused import run
from regard.engines.fused.families import Rows, is_direct, rows_of
from regard.engines.fused.run import ForwardRequest, ForwardResult, Passes
from regard.engines.fused.visible_keys import VisibleKeys


@dataclass(frozen=True)
class Setting:
    """The arguments of a call that are not differentiated.

    Attributes
    ----------
    family, kind, scale, inverse : as :func:`rows_of` takes them
    visible : VisibleKeys
    wants : ForwardRequest
    passes : dict
        What was prepared for earlier calls with the same visible.
    known : ForwardResult or None
        The results of a forward pass that was made elsewhere, over more keys.
    """

    family: str
    kind: int
    scale: float
    visible: VisibleKeys
    wants: ForwardRequest
    inverse: tuple[Tensor, Tensor] | None = None
    passes: Passes = field(default_factory=dict)
    known: ForwardResult | None = None

    @cached_property
    def is_direct(self) -> bool:
        """Whether the kernels find weights instead of scores."""
        return is_direct(self.kind, self.scale, self.visible.plain)

    def rows(self, query: Tensor, key: Tensor, weight: Tensor) -> Rows:
        """Return what the kernels compare."""
        return rows_of(self.family, query, key, weight, self.scale, self.kind, self.is_direct, self.inverse)


class Fused(torch.autograd.Function):
    """Fused attention of query (B, H, L, C), key (B, G, S, C) and value (B, G, S, V), float32 or float64.

    It returns the output, and the statistics of :class:`ForwardResult`, which are not differentiable.
    """

    @staticmethod
    def forward(
        ctx: Any, setting: Setting, query: Tensor, key: Tensor, value: Tensor, weight: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        value, rows = value.contiguous(), setting.rows(query, key, weight)
        found = setting.known
        if found is None:
            found = run.forward(rows, value, setting.visible, setting.wants, setting.passes)
        statistics = [t for t in (found.peak, found.total, *_optional(found)) if t is not None]
        ctx.setting, ctx.rows = setting, rows  # made of the inputs, as large as they are, and needed again
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


def attend(setting: Setting, query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> ForwardResult:
    """Run the kernels; the output is differentiable."""
    given = [query, key, value, weight]
    if setting.visible.mask is not None:
        given += setting.visible.mask.tensors()
    if not torch.is_grad_enabled() or not any(map(_requires_grad, given)):
        rows = setting.rows(query, key, weight)
        return run.forward(rows, value.contiguous(), setting.visible, setting.wants, setting.passes)
    output, peak, total, *rest = Fused.apply(setting, *given)
    wants = setting.wants
    asked = (wants.top, wants.entropy, wants.received, bool(wants.k), bool(wants.k))
    remaining = iter(rest)
    top, entropy, received, best, best_key = (next(remaining) if wanted else None for wanted in asked)
    return ForwardResult(output, peak, total, top, entropy, received, best, best_key, setting.is_direct)
