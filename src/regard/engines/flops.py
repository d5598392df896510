"""FLOPs of our kernels' operators, and of torch's own on the CPU, for torch's FLOP counter.

The counter's module imports Triton where it is installed, so it is not imported here: a counter that is active when
attention is called learns of the operators then.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch

from regard._utils.torch_private import dispatch_modes
from regard.engines.fused.operators import fused_backward, fused_forward

_ATEN: Any = torch.ops.aten


def register() -> None:
    """Add the operators to the FLOP counters that are active, and to the registry for later ones."""
    module = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return
    added = _registered(module)
    for mode in dispatch_modes():
        counter = getattr(mode, "counter", None)
        if isinstance(counter, module.FlopCounterMode):
            counter.flop_registry |= {
                each: formula for each, formula in added.items() if each not in counter.flop_registry
            }


def _registered(module: ModuleType) -> dict[Any, Any]:
    """Register the operators that the module does not know, and return all of them with their formulas."""
    count, count_backward = module.sdpa_flop_count, module.sdpa_backward_flop_count

    def forward(query: Any, key: Any, value: Any, *_: Any, **named: Any) -> Any:  # noqa: ARG001
        return count(query, key, value)  # two products over all pairs

    def backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **named: Any) -> Any:  # noqa: ARG001
        return count_backward(grad, query, key, value)  # five products

    def backward_of_rows(query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> Any:  # noqa: ARG001
        return count_backward(rest[9], query, key, value)  # of engine "triton", whose 13th argument is the output

    from regard.engines.triton.operators import triton_backward, triton_forward  # slow to import

    formulas = dict.fromkeys(
        (fused_forward, triton_forward, _ATEN._scaled_dot_product_flash_attention_for_cpu), forward
    )
    flash_backward = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
    formulas |= {fused_backward: backward, flash_backward: backward, triton_backward: backward_of_rows}
    for operator, formula in formulas.items():
        if operator not in module.flop_registry:
            module.register_flop_formula(operator)(formula)
    return {operator: module.flop_registry[operator] for operator in formulas}
