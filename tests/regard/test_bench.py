"""`python -m regard.bench`: wrong results are not timed, missing packages are named, the report is complete."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from regard import bench


def case(**contenders: Callable[[], bench.Call]) -> bench.Case:
    return bench.Case("A case", lambda: torch.ones(3).double(), contenders)


def test_contenders_take_turns() -> None:
    turns = []

    def contender(name: str) -> Callable[[], bench.Call]:
        def call() -> torch.Tensor:
            turns.append(name)
            return torch.ones(3)

        return lambda: call

    ours, other = bench.measure(case(regard=contender("regard"), other=contender("other")), 1e-9)
    assert turns == ["regard", "other"] * (1 + bench.FEWEST)  # once for the check
    assert len(ours.seconds) == len(other.seconds) == bench.FEWEST


def test_a_wrong_result_is_not_timed() -> None:
    ours, wrong, unknown = bench.measure(
        case(
            regard=lambda: lambda: torch.ones(3),
            wrong=lambda: lambda: torch.tensor([1.0, 1, 1.1]),
            unknown=lambda: lambda: torch.tensor([1.0, 1, torch.nan]),
        ),
        1e-9,
    )
    assert ours.seconds and not wrong.seconds and not unknown.seconds
    assert wrong.problem == "wrong by 0.1 of the largest entry: not timed"
    assert unknown.problem.startswith("wrong by nan")


def test_what_cannot_run_says_why() -> None:
    def absent() -> bench.Call:
        import nothing_of_this_name  # type: ignore[import-not-found]  # noqa: F401

        raise AssertionError

    def broken() -> bench.Call:
        raise RuntimeError("no compiler\nmany lines")

    found = bench.measure(case(regard=lambda: lambda: torch.ones(3), absent=absent, broken=broken), 1e-9)
    assert found[1].problem == "nothing_of_this_name is not installed"
    assert found[2].problem == "failed: RuntimeError: no compiler"
    report = bench.table({"A case": found}, bench.machine())
    assert "| absent | nothing_of_this_name is not installed |  |" in report
    assert "compiled kernels: " in report and "torch: " in report


@pytest.mark.campaign(keep=3)
@pytest.mark.slow
@pytest.mark.parametrize("build", [pytest.param(each, id=each.__name__.lstrip("_")) for each in bench.cases()])
def test_every_case_is_right(build: Callable[[], bench.Case]) -> None:
    made = build()
    own = {name: each for name, each in made.contenders.items() if "compile" not in name and name != "KeOps"}
    found = bench.measure(bench.Case(made.title, made.exact, own), 1e-9)
    assert [outcome.problem for outcome in found if "installed" not in outcome.problem] == [""] * len(
        [outcome for outcome in found if "installed" not in outcome.problem]
    )


@pytest.mark.slow
def test_the_command_writes_a_table_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "cases", lambda: iter([bench._small]))
    assert bench.main(["--seconds", "0.01", "--out", str(tmp_path)]) == 0
    report = (tmp_path / "regard-bench.md").read_text(encoding="utf-8")
    assert report == capsys.readouterr().out and "| torch SDPA |" in report
    assert (tmp_path / "regard-bench.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [(["--seconds", "0"], "--seconds must be positive, got 0"), (["--out", "nowhere"], "--out must be a folder")],
)
def test_bad_arguments(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert sentence in capsys.readouterr().err
