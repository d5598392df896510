"""Care for what is not finite: where a mask hides it, nothing of it may show; what is finite may not overflow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from regard.engines import dense
from regard.engines.base import EngineOutput
from regard.engines.flash import FEW_KEYS
from regard.engines.problem import Problem
from regard.engines.tiles import is_harmless

#: What values are multiplied by where their sums overflow: a power of two, which rounds nothing.
SHRUNK = 2.0**-32

#: Runs a problem on a fast kernel; None where something that is masked might show without a trace.
Attend = Callable[[Problem], EngineOutput | None]


def is_settled(query: Tensor, key: Tensor, output: Tensor) -> bool:
    """Whether what torch's kernel made without a mask is right: nothing overflowed, and no query of NaN was lost."""
    return dense.is_finite(output) and (key.shape[2] >= FEW_KEYS or dense.is_finite(query))


def recomputed(problem: Problem, attend: Attend) -> EngineOutput:
    """Return the outcome of a fast kernel if its output is finite, else what is right.

    What leaks through a masked pair shows as NaN in the output (0·NaN, or inf − inf), and a sum of values that
    overflows as infinity, so looking there is all that a clean call pays.
    """
    outcome = attend(problem)
    if outcome is not None and (dense.is_finite(outcome.output) or _is_finite(outcome.output)):
        return outcome
    if all(map(_is_finite, (problem.query, problem.key, problem.value))):
        return _fitted(problem, attend)
    return contained(problem, attend) if outcome is None or problem.mask is not None else outcome


def contained(problem: Problem, attend: Attend) -> EngineOutput:
    """Run a masked problem some of whose inputs are not finite, or so large that products of them are not."""
    if not _is_finite(problem.query) or is_visible(problem):
        return dense.attend_by_rows(problem)
    problem = zeroed(problem)
    outcome = attend(problem)
    return outcome if outcome is not None and _is_finite(outcome.output) else _fitted(problem, attend)


def fitted(problem: Problem, attend: Callable[[Problem], EngineOutput]) -> EngineOutput:
    """Return an outcome on smaller values where sums of finite values overflow; for engines that contain NaN."""
    state = torch.get_rng_state() if problem.dropout_p else None
    outcome = attend(problem)
    if dense.is_finite(outcome.output) or _is_finite(outcome.output):
        return outcome
    if not all(map(_is_finite, (problem.query, problem.key, problem.value))):
        return outcome
    if state is not None:
        torch.set_rng_state(state)
    smaller = _on_smaller_values(problem, attend)
    return outcome if smaller is None else smaller


def _fitted(problem: Problem, attend: Attend) -> EngineOutput:
    """Run a problem of finite inputs on smaller values, or by its definition where that is no remedy."""
    return _on_smaller_values(problem, attend) or dense.attend_by_rows(problem)


def _on_smaller_values(problem: Problem, attend: Attend) -> EngineOutput | None:
    """Return a finite outcome on values that are made smaller and the output larger, or None."""
    if problem.value.dtype == torch.float16:  # it is accumulated in float32
        return None
    outcome = attend(replace(problem, value=problem.value * SHRUNK))
    if outcome is None or not _is_finite(outcome.output):
        return None
    largest = torch.finfo(problem.value.dtype).max  # the largest value, times weights whose sum is 1 but for rounding
    return replace(outcome, output=(outcome.output / SHRUNK).clamp(-largest, largest))


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())


def zeroed(problem: Problem) -> Problem:
    """Return the problem with zeros in place of everything in keys and values that is not finite, or too large."""
    key, value = (torch.where(is_harmless(t), t, 0.0) for t in (problem.key, problem.value))
    return replace(problem, key=key, value=value)


def is_visible(problem: Problem) -> bool:
    """Whether any query may attend to a key or value that holds something not finite, or too large."""
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
