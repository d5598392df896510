"""The plan of a call: which engine runs it and what that prepares, computed once for all calls of one structure."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from regard import _autocast, _problem, engines
from regard._aux import FIELDS, AuxRequest
from regard._errors import described, rejected, unknown_name
from regard._part import PLAIN, Part
from regard._problem import Problem
from regard._torch import is_autocast_enabled, is_eager
from regard._tracing import is_blind, is_traced
from regard.engines import Cost, Engine, cost_model
from regard.engines.base import Runner
from regard.masks import Dense
from regard.masks.base import Extent, Mask
from regard.normalizers import Normalizer, Softmax
from regard.normalizers.base import TABLE as NORMALIZERS
from regard.scores import ScaledDot, Score
from regard.scores.base import TABLE as SCORES

#: The engine that is torch's own attention.
TORCHS = "sdpa"
#: How many plans are kept.
KEPT = 256
#: The types of which an argument that is a number, or nothing, may be for its value to be the key of a plan.
_NUMBERS = frozenset((int, float, type(None)))
_TENSORS = frozenset((Tensor, Parameter))
_NO_NAMES: dict[Any, Any] = {}


@dataclass(frozen=True)
class Plan:
    """All of a call that depends on structure alone: types, settings and shapes, but no tensor's contents.

    Attributes
    ----------
    engine : Engine
        The engine that runs.
    run : callable
        Executes a problem of this structure, by what the engine prepared.
    observer : Engine or None
        An engine that can tell what is asked beside the output where the first one did not.
    score, mask, normalizer : the parts, where they hold no tensors; a mask is bound. None where a call brings its own.
    scale, softcap, dropout_p, extent, lead, headless : as in :class:`Problem`
    as_given : bool
        Whether query, key and value have the shapes that engines read.
    autocast : bool
        Whether it is on, so that they are cast first.
    """

    engine: Engine
    run: Runner
    observer: Engine | None
    score: Score | None
    mask: Mask | None
    normalizer: Normalizer | None
    scale: float
    softcap: float | None
    dropout_p: float
    extent: Extent
    lead: tuple[int, ...]
    headless: bool
    as_given: bool
    autocast: bool

    @classmethod
    def of(cls, problem: Problem, engine: object, request: AuxRequest | None, *given: Tensor) -> Plan:
        """Plan a problem, made from this query, key and value."""
        chosen = choose(problem, engine)
        return cls(
            chosen, chosen.prepare(problem, request), None if request is None else _observer(problem, request),
            _without_tensors(problem.score), _without_tensors(problem.mask), _without_tensors(problem.normalizer),
            problem.scale, problem.softcap, problem.dropout_p, problem.extent, problem.lead, problem.headless,
            [t.shape for t in given] == [t.shape for t in (problem.query, problem.key, problem.value)],
            _autocast.is_active(problem.query.device.type),
        )  # fmt: skip

    def problem(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any,
        is_causal: bool,
        enable_gqa: bool,
        score: Any,
        normalizer: Any,
    ) -> Problem:
        """Return the problem that a call of the planned structure states; nothing is checked that structure decides."""
        if self.autocast:
            query, key, value = _autocast.cast(query, key, value)
        if not self.as_given:
            _, query, key, value, _ = _problem.canonical(query, key, value, enable_gqa)
        mask = self.mask
        if mask is None and not is_causal and type(attn_mask) in _TENSORS and len(self.lead) == 1:
            mask = Dense(attn_mask, ("attention", "attn_mask"))  # whose sizes are those of the structure
        elif mask is None and (attn_mask is not None or is_causal):
            mask = _problem.bound_mask(attn_mask, is_causal, query, key, self.extent, self.lead)
        return Problem(
            query,
            key,
            value,
            self.score or _problem.as_score(score, query, key),
            mask,
            self.normalizer or _problem.as_normalizer(normalizer),
            self.scale,
            self.softcap,
            self.dropout_p,
            self.extent,
            self.lead,
            self.headless,
        )


def _without_tensors(part: Any) -> Any:
    return None if part is None or part.tensors() else part


# The plans that are kept


# Free of locks, which a fork could leave held: each step on the dictionary is atomic by itself.
_plans: dict[Hashable, Plan] = {}


def structure(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    score: Any,
    normalizer: Any,
    softcap: float | None,
    engine: Any,
    request: AuxRequest | None,
) -> Hashable | None:
    """Return the structure of a call as a key, or None: it is to be planned for itself, or an argument is wrong."""
    if not is_eager():
        return None
    ends = []
    for tensor in (query, key, value):
        if type(tensor) not in _TENSORS or tensor.layout is not torch.strided or tensor.is_nested:
            return None
        ends.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad))
    for number in (dropout_p, scale, softcap):
        if type(number) not in _NUMBERS:
            return None
    if type(is_causal) is not bool or type(enable_gqa) is not bool:
        return None
    parts: list[Any] = []
    for part, table in ((attn_mask, _NO_NAMES), (score, SCORES), (normalizer, NORMALIZERS)):
        if type(part) in PLAIN:  # a name stands for what is registered under it now
            parts.append(table.get(part, part))
            continue
        if type(part) in _TENSORS:
            found: Any = _tensor_structure(part)
        else:
            found = part.structure() if isinstance(part, Part) else None
        if found is None:
            return None
        parts.append(found)
    if not isinstance(engine, (str, Engine)) or not (request is None or type(request) is AuxRequest):
        return None
    autocast = None
    if is_autocast_enabled() and _autocast.is_active(query.device.type):
        autocast = torch.get_autocast_dtype(query.device.type)
    return (
        *ends, *parts, dropout_p, is_causal, scale, enable_gqa, softcap, engine, request,
        torch.is_grad_enabled(), autocast, torch.get_num_threads(),
    )  # fmt: skip


def _tensor_structure(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad, tensor.layout, tensor.is_nested


def known(key: Hashable | None) -> Plan | None:
    """Return the plan that is kept for a structure."""
    return None if key is None else _plans.get(key)


def keep(key: Hashable | None, plan: Plan, problem: Problem) -> None:
    """Keep a plan for later calls of the structure, unless it was chosen by the contents of a mask."""
    if key is None or (plan.mask is None and problem.mask is not None and cost_model.looks_at_mask(problem)):
        return
    _plans[key] = plan
    while len(_plans) > KEPT:
        with suppress(RuntimeError, StopIteration):  # another thread was there first
            _plans.pop(next(iter(_plans)), None)


def forget() -> None:
    """Drop all plans: what they were made by has changed."""
    _plans.clear()


engines.on_change(forget)


# The choice of an engine, and its reasons


@dataclass(frozen=True)
class Explanation:
    """The engine that a call would run on, and the reasons; it prints.

    Attributes
    ----------
    engine : Engine
        The engine that runs.
    cost : Cost
        Its estimated operations, bytes read and workspace.
    others : dict of str to str
        For every other engine, why it cannot or would not run this call.
    call : str
        The call in short.
    """

    engine: Engine
    cost: Cost
    others: dict[str, str]
    call: str

    def __str__(self) -> str:
        cost = self.cost
        lines = [
            self.call,
            f"  engine     {self.engine.name}",
            f"  operations {_amount(cost.flops, 1000, ('', 'k', 'M', 'G', 'T', 'P'))}FLOP forward",
            f"  reads      {_amount(cost.bytes_read, 1024, ('', 'Ki', 'Mi', 'Gi', 'Ti'))}B",
            f"  workspace  {_amount(cost.workspace, 1024, ('', 'Ki', 'Mi', 'Gi', 'Ti'))}B, "
            + ("grows with L×S" if cost.grows else "does not grow with L×S"),
        ]
        lines += [f"  not {name}: {reason}" for name, reason in self.others.items()]
        return "\n".join(lines)

    __repr__ = __str__  # what a notebook shows


def _amount(value: float, step: int, units: tuple[str, ...]) -> str:
    for unit in units:
        if value < step or unit == units[-1]:
            return f"{value:.3g} {unit}"
        value /= step
    raise AssertionError


def resolve(engine: object) -> Engine | None:
    """Return the engine a name or an Engine stands for; None for ``"auto"``."""
    if isinstance(engine, Engine):
        return engine
    if not isinstance(engine, str):
        raise rejected("attention", "engine", "be a name or an Engine", described(engine), TypeError)
    if engine == "auto":
        return None
    if engine not in engines.TABLE:
        raise unknown_name("attention", "engine", engine, ["auto", *engines.TABLE])
    return engines.TABLE[engine]


def choose(problem: Problem, engine: object) -> Engine:
    """Return the engine that runs the problem; a named one that cannot run it raises."""
    named = resolve(engine)
    if named is not None:
        refusal = named.refusal(problem)
        if refusal is not None:
            raise rejected("attention", "engine", "be able to run this call", f"{named.name!r}: {refusal}")
        return named
    able = [candidate for candidate in engines.TABLE.values() if candidate.refusal(problem) is None]
    flat = [candidate for candidate in able if not candidate.grows(problem)]
    if len(flat) < 2:
        return (flat or able)[0]  # the reference engine runs everything
    if engines.TABLE[TORCHS] in flat and _is_torchs(problem):
        return engines.TABLE[TORCHS]
    times = _seconds(flat, problem)
    return engines.TABLE[min(times, key=times.__getitem__)] if times else flat[0]  # their order, where nothing is known


def _is_torchs(problem: Problem) -> bool:
    """Whether torch's function means the same; such a call is torch's to the bit, and so it is where more is asked."""
    plain = problem.mask is None and problem.softcap is None and not problem.dropout_p
    parts = type(problem.score) is ScaledDot and type(problem.normalizer) is Softmax
    return plain and parts and problem.query.shape[1] == problem.key.shape[1]


def _seconds(candidates: list[Engine], problem: Problem) -> dict[str, float]:
    """Return how long each engine should take, of those of which it is known."""
    if problem.query.device.type != "cpu" or is_blind(problem.query):
        return {}
    return cost_model.seconds([candidate.name for candidate in candidates], problem)


def _observer(problem: Problem, request: AuxRequest) -> Engine | None:
    """Return an engine that tells all that is asked for; None where none does, or calls are traced."""
    asked = {name for name in FIELDS if getattr(request, name)}
    if is_traced(problem.query):
        return None
    able = (engine for engine in engines.TABLE.values() if asked <= engine.fields(problem))
    return next((engine for engine in able if engine.refusal(problem) is None), None)


def explained(problem: Problem, engine: object) -> Explanation:
    """Return the choice with its reasons."""
    chosen = choose(problem, engine)
    others: dict[str, str] = {}
    order = list(engines.TABLE.values())
    for other in order:
        if other.name == chosen.name:
            continue
        refusal = other.refusal(problem)
        if refusal is not None:
            others[other.name] = f"cannot: {refusal}"
        elif resolve(engine) is not None:
            others[other.name] = f"would run, but {chosen.name!r} was asked for"
        elif other.grows(problem) and not chosen.grows(problem):
            others[other.name] = "would not: its workspace grows with L×S"
        elif chosen.name == TORCHS and _is_torchs(problem):
            others[other.name] = "would not: the plainest call is torch's own"
        else:
            times = _seconds([chosen, other], problem)
            if len(times) == 2 and times[chosen.name]:  # an empty call takes no time
                others[other.name] = f"would not: {times[other.name] / times[chosen.name]:.2g}× the time"
            else:
                others[other.name] = f"would not: {chosen.name} comes first here"
    return Explanation(chosen, chosen.cost(problem), others, _describe(problem))


def _describe(problem: Problem) -> str:
    e = problem.extent
    parts = [f"score {problem.score!r}", f"normalizer {problem.normalizer!r}"]
    if problem.mask is not None:
        parts.append(f"mask {problem.mask!r}")
    if problem.softcap is not None:
        parts.append(f"softcap {problem.softcap:g}")
    if problem.dropout_p:
        parts.append(f"dropout {problem.dropout_p:g}")
    heads = f"H {e.H}" if problem.key.shape[1] == e.H else f"H {e.H} over {problem.key.shape[1]} key heads"
    widths = f"E {problem.query.shape[-1]}, V {problem.value.shape[-1]}"
    return f"attention of B {e.B}, {heads}, L {e.L}, S {e.S}, {widths}, {problem.query.dtype}: {', '.join(parts)}"
