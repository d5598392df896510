"""Everything that only a machine with a GPU can check and time; ``make gpu`` runs it.

    python -m benchmarks.gpu [--part conformance|campaign|sanitizer|benchmarks] [--row NAME] [--seconds N] [--out DIR]

Needs torch, NumPy and Triton, the C compiler and Python headers that Triton builds its launchers with, and no network:
a clone with ``PYTHONPATH=src`` will do. Each part has a share of ``--seconds`` (default 520) and stops when it is used
up; the report says what it did not reach. Parts can run one by one: each replaces its own section of
benchmarks/results/<device>.json, from which <device>.md is written. Both are written while a part runs, so that a run
that is killed keeps what it found. A process whose GPU a faulty kernel has made unusable is replaced.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import gpu_cases
from benchmarks.gpu_cases import OURS, ROWS, Sizes, Task, Tensors
from benchmarks.machine import ROOT, facts, slug
from benchmarks.registry import MissingError
from regard import engines
from regard.engines import Engine
from regard.testing import campaign
from regard.testing.case import Case, CaseCall, gradients, normalizer_names, score_names
from regard.testing.case_generator import CaseSampler
from regard.testing.conformance import combinations, draw_for, judge
from regard.testing.laws import LAWS

#: The parts, in order, with their shares of the time.
SHARES = {"conformance": 0.22, "campaign": 0.16, "sanitizer": 0.16, "benchmarks": 0.46}
#: Seconds between reports of a part.
PAUSE = 5.0
#: Seconds that a case, or a comparison, may take before its process is replaced.
PATIENCE = 120.0
#: The laws that are checked for every (score, normalizer, dtype); the campaign draws from all laws.
SWEPT = ("budget", "gradient budget", "no leak", "empty rows", "aux", "determinism")
ROUNDS = 5
#: Seconds that a sample lasts at least.
SAMPLE = 0.02
#: Seconds of a call from which on two rounds must do.
SLOW = 0.5
#: How many times the error of the plain formula in the same dtype a result may have and still be timed.
SLACK = 4.0
#: How many processes a row may end before its other settings are left out.
FAILURES = 2
#: What a process of the sanitizer returns if it found something.
FOUND = 9


@dataclass(frozen=True)
class Settings:
    """What the parts run on."""

    device: str
    divisor: int
    workers: int
    rows: tuple[str, ...]

    def engines(self) -> list[Engine]:
        """Return the engines that run a plain call on the device."""
        call = CaseCall.of(Case(device=self.device))
        return [engine for engine in engines.TABLE.values() if call.refusal(engine) is None]


# Conformance: laws for every combination of parts and dtypes ----------------------------------------------------------


#: What a part found so far, as its section of the file has it; "progress" is printed.
Part = dict[str, Any]
#: A law, an engine, and the (score, normalizer, dtype) of a case.
Item = tuple[str, str, tuple[str, str, str]]


@cache
def items(names: tuple[str, ...], device: str) -> list[Item]:
    """Return every combination, in a random order that is always the same."""
    found = [
        (law, name, combination)
        for name in names
        for combination in dict.fromkeys(combinations(engines.TABLE[name], device))
        for law in SWEPT
    ]
    random.Random(0).shuffle(found)
    return found


def conforms(names: tuple[str, ...], device: str, index: int) -> tuple[str, str]:
    """Return the outcome for one combination, and the reason if a law is broken."""
    law, name, combination = items(names, device)[index]
    case = draw_for(CaseSampler(index), LAWS[law], engines.TABLE[name], [combination], device=device)
    if case is None:
        return "no case", ""
    verdict = judge(law, name, case)
    return verdict.outcome, str(verdict) if verdict.outcome == "broken" else ""


def conformance(settings: Settings, until: float) -> Iterator[Part]:
    """Check laws for every score, normalizer and dtype on every engine that runs on the device."""
    names = tuple(engine.name for engine in settings.engines())
    every = items(names, settings.device)
    outcomes: dict[str, Counter[str]] = {name: Counter() for name in names}
    part: Part = {"engines": outcomes, "of": len(every), "done": 0, "broken": []}
    judged = partial(conforms, names, settings.device)
    for index, found in campaign.answers(judged, range(len(every)), settings.workers, PATIENCE, until):
        law, name, combination = every[index]
        if isinstance(found, campaign.Failure):
            found = ("broken", f"{law} / {name} / {combination}: {found}")
        outcomes[name][found[0]] += 1
        part["done"] += 1
        part["broken"] += [found[1]] if found[0] == "broken" else []
        part["progress"] = f"{part['done']:,} of {len(every):,} combinations"
        yield part
    yield part


# The campaign: random cases of all laws -------------------------------------------------------------------------------


def campaigned(settings: Settings, until: float) -> Iterator[Part]:
    """Draw cases of all laws until the time is up."""
    names = tuple(engine.name for engine in settings.engines())
    laws = tuple(name for name in LAWS if name != "compiled")  # each compiles for seconds
    plan, tally = campaign.Plan(0, laws, names, device=settings.device), campaign.Tally()
    for found in campaign.entries(plan, range(1_000_000), settings.workers, PATIENCE, until):
        tally.add(found)
        yield _tallied(tally)
    yield _tallied(tally)


def _tallied(tally: campaign.Tally) -> Part:
    broken = [each.reason for each in tally.broken]
    return {"cases": tally.total(), "table": tally.table(), "broken": broken, "progress": f"{tally.total():,} cases"}


# The sanitizer: one pass of every kernel ------------------------------------------------------------------------------


def one_pass(settings: Settings, until: float) -> Iterator[int]:
    """Run our kernels, then every other engine, for each score, normalizer and dtype, backward too; count the calls."""
    for count, call in enumerate(_calls_of_a_pass(settings), 1):
        if time.monotonic() > until:
            return
        call()
        yield count


def _calls_of_a_pass(settings: Settings) -> Iterator[Callable[[], Any]]:
    found = [engine for engine in settings.engines() if engine.name != "reference"]
    ours = [engine for engine in found if engine.name == "triton"]
    for engine in ours:
        yield from _calls_of(engine, settings.device)
    small = Sizes(settings.device, max(settings.divisor, 128))
    for task in [*ROWS["linear"](small), *ROWS["decoding"](small), *ROWS["paged"](small)]:
        tensors = {name: each.detach().requires_grad_(task.backward) for name, each in task.tensors.items()}
        yield call_of(task, task.contenders[OURS](tensors), tensors)
    for engine in (each for each in found if each not in ours):
        yield from _calls_of(engine, settings.device)


def _calls_of(engine: Engine, device: str) -> Iterator[Callable[[], Any]]:
    pairs = [*((score, "softmax") for score in score_names()), *(("scaled_dot", name) for name in normalizer_names())]
    cases = ((dtype, *pair) for dtype in ("bfloat16", "float32", "float16") for pair in pairs)
    for count, (dtype, score, normalizer) in enumerate(cases):
        mask = ("and", ("causal", "lower_right"), ("key_padding", False)) if count % 2 else None
        case = Case(score, normalizer, dtype, (2,), 2, 2, 67, 131, 16, 0, 16, mask, device=device, seed=count)
        call = CaseCall.of(case)
        if call.refusal(engine) is None:
            yield partial(_both_ways, call, engine)


def _both_ways(call: CaseCall, engine: Engine) -> None:
    leaves = call.leaves()
    output, _ = call.run_with_aux(engine, topk=2, entropy=True)
    if output.requires_grad:
        gradients(output, leaves, torch.ones_like(output))


def sanitized(settings: Settings, until: float) -> Iterator[Part]:
    """Run one pass of every kernel under compute-sanitizer, in a process of its own."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        yield {"skipped": "compute-sanitizer is not installed here"}
        return
    own = [sys.executable, "-m", "benchmarks.gpu", "--part", "pass", "--device", settings.device]
    own += ["--seconds", str(max(until - time.monotonic() - 20, 10))]
    command = [tool, "--tool", "memcheck", "--error-exitcode", str(FOUND), *own]
    # A cache would hand out one large allocation, within which nothing is out of bounds.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    code = None
    try:
        run = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=until - time.monotonic(), check=False
        )
        said, code = run.stdout + run.stderr, run.returncode
    except subprocess.TimeoutExpired as error:  # what it wrote is bytes, whatever was asked for
        said = b"".join(each for each in (error.stdout, error.stderr) if isinstance(each, bytes)).decode()
    calls, ended = _calls(said), "was stopped when its time was up" if code is None else f"ended with code {code}"
    wrong = code not in (0, None) or "========= Invalid" in said
    yield {"calls": calls, "code": code, "said": said[-4000:], "progress": f"{calls} calls, {ended}"} | {
        "broken": [f"compute-sanitizer {ended}:\n{said[-4000:]}"] if wrong else []
    }


def _calls(said: str) -> int:
    found = [line.split()[0] for line in said.splitlines() if line.endswith(" calls")]
    return int(found[-1]) if found else 0


# Benchmarks -----------------------------------------------------------------------------------------------------------


def call_of(task: Task, forward: Callable[[], Tensor], tensors: Tensors) -> Callable[[], Any]:
    """Return the call of a forward pass, and of the gradients where the task wants them."""
    if not task.backward:
        return forward
    inputs = list(tensors.values())

    def both() -> tuple[Tensor, ...]:
        output = forward()
        return output, *torch.autograd.grad(output, inputs, torch.ones_like(output), allow_unused=True)

    return both


def results(task: Task, make: gpu_cases.Make, tensors: Tensors, sampled: bool) -> list[Tensor]:
    """Return output and gradients at the checked rows, for an output gradient at those rows alone."""
    with torch.set_grad_enabled(task.backward):
        output = make(tensors)()
        rows = output if sampled else output[:, :, task.rows]
        found = [rows.detach()]
        if task.backward:
            generator = torch.Generator().manual_seed(1)
            grad = torch.randn(rows.shape, generator=generator).to(rows.device, rows.dtype)
            found += torch.autograd.grad(rows, list(tensors.values()), grad)
    return [each.double() for each in found]


def checker(task: Task) -> Callable[[gpu_cases.Make], str]:
    """Return a function that says what is wrong with a contender, or nothing."""

    def leaves(dtype: torch.dtype | None) -> Tensors:
        made = {name: t.detach().to(t.dtype if dtype is None else dtype) for name, t in task.tensors.items()}
        return {name: t.requires_grad_(task.backward) for name, t in made.items()}

    def formula(tensors: Tensors) -> Callable[[], Tensor]:
        return lambda: task.truth(tensors, task.rows)

    truth = results(task, formula, leaves(torch.float64), True)
    eager = results(task, formula, leaves(None), True)
    limits = [max(SLACK * float((e - t).abs().max()), task.exact * float(t.abs().max())) for e, t in zip(eager, truth)]

    def wrong(make: gpu_cases.Make) -> str:
        found = results(task, make, leaves(None), False)
        names = ["output", *(f"gradient to {name}" for name in task.tensors)]
        for name, got, right, limit in zip(names, found, truth, limits):
            off = float((got - right).abs().max())
            if not off <= limit:
                return f"{name} is off by {off:.3g}; the limit is {limit:.3g}"
        return ""

    return wrong


class Clock:
    """Seconds of calls on a device, by its own events where it has them."""

    def __init__(self, device: str) -> None:
        self.on_gpu = torch.device(device).type == "cuda"

    def seconds(self, call: Callable[[], Any], loops: int) -> float:
        """Return the seconds of a call, the mean of so many."""
        if not self.on_gpu:
            began = time.perf_counter()
            for _ in range(loops):
                call()
            return (time.perf_counter() - began) / loops
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(loops):
            call()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3 / loops

    def interleaved(self, calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
        """Time calls in turn, after a warm-up of each."""
        loops, slowest = {}, 0.0
        for name, call in calls.items():
            call()
            once = self.seconds(call, 1)
            loops[name], slowest = max(1, min(round(SAMPLE / max(once, 1e-7)), 200)), max(slowest, once)
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(2 if slowest > SLOW else rounds):
            for name, call in calls.items():
                samples[name].append(self.seconds(call, loops[name]))
        return samples


def device_limits(settings: Settings) -> dict[str, float]:
    """Return operations per second of matrix products, bytes per second of a copy, and tanh per second."""
    clock, side = Clock(settings.device), max(8192 // settings.divisor, 64)
    found = {}
    with torch.no_grad():
        for name, dtype in (("bf16", torch.bfloat16), ("float32", torch.float32)):
            a, b = torch.randn(2, side, side, device=settings.device).to(dtype)
            best = min(clock.interleaved({name: lambda a=a, b=b: a @ b}, ROUNDS)[name])
            found[name] = 2.0 * side**3 / best
        source = torch.ones(max(2**31 // settings.divisor**2, 2**16), device=settings.device, dtype=torch.uint8)
        target = torch.empty_like(source)
        found["bytes"] = 2.0 * source.numel() / min(clock.interleaved({"": lambda: target.copy_(source)}, ROUNDS)[""])
    if clock.on_gpu:  # 16 results of a special function per multiprocessor and cycle
        about = torch.cuda.get_device_properties(settings.device)
        found["tanh"] = 16.0 * about.multi_processor_count * 1e3 * getattr(about, "clock_rate", 1_755_000)
    return found


def timed(task: Task, limits: dict[str, float], clock: Clock) -> dict[str, Any]:
    """Check a task's contenders, time those that are right, and return what was found."""
    entry: dict[str, Any] = {"row": task.row, "setting": task.setting, "backward": task.backward, "limit": task.limit}
    wrong = checker(task)
    calls: dict[str, Callable[[], Any]] = {}
    reasons = {}
    tensors = {name: t.requires_grad_(task.backward) for name, t in task.tensors.items()}
    for name, make in task.contenders.items():
        try:
            reason = wrong(make)
            with torch.set_grad_enabled(task.backward):
                call = call_of(task, make(tensors), tensors)
        except MissingError as error:
            reasons[name] = f"not run: {error}"
        except Exception as error:  # another library's, or a kernel's: the report says which
            reasons[name] = f"failed: {type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
        else:
            other = "other work" in name or "plain call" in name
            if reason and not other:
                reasons[name] = f"wrong: {reason}"
            else:
                calls[name] = call
    with torch.set_grad_enabled(task.backward):
        samples = clock.interleaved(calls, ROUNDS)
    medians = {name: sorted(each)[len(each) // 2] for name, each in samples.items()}
    entry["seconds"], entry["samples"], entry["not timed"] = medians, samples, reasons
    if OURS in medians:
        entry["ratios"] = {name: s / medians[OURS] for name, s in medians.items() if name != OURS}
        if task.limit in limits:
            entry["share"] = task.work / medians[OURS] / limits[task.limit]
    return entry


#: More than the settings of any row.
_MOST = 100


def comparison(settings: Settings, limits: dict[str, float], place: int) -> dict[str, Any] | None:
    """Return what was found of one setting of one row; None if the row has fewer settings."""
    row, number = settings.rows[place // _MOST], place % _MOST
    task = next(islice(ROWS[row](Sizes(settings.device, settings.divisor)), number, None), None)
    if task is None:
        return None
    try:
        return timed(task, limits, Clock(settings.device))
    except RuntimeError as error:  # above all, too little memory for the check
        return _unfinished(row, task.setting, f"not checked: {str(error).splitlines()[0][:200]}", task)
    finally:
        if settings.device.startswith("cuda"):
            del task
            with suppress(RuntimeError):  # of a device that a kernel has made unusable
                torch.cuda.empty_cache()


def _unfinished(row: str, setting: str, reason: str, task: Task | None = None) -> dict[str, Any]:
    about = {"backward": task is not None and task.backward, "limit": "" if task is None else task.limit}
    return {"row": row, "setting": setting, **about, "seconds": {}, "samples": {}, "not timed": {OURS: reason}}


def benchmarks(settings: Settings, until: float) -> Iterator[Part]:
    """Time every row of the table, or the rows that were named, each setting in a process that can be replaced."""
    limits, queue = device_limits(settings), deque(range(len(settings.rows)))
    part: Part = {"limits": limits, "tasks": [], "rows": [], "broken": []}
    part["not reached"] = list(settings.rows)

    def places() -> Iterator[int]:
        while queue:
            row = queue[0]
            yield from takewhile(lambda _: row in queue, range(row * _MOST, (row + 1) * _MOST))  # noqa: B023

    yield part
    failures: Counter[str] = Counter()
    workers = min(settings.workers, 1)  # which takes turns with nobody
    for place, found in campaign.answers(partial(comparison, settings, limits), places(), workers, PATIENCE, until):
        row = settings.rows[place // _MOST]
        if found is None:
            queue.popleft()
            part["rows"].append(row)
            part["not reached"].remove(row)
            continue
        if isinstance(found, campaign.Failure):
            failures[row] += 1
            if failures[row] == FAILURES:
                queue.popleft()
            found = _unfinished(row, f"setting {place % _MOST + 1}", f"not timed: {found}")
        part["tasks"].append(found)
        part["broken"] = [f"{e['setting']}: {e['not timed'][OURS]}" for e in part["tasks"] if OURS in e["not timed"]]
        part["progress"] = _line(found)
        yield part
    yield part


# The report -----------------------------------------------------------------------------------------------------------


def _line(entry: dict[str, Any]) -> str:
    """Return a row of the report's table."""
    seconds = entry["seconds"]
    what = f"{entry['setting']}{', forward + backward' if entry['backward'] else ''}"
    if OURS not in seconds:
        return f"| {entry['row']} | {what} | {entry['not timed'][OURS]} | | |"
    others = [f"{name} {ratio:.2f} ×" for name, ratio in entry["ratios"].items()]
    others += [f"{name} {reason}" for name, reason in entry["not timed"].items()]
    share = f"{entry['share']:.0%} of {entry['limit']}" if "share" in entry else ""
    return f"| {entry['row']} | {what} | {1e3 * seconds[OURS]:.3f} ms | {'; '.join(others)} | {share} |"


def markdown(found: dict[str, Any]) -> str:
    """Return the report."""
    parts = found["parts"]
    lines = [f"# On {found['device']}", ""]
    for name, part in parts.items():
        lines += [f"## {name.capitalize()}", "", f"{part['date']}, {part['took']:.0f} s, {part['versions']}.", ""]
        if "skipped" in part:
            lines += [f"Not run: {part['skipped']}.", ""]
        if name == "conformance":
            lines += [
                f"{part['done']:,} of {part['of']:,} combinations of law, engine, score, normalizer and dtype.", "",
                "| engine | held | refused | no case | broken |", "| --- | ---: | ---: | ---: | ---: |",
            ]  # fmt: skip
            for engine, counts in part["engines"].items():
                cells = [str(counts.get(each, 0)) for each in ("held", "refused", "no case", "broken")]
                lines.append(f"| {engine} | {' | '.join(cells)} |")
            lines.append("")
        if name == "campaign":
            lines += [f"{part['cases']:,} cases.", "", "```", part["table"], "```", ""]
        if name == "sanitizer" and "calls" in part:
            ended = "stopped when its time was up" if part["code"] is None else f"exit code {part['code']}"
            lines += [f"{part['calls']} calls under compute-sanitizer, {ended}.", ""]
        if name == "benchmarks":
            lines += _benchmarked(part)
        if part.get("broken"):
            lines += ["Broken:", "", "```", *part["broken"], "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def _benchmarked(part: dict[str, Any]) -> list[str]:
    units = {"bf16": (1e12, "TFLOP/s of bf16 products"), "float32": (1e12, "TFLOP/s of float32 products")}
    units |= {"bytes": (1e9, "GB/s of a copy"), "tanh": (1e12, "T tanh/s, of the clock and the number of units")}
    limits = ", ".join(f"{part['limits'][name] / unit:,.1f} {what}" for name, (unit, what) in units.items() if name in part["limits"])  # fmt: skip  # noqa: E501
    lines = [
        f"This device: {limits}. Every result was checked against float64 first; contenders took turns. A ratio is the "
        "other's median time over regard's: above 1, regard is faster. The last column is the share of the device's "
        "limit that regard reached.",
        "", "| row | setting | regard | others | share |", "| --- | --- | ---: | --- | ---: |",
        *map(_line, part["tasks"]), "",
    ]  # fmt: skip
    return lines + ([f"Not done in time: {', '.join(part['not reached'])}.", ""] if part["not reached"] else [])


def _say(text: str) -> None:
    print(text, flush=True)


def _write(out: Path, device: str, name: str, part: dict[str, Any]) -> Path:
    """Put a part into the results of a device."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{slug(device)}.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"parts": {}}
    found["device"] = device
    if name == "benchmarks" and name in found["parts"]:  # what was not timed now keeps its numbers
        timed_now = {(each["row"], each["setting"], each["backward"]) for each in part["tasks"]}
        kept = [
            each
            for each in found["parts"][name]["tasks"]
            if each["row"] not in part["rows"] and (each["row"], each["setting"], each["backward"]) not in timed_now
        ]
        part = {**part, "tasks": sorted(kept + part["tasks"], key=lambda each: list(ROWS).index(each["row"]))}
    found["parts"] = {each: part if each == name else found["parts"].get(each) for each in SHARES}
    found["parts"] = {each: value for each, value in found["parts"].items() if value is not None}
    texts = {path: json.dumps(found, indent=1, ensure_ascii=False) + "\n", path.with_suffix(".md"): markdown(found)}
    for target, text in texts.items():
        temporary = target.with_name(f"{target.name}.new")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(target)  # whole, whenever the run is killed
    return path.with_suffix(".md")


def _versions() -> str:
    where = facts()
    triton = next(iter(_version("triton")), "not installed")
    return f"python {where['python']}, torch {torch.__version__}, triton {triton}, regard {where['regard']}"


def _version(package: str) -> Iterator[str]:
    try:
        yield str(__import__(package).__version__)
    except ImportError:
        return


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; return 1 if something is broken, and 2 if there is no such device."""
    made = argparse.ArgumentParser("python -m benchmarks.gpu", description=__doc__)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    made.add_argument("--part", action="append", choices=[*SHARES, "pass"], help="run this part alone (repeatable)")
    made.add_argument("--row", action="append", choices=list(ROWS), help="time this row alone (repeatable)")
    made.add_argument("--seconds", type=float, default=520.0, help="for all parts together (default: 520)")
    made.add_argument("--device", default="cuda", help="default: cuda")
    made.add_argument("--divisor", type=int, default=1, help="divide lengths by this, for a trial run (default: 1)")
    workers = max(1, min((os.cpu_count() or 1) - 2, 12))
    made.add_argument("--workers", type=int, default=workers, help=f"processes; 0 for this one (default: {workers})")
    made.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the report")
    given = made.parse_args(argv)
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        print("This machine has no GPU that torch can use, and `make gpu` checks and times what runs on one.")
        return 2
    rows = tuple(row for row in ROWS if not given.row or row in given.row)
    settings = Settings(given.device, given.divisor, given.workers, rows)
    if given.part == ["pass"]:
        for count in one_pass(settings, time.monotonic() + given.seconds):
            _say(f"{count} calls")
        return 0
    lacking = _lacking(given.device)
    if lacking:
        print(lacking)
        return 2
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # each of the workers would start as many as cores
    device = torch.cuda.get_device_name() if given.device.startswith("cuda") else f"stand-in {given.device}"
    run = {"conformance": conformance, "campaign": campaigned, "sanitizer": sanitized, "benchmarks": benchmarks}
    parts = [name for name in SHARES if not given.part or name in given.part]
    total, broken = sum(SHARES[name] for name in parts), 0
    _say(f"{', '.join(parts)} on {device}, {given.seconds:.0f} s; {_versions()}")
    for name in parts:
        began = written = time.monotonic()
        part: Part = {}
        about = {"date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "versions": _versions()}
        for part in run[name](settings, began + given.seconds * SHARES[name] / total):
            now = time.monotonic()
            if name == "benchmarks" or now - written > PAUSE:
                _write(given.out, device, name, {**part, **about, "took": now - began})
                _say(f"{name}, {now - began:.0f} s: {part.get('progress', 'started')}")
                written = now
        took = time.monotonic() - began
        path = _write(given.out, device, name, {**part, **about, "took": took})
        found = part.get("broken", [])
        for each in found[:20]:
            _say(each)
        broken += len(found)
        said = part.get("skipped") or part.get("progress", "")
        _say(f"{name} took {took:.0f} s, {len(found)} broken. {'' if name == 'benchmarks' else said}".rstrip())
        _say(str(path))
    return 1 if broken else 0


def _lacking(device: str) -> str:
    """Return what Triton lacks to launch kernels; the empty string if it has everything."""
    if not device.startswith("cuda"):
        return ""
    if not any(map(shutil.which, filter(None, (os.environ.get("CC"), "gcc", "clang")))):
        return "Triton needs a C compiler to launch kernels, and finds neither gcc nor clang: set CC to one."
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if not headers.exists():
        return f"Triton needs Python's headers to launch kernels, and {headers} does not exist."
    return ""


if __name__ == "__main__":
    sys.exit(main())
