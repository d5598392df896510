"""Where machine code is kept: a folder that only this user can write, one file per kernel and dtype.

What is loaded runs with the user's rights, so a file that others could have written is as good as none.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from regard._writing import write_atomically
from regard.engines.fused.kernels._kernel import TYPES


@dataclass(frozen=True)
class Code:
    """One kernel as machine code for this CPU."""

    signature: tuple[str, ...]
    symbol: str
    object: bytes


class Entry:
    """
    The file of one kernel: a line of JSON, then the object code. Every failure means that there is no file.

    Parameters
    ----------
    name : str
        ``"module.function"``.
    dtype : str
        ``"float32"`` or ``"float64"``.
    key : str
        What the code depends on, as a hash; a file with another key is not read, and replaced when one is written.
    """

    def __init__(self, name: str, dtype: str, key: str) -> None:
        self.family = f"{name}-{dtype}-"
        self.key = key

    @property
    def file(self) -> str:
        """The file's name."""
        return f"{self.family}{self.key[:32]}.kernel"

    def read(self) -> Code | None:
        """Return what is kept, None where it is missing, damaged, of something else, or not to be trusted."""
        try:
            with (_directory() / self.file).open("rb") as file:
                if not _is_private(os.fstat(file.fileno())):
                    return None
                head, code = json.loads(file.readline()), file.read()
            if (head["kernel"], head["key"]) != (self.family, self.key):
                return None
            if head["sha256"] != hashlib.sha256(code).hexdigest():
                return None
            signature = tuple(head["signature"])
            return Code(signature, str(head["symbol"]), code) if set(signature) <= TYPES else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, code: Code) -> None:
        """Keep the code under a name that appears when the file is complete, and drop what it replaces."""
        head = {
            "kernel": self.family,
            "key": self.key,
            "signature": code.signature,
            "symbol": code.symbol,
            "sha256": hashlib.sha256(code.object).hexdigest(),
        }
        with suppress(OSError):
            directory = _directory(make=True)
            write_atomically(directory / self.file, json.dumps(head).encode() + b"\n" + code.object, private=True)
            for path in directory.glob(f"{self.family}*.kernel"):
                if path.name != self.file:
                    with suppress(OSError):
                        path.unlink()


def folder() -> Path | None:
    """Return the folder of machine code, made where it is missing; None where nothing can be kept."""
    with suppress(OSError):
        directory = _directory(make=True)
        if os.access(directory, os.W_OK):
            return directory
    return None


def _directory(make: bool = False) -> Path:
    """Return the folder of machine code; raise OSError where there is none or it must not be trusted."""
    directory = root() / "kernels"
    if make:
        directory.parent.parent.mkdir(parents=True, exist_ok=True)
        directory.parent.mkdir(mode=0o700, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(directory.stat()):
        raise PermissionError(f"{directory} can be written by others, who could put machine code there")
    return directory


def _is_private(status: os.stat_result) -> bool:
    """Return whether only this user can have written what has this status."""
    if sys.platform == "win32":  # the folders of a user's profile are private there, and modes say nothing
        return True
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def root() -> Path:
    """Return where regard caches: $REGARD_CACHE_DIR, $XDG_CACHE_HOME/regard, or the platform's usual place."""
    if chosen := os.environ.get("REGARD_CACHE_DIR"):
        return Path(chosen).absolute()
    if (shared := os.environ.get("XDG_CACHE_HOME")) and Path(shared).is_absolute():
        return Path(shared) / "regard"
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "regard" / "cache"
    try:
        home = Path.home()
    except RuntimeError as error:
        raise FileNotFoundError("no home folder") from error
    return home / ("Library/Caches/regard" if sys.platform == "darwin" else ".cache/regard")
