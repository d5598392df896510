"""Engine ``triton``: fused kernels for GPUs of dot products, additive and concat scores, and kernels of a distance."""

from __future__ import annotations

import os
from dataclasses import astuple, dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from regard._utils.torch_private import in_forward_mode
from regard._utils.tracing import is_exported_to_onnx, is_traced
from regard.engines import cost_model, dense
from regard.engines.aux import AuxRequest, TopK
from regard.engines.base import Cost, Engine, EngineOutput, Runner
from regard.engines.problem import Problem
from regard.engines.triton.decoding import is_step
from regard.engines.triton.families import KINDS, RULES, SOFTMAX, Rows, family_of
from regard.engines.triton.launch import Setting, chip, is_interpreted, tile_shape
from regard.engines.triton.operators import SINK, TENSORS, Attend, triton_fields, triton_forward
from regard.engines.triton.visible import VisibleKeys
from regard.masks import Dense
from regard.normalizers import Argmax, Entmax, Entmax15, Sigmoid, Softmax, SoftmaxSink, Sparsemax
from regard.normalizers.entmax import powers

#: The devices that Triton compiles for; ``cuda`` is also that of ROCm.
DEVICES = ("cuda", "xpu")
#: The largest number of features and values of a row.
LARGEST = 256
#: The largest k of a top-k that the kernels find; beyond it, plain torch does.
LARGEST_TOPK = 64


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
        e = problem.extent
        V = problem.value.shape[-1]
        ends = (problem.query, problem.key, problem.value)
        moved = sum(t.numel() * t.element_size() for t in ends)
        kept = 4 * e.B * e.H * e.L * (V + 2)
        flops = (
            e.B
            * e.H
            * e.L
            * e.S
            * problem.visible_share
            * (problem.score.pair_flops(problem.query.shape[-1]) + 2 * V + 8)
        )
        grows = self.grows(problem)
        kept += 4 * e.B * e.H * e.L * e.S if grows else 0
        return Cost(float(flops), float(moved), float(kept), grows)

    def fields(self, problem: Problem) -> frozenset[str]:  # noqa: ARG002
        return frozenset(("lse", "max", "entropy", "topk", "received"))

    def prepare(self, problem: Problem, request: AuxRequest | None) -> Runner:
        if 0 in problem.query.shape[:3] or problem.extent.S == 0:
            return dense.attend_nothing
        fixed = problem.mask is None or problem.mask.is_fixed
        visible = _visible(problem) if fixed and not is_traced(problem.query) else None
        return partial(_attend, visible, request)

    def partial_backward(
        self,
        problem: Problem,
        output: Tensor,
        lse: Tensor,
        runner: Runner | None = None,  # noqa: ARG002
    ) -> Tensor | None:
        if is_traced(problem.query) or problem.dropout_p or not problem.is_softmax:
            return None
        return _computed(problem, _visible(problem), (output.detach(), lse.detach())).output


def _visible(problem: Problem) -> VisibleKeys:
    family = family_of(problem.score)
    assert family is not None
    C, V = problem.query.shape[-1], problem.value.shape[-1]

    def tile(biased: bool) -> tuple[int, int]:
        shape = tile_shape(family, problem.value.dtype, C, V, biased, is_interpreted(), chip(str(problem.query.device)))
        return shape.rows, shape.cols

    extent, rule = problem.extent, RULES[type(problem.normalizer)]
    step = is_step(family, rule, problem.dropout_p, extent.L, extent.S)
    return VisibleKeys.of(problem, None if step else tile)


def _attend(visible: VisibleKeys | None, request: AuxRequest | None, problem: Problem) -> EngineOutput:
    found = _computed(problem, _visible(problem) if visible is None else visible, (None, None))
    is_softmax = RULES[type(problem.normalizer)] == SOFTMAX
    outcome = EngineOutput(found.output.to(problem.query.dtype), found.statistic if is_softmax else None)
    return outcome if request is None else _with_fields(problem, found, outcome, request)


@dataclass(frozen=True)
class _Computed:
    """What the kernels computed, and of which arguments.

    Attributes
    ----------
    output : Tensor (B, H, L, V)
    statistic : Tensor (B, H, L) or (B, H, L, 2)
    given : tuple
        Arguments of :func:`triton_forward`.
    """

    output: Tensor
    statistic: Tensor
    given: tuple[Any, ...]


def _with_fields(problem: Problem, found: _Computed, outcome: EngineOutput, request: AuxRequest) -> EngineOutput:
    """Compute requested fields in a sweep of their own, and add them to the outcome."""
    k = min(request.topk, problem.extent.S)
    k = k if k <= LARGEST_TOPK else 0
    wants = request.max, bool(request.lse) and outcome.lse is None, request.entropy, request.received, k
    if not any(wants):
        return outcome
    given = [t.detach() if isinstance(t, Tensor) else t for t in found.given]
    tensors, constants = given[:TENSORS], given[TENSORS:]
    statistic = found.statistic.detach()
    with torch.no_grad():
        peak, lse, entropy, received, best, keys = triton_fields(*tensors, statistic, *wants, *constants)
        return replace(
            outcome,
            lse=lse if wants[1] else outcome.lse,
            max=peak if request.max else None,
            entropy=entropy if request.entropy else None,
            received=received if request.received else None,
            topk=_ranked(problem, statistic, best, keys, given[SINK]) if k else None,
        )


def _ranked(problem: Problem, statistic: Tensor, best: Tensor, keys: Tensor, sink: Tensor | None) -> TopK:
    """Return the weights of the best scores (B, H, L, k), 0 beyond the keys that a query sees."""
    normalizer, shift, offset = problem.normalizer, statistic[..., :1], statistic[..., 1:]
    if isinstance(normalizer, Softmax | SoftmaxSink):
        whole = statistic if sink is None else torch.logaddexp(statistic, sink.to(statistic.dtype).unsqueeze(-1))
        weights = (best - whole.unsqueeze(-1)).exp()
    elif isinstance(normalizer, Sigmoid):
        weights = best.sigmoid()
    elif isinstance(normalizer, Argmax):
        place = shift.nan_to_num(-1).long() + offset.long()
        weights = torch.where(shift.isnan(), shift, (keys == place).to(best.dtype))
    else:
        assert isinstance(normalizer, Sparsemax | Entmax15 | Entmax)
        weights = powers(best, shift, offset, normalizer.alpha)
    return TopK(weights.masked_fill(keys < 0, 0.0), keys)


def _computed(problem: Problem, visible: VisibleKeys, known: tuple[Tensor, Tensor] | tuple[None, None]) -> _Computed:
    """Return the output and the statistic of rows, or attach known ones to the graph."""
    if problem.query.dtype == torch.bfloat16 and is_interpreted():  # Triton's interpreter computes it wrongly
        query, key, value = (t.float() for t in (problem.query, problem.key, problem.value))
        problem = replace(problem, query=query, key=key, value=value)
    rows = Rows.of(problem)
    family = family_of(problem.score)
    assert family is not None
    seed = int(torch.randint(2**62, ())) if problem.dropout_p else 0
    rule, kind = RULES[type(problem.normalizer)], KINDS.get(type(problem.score), 0)
    alpha = getattr(problem.normalizer, "alpha", 0.0)
    setting = Setting(family, kind, rule, problem.scale, problem.softcap or 0.0, problem.dropout_p, seed, alpha)
    lists = (visible.start, visible.stop, visible.by_query, visible.by_key, visible.tiles, visible.words)
    given = (rows.query, rows.key, rows.value, rows.weight, visible.bias, rows.sink, *lists, *astuple(setting))
    if known[0] is None and not (torch.is_grad_enabled() and _differentiates(given)):
        output, statistic = triton_forward(*given)
    else:
        output, statistic = Attend.apply(*given, *known)
    return _Computed(output, statistic, given)


def _differentiates(given: tuple[object, ...]) -> bool:
    return any(isinstance(t, Tensor) and t.requires_grad for t in given)
