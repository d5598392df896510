"""Kernel regression from a thousand to ten million points: ``python -m benchmarks.large_regression [--part NAME]``.

Points are uniform in a cube of edge 1, the bandwidth is 0.05 along each axis, and the target is a sine with noise. Each
row's error is the largest of |ŷ − exact| / |exact| over queries that are summed up by all pairs in float64. A contender
whose next size would take longer than its budget is left out there. Parts, each of a few minutes:

``sizes``
    fit and predict from one to ten million points, with the peak of the process's memory
``search``
    the leave-one-out search on a million points, and by all pairs on 20,000 of them
``crossover``
    where the transform overtakes all pairs, and where method="auto" changes over
``table``
    timings compared with other libraries
``categories``
    fit and predict with 3,000 categories, alone and beside a number
``coverage``
    what 90 % conformal intervals cover

Writes benchmarks/results/large-regression.json and .md; ``python -m benchmarks.readme`` puts them into
docs/large-regression.md. The exit code is 1 where something is slower, larger or less exact than its limit.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.machine import ROOT, facts
from benchmarks.regression_contenders import CONTENDERS, LINEAR, WIDTH, regard, sample

TARGET = ROOT / "benchmarks" / "results" / "large-regression.json"
BUDGET = 20.0
SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
#: Points, features, queries, and the limit in seconds.
FITS = ((1_000_000, 1, 100_000, 0.5), (1_000_000, 2, 100_000, 1.0), (1_000_000, 3, 100_000, 2.0),
        (10_000_000, 3, 100_000, 20.0))  # fmt: skip
#: Limits: gigabytes of memory, the largest relative error, seconds of a search, coverage of 90 % intervals.
MEMORY, ERROR, SEARCH, COVERAGE = 6.0, 1e-6, 15.0, (0.89, 0.91)


def exact_at(X: np.ndarray, y: np.ndarray, query: np.ndarray, kernel: str = "gaussian") -> np.ndarray:
    """Return the estimate by all pairs (L,), the first of them checked by NumPy."""
    found = regard(kernel=kernel, method="exact")(X, y, query)
    square = (((X - query[0]) / WIDTH) ** 2).sum(1)
    weight = np.exp(-0.5 * square) if kernel == "gaussian" else np.maximum(1 - square, 0)
    if abs(found[0] - weight @ y / weight.sum()) > 1e-10 * abs(found[0]):
        raise AssertionError("all pairs are wrong")
    return found


def worst(
    found: np.ndarray, X: np.ndarray, y: np.ndarray, query: np.ndarray, count: int, kernel: str = "gaussian"
) -> float:
    """Return the largest relative error over so many queries."""
    some = np.random.default_rng(1).choice(len(query), min(count, len(query)), replace=False)
    expected = exact_at(X, y, query[some], kernel)
    return float((np.abs(found[some] - expected) / np.abs(expected)).max())


def sizes() -> list[dict[str, Any]]:
    """Return a row for each size, each from a process of its own, whose memory is measured."""
    rows = []
    for N, d, L, limit in FITS:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.large_regression", "--one", f"{N},{d},{L}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        rows.append(
            {"points": N, "features": d, "queries": L, "limit": limit} | json.loads(done.stdout.splitlines()[-1])
        )
        print(rows[-1], file=sys.stderr)
    return rows


def one(N: int, d: int, L: int) -> dict[str, Any]:
    """Return how long fit and predict take, the worst error, and memory."""
    import torch

    from regard.regression import NadarayaWatsonRegressor

    warm = sample(6_000, d, 6_000)
    NadarayaWatsonRegressor(bandwidth=WIDTH, method="nufft").fit(*warm[:2]).predict(warm[2])
    NadarayaWatsonRegressor(bandwidth=WIDTH, method="exact").fit(*warm[:2]).predict(warm[2][:500])
    X, y, query = sample(N, d, L)
    times = []
    for _ in range(1 if N > 1_000_000 else 3):
        began, busy = time.perf_counter(), time.process_time()
        model = NadarayaWatsonRegressor(bandwidth=WIDTH, method="auto").fit(X, y)
        fitted = time.perf_counter()
        found = model.predict(query)
        times.append((time.perf_counter() - began, fitted - began, time.process_time() - busy))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    seconds, fit, processor = min(times)
    return {
        "seconds": seconds, "fit": fit, "processor": processor, "threads": torch.get_num_threads(),
        "error": worst(found, X, y, query, 1000 if N <= 1_000_000 else 200),
        "GB": peak, "method": model.plan_.method, "bound": model.plan_.bound, "by tiles": model.plan_.by_tiles,
    }  # fmt: skip


def search() -> dict[str, Any]:
    """Return what the leave-one-out search takes and finds in two dimensions."""
    from regard.regression import NadarayaWatsonRegressor

    X, y, _ = sample(1_000_000, 2, 1)
    found: dict[str, Any] = {}
    for name, count, method in (("all", len(X), "auto"), ("some", 20_000, "exact")):
        began = time.perf_counter()
        model = NadarayaWatsonRegressor(bandwidth="loo", method=method).fit(X[:count], y[:count])
        found[name] = {
            "seconds": time.perf_counter() - began, "points": count, "bandwidth": model.bandwidth_.tolist(),
            "error": model.loo_error_, "tried": len(model.loo_curve_.errors),
        }  # fmt: skip
    # What 20,000 points support: their own width, narrowed as the best width is with n^(-1/(d+4)).
    scale = (20_000 / len(X)) ** (1 / 6)
    found["supported"] = [width * scale for width in found["some"]["bandwidth"]]
    return found


def crossover() -> list[dict[str, Any]]:
    """Return for each dimension where both methods take as long, and where "auto" changes over."""
    from regard.regression import NadarayaWatsonRegressor

    rows = []
    for d in (1, 2, 3):
        ratios, chosen = [], []
        sizes = [round(1_500 * 2 ** (i / 2)) for i in range({1: 9, 2: 9, 3: 11}[d])]
        for N in sizes:
            X, y, query = sample(N, d, N)
            seconds = {}
            for _ in range(3):
                for method in ("exact", "nufft"):
                    model = NadarayaWatsonRegressor(bandwidth=WIDTH, method=method).fit(X, y)
                    if method == "nufft":
                        model._evaluator._forget()
                    began = time.perf_counter()
                    model.predict(query)
                    seconds[method] = min(seconds.get(method, np.inf), time.perf_counter() - began)
            model = NadarayaWatsonRegressor(bandwidth=WIDTH).fit(X, y)
            model.predict(query)
            ratios.append(seconds["nufft"] / seconds["exact"])
            chosen.append(model.plan_.method)
        logs = np.log(ratios)
        above = np.flatnonzero(logs > 0)
        last = int(above[-1]) if len(above) else -1
        if 0 <= last < len(sizes) - 1:
            part = logs[last] / (logs[last] - logs[last + 1])
            equal = float(sizes[last] * (sizes[last + 1] / sizes[last]) ** part)
        else:
            equal = float(sizes[0] if last < 0 else sizes[-1])
        low, high = 2.0, float(sizes[-1]) * 8
        for _ in range(12):  # where auto changes over, by bisection
            middle = (low * high) ** 0.5
            X, y, query = sample(max(round(middle), 10), d, max(round(middle), 10))
            model = NadarayaWatsonRegressor(bandwidth=WIDTH).fit(X, y)
            smoother = model._smoother(double=True)
            plan = model._evaluator.choose(smoother, len(query), model._bandwidth(smoother))
            low, high = (low, middle) if plan.method == "nufft" else (middle, high)
        rows.append({"features": d, "equal": equal, "auto": high, "sizes": sizes, "ratios": ratios, "chosen": chosen})
        print(rows[-1], file=sys.stderr)
    return rows


def table(d: int = 2, only: Sequence[str] = tuple(CONTENDERS)) -> list[dict[str, Any]]:
    """Return the times of contenders at every size."""
    rows = []
    last: dict[str, float] = {}
    for N in SIZES:
        L = min(N, 100_000)
        X, y, query = sample(N, d, L)
        for name in only:
            predict = CONTENDERS[name]
            growth = 1.0 if name in LINEAR else 100.0 if N <= 100_000 else 10.0
            if last.get(name, 0.0) * growth > 4 * BUDGET:
                last[name] = np.inf
                continue
            row = {"contender": name, "points": N, "queries": L}
            try:
                if name == "fastlpr" and N > 1_000_000:
                    raise MemoryError("more than 20 GB, of which the system ends the process")
                small = sample(500, d, 50)
                predict(*small)
                began = time.perf_counter()
                found = predict(X, y, query)
                last[name] = row["seconds"] = time.perf_counter() - began
                kernel = "epanechnikov" if "Epanechnikov" in name else "gaussian"
                row["error"] = worst(found, X, y, query, 200 if N <= 1_000_000 else 40, kernel)
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
                last[name] = np.inf
            rows.append(row)
            print(row, file=sys.stderr)
    return rows


def coverage(repetitions: int = 200) -> dict[str, float]:
    """Return what 90 % intervals cover on average over data drawn anew."""
    from regard.regression import NadarayaWatsonRegressor

    covered: dict[str, list[float]] = {"split": [], "leave-one-out": []}
    rng = np.random.default_rng(0)

    def draw(count: int) -> tuple[np.ndarray, np.ndarray]:
        X = rng.uniform(0, 6, (count, 1))
        return X, np.sin(X[:, 0]) + (0.1 + 0.1 * X[:, 0]) * rng.standard_t(4, count)

    for _ in range(repetitions):
        (X, y), (new, target) = draw(400), draw(1000)
        half = NadarayaWatsonRegressor(bandwidth="loo").fit(X[:200], y[:200]).calibrate(X[200:], y[200:])
        whole = NadarayaWatsonRegressor(bandwidth="loo").fit(X, y)
        for name, model in (("split", half), ("leave-one-out", whole)):
            low, high = model.predict_interval(new, 0.9).T
            covered[name].append(float(((low <= target) & (target <= high)).mean()))
    return {name: float(np.mean(each)) for name, each in covered.items()}


def rim(repetitions: int = 5) -> dict[str, Any]:
    """Return the least processor time of fit and predict, with queries among the points and 10 % around them."""
    from regard.regression import NadarayaWatsonRegressor

    rng = np.random.default_rng(0)
    X = rng.uniform(size=(1_000_000, 2))
    y = np.sin(6 * X[:, 0]) + X[:, 1] + 0.3 * rng.standard_normal(len(X))
    queries = {"inside": rng.uniform(size=(100_000, 2)), "around": rng.uniform(-0.1, 1.1, (100_000, 2))}
    took: dict[str, list[float]] = {name: [] for name in queries}
    for _ in range(repetitions):
        for name, query in queries.items():
            began = time.process_time()
            NadarayaWatsonRegressor(bandwidth=0.02).fit(X, y).predict(query)
            took[name].append(time.process_time() - began)
    return {name: min(each) for name, each in took.items()}


def auto(repetitions: int = 3) -> list[dict[str, Any]]:
    """Return the least processor times of searches with 8 features, just beyond where "auto" compares all pairs."""
    from regard.regression import NadarayaWatsonRegressor

    rng = np.random.default_rng(0)
    X = rng.uniform(size=(2_200, 8))
    y = np.sin(6 * X[:, 0]) + X[:, 1] + 0.3 * rng.standard_normal(len(X))
    rows = []
    for kernel in ("gaussian", "epanechnikov"):
        took: dict[str, list[float]] = {"exact": [], "auto": []}
        for _ in range(repetitions):
            for method, each in took.items():
                began = time.process_time()
                NadarayaWatsonRegressor(kernel, "loo", order=1, method=method).fit(X, y)
                each.append(time.process_time() - began)
        rows.append({"kernel": kernel} | {method: min(each) for method, each in took.items()})
    return rows


def categories(N: int = 100_000, count: int = 3_000) -> list[dict[str, Any]]:
    """Return the processor time and memory of fit and predict with many categories, from processes of their own."""
    rows = []
    for mixed, L in ((False, N), (True, 1_000)):
        what = f"print(json.dumps(categories_of({N}, {count}, {mixed}, {L})))"
        code = f"import json; from benchmarks.large_regression import categories_of; {what}"
        command = [sys.executable, "-W", "ignore", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], file=sys.stderr)
    return rows


def categories_of(N: int, count: int, mixed: bool, L: int) -> dict[str, Any]:
    """Return how long fit and predict take, and the gigabytes that they add."""
    from regard.regression import NadarayaWatsonRegressor

    rng = np.random.default_rng(0)
    X = np.stack([rng.integers(count, size=N), rng.uniform(size=N)][: 1 + mixed], 1).astype(float)
    y = np.sin(X[:, 0]) + np.sin(6 * X[:, -1]) * mixed + 0.3 * rng.normal(size=N)
    bandwidth, metric = [0.3, 0.05][: 1 + mixed], ["categorical", "euclidean"][: 1 + mixed]
    warm = X[:3_000], y[:3_000]
    NadarayaWatsonRegressor(bandwidth=bandwidth, metric=metric).fit(*warm).predict(X[:3_000])
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    model = NadarayaWatsonRegressor(bandwidth=bandwidth, metric=metric).fit(X, y)
    fitted = time.process_time()
    model.predict(X[:L])
    took = time.process_time() - fitted
    gigabytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    return {"points": N, "categories": count, "number": mixed, "queries": L, "fit": fitted - began, "predict": took,
            "GB": gigabytes, "method": model.plan_.method}  # fmt: skip


PARTS: dict[str, Callable[[], Any]] = {
    "sizes": sizes, "search": search, "crossover": crossover, "table": table, "coverage": coverage, "rim": rim,
    "auto": auto, "categories": categories,
}  # fmt: skip


def seconds(value: float) -> str:
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.3g} s"


def of_sizes(found: dict[str, Any]) -> str:
    """Return the table of times, memory and errors of large fits, of the search, of "auto" and of intervals."""
    lines = ["| what | result |", "| --- | --- |"]
    for row in found.get("sizes", []):
        what = f"{row['points']:,} points, {row['queries']:,} queries, {row['features']}-D, fit included"
        took = f"{seconds(row['seconds'])} ({seconds(row['processor'])} of CPU time, {row['threads']} threads)"
        lines.append(f"| {what} | {took}, error {row['error']:.1e}, {row['GB']:.2g} GB |")
    if "search" in found:
        all_, some = found["search"]["all"], found["search"]["some"]
        what = f'`bandwidth="loo"` on 1,000,000 points in 2-D, {all_["tried"]} widths tried on all points'
        by_pairs = f"all pairs of {some['points']:,} points give {some['bandwidth'][0]:.3g}, which scales to "
        by_pairs += f"{found['search']['supported'][0]:.3g}"
        lines.append(f"| {what} | {seconds(all_['seconds'])}, width {all_['bandwidth'][0]:.3g} ({by_pairs}) |")
    for row in found.get("crossover", []):
        what = f"`auto` switches from all pairs to transforms, as many queries as points, {row['features']}-D"
        lines.append(f"| {what} | at {row['auto']:,.0f} points (equally fast at {row['equal']:,.0f}) |")
    for name, value in found.get("rim", {}).items():
        what = f"1,000,000 points, 100,000 queries {name}, 2-D, fit included"
        lines.append(f"| {what} | {seconds(value)} of CPU time |")
    for row in found.get("auto", []):
        what = f'`bandwidth="loo"`, `order=1`, 2,200 points with 8 features, {row["kernel"]} kernel'
        lines.append(f"| {what} | `auto` {seconds(row['auto'])}, all pairs {seconds(row['exact'])} of CPU time |")
    for row in found.get("categories", []):
        what = f"{row['points']:,} points with {row['categories']:,} categories" + " and a number" * row["number"]
        took = f"fit {seconds(row['fit'])}, {row['queries']:,} queries {seconds(row['predict'])} of CPU time"
        lines.append(f"| {what} | {took}, {row['GB']:.2g} GB more ({row['method']}) |")
    for name, value in found.get("coverage", {}).items():
        lines.append(f"| coverage of 90 % intervals, {name}, 200 repetitions | {value:.1%} |")
    return "\n".join(lines)


def good(found: dict[str, Any]) -> bool:
    """Return whether everything is within its limit."""
    kept = [
        row["seconds"] <= row["limit"] and row["error"] <= ERROR and row["GB"] <= MEMORY
        for row in found.get("sizes", [])
    ]
    kept += [found["search"]["all"]["seconds"] <= SEARCH] if "search" in found else []
    kept += [abs(np.log(row["auto"] / row["equal"])) <= np.log(1.2) for row in found.get("crossover", [])]
    kept += [COVERAGE[0] <= value <= COVERAGE[1] for value in found.get("coverage", {}).values()]
    return all(kept)


def of_table(found: dict[str, Any]) -> str:
    """Return the table of contenders."""
    rows = found.get("table", [])
    if not rows:
        return "Not measured yet: `python -m benchmarks.large_regression --part table` does."
    sizes = sorted({row["points"] for row in rows if "points" in row})
    lines = ["| contender | " + " | ".join(f"{N:,}" for N in sizes) + " | largest error |",
             "| --- |" + " ---: |" * (len(sizes) + 1)]  # fmt: skip
    for name in (name for name in CONTENDERS if any(row["contender"] == name for row in rows)):
        mine = {row["points"]: row for row in rows if row["contender"] == name and "points" in row}
        cells = [
            seconds(mine[N]["seconds"]) if "seconds" in mine.get(N, {}) else "failed" if N in mine else "–"
            for N in sizes
        ]
        errors = [row["error"] for row in mine.values() if "error" in row]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {f'{max(errors):.0e}' if errors else ''} |")
    return "\n".join(lines)


def contents(found: dict[str, Any]) -> dict[str, Callable[[], str]]:
    """Return what docs/large-regression.md is filled with, by the name of its mark."""
    machine = found.get("machine", {})
    return {
        "sizes": lambda: of_sizes(found),
        "table": lambda: of_table(found),
        "machine": lambda: (
            f"{machine['CPU']}, {machine['cores']} cores, load average {machine['load average'].partition(';')[0]}"
        ),
    }


def report(found: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    return f"# Kernel regression of millions of points\n\n{of_sizes(found)}\n\n{of_table(found)}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure some parts, or all, and write; return 1 where something is beyond its limit."""
    parser = argparse.ArgumentParser("python -m benchmarks.large_regression", description=__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="measure this alone, and keep the others")
    parser.add_argument("--contender", choices=CONTENDERS, action="append", help="put this alone into the table")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    if options.one:
        print(json.dumps(one(*map(int, options.one.split(",")))))
        return 0
    for name in ["table"] if options.contender else options.part or PARTS:
        found = json.loads(TARGET.read_text(encoding="utf-8")) if TARGET.exists() else {}
        if options.contender:
            others = [row for row in found.get("table", []) if row["contender"] not in options.contender]
            found["table"] = others + table(only=options.contender)
        else:
            found[name] = PARTS[name]()
        found["machine"] = facts()
        TARGET.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        TARGET.with_suffix(".md").write_text(report(found), encoding="utf-8")
    return int(not good(json.loads(TARGET.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    sys.exit(main())
