"""Non-finite values: masked ones must not leak, and sums of finite values must not overflow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from regard.engines import dense
from regard.engines.base import EngineOutput
from regard.engines.problem import Problem
from regard.engines.tiles import is_harmless

#: Factor of values whose sums overflow: a power of two, which causes no rounding.
SHRUNK = 2.0**-32

#: Runs a problem on a fast kernel; None if masked values might leak undetected.
Attend = Callable[[Problem], EngineOutput | None]


def recomputed(problem: Problem, attend: Attend, drop: dense.Drop | None = None) -> EngineOutput:
    """Return the outcome of a fast kernel if its output is finite; otherwise recompute it safely.

    A leak through a masked pair shows as NaN in the output (0·NaN, or inf − inf), and an overflow as infinity, so
    finite calls only pay for checking the output.
    """
    outcome = attend(problem)
    if outcome is not None and _is_settled(outcome):
        return outcome
    if all(map(_is_finite, (problem.query, problem.key, problem.value))):
        return _fitted(problem, attend, drop)
    return contained(problem, attend, drop) if outcome is None or problem.mask is not None else outcome


def contained(problem: Problem, attend: Attend, drop: dense.Drop | None = None) -> EngineOutput:
    """Run a masked problem with inputs that are not finite, or whose products overflow.

    ``drop`` is the dropout of ``attend``, for what is computed by definition.
    """
    if not _is_finite(problem.query) or is_visible(problem):
        return dense.attend_by_rows(problem, drop)
    problem = zeroed(problem)
    outcome = attend(problem)
    return outcome if outcome is not None and _is_finite(outcome.output) else _fitted(problem, attend, drop)


def fitted(problem: Problem, attend: Callable[[Problem], EngineOutput]) -> EngineOutput:
    """Run a problem, again on smaller values if sums of finite values overflow; for engines that contain NaN."""
    state = torch.get_rng_state() if problem.dropout_p else None
    outcome = attend(problem)
    if _is_settled(outcome):
        return outcome
    if not all(map(_is_finite, (problem.query, problem.key, problem.value))):
        return outcome
    if state is not None:
        torch.set_rng_state(state)
    smaller = _on_smaller_values(problem, attend)
    return outcome if smaller is None else smaller


def _fitted(problem: Problem, attend: Attend, drop: dense.Drop | None) -> EngineOutput:
    """Run a problem of finite inputs on smaller values, or by definition if that does not help."""
    return _on_smaller_values(problem, attend) or dense.attend_by_rows(problem, drop)


def _on_smaller_values(problem: Problem, attend: Attend) -> EngineOutput | None:
    """Run with scaled-down values and rescale the output; None if it is still not finite."""
    if problem.value.dtype == torch.float16:  # accumulated in float32
        return None
    outcome = attend(replace(problem, value=problem.value * SHRUNK))
    if outcome is None or not _is_finite(outcome.output):
        return None
    largest = torch.finfo(problem.value.dtype).max  # bounds the output, up to rounding
    return replace(outcome, output=(outcome.output / SHRUNK).clamp(-largest, largest))


def _is_settled(outcome: EngineOutput) -> bool:
    """Whether an output is finite, which its engine may have seen while it wrote it."""
    if outcome.is_finite is not None:
        return outcome.is_finite
    return dense.is_finite(outcome.output) or _is_finite(outcome.output)


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())


def zeroed(problem: Problem) -> Problem:
    """Zero non-finite and overly large elements of keys and values."""
    key, value = (torch.where(is_harmless(t), t, 0.0) for t in (problem.key, problem.value))
    return replace(problem, key=key, value=value)


def is_visible(problem: Problem) -> bool:
    """Whether a query can see a key or value with a non-finite or overly large element."""
    extent, mask = problem.extent, problem.mask
    bad = ~(is_harmless(problem.key).all(-1) & is_harmless(problem.value).all(-1))  # (B, G, S)
    kv_idx = bad.any(0).any(0).nonzero().squeeze(-1)
    if mask is None or not len(kv_idx):
        return bool(len(kv_idx))
    bad = bad[:, :, kv_idx].repeat_interleave(extent.H // bad.shape[1], 1).unsqueeze(-2)
    device = problem.query.device
    b, h = torch.arange(extent.B, device=device).view(-1, 1, 1, 1), torch.arange(extent.H, device=device).view(-1, 1, 1)
    step = max((1 << 22) // max(extent.B * extent.H * len(kv_idx), 1), 1)
    for rows in torch.arange(extent.L, device=device).split(step):
        visible = mask.visible(b, h, rows.unsqueeze(1), kv_idx)
        if visible is None or bool((visible & bad).any()):
            return True
    return False
