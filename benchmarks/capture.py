"""The cost of recording a model's attention.

    python -m benchmarks.capture [--rounds 15]

Random models of 6 layers of width 512 and 8 heads that read 512 tokens: GPT-2 of transformers on SDPA, and torch's
``nn.TransformerEncoder`` on its fast path. They take turns with and without :func:`regard.inspect.capture`; outputs
must be equal bit for bit before anything is timed. Times are CPU seconds of one thread, compared by the median ratio of
neighbouring turns. The last column is the size of all weights in float32, which a record does not need to store.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.decoding import interleaved
from benchmarks.machine import ROOT, facts
from regard.inspect import capture

RESULTS = ROOT / "benchmarks/results/capture.json"
LAYERS, WIDTH, HEADS, TOKENS = 6, 512, 8, 512


def gpt2() -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return GPT-2 of transformers, and a call of it."""
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=TOKENS, attn_implementation="sdpa")
    model, tokens = GPT2Model(config).eval(), torch.randint(50000, (1, TOKENS))
    return model, lambda: model(tokens, use_cache=False).last_hidden_state


def encoder() -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return torch's encoder, and a call of it."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True)
    model, rows = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).eval(), torch.randn(1, TOKENS, WIDTH)
    return model, lambda: model(rows)


MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, Callable[[], Tensor]]], dict[str, Any]]] = {
    "GPT-2 of transformers, sdpa": (gpt2, {}),
    "torch's TransformerEncoder, fast path": (encoder, {}),
    "GPT-2 of transformers, sdpa; summaries alone": (gpt2, {"keep": "summaries"}),
}


@torch.no_grad()
def measured(name: str, rounds: int) -> dict[str, Any]:
    """Return the slowdown of a recorded model and the size of the record."""
    torch.manual_seed(0)
    make, options = MODELS[name]
    model, call = make()
    with capture(model, **options) as record:
        together = call()
    assert torch.equal(call(), together) and len(record) == LAYERS
    weights = sum(4 * torch.Size(run.shape).numel() for run in record)

    def recorded() -> None:
        with capture(model, **options):
            call()

    seconds = interleaved({"alone": call, "recorded": recorded}, rounds + 1)
    pairs = list(zip(seconds["alone"], seconds["recorded"]))[1:]
    ratio = statistics.median(after[1] / before[1] for before, after in pairs)
    alone = statistics.median(before[1] for before, _ in pairs)
    return {"model": name, "ratio": ratio, "seconds": alone, "bytes": record.nbytes, "weights": weights}


def report(result: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    assert __doc__ is not None
    lines = ["# What a record costs", "", __doc__.partition("\n\n")[2].partition("\n\n")[2].strip()]
    return "\n".join([*lines, "", table(result)]) + "\n"


def table(result: dict[str, Any]) -> str:
    """Return the table of the results, with where they were measured."""
    lines = [
        "| model | without recording | with recording | size of the record | size of all weights |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in result["rows"]:
        more, sizes = (
            f"{100 * (row['ratio'] - 1):+.1f} %",
            [f"{row[name] / 1e6:.1f} MB" for name in ("bytes", "weights")],
        )
        lines.append(f"| {row['model']} | {1000 * row['seconds']:.0f} ms | {more} | {' | '.join(sizes)} |")
    machine = result["machine"]
    return "\n".join([*lines, "", f"{machine['CPU']} ({machine['vector instructions']}), one thread, "
                      f"{result['date']}."])  # fmt: skip


def main(arguments: list[str]) -> None:
    """Measure, and write the report."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = [measured(name, given.rounds) for name in MODELS]
    result = {"machine": facts(), "threads": 1, "date": f"{datetime.now(UTC):%Y-%m-%d}", "rows": rows}
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    given.out.with_suffix(".md").write_text(report(result), encoding="utf-8")
    print(report(result))


if __name__ == "__main__":
    main(sys.argv[1:])
