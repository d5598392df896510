"""Files that appear whole or not at all, and what killed writers leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from regard._utils import files as _writing
from regard._utils.files import remove_unfinished, write_atomically, write_together

HANGING = """
import os, sys, time
from pathlib import Path
from regard._utils import files as _writing
_writing.os.fsync = lambda number: (print("written", flush=True), time.sleep(600))
_writing.write_atomically(Path(sys.argv[1]), b"half")
"""


@pytest.mark.slow
def test_what_a_killed_writer_leaves_is_removed_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    writer = subprocess.Popen([sys.executable, "-c", HANGING, path], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.readline()
    (left,) = tmp_path.iterdir()
    write_atomically(path, b"whole")
    assert {left, path} == set(tmp_path.iterdir()), "the writer lives"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    assert left.exists()
    write_atomically(path, b"anew")
    assert [path] == list(tmp_path.iterdir()) and path.read_bytes() == b"anew"


def test_a_writer_whose_file_was_taken_for_an_abandoned_one_makes_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = _writing.fcntl.flock, []

    def late(file: int, how: int) -> None:
        if not calls:
            calls.append(file)
            remove_unfinished(tmp_path)
        real(file, how)

    monkeypatch.setattr(_writing.fcntl, "flock", late)
    write_atomically(tmp_path / "a", b"whole")
    assert calls and [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"whole")]


def test_an_error_names_its_file_and_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(b"old")

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_writing.os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_together({first: b"new", second: b"new"})
    assert caught.value.filename == str(first)
    assert [first] == list(tmp_path.iterdir()) and first.read_bytes() == b"old"


@pytest.mark.parametrize(("private", "mode"), [(False, 0o640), (True, 0o600)])
def test_modes(tmp_path: Path, private: bool, mode: int) -> None:
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "a", b"", private=private)
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == mode
