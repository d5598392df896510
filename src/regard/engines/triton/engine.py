"""Engine ``triton``: fused kernels for GPUs of dot products, additive and concat scores, and kernels of a distance."""

from __future__ import annotations

import os
from functools import cache, partial
from importlib.util import find_spec

import torch
from torch import Tensor

from regard._utils.torch_private import in_forward_mode
from regard._utils.tracing import is_exported_to_onnx, is_traced
from regard.engines import cost_model, dense
from regard.engines.aux import AuxRequest
from regard.engines.base import Cost, Engine, Runner
from regard.engines.problem import Problem
from regard.masks import Dense

#: The devices that Triton compiles for; ``cuda`` is also that of ROCm.
DEVICES = ("cuda", "xpu")
#: The largest number of features and values of a row.
LARGEST = 256


@cache
def _is_installed() -> bool:
    try:
        return find_spec("triton") is not None
    except ImportError:
        return False


def _interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


class Triton(Engine):
    """Kernels that visit tiles of scores once, forward and backward, in O(L + S) memory, on GPUs.

    Dot products, additive and concat scores, and kernels of a distance, in float16, bfloat16, float32 and float64;
    softmax, sinks, sigmoid, entmax of any α, sparsemax and argmax. Auxiliary outputs take a second sweep of scores.
    Hidden tiles are skipped. A float tensor is read where it is; other biases, such as ALiBi's, take L×S memory.
    ``TRITON_INTERPRET=1``, set before the first call, runs the kernels on the CPU, for tests.
    """

    name = "triton"
    keeps_lse = True
    drops_when_traced = False

    def refusal(self, problem: Problem) -> str | None:
        device = problem.query.device.type
        if device not in DEVICES and not (device == "cpu" and _interprets()):
            return f"GPUs only, not {device}"
        from regard.engines.triton.families import RULES, family_of  # where there is a GPU

        if not _is_installed():
            return "Triton is not installed"
        if is_exported_to_onnx():
            return "its kernels cannot be exported to ONNX"
        if type(problem.normalizer) not in RULES:
            return f"no kernel for {type(problem.normalizer).__name__}"
        family = family_of(problem.score)
        if family is None:
            return f"no kernel for {type(problem.score).__name__}"
        widest = max(problem.query.shape[-1], problem.key.shape[-1], problem.value.shape[-1])
        if widest > LARGEST:
            return f"rows of at most {LARGEST} features, not {widest}"
        if problem.dropout_p and is_traced(problem.query):
            return "no dropout in traced calls (engines 'streaming' and 'reference' have it)"
        if in_forward_mode():
            return "no forward-mode derivative (engines 'streaming' and 'reference' have one)"
        return None

    def not_automatic(self, problem: Problem) -> str | None:
        if problem.query.is_cpu:
            return "interpreted, for tests"
        if cost_model.is_measured(problem.query.device):
            return None
        return "it was not measured on this device: see docs/gpu.md, or set REGARD_UNMEASURED=1"

    def grows(self, problem: Problem) -> bool:
        return problem.mask is not None and problem.mask.has_bias and not isinstance(problem.mask, Dense)

    def cost(self, problem: Problem) -> Cost:
        B, H, L, S = problem.extent
        E, V = problem.query.shape[-1], problem.value.shape[-1]
        flops = B * H * L * S * problem.visible_share * (problem.score.pair_flops(E) + 2 * V + 8)
        grows = self.grows(problem)
        kept = 4 * B * H * L * (V + 2 + (S if grows else 0))
        return Cost(float(flops), float(problem.bytes_read), float(kept), grows)

    def fields(self, problem: Problem) -> frozenset[str]:  # noqa: ARG002
        return frozenset(("lse", "max", "entropy", "topk", "received"))

    def prepare(self, problem: Problem, request: AuxRequest | None) -> Runner:
        if 0 in problem.extent:
            return dense.attend_nothing
        from regard.engines.triton.attend import attend, visible_keys  # where there is a GPU

        fixed = problem.mask is None or problem.mask.is_fixed
        visible = visible_keys(problem) if fixed and not is_traced(problem.query) else None
        return partial(attend, visible, request)

    def partial_backward(
        self,
        problem: Problem,
        output: Tensor,
        lse: Tensor,
        runner: Runner | None = None,  # noqa: ARG002
    ) -> Tensor | None:
        if is_traced(problem.query) or problem.dropout_p or not problem.is_softmax:
            return None
        from regard.engines.triton.attend import computed, visible_keys

        return computed(problem, visible_keys(problem), (output.detach(), lse.detach())).output


# Saved programs name the operators, and are loaded after ``import regard``.
if torch.backends.cuda.is_built() or torch.version.xpu is not None or _interprets():
    import regard.engines.triton.paged  # noqa: F401 (it imports the other operators, too)
