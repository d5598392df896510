"""Small models as the planner predicts them, and as measured: ``python -m benchmarks.planning``.

Parameters are those of the built model; operations those of torch's counter, which counts every pair of tokens whatever
the mask; activations the bytes that torch keeps between forward and backward; memory the peak of a process over two
training steps in float32 with AdamW and all logits at once. The time of a step is predicted from the operations that
the mask leaves and the rate of one matrix product, a batch's rows with the first matrix of a feed-forward layer. Times
are CPU seconds of one thread, which other processes do not inflate; steps and products take turns; medians are
reported.

    python -m benchmarks.planning [--rounds 5] [--out FOLDER]

Writes benchmarks/results/planning.json and .md; ``python -m benchmarks.readme`` puts the tables into docs/planning.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import memory
from benchmarks.machine import ROOT, facts
from regard_lab.models import DecoderLM, DecoderLMConfig
from regard_lab.planner import (
    Layout,
    Recipe,
    Shape,
    activation_memory,
    executed_flops,
    published_rows,
    shape_of,
    training_memory,
    visible_pairs,
)

RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Case:
    """A small model, and the batch that it is trained on."""

    name: str
    config: DecoderLMConfig
    batch: int
    length: int

    @property
    def layout(self) -> Layout:
        return Layout(micro_batch=self.batch)

    @property
    def recipe(self) -> Recipe:
        return Recipe(self.length, "float32", chunk=None)

    @property
    def tokens(self) -> int:
        return self.batch * self.length


_LLAMA: dict[str, Any] = {"positions": "rotary", "norm": "rms", "activation": "silu", "gated": True, "bias": False}
CASES = (
    Case("GPT, width 256", DecoderLMConfig(4000, width=256, layers=4, heads=4, max_length=256), 4, 256),
    Case("GPT, width 512", DecoderLMConfig(4000, width=512, layers=6, heads=8, max_length=256), 2, 256),
    Case("GPT, 1,024 tokens", DecoderLMConfig(4000, width=256, layers=4, heads=4, max_length=1024), 1, 1024),
    Case(
        "GPT, window of 128", DecoderLMConfig(4000, width=256, layers=4, heads=4, max_length=1024, window=128), 1, 1024
    ),
    Case("GPT, vocabulary 32,000", DecoderLMConfig(32000, width=256, layers=4, heads=4, max_length=256), 2, 256),
    Case("Llama, width 384", DecoderLMConfig(4000, width=384, layers=4, heads=6, max_length=256, **_LLAMA), 4, 256),
)
QUICK = Case("GPT, width 32", DecoderLMConfig(50, width=32, layers=2, heads=2, max_length=16), 2, 16)


def prepared(case: Case) -> tuple[DecoderLM, Callable[[], float]]:
    """Return a model, and its training step; gradients keep their memory."""
    torch.manual_seed(0)
    model = DecoderLM(case.config)
    text = torch.randint(case.config.vocabulary, (case.batch, case.length + 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def step() -> float:
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return float(loss.detach())

    return model, step


def peak(case: Case, threads: int) -> int:
    """Return the bytes that a model, its optimizer and its steps hold at their peak; for a process of its own."""
    torch.set_num_threads(threads)
    memory.keep_nothing()
    small = replace(case, config=case.config.with_changes({"layers": 1, "vocabulary": 50}))
    prepared(small)[1]()

    def whole() -> None:
        step = prepared(case)[1]
        step()
        step()

    return memory.peak_extra(whole)


def kept(model: DecoderLM, case: Case) -> int:
    """Return the bytes of all storages that torch keeps for the backward pass of the features, without parameters."""
    tokens = torch.zeros(case.batch, case.length, dtype=torch.long)
    seen = {each.untyped_storage().data_ptr(): 0 for each in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        features = model.features(tokens)
    seen.setdefault(features.untyped_storage().data_ptr(), features.untyped_storage().nbytes())
    return sum(seen.values())


def counted(model: DecoderLM, case: Case) -> int:
    """Return the operations of a step that torch's counter finds."""
    tokens = torch.zeros(case.batch, case.length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    return counter.get_total_flops()


def timed(step: Callable[[], float], case: Case, rounds: int) -> tuple[float, float]:
    """Return the median seconds of a step, and the median operations per second of one product, of one thread."""
    a = torch.randn(case.tokens, case.config.width)
    b = torch.randn(case.config.width, case.config.hidden)
    steps, rates = [], []
    repeats = max(int(1e9 / (2 * a.numel() * b.shape[1])), 1)
    for turn in range(rounds + 1):
        began = time.process_time()
        for _ in range(repeats):
            a @ b
        between = time.process_time()
        step()
        if turn:
            rates.append(repeats * 2 * a.numel() * b.shape[1] / (between - began))
            steps.append(time.process_time() - between)
    return statistics.median(steps), statistics.median(rates)


def with_all_pairs(shape: Shape, case: Case) -> float:
    """Return the operations of a step where attention goes over every pair, as torch counts them."""
    flops = executed_flops(shape, case.length)
    share = case.length**2 / visible_pairs(case.length, shape.stacks[0].layer.attentions[0])
    return case.tokens * (flops.layers + flops.head + share * flops.attention)


def measured(case: Case, rounds: int) -> dict[str, Any]:
    """Return what was predicted and what was found."""
    shape = shape_of(case.config, case.name)
    threads = torch.get_num_threads()
    held = memory.fresh(peak, case, threads)
    model, step = prepared(case)
    found: dict[str, Any] = {"name": case.name, "batch": case.batch, "length": case.length}
    found["parameters"] = [shape.parameters, sum(each.numel() for each in model.parameters())]
    found["flops"] = [with_all_pairs(shape, case), counted(model, case)]
    found["activations"] = [activation_memory(shape, case.recipe, case.layout), kept(model, case)]
    found["memory"] = [training_memory(shape, case.recipe, case.layout).total, held]
    model.zero_grad(set_to_none=False)
    torch.set_num_threads(1)
    try:
        seconds, rate = timed(step, case, rounds)
    finally:
        torch.set_num_threads(threads)
    asked = case.tokens * executed_flops(shape, case.length).total
    return found | {"seconds": [asked / rate, seconds], "rate": rate}


#: What a column is called, what its numbers are divided by, and their digits.
COLUMNS = {
    "parameters": ("parameters", 1, 0), "flops": ("GFLOP per step", 1e9, 2),
    "activations": ("MB of activations", 1e6, 1), "memory": ("peak MB", 1e6, 1), "seconds": ("ms per step", 1e-3, 0),
}  # fmt: skip


def summary(numbers: dict[str, Any]) -> str:
    """Return the table: predicted, found, and found as a multiple of predicted."""
    lines = ["| model | what | predicted | measured | measured ÷ predicted |", "| --- | --- | ---: | ---: | ---: |"]
    for found in numbers["cases"]:
        for number, (name, (title, unit, digits)) in enumerate(COLUMNS.items()):
            predicted, took = found[name]
            model = f"{found['name']}; {found['batch']} × {found['length']:,} tokens" if not number else ""
            each = f"{predicted / unit:,.{digits}f} | {took / unit:,.{digits}f}"
            lines.append(f"| {model} | {title} | {each} | {took / predicted:.3f} |")
    return "\n".join(lines)


def published() -> str:
    """Return the table of published models as Markdown."""
    from regard_lab.cli.plan import markdown

    return markdown(published_rows())


def machine(numbers: dict[str, Any]) -> str:
    """Return where and when it was measured."""
    where = numbers["machine"]
    load = where["load average"].partition(";")[0]
    return f"{where['CPU']}, one thread, load average {load}; {where['date']}."


def report(numbers: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    said = "\n\n".join((__doc__ or "").split("\n\n")[1:2]).strip()
    lines = ["# Planner: predicted and measured", "", said, "", summary(numbers), "", "| | |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {name} | {value} |" for name, value in numbers["machine"].items())]) + "\n"


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print and write; return 1 where a count is another than predicted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that everything runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(given)
    where = facts() | {"date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "rounds": str(options.rounds)}
    cases = (QUICK,) if options.quick else CASES
    numbers = {"machine": where, "cases": [measured(case, options.rounds) for case in cases]}
    print(summary(numbers))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "planning.md").write_text(report(numbers), encoding="utf-8")
    (options.out / "planning.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    exact = (found[name] for found in numbers["cases"] for name in ("parameters", "flops"))
    return int(any(abs(took - predicted) > 1e-9 * predicted for predicted, took in exact))


if __name__ == "__main__":
    sys.exit(main())
