"""The table of what language models were asked to reach: as the reports have it, and told where it is missed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from benchmarks import encoders, language_goals
from benchmarks.machine import ROOT


def test_goals_are_those_of_the_reports() -> None:
    found = {goal.what: goal for goal in language_goals.goals()}
    report: dict[str, Any] = json.loads((ROOT / "benchmarks/results/beam-search.json").read_text(encoding="utf-8"))
    speed = report["threads"]["1"]["regard"]["speed"]
    goal = found["beam search of a translator, 1 thread, float32: speed beside CTranslate2"]
    assert (goal.reached, goal.met) == (f"{speed:.2f}×", speed >= 1)
    assert sum(what.startswith("tiny shakespeare") for what in found) == 2
    assert sum(what.startswith("training") for what in found) == sum(what.startswith("decoding") for what in found) == 4


def test_what_is_missed_is_told_with_its_reason() -> None:
    for goal in language_goals.goals():
        assert ("(missed: " in str(goal)) != goal.met
        assert goal.met or goal.why


def test_means_of_seeds_decide_and_the_best_model_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {("imdb-encoder", "pretrained"): (0.92, 0.95), ("imdb-decoder", "imdb"): (0.9, 0.91)}
    found |= {("imdb-encoder", "random"): (0.8,), ("imdb-decoder", "random"): (0.99,)}
    rows = [
        {"model": model, "task": "trec", "start": start, "accuracy": each}
        for (model, start), accuracies in found.items()
        for each in accuracies
    ]
    for name in ("language-models", "language-training", "decoding", "beam-search"):
        (tmp_path / f"{name}.json").write_text((language_goals.RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    (tmp_path / "encoders.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(language_goals, "RESULTS", tmp_path)
    told = [str(goal) for goal in language_goals.goals() if "small pretrained model" in goal.what]
    assert "| ≥ 93 % | 93.5 % (masked tokens, pretrained); without pretraining 80.0 % |" in told[1]
    assert re.search(r"IMDB.*: .* \*\*not run\*\* \(missed: ", told[2])


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
