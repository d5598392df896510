"""Files: atomic writes, and reading of plain and compressed files, pipes and standard input."""

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

# Atomic writes --------------------------------------------------------------------------------------------------------


try:
    import fcntl
except ImportError:  # Windows has other locks, and does not allow removing open files
    fcntl = None  # type: ignore[assignment]

#: Suffix of temporary files.
_SUFFIX = ".unfinished"


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Add the file name to an OSError without one, such as "disk full" on an open file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise type(error)(error.errno, error.strerror, str(path)) from error


@contextmanager
def leaving_nothing(folder: Path) -> Iterator[None]:
    """On failure, remove new files from a folder, and the folder if it is new."""
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
    """Write a file atomically; see :func:`write_together`."""
    write_together({path: data}, private=private)


def write_out(path: Path, data: bytes) -> None:
    """Write a user's file: atomically for regular files, directly for pipes and devices. Links are followed."""
    with naming(path):
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                file.write(data)
            return
    write_atomically(Path(os.path.realpath(path)), data)


def write_together(files: Mapping[Path, bytes], *, private: bool = False) -> None:
    """Write files atomically; if one cannot be written, none is.

    Also removes the temporary files of killed writers in the same folders.

    Parameters
    ----------
    files : mapping of Path to bytes
    private : bool, default False
        Restrict access to this user, regardless of the umask.

    Raises
    ------
    OSError
        With the name of the file.
    """
    made: dict[Path, Path] = {}
    with ExitStack() as opened:
        try:
            for path, data in files.items():
                with naming(path):
                    number, made[path] = _unfinished(path)
                    # Keep it open and locked until it is renamed.
                    file = opened.enter_context(os.fdopen(number, "wb"))
                    file.write(data)
                    file.flush()
                    os.fsync(number)
                    if not private:
                        mask = os.umask(0)
                        os.umask(mask)
                        made[path].chmod(0o666 & ~mask)  # temporary files are private by default
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
    """Remove the temporary files of killed writers; those of running writers are locked."""
    if fcntl is None:
        return
    for path in folder.glob(f".*{_SUFFIX}"):
        with suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _unfinished(path: Path) -> tuple[int, Path]:
    """Open a temporary file in the folder of a path, locked while it is open."""
    while True:
        number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:50]}.", suffix=_SUFFIX)
        if fcntl is None:
            return number, Path(name)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(number, fcntl.LOCK_EX)
        if os.fstat(number).st_nlink:
            return number, Path(name)
        os.close(number)  # another process removed it before it was locked


# Reading user files: plain or gzip, pipes and standard input ----------------------------------------------------------


_GZIP = b"\x1f\x8b"
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
#: Exceptions from reading a truncated or damaged gzip file.
DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile)


def display_name(path: str | Path) -> str:
    """Return the name of a file for messages; ``"-"`` is standard input."""
    return "standard input" if str(path) == "-" else str(path)


@contextmanager
def open_file(path: str | Path, function: str) -> Iterator[BinaryIO]:
    """Open a file for reading bytes, decompressed if its content starts like gzip.

    Parameters
    ----------
    path : str or Path
        ``"-"`` is standard input.
    function : str
        Prefix of error messages.

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
        See :func:`open_file`; also if there are more than ``most`` bytes.
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
    """Return the error for a line that is not UTF-8 text.

    Parameters
    ----------
    function, name : str
        Prefix of the error, and name of the file.
    number : int
        Line number, from 1.
    raw : bytes
        The line, or a part of it.
    error : UnicodeDecodeError, optional
        The decoding error.
    before : int, default 0
        Number of bytes of the line before this part.
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
