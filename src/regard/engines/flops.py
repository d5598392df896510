"""Register the operators of our kernels, and torch's own on the CPU, with torch's FLOP counter."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import (
    flop_registry,
    register_flop_formula,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from regard.engines.fused.operators import fused_backward, fused_forward
from regard.engines.triton.operators import triton_backward, triton_forward

_ATEN: Any = torch.ops.aten


def _forward(query: Any, key: Any, value: Any, *_: Any, **named: Any) -> int:  # noqa: ARG001
    """Count two matrix products over all pairs, with a multiplication and an addition per feature."""
    return sdpa_flop_count(query, key, value)


def _backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **named: Any) -> int:  # noqa: ARG001
    """Count five matrix products, as torch does for its own kernels."""
    return sdpa_backward_flop_count(grad, query, key, value)


def _backward_of_rows(query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> int:  # noqa: ARG001
    """Count the same for the operator of engine "triton", whose 13th argument is the output."""
    return sdpa_backward_flop_count(rest[9], query, key, value)


def register() -> None:
    """Register the operators with torch's FLOP counter, except those it knows already."""
    forward = (fused_forward, triton_forward, _ATEN._scaled_dot_product_flash_attention_for_cpu)
    backward = (fused_backward, _ATEN._scaled_dot_product_flash_attention_for_cpu_backward)
    for formula, operators in ((_forward, forward), (_backward, backward), (_backward_of_rows, (triton_backward,))):
        for operator in operators:
            if operator not in flop_registry:
                register_flop_formula(operator)(formula)
