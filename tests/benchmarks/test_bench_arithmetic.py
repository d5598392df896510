"""The harness: its clock, its ratios, its verdicts, and that nothing wrong is timed."""

from __future__ import annotations

import json
import mmap
import re
from dataclasses import replace

import benchmarks.cases  # noqa: F401
import pytest
import torch
from benchmarks import bench, measure, memory, plot, readme, report
from benchmarks.__main__ import main
from benchmarks.check import Checker
from benchmarks.machine import slug
from benchmarks.measure import Limits, Timing, interleaved, loops_for, ratio
from benchmarks.registry import CASES, Case, Contender, Goal, MissingError, Point, register
from benchmarks.work import Work

pytestmark = pytest.mark.slow

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


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("quantity", ["output", "d_query", "d_key", "d_value"])
def test_a_wrong_gradient_is_found(quantity: str) -> None:
    rows = run(case_of((Point(6, backward=True),), other=off_by(1e-3, quantity))).tables[0].rows
    assert [row.status for row in rows] == ["ok", "wrong"]
    assert quantity in rows[1].reason


def timed(*seconds: float) -> bench.Row:
    return bench.Row("regard", flops=5e8, bytes=1.0, timing=Timing(seconds, 1), peak=99_000_000)


@pytest.mark.parametrize(
    ("goal", "measured", "met"),
    [
        (Goal("g", "time", 0.5, 6), 0.5, True),
        (Goal("g", "time", 0.49, 6), 0.5, False),
        (Goal("g", "speed", 2, 6), 2.0, True),
        (Goal("g", "speed", 2.01, 6), 2.0, False),
        (Goal("g", "speed", 3, 6, share=0.5), 2.0, True),
        (Goal("g", "speed", 3, 6, share=0.51), 2.0, False),
        (Goal("g", "overhead", 0, 6), -1e6, True),
        (Goal("g", "overhead", -1.1e6, 6), -1e6, False),
        (Goal("g", "backward", -0.5, 6), -0.5, True),
        (Goal("g", "backward", -0.51, 6), -0.5, False),
        (Goal("g", "seconds", 1.0, 6), 1.0, True),
        (Goal("g", "seconds", 0.99, 6), 1.0, False),
        (Goal("g", "memory", 100, 6), 99.0, True),
        (Goal("g", "memory", 99, 6), 99.0, False),
        (Goal("g", "speed", 2, 7), None, False),
        (Goal("g", "seconds", 2, 7), None, False),
    ],
)
def test_verdicts(goal: Goal, measured: float | None, met: bool) -> None:
    base = bench.Row("base", timing=Timing((2.0, 2.0, 5.0), 1))
    table = bench.Table(Point(6), "all rows", [base, timed(0.5, 1.0, 7.0)])
    verdict = bench._verdict(case_of(goals=(goal,), regard=right), goal, [table], LIMITS)
    assert (verdict.measured, verdict.met) == (measured, met)
    assert verdict.share == (None if goal.share is None else 0.5)


def test_shares_of_the_limits() -> None:
    finding = run(case_of(regard=right))
    assert report._limit(finding, timed(2.0)) == "25%"


def test_a_yardstick_is_checked_against_its_own_work() -> None:
    def other(point: Point) -> Work:
        return work_of(Point(2 * point.size))

    case = replace(case_of(), contenders={"base": Contender(right), "other": Contender(right, build=other)})
    base, yardstick = run(case).tables[0].rows
    assert (base.status, yardstick.status) == ("ok", "ok")
    assert yardstick.flops == 4 * base.flops
    assert case.work(Point(6), "other").query.shape[2] == 12


class FarAway(measure.Elsewhere):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __call__(self):
        self.clock.now += 5.0
        self.clock.calls += "e"
        self.seconds, self.peak = 0.25, 7 * MIB
        return {}


def test_another_process_tells_its_own_time(clock: Clock) -> None:
    call = FarAway(clock)
    assert interleaved({"e": call}, rounds=3)["e"] == Timing((0.25,) * 3, 1)
    assert clock.calls == "eeee"
    assert memory.peak_extra(call) == 7 * MIB


def test_a_long_call_that_was_checked_is_not_warmed_up_again(clock: Clock) -> None:
    calls = {"a": clock.call("a", 9.0), "b": clock.call("b", 1.0)}
    interleaved(calls, rounds=2, earlier={"a": 9.0, "b": 1.0})
    assert clock.calls == "b" + "abab"


def test_what_is_called_once_is_timed_by_its_check_and_not_weighed() -> None:
    calls = []

    def counted(work: Work):
        return lambda: calls.append(1) or right(work)()

    case = case_of(regard=right)
    contenders = {**case.contenders, "slow": Contender(counted, once=True)}
    case = replace(case, contenders=contenders, baseline="slow", goals=(Goal("once", "speed", 0, 6),))
    finding = bench.run(case, LIMITS, rounds=3, floor=1e-4, say=lambda _: None, weigh=False)
    slow, regard = (finding.tables[0].row(name) for name in ("slow", "regard"))
    assert len(calls) == 1 and slow.timing.loops == len(slow.timing.samples) == 1
    assert len(regard.timing.samples) == 3 and finding.verdicts[0].met
    low, high = (slow.timing.median / regard.timing.samples[i] for i in (0, 1))
    assert regard.speed.low <= min(low, high) and regard.speed.high >= max(low, high)
    bench._weigh(case, Point(6), slow)
    assert (slow.peak, slow.peak_reason, len(calls)) == (None, "not measured", 1)


def test_what_a_result_achieves_is_compared() -> None:
    class Halved(Work):
        def achieved(self, result):
            return {"output": result["output"] / 2}

    def twice(work: Work):
        return lambda: {"output": 2 * right(work)()["output"]}

    made = work_of(Point(6))
    work = Halved(made.query, made.key, made.value)
    checker = Checker(work, 1e-5)
    assert not checker.errors(twice(work))["output"].wrong
    assert checker.errors(right(work))["output"].wrong


def test_the_name_of_a_goal_is_unique() -> None:
    with pytest.raises(ValueError, match="additive-eager"):
        register(case_of(goals=(Goal("additive-eager", "speed", 1, 6),), regard=right))
    with pytest.raises(ValueError, match="twice"):
        register(case_of(goals=(Goal("twice", "memory", 1, 6), Goal("twice", "memory", 2, 6)), regard=right))


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
    memory.keep_nothing()
    memory.peak_extra(lambda: torch.ones(1024, 1024) * 0.0)  # threads start, code is read
    return memory.peak_extra(lambda: torch.ones(mebibytes * MIB // 4) * 0.0)


@pytest.mark.campaign
def test_peak_memory_of_a_fresh_process() -> None:
    # 32 MiB of ones and 32 MiB of their product live at the same time, and neither lives longer than the call.
    assert memory.fresh(hold, 32) == pytest.approx(64 * MIB, rel=0.1)


def test_peak_memory_without_a_high_water_mark() -> None:
    def hold_new_pages() -> mmap.mmap:
        """Take memory from the system itself: an allocator may have kept as much of what earlier tests let go of."""
        held = mmap.mmap(-1, 64 * MIB)
        for page in range(0, len(held), mmap.PAGESIZE):
            held[page] = 1
        return held

    assert memory._sampled(hold_new_pages) >= 60 * MIB


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


@pytest.mark.campaign
def test_a_picture_where_there_are_sizes(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    assert not report.plot(run(case_of()), tmp_path / "none.png")
    assert report.plot(run(case_of((Point(4), Point(8), Point(8, backward=True)), regard=right)), tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 0


@pytest.mark.parametrize(("value", "text"), [(2e-6, "2 µs"), (0.5, "500 ms"), (1.0, "1 s"), (100.0, "100 s")])
def test_an_axis_has_units(value: float, text: str) -> None:
    assert plot.measure(value, plot.SECOND) == text


def reported(*sizes: int) -> dict:
    points = tuple(Point(size) for size in (6, *sizes))
    goals = (Goal("fast", "speed", 2, 6), Goal("small", "memory", 9e9, 6))
    case = case_of(points, goals, regard=right, gone=absent)
    facts = {"CPU": "made up", "cores": "2", "date": "today"}
    return json.loads(json.dumps(report.raw([run(case)], facts, {"made-up": "made-up.png"})))


def test_pages_are_filled_within_lines_and_over_lines() -> None:
    found = reported(12, 24)
    made = readme.measured(found)
    text = "a <!-- fast -->0<!-- /fast --> b <!-- other -->\n<!-- growth -->\n<!-- /growth -->\nend"
    once = readme.filled(text, made)
    assert re.search(r"a <!-- fast -->(as fast|\d+\.\d+ × (faster|slower))<!-- /fast --> b <!-- other -->", once)
    assert "<!-- growth -->\n\n![A case](../benchmarks/results/made-up.png)\n\n<!-- /growth -->\nend" in once
    assert readme.filled(once, made) == once
    table = made["comparisons"]()
    assert "**A case**" in table and "| 6 keys | " in table and " | base: " in table and "| peak memory |" in table
    assert made["small"]() == "not measured"
    assert "s" in made["fast:time"]() and "fast:against" in made and "small:against" not in made
    with pytest.raises(ValueError, match="unknown"):
        readme.filled("<!-- unknown --><!-- /unknown -->", made)


@pytest.mark.campaign
def test_growth_is_drawn_where_there_are_sizes_to_grow_over() -> None:
    assert readme.growth(reported()) == "" == readme.growth(reported(12))
    assert readme.growth(reported(12, 24)) == "![A case](../benchmarks/results/made-up.png)"


def test_the_table_of_speeds_has_both_times_and_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = reported()
    monkeypatch.setattr(readme, "newest", lambda case: found)
    rows = [readme.Speed("A call", "made-up", 6, name, name.upper()) for name in ("base", "gone", "unknown")]
    monkeypatch.setattr(readme, "SPEEDS", rows)
    *_, base, gone, unknown, _, where = readme.speed().splitlines()
    assert where == "Measured on made up, 2 cores, today."
    assert re.fullmatch(r"\| A call \| .*s \| BASE: .*s \| (as fast|.* × (faster|slower)) \|", base)
    assert gone.endswith("| GONE: missing: there is none | not measured |")
    assert unknown.endswith("| UNKNOWN: not run | not measured |")


def test_the_table_of_speeds_names_points_of_cases() -> None:
    for row in readme.SPEEDS:
        points = {(point.size, point.backward, point.variant) for point in CASES[row.case].points}
        assert (row.size, row.backward, row.variant) in points and row.against in CASES[row.case].contenders


def test_outcomes_say_faster_or_slower() -> None:
    def outcome(kind: str, measured: float | None, against: str = "torch", share: float | None = None) -> str:
        goal = {"kind": kind, "against": against}
        return report.result({"bound": "bytes"}, {"goal": goal, "measured": measured, "share": share})

    assert outcome("speed", 34.51) == "34.5 × faster" and outcome("time", 1.842) == "1.84 × slower"
    assert outcome("speed", 2.3, share=0.73) == "2.30 × faster, 73% of copy bandwidth"
    assert outcome("time", 1.002) == "as fast" and outcome("time", 1.95, "regard, alone") == "1.95 × the time"
    assert outcome("overhead", 23.46) == "23.5 µs more" and outcome("overhead", -1.0) == "1.0 µs less"
    assert outcome("backward", 2.5) == "2.50 × the forward" and outcome("memory", 14.92) == "14.9 MB"
    assert outcome("seconds", 0.0648) == "64.8 ms" and outcome("speed", None) == "not measured"
