"""Which engine runs a call, and why: the choice behind ``engine="auto"``, and ``explain``."""

from __future__ import annotations

from dataclasses import dataclass

from regard import engines
from regard._aux import FIELDS, AuxRequest
from regard._errors import described, rejected, unknown_name
from regard._problem import Problem
from regard._tracing import is_blind, is_traced
from regard.engines import Cost, Engine, costs
from regard.normalizers import Softmax
from regard.scores import ScaledDot

#: The engine that is torch's own attention.
TORCHS = "sdpa"


@dataclass(frozen=True)
class Plan:
    """What a call would do; it prints.

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
    return costs.seconds([candidate.name for candidate in candidates], problem)


def observer(problem: Problem, request: AuxRequest) -> Engine | None:
    """Return an engine that tells all that is asked for; None where none does, or calls are traced."""
    asked = {name for name in FIELDS if getattr(request, name)}
    if is_traced(problem.query):
        return None
    able = (engine for engine in engines.TABLE.values() if asked <= engine.fields(problem))
    return next((engine for engine in able if engine.refusal(problem) is None), None)


def plan(problem: Problem, engine: object) -> Plan:
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
    return Plan(chosen, chosen.cost(problem), others, _describe(problem))


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
