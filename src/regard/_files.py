"""Files that a user names, opened for their bytes: plain or compressed by gzip, pipes and standard input too."""

from __future__ import annotations

import codecs
import errno
import gzip
import io
import os
import select
import stat
import sys
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from regard._errors import RegardWarning, rejected

_GZIP = b"\x1f\x8b"
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
#: What reading a gzip file raises that is cut short or damaged.
DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile)
#: Milliseconds that a named pipe may be silent before the reader is told what is waited for.
_SILENT = 1000


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

    Warns
    -----
    RegardWarning
        If it is a pipe into which nobody writes: this waits.
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
    """Open a file, or a pipe: opening it in the usual way would wait, without a word, until somebody writes into it."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not hasattr(os, "O_NONBLOCK") or not path.is_fifo():
        return path.open("rb")
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if stat.S_ISFIFO(os.fstat(number).st_mode):
            waiting = select.poll()
            waiting.register(number, select.POLLIN | select.POLLHUP)
            if not waiting.poll(_SILENT):
                warnings.warn(f"waiting for something to be written to {path}", RegardWarning, stacklevel=2)
                waiting.poll()
        os.set_blocking(number, True)
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise
