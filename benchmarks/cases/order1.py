"""Local linear attention, order 1, beside order 0 of the same kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import regard
from benchmarks.cases.contenders import by_regard, differentiated, seeded
from benchmarks.registry import Call, Case, Contender, Goal, Point, register
from benchmarks.work import Work

POINTS = 4096
RIDGE = 1e-2
ORDER_0, TORCH = "regard, order 0", "torch formula"


def lines(alpha: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the weights of lines from those of means: weighted least squares with a free constant."""
    apart = key.unsqueeze(2) - query.unsqueeze(3)  # (B, H, l, S, E)
    mean = (alpha.unsqueeze(3) @ apart).squeeze(3)
    spread = (alpha.unsqueeze(-1) * apart).mT @ apart - mean.unsqueeze(-1) * mean.unsqueeze(-2)
    square = (alpha * apart.square().sum(-1)).sum(-1)[..., None, None]
    ridge = RIDGE / query.shape[-1] * square * torch.eye(query.shape[-1], dtype=query.dtype)
    slope = torch.linalg.solve(spread + ridge, -mean)
    return alpha * (1 + ((apart - mean.unsqueeze(3)) @ slope.unsqueeze(-1)).squeeze(-1))


class LineWork(Work):
    """Work of order 1."""

    def _rows(self, leaves: dict[str, Tensor], rows: Tensor) -> tuple[Tensor, Tensor]:
        alpha, _ = super()._rows(leaves, rows)
        alpha = lines(alpha, leaves["query"][:, :, rows], leaves["key"])
        return alpha, alpha @ leaves["value"]


def _build(point: Point) -> Work:
    E = point.size
    query, key, value = seeded(*[(1, 1, POINTS, E)] * 3)
    return LineWork(query, key, value, point.backward, features=8 * E, pair_flops=8.0 * E + E * (E + 1))


def _order_0(point: Point) -> Work:
    query, key, value = seeded(*[(1, 1, POINTS, point.size)] * 3)
    return Work(query, key, value, point.backward)


def _options(_: Work) -> dict[str, Any]:
    return {"order": regard.LocalLinear(RIDGE), "engine": "fused"}


def _by_torch(work: Work) -> Call:
    scale = work.query.shape[-1] ** -0.5

    def formula() -> Tensor:
        parts = []
        for query in work.query.split(16, 2):
            alpha = torch.softmax(query @ work.key.mT * scale, -1)
            parts.append(lines(alpha, query, work.key) @ work.value)
        return torch.cat(parts, 2)

    return differentiated(work, formula)


_FORWARD, _BOTH = {8: 3, 16: 5, 32: 8, 64: 20}, {8: 5, 16: 5, 32: 5, 64: 9}

register(
    Case(
        name="order1",
        title=f"Local linear attention (order 1), exact, {POINTS:,} queries and keys, one head",
        unit="features",
        build=_build,
        contenders={
            ORDER_0: by_regard(lambda _: {"engine": "fused"}, build=_order_0),
            "regard": by_regard(_options),
            TORCH: Contender(_by_torch),
        },
        baseline=ORDER_0,
        points=(
            *(
                Point(size, backward, only=(ORDER_0, "regard"), rounds=5)
                for backward in (False, True)
                for size in _BOTH
            ),
            Point(16, variant="also plain torch", rounds=3),
        ),
        quick=4,
        goals=(
            *(Goal(f"order1-{E}", "time", limit, E, against=ORDER_0) for E, limit in _FORWARD.items()),
            *(Goal(f"order1-both-{E}", "time", limit, E, True, against=ORDER_0) for E, limit in _BOTH.items()),
        ),
        tolerance=1e-3,
        notes="Order 0 is a yardstick: other work by the same kernels. With ridge 0.01 and normal numbers, errors in "
        "float32 are amplified by the inverse of the ridge, so errors up to 0.1 % of the largest value count as right.",
    )
)
