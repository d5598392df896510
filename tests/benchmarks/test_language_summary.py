"""The table of language models: as the reports have it, with the best pretrained model of each task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks import encoders, language_summary
from benchmarks.machine import ROOT
from benchmarks.report import ratio


def test_lines_are_those_of_the_reports() -> None:
    found = {line.what: line for line in language_summary.lines()}
    report: dict[str, Any] = json.loads((ROOT / "benchmarks/results/beam-search.json").read_text(encoding="utf-8"))
    for how in ("at once", "one at a time"):
        row = report["threads"]["1"][how]["regard"]
        line = found[f"beam search of a translator, {row['sentences']} sentences {how}, 1 thread, float32"]
        assert line[1:] == (ratio(row["speed"]), "CTranslate2")
    assert sum(what.startswith("tiny shakespeare") for what in found) == 2
    assert sum(what.startswith("training") for what in found) == sum(what.startswith("decoding") for what in found) == 4


def test_means_of_seeds_choose_the_best_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {("imdb-encoder", "pretrained"): (0.92, 0.95), ("imdb-decoder", "imdb"): (0.9, 0.91)}
    found |= {("imdb-encoder", "random"): (0.8,), ("imdb-decoder", "random"): (0.99,)}
    rows = [
        {"model": model, "task": "trec", "start": start, "accuracy": each}
        for (model, start), accuracies in found.items()
        for each in accuracies
    ]
    for name in ("language-models", "language-training", "decoding", "beam-search"):
        (tmp_path / f"{name}.json").write_text((language_summary.RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    (tmp_path / "encoders.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(language_summary, "RESULTS", tmp_path)
    (line,) = [line for line in language_summary.lines() if "small pretrained model" in line.what]
    assert line.result == "93.5 % (masked tokens; pretrained)"
    assert line.against == "without pretraining: 99.0 % (`imdb-decoder`); Kim's CNN 91.2 to 93.6"


def test_a_run_takes_the_place_of_the_same_one(tmp_path: Path) -> None:
    model = {
        "told": "4 layers",
        "date": "2026-11-24",
        "machine": {"CPU": "x", "vector instructions": "y", "cores": "2"},
    }
    row = {
        "model": "imdb-decoder",
        "task": "trec",
        "start": "random",
        "seed": 1,
        "accuracy": 0.5,
        "tokens": 64,
        "minutes": 1.0,
    }
    for changes in ({}, {"seed": 2, "accuracy": 0.7}, {"accuracy": 0.6}):
        encoders.write(tmp_path / "found.json", row | changes, model)
    assert "**65.0 %** (2 seeds, 60.0 to 70.0; at most 64 tokens; 1 min each)" in (tmp_path / "found.md").read_text(
        encoding="utf-8"
    )
