"""Engine ``reference``: materializes all scores and weights. The definition, and the oracle of the other engines."""

from __future__ import annotations

from dataclasses import replace

import torch

from regard._utils.errors import described, rejected
from regard.engines import dense
from regard.engines.base import Cost, Engine, EngineOutput
from regard.engines.problem import Problem


class Reference(Engine):
    """The formula, in O(L·S) memory; supports every derivative and every part.

    Parameters
    ----------
    dtype : torch.dtype, optional
        Compute and output dtype, ``torch.float64`` for an oracle; None keeps the inputs' dtype.

    Examples
    --------
    >>> import torch, regard
    >>> q = torch.randn(1, 2, 5, 8)
    >>> regard.attention(q, q, q, engine=Reference(torch.float64)).dtype
    torch.float64
    """

    name = "reference"
    twice_differentiable = True
    fits_lines = True

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        if dtype not in (None, torch.float32, torch.float64):
            raise rejected("Reference", "dtype", "be torch.float32, torch.float64 or None", described(dtype))
        self.dtype = dtype

    def refusal(self, problem: Problem) -> str | None:  # noqa: ARG002
        return None

    def grows(self, problem: Problem) -> bool:  # noqa: ARG002
        return True

    def cost(self, problem: Problem) -> Cost:
        B, H, L, S = problem.extent
        E, V = problem.query.shape[-1], problem.value.shape[-1]
        pair = problem.score.pair_flops(E) + 2 * V + 5 + (0 if problem.order is None else problem.order.pair_flops(E))
        size = problem.compute_dtype.itemsize
        held = max(problem.score.pair_size(E), 3 if problem.order is None else 4 * E) * size
        pairs = B * H * L * S
        return Cost(float(pairs * pair), float(problem.bytes_read), float(pairs * held), grows=self.grows(problem))

    def run(self, problem: Problem) -> EngineOutput:
        if self.dtype is None:
            return dense.attend(problem)
        cast = [t.to(self.dtype) for t in (problem.query, problem.key, problem.value)]
        return dense.attend(replace(problem, query=cast[0], key=cast[1], value=cast[2]))
