"""Every case at a tiny size: every contender is right, or says why it is missing."""

from __future__ import annotations

from pathlib import Path

import benchmarks.cases
import pytest
import torch
from benchmarks.cases.kernels import reach
from benchmarks.cases.masked import document_ids
from benchmarks.check import Checker
from benchmarks.registry import CASES, Case, Contender, MissingError, Point
from benchmarks.work import Work

SMALL = [
    pytest.param(case, point, name, id=f"{case.name}-{point.label}-{name}")
    for case in map(Case.shrunk, CASES.values())
    for point in case.points
    for name, contender in case.contenders.items()
    if not contender.compiles  # seconds each; `python -m benchmarks --quick` runs them
]


def test_every_file_of_cases_is_imported() -> None:
    folder = Path(benchmarks.cases.__file__).parent
    assert {path.stem for path in folder.glob("*.py")} - {"__init__", "contenders"} == set(benchmarks.cases.__all__)
    assert len(CASES) >= len(benchmarks.cases.__all__)


@pytest.mark.campaign(keep=12)
@pytest.mark.parametrize(("case", "point", "name"), SMALL)
def test_contender_is_right(case: Case, point: Point, name: str) -> None:
    work = case.work(point, name)
    contender: Contender = case.contenders[name]
    try:
        call = contender.prepare(work)
    except MissingError as error:
        pytest.skip(str(error))
    errors = Checker(work, case.tolerance).errors(call, contender.does)
    assert not {quantity: error for quantity, error in errors.items() if error.wrong}
    everything = 1 + point.backward * len(work.inputs) + 2 * bool(work.topk)
    assert len(errors) == (len(contender.does) or everything)


def test_goals_are_about_points_that_are_measured() -> None:
    for name, case in CASES.items():
        points = {(p.size, p.backward, p.variant): case.at(p) for p in case.points}
        assert len(points) == len(case.points), name
        for goal in case.goals:
            contenders = points[goal.size, goal.backward, goal.variant]
            assert goal.contender in contenders, name
            if goal.kind not in ("memory", "seconds"):
                assert (goal.against or case.baseline) in contenders, name


def test_inputs_are_the_same_in_every_process() -> None:
    for name, case in CASES.items():
        point = case.shrunk().points[0]
        first, second = case.build(point), case.build(point)
        assert all(torch.equal(a, b) for a, b in zip(first.inputs.values(), second.inputs.values())), name


@pytest.mark.parametrize(
    ("name", "size", "pairs"),
    [
        ("window", 1024, 8 * (257 * 258 // 2 + (1024 - 257) * 257)),
        ("causal-padding", 10, 8 * sum(n * (n + 1) // 2 + (10 - n) * n for n in (10, 8, 5, 3))),
        ("plain", 7, 8 * 49),
    ],
)
def test_visible_pairs_are_counted(name: str, size: int, pairs: int) -> None:
    work: Work = CASES[name].build(Point(size))
    assert work.pairs() == pairs


def test_documents_are_many_and_differ_in_length() -> None:
    ids = document_ids(8192)
    lengths = torch.bincount(ids)
    assert len(lengths) == 32 and len(lengths.unique()) > 16
    assert CASES["documents"].build(Point(8192)).pairs() == 8 * int(lengths.square().sum())


def test_plain_formula_is_not_run_where_it_would_not_fit() -> None:
    case = CASES["additive-memory"]
    work = case.build(Point(8192))
    with pytest.raises(MissingError, match=r"17\.2 GB"):
        case.contenders[case.baseline].prepare(work)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2000, 5000])
def test_compact_kernels_reach_one_percent_and_have_no_pair_on_their_edge(size: int) -> None:
    work = CASES["compact"].build(Point(size, variant="boxcar"))
    radius = reach(work.query, work.key)
    square = torch.cdist(work.query[0, 0].double(), work.key[0, 0].double()).square()
    assert float((square <= radius**2).double().mean()) == pytest.approx(0.01, rel=0.1)
    assert float((square / radius**2 - 1).abs().min()) > 1e-4


def test_an_unknown_contender_is_an_error() -> None:
    case = CASES["plain"]
    with pytest.raises(ValueError, match="no contender"):
        Case("x", "x", "x", case.build, case.contenders, "nobody", case.points, 4)
