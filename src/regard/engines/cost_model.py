"""Estimated times of engines, from a model fitted to measurements; ``engine="auto"`` uses them.

``costs.json`` has those of CPUs. Each CUDA device that was measured has a file of its own, ``costs_<device>.json``;
others have ``costs_cuda.json``, estimates from published numbers that nothing was fitted to. A file holds, for each key
(engine, family of scores and, unless it is softmax, of normalizers, kind of mask, with or without a backward pass), the
seconds per unit of each of :data:`TERMS`. ``python -m benchmarks.costs`` measures them and rewrites the file; with
``--device cuda``, that of the device.
"""

from __future__ import annotations

import json
import os
import re
from functools import cache
from importlib.resources import files
from operator import mul
from typing import Any

import torch
from torch import Tensor

from regard import masks, normalizers, scores
from regard.engines.problem import Problem
from regard.normalizers import SoftmaxSink
from regard.scores.dot_products import DotLike
from regard.scores.kernels import Distance

#: Terms of the model: the call, each sequence, each visible pair, its features, its values, each element of the inputs.
TERMS = ("call", "sequences", "pairs", "pairs·features", "pairs·values", "numbers")
PAIRS = TERMS.index("pairs")

#: Pairs × (features + values) up to which reading the mask would cost more than it saves.
SMALL = 1 << 28

#: How many times as long torch's CPU kernel takes in a 16-bit dtype, without gradients. The table's times are of
#: float32, in which engine "sdpa" computes gradients; the other engines take about as long in all dtypes.
NARROW = {torch.float16: 2.5, torch.bfloat16: 1.0}
#: The same for bfloat16 on processors that multiply it in tiles (AMX).
TILED = 0.4

#: The same for steps of decoding, which are bound by reading keys and values.
NARROW_STEP = {
    "sdpa": {torch.float16: 5.0, torch.bfloat16: 1.6},
    "fused": {torch.float16: 0.5, torch.bfloat16: 0.5},
}
#: The same for bfloat16 in engine "sdpa" on processors that multiply it in tiles.
TILED_STEP = 0.7

#: Seconds that an option adds for each visible pair, forward, and forward with backward.
OPTIONS: dict[str, dict[str, tuple[float, float]]] = {
    "softcap": {"fused": (3e-10, 1.2e-9), "streaming": (3.5e-9, 1.1e-8)},
    "dropout": {"fused": (3e-10, 1.5e-9), "streaming": (5e-9, 8e-9), "sdpa": (7e-9, 8e-9)},
    "sink": {"streaming": (2.5e-9, 5e-9)},
}

#: Number of pairs up to which engines evaluate a function mask as a whole.
SHORT = 1 << 16
#: Pairs × (features + values) of a forward pass up to which engine "fused" spends more around its kernels than in them,
#: if nothing is prepared.
TINY = 1 << 22
#: Share of the keys that lists may name so that engine "fused" compares queries with these keys alone.
LISTED = 0.3


def family(problem: Problem) -> str:
    """Return the family of the problem's score."""
    score = problem.score
    if isinstance(score, (scores.Additive, scores.Concat)):
        return "additive"
    if isinstance(score, Distance):
        return "compact" if score.can_return_neg_inf else "gaussian"
    if problem.is_step and not normalizer_family(problem):
        return "step"
    return "dot" if isinstance(score, DotLike) and type(score).compare is DotLike.compare else "other"


def normalizer_family(problem: Problem) -> str:
    """Return the family of the problem's normalizer; the empty string for softmax, with or without sinks."""
    normalizer = problem.normalizer
    if normalizer.online or isinstance(normalizer, SoftmaxSink):
        return ""
    if isinstance(normalizer, (normalizers.Sparsemax, normalizers.Entmax15, normalizers.Entmax)):
        return "+entmax"
    return f"+{type(normalizer).__name__.lower()}"


def cost_key(problem: Problem) -> str:
    """Return the key of a call's costs, to be prefixed by the engine's name."""
    mask = problem.mask
    if mask is None:
        kind = "all"
    elif isinstance(mask, masks.Dense):
        kind = "matrix"
    elif mask.calls_a_function() and problem.extent.L * problem.extent.S <= SHORT:
        kind = "function"  # is evaluated as a whole
    elif mask.has_bias:
        kind = "bias"
    else:  # masks with tensors, such as padding, are read in every call, and may differ per sequence
        kind = "structure" if mask.is_fixed else "ragged"
    return f"{family(problem)}{normalizer_family(problem)}/{kind}/{'backward' if problem.wants_grad else 'forward'}"


def terms(problem: Problem, share: float | None = None) -> tuple[float, ...]:
    """Return the amount of each of :data:`TERMS`; ``share`` is that of the pairs that are compared, if it is known."""
    e = problem.extent
    C, V = problem.query.shape[-1], problem.value.shape[-1]
    if family(problem) == "additive":
        C = problem.score.tensors()[0].shape[-1]  # w_v: the number of hidden features
    pairs = float(e.B * e.H * e.L * e.S)
    if share is not None:
        pairs *= share
    elif reads_mask_values(problem):
        pairs *= problem.visible_share
    elif problem.query.is_cpu:
        pairs *= problem.fixed_share
    numbers = e.B * (e.H * e.L * (C + V) + problem.key.shape[1] * e.S * (C + V))
    return 1.0, float(e.B), pairs, pairs * C, pairs * V, float(numbers)


def listed_share(problem: Problem) -> float | None:
    """Return the share of the keys that short lists name, which other engines than "fused" do not profit from."""
    mask, S = problem.mask, problem.extent.S
    if mask is None or mask.has_bias or mask.listed_keys is None or S == 0:
        return None
    return mask.listed_keys / S if mask.listed_keys <= LISTED * S else None


def _work(problem: Problem) -> int:
    """Return the number of pairs × (features + values)."""
    e = problem.extent
    return e.B * e.H * e.L * e.S * (problem.query.shape[-1] + problem.value.shape[-1])


def is_small(problem: Problem) -> bool:
    """Whether a forward pass takes no longer than what surrounds the kernels, if nothing is prepared."""
    return _work(problem) <= TINY


def is_tiny(problem: Problem) -> bool:
    """Whether a call is so small that the engine with the least to do around its kernel is the fastest.

    The model's rates are fitted to calls of all sizes, and many times too large for such a call.
    """
    mask = problem.mask
    if type(problem.score) is not scores.ScaledDot or problem.query.itemsize < 4 or not problem.query.is_cpu:
        return False
    if problem.wants_grad or problem.dropout_p:
        return False
    if not (mask is None or isinstance(mask, masks.Dense) or (mask.is_fixed and not mask.calls_a_function())):
        return False
    return is_small(problem)


def is_prepared(problem: Problem) -> bool:
    """Whether engine "fused" runs a tiny call by one prepared call of its kernel."""
    mask = problem.mask
    if mask is not None and not isinstance(mask, masks.Dense) and problem.intervals is None:
        return False
    return problem.is_softmax and problem.softcap is None


def reads_mask_values(problem: Problem) -> bool:
    """Whether the estimate depends on the visible share of the mask."""
    if problem.mask is None or isinstance(problem.mask, masks.Dense) or listed_share(problem) is not None:
        return False
    if not problem.query.is_cpu and not problem.mask.is_fixed:
        return False  # a device would have to be waited for in every call
    return _work(problem) > SMALL


@cache
def table(name: str = "cpu") -> dict[str, list[float]]:
    """Return the seconds per unit of the terms, by key, for CPUs or a device of this name."""
    return dict(_contents(name)["lanes"])


def file_name(device: str) -> str:
    """Return the name of the file for a device by its name, as torch has it; for CPUs, of the one file.

    Examples
    --------
    >>> file_name("NVIDIA H100 80GB HBM3"), file_name("cpu")
    ('costs_nvidia_h100_80gb_hbm3.json', 'costs.json')
    """
    return "costs.json" if device == "cpu" else f"costs_{re.sub('[^a-z0-9]+', '_', device.lower())}.json"


#: The name of the file for CUDA devices that have none of their own.
UNMEASURED = "cuda"


@cache
def _contents(name: str) -> dict[str, Any]:
    return dict(json.loads(files("regard.engines").joinpath(file_name(name)).read_text(encoding="utf-8")))


@cache
def device_name(device: torch.device) -> str:
    """Return the name under which a device has costs; the empty string if no engine was measured on its kind."""
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        return ""
    name = torch.cuda.get_device_name(device) if torch.cuda.is_available() else UNMEASURED
    return name if files("regard.engines").joinpath(file_name(name)).is_file() else UNMEASURED


def is_measured(device: torch.device) -> bool:
    """Whether ``auto`` may run our own GPU kernels on a device: it has costs of its own, or ``REGARD_UNMEASURED=1``.

    Triton's interpreter, where the kernels were tested, can be right where a device is wrong.
    """
    return os.environ.get("REGARD_UNMEASURED") == "1" or device_name(device) not in ("", UNMEASURED)


def basis(device: torch.device) -> str:
    """Return what the estimates for a device are made from, in words; the empty string where they were measured."""
    return str(_contents(name).get("basis", "")) if (name := device_name(device)) else ""


@cache
def _capabilities() -> dict[str, Any]:
    """Return what torch knows of this CPU; nothing where it does not say."""
    return dict(getattr(torch.cpu, "get_capabilities", dict)())


def _has_amx() -> bool:
    return bool(_capabilities().get("amx_bf16"))


def multiplies_slowly(query: Tensor) -> bool:
    """Whether torch's products of such tensors stay far below the peak: those of MKL do on AMD's CPUs with AVX-512.

    With AVX2 alone, engine "fused" is about as fast as torch's kernel there.
    """
    if not query.is_cpu or query.itemsize < 4 or not torch.backends.mkl.is_available():
        return False
    able = _capabilities()
    return bool(able.get("avx512_f")) and str(able.get("cpu_name")).startswith("AMD")


def seconds(names: list[str], problem: Problem) -> dict[str, float]:
    """Return the estimated seconds of a call on each of these engines, omitting engines without measurements."""
    device = device_name(problem.query.device)
    if problem.order is not None or not device:  # not measured
        return {}
    key, lanes = cost_key(problem), table(device)
    rates = {name: found for name in names if (found := lanes.get(f"{name}/{key}")) is not None}
    listed = listed_share(problem)
    amounts = {name: terms(problem, listed if listed is None or name == "fused" else 1.0) for name in rates}
    times = {name: sum(map(mul, found, amounts[name])) for name, found in rates.items()}
    options = {"softcap": problem.softcap, "dropout": problem.dropout_p}
    options["sink"] = isinstance(problem.normalizer, SoftmaxSink)
    for option in (option for option, used in options.items() if used):
        for name in times:
            times[name] += OPTIONS[option].get(name, (0.0, 0.0))[problem.wants_grad] * amounts[name][PAIRS]
    if device != "cpu":  # the lanes of CUDA devices are of 16-bit inputs
        wide: dict[str, float] = _contents(device)["wide"] if problem.query.itemsize > 2 else {}
        return {name: time * wide.get(name, 1.0) for name, time in times.items()}
    tiled = problem.query.dtype == torch.bfloat16 and _has_amx()
    if family(problem) == "step":
        narrow = {name: NARROW_STEP.get(name, {}).get(problem.query.dtype, 1.0) for name in times}
        narrow |= {"sdpa": TILED_STEP} if tiled else {}
        return {name: narrow[name] * time for name, time in times.items()}
    if "sdpa" in times and not problem.wants_grad:
        times["sdpa"] *= TILED if tiled else NARROW.get(problem.query.dtype, 1.0)
    return times
