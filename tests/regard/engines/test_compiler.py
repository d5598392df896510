"""Kernels as machine code: right, kept, loaded without Numba, and never taken from a file that is not ours."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from regard.engines.fused import compiler
from regard.engines.fused import compiler as kernel_cache
from regard.engines.fused.compiler import BuildError, Code, Entry, Function, Kernels

pytest.importorskip("numba")

pytestmark = pytest.mark.slow

HELPERS = """
import numba

@numba.njit(error_model="numpy")
def scaled(x, factor, n):
    return x * factor / n
"""

SUMS = """
import math

import numba
import numpy as np

from regard.engines.fused.kernels.arguments import kernel
from {package}.helpers import scaled


@kernel("real*", "int*", "byte*", "real*", "real", "int")
def forward(x, index, keep, out, factor, n):
    x_, index_ = numba.carray(x, (n,)), numba.carray(index, (n,))
    keep_, out_ = numba.carray(keep, (n,)), numba.carray(out, (n,))
    for i in range(n):
        out_[i] = 0
        if keep_[i]:
            out_[i] = math.exp(scaled(x_[index_[i]], factor, n))


@kernel("real*", "real*", "int")
def dot(a, b, n):
    a_, b_ = numba.carray(a, (n,)), numba.carray(b, (n,))
    total = a_[0] * 0
    for i in range(n):
        total += a_[i] * b_[i]
    b_[0] = total


@kernel("real*", "int")
def raises(x, n):
    if n < 0:
        raise ValueError("of n")
    numba.carray(x, (n,))[0] = 1


@kernel("real*", "int")
def allocates(x, n):
    numba.carray(x, (n,))[:] = np.arange(n) + numba.carray(x, (n,))
"""

DTYPES = [torch.float32, torch.float64]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REGARD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder of a package with kernels."""
    folder = tmp_path / f"kernels_{tmp_path.name}"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "helpers.py").write_text(HELPERS)
    (folder / "sums.py").write_text(SUMS.format(package=folder.name))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == folder.name]:
        del sys.modules[name]


@pytest.fixture
def kernels(cache: Path, package: Path) -> Kernels:
    return Kernels(package.name, package)


def again(kernels: Kernels) -> Kernels:
    """Return the same kernels as another process would meet them: nothing loaded yet."""
    return Kernels(kernels.package, kernels.folder)


def dot(kernels: Kernels, dtype: torch.dtype = torch.float32) -> float:
    a, b = torch.arange(37, dtype=dtype), torch.full((37,), 2, dtype=dtype)
    kernels.load("sums.dot", dtype)(a.data_ptr(), b.data_ptr(), 37)
    return b[0].item()


DOT = 2.0 * sum(range(37))


def forbid_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernels, "_compiled", lambda *_: pytest.fail("compiled where machine code was at hand"))


def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows with each compilation."""
    seen: list[str] = []
    compiled = Kernels._compiled

    def counted(self: Kernels, name: str, dtype: torch.dtype) -> Code:
        seen.append(name)
        return compiled(self, name, dtype)

    monkeypatch.setattr(Kernels, "_compiled", counted)
    return seen


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_of_argument_arrives(kernels: Kernels, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    n = 19
    x, index, keep = torch.randn(n, dtype=dtype), torch.randperm(n), torch.rand(n) < 0.5
    expected = torch.where(keep, torch.exp(x[index] * 0.3 / n), 0)

    for attempt in ("compiled", "from the cache"):
        out = torch.full((n,), torch.nan, dtype=dtype)
        forward = again(kernels).load("sums.forward", dtype)
        forward(x.data_ptr(), index.data_ptr(), keep.view(torch.uint8).data_ptr(), out.data_ptr(), 0.3, n)
        torch.testing.assert_close(out, expected, msg=attempt)
        forbid_compiling(monkeypatch)


def test_a_kernel_is_loaded_once(kernels: Kernels) -> None:
    assert kernels.load("sums.dot", torch.float32) is kernels.load("sums.dot", torch.float32)
    assert kernels.load("sums.dot", torch.float32) is not kernels.load("sums.dot", torch.float64)
    assert dot(kernels, torch.float32) == dot(kernels, torch.float64) == DOT


def test_the_code_is_vectorized_as_numbas_is(kernels: Kernels) -> None:
    """The instructions are Numba's own, but for the call's frame."""
    import numba
    from numba import types

    kernels.load("sums.dot", torch.float32)
    source = sys.modules[f"{kernels.package}.sums"].dot
    pointer = types.CPointer(types.float32)
    numbas = numba.njit(
        types.void(pointer, pointer, types.int64),
        error_model="numpy",
        fastmath=compiler._FASTMATH,
        no_cpython_wrapper=True,
        no_cfunc_wrapper=True,
    )(source)
    text = compiler._numba_code(source, source.signature, torch.float32)
    module = compiler._module(text, source.signature, torch.float32, "dot")
    own = compiler._target_machine().emit_assembly(module)

    def arithmetic(assembly: str) -> Counter[str]:
        return Counter(re.findall(r"^\tv?\w*(?:add|mul|mla)\w*[psd]\w*\t.*?([xyz]mm|$)", assembly, re.MULTILINE))

    assert arithmetic(own) == arithmetic(numbas.inspect_asm(numbas.signatures[0]))
    assert arithmetic(own)


def test_what_a_kernel_must_not_do_is_told(kernels: Kernels) -> None:
    with pytest.raises(BuildError, match=r"must not raise ValueError\(of n\)"):
        kernels.load("sums.raises", torch.float32)
    with pytest.raises(BuildError, match=r"must not allocate.*NRT_"):
        kernels.load("sums.allocates", torch.float32)
    assert dot(kernels) == DOT  # the linker survives a failure


WARM = """
import sys
from pathlib import Path
import torch
from regard.engines.fused.compiler import Kernels
x = torch.ones(4, dtype=torch.float64)
Kernels({package!r}, Path({folder!r})).load("sums.dot", torch.float64)(x.data_ptr(), x.data_ptr(), 4)
assert x[0] == 4, x
loaded = {{name.split(".")[0] for name in sys.modules}}
assert "numba" not in loaded and {package!r} not in loaded, loaded
"""


def test_a_fresh_process_loads_without_numba(kernels: Kernels) -> None:
    kernels.load("sums.dot", torch.float64)
    script = WARM.format(package=kernels.package, folder=str(kernels.folder))
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "foreign", "no object", "not JSON's object"])
def test_a_damaged_file_is_replaced(kernels: Kernels, cache: Path, damage: str) -> None:
    dot(kernels)
    (path,) = cache.iterdir()
    good = path.read_bytes()
    head, _, code = good.partition(b"\n")
    path.write_bytes({
        "truncated": good[:-100],
        "flipped": good[:-9] + bytes([good[-9] ^ 1]) + good[-8:],
        "empty": b"",
        "foreign": os.urandom(5000),
        "no object": head,
        "not JSON's object": b"[]\n" + code,
    }[damage])  # fmt: skip
    assert dot(again(kernels)) == DOT
    assert path.read_bytes()[: len(head)] == head
    assert len(path.read_bytes()) == len(good)


def test_code_that_does_not_link_is_replaced(kernels: Kernels, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the file is whole, and its hash is right, but it is no object file."""
    dot(kernels)
    junk = Code(("real*", "real*", "int"), "regard_sums_dot_float32", b"junk" * 99)
    Entry("sums.dot", "float32", kernels.key).write(junk)
    seen = compilations(monkeypatch)
    assert dot(again(kernels)) == DOT
    assert seen == ["sums.dot"]


def test_a_file_of_another_kernel_is_not_taken(kernels: Kernels, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.load("sums.dot", torch.float64)
    (path,) = cache.iterdir()
    (cache / path.name.replace("float64", "float32")).write_bytes(path.read_bytes())
    seen = compilations(monkeypatch)
    assert dot(again(kernels), torch.float32) == DOT
    assert seen == ["sums.dot"]


def test_old_code_goes_when_a_source_changes(kernels: Kernels, cache: Path) -> None:
    dot(kernels, torch.float32)
    dot(kernels, torch.float64)
    before = {path.name for path in cache.iterdir()}
    (kernels.folder / "helpers.py").write_text(HELPERS + "# changed\n")
    assert dot(again(kernels), torch.float32) == DOT
    after = {path.name for path in cache.iterdir()}
    assert len(before) == len(after) == 2
    assert {name.split("-")[1] for name in before & after} == {"float64"}


def test_code_of_a_source_that_changed_meanwhile_is_not_kept(kernels: Kernels, cache: Path) -> None:
    assert kernels.key
    (kernels.folder / "helpers.py").write_text(HELPERS + "# changed\n")
    assert dot(kernels) == DOT
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("kind", ["under a file", "not readable"])
def test_a_folder_that_cannot_be_used(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    place = tmp_path / "place"
    if kind == "under a file":
        place.touch()
    else:
        place.mkdir(mode=0)
    monkeypatch.setenv("REGARD_CACHE_DIR", str(place / "cache"))
    assert dot(kernels) == DOT
    assert dot(again(kernels)) == DOT
    place.chmod(0o700)


def test_a_full_disk(kernels: Kernels, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert dot(kernels) == DOT
    assert list(cache.iterdir()) == []


def test_no_home(monkeypatch: pytest.MonkeyPatch, kernels: Kernels) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("REGARD_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert dot(kernels) == DOT


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("REGARD_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert kernel_cache.root() == tmp_path / ".cache" / "regard"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert kernel_cache.root() == tmp_path / "xdg" / "regard"
    monkeypatch.setenv("REGARD_CACHE_DIR", str(tmp_path / "chosen"))
    assert kernel_cache.root() == tmp_path / "chosen"


@pytest.mark.skipif(sys.platform == "win32", reason="modes say nothing there")
def test_what_others_can_write_is_not_loaded(kernels: Kernels, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dot(kernels)
    assert cache.stat().st_mode & 0o777 == 0o700
    (path,) = cache.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    seen = compilations(monkeypatch)

    for what, open_to_others, private in ((cache, 0o777, 0o700), (cache, 0o770, 0o700), (path, 0o666, 0o600)):
        seen.clear()
        what.chmod(open_to_others)
        assert dot(again(kernels)) == DOT
        assert seen == ["sums.dot"], f"loaded from {what.name} of mode {open_to_others:o}"
        what.chmod(private)
    seen.clear()
    assert dot(again(kernels)) == DOT
    assert not seen


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="users have no numbers there")
def test_what_another_user_owns_is_not_loaded(kernels: Kernels, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dot(kernels)
    seen = compilations(monkeypatch)
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    assert dot(again(kernels)) == DOT
    assert seen == ["sums.dot"]


SAYS = """
import logging, sys
from pathlib import Path
import torch
from regard.engines.fused.compiler import Kernels
logging.getLogger("regard").setLevel(logging.{level})
for _ in range(2):
    Kernels({package!r}, Path({folder!r})).load("sums.dot", torch.float64)
"""


@pytest.mark.slow
def test_a_compilation_is_announced_once_and_can_be_silenced(kernels: Kernels, cache: Path) -> None:
    """As a plain session sees it, which has set up no logging."""

    def said(level: str) -> list[str]:
        script = SAYS.format(package=kernels.package, folder=str(kernels.folder), level=level)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(kernels.folder.parent)])}
        done = subprocess.run(
            [sys.executable, "-c", script], check=True, timeout=60, capture_output=True, text=True, env=environment
        )
        return done.stderr.splitlines()

    (line,) = said("NOTSET")
    assert "sums.dot for float64, once on this machine" in line
    assert said("NOTSET") == []
    for path in cache.iterdir():
        path.unlink()
    assert said("ERROR") == []


def test_a_compilation_that_cannot_be_kept_says_so(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "place").touch()
    monkeypatch.setenv("REGARD_CACHE_DIR", str(tmp_path / "place" / "cache"))
    assert dot(kernels) == DOT
    (message,) = caplog.messages
    assert "in every process, because the cache folder is not writable" in message


def test_processes_that_compile_the_same_do_not_disturb_each_other(kernels: Kernels, cache: Path) -> None:
    context = multiprocessing.get_context("spawn")
    result = context.Queue()
    children = [context.Process(target=in_child, args=(kernels.package, kernels.folder, result)) for _ in range(2)]
    for child in children:
        child.start()
    assert [result.get(timeout=60) for _ in children] == [(DOT, DOT)] * 2
    for child in children:
        child.join(timeout=60)
    assert len(list(cache.iterdir())) == 2  # one for each dtype, and nothing unfinished
    assert all(kernels.is_cached("sums.dot", dtype) for dtype in DTYPES)


def test_threads_compile_once(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = compilations(monkeypatch)
    barrier = threading.Barrier(6)
    found: list[Function] = []

    def ask() -> None:
        barrier.wait()
        found.append(kernels.load("sums.dot", torch.float32))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert len(set(map(id, found))) == 1
    assert seen == ["sums.dot"]


def in_child(package: str, folder: Path, result: object) -> None:
    """Load one kernel that the parent has compiled and one that it has not."""
    sys.path.insert(0, str(folder.parent))
    kernels = Kernels(package, folder)
    result.put((dot(kernels), dot(kernels, torch.float64)))  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_load_for_themselves(kernels: Kernels, method: str) -> None:
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} here")
    assert dot(kernels) == DOT
    context = multiprocessing.get_context(method)
    result = context.Queue()
    child = context.Process(target=in_child, args=(kernels.package, kernels.folder, result))
    child.start()
    assert result.get(timeout=60) == (DOT, DOT)
    child.join(timeout=60)
    assert child.exitcode == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_during_a_load_waits(kernels: Kernels) -> None:
    """A child that forked while another thread held the lock would wait for it forever."""
    thread = threading.Thread(target=kernels.load, args=("sums.dot", torch.float32))
    thread.start()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if dot(again(kernels)) == DOT else 1
        finally:  # never on into what the parent runs
            os._exit(code)
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert dot(kernels) == DOT


def test_the_gil_is_released(kernels: Kernels) -> None:
    """Asked of ctypes: a function type that keeps the GIL carries a flag."""
    flags = type(kernels.load("sums.dot", torch.float32))._flags_  # type: ignore[attr-defined]
    assert not flags & ctypes._FUNCFLAG_PYTHONAPI  # type: ignore[attr-defined]


def test_pointers_beyond_32_bits(kernels: Kernels) -> None:
    """Addresses pass whole; numpy's arrays lie elsewhere than torch's."""
    a, b = np.ones(8), np.full(8, 3.0)
    kernels.load("sums.dot", torch.float64)(a.ctypes.data, b.ctypes.data, 8)
    assert b[0] == 24
