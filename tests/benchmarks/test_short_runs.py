"""The campaign of short training runs: what counts as dead, and that a campaign that was stopped goes on."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest
from benchmarks import short_runs
from benchmarks.short_runs import LEAST, Run, main


@pytest.mark.parametrize(
    ("steps", "loss", "learned"),
    [(60, 5.9, True), (60, 5.95, False), (300, 5.5, True), (300, 5.6, False), (1200, 5.0, True), (1200, 5.1, False),
     (60, math.nan, False), (20, 6.0, True), (20, 6.1, False)],
)  # fmt: skip
def test_a_run_must_be_better_than_guessing(steps: int, loss: float, learned: bool) -> None:
    assert Run("recurrent", steps, 0, 512, loss, 6.0, 1.0).learned is learned


def test_a_campaign_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with gzip.open(tmp_path / "en-fr.train.tsv.gz", "wt", encoding="utf-8") as file:
        file.write("".join(f"a{i}\tb{i}\n" for i in range(40)))
    monkeypatch.setattr(short_runs, "PAIRS", 30)
    made: list[tuple[str, int, int]] = []

    def learn(pairs: Path, kind: str, steps: int, seed: int, tokens: int) -> Run:
        assert len(pairs.read_text().splitlines()) == 30
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append((kind, steps, seed))
        return Run(kind, steps, seed, tokens, 6.0 if (kind, seed) == ("recurrent", 1) else 4.0, 6.0, 2.0)

    monkeypatch.setattr(short_runs, "learn", learn)
    arguments = ["--data", str(tmp_path), "--results", str(tmp_path / "found"), "--only", "seeds", "--seeds", "2"]
    with pytest.raises(KeyboardInterrupt):
        main([*arguments, "--steps", "60", "300"])
    first, made[:] = made[:], []
    with pytest.raises(KeyboardInterrupt):
        main([*arguments, "--steps", "60", "300"])
    second, made[:] = made[:], []
    assert main([*arguments, "--steps", "60", "300"]) == 1
    assert len({*first, *second, *made}) == 8 == len(first) + len(second) + len(made)
    (report,) = (tmp_path / "found").glob("*.md")
    (data,) = (tmp_path / "found").glob("*.json")
    assert "8 of 8 runs" in report.read_text() and "; 2 dead." in report.read_text()
    assert len(json.loads(data.read_text())["runs"]) == 8 and set(LEAST) == {60, 300, 1200}
