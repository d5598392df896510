"""Files: written whole or not at all, and opened whether plain, compressed, a pipe or standard input."""

from __future__ import annotations

import codecs
import gzip
import io
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from regard._utils.errors import rejected

# Files that appear whole or not at all, and nothing left of those whose writer was killed -----------------------------


try:
    import fcntl
except ImportError:  # Windows has other locks, and does not let a file be removed that is open
    fcntl = None  # type: ignore[assignment]

#: What the names of temporary files end in.
_SUFFIX = ".unfinished"


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Give an OSError that does not name a file this one: an error of an open file, such as a full disk, does not."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise type(error)(error.errno, error.strerror, str(path)) from error


@contextmanager
def leaving_nothing(folder: Path) -> Iterator[None]:
    """Remove from a folder what was not there before, and the folder if it is new, where what is done in it fails."""
    is_new = not folder.exists()
    before = set() if is_new else set(folder.iterdir())
    try:
        yield
    except BaseException:
        for path in set(folder.iterdir()) - before if folder.exists() else ():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        if is_new:
            with suppress(OSError):
                folder.rmdir()
        raise


def write_atomically(path: Path, data: bytes, *, private: bool = False) -> None:
    """Write a file so that it appears whole or not at all; see :func:`write_together`."""
    write_together({path: data}, private=private)


def write_out(path: Path, data: bytes) -> None:
    """Write a file that a user names: whole or not at all, where it is a file; into it, where it is a pipe or device.

    A link is followed, and stays one.
    """
    with naming(path):
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                file.write(data)
            return
    write_atomically(Path(os.path.realpath(path)), data)


def write_together(files: Mapping[Path, bytes], *, private: bool = False) -> None:
    """Write files, each of which appears whole or not at all; none does if one of them cannot be written.

    What writers that were killed have left in the same folders is removed.

    Parameters
    ----------
    files : mapping of Path to bytes
    private : bool, default False
        Let nobody but this user read or write them, whatever the umask says.

    Raises
    ------
    OSError
        Which names the file.
    """
    made: dict[Path, Path] = {}
    with ExitStack() as opened:
        try:
            for path, data in files.items():
                with naming(path):
                    number, made[path] = _unfinished(path)
                    # Open, and locked, until it has its name.
                    file = opened.enter_context(os.fdopen(number, "wb"))
                    file.write(data)
                    file.flush()
                    os.fsync(number)
                    if not private:
                        mask = os.umask(0)
                        os.umask(mask)
                        made[path].chmod(0o666 & ~mask)  # a temporary file's own mode would hide it from other users
            for path, written in made.items():
                with naming(path):
                    written.replace(path)
        except BaseException:
            for written in made.values():
                written.unlink(missing_ok=True)
            raise
    for folder in {path.parent for path in files}:
        remove_unfinished(folder)


def remove_unfinished(folder: Path) -> None:
    """Remove the temporary files of writers that are no more; those of a living one are locked."""
    if fcntl is None:
        return
    for path in folder.glob(f".*{_SUFFIX}"):
        with suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _unfinished(path: Path) -> tuple[int, Path]:
    """Return an open temporary file beside a path, locked for as long as it is open or its process lives."""
    while True:
        number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:50]}.", suffix=_SUFFIX)
        if fcntl is None:
            return number, Path(name)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(number, fcntl.LOCK_EX)
        if os.fstat(number).st_nlink:
            return number, Path(name)
        os.close(number)  # it was taken for an abandoned one before it was locked


# Files that a user names, opened for their bytes: plain or compressed by gzip, pipes and standard input too -----------


_GZIP = b"\x1f\x8b"
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
#: What reading a gzip file raises that is cut short or damaged.
DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile)


def display_name(path: str | Path) -> str:
    """Return what messages call a file; ``"-"`` is standard input."""
    return "standard input" if str(path) == "-" else str(path)


@contextmanager
def open_file(path: str | Path, function: str) -> Iterator[BinaryIO]:
    """Open a file for its bytes, decompressed where its content begins as gzip does.

    Parameters
    ----------
    path : str or Path
        ``"-"`` is standard input.
    function : str
        What error messages begin with.

    Raises
    ------
    ValueError
        If it is missing, a folder or unreadable, or compressed and cut short or damaged.
    """
    name = display_name(path)
    try:
        file = _standard_input() if str(path) == "-" else _file(Path(path))
    except FileNotFoundError:
        raise rejected(function, name, "exist", "no such file") from None
    except IsADirectoryError:
        raise rejected(function, name, "be a file", "a folder") from None
    except (OSError, ValueError) as error:  # a name with a zero byte is a ValueError
        raise rejected(function, name, "be readable", getattr(error, "strerror", None) or error) from None
    try:
        if file.peek(2).startswith(_GZIP):
            with gzip.open(file) as plain:
                yield plain
        else:
            yield file
    except DAMAGED:
        raise rejected(function, name, "be a whole gzip file", "one that is cut short or damaged") from None
    except OSError as error:
        if error.filename is not None:
            raise
        raise rejected(function, name, "be readable", error.strerror or type(error).__name__) from None
    finally:
        if str(path) != "-":
            file.close()


def read_bytes(path: str | Path, function: str, most: int) -> bytes:
    """Return the bytes of a file, decompressed as :func:`open_file` does.

    Raises
    ------
    ValueError
        As :func:`open_file`; or if there are more than ``most``, of which no more are read.
    """
    with open_file(path, function) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise rejected(
            function, display_name(path), f"have at most {most:,} bytes (unpacked, if it is compressed)", "more"
        )
    return data


def not_text(
    function: str, name: str, number: int, raw: bytes, error: UnicodeDecodeError | None = None, before: int = 0
) -> Exception:
    """Return the error of a line that is not text in UTF-8.

    Parameters
    ----------
    function, name : str
        What the error begins with, and what it calls the file.
    number : int
        Of the line, counted from 1.
    raw : bytes
        The line, or a part of it.
    error : UnicodeDecodeError, optional
        Of decoding it.
    before : int, default 0
        How many bytes of the line were before this part.
    """
    if number == 1 and raw.startswith(_UTF16):
        return rejected(function, name, "be text in UTF-8", "UTF-16 (save it in UTF-8)")
    if b"\0" in raw or error is None:
        return rejected(function, name, "be text in UTF-8", f"a binary file (zero bytes in line {number})")
    byte = f"byte 0x{raw[error.start]:02x} at column {before + error.start + 1} (save it in UTF-8)"
    return rejected(function, f"{name}, line {number}", "be text in UTF-8", byte)


def _standard_input() -> io.BufferedReader:
    binary = getattr(sys.stdin, "buffer", None)
    raw = io.BytesIO(sys.stdin.read().encode()) if binary is None else binary
    return raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(raw)


def _file(path: Path) -> io.BufferedReader:
    """Open a file, or a named pipe: that waits for a writer, as in every program, until an interrupt ends it."""
    return path.open("rb")
