"""Engine ``fused``: compiled CPU kernels for scores and masks that torch's kernels do not support."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from regard import scores
from regard._utils.torch_private import functorch_derivatives, in_forward_mode
from regard._utils.tracing import in_dispatch_mode, is_exported_to_onnx, is_traced
from regard.engines import cost_model, dense, nonfinite
from regard.engines.aux import AuxRequest, TopK
from regard.engines.base import Cost, Engine, EngineOutput, Runner, Shortcut
from regard.engines.fused import covers, in_place, library, lines, morton
from regard.engines.fused.arguments import COMPACT, ENTMAX, SOFTMAX
from regard.engines.fused.families import Rows, family_of, inverse_of, is_direct, kind_of
from regard.engines.fused.operators import StaticArguments, Traced, attend_differentiably, fused_forward
from regard.engines.fused.prepared import PreparedForward, is_simple
from regard.engines.fused.rules import Rule
from regard.engines.fused.run import Dropout, ForwardRequest, ForwardResult, Passes, held_scores
from regard.engines.fused.selected import KeyLists, SelectedKeys
from regard.engines.fused.visible_keys import VisibleKeys, split
from regard.engines.problem import Problem
from regard.engines.tiles import spans
from regard.masks import Dense
from regard.masks.base import Cover, Extent, reached
from regard.normalizers import SoftmaxSink
from regard.scores import Score
from regard.scores.kernels import Distance
from regard.scores.own_width import OwnWidth

#: Number of keys above which points are sorted along a curve for compact kernels.
ORDERED = 512
#: Number of queries per materialized mask in traced calls.
TRACED_STRIP = 512


class Fused(Engine):
    """Multithreaded kernels that process tiles of scores once, forward and backward, in O(L + S) memory.

    For the additive and concat scores, a pair costs a few operations per feature and no transcendental function. For
    the Gaussian, Laplacian and compact kernels, the engine is meant for distances in few dimensions, and skips tiles
    beyond the width. For dot products, it computes only visible pairs. Where few queries read many keys, as in
    decoding, keys and values are read in place; elsewhere 16-bit inputs are converted first.
    """

    name = "fused"
    drops_when_traced = False
    fits_lines = True

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
        if isinstance(problem.score, OwnWidth):
            if problem.wants_grad:
                return "no derivative with a width per query (engines 'streaming' and 'reference' have one)"
            if is_traced(problem.query) or in_dispatch_mode():
                return "no width per query in traced calls"
        if problem.dropout_p and is_traced(problem.query):
            return "no dropout in traced calls (engines 'streaming' and 'reference' have it)"
        if in_forward_mode():
            return "no forward-mode derivative (engines 'streaming' and 'reference' have one)"
        return None if problem.order is None else lines.refusal(problem)

    def grows(self, problem: Problem) -> bool:  # noqa: ARG002
        return False

    def cost(self, problem: Problem) -> Cost:
        e = problem.extent
        E, V = problem.query.shape[-1], problem.value.shape[-1]
        size = problem.compute_dtype.itemsize
        kept = 2 * problem.bytes_read * size // problem.query.itemsize
        if _rule(problem).kind == ENTMAX:
            held, row = held_scores(e.S)
            kept += torch.get_num_threads() * (held + 3) * row * size
        line = 0
        if problem.order is not None:
            line = problem.order.pair_flops(E)
            kept += e.B * e.H * e.L * (E * E // 2 + 2 * E) * size * problem.wants_grad
        flops = e.B * e.H * e.L * e.S * problem.visible_share * (problem.score.pair_flops(E) + 2 * V + 8 + line)
        return Cost(float(flops), float(problem.bytes_read), float(kept), grows=False)

    def fields(self, problem: Problem) -> frozenset[str]:
        if not _is_online(problem) or problem.order is not None:
            return frozenset()
        fields = frozenset(("lse", "entropy", "topk"))
        fields = fields if in_place.applies(problem) else fields | {"received"}  # of one head's rows, not of a group's
        return fields if _is_direct(problem) else fields | {"max"}

    def prepare(self, problem: Problem, request: AuxRequest | None) -> Runner:
        if 0 in problem.extent:
            return dense.attend_nothing
        if problem.order is not None:
            return lines.prepare(problem)
        # The operators have no dropout.
        if is_traced(problem.query) or (request is None and not problem.dropout_p and in_dispatch_mode()):
            return _traced
        if _is_listed(problem, request):
            return partial(nonfinite.recomputed, attend=_attend_to_lists)
        if in_place.applies(problem):
            return _prepare_in_place(problem, request)
        return self._prepare_tiles(problem, request)

    def _prepare_tiles(self, problem: Problem, request: AuxRequest | None) -> Runner:
        """Return a runner for kernels that pack tiles of keys."""
        fixed = _Prepared.of(problem, request)
        differentiated = problem.wants_grad and problem.mask is not None

        def run(problem: Problem) -> EngineOutput:
            seed = int(torch.randint(2**62, (), device="cpu")) if problem.dropout_p else 0
            dropout = Dropout(seed, problem.dropout_p) if problem.dropout_p else None
            attend = partial(_attend, fixed, request is not None, dropout)
            drop = None if dropout is None else dropout.drop
            # A backward pass multiplies hidden values by 0, which leaks NaN.
            if differentiated and dense.needs_care(problem):
                return nonfinite.contained(problem, attend, drop)
            return nonfinite.recomputed(problem, attend, drop)

        run.fixed = fixed  # type: ignore[attr-defined]
        run.shortcut = _shortcut(problem, fixed) if request is None else None  # type: ignore[attr-defined]
        return run

    def partial_backward(
        self, problem: Problem, output: Tensor, lse: Tensor, runner: Runner | None = None
    ) -> Tensor | None:
        if is_traced(problem.query) or problem.dropout_p or not problem.is_softmax or dense.needs_care(problem):
            return None
        fixed: _Prepared = getattr(runner, "fixed", None) or _Prepared.of(problem, None)
        rows = _Projected.of(problem, fixed.weight)
        setting = fixed.setting or _setting(problem, ForwardRequest(), fixed.cover)
        empty = lse == -torch.inf
        peak, total = torch.where(empty, 0.0, lse), torch.where(empty, 0.0, 1.0).to(lse.dtype)
        if setting.is_direct:
            peak, total = torch.zeros_like(lse), lse.exp()
        precomputed = ForwardResult(output.detach().contiguous(), peak.contiguous(), total.contiguous())
        setting = replace(setting, precomputed=precomputed)
        if _is_ordered(setting, rows):
            return _attend_in_order(setting, rows).output
        return attend_differentiably(setting, rows.query, rows.key, rows.value, rows.weight).output


def _is_listed(problem: Problem, request: AuxRequest | None) -> bool:
    """Whether the mask holds short lists of keys, and nothing is wanted that needs other kernels."""
    if cost_model.listed_share(problem) is None or family_of(problem.score) != "dot":
        return False
    if not problem.is_softmax or problem.softcap is not None or problem.dropout_p:
        return False
    return request is None or not (request.max or request.entropy or request.received or request.topk)


def _attend_to_lists(problem: Problem) -> EngineOutput:
    """Compare each query with its listed keys alone."""
    assert problem.mask is not None
    rows, lists = _Projected.of(problem), KeyLists(problem.mask, problem.extent)
    output, lse = SelectedKeys.apply(rows.query, rows.key, rows.value, lists, problem.scale)
    return EngineOutput(output.to(problem.query.dtype), lse)


def _is_direct(problem: Problem) -> bool:
    """Whether weights are computed without scores, as log(1 − r) loses precision for small r."""
    plain = problem.mask is None or not problem.mask.has_bias
    return is_direct(kind_of(problem.score), problem.scale, problem.softcap or 0.0, plain, _rule(problem))


def _rule(problem: Problem) -> Rule:
    rule = Rule.of(problem.normalizer)
    assert rule is not None
    return rule


def _is_online(problem: Problem) -> bool:
    """Whether the normalizer is softmax, with or without sinks, of which the kernels return statistics."""
    rule = Rule.of(problem.normalizer)
    return rule is not None and rule.kind == SOFTMAX


@dataclass(eq=False, repr=False)
class _Prepared:
    """The data shared by calls of the same structure; None if it depends on tensors of the score or mask.

    Attributes
    ----------
    setting : StaticArguments
        The non-differentiable arguments.
    weight : Tensor (H, C), or None
    wants : ForwardRequest
    cover : Cover, or None
        The tiles of a mask that has few pairs.
    """

    setting: StaticArguments | None
    weight: Tensor | None
    wants: ForwardRequest
    cover: Cover | None

    @classmethod
    def of(cls, problem: Problem, request: AuxRequest | None) -> _Prepared:
        wants, score, mask = _wants(problem, request), problem.score, problem.mask
        weight = inverse = None
        if not score.tensors() and type(score).project is Score.project and not isinstance(score, OwnWidth):
            weight = _weight(score, problem.query[:, :, :0].detach().to(problem.compute_dtype))
            inverse = inverse_of(weight) if family_of(score) == "radial" else None
        cover = covers.useful_cover(problem)
        if mask is not None and not mask.is_fixed:
            return cls(None, weight, wants, cover)
        if cover is not None:
            return cls(_setting(problem, wants, cover), weight, wants, cover)
        return cls(replace(_setting(problem, wants, None), inverse=inverse), weight, wants, None)


def _wants(problem: Problem, request: AuxRequest | None) -> ForwardRequest:
    """Return the statistics that a request asks of the kernels."""
    if request is None or not _is_online(problem):
        return ForwardRequest()
    k = min(request.topk, problem.extent.S)
    return ForwardRequest(request.max and not _is_direct(problem), request.entropy, request.received, k)


@dataclass(slots=True, eq=False, repr=False)
class _Projected:
    """The projected rows of a problem in the compute dtype, the weight (H, C) of its score, and its sinks' logits.

    ``own_width`` (B, H, L) is a factor of each query's width.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    weight: Tensor
    sink: Tensor | None = None
    own_width: Tensor | None = None

    @classmethod
    def of(cls, problem: Problem, weight: Tensor | None = None) -> _Projected:
        dtype = problem.compute_dtype
        query, key, value = problem.query, problem.key, problem.value
        if query.dtype != dtype:
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        sink = None
        if isinstance(problem.normalizer, SoftmaxSink):
            sink = problem.normalizer.logits(query).reshape(-1, 1).expand(*query.shape[:2], 1)
        if weight is not None:  # nothing is projected
            return cls(query, key, value, weight, sink)
        score = problem.score.cast(dtype)
        if isinstance(score, OwnWidth):
            query, own_width = query[..., :-1], query[..., -1]
            return cls(query, key, value, _weight(score.score, query), sink, own_width)
        query, key = score.project(query, key)
        if score.per_head:
            key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
        return cls(query, key, value, _weight(score, query), sink)


def _weight(score: Score, query: Tensor) -> Tensor:
    """Return the tensor of a score that the kernels read, per head."""
    H, C = query.shape[1], query.shape[-1]
    if isinstance(score, (scores.Additive, scores.Concat)):
        return score.w_v.expand(H, C)
    if isinstance(score, Distance):
        width = score.width
        return width.expand(H, C) if isinstance(width, Tensor) else query.new_full((H, C), width)
    return query.new_empty(H, 0)


def _prepare_in_place(problem: Problem, request: AuxRequest | None) -> Runner:
    """Return a runner for few queries, whose keys and values are read where they are."""
    fixed = problem.mask is None or problem.mask.is_fixed
    visible = in_place.visible_keys(problem) if fixed else None
    wants, passes = _wants(problem, request)._replace(received=False), Passes()

    def attend(problem: Problem) -> EngineOutput:
        seen = in_place.visible_keys(problem) if visible is None else visible
        found = in_place.forward(problem, seen, wants, passes if visible is not None else {})
        return _output(problem, found) if request is None else _outcome(problem, found)

    run = partial(nonfinite.recomputed, attend=attend)
    if request is None and is_simple(problem):
        rows = in_place.rows_of(problem)
        if visible is not None:
            run.shortcut = PreparedForward.of(problem, rows, visible, passes)  # type: ignore[attr-defined]
        elif isinstance(problem.mask, Dense):
            bias_of = partial(in_place.bias_of, extent=problem.extent, G=problem.key.shape[1])
            run.shortcut = PreparedForward.of(problem, rows, in_place.visible_keys(problem), {}, bias_of)  # type: ignore[attr-defined]
    return run


def _shortcut(problem: Problem, fixed: _Prepared) -> Shortcut | None:
    """Return what runs the kernels of dot products on a call's own tensors; None if there is more to do."""
    if fixed.weight is None or fixed.cover is not None or family_of(problem.score) != "dot" or not is_simple(problem):
        return None
    ends = {"query": problem.query, "key_raw": problem.key}
    rows = Rows("dot", problem.query.shape[-1], ends, _rule(problem).numbers, problem.scale, problem.softcap or 0.0)
    if fixed.setting is not None:
        return PreparedForward.of(problem, rows, fixed.setting.visible, fixed.setting.passes)
    mask, dtype = problem.mask, problem.compute_dtype
    if not isinstance(mask, Dense) or not cost_model.is_small(problem):
        return None
    visible = VisibleKeys(problem.extent, bias=dense.bias_of(mask.values, dtype))
    return PreparedForward.of(problem, rows, visible, {}, dense.bias_of)


def _attend(fixed: _Prepared, wants_aux: bool, dropout: Dropout | None, problem: Problem) -> EngineOutput:
    rows, setting = _Projected.of(problem, fixed.weight), fixed.setting
    if setting is None:
        setting = _setting(problem, fixed.wants, fixed.cover)
    if dropout is not None:
        setting = replace(setting, dropout=dropout)
    if _is_ordered(setting, rows):
        return _outcome(problem, _attend_in_order(setting, rows))
    found = attend_differentiably(
        setting, rows.query, rows.key, rows.value, rows.weight, rows.sink, own_width=rows.own_width
    )
    return _outcome(problem, found) if wants_aux else _output(problem, found)


def _setting(problem: Problem, wants: ForwardRequest, cover: Cover | None) -> StaticArguments:
    family = family_of(problem.score)
    assert family is not None
    kind = kind_of(problem.score)
    if cover is None:
        visible = VisibleKeys.of(problem)
    else:
        assert problem.mask is not None
        visible = covers.visible_keys(cover, problem.mask, problem.extent, problem.compute_dtype)
    options = problem.scale, problem.softcap or 0.0, _rule(problem)
    return StaticArguments(family, kind, *options, visible, wants)


def _is_ordered(setting: StaticArguments, rows: _Projected) -> bool:
    """Whether sorting points along a curve is worth its cost."""
    many = rows.key.shape[2] > ORDERED and rows.query.shape[-1] > 0
    # Dropout is by a point's own place.
    return setting.kind >= COMPACT and setting.visible.in_any_order and many and setting.dropout is None


def _attend_in_order(setting: StaticArguments, rows: _Projected) -> ForwardResult:
    """Run on points sorted along a Z-order curve, so that compact kernels can skip most tiles."""
    width = rows.weight[0].detach()
    q_order, k_order = morton.morton_order(rows.query / width, rows.key / width)
    query, key, value = (
        morton.take(t, o) for t, o in ((rows.query, q_order), (rows.key, k_order), (rows.value, k_order))
    )
    own_width = None if rows.own_width is None else morton.take(rows.own_width, q_order)
    R, S = rows.query.shape[1] // rows.key.shape[1], rows.key.shape[2]
    by_head = k_order.repeat_interleave(R, 1)
    if (visible := setting.visible).own is not None:
        own = morton.take(visible.own, q_order)
        places = torch.take_along_dim(morton.inverse(by_head), own.clamp(0, S - 1), 2)
        own = torch.where((own >= 0) & (own < S), places, -1)
        setting = replace(setting, visible=replace(visible, own=own))
    if (known := setting.precomputed) is not None:
        setting = replace(setting, precomputed=known.by_row(partial(morton.take, order=q_order)))
    found = attend_differentiably(setting, query, key, value, rows.weight, rows.sink, own_width=own_width)
    found = found.by_row(partial(morton.take, order=morton.inverse(q_order)))
    if (keys := found.best_key) is not None:
        named = torch.take_along_dim(by_head, keys.clamp(min=0).flatten(2), 2).view_as(keys)
        found.best_key = torch.where(keys < 0, -1, named)
    if found.received is not None:
        found.received = morton.take(found.received.view(by_head.shape), morton.inverse(by_head)).flatten(0, 1)
    return found


def _traced(problem: Problem) -> EngineOutput:
    """Run a traced call, with the mask as intervals and a bias, or materialized for a strip of queries at a time."""
    rows, extent, dtype = _Projected.of(problem), problem.extent, problem.compute_dtype
    mask = None if problem.mask is None else problem.mask.cast(dtype)
    constants = family_of(problem.score), kind_of(problem.score), problem.scale, problem.softcap or 0.0, *_rule(problem)
    attend = Traced.apply if problem.wants_grad or functorch_derivatives() else fused_forward
    bias, rest = (None, None) if mask is None else split(mask)
    intervals = None if rest is None or rest.has_bias else rest.intervals(extent)
    if mask is None or rest is None or intervals is not None:
        if mask is not None:
            rows = _cleared(rows, _seen(extent, bias, intervals))
        ends = intervals or (None, None)
        output, peak, total = attend(rows.query, rows.key, rows.value, rows.weight, *ends, bias, rows.sink, *constants)
        return _traced_outcome(problem, output, peak, total)
    b, h, q_idx, kv_idx = extent.indices("cpu")
    strips = [span.slice for span in spans(extent.L, TRACED_STRIP)]
    added = [mask.matrix(b, h, q_idx[strip], kv_idx, rows.query.dtype) for strip in strips]
    seen = torch.stack([(matrix > -torch.inf).any(-2) for matrix in added]).any(0)
    rows = _cleared(rows, seen)
    parts = [
        attend(rows.query[:, :, strip], rows.key, rows.value, rows.weight, None, None, matrix, rows.sink, *constants)
        for strip, matrix in zip(strips, added)
    ]
    output, peak, total = (torch.cat(each, 2) for each in zip(*parts))
    return _traced_outcome(problem, output, peak, total)


def _traced_outcome(problem: Problem, output: Tensor, peak: Tensor, total: Tensor) -> EngineOutput:
    lse = ForwardResult(output, peak, total).lse if _is_online(problem) else None
    return EngineOutput(output.to(problem.query.dtype), lse)


def _seen(extent: Extent, bias: Tensor | None, intervals: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return which keys (b, h, S) a query sees, by intervals (b, h, L) and where the bias is not −inf."""
    if bias is None:
        assert intervals is not None
        return reached(*intervals, extent.S)
    visible = (bias.detach() > -torch.inf).expand(-1, -1, extent.L, extent.S)
    if intervals is None:
        return visible.any(-2)
    kv_idx = torch.arange(extent.S, device="cpu")
    start, stop = (edge.expand(-1, -1, extent.L).unsqueeze(-1) for edge in intervals)
    strips = [span.slice for span in spans(extent.L, TRACED_STRIP)]
    inside = [(kv_idx >= start[:, :, strip]) & (kv_idx < stop[:, :, strip]) for strip in strips]
    return torch.stack([(each & visible[:, :, strip]).any(-2) for each, strip in zip(inside, strips)]).any(0)


def _cleared(rows: _Projected, seen: Tensor) -> _Projected:
    """Zero keys and values that no query sees."""
    B, G, S, _ = rows.key.shape
    seen = seen.expand(B, rows.query.shape[1], S).reshape(B, G, -1, S).any(2).unsqueeze(-1)
    return replace(rows, key=torch.where(seen, rows.key, 0.0), value=torch.where(seen, rows.value, 0.0))


def _output(problem: Problem, found: ForwardResult) -> EngineOutput:
    """Return the output of a forward pass alone."""
    dtype = problem.query.dtype
    if found.output.dtype == dtype:
        return EngineOutput(found.output, is_finite=found.is_finite)
    return EngineOutput(found.output.to(dtype))  # which may overflow


def _outcome(problem: Problem, found: ForwardResult) -> EngineOutput:
    """Convert the results of a forward pass to auxiliary outputs."""
    plain = _output(problem, found)
    if not _is_online(problem):
        return plain
    empty, whole = found.total == 0, found.total
    log_whole = torch.where(empty, 1.0, whole).log()
    if found.sink is not None:
        log_whole = torch.logaddexp(log_whole, found.sink - found.peak)
        whole = log_whole.exp()
    entropy = None
    if found.entropy is not None:
        entropy = torch.where(empty, 0.0, (found.total * log_whole - found.entropy) / whole)
    topk = None
    if found.best is not None and found.best_key is not None:
        powers = found.best if found.direct else (found.best - found.peak.unsqueeze(-1)).exp()
        weights = torch.where(found.best_key < 0, 0.0, powers / whole.unsqueeze(-1))
        topk = TopK(weights, found.best_key)
    return replace(
        plain,
        lse=found.lse,
        max=found.top,
        entropy=entropy,
        topk=topk,
        received=None if found.received is None else found.received.view(*problem.query.shape[:2], -1),
    )
