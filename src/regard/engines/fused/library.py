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
from regard.engines.fused.arguments import BAND, BLOCK, BLOCKS, CHUNK, FIELDS, GROUP, PAD, RECORDS, SPAN, TILE

#: The library's file; REGARD_KERNELS names another build of it, such as one with sanitizers.
FILE: Final = Path(os.environ.get("REGARD_KERNELS") or Path(__file__).parent / "_kernels.so")
#: The kinds of processors of each machine, the most capable last; torch's names of what they can do.
_X86: Final = {"DEFAULT": "v2", "AVX2": "v3", "AVX512": "v4"}
_PLAIN: Final = "baseline"
#: What an ELF file calls each machine.
_ELF_MACHINES: Final = {"x86_64": 62, "amd64": 62, "aarch64": 183, "arm64": 183}

_DTYPES: Final = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}
#: Arguments of the kernels that do not take an array of numbers: p for an address, i for an integer, r for a real.
SIGNATURES: Final = {
    "decoding.read_rows": "pippippipiiiiirpip",
    "decoding.log_sums": "piiiiipipp",
    "decoding.largest_sums": "pppiiiiiipppip",
    "panels.product": "pppiipiipiip",
    "layers.forward": "prpiiip",
    "recurrence.forward": "priip",
    "recurrence.step": "priip",
    "recurrence.backward": "priip",
    "lines.sizes": "iiip",
    "lines.forward": "prriip",
    "lines.backward": "prriii" + "pppppp",
    "selected.mark": "ppiip",
    "selected.forward": "ppppprii" + "pppp",
    "selected.backward": "ppppprii" + "iippppppp",
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
    dtype : torch.dtype
        That of keys and values: float32 or float64; for ``"rows.forward"`` also float16 or bfloat16.

    Raises
    ------
    MissingLibraryError
        If the library is missing, damaged, or built from other sources.
    """
    if _LIBRARY is None:
        raise MissingLibraryError(_PROBLEM)
    function = getattr(_LIBRARY, _symbol(name, dtype, processor()))
    real = ctypes.c_double if dtype == torch.float64 else ctypes.c_float
    types = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "r": real}
    function.argtypes = [types[each] for each in SIGNATURES.get(name, "pp")]
    function.restype = None
    loaded: Function = function
    return loaded


def _symbol(name: str, dtype: torch.dtype, kind: str) -> str:
    """Return what a kernel is called in the library."""
    return f"regard_{name.replace('.', '_')}_{_DTYPES[dtype]}_{kind}"


def workers() -> tuple[int, int]:
    """Return the addresses of what threads run to work on one call of a kernel together: see csrc/team.cpp."""
    found = (ctypes.cast(each, ctypes.c_void_p).value for each in (_LIBRARY.regard_work, _LIBRARY.regard_work_range))
    alone, in_range = (address or 0 for address in found)
    return alone, in_range


@cache
def processor() -> str:
    """Return the kind of processor whose code is used."""
    kinds = _kinds()
    asked = os.environ.get("REGARD_CPU")
    if not asked:
        return kinds[-1]
    if asked not in kinds:
        expected = f"be one of {', '.join(kinds)}, which this processor can run"
        raise rejected("regard", "REGARD_CPU", expected, repr(asked))
    return asked


def _kinds() -> list[str]:
    """Return the kinds of processors whose code this one can run, the most capable last."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return [_PLAIN]
    kinds = list(_X86.values())
    able = _X86.get(torch.backends.cpu.get_cpu_capability(), kinds[0])
    return kinds[: kinds.index(able) + 1]


def problem() -> str | None:
    """Return why the kernels cannot be used, None if they can."""
    return _PROBLEM


def _opened() -> tuple[Any, str | None]:
    """Return the library, or None and why it cannot be used."""
    if not FILE.exists():
        return None, "its compiled kernels are missing; installing regard with a C++ compiler builds them"
    try:
        if (flaw := _flaw(FILE)) is not None:
            raise OSError(flaw)
        library = ctypes.CDLL(str(FILE))
        library.regard_fields.restype = library.regard_records.restype = ctypes.c_char_p
        library.regard_sizes.restype = ctypes.POINTER(ctypes.c_int64)
        sizes = TILE, CHUNK, BLOCK, BLOCKS, GROUP, BAND, PAD, SPAN
        records = "\n".join(" ".join((name, *fields)) for name, fields in RECORDS.items())
        fits = library.regard_fields().decode().split() == list(FIELDS)
        fits = fits and library.regard_records().decode() == records
        fits = fits and tuple(library.regard_sizes()[: len(sizes)]) == sizes and hasattr(library, "regard_work_range")
    except (OSError, AttributeError, UnicodeDecodeError) as error:
        return None, f"its compiled kernels cannot be loaded ({error}); install regard again"
    kind = _kinds()[-1]
    if fits and not hasattr(library, _symbol("dot.forward", torch.float32, kind)):
        return None, f"its compiled kernels have no code for this processor ({kind}); install regard again"
    if not fits or not all(hasattr(library, _symbol(name, torch.float32, kind)) for name in SIGNATURES):
        return None, "its compiled kernels are of another version; install regard again"
    return library, None


def _flaw(path: Path) -> str | None:
    """Return what is wrong with an ELF file if loading it could crash the process, or fail without a reason."""
    with path.open("rb") as file:
        head = file.read(64)
    if head[:4] != b"\x7fELF":
        return None
    # The table of sections comes last.
    offset = int.from_bytes(head[40:48], "little")
    size, count = (int.from_bytes(head[at : at + 2], "little") for at in (58, 60))
    if path.stat().st_size < max(offset + size * count, 64):
        return "the file is cut off"
    machine = _ELF_MACHINES.get(platform.machine().lower())
    if machine not in (None, int.from_bytes(head[18:20], "little")):
        return "they are for another kind of processor"
    return None


_LIBRARY, _PROBLEM = _opened()
