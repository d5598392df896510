"""Attention over keys in pages, which the kernels of decoding read where they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard._utils.operators import define
from regard.engines.problem import Problem
from regard.engines.triton.decoding import MOST_QUERIES, Pages, run_step
from regard.engines.triton.families import DOT, RULES, SOFTMAX, Rows, family_of
from regard.engines.triton.launch import Setting, is_interpreted
from regard.engines.triton.operators import KEYS
from regard.engines.triton.visible import VisibleKeys
from regard.scores import Score


def reads_pages(problem: Problem) -> bool:
    """Whether the kernels run a problem that engine ``triton`` supports without a copy of its keys and values.

    They need few queries, softmax of dot products of the keys themselves, and no gradients.
    """
    return (
        problem.extent.L <= MOST_QUERIES
        and family_of(problem.score) == DOT
        and type(problem.score).project is Score.project
        and RULES.get(type(problem.normalizer)) == SOFTMAX
        and not problem.wants_grad
        and 0 not in (*problem.query.shape, problem.extent.S, problem.value.shape[-1])
    )


def attend_pages(problem: Problem, key: Tensor, value: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, L, V) and the log-sum-exp (B, H, L) of a problem that :func:`reads_pages` accepts.

    Parameters
    ----------
    problem : Problem
        Its keys and values are never read.
    key, value : Tensor (pages, G, size, C) and (pages, G, size, V)
    table : Tensor (B, N), integer
    """
    visible = VisibleKeys.of(problem, None)
    query = problem.query
    if query.dtype == torch.bfloat16 and is_interpreted():  # Triton's interpreter computes it wrongly
        query, key, value = query.float(), key.float(), value.float()
    given = query, key, value, table, Rows.of(problem).sink, visible.start, visible.stop, visible.bias
    output, lse = _operator(*given, problem.scale, problem.softcap or 0.0)
    return output.to(problem.query.dtype), lse


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    sink: Tensor | None,
    start: Tensor | None,
    stop: Tensor | None,
    bias: Tensor | None,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Return output (B, H, L, V) and log-sum-exp (B, H, L)."""
    setting = Setting(DOT, 0, SOFTMAX, scale, softcap, 0.0, 0, 0.0)
    pages = Pages(table.to(torch.int32).contiguous(), key.shape[2])
    return run_step(setting, query, key, value, sink, VisibleKeys(start, stop, bias=bias), pages)


def _shapes(query, key, value, *rest):  # type: ignore[no-untyped-def]  # noqa: ARG001
    wide = torch.float64 if value.dtype == torch.float64 else torch.float32
    return value.new_empty(*query.shape[:3], value.shape[-1]), value.new_empty(query.shape[:3], dtype=wide)


_operator: Any = define("triton_paged", torch.no_grad()(_forward), _shapes, KEYS)
