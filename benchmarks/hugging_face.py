"""A Mistral-shaped model of transformers on "regard", compared with the same one on "sdpa".

    python -m benchmarks.hugging_face [--only window packed decoding] [--rounds 5]

Random weights, 4 layers of width 512, 8 heads over 2 of keys and values. A prompt of 8,192 tokens with a window of
1,024; 32 documents of 256 tokens packed into one row, separated by their positions; and 64 tokens generated one by one
after 1,024. Both must give the same logits before anything is timed. They take turns; speeds are the median ratio of
neighbouring turns. Seconds are CPU seconds of one thread, which a busy machine does not change. The time of attention
covers transformers' attention and mask functions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.decoding import interleaved
from benchmarks.machine import ROOT, facts
from benchmarks.report import ratio

RESULTS = ROOT / "benchmarks/results/hugging-face.json"
TOKENS, WINDOW, DOCUMENTS, PROMPT, NEW = 8192, 1024, 32, 1024, 64
CASES = {
    "window": f"prompt of {TOKENS:,} tokens, window of {WINDOW:,}",
    "packed": f"{DOCUMENTS} documents of {TOKENS // DOCUMENTS} tokens packed into one row",
    "decoding": f"decoding {NEW} tokens after {PROMPT:,}, per token",
}
NAMES = ("sdpa", "regard")
_SPENT = {"seconds": 0.0}


def model(window: int | None) -> nn.Module:
    """Return the random model."""
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"vocab_size": 8000, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": TOKENS}
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**sizes, sliding_window=window)).eval()


@contextmanager
def timed_attention() -> Iterator[None]:
    """Measure the total time of the mask and attention functions of both implementations."""
    from transformers import AttentionInterface, masking_utils

    kept = []
    for registry in (AttentionInterface, masking_utils.AttentionMaskInterface):
        for name in NAMES:
            function = registry._global_mapping[name]
            kept.append((registry, name, function))
            registry.register(name, _timed(function))
    try:
        yield
    finally:
        for registry, name, function in kept:
            registry.register(name, function)


def _timed(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        begun = time.process_time()
        answer = function(*args, **kwargs)
        _SPENT["seconds"] += time.process_time() - begun
        return answer

    return call


def prefill(made: nn.Module, positions: Tensor | None) -> Callable[[str], Tensor]:
    """Return a function that reads all tokens with an implementation and returns the last hidden states."""
    tokens = torch.randint(8000, (1, TOKENS), generator=torch.Generator().manual_seed(1))

    def call(implementation: str) -> Tensor:
        made.set_attn_implementation(implementation)  # type: ignore[operator]
        _SPENT["seconds"] = 0.0
        rows: Tensor = made.model(tokens, position_ids=positions, use_cache=False).last_hidden_state  # type: ignore[operator,union-attr]
        return rows

    return call


def decoding(made: nn.Module) -> Callable[[str], Tensor]:
    """Return a function that generates one more token after a prompt with an implementation; it returns the logits."""
    tokens = torch.randint(8000, (1, PROMPT + NEW), generator=torch.Generator().manual_seed(1))
    caches, at = {}, dict.fromkeys(NAMES, PROMPT)
    for name in NAMES:
        made.set_attn_implementation(name)  # type: ignore[operator]
        caches[name] = made(tokens[:, :PROMPT], use_cache=True).past_key_values

    def call(implementation: str) -> Tensor:
        made.set_attn_implementation(implementation)  # type: ignore[operator]
        i, _SPENT["seconds"] = at[implementation], 0.0
        begun = time.process_time()
        logits: Tensor = made(tokens[:, i : i + 1], past_key_values=caches[implementation], use_cache=True).logits
        _SPENT["all"] = time.process_time() - begun
        at[implementation] += 1
        return logits

    return call


@torch.no_grad()
def measured(case: str, rounds: int) -> dict[str, Any]:
    """Return the speed of a case on "regard", as a multiple of that on "sdpa"."""
    length = TOKENS // DOCUMENTS
    positions = torch.arange(length).repeat(DOCUMENTS)[None] if case == "packed" else None
    made = model(WINDOW if case == "window" else None)
    call = decoding(made) if case == "decoding" else prefill(made, positions)
    rows = {name: call(name) for name in NAMES}
    difference = float((rows["sdpa"] - rows["regard"]).abs().max())
    assert difference < 1e-4, (case, difference)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in NAMES}

    def turn(name: str) -> None:
        begun = time.process_time()
        call(name)
        whole = _SPENT.pop("all", time.process_time() - begun)
        found[name].append((whole, _SPENT["seconds"]))

    with timed_attention():
        turns = NEW - 1 if case == "decoding" else rounds + 1
        interleaved({name: lambda name=name: turn(name) for name in found}, turns)  # type: ignore[misc]
    result: dict[str, Any] = {"case": case, "difference": difference}
    for i, part in enumerate(("all", "attention")):
        pairs = zip(found["sdpa"][1:], found["regard"][1:])
        result[part] = statistics.median(theirs[i] / ours[i] for theirs, ours in pairs)
        result[f"{part}_seconds"] = {name: statistics.median(each[i] for each in found[name][1:]) for name in found}
    return result


def report(result: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    assert __doc__ is not None
    lines = ["# Hugging Face models on regard", "", __doc__.partition("\n\n")[2].partition("\n\n")[2].strip()]
    return "\n".join([*lines, "", table(result)]) + "\n"


def table(result: dict[str, Any]) -> str:
    """Return the table of the results, with where they were measured."""
    lines = ["| case | attention | whole model | seconds, sdpa → regard |", "| --- | ---: | ---: | ---: |"]
    for row in result["rows"]:
        seconds = row["all_seconds"]
        spent = f"{seconds['sdpa']:.3g} → {seconds['regard']:.3g}"
        lines.append(f"| {CASES[row['case']]} | {ratio(row['attention'])} | {ratio(row['all'])} | {spent} |")
    machine = result["machine"]
    processor = f"{machine['CPU']} ({machine['vector instructions']}), one thread"
    return "\n".join([*lines, "", f"{processor}, transformers {result['transformers']}, {result['date']}."])


def main(arguments: list[str]) -> None:
    """Measure, and write the report."""
    import transformers

    from regard.integrations.transformers import register

    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    register()
    torch.set_num_threads(1)
    result = {"machine": facts(), "threads": 1, "transformers": transformers.__version__}
    result |= {"date": f"{datetime.now(UTC):%Y-%m-%d}", "rows": [measured(case, given.rounds) for case in given.only]}
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    given.out.with_suffix(".md").write_text(report(result), encoding="utf-8")
    print(report(result))


if __name__ == "__main__":
    main(sys.argv[1:])
