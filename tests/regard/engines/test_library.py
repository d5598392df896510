"""The compiled kernels' library: which processor's code is used, and what happens where it is missing or damaged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import regard
from regard.engines.fused import library
from regard.engines.fused.arguments import FIELDS, SHAPES

#: A call of engine fused, and what explain says of it; printed by a process of its own.
CALL = """
import torch, regard
from regard.engines.fused import decoding
q = torch.randn(1, 2, 40, 5, generator=torch.Generator().manual_seed(0))
print(regard.attention(q, q, q, score="laplacian", engine={engine!r}).flatten().tolist())
print(regard.explain(q, q, q, score="laplacian"))
rows = torch.tensor([[[1.0]], [[2.0]], [[4.0]]])
which, table, counts = torch.tensor([0, 1, 0]), torch.tensor([[0, 2], [1, 0]]), torch.tensor([2, 1])
print(decoding.read_rows(torch.zeros(3, 1, 1), rows, rows, which, table, counts, 1.0).flatten().tolist())
total, maxima = decoding.log_sums(torch.tensor([[0.0, 0.0, 3.0]]), 2)
print(round(total.item(), 4), maxima.tolist())
"""


def run(file: str = "", engine: str = "auto", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run :data:`CALL` with a library file and environment variables."""
    command = [sys.executable, "-c", CALL.format(engine=engine)]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "REGARD_KERNELS": file, **environment}, check=False
    )


def test_this_package_has_its_kernels() -> None:
    assert library.problem() is None
    assert library.load("dot.forward", torch.float32) is library.load("dot.forward", torch.float32)


@pytest.mark.parametrize("name", ["dot", "radial", "additive"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_kernel_is_there_in_both_precisions(name: str, dtype: torch.dtype) -> None:
    for each in (f"{name}.forward", f"{name}.backward"):
        assert callable(library.load(each, dtype))
    assert callable(library.load("additive.prepare", dtype))


def test_every_array_is_an_argument() -> None:
    assert {name for shapes in SHAPES.values() for name in shapes} <= {*FIELDS}


@pytest.mark.parametrize("kind", ["missing", "damaged", "empty", "another library"])
def test_without_kernels_calls_run_and_explain_says_why(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "_kernels.so"
    if kind == "damaged":
        file.write_bytes(library.FILE.read_bytes()[:5000])
    elif kind == "empty":
        file.write_bytes(b"")
    elif kind == "another library":
        shutil.copy(next((Path(torch.__file__).parent / "lib").glob("libc10.*")), file)
    given, expected = run(str(file)), run()
    assert given.returncode == expected.returncode == 0, given.stderr
    lines, usual = given.stdout.splitlines(), expected.stdout.splitlines()
    assert json.loads(lines[0]) == pytest.approx(json.loads(usual[0]), rel=1e-6, abs=1e-6)
    assert lines[-2:] == usual[-2:] == ["[2.5, 2.0, 2.5]", "3.0949 [[0.0, 3.0]]"]
    said = next(line for line in lines if line.strip().startswith("fused"))
    wanted = "are missing" if kind == "missing" else "cannot be loaded"
    assert f"its compiled kernels {wanted}" in said
    named = run(str(file), engine="fused")
    assert named.returncode == 1
    assert "attention: engine must be able to run this call, got 'fused': its compiled kernels" in named.stderr


def kinds() -> list[str]:
    """Return the kinds of processors whose code this one can run."""
    if library.processor() not in ("v2", "v3", "v4"):
        return [library.processor()]
    able = {"DEFAULT": "v2", "AVX2": "v3", "AVX512": "v4"}[torch.backends.cpu.get_cpu_capability()]
    return ["v2", "v3", "v4"][: ["v2", "v3", "v4"].index(able) + 1]


def test_the_code_of_every_processor_gives_the_same_result() -> None:
    q = torch.randn(1, 2, 40, 5, generator=torch.Generator().manual_seed(0))
    exact = regard.attention(*[q.double()] * 3, score="laplacian", engine="reference").flatten().tolist()
    for kind in kinds():
        found = run(engine="fused", REGARD_CPU=kind)
        assert found.returncode == 0, found.stderr
        assert json.loads(found.stdout.splitlines()[0]) == pytest.approx(exact, rel=1e-6, abs=1e-6)


def test_an_unknown_processor_is_an_error() -> None:
    found = run(REGARD_CPU="v9")
    assert found.returncode == 1
    assert f"ValueError: regard: REGARD_CPU must be one of {', '.join(kinds())}" in found.stderr
