"""Large pages for large arrays: a first touch of each small page costs more than what a kernel writes there."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from functools import cache
from typing import Any

from torch import Tensor

#: Bytes of a large page, and of an array that is worth it: allocators return smaller ones that were used before.
_PAGE, _LARGE = 2 << 20, 4 << 20


def in_large_pages(array: Tensor) -> Tensor:
    """Return an array, after asking for large pages if it is large; it was allocated but not written to."""
    size, start = array.untyped_storage().nbytes(), array.data_ptr()
    advise = _advise() if size >= _LARGE else None
    if advise is not None:
        first, last = -(-start // _PAGE) * _PAGE, (start + size) // _PAGE * _PAGE
        advise(first, last - first, mmap.MADV_HUGEPAGE)  # where there are none, nothing changes
    return array


@cache
def _advise() -> Any:
    """Return the C library's ``madvise``, or None where pages have one size."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    with suppress(OSError, AttributeError):
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        return advise
    return None
