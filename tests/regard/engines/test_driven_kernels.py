"""Kernels in a program without Python, as `make emulated` and `make sanitize` run them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from driven_kernels import Driver, driven

from regard.engines.fused import decoding, library
from regard.testing.campaign import Plan, run
from regard.testing.laws import LAWS

pytestmark = pytest.mark.slow

SOURCE = Path(__file__).parents[3] / "csrc" / "driver.cpp"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    file = tmp_path_factory.mktemp("driver") / "driver"
    subprocess.run([compiler, "-std=c++17", "-O1", "-pthread", SOURCE, "-o", file, "-ldl"], check=True)
    return file


@pytest.fixture
def start(program: Path) -> Iterator[Callable[..., Driver]]:
    started = list[Driver]()

    def made(threads: int, processor: str = "") -> Driver:
        started.append(Driver([str(program), str(library.FILE), processor or library.processor()], threads))
        return started[-1]

    before = torch.get_num_threads()
    yield made
    torch.set_num_threads(before)
    for each in started:
        each.process.kill()
        each.process.wait()


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("threads", [1, 3])
def test_the_laws_hold(start: Callable[..., Driver], threads: int) -> None:
    driver = start(threads)
    torch.set_num_threads(threads)
    with driven(driver):
        tally = run(40, Plan(5, tuple(LAWS), ("fused",)), progress=False)
    assert tally.broken == []
    assert driver.count > 40
    driver.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_decoding_gives_the_same_bits(start: Callable[..., Driver], threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, query = torch.randn(50, 2, 4, 16, generator=generator), torch.randn(9, 4, 16, generator=generator)
    table = torch.randint(0, 50, (9, 30), generator=generator)
    given = query, rows[:, 0], rows[:, 1], torch.arange(9), table, torch.arange(9), 0.25
    x = torch.randn(7, 500, generator=generator)

    def found() -> list[torch.Tensor]:
        return [decoding.read_rows(*given), *decoding.log_sums(x, 64)]

    right, driver = found(), start(threads)
    torch.set_num_threads(threads)
    with driven(driver):
        assert all(torch.equal(one, other) for one, other in zip(found(), right))
    assert driver.count == 2 * threads


def test_a_program_that_fails_is_an_error(start: Callable[..., Driver]) -> None:
    with driven(start(1, "v9")), pytest.raises(RuntimeError, match="the driver of the kernels ended with code 2"):
        decoding.log_sums(torch.zeros(2, 3), 2)
