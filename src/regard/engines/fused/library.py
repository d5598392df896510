"""The compiled kernels: which library, which processor's code in it, and how to call it.

``csrc`` is compiled when the package is built. The library has code for several kinds of processors; torch says which
kind this one is, and ``REGARD_CPU`` overrides that (``v2``, ``v3`` or ``v4`` for x86-64).
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from regard._utils.errors import rejected
from regard.engines.fused.arguments import BAND, BLOCK, CHUNK, FIELDS, GROUP, PAD, TILE

#: The library's file; REGARD_KERNELS names another build of it, such as one with sanitizers.
FILE: Final = Path(os.environ.get("REGARD_KERNELS") or Path(__file__).parent / "_kernels.so")
#: The kinds of processors of each machine, the most capable last; torch's names of what they can do.
_X86: Final = {"DEFAULT": "v2", "AVX2": "v3", "AVX512": "v4"}
_PLAIN: Final = "baseline"

_DTYPES: Final = {torch.float32: "float32", torch.float64: "float64"}
#: Arguments of the kernels that do not take an array of numbers: p for an address, i for an integer, r for a real.
_SIGNATURES: Final = {
    "decoding.read_rows": "pippippipiiiiirpip",
    "decoding.log_sums": "piiiiipipp",
    "decoding.largest_sums": "pppiiiiiipppip",
    "panels.product": "pppiipiipiip",
    "layers.forward": "prpiiip",
}

Function = Callable[..., None]


class MissingLibraryError(RuntimeError):
    """There are no compiled kernels that this process can use."""


@cache
def load(name: str, dtype: torch.dtype) -> Function:
    """Return a kernel as a function of addresses and numbers.

    It runs without the GIL and without checks.

    Parameters
    ----------
    name : str
        ``"family.pass"``, such as ``"additive.forward"``.
    dtype : {torch.float32, torch.float64}

    Raises
    ------
    MissingLibraryError
        If the library is missing, damaged, or built from other sources.
    """
    if _LIBRARY is None:
        raise MissingLibraryError(_PROBLEM)
    function = getattr(_LIBRARY, f"regard_{name.replace('.', '_')}_{_DTYPES[dtype]}_{processor()}")
    real = ctypes.c_float if dtype == torch.float32 else ctypes.c_double
    types = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "r": real}
    function.argtypes = [types[each] for each in _SIGNATURES.get(name, "pp")]
    function.restype = None
    loaded: Function = function
    return loaded


@cache
def processor() -> str:
    """Return the kind of processor whose code is used."""
    kinds = list(_X86.values()) if platform.machine().lower() in ("x86_64", "amd64") else [_PLAIN]
    able = _X86.get(torch.backends.cpu.get_cpu_capability(), kinds[0]) if len(kinds) > 1 else _PLAIN
    asked = os.environ.get("REGARD_CPU")
    if not asked:
        return able
    if asked not in kinds[: kinds.index(able) + 1]:
        expected = f"be one of {', '.join(kinds[: kinds.index(able) + 1])}, which this processor can run"
        raise rejected("regard", "REGARD_CPU", expected, repr(asked))
    return asked


def problem() -> str | None:
    """Return why the kernels cannot be used, None if they can."""
    return _PROBLEM


def _opened() -> tuple[Any, str | None]:
    """Return the library, or None and why it cannot be used."""
    if not FILE.exists():
        return None, "its compiled kernels are missing; installing regard with a C++ compiler builds them"
    try:
        if _is_cut_off(FILE.read_bytes()):
            raise OSError("the file is cut off")
        library = ctypes.CDLL(str(FILE))
        library.regard_fields.restype = ctypes.c_char_p
        library.regard_sizes.restype = ctypes.POINTER(ctypes.c_int64)
        sizes = TILE, CHUNK, BLOCK, GROUP, BAND, PAD
        fits = library.regard_fields().decode().split() == list(FIELDS)
        fits = fits and tuple(library.regard_sizes()[: len(sizes)]) == sizes
    except (OSError, AttributeError, UnicodeDecodeError) as error:
        return None, f"its compiled kernels cannot be loaded ({error}); install regard again"
    return (library, None) if fits else (None, "its compiled kernels are of another version; install regard again")


def _is_cut_off(data: bytes) -> bool:
    """Whether an ELF file ends before its table of sections, which comes last: loading it could crash the process."""
    if data[:4] != b"\x7fELF":
        return False
    offset = int.from_bytes(data[40:48], "little")
    size, count = (int.from_bytes(data[at : at + 2], "little") for at in (58, 60))
    return len(data) < max(offset + size * count, 64)


_LIBRARY, _PROBLEM = _opened()
