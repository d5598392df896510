"""The table of what language models were asked to reach: as the reports have it, and told where it is missed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from benchmarks import language_goals
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


def test_means_of_seeds_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"task": "trec", "pretrained": True, "accuracy": each} for each in (0.92, 0.95)]
    for name in ("language-models", "language-training", "decoding", "beam-search"):
        (tmp_path / f"{name}.json").write_text((language_goals.RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    (tmp_path / "encoders.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(language_goals, "RESULTS", tmp_path)
    told = [str(goal) for goal in language_goals.goals() if "small pretrained encoder" in goal.what]
    assert "| ≥ 93 % | 93.5 %; without pretraining not run |" in told[1]
    assert re.search(r"IMDB: .* \*\*not run; without pretraining not run\*\* \(missed: ", told[2])
