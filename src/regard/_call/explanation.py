"""The result of :func:`regard.explain`: the chosen engine, the reasons and the estimated cost."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from regard import engines
from regard._call.operator import why_not_operator
from regard._call.plan import (
    SDPA,
    choose_engine,
    engine_candidates,
    estimated_seconds,
    is_left_to_torch,
    is_torch_call,
    resolve_engine,
)
from regard._utils.tracing import values_unavailable
from regard.engines import Cost, Engine, cost_model
from regard.engines.problem import Call, Problem
from regard.masks import Mask

#: Number of pairs sampled to estimate the fraction that a mask leaves visible.
SAMPLED_PAIRS = 1 << 22


@dataclass(frozen=True)
class Explanation:
    """The engine that a call would run on, and why. Print it for a summary.

    Attributes
    ----------
    engine : Engine
        The chosen engine.
    seconds : float or None
        Estimated time in seconds: forward, plus backward if gradients are needed. None if there is no estimate: on
        devices other than CPUs and CUDA devices, and with normalizers other than softmax, with or without a sink,
        sigmoid and entmax.
    visible : float or None
        The fraction of (query, key) pairs that the mask leaves visible, estimated from a sample of rows if there are
        many. None if tensor values are unavailable, as under ``torch.compile``.
    cost : Cost
        Estimated operations, bytes read and workspace.
    others : dict of str to str
        Why each of the other engines was not chosen.
    compiled : str
        What runs instead under ``torch.compile``, and why; empty if the same engine runs.
    call : str
        A summary of the call.
    basis : str
        What the estimated times are made from, unless they were measured: those of CUDA devices without a file of
        their own are estimates from published numbers.
    left_out : str
        What the estimated times do not include; empty if nothing.
    """

    engine: Engine
    seconds: float | None
    visible: float | None
    cost: Cost
    others: dict[str, str]
    compiled: str
    call: str
    basis: str = ""
    left_out: str = ""

    def __str__(self) -> str:
        cost = self.cost
        time = "" if self.seconds is None else f", estimated {_time(self.seconds)}"
        time += f" ({self.basis})" if time and self.basis else ""
        lines = [
            self.call,
            f"  engine      {self.engine.name}{time}",
            f"  compiled    {self.compiled or 'the same engine'}",
            "  visible     " + ("unknown" if self.visible is None else f"{100 * self.visible:.3g} % of the pairs"),
            f"  operations  {_amount(cost.flops, 1000, ('', 'k', 'M', 'G', 'T', 'P'))}FLOP forward",
            f"  reads       {_amount(cost.bytes_read, 1024, ('', 'Ki', 'Mi', 'Gi', 'Ti'))}B",
            f"  workspace   {_amount(cost.workspace, 1024, ('', 'Ki', 'Mi', 'Gi', 'Ti'))}B, "
            + ("grows with L×S" if cost.grows else "does not grow with L×S"),
        ]
        if self.left_out:
            lines.insert(2, f"  left out    {self.left_out}")
        lines += [f"  {name}: {reason}" for name, reason in self.others.items()]
        return "\n".join(lines)

    __repr__ = __str__  # for notebooks


def _amount(value: float, step: int, units: tuple[str, ...]) -> str:
    for unit in units:
        if value < step or unit == units[-1]:
            return f"{value:.3g} {unit}"
        value /= step
    raise AssertionError


def _time(seconds: float) -> str:
    """Format a time in milliseconds."""
    return f"{1e3 * seconds:.2g} ms" if seconds < 0.1 else f"{1e3 * seconds:,.0f} ms"


def build_explanation(problem: Problem, mask: Mask | None, call: Call) -> Explanation:
    """Return the chosen engine and the reasons; ``mask`` is the problem's mask before it was bound to a size."""
    engine = call.engine
    chosen = choose_engine(problem, engine)
    named = resolve_engine(engine) is not None
    able = [each for each in engines.TABLE.values() if each.why_not(problem) is None]
    times = estimated_seconds(able, problem)
    others = {
        other.name: _reason(problem, other, chosen, named, times)
        for other in engines.TABLE.values()
        if other.name != chosen.name
    }
    return Explanation(
        chosen,
        times.get(chosen.name),
        _visible(problem),
        chosen.cost(problem),
        others,
        _compiled(problem, mask, call, chosen),
        _describe(problem),
        cost_model.basis(problem.query.device) if times else "",
        _left_out(problem) if times else "",
    )


def _reason(problem: Problem, other: Engine, chosen: Engine, named: bool, times: dict[str, float]) -> str:
    """Return why an engine was not chosen."""
    refusal = other.why_not(problem)
    if refusal is not None:
        return f"unsupported, {refusal}"
    if named:
        return f"not chosen, engine={chosen.name!r} was given"
    if (reserve := other.not_automatic(problem)) is not None:
        return f"not chosen, {reserve}"
    if other.grows(problem) and not chosen.grows(problem):
        return "not chosen, its workspace grows with L×S"
    if chosen.name == SDPA and is_left_to_torch(problem):
        return "not chosen, torch's own kernel runs this call"
    if other.name in times and times.get(chosen.name):  # an empty call takes no time
        ratio = times[other.name] / times[chosen.name]
        return f"not chosen, estimated {ratio:.2g}× slower ({_time(times[other.name])})"
    return f"not chosen, {chosen.name} is preferred where there are no time estimates"


def _visible(problem: Problem) -> float | None:
    """Return the fraction of pairs that a mask leaves visible, from evenly spaced rows if there are many."""
    mask, extent = problem.mask, problem.extent
    if mask is None or not mask.hides or 0 in extent:
        return 1.0
    if values_unavailable(problem.query):
        return None
    device = problem.query.device
    count = min(max(SAMPLED_PAIRS // (extent.B * extent.H * extent.S), 1), extent.L)
    q_idx = torch.linspace(0, extent.L - 1, count, device=device).round().long().unsqueeze(1)
    b, h = (torch.arange(n, device=device) for n in (extent.B, extent.H))
    found = mask.visible(b.view(-1, 1, 1, 1), h.view(-1, 1, 1), q_idx, torch.arange(extent.S, device=device))
    return (
        1.0
        if found is None
        else float(found.expand(torch.broadcast_shapes(found.shape, (count, extent.S))).double().mean())
    )


def _compiled(problem: Problem, mask: Mask | None, call: Call, chosen: Engine) -> str:
    """Describe what runs under ``torch.compile``, and why; empty if the same engine runs."""
    if chosen.name != SDPA and is_torch_call(call, eager=False):
        return f"{SDPA}, torch's own function, as compilers know it"
    engine = call.engine
    obstacle = why_not_operator(problem, mask, engine)
    able = [each for each in engine_candidates(problem) if each.drops_when_traced or not problem.dropout_p]
    traced = chosen if resolve_engine(engine) is not None else able[0]
    if problem.dropout_p and not traced.drops_when_traced:
        return f"an error, as {traced.name} has no dropout in traced calls"
    if obstacle is None or traced is chosen or problem.query.device.type != "cpu":
        return ""
    return f"{traced.name}, traced into torch operations because {obstacle}"


def _left_out(problem: Problem) -> str:
    """Return what the estimated times do not include."""
    calls = problem.mask is not None and problem.mask.calls_a_function()
    return "the estimated times do not include the evaluation of the mask's function, in every call" if calls else ""


def _describe(problem: Problem) -> str:
    e = problem.extent
    parts = [f"score {problem.score!r}", f"normalizer {problem.normalizer!r}"]
    if problem.mask is not None:
        parts.append(f"mask {problem.mask!r}")
    if problem.softcap is not None:
        parts.append(f"softcap {problem.softcap:g}")
    if problem.order is not None:
        parts.append(f"order {problem.order!r}")
    if problem.dropout_p:
        parts.append(f"dropout {problem.dropout_p:g}")
    heads = f"H {e.H}" if problem.key.shape[1] == e.H else f"H {e.H} over {problem.key.shape[1]} key heads"
    widths = f"E {problem.query.shape[-1]}, V {problem.value.shape[-1]}"
    return f"attention of B {e.B}, {heads}, L {e.L}, S {e.S}, {widths}, {problem.query.dtype}: {', '.join(parts)}"
