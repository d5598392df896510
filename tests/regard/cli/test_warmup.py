"""``regard warmup``: what it compiles and says, interrupted too, and without a cache to write to."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from regard.engines.fused.compiler import KERNELS
from regard.engines.fused.warmup import Target, compile_ahead

pytestmark = pytest.mark.slow

#: The smallest kernel.
SMALL = "additive.prepare"
#: The command, in a process that was started in the background too.
RUN = "from regard_cli import main; main()"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REGARD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


def test_every_kernel_of_every_family_is_compiled() -> None:
    passes = {f"{family}.{half}" for family in ("additive", "dot", "radial") for half in ("forward", "backward")}
    assert set(KERNELS.names()) == passes | {SMALL, "decoding.read_rows", "decoding.log_sums"}


@pytest.mark.campaign
def test_what_is_there_is_not_compiled_again(regard, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KERNELS, "names", lambda: [SMALL])
    first = regard("warmup")
    assert (first.code, first.err) == (0, "")
    assert first.out.splitlines()[:2] == [
        f"0 of 1 kernels are already compiled in {cache}.",
        f"compiled {SMALL} for float32 (1 of 1)",
    ]
    assert regard("warmup").out == f"1 of 1 kernels are already compiled in {cache}.\n"
    assert f"compiled {SMALL} for float64 (1 of 1)" in regard("warmup", "--all").out


def test_a_folder_that_cannot_be_written(regard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("REGARD_CACHE_DIR", str(tmp_path / "file" / "cache"))
    outcome = regard("warmup")
    assert outcome.code == 2
    assert outcome.err == "regard: warmup: the cache folder is not writable; set REGARD_CACHE_DIR to another folder.\n"


def test_a_kernel_that_cannot_be_compiled(cache: Path) -> None:
    wrong = Target("additive.nothing", torch.float32)
    assert list(compile_ahead([wrong])) == [(wrong, False)]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals are another thing there")
def test_an_interrupt_leaves_no_half_file_and_no_process(cache: Path) -> None:
    command = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {RUN}"
    process = subprocess.Popen(
        [sys.executable, "-c", command, "warmup"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines = [process.stdout.readline(), process.stdout.readline()]
    process.send_signal(signal.SIGINT)
    # The pipes close when the last process that has inherited them is gone; a kernel takes longer.
    _, errors = process.communicate(timeout=5)
    assert lines[1].startswith("compiled ")
    assert (process.returncode, errors) == (130, "\nregard: interrupted\n")
    assert all(path.suffix == ".kernel" and "-float32-" in path.name for path in cache.iterdir())
