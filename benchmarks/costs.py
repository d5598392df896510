"""Fit the cost model of ``engine="auto"``: ``python -m benchmarks.costs`` writes ``src/regard/engines/costs.json``.

With ``--device cuda`` it writes the costs of that device, ``costs_<device>.json``: times of bfloat16, and for each
engine how many times as long float32 takes. The settings come in an order that is drawn, and the file is written while
they are measured and when ``--seconds`` are over: what a run that ends early has found is of use.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares, nnls

import regard
from benchmarks.machine import facts
from benchmarks.measure import loops_for, sample
from regard import masks, scores
from regard.engines import TABLE, cost_model
from regard.engines.problem import Call, Problem

TARGET = Path(cost_model.__file__).with_name("costs.json")
#: Pairs times features beyond which a call would take too long to measure.
LARGEST = 1e9
#: Seconds that a sample lasts at least, and samples of each call.
FLOOR, SAMPLES = 0.004, 3
#: Seconds between writes of a device's file.
PAUSE = 10.0


@dataclass(frozen=True)
class Setting:
    """One call to measure."""

    score: str
    mask: str
    B: int
    L: int
    S: int
    H: int
    C: int
    V: int
    backward: bool
    group: int = 1
    normalizer: str = "softmax"


def device_settings() -> Iterator[Setting]:
    """Yield the grid of GPUs: fewer settings, with problems large enough to fill one."""
    sizes = ((1, 16, 16), (4, 512, 512), (1, 4096, 4096), (4, 2048, 2048), (1, 16384, 16384), (1, 256, 8192))
    cases = [(mask, size) for mask in ("all", "structure", "bias", "matrix", "ragged") for size in sizes]
    for score, (mask, (B, L, S)), backward in itertools.product(
        ("dot", "additive", "gaussian", "compact"), cases, (False, True)
    ):
        for C, V in {"dot": ((64, 64), (128, 128)), "additive": ((64, 64),)}.get(score, ((3, 16), (64, 64))):
            if mask != "matrix" or L * S <= 1 << 24:
                yield Setting(score, mask, B, L, S, 8, C, V, backward)
    steps = ((1, 1, 1024), (1, 1, 65536), (1, 4, 8192), (32, 1, 1024), (32, 1, 8192), (32, 4, 8192))
    for mask, (B, L, S), (C, group) in itertools.product(
        ("all", "structure", "bias", "matrix", "ragged"), steps, ((64, 1), (128, 4))
    ):
        yield Setting("step", mask, B, L, S, 8, C, C, False, group)
    for normalizer, (B, L, S), backward in itertools.product(("entmax15", "sigmoid"), sizes[1:4], (False, True)):
        yield Setting("dot", "structure", B, L, S, 8, 64, 64, backward, normalizer=normalizer)


def settings() -> Iterator[Setting]:
    """Yield the grid."""
    sizes = (
        *((1, 8, 8), (1, 64, 64), (1, 1, 512), (1, 256, 256), (1, 1024, 1024), (1, 64, 2048), (1, 4096, 4096)),
        *((128, 12, 12), (32, 50, 50)),
    )
    several = (
        *((2, 12, 12), (2, 64, 64), (1, 256, 256), (128, 12, 12), (32, 50, 50)),
        *((64, 1, 128), (8, 256, 256), (4, 1024, 512)),
    )
    cases = [(mask, size) for mask in ("all", "structure", "causal", "bias", "alibi", "matrix") for size in sizes]
    cases += [("function", (B, L, S)) for B, L, S in sizes if L * S <= cost_model.SHORT]
    cases += [(mask, size) for mask in ("ragged", "causal ragged", "documents") for size in several]
    for score, (mask, (B, L, S)), backward in itertools.product(
        ("dot", "additive", "gaussian", "compact"), cases, (False, True)
    ):
        if score != "dot" and mask in ("causal", "alibi", "causal ragged", "documents"):
            continue
        widths = {
            "dot": ((16, 16), (64, 64), (128, 128), (64, 256)),
            "additive": ((16, 64), (64, 16), (128, 64), (256, 256)),
        }
        for C, V in widths.get(score, ((1, 1), (3, 1), (3, 64), (16, 16), (64, 64))):
            H = 8 if score == "dot" else 1
            if B * H * L * S * max(C, V) <= LARGEST / (4 if score != "dot" else 1):
                yield Setting(score, mask, B, L, S, H, C, V, backward)
    steps = (
        *((1, 1, 64), (1, 1, 1024), (1, 1, 8192), (8, 1, 512), (4, 1, 2048), (1, 4, 1024)),
        *((8, 1, 4096), (32, 1, 256)),
    )
    for mask, (B, L, S), C, group in itertools.product(
        ("all", "structure", "bias", "function", "matrix", "ragged"), steps, (16, 64, 128), (1, 4)
    ):
        yield Setting("step", mask, B, L, S, 8, C, C, False, group)


def other_settings() -> Iterator[Setting]:
    """Yield a smaller grid for normalizers other than softmax: dot products with sigmoid and one sparse normalizer.

    With other scores, engine ``fused`` is preferred without estimates: it is several times as fast as ``streaming``.
    """
    sizes = ((1, 8, 8), (1, 1, 2048), (1, 64, 512), (1, 256, 256), (1, 1024, 1024), (32, 12, 12))
    cases = [(mask, size) for mask in ("all", "structure", "bias", "matrix") for size in sizes]
    cases += [("function", size) for size in ((1, 8, 8), (1, 64, 512), (1, 256, 256))]
    cases += [("ragged", size) for size in ((32, 12, 12), (64, 1, 128), (4, 256, 256), (2, 512, 512))]
    for normalizer, (mask, (B, L, S)), backward, width in itertools.product(
        ("entmax15", "sigmoid"), cases, (False, True), (16, 64)
    ):
        if B * L * S * width <= LARGEST / 100:
            yield Setting("dot", mask, B, L, S, 2, width, width, backward, normalizer=normalizer)


def made(s: Setting, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments."""
    generator = torch.Generator(device).manual_seed(0)

    def new(*shape: int) -> torch.Tensor:
        drawn = torch.randn(*shape, generator=generator, device=device).to(dtype)
        return drawn.requires_grad_(s.backward)

    ends = new(s.B, s.group * s.H, s.L, s.C), new(s.B, s.H, s.S, s.C), new(s.B, s.H, s.S, s.V)
    score: scores.Score | None = None
    if s.score == "additive":
        score = scores.Additive(new(s.C))
    elif s.score not in ("dot", "step"):
        score = scores.Gaussian(1.0) if s.score == "gaussian" else scores.Epanechnikov(1.5 * s.C**0.5)
    window = masks.window(s.S // 4, 0, align="lower_right")
    causal = masks.causal(align="lower_right")
    slopes = torch.rand(s.group * s.H, generator=generator, device=device)
    alibi = masks.alibi(slopes, align="lower_right")
    padding = masks.padding(torch.randint(s.S // 2, s.S + 1, (s.B,), generator=generator, device=device))
    past, part, keys = s.S - s.L, s.S // 4 + 1, torch.arange(s.S, device=device)
    mask = {
        "all": None,
        "structure": causal & window,
        "causal": causal,
        "bias": causal & alibi,
        "alibi": alibi,
        "ragged": padding,
        "causal ragged": causal & padding,
        "documents": causal
        & masks.document((keys[-1] - torch.arange(s.L, device=device).flip(0)) // part, keys // part),
        "function": masks.as_mask(lambda _b, _h, q_idx, kv_idx: kv_idx <= q_idx + past),
        "matrix": None,
    }[s.mask]
    if s.mask == "matrix":  # made only where it is wanted: it is large
        mask = masks.dense(torch.rand(s.L, s.S, generator=generator, device=device) < 0.5)
    return ends, {"attn_mask": mask, "score": score, "normalizer": s.normalizer, "enable_gqa": s.group > 1}


def measured(
    s: Setting, clock: Callable[[], float], device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Iterator[tuple[str, tuple[float, ...], float]]:
    """Yield the cost key, the terms and the seconds of a call for every engine that ``auto`` may choose, in turn."""
    ends, options = made(s, device, dtype)
    problem = Problem.of(Call(*ends, **options))
    calls: dict[str, Callable[[], object]] = {}
    for name, engine in TABLE.items():
        chosen = device != "cpu" or engine.not_automatic(problem) is None  # a GPU's kernels are chosen once measured
        if chosen and engine.why_not(problem) is None and not engine.grows(problem):
            calls[name] = _call(ends, {**options, "engine": name}, s.backward)
    best = dict.fromkeys(calls, float("inf"))
    loops: dict[str, int] = {}
    for name, call in calls.items():
        call()  # compiles
        loops[name] = loops_for(call, FLOOR, clock)
    for _ in range(SAMPLES):
        for name, call in calls.items():
            best[name] = min(best[name], sample(call, loops[name], clock))
    for name, seconds in best.items():
        yield f"{name}/{cost_model.cost_key(problem)}", cost_model.terms(problem), seconds


def _call(ends: tuple[Any, ...], options: dict[str, Any], backward: bool) -> Callable[[], object]:
    if not backward:
        return lambda: regard.attention(*ends, **options)
    score = options["score"]
    leaves = [*ends, *([t for t in score.tensors() if t.requires_grad] if score else [])]
    return lambda: torch.autograd.grad(regard.attention(*ends, **options).sum(), leaves, allow_unused=True)


def waiting() -> float:
    """Return the time at which a CUDA device has done all its work."""
    torch.cuda.synchronize()
    return time.perf_counter()


def target(device: str) -> Path:
    """Return the file of a device."""
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else device
    return TARGET.with_name(cost_model.file_name(name))


def on_device(device: str, share: float, until: float, clock: Callable[[], float]) -> Iterator[dict[str, Any]]:
    """Measure the costs of a device until a time of ``time.monotonic``, and yield what is fitted to them so far."""
    grid = [s for s in device_settings() if random.Random(repr(s)).random() < share]
    random.Random(0).shuffle(grid)
    rows: defaultdict[str, list[tuple[float, ...]]] = defaultdict(list)
    times: defaultdict[str, list[float]] = defaultdict(list)
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    yielded = time.monotonic()
    for i, setting in enumerate(grid):
        print(f"\r{i + 1} of {len(grid)}: {setting}".ljust(140)[:140], end="", file=sys.stderr)
        found = list(measured(setting, clock, device, torch.bfloat16))
        for lane, terms, seconds in found:
            rows[lane].append(terms)
            times[lane].append(seconds)
        if i % 4 == 0:
            wide = {lane: seconds for lane, _, seconds in measured(setting, clock, device)}
            for lane, _, seconds in found:
                if lane in wide:
                    ratios[lane.split("/")[0]].append(wide[lane] / seconds)
        now = time.monotonic()
        if now - yielded > PAUSE or now > until or i + 1 == len(grid):
            yielded = now
            yield {
                "settings": f"{i + 1} of {len(grid)}",
                "terms": cost_model.TERMS,
                "wide": {name: float(f"{np.median(each):.3g}") for name, each in sorted(ratios.items())},
                "lanes": {lane: fitted(rows[lane], times[lane]) for lane in sorted(rows)},
            }
        if now > until:
            return


def fitted(rows: Sequence[tuple[float, ...]], seconds: Sequence[float]) -> list[float]:
    """Return the non-negative rates whose predictions are off by the smallest factors.

    Factors are compared by their logarithms, where twice and half as long are equally wrong; of calls that are far off,
    each counts by its logarithm alone, not by the square.
    """
    a = np.array(rows) / np.array(seconds)[:, None]
    unit = a.max(0) + 1e-300
    scaled = a / unit
    begin = np.maximum(nnls(scaled, np.ones(len(a)))[0], 1e-6)
    found = least_squares(
        lambda rates: np.log(scaled @ rates), begin, lambda rates: scaled / (scaled @ rates)[:, None],
        bounds=(1e-12, np.inf), loss="soft_l1", f_scale=0.2,
    ).x  # fmt: skip
    return [float(f"{rate:.3g}") if rate * size > 1e-6 else 0.0 for rate, size in zip(found / unit, unit)]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, fit, write, and report the quality of the fit."""
    parser = argparse.ArgumentParser("python -m benchmarks.costs", description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="measure this share of the grid only")
    parser.add_argument("--score", help="measure calls of this score only, and keep the rates of all others")
    parser.add_argument(
        "--others", action="store_true", help="measure normalizers other than softmax only, and keep all other times"
    )
    parser.add_argument(
        "--cpu-time", action="store_true", help="measure the CPU time of one thread, which other processes disturb less"
    )
    parser.add_argument("--device", default="cpu", help="measure the engines there (default: cpu)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of a device: stop after so many")
    parser.add_argument("--out", type=Path, help="where to write (default: the file of the device)")
    options = parser.parse_args(argv)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU on this machine")
    options.out = options.out or target(options.device)
    if options.device == "cpu":
        _write_rates(options, sys.argv[1:] if argv is None else argv)
    else:
        _write_times_of_device(options)
    return 0


def _write_times_of_device(options: argparse.Namespace) -> None:
    """Measure the engines on a device, and write the file after each group of calls."""
    on_gpu, began = options.device.startswith("cuda"), time.monotonic()
    where = facts() | {"device": torch.cuda.get_device_name(options.device) if on_gpu else options.device}
    clock = waiting if on_gpu else time.time
    for about in on_device(options.device, options.share, began + options.seconds, clock):
        where["took"] = f"{(time.monotonic() - began) / 60:.1f} minutes"
        text = json.dumps({"machine": where, **about}, indent=1, ensure_ascii=False) + "\n"
        temporary = options.out.with_suffix(".new")
        temporary.write_text(text, "utf-8")
        temporary.replace(options.out)  # whole, whenever the run is killed


def _write_rates(options: argparse.Namespace, argv: Sequence[str]) -> None:
    """Measure calls on the CPU, fit the rates of each lane to them, report how well they fit, and write them."""
    every = [*other_settings()] if options.others else [*settings(), *other_settings()]
    every = [s for s in every if options.score in (None, s.score)]
    grid = [s for s in every if random.Random(repr(s)).random() < options.share]
    rows: defaultdict[str, list[tuple[float, ...]]] = defaultdict(list)
    times: defaultdict[str, list[float]] = defaultdict(list)
    began, clock = time.monotonic(), time.process_time if options.cpu_time else time.perf_counter
    if options.cpu_time:
        torch.set_num_threads(1)
    for i, setting in enumerate(grid):
        print(f"\r{i + 1} of {len(grid)}: {setting}".ljust(140)[:140], end="", file=sys.stderr)
        for lane, terms, seconds in measured(setting, clock):
            rows[lane].append(terms)
            times[lane].append(seconds)
    lanes = {lane: fitted(rows[lane], times[lane]) for lane in sorted(rows)}
    for lane, rates in lanes.items():
        ratios = np.array(rows[lane]) @ np.array(rates) / np.array(times[lane])
        print(f"{lane:36} {len(ratios):3} calls, predicted / measured {ratios.min():.2f} to {ratios.max():.2f}")
    where = facts() | {
        "command": " ".join(["python -m benchmarks.costs", *argv]),
        "took": f"{(time.monotonic() - began) / 60:.1f} minutes",
    }
    body: dict[str, Any] = {"machine": where, "terms": cost_model.TERMS, "lanes": lanes}
    if options.score is not None or options.others:
        what = "other normalizers" if options.others else f"score {options.score}"
        body = json.loads(TARGET.read_text(encoding="utf-8"))
        body |= {f"machine of {what}": where, "lanes": dict(sorted((body["lanes"] | lanes).items()))}
    options.out.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
