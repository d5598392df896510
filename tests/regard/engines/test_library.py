"""The compiled kernels' library: which processor's code is used, and what happens where it is missing or damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
from tiers import sized

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
try:
    regard.attention(q, q, q, score="laplacian", engine="fused")
except ValueError as error:
    print(error)
which, table, counts = torch.tensor([0, 1, 0]), torch.tensor([[0, 2], [1, 0]]), torch.tensor([2, 1])
for dtype in (torch.float32, torch.float64):
    rows = torch.tensor([1.0, 2.0, 4.0], dtype=dtype).view(3, 1, 1).repeat(1, 1, 8)
    print(decoding.read_rows(0 * rows, rows, rows, which, table, counts, 1.0).mean(-1).flatten().tolist())
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


@pytest.fixture(scope="module")
def usual() -> list[str]:
    """What :data:`CALL` prints with the kernels of this package."""
    with redirect_stdout(StringIO()) as said:
        exec(CALL.format(engine="auto"), {})
    lines = said.getvalue().splitlines()
    assert lines[-3:] == DECODED
    return lines


#: What decoding in :data:`CALL` prints.
DECODED = ["[2.5, 2.0, 2.5]", "[2.5, 2.0, 2.5]", "3.0949 [[0.0, 3.0]]"]


def patched(old: bytes, new: bytes) -> bytes:
    """Return the library with a name in it replaced by another."""
    data = library.FILE.read_bytes()
    assert old in data
    return data.replace(old, new)


def for_another_machine() -> bytes:
    data = bytearray(library.FILE.read_bytes())
    data[18:20] = (183 if data[18] == 62 else 62).to_bytes(2, "little")
    return bytes(data)


LAST_KIND = f"float32_{library.processor()}\0".encode()
#: Files that are no kernels for this process, and what explain says of each.
FLAWED: dict[str, tuple[Callable[[], bytes], str]] = {
    "cut off": (lambda: library.FILE.read_bytes()[:5000], "cannot be loaded ("),
    "empty": (lambda: b"", "cannot be loaded ("),
    "text": (lambda: b"no library\n" * 1000, "cannot be loaded ("),
    "zeros": (lambda: bytes(library.FILE.stat().st_size), "cannot be loaded ("),
    "another library": (lambda: next((Path(torch.__file__).parent / "lib").glob("libc10.*")).read_bytes(), "cannot be"),
}
#: The same for files that are told from others by their ELF headers and symbols.
FLAWED_ELF: dict[str, tuple[Callable[[], bytes], str]] = {
    "another machine": (for_another_machine, "cannot be loaded (they are for another kind of processor)"),
    "newer system": (lambda: patched(b"\0GLIBC_2.", b"\0GLIBC_9."), "not found"),
    "unknown symbol": (lambda: patched(b"\0memset\0", b"\0memsex\0"), "undefined symbol: memsex"),
    "another record": (lambda: patched(b" saved_every ", b" saved_avery "), "are of another version"),
    "another order of sizes": (lambda: patched(b" S C V K list_b ", b" C S V K list_b "), "are of another version"),
    "fewer processors": (
        lambda: patched(LAST_KIND, LAST_KIND.replace(b"float32", b"float31")),
        f"have no code for this processor ({library.processor()})",
    ),
}
if sys.platform == "linux" and library.processor() in ("v2", "v3", "v4"):
    FLAWED |= FLAWED_ELF


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("kind", ["missing", "folder", *FLAWED])
def test_without_kernels_calls_run_and_explain_says_why(tmp_path: Path, usual: list[str], kind: str) -> None:
    file, reason = tmp_path / "_kernels.so", "cannot be loaded ("
    if kind == "missing":
        reason = "are missing"
    elif kind == "folder":
        file.mkdir()
    else:
        content, reason = FLAWED[kind]
        file.write_bytes(content())
    given = run(str(file))
    assert given.returncode == 0, given.stderr
    lines = given.stdout.splitlines()
    assert json.loads(lines[0]) == pytest.approx(json.loads(usual[0]), rel=1e-6, abs=1e-6)
    assert lines[-3:] == DECODED
    said = next(line for line in lines if line.strip().startswith("fused"))
    assert "its compiled kernels" in said
    assert reason in said
    assert "install" in said
    refused = "attention: engine must be able to run this call, got 'fused': its compiled kernels"
    assert any(line.startswith(refused) for line in lines)


def kinds() -> list[str]:
    """Return the kinds of processors whose code this one can run."""
    if library.processor() not in ("v2", "v3", "v4"):
        return [library.processor()]
    able = {"DEFAULT": "v2", "AVX2": "v3", "AVX512": "v4"}[torch.backends.cpu.get_cpu_capability()]
    return ["v2", "v3", "v4"][: ["v2", "v3", "v4"].index(able) + 1]


@pytest.mark.slow
def test_the_code_of_every_processor_gives_the_same_result() -> None:
    q = torch.randn(1, 2, 40, 5, generator=torch.Generator().manual_seed(0))
    exact = regard.attention(*[q.double()] * 3, score="laplacian", engine="reference").flatten().tolist()
    for kind in kinds()[:: sized(1, 2)]:
        found = run(engine="fused", REGARD_CPU=kind)
        assert found.returncode == 0, found.stderr
        lines = found.stdout.splitlines()
        assert json.loads(lines[0]) == pytest.approx(exact, rel=1e-6, abs=1e-6)
        assert lines[-3:] == DECODED


def test_an_unknown_processor_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGARD_CPU", "v9")
    with pytest.raises(ValueError, match=f"^regard: REGARD_CPU must be one of {', '.join(kinds())}, .*, got 'v9'"):
        library.processor.__wrapped__()
