"""Run problems by the operators, and compute the fields of auxiliary outputs."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.engines.aux import AuxRequest, TopK
from regard.engines.base import EngineOutput
from regard.engines.problem import Problem
from regard.engines.triton.decoding import is_step
from regard.engines.triton.families import KINDS, RULES, SOFTMAX, Rows, family_of
from regard.engines.triton.launch import Setting, chip, is_interpreted, tile_shape
from regard.engines.triton.operators import SINK, TENSORS, Attend, triton_fields, triton_forward
from regard.engines.triton.visible import VisibleKeys
from regard.normalizers import Argmax, Entmax, Entmax15, Sigmoid, Softmax, SoftmaxSink, Sparsemax
from regard.normalizers.entmax import powers

#: The largest k of a top-k that the kernels find; beyond it, plain torch does.
LARGEST_TOPK = 64


def visible_keys(problem: Problem) -> VisibleKeys:
    """Convert the mask of a problem."""
    family = family_of(problem.score)
    assert family is not None
    C, V = problem.query.shape[-1], problem.value.shape[-1]

    def tile(biased: bool) -> tuple[int, int]:
        shape = tile_shape(family, problem.value.dtype, C, V, biased, is_interpreted(), chip(str(problem.query.device)))
        return shape.rows, shape.cols

    extent, rule = problem.extent, RULES[type(problem.normalizer)]
    step = is_step(family, rule, problem.dropout_p, extent.L, extent.S)
    return VisibleKeys.of(problem, None if step else tile)


def attend(visible: VisibleKeys | None, request: AuxRequest | None, problem: Problem) -> EngineOutput:
    """Run a problem; ``visible`` is its mask, None if that differs from call to call."""
    found = computed(problem, visible_keys(problem) if visible is None else visible, (None, None))
    is_softmax = RULES[type(problem.normalizer)] == SOFTMAX
    outcome = EngineOutput(found.output.to(problem.query.dtype), found.statistic if is_softmax else None)
    return outcome if request is None else _with_fields(problem, found, outcome, request)


@dataclass(frozen=True)
class Computed:
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


def _with_fields(problem: Problem, found: Computed, outcome: EngineOutput, request: AuxRequest) -> EngineOutput:
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


def computed(problem: Problem, visible: VisibleKeys, known: tuple[Tensor, Tensor] | tuple[None, None]) -> Computed:
    """Return the output and the statistic of rows, or attach known ones to the graph."""
    if problem.query.dtype == torch.bfloat16 and is_interpreted():  # Triton's interpreter computes it wrongly
        query, key, value = (t.float() for t in (problem.query, problem.key, problem.value))
        problem = replace(problem, query=query, key=key, value=value)
    rows = Rows.of(problem)
    family = family_of(problem.score)
    assert family is not None
    seed = int(torch.randint(2**62, (), device="cpu")) if problem.dropout_p else 0
    rule, kind = RULES[type(problem.normalizer)], KINDS.get(type(problem.score), 0)
    alpha = getattr(problem.normalizer, "alpha", 0.0)
    setting = Setting(family, kind, rule, problem.scale, problem.softcap or 0.0, problem.dropout_p, seed, alpha)
    lists = (visible.start, visible.stop, visible.by_query, visible.by_key, visible.tiles, visible.words)
    given = (rows.query, rows.key, rows.value, rows.weight, visible.bias, rows.sink, *lists, *astuple(setting))
    if known[0] is None and not (torch.is_grad_enabled() and _differentiates(given)):
        output, statistic = triton_forward(*given)
    else:
        output, statistic = Attend.apply(*given, *known)
    return Computed(output, statistic, given)


def _differentiates(given: tuple[object, ...]) -> bool:
    return any(isinstance(t, Tensor) and t.requires_grad for t in given)
