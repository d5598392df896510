"""The kernels as a differentiable function of projected rows, values, parameters and the mask's tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.engines.fused import run
from regard.engines.fused.families import Rows, is_direct, rows_of
from regard.engines.fused.run import Found, Wants
from regard.engines.fused.sight import Sight


@dataclass(frozen=True)
class Plan:
    """What of a call is not differentiated."""

    family: str
    kind: int
    scale: float
    sight: Sight
    wants: Wants

    @property
    def is_direct(self) -> bool:
        """Whether the kernels find weights instead of scores."""
        return is_direct(self.kind, self.scale, self.sight.plain)


class Fused(torch.autograd.Function):
    """Fused attention of query (B, H, L, C), key (B, G, S, C) and value (B, G, S, V), float32 or float64.

    It returns the output, and the statistics of :class:`Found`, which are not differentiable.
    """

    @staticmethod
    def forward(
        ctx: Any, plan: Plan, query: Tensor, key: Tensor, value: Tensor, weight: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        value = value.contiguous()
        rows = rows_of(plan.family, query, key, weight, plan.scale, plan.kind, plan.sight.plain)
        found = run.forward(rows, value, plan.sight, plan.wants)
        statistics = [t for t in (found.peak, found.total, *_optional(found)) if t is not None]
        ctx.plan, ctx.rows = plan, rows  # made of the inputs, as large as they are, and needed again
        ctx.save_for_backward(query, key, value, weight, found.output, found.peak, found.total, *tensors)
        ctx.mark_non_differentiable(*statistics)
        return found.output, *statistics

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        query, _key, value, _weight, output, peak, total, *tensors = ctx.saved_tensors
        plan, wanted = ctx.plan, list(ctx.needs_input_grad[5:])
        sight = plan.sight
        if sight.mask is not None:
            sight = replace(sight, mask=sight.mask.with_tensors(tensors))
        rows: Rows = ctx.rows
        pulled = run.backward(rows, value, sight, Found(output, peak, total), grad, tensors, wanted)
        d_query, d_key, d_weight = pulled.rows.finished(rows, query.shape[-1], plan.scale)
        masks = [g if want else None for g, want in zip(pulled.added, wanted)]
        return None, d_query, d_key, pulled.value, d_weight, *masks


def _optional(found: Found) -> tuple[Tensor | None, ...]:
    return found.top, found.entropy, found.received, found.best, found.best_key


def attend(plan: Plan, query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Found:
    """Run the plan; the output is differentiable."""
    mask = plan.sight.mask
    output, peak, total, *rest = Fused.apply(plan, query, key, value, weight, *([] if mask is None else mask.tensors()))
    wants = plan.wants
    asked = (wants.top, wants.entropy, wants.received, bool(wants.k), bool(wants.k))
    remaining = iter(rest)
    top, entropy, received, best, best_key = (next(remaining) if wanted else None for wanted in asked)
    return Found(output, peak, total, top, entropy, received, best, best_key, plan.is_direct)
