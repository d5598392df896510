"""How fast attention is on this machine, next to torch and others: ``python -m regard.bench``, two minutes.

Each case is a call and other ways to compute the same. Every result is first compared with the formula in float64, and
a wrong one is not timed. Then the contenders take turns, so that a change of the machine's speed touches all of them.
The table and the picture can be pasted into an issue.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

import regard
from regard import masks, scores
from regard.engines.fused import library

__all__ = ["main"]

Call = Callable[[], Tensor]

#: A result may be so far from float64, relative to the largest entry.
TOLERANCE = 1e-3
#: Rounds of a contender: at least, even if they take longer than planned, and at most.
FEWEST, MOST = 3, 50
#: Packages that take part where they are installed, and whose versions the report states.
OTHERS = ("torch", "numpy", "pykeops", "entmax")


@dataclass
class Case:
    """A computation, its exact result, and what computes it. A builder returns a call, after what is done only once."""

    title: str
    exact: Call
    contenders: dict[str, Callable[[], Call]]


@dataclass
class Outcome:
    """What a contender did: seconds of its rounds, or why there are none."""

    name: str
    seconds: list[float] = field(default_factory=list)
    problem: str = ""

    @property
    def median(self) -> float:
        """The median time in seconds, NaN without any."""
        return statistics.median(self.seconds) if self.seconds else math.nan


# Cases ----------------------------------------------------------------------------------------------------------------


def cases() -> Iterator[Callable[[], Case]]:
    """Yield a builder of each case: its tensors exist only while it runs."""
    yield from (_plain, _small, _window, _documents, _additive, _additive_gradients, _sparse, _kernel_regression)


def _rows(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(shape, generator=generator) for _ in range(3))
    return query, key, value


def _dense(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None = None) -> Tensor:
    """Return attention by its formula, in the dtype of the rows."""
    found = query @ key.mT / query.shape[-1] ** 0.5
    if visible is not None:
        found = found.masked_fill(~visible, -math.inf)
    return found.softmax(-1) @ value


def _exact(*rows: Tensor, visible: Tensor | None = None) -> Call:
    return lambda: _dense(*(each.double() for each in rows), visible=visible)


def _plain() -> Case:
    q, k, v = _rows(1, 8, 1024, 64)
    return Case(
        "No mask: 8 heads of 64, 1,024 tokens",
        _exact(q, k, v),
        {
            "regard": lambda: lambda: regard.attention(q, k, v),
            "torch SDPA": lambda: lambda: F.scaled_dot_product_attention(q, k, v),
            "eager formula": lambda: lambda: _dense(q, k, v),
        },
    )


def _small() -> Case:
    q, k, v = _rows(1, 8, 64, 64)
    return Case(
        "A small causal call: 8 heads of 64, 64 tokens",
        _exact(q, k, v, visible=torch.ones(64, 64, dtype=torch.bool).tril()),
        {
            "regard": lambda: lambda: regard.attention(q, k, v, is_causal=True),
            "torch SDPA": lambda: lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        },
    )


def _flex(q: Tensor, k: Tensor, v: Tensor, predicate: Callable[..., Tensor]) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length = q.shape[-2]
    block_mask = create_block_mask(predicate, None, None, length, length, device="cpu")
    compiled = torch.compile(flex_attention)

    def call() -> Tensor:
        result: Tensor = compiled(q, k, v, block_mask=block_mask)
        return result

    call()
    return call


def _window() -> Case:
    q, k, v = _rows(1, 8, 2048, 64)
    i = torch.arange(2048)
    visible = (i[:, None] >= i) & (i[:, None] - i <= 256)
    mask = masks.causal() & masks.window(256, 0)
    return Case(
        "A causal window of 256: 8 heads of 64, 2,048 tokens",
        _exact(q, k, v, visible=visible),
        {
            "regard": lambda: lambda: regard.attention(q, k, v, mask),
            "torch SDPA, dense mask": lambda: lambda: F.scaled_dot_product_attention(q, k, v, visible),
            "FlexAttention, compiled": lambda: _flex(q, k, v, lambda _b, _h, i, j: (i >= j) & (i - j <= 256)),
        },
    )


def _documents() -> Case:
    q, k, v = _rows(1, 8, 2048, 64)
    ids = torch.arange(2048) // 128
    visible = ids[:, None] == ids
    return Case(
        "16 packed documents of 128: 8 heads of 64",
        _exact(q, k, v, visible=visible),
        {
            "regard": lambda: lambda: regard.attention(q, k, v, masks.document(ids)),
            "torch SDPA, dense mask": lambda: lambda: F.scaled_dot_product_attention(q, k, v, visible),
            "FlexAttention, compiled": lambda: _flex(q, k, v, lambda _b, _h, i, j: ids[i] == ids[j]),
        },
    )


def _bahdanau(q: Tensor, k: Tensor, v: Tensor, w_v: Tensor, w_q: Tensor, w_k: Tensor) -> Tensor:
    features = torch.tanh((q @ w_q.mT)[..., :, None, :] + (k @ w_k.mT)[..., None, :, :])
    return (features @ w_v).softmax(-1) @ v


def _additive(backward: bool = False) -> Case:
    generator = torch.Generator().manual_seed(1)
    sizes = [(1, 1, 384, 64)] * 3 + [(64,), (64, 64), (64, 64)]
    given = [torch.randn(size, generator=generator) / 4 for size in sizes]

    def result(compute: Callable[..., Tensor], tensors: Sequence[Tensor] = given) -> Tensor:
        if not backward:
            return compute(*tensors)
        leaves = [each.detach().requires_grad_() for each in tensors]
        return torch.cat([grad.flatten() for grad in torch.autograd.grad(compute(*leaves).square().sum(), leaves)])

    def ours(q: Tensor, k: Tensor, v: Tensor, *weights: Tensor) -> Tensor:
        return regard.attention(q, k, v, score=scores.Additive(*weights))

    def compiled() -> Call:
        code = torch.compile(_bahdanau)
        return lambda: result(code)

    return Case(
        "Additive (Bahdanau) attention, 384 × 384" + (", forward and backward" if backward else ""),
        lambda: result(_bahdanau, [each.double() for each in given]),
        {
            "regard": lambda: lambda: result(ours),
            "eager formula": lambda: lambda: result(_bahdanau),
            "formula, torch.compile": compiled,
        },
    )


def _additive_gradients() -> Case:
    return _additive(backward=True)


def _sparse() -> Case:
    q, k, v = _rows(1, 4, 512, 64)

    def sorting(rows: Tensor) -> Tensor:
        """Return sparsemax by its definition: sort, and find the threshold (Martins & Astudillo 2016)."""
        ranked = rows.sort(-1, descending=True).values
        count = torch.arange(1, rows.shape[-1] + 1)
        sums = ranked.cumsum(-1) - 1
        size = (count * ranked > sums).sum(-1, keepdim=True)
        return (rows - sums.gather(-1, size - 1) / size).clamp(min=0)

    def formula(*rows: Tensor) -> Tensor:
        query, key, value = rows
        return sorting(query @ key.mT / 8) @ value

    def published() -> Call:
        from entmax import sparsemax

        return lambda: torch.as_tensor(sparsemax(q @ k.mT / 8, dim=-1)) @ v

    contenders: dict[str, Callable[[], Call]] = {
        "regard": lambda: lambda: regard.attention(q, k, v, normalizer="sparsemax"),
        "eager formula": lambda: lambda: formula(q, k, v),
        "entmax (package)": published,
    }
    return Case("Sparsemax: 4 heads of 64, 512 tokens", lambda: formula(q.double(), k.double(), v.double()), contenders)


def _kernel_regression() -> Case:
    generator = torch.Generator().manual_seed(2)
    x, y, b = (torch.rand(size, generator=generator) for size in ((4000, 3), (4000, 3), (4000, 1)))

    def formula(x: Tensor, y: Tensor, b: Tensor) -> Tensor:
        return (-torch.cdist(x, y).square() / (2 * 0.1**2)).softmax(-1) @ b

    def keops() -> Call:
        from pykeops.torch import LazyTensor

        def call() -> Tensor:
            scores = -((LazyTensor(x[:, None]) - LazyTensor(y[None])) ** 2).sum(-1) / (2 * 0.1**2)
            result: Tensor = scores.sumsoftmaxweight(LazyTensor(b[None]), axis=1)
            return result

        call()
        return call

    return Case(
        "Gaussian kernel regression, 4,000 points in 3-D",
        lambda: formula(x.double(), y.double(), b.double()),
        {
            "regard": lambda: lambda: regard.attention(x, y, b, score=scores.Gaussian(0.1)),
            "cdist and softmax": lambda: lambda: formula(x, y, b),
            "KeOps": keops,
        },
    )


# Measure --------------------------------------------------------------------------------------------------------------


def measure(case: Case, seconds: float) -> list[Outcome]:
    """Check and time a case for about so many seconds; what cannot run, or is wrong, says why."""
    exact = case.exact()
    outcomes, calls = [], {}
    for name, build in case.contenders.items():
        outcome = Outcome(name)
        outcomes.append(outcome)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of compilers, about this machine
                call = build()
                found = call()
        except ModuleNotFoundError as error:
            outcome.problem = f"{error.name} is not installed"
            continue
        except Exception as error:  # a compiler may fail in any way; the report says how
            outcome.problem = f"failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:120]}"
            continue
        wrong = float((found.double() - exact).abs().max() / exact.abs().max())
        if not wrong <= TOLERANCE:
            outcome.problem = f"wrong by {wrong:.1g} of the largest entry: not timed"
            continue
        calls[name] = call
    del exact
    ends = time.monotonic() + seconds
    for turn in range(MOST):
        if turn >= FEWEST and time.monotonic() > ends:
            break
        for outcome in outcomes:
            if outcome.name in calls:
                began = time.perf_counter()
                calls[outcome.name]()
                outcome.seconds.append(time.perf_counter() - began)
    return outcomes


def machine() -> dict[str, str]:
    """Return the facts that a reader of the numbers needs."""
    facts = {"date": time.strftime("%Y-%m-%d"), "CPU": _processor(), "system": platform.platform()}
    facts["threads"] = f"{torch.get_num_threads()} of {os.cpu_count()} cores"
    if hasattr(os, "getloadavg"):
        facts["load average"] = f"{os.getloadavg()[0]:.1f} before the start"
    facts["compiled kernels"] = library.problem() or "loaded"
    facts["Python"] = platform.python_version()
    facts["regard"] = regard.__version__
    for name in OTHERS:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = "not installed"
    return facts


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # no Linux: the platform module knows it there
    return platform.processor() or platform.machine()


# Report ---------------------------------------------------------------------------------------------------------------


def table(found: dict[str, list[Outcome]], facts: dict[str, str]) -> str:
    """Return the report in Markdown."""
    lines = ["| | regard | compared with | | speed |", "| --- | ---: | --- | ---: | ---: |"]
    for title, (ours, *others) in found.items():
        for other in others:
            took = other.problem or _shown(other.median)
            speed = f"{other.median / ours.median:.2f} ×" if ours.seconds and other.seconds else ""
            lines.append(f"| {title} | {ours.problem or _shown(ours.median)} | {other.name} | {took} | {speed} |")
    about = [f"{name}: {value}" for name, value in facts.items()]
    lines += [
        "",
        "*speed* is their time divided by ours: above 1, regard is faster. Medians of interleaved runs; every",
    ]
    lines += ["result was first checked against float64.", "", "; ".join(about)]
    return "\n".join(lines)


def _shown(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def picture(found: dict[str, list[Outcome]], facts: dict[str, str], path: Path) -> None:
    """Draw the ratios as bars."""
    from matplotlib.figure import Figure

    bars = [
        (f"{title}\n{other.name}", other.median / ours.median)
        for title, (ours, *others) in found.items()
        for other in others
        if ours.seconds and other.seconds
    ]
    figure = Figure(figsize=(8, 1 + 0.45 * len(bars)), layout="constrained")
    axis = figure.subplots()
    names, speeds = zip(*bars, strict=True)
    axis.barh(names, speeds, color=["C0" if speed >= 1 else "C3" for speed in speeds])
    axis.axvline(1, color="k", linewidth=1)
    axis.set(xscale="log", xlabel="their time / time of regard: right of 1, regard is faster")
    axis.tick_params("y", labelsize=7)
    axis.invert_yaxis()
    axis.set_title(f"regard {facts['regard']}, torch {facts['torch']}, {facts['CPU']}", fontsize=9)
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, and write it with a picture."""
    parser = argparse.ArgumentParser("python -m regard.bench", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of measuring; compiling adds to them (default: 60)"
    )
    parser.add_argument("--out", type=Path, default=Path(), help="folder of regard-bench.md and .png (default: here)")
    options = parser.parse_args(arguments)
    if not options.seconds > 0:
        parser.error(f"--seconds must be positive, got {options.seconds:g}")
    if not options.out.is_dir() or not os.access(options.out, os.W_OK):
        parser.error(f"--out must be a folder that can be written, got {options.out}")
    facts, found, builders = machine(), {}, list(cases())
    for number, build in enumerate(builders, 1):
        case = build()
        print(f"{number} of {len(builders)}: {case.title}", file=sys.stderr, flush=True)
        found[case.title] = measure(case, options.seconds / len(builders))
    report = table(found, facts)
    print(report)
    (options.out / "regard-bench.md").write_text(report + "\n", encoding="utf-8")
    written = "regard-bench.md"
    if find_spec("matplotlib") is None:
        print("There is no picture: pip install 'regard[plot]'", file=sys.stderr)
    else:
        picture(found, facts, options.out / "regard-bench.png")
        written += " and regard-bench.png"
    print(f"Wrote {written} to {options.out.resolve()}.", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
