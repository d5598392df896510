"""The report of how long the demo takes."""

from __future__ import annotations

import pytest
from benchmarks import demo


def test_the_slowest_round_decides(tmp_path, monkeypatch) -> None:
    rounds = iter([(99.0, 9.0), (5.0, 6.0), (7.0, 6.5), (21.0, 7.0)])
    monkeypatch.setattr(demo, "once", lambda: next(rounds))
    monkeypatch.setattr(demo, "facts", lambda: {"CPU": "Some (R) CPU"})
    assert demo.main(["--rounds", "3", "--results", str(tmp_path)]) == 1
    (report,) = tmp_path.iterdir()
    assert report.name == "some-cpu-demo.md"
    text = report.read_text(encoding="utf-8")
    assert "| wall-clock seconds | 7.0 | 21.0 |" in text
    assert "| CPU seconds, all cores | 6.5 | 7.0 |" in text


def test_a_demo_that_shows_nothing_is_not_timed(monkeypatch) -> None:
    monkeypatch.setattr(demo.subprocess, "run", lambda *given, **options: type("Done", (), {"stdout": ""}))
    with pytest.raises(RuntimeError, match="the demo drew nothing"):
        demo.once()
