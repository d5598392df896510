"""Kernel regression: attention whose score is a distance."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases.contenders import by_regard, differentiated, seeded
from benchmarks.registry import Call, Case, Contender, Goal, MissingError, Point, register
from benchmarks.work import Work
from regard import scores

BANDWIDTH = 0.25
#: Coordinates are multiples of this, so that squared distances are exact in float32.
GRID = 1 / 64
#: Share of the pairs that the compact kernels reach.
REACHED = 0.01
CDIST, KEOPS, STATSMODELS, GAUSSIAN = "cdist + softmax", "KeOps", "statsmodels KernelReg", "regard, Gaussian"
MASKED_CDIST = "cdist + where"
POINTS = f"Points are drawn from a normal distribution and rounded to 1/{round(1 / GRID)}"


def points(size: int) -> list[Tensor]:
    *places, targets = seeded(*[(1, 1, size, 3)] * 2, (1, 1, size, 1))
    return [(t / GRID).round() * GRID for t in places] + [targets]


def distance(query: Tensor, key: Tensor) -> Tensor:
    return torch.cdist(query, key, compute_mode="donot_use_mm_for_euclid_dist")


def gaussian_scores(query: Tensor, key: Tensor, parameters: dict[str, Tensor]) -> Tensor:  # noqa: ARG001
    return -0.5 * (distance(query, key) / BANDWIDTH).square()


def _gaussian(point: Point) -> Work:
    return Work(*points(point.size), scores=gaussian_scores, pair_flops=3 * 3 + 2)


def _cdist(work: Work) -> Call:
    def formula() -> Tensor:
        return torch.softmax(-0.5 * (torch.cdist(work.query, work.key) / BANDWIDTH).square(), -1) @ work.value

    return differentiated(work, formula)


def keops(work: Work) -> Call:
    try:
        from pykeops.torch import LazyTensor
    except ImportError:
        raise MissingError("pykeops is not installed") from None
    query, key, value = (t[0, 0].contiguous() for t in (work.query, work.key, work.value))

    def formula() -> Tensor:
        rows, columns = LazyTensor(query[:, None]), LazyTensor(key[None])
        log_weight = ((rows - columns) ** 2).sum(-1) * (-0.5 / BANDWIDTH**2)
        return log_weight.sumsoftmaxweight(LazyTensor(value[None]), dim=1)[None, None]

    try:
        formula()
    except Exception as error:
        said = [line for line in str(error).splitlines() if line.strip()] or [""]
        raise MissingError(f"KeOps failed: {type(error).__name__}: {said[0][:160]}") from error
    return differentiated(work, formula)


def _statsmodels(work: Work) -> Call:
    try:
        from statsmodels.nonparametric.kernel_regression import KernelReg
    except ImportError:
        raise MissingError("statsmodels is not installed") from None
    query, key, value = (t[0, 0].double().numpy() for t in (work.query, work.key, work.value))
    # Local constant is Nadaraya–Watson. Its fit finds marginal effects, too; there is no public way without.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pandas, about a generator that is not used
        model = KernelReg(value[:, 0], key, var_type="ccc", reg_type="lc", bw=[BANDWIDTH] * 3)
    return lambda: {"output": torch.from_numpy(model.fit(query)[0])[None, None, :, None].float()}


def reach(query: Tensor, key: Tensor) -> float:
    """Return the radius within which a share :data:`REACHED` of the pairs lies, on average, and on which none lies."""
    cells = (distance(query[0, 0, :512].double(), key[0, 0].double()) / GRID).square().flatten()
    within = cells.kthvalue(math.ceil(REACHED * cells.numel())).values
    return math.sqrt(float(within.round()) + 0.5) * GRID


def _compact(point: Point) -> Work:
    query, key, value = points(point.size)
    radius = reach(query, key)

    def log_weight(query: Tensor, key: Tensor, parameters: dict[str, Tensor]) -> Tensor:  # noqa: ARG001
        square = (distance(query, key) / radius).square()
        weight = (square <= 1).to(square) if point.variant == "boxcar" else (1 - square).clamp_min(0)
        return weight.log()

    return Work(query, key, value, scores=log_weight, kernel=point.variant, pair_flops=REACHED * (3 * 3 + 2))


def _compact_options(work: Work) -> dict[str, Any]:
    kernel = scores.Boxcar if work.kernel == "boxcar" else scores.Epanechnikov
    return {"score": kernel(reach(work.query, work.key))}


def _masked_cdist(work: Work) -> Call:
    radius = reach(work.query, work.key)

    def formula() -> Tensor:
        square = (torch.cdist(work.query, work.key) / radius).square()
        weight = (square <= 1).float() if work.kernel == "boxcar" else (1 - square).clamp_min(0)
        return weight @ work.value / weight.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)

    return differentiated(work, formula)


def _gaussian_options(_: Work) -> dict[str, Any]:
    return {"score": scores.Gaussian(BANDWIDTH)}


register(
    Case(
        name="gaussian",
        title="Gaussian kernel regression (Nadaraya–Watson) in 3-D",
        unit="points and queries",
        build=_gaussian,
        contenders={
            CDIST: Contender(_cdist),
            "regard": by_regard(_gaussian_options),
            KEOPS: Contender(keops, compiles=True),
            STATSMODELS: Contender(_statsmodels),
        },
        baseline=CDIST,
        points=(
            *(Point(size) for size in (128, 512)),
            Point(2048, rounds=5),
            Point(8192, only=(CDIST, "regard", KEOPS)),
            Point(20_000, only=(CDIST, "regard", KEOPS), rounds=5),
            Point(32_768, only=("regard", KEOPS), rounds=3),
        ),
        quick=64,
        goals=(
            Goal("gaussian-keops", "speed", 10, 20_000, against=KEOPS),
            Goal("gaussian-cdist", "speed", 25, 20_000),
        ),
        tolerance=1e-3,
        notes=f"{POINTS}. torch.cdist loses digits by cancellation, so errors up to 0.1 % of the largest value count "
        "as right. statsmodels computes in float64, and computes marginal effects too.",
    )
)

register(
    Case(
        name="compact",
        title="Compact kernels that reach 1 % of the points, in 3-D",
        unit="points and queries",
        build=_compact,
        contenders={
            GAUSSIAN: by_regard(_gaussian_options, build=_gaussian),
            "regard": by_regard(_compact_options),
            MASKED_CDIST: Contender(_masked_cdist),
        },
        baseline=GAUSSIAN,
        points=(
            Point(20_000, variant="boxcar", rounds=5),
            Point(20_000, variant="Epanechnikov", only=(GAUSSIAN, "regard")),
        ),
        quick=64,
        goals=(
            Goal("boxcar", "speed", 5, 20_000, variant="boxcar"),
            Goal("epanechnikov", "speed", 5, 20_000, variant="Epanechnikov"),
        ),
        tolerance=1e-3,
        notes=f"{POINTS}, so that no pair lies on a kernel's edge, which is where it reaches 1 % on average. "
        "The limit counts the pairs in reach alone. The Gaussian is a yardstick: other weights for the same points.",
    )
)
