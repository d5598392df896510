"""Engine ``fused``: compiled CPU kernels for scores and masks that torch's kernels do not support."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard import scores
from regard._utils.torch_private import functorch_derivatives, in_forward_mode
from regard._utils.tracing import in_dispatch_mode, is_exported_to_onnx, is_traced
from regard.engines import dense, nonfinite
from regard.engines.aux import AuxRequest, TopK
from regard.engines.base import Cost, Engine, EngineOutput, Runner
from regard.engines.fused import library, morton
from regard.engines.fused.arguments import COMPACT, ENTMAX
from regard.engines.fused.families import KINDS, family_of, inverse_of, is_direct
from regard.engines.fused.operators import StaticArguments, Traced, attend_differentiably, fused_forward
from regard.engines.fused.rules import Rule
from regard.engines.fused.run import ForwardRequest, ForwardResult, held_scores
from regard.engines.fused.visible_keys import VisibleKeys
from regard.engines.problem import Problem
from regard.engines.tiles import spans
from regard.masks.base import reached
from regard.scores import Score
from regard.scores.kernels import Distance

#: Number of keys above which points are sorted along a curve for compact kernels.
ORDERED = 512
#: Number of queries per materialized mask in traced calls.
TRACED_STRIP = 512


class Fused(Engine):
    """Multithreaded kernels that process tiles of scores once, forward and backward, in O(L + S) memory.

    For the additive and concat scores, a pair costs a few operations per feature and no transcendental function. For
    the Gaussian, Laplacian and compact kernels, the engine is meant for distances in few dimensions, and skips tiles
    beyond the width. For dot products, it computes only visible pairs.
    """

    name = "fused"

    def refusal(self, problem: Problem) -> str | None:
        if (missing := library.problem()) is not None:
            return missing
        if is_exported_to_onnx():
            return "its kernels cannot be exported to ONNX"
        if problem.query.device.type != "cpu":
            return f"CPU only, not {problem.query.device.type}"
        if Rule.of(problem.normalizer) is None:
            return f"softmax, sigmoid and entmax only, not {type(problem.normalizer).__name__}"
        if family_of(problem.score) is None:
            return f"no kernel for {type(problem.score).__name__}"
        if problem.softcap is not None:
            return "no softcap"
        if problem.dropout_p:
            return "no dropout"
        if in_forward_mode():
            return "no forward-mode derivative (engines 'streaming' and 'reference' have one)"
        return None

    def grows(self, problem: Problem) -> bool:  # noqa: ARG002
        return False

    def cost(self, problem: Problem) -> Cost:
        e = problem.extent
        E, V = problem.query.shape[-1], problem.value.shape[-1]
        size = torch.finfo(problem.compute_dtype).bits // 8
        ends = (problem.query, problem.key, problem.value)
        moved = sum(t.numel() * t.element_size() for t in ends)
        kept = 2 * sum(t.numel() for t in ends) * size
        if _rule(problem).kind == ENTMAX:
            held, row = held_scores(e.S)
            kept += torch.get_num_threads() * (held + 3) * row * size
        flops = e.B * e.H * e.L * e.S * problem.visible_share * (problem.score.pair_flops(E) + 2 * V + 8)
        return Cost(float(flops), float(moved), float(kept), grows=False)

    def fields(self, problem: Problem) -> frozenset[str]:
        if not problem.normalizer.online:
            return frozenset()
        fields = frozenset(("lse", "entropy", "topk", "received"))
        return fields if _is_direct(problem) else fields | {"max"}

    def prepare(self, problem: Problem, request: AuxRequest | None) -> Runner:
        if 0 in problem.query.shape[:3] or problem.extent.S == 0:
            return dense.attend_nothing
        if is_traced(problem.query) or (request is None and in_dispatch_mode()):
            return _traced
        fixed = _Prepared.of(problem, request)
        attend = partial(_attend, fixed, request is not None)
        differentiated = problem.wants_grad and problem.mask is not None

        def run(problem: Problem) -> EngineOutput:
            # A backward pass multiplies hidden values by 0, which leaks NaN.
            if differentiated and dense.needs_care(problem):
                return nonfinite.contained(problem, attend)
            return nonfinite.recomputed(problem, attend)

        run.fixed = fixed  # type: ignore[attr-defined]
        return run

    def partial_backward(
        self, problem: Problem, output: Tensor, lse: Tensor, runner: Runner | None = None
    ) -> Tensor | None:
        if is_traced(problem.query) or dense.needs_care(problem) or not problem.normalizer.online:
            return None
        fixed: _Prepared = getattr(runner, "fixed", None) or _Prepared.of(problem, None)
        rows, setting = _Projected.of(problem, fixed.weight), fixed.setting or _setting(problem, ForwardRequest())
        empty = lse == -torch.inf
        peak, total = torch.where(empty, 0.0, lse), torch.where(empty, 0.0, 1.0).to(lse.dtype)
        if setting.is_direct:
            peak, total = torch.zeros_like(lse), lse.exp()
        precomputed = ForwardResult(output.detach().contiguous(), peak.contiguous(), total.contiguous())
        setting = replace(setting, precomputed=precomputed)
        if _is_ordered(setting, rows):
            return _attend_in_order(setting, rows).output
        return attend_differentiably(setting, rows.query, rows.key, rows.value, rows.weight).output


def _is_direct(problem: Problem) -> bool:
    """Whether weights are computed without scores, as log(1 − r) loses precision for small r."""
    plain = problem.mask is None or not problem.mask.has_bias
    return is_direct(KINDS.get(type(problem.score), 0), problem.scale, plain, _rule(problem))


def _rule(problem: Problem) -> Rule:
    rule = Rule.of(problem.normalizer)
    assert rule is not None
    return rule


@dataclass(frozen=True)
class _Prepared:
    """The data shared by calls of the same structure; None if it depends on tensors of the score or mask.

    Attributes
    ----------
    setting : StaticArguments
        The non-differentiable arguments.
    weight : Tensor (H, C), or None
    """

    setting: StaticArguments | None
    weight: Tensor | None
    wants: ForwardRequest

    @classmethod
    def of(cls, problem: Problem, request: AuxRequest | None) -> _Prepared:
        wants, score, mask = ForwardRequest(), problem.score, problem.mask
        if request is not None and problem.normalizer.online:
            k = min(request.topk, problem.extent.S)
            wants = ForwardRequest(request.max and not _is_direct(problem), request.entropy, request.received, k)
        family, kind = family_of(score), KINDS.get(type(score), 0)
        assert family is not None
        weight = inverse = None
        if not score.tensors() and type(score).project is Score.project:
            weight = _weight(score, problem.query[:, :, :0].detach().to(problem.compute_dtype))
            inverse = inverse_of(weight) if family == "radial" else None
        if mask is not None and not mask.is_fixed:
            return cls(None, weight, wants)
        visible, rule = VisibleKeys.of(problem), _rule(problem)
        return cls(StaticArguments(family, kind, problem.scale, rule, visible, wants, inverse), weight, wants)


@dataclass(slots=True, eq=False)
class _Projected:
    """The projected rows of a problem in the compute dtype, and the weight (H, C) of its score."""

    query: Tensor
    key: Tensor
    value: Tensor
    weight: Tensor

    @classmethod
    def of(cls, problem: Problem, weight: Tensor | None = None) -> _Projected:
        dtype = problem.compute_dtype
        query, key, value = problem.query, problem.key, problem.value
        if query.dtype != dtype:
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if weight is not None:  # nothing is projected
            return cls(query, key, value, weight)
        score = problem.score.cast(dtype)
        query, key = score.project(query, key)
        if score.per_head:
            key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
        return cls(query, key, value, _weight(score, query))


def _weight(score: Score, query: Tensor) -> Tensor:
    """Return the tensor of a score that the kernels read, per head."""
    H, C = query.shape[1], query.shape[-1]
    if isinstance(score, (scores.Additive, scores.Concat)):
        return score.w_v.expand(H, C)
    if isinstance(score, Distance):
        width = score.width
        return width.expand(H, C) if isinstance(width, Tensor) else query.new_full((H, C), width)
    return query.new_empty(H, 0)


def _attend(fixed: _Prepared, wants_aux: bool, problem: Problem) -> EngineOutput:
    rows, setting = _Projected.of(problem, fixed.weight), fixed.setting
    if setting is None:
        setting = _setting(problem, fixed.wants)
    if _is_ordered(setting, rows):
        return _outcome(problem, _attend_in_order(setting, rows))
    found = attend_differentiably(setting, rows.query, rows.key, rows.value, rows.weight)
    return _outcome(problem, found) if wants_aux else EngineOutput(found.output.to(problem.query.dtype))


def _setting(problem: Problem, wants: ForwardRequest) -> StaticArguments:
    family = family_of(problem.score)
    assert family is not None
    kind, visible = KINDS.get(type(problem.score), 0), VisibleKeys.of(problem)
    return StaticArguments(family, kind, problem.scale, _rule(problem), visible, wants)


def _is_ordered(setting: StaticArguments, rows: _Projected) -> bool:
    """Whether sorting points along a curve is worth its cost."""
    many = rows.key.shape[2] > ORDERED and rows.query.shape[-1] > 0
    return setting.kind >= COMPACT and setting.visible.everything and many


def _attend_in_order(setting: StaticArguments, rows: _Projected) -> ForwardResult:
    """Run on points sorted along a Z-order curve, so that compact kernels can skip most tiles."""
    width = rows.weight[0].detach()
    q_order, k_order = morton.morton_order(rows.query / width, rows.key / width)
    query, key, value = (
        morton.take(t, o) for t, o in ((rows.query, q_order), (rows.key, k_order), (rows.value, k_order))
    )
    by_row: dict[str, Any]
    if (known := setting.precomputed) is not None:
        by_row = {name: morton.take(getattr(known, name), q_order) for name in ("output", "peak", "total")}
        setting = replace(setting, precomputed=ForwardResult(**by_row))
    found = attend_differentiably(setting, query, key, value, rows.weight)
    back = morton.inverse(q_order)
    names = ("output", "peak", "total", "top", "entropy", "best", "best_key")
    by_row = {name: morton.take(t, back) for name in names if (t := getattr(found, name)) is not None}
    R = rows.query.shape[1] // rows.key.shape[1]
    by_head = k_order.repeat_interleave(R, 1)
    if "best_key" in by_row:
        keys = by_row["best_key"]
        named = torch.take_along_dim(by_head, keys.clamp(min=0).flatten(2), 2).view_as(keys)
        by_row["best_key"] = torch.where(keys < 0, -1, named)
    if found.received is not None:
        by_row["received"] = morton.take(found.received.view(by_head.shape), morton.inverse(by_head)).flatten(0, 1)
    return replace(found, **by_row)


def _traced(problem: Problem) -> EngineOutput:
    """Run a traced call, with the mask as intervals, or materialized for a strip of queries at a time."""
    rows, extent, dtype = _Projected.of(problem), problem.extent, problem.compute_dtype
    mask = None if problem.mask is None else problem.mask.cast(dtype)
    constants = family_of(problem.score), KINDS.get(type(problem.score), 0), problem.scale, *_rule(problem)
    attend = Traced.apply if problem.wants_grad or functorch_derivatives() else fused_forward
    if mask is None:
        output, peak, total = attend(rows.query, rows.key, rows.value, rows.weight, None, None, None, *constants)
        return EngineOutput(output.to(problem.query.dtype), _lse_of(problem, peak, total))
    intervals = None if mask.has_bias else mask.intervals(extent)
    if intervals is not None:
        rows = _cleared(rows, reached(*intervals, extent.S))
        output, peak, total = attend(rows.query, rows.key, rows.value, rows.weight, *intervals, None, *constants)
        return EngineOutput(output.to(problem.query.dtype), _lse_of(problem, peak, total))
    b, h, q_idx, kv_idx = (torch.arange(n, device="cpu") for n in (extent.B, extent.H, extent.L, extent.S))
    b, h, q_idx = b.view(-1, 1, 1, 1), h.view(-1, 1, 1), q_idx.unsqueeze(1)
    strips = [span.slice for span in spans(extent.L, TRACED_STRIP)]
    added = [mask.matrix(b, h, q_idx[strip], kv_idx, rows.query.dtype) for strip in strips]
    seen = torch.stack([(matrix > -torch.inf).any(-2) for matrix in added]).any(0)
    rows = _cleared(rows, seen)
    parts = [
        attend(rows.query[:, :, strip], rows.key, rows.value, rows.weight, None, None, matrix, *constants)
        for strip, matrix in zip(strips, added)
    ]
    output, peak, total = (torch.cat(each, 2) for each in zip(*parts))
    return EngineOutput(output.to(problem.query.dtype), _lse_of(problem, peak, total))


def _cleared(rows: _Projected, seen: Tensor) -> _Projected:
    """Zero keys and values that no query sees."""
    B, G, S, _ = rows.key.shape
    seen = seen.expand(B, rows.query.shape[1], S).reshape(B, G, -1, S).any(2).unsqueeze(-1)
    return replace(rows, key=torch.where(seen, rows.key, 0.0), value=torch.where(seen, rows.value, 0.0))


def _lse_of(problem: Problem, peak: Tensor, total: Tensor) -> Tensor | None:
    """Return the log-sum-exp, which only softmax has."""
    if not problem.normalizer.online:
        return None
    empty = total == 0
    return torch.where(empty, -torch.inf, peak + torch.where(empty, 1.0, total).log())


def _outcome(problem: Problem, found: ForwardResult) -> EngineOutput:
    """Convert the results of a forward pass to auxiliary outputs."""
    if not problem.normalizer.online:
        return EngineOutput(found.output.to(problem.query.dtype))
    empty = found.total == 0
    log_total = torch.where(empty, 1.0, found.total).log()
    entropy = None if found.entropy is None else torch.where(empty, 0.0, log_total - found.entropy / found.total)
    topk = None
    if found.best is not None and found.best_key is not None:
        powers = found.best if found.direct else (found.best - found.peak.unsqueeze(-1)).exp()
        weights = torch.where(found.best_key < 0, 0.0, powers / found.total.unsqueeze(-1))
        topk = TopK(weights, found.best_key)
    return EngineOutput(
        found.output.to(problem.query.dtype),
        _lse_of(problem, found.peak, found.total),
        max=found.top,
        entropy=entropy,
        topk=topk,
        received=None if found.received is None else found.received.view(*problem.query.shape[:2], -1),
    )
