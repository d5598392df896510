"""The plan of a call: the engine and its prepared runner, computed once for all calls of the same structure."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from regard import engines
from regard._utils.errors import described, rejected, unknown_name
from regard._utils.torch_private import functorch_derivatives, in_forward_mode, in_functorch
from regard._utils.tracing import autocast_cast, autocast_is_active, is_traced, values_unavailable
from regard.engines import Engine, cost_model, dense
from regard.engines.aux import FIELDS, AuxRequest
from regard.engines.base import EngineOutput, KernelError, Runner, Shortcut
from regard.engines.local_linear import LocalLinear
from regard.engines.problem import (
    DTYPES,
    Call,
    Problem,
    as_normalizer,
    as_score,
    bound_mask,
    canonical,
    check_request,
    is_narrow_step,
)
from regard.masks import Dense
from regard.masks.base import Extent, Mask
from regard.normalizers import Normalizer, Softmax
from regard.scores import ScaledDot, Score

#: The engine that is torch's own attention, and the one with kernels of our own for CPUs.
SDPA, FUSED = "sdpa", "fused"
#: Maximum number of cached plans.
MAX_PLANS = 256
_TENSORS = frozenset((Tensor, Parameter))


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything about a call that depends only on its structure: types, settings and shapes, not tensor values.

    Attributes
    ----------
    engine : Engine
        The chosen engine.
    run : callable
        The engine's prepared runner for problems of this structure.
    shortcut : callable or None
        What runs a call's own tensors without a problem; None if there is a request, or something else to do.
    aux_engine : Engine or None
        An engine that computes the requested auxiliary outputs if ``engine`` does not.
    score, mask, normalizer : Score, Mask and Normalizer, or None
        The fixed parts; the mask is bound. None if each call provides its own.
    masked : bool
        Whether the call has a mask.
    scale, softcap, dropout_p, extent, lead, headless, order : see :class:`Problem`
    as_given : bool
        Whether query, key and value already have the shapes that engines expect.
    autocast : bool
        Whether autocast is on, in which case query, key and value are cast first.
    """

    engine: Engine
    run: Runner
    shortcut: Shortcut | None
    aux_engine: Engine | None
    score: Score | None
    mask: Mask | None
    normalizer: Normalizer | None
    masked: bool
    scale: float
    softcap: float | None
    dropout_p: float
    extent: Extent
    lead: tuple[int, ...]
    headless: bool
    order: LocalLinear | None
    as_given: bool
    autocast: bool

    @classmethod
    def of(cls, problem: Problem, call: Call) -> Plan:
        """Plan a problem built from this call."""
        chosen, request = choose_engine(problem, call.engine), call.return_aux
        run = chosen.prepare(problem, request)
        if chosen.can_fail and resolve_engine(call.engine) is None:
            run = _or_another(run, request)
        as_given = [t.shape for t in call[:3]] == [t.shape for t in (problem.query, problem.key, problem.value)]
        autocast = autocast_is_active(problem.query.device.type)
        own = type(problem.mask) is not Dense or (type(call.attn_mask) in _TENSORS and len(problem.lead) == 1)
        direct = request is None and as_given and own and not autocast
        return cls(
            chosen, run, getattr(run, "shortcut", None) if direct else None,
            None if request is None else _aux_engine(problem, request),
            _if_fixed(problem.score), _if_fixed(problem.mask), _if_fixed(problem.normalizer),
            problem.mask is not None, problem.scale, problem.softcap, problem.dropout_p, problem.extent, problem.lead,
            problem.headless, problem.order, as_given, autocast,
        )  # fmt: skip

    def problem(self, call: Call) -> Problem:
        """Build the problem of a call with this structure, without repeating the checks that depend on structure."""
        query, key, value, attn_mask, is_causal = call.query, call.key, call.value, call.attn_mask, call.is_causal
        if self.autocast:
            query, key, value = autocast_cast(query, key, value)
        if not self.as_given:
            _, query, key, value, _ = canonical(query, key, value, call.enable_gqa)
        mask = self.mask
        if not self.masked:
            mask = None
        elif mask is None and not is_causal and type(attn_mask) in _TENSORS and len(self.lead) == 1:
            mask = Dense(attn_mask, ("attention", "attn_mask"))  # its shape was checked when the plan was made
        elif mask is None:
            mask = bound_mask(attn_mask, is_causal, query, key, self.extent, self.lead)
        return Problem(
            query,
            key,
            value,
            self.score or as_score(call.score, query, key),
            mask,
            self.normalizer or as_normalizer(call.normalizer),
            self.scale,
            self.softcap,
            self.dropout_p,
            self.extent,
            self.lead,
            self.headless,
            self.order,
        )


def _or_another(run: Runner, request: AuxRequest | None) -> Runner:
    """Return a runner of ``auto`` that chooses again if a kernel cannot be compiled: its engine then refuses."""

    def run_or_another(problem: Problem) -> EngineOutput:
        try:
            return run(problem)
        except KernelError:
            clear_plans()
            return _or_another(choose_engine(problem, "auto").prepare(problem, request), request)(problem)

    return run_or_another


def _if_fixed(part: Any) -> Any:
    return part if part is not None and part.is_fixed else None


# The plan cache


# No locks: a fork could inherit one that is held. Each dictionary operation is atomic.
_plans: dict[Hashable, Plan] = {}


def cached_plan(key: Hashable | None) -> Plan | None:
    """Return the cached plan of a structure."""
    return None if key is None else _plans.get(key)


def cache_plan(key: Hashable | None, plan: Plan, problem: Problem) -> None:
    """Cache a plan, unless the choice of engine depended on the values of a mask."""
    if key is None or (plan.mask is None and problem.mask is not None and cost_model.reads_mask_values(problem)):
        return
    if torch.is_inference_mode_enabled() and torch.is_grad_enabled():
        return  # autograd would refuse the tensors that the plan holds, in later calls too
    _plans[key] = plan
    while len(_plans) > MAX_PLANS:
        with suppress(RuntimeError, StopIteration):  # another thread evicted it first
            _plans.pop(next(iter(_plans)), None)


def clear_plans() -> None:
    """Clear the plan cache, for example after an engine was registered."""
    _plans.clear()


engines.on_change(clear_plans)


def plan_call(call: Call, structure: Hashable | None) -> tuple[Plan, Problem]:
    """Return the plan of a call, cached or new, and the call as a problem.

    ``structure`` is that of the call; None outside eager calls, in compilers, tracers and transforms.
    """
    plan = cached_plan(structure)
    if plan is not None:
        return plan, plan.problem(call)
    check_request(call.return_aux)
    problem = Problem.of(call)
    if structure is not None:  # the cache must not see later changes of the caller's objects
        problem = problem.snapshot()
    plan = Plan.of(problem, call)
    cache_plan(structure, plan, problem)
    return plan, problem


def with_graph(
    problem: Problem, first: Engine, output: Tensor, lse: Tensor, runner: Runner | None = None
) -> Tensor | None:
    """Attach a precomputed output to the autograd graph, using the first engine with a partial backward pass.

    The result has the dtype in which engines compute.
    """
    dtype = problem.compute_dtype
    query, key, value, output = (t.to(dtype) for t in (problem.query, problem.key, problem.value, output))
    problem = replace(problem, query=query, key=key, value=value)
    able = (first,) if first.why_not(problem) is None else ()
    for engine in chain(able, automatic_engines(problem)):
        made = engine.partial_backward(problem, output, lse, runner if engine is first else None)
        if made is not None:
            return made
    return None


def differentiable_lse(problem: Problem, lse: Tensor) -> Tensor:
    """Attach a precomputed log-sum-exp (B, H, L) to the autograd graph.

    Its gradient is that of an attention to values of 1 whose output is set to 0: δ then vanishes from
    ``d score = weight · (d output · value − δ)``, which leaves ``weight · d lse``.
    """
    if 0 in problem.extent:
        return dense.attached(lse.detach(), problem)
    ones = problem.value.new_ones((), dtype=lse.dtype).expand(*problem.value.shape[:-1], 1).contiguous()
    counted = replace(problem, value=ones, normalizer=Softmax(), dropout_p=0.0, order=None)
    zero = with_graph(counted, engines.TABLE[SDPA], ones.new_zeros(*lse.shape, 1), lse.detach())
    assert zero is not None  # engine streaming supports every score and mask
    return lse.detach() + zero.squeeze(-1)


# The choice of an engine


def resolve_engine(engine: object) -> Engine | None:
    """Return the engine for a name or an Engine; None for ``"auto"``."""
    if isinstance(engine, Engine):
        return engine
    if not isinstance(engine, str):
        raise rejected("attention", "engine", "be a name or an Engine", described(engine), TypeError)
    if engine == "auto":
        return None
    if engine not in engines.TABLE:
        raise unknown_name("attention", "engine", engine, ["auto", *engines.TABLE])
    return engines.TABLE[engine]


def choose_engine(problem: Problem, engine: object) -> Engine:
    """Return the engine for the problem; raise if a named engine does not support it."""
    named = resolve_engine(engine)
    if named is not None:
        refusal = named.why_not(problem)
        if refusal is not None:
            raise rejected("attention", "engine", "be able to run this call", f"{named.name!r}: {refusal}")
        return named
    flat = engine_candidates(problem)
    if len(flat) < 2:
        return flat[0]
    if cost_model.is_tiny(problem):
        prepared = cost_model.is_prepared(problem) and not is_traced(problem.query)
        names = (FUSED, SDPA) if prepared else (SDPA,)
        if (lean := next((engines.TABLE[name] for name in names if engines.TABLE[name] in flat), None)) is not None:
            return lean
    if engines.TABLE[SDPA] in flat and is_left_to_torch(problem):
        return engines.TABLE[SDPA]
    times = estimated_seconds(flat, problem)
    return engines.TABLE[min(times, key=times.__getitem__)] if times else flat[0]  # in order of preference


def automatic_engines(problem: Problem) -> Iterator[Engine]:
    """Yield the engines that can run a problem, and do so without being named, in order of preference."""
    for each in engines.TABLE.values():
        if each.why_not(problem) is None and each.not_automatic(problem) is None:
            yield each


def engine_candidates(problem: Problem) -> list[Engine]:
    """Return the engines that ``auto`` chooses from, in order of preference if there are no time estimates."""
    able = list(automatic_engines(problem))
    # Compilers cannot trace operator derivatives under ``torch.func``, and some operators have only a first one.
    if functorch_derivatives() > (0 if torch.compiler.is_compiling() else 1):
        able = [candidate for candidate in able if candidate.twice_differentiable]
    return [candidate for candidate in able if not candidate.grows(problem)] or able  # reference supports everything


def is_left_to_torch(problem: Problem) -> bool:
    """Whether torch's own function runs a call, whatever the estimates are, as it computes the same thing.

    Not on CPUs where torch multiplies slowly; for 16-bit gradients on a CPU, which engine "sdpa" computes in float32;
    and for steps of decoding in 16 bits.
    """
    if is_narrow_step(problem.query, problem.key):
        return False
    if not is_traced(problem.query) and cost_model.multiplies_slowly(problem.query):
        return False
    if problem.wants_grad and problem.query.device.type == "cpu" and problem.query.dtype in cost_model.NARROW:
        return False
    plain = problem.mask is None and problem.softcap is None and not problem.dropout_p
    parts = type(problem.score) is ScaledDot and problem.is_softmax
    return plain and parts and problem.query.shape[1] == problem.key.shape[1]


def is_torch_call(call: Call, eager: bool) -> bool:
    """Whether torch's function takes the arguments of a call as they are and gives the same result.

    That is asked of calls that are traced, and of eager ones on other devices than CPUs.
    """
    query, key, value, scale = call.query, call.key, call.value, call.scale
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        return False
    if call.score is not None or call.attn_mask is not None or call.is_causal is not False or call.softcap is not None:
        return False
    if call.return_aux is not None or call.engine != "auto" or (eager and call.enable_gqa):
        return False
    if type(call.order) is not int or call.order != 0:
        return False
    if type(call.dropout_p) not in (float, int) or call.dropout_p != 0:
        return False
    if type(call.normalizer) is not str or call.normalizer != "softmax":
        return False
    if query.dtype not in DTYPES or query.is_nested or query.layout is not torch.strided:
        return False
    shape, q_shape = key.shape, query.shape
    return (
        len(shape) == len(q_shape) == 4
        and shape == value.shape
        and (q_shape == shape or (q_shape[3] == shape[3] and q_shape[:2] == shape[:2] and q_shape[2] > 0))
        and query.dtype == key.dtype == value.dtype
        and query.device == key.device == value.device
        and query.stride(3) == key.stride(3) == value.stride(3) == 1
        and 0 not in shape
        and shape[2] > 1
        and (scale is None or (type(scale) is float and -torch.inf < scale < torch.inf))
        and (eager or not (in_forward_mode() or in_functorch()))
        and not is_narrow_step(query, key)
        and not (torch.is_grad_enabled() and _has_narrow_gradients(query, key, value))
    )


def _has_narrow_gradients(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a backward pass may follow in 16 bits on a CPU: engine "sdpa" computes in float32, which is faster."""
    if query.itemsize == 8 or not query.is_cpu:
        return False
    if query.itemsize == 4 and not torch.is_autocast_enabled("cpu"):
        return False
    return query.requires_grad or key.requires_grad or value.requires_grad


def estimated_seconds(among: list[Engine], problem: Problem) -> dict[str, float]:
    """Return estimated times in seconds, for the engines that have an estimate."""
    if values_unavailable(problem.query):
        return {}
    return cost_model.seconds([candidate.name for candidate in among], problem)


def _aux_engine(problem: Problem, request: AuxRequest) -> Engine | None:
    """Return an engine that computes all requested fields; None if there is none or the call is traced."""
    requested = {name for name in FIELDS if getattr(request, name)}
    if is_traced(problem.query):
        return None
    return next((each for each in automatic_engines(problem) if requested <= each.fields(problem)), None)
