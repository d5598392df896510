"""The harness: its clock, its ratios, its verdicts, and that nothing wrong is timed."""

from __future__ import annotations

import json

import pytest
import torch
from benchmarks import bench, measure, memory, report
from benchmarks.__main__ import main
from benchmarks.machine import slug
from benchmarks.measure import Limits, Timing, interleaved, loops_for, ratio
from benchmarks.registry import Case, Contender, Goal, MissingError, Point
from benchmarks.work import Work

LIMITS = Limits(1e9, 1e9)
MIB = 2**20


class Clock:
    """A clock that moves only when a call says so."""

    def __init__(self) -> None:
        self.now, self.calls = 0.0, ""

    def call(self, name: str, *seconds: float):
        durations = list(seconds)

        def run() -> None:
            self.now += durations.pop(0) if len(durations) > 1 else durations[0]
            self.calls += name

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(measure.time, "perf_counter", lambda: made.now)
    return made


def test_rounds_are_interleaved_after_a_warm_up(clock: Clock) -> None:
    calls = {"a": clock.call("a", 9.0, 1.0, 2.0, 4.0), "b": clock.call("b", 9.0, 3.0)}
    found = interleaved(calls, rounds=3)
    assert clock.calls == "ab" + "ababab"
    assert found["a"] == Timing((1.0, 2.0, 4.0), 1)
    assert found["b"].median == 3.0


@pytest.mark.parametrize("seconds", [1e-6, 3e-4, 0.019, 0.02, 1.0])
def test_a_sample_lasts_long_enough_but_not_much_longer(clock: Clock, seconds: float) -> None:
    loops = loops_for(clock.call("a", seconds), 0.02)
    assert loops * seconds >= 0.02 * (1 - 1e-9)
    assert loops == 1 or loops * seconds <= 0.05


def test_a_sample_is_per_call(clock: Clock) -> None:
    found = interleaved({"a": clock.call("a", 0.001)}, rounds=2, floor=0.02)
    assert found["a"].loops >= 20
    assert found["a"].samples == pytest.approx((0.001, 0.001))


def test_ratio_is_of_medians_and_spread_of_rounds() -> None:
    found = ratio(Timing((2.0, 4.0, 9.0), 1), Timing((1.0, 1.0, 3.0), 1))
    assert (found.value, found.low, found.high) == (4.0, 2.0, 4.0)


def work_of(point: Point) -> Work:
    generator = torch.Generator().manual_seed(0)
    size = (2, 2, point.size, 4)
    return Work(*(torch.randn(size, generator=generator) for _ in range(3)), backward=point.backward)


def right(work: Work):
    def call():
        output = torch.nn.functional.scaled_dot_product_attention(work.query, work.key, work.value)
        if not work.backward:
            return {"output": output}
        grads = torch.autograd.grad(output, list(work.inputs.values()), work.grad)
        return {"output": output, **{f"d_{name}": grad for name, grad in zip(work.inputs, grads)}}

    return call


def off_by(amount: float, quantity: str = "output"):
    def prepare(work: Work):
        return lambda: {name: t + amount if name == quantity else t for name, t in right(work)().items()}

    return prepare


def absent(work: Work):
    raise MissingError("there is none")


def broken(work: Work):
    raise RuntimeError("it broke")


def case_of(points: tuple[Point, ...] = (Point(6),), goals: tuple[Goal, ...] = (), **contenders) -> Case:
    made = {name: Contender(prepare) for name, prepare in {"base": right, **contenders}.items()}
    return Case("made-up", "A case", "keys", work_of, made, "base", points, quick=3, goals=goals)


def run(case: Case) -> bench.Finding:
    return bench.run(case, LIMITS, rounds=2, floor=1e-4, say=lambda _: None, weigh=False)


def test_only_what_is_right_is_timed() -> None:
    case = case_of(regard=right, off=off_by(1e-3), nan=off_by(torch.nan), absent=absent, broken=broken)
    finding = run(case)
    rows = {row.contender: row for row in finding.tables[0].rows}
    statuses = {"base": "ok", "regard": "ok", "off": "wrong", "nan": "wrong", "absent": "missing", "broken": "failed"}
    assert {name: row.status for name, row in rows.items()} == statuses
    for name, row in rows.items():
        assert (row.timing is not None) == (statuses[name] == "ok")
    assert rows["off"].errors["output"].found == pytest.approx(1e-3, rel=0.01)
    assert rows["absent"].reason == "there is none"
    text = report.markdown([finding], {"CPU": "made up"}, {})
    assert "**wrong**" in text and "missing: there is none" in text and "failed: RuntimeError: it broke" in text


@pytest.mark.parametrize("quantity", ["output", "d_query", "d_key", "d_value"])
def test_a_wrong_gradient_is_found(quantity: str) -> None:
    rows = run(case_of((Point(6, backward=True),), other=off_by(1e-3, quantity))).tables[0].rows
    assert [row.status for row in rows] == ["ok", "wrong"]
    assert quantity in rows[1].reason


def timed(*seconds: float) -> bench.Row:
    return bench.Row("regard", timing=Timing(seconds, 1), peak=99_000_000)


@pytest.mark.parametrize(
    ("goal", "measured", "met"),
    [
        (Goal("time", 0.5, 6), 0.5, True),
        (Goal("time", 0.49, 6), 0.5, False),
        (Goal("speed", 2, 6), 2.0, True),
        (Goal("speed", 2.01, 6), 2.0, False),
        (Goal("overhead", 0, 6), -1e6, True),
        (Goal("overhead", -1.1e6, 6), -1e6, False),
        (Goal("memory", 100, 6), 99.0, True),
        (Goal("memory", 99, 6), 99.0, False),
        (Goal("speed", 2, 7), None, False),
    ],
)
def test_verdicts(goal: Goal, measured: float | None, met: bool) -> None:
    base = bench.Row("base", timing=Timing((2.0, 2.0, 5.0), 1))
    table = bench.Table(Point(6), "all rows", 1.0, 1.0, [base, timed(0.5, 1.0, 7.0)])
    verdict = bench._verdict(case_of(goals=(goal,), regard=right), goal, [table])
    assert (verdict.measured, verdict.met) == (measured, met)


def test_shares_of_the_limits() -> None:
    finding = run(case_of(regard=right))
    table = bench.Table(Point(6), "all rows", 5e8, 1.0, [timed(2.0)])
    assert report._limit(finding, table, table.rows[0]) == "25%"


def test_work_counts_visible_pairs_and_operations() -> None:
    work = work_of(Point(6))
    assert (work.pairs(), work.flops(), work.bytes()) == (2 * 2 * 36, 2 * 2 * 36 * 16, 3 * 2 * 2 * 6 * 4 * 4)
    work.visible = lambda rows: (torch.arange(6) <= rows.unsqueeze(-1))[None, None]
    assert work.pairs() == 2 * 2 * 21
    assert work_of(Point(6, backward=True)).flops() == 3.5 * 2 * 2 * 36 * 16


def test_the_formula_in_chunks_is_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    work = work_of(Point(6, backward=True))
    whole = work.expected(torch.arange(6), torch.float64)
    monkeypatch.setattr("benchmarks.work.CHUNK", 2 * 2 * 6 * 2)
    chunked = work.expected(torch.arange(6), torch.float64)
    for name, tensor in whole.items():
        torch.testing.assert_close(chunked[name], tensor)


def test_a_sample_of_rows_has_the_first_and_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.work.TOTAL", 1)
    rows = work_of(Point(200)).rows()
    assert len(rows) == len(rows.unique()) == 64
    assert rows[0] == 0 and rows[-1] == 199


@pytest.mark.parametrize(
    ("name", "expected"),
    [("AMD EPYC", "amd-epyc"), ("Intel(R) Xeon(R) CPU @ 2.20GHz", "intel-xeon-cpu-2-20ghz"), ("M1/Pro_", "m1-pro")],
)
def test_slug(name: str, expected: str) -> None:
    assert slug(name) == expected


def test_durations_have_units() -> None:
    assert [report.seconds(t) for t in (12.345, 0.0123, 4.2e-6, 250.0)] == ["12.3 s", "12.3 ms", "4.2 µs", "250 s"]


def hold(mebibytes: int) -> int:
    memory._keep_nothing()
    memory.peak_extra(lambda: torch.ones(1024, 1024) * 0.0)  # threads start, code is read
    return memory.peak_extra(lambda: torch.ones(mebibytes * MIB // 4) * 0.0)


def test_peak_memory_of_a_fresh_process() -> None:
    # 32 MiB of ones and 32 MiB of their product live at the same time, and neither lives longer than the call.
    assert memory.fresh(hold, 32) == pytest.approx(64 * MIB, rel=0.1)


def test_peak_memory_without_a_high_water_mark() -> None:
    assert memory._sampled(lambda: torch.ones(64 * MIB // 4)) >= 60 * MIB


def test_a_child_that_fails_says_why() -> None:
    with pytest.raises(memory.ChildError, match="ValueError"):
        memory.fresh(int, "no number")


def test_command_line(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert "additive-memory" in capsys.readouterr().out
    assert main(["--case", "tiny", "--quick", "--rounds", "1", "--out", str(tmp_path)]) == 0
    (numbers,) = tmp_path.glob("*.json")
    found = json.loads(numbers.read_text(encoding="utf-8"))
    assert list(found["cases"]) == ["tiny"]
    assert {"CPU", "torch", "regard", "date", "command"} <= set(found["machine"])
    assert all(row["peak"] is not None for point in found["cases"]["tiny"]["points"] for row in point["rows"])
    assert "| regard |" in numbers.with_suffix(".md").read_text(encoding="utf-8")


def test_a_picture_where_there_are_sizes(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    assert not report.plot(run(case_of()), tmp_path / "none.png")
    assert report.plot(run(case_of((Point(4), Point(8), Point(8, backward=True)), regard=right)), tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 0
