"""Guarded memory: every array of a compiled kernel between pages that nobody may touch.

A kernel that reads or writes past an array's end dies at once, with a signal, instead of answering from memory that is
not its own. Memory before the array, and all scratch memory, holds NaN, so that a wrong read shows; a wrong write
before the array is found when the kernel is done.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from array import array
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from regard.engines.fused.kernel_call import KernelCall
from regard.engines.fused.kernels.arguments import FIELDS

_PAGE = mmap.PAGESIZE
#: Bytes of NaN in every type of float, and −1 in every type of int.
_POISON = 0xFF
_READ_WRITE, _NOTHING = 3, 0


def _system(name: str, result: Any, *types: Any) -> Any:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.restype, function.argtypes = result, types
    return function


_mmap = _system("mmap", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_munmap = _system("munmap", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
_mprotect = _system("mprotect", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@contextmanager
def guarded(size: int) -> Iterator[int]:
    """Lend the address of so many bytes that end where a page begins which nobody may touch; they hold poison.

    Raises
    ------
    AssertionError
        If something was written to the bytes before them.
    """
    inner = -(-max(size, 1) // _PAGE) * _PAGE
    whole = inner + 2 * _PAGE
    base = _mmap(None, whole, _READ_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if base in (None, ctypes.c_void_p(-1).value):
        raise MemoryError(f"no guarded memory of {whole} bytes")
    try:
        first, margin = base + _PAGE, inner - size
        ctypes.memset(first, _POISON, inner)
        for page in (base, first + inner):
            _mprotect(page, _PAGE, _NOTHING)
        yield first + margin
        if ctypes.string_at(first, margin) != bytes([_POISON]) * margin:
            raise AssertionError(f"a kernel wrote before the first of {size} bytes that it was given")
    finally:
        _munmap(base, whole)


@contextmanager
def guarded_kernels() -> Iterator[None]:
    """Run the kernels of engine ``fused`` on guarded copies of all their arrays, for a ``with`` block.

    Parts of the scratch memory are guarded each by itself. Kernels run one at a time.

    Examples
    --------
    >>> import torch, regard
    >>> q = torch.randn(1, 1, 10, 3)
    >>> with guarded_kernels():
    ...     regard.attention(q, q, q, score="gaussian", engine="fused").shape
    torch.Size([1, 1, 10, 3])
    """
    lock = threading.Lock()

    def run(
        call: KernelCall,
        arrays: Mapping[str, Tensor | None],
        numbers: Mapping[str, int],
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        arguments = call.filled(arrays, numbers, sizes)  # checked as ever
        given = {name: tensor for name, tensor in {**call.arrays, **arrays}.items() if tensor is not None}
        filled = dict(zip(FIELDS, arguments))
        with lock, ExitStack() as stack:
            for name, tensor in given.items():
                size = tensor.numel() * tensor.element_size()
                filled[name] = stack.enter_context(guarded(size))
                ctypes.memmove(filled[name], tensor.data_ptr(), size)
            _guard_scratch(stack, filled, call.sizes["scratch_numbers"], call.dtype.itemsize)
            call.execute(array("q", filled.values()))
            for name, tensor in given.items():
                ctypes.memmove(tensor.data_ptr(), filled[name], tensor.numel() * tensor.element_size())

    with patch.object(KernelCall, "__call__", run):
        yield


def _guard_scratch(stack: ExitStack, filled: dict[str, int], size: int, item: int) -> None:
    """Put each part of the scratch memory, which ends where the next begins, into guarded memory of its own."""
    filled["scratch"] = stack.enter_context(guarded(size * item))
    starts = {name: place for name, place in filled.items() if name.startswith("at_")}
    for name, start in starts.items():
        stop = min((place for place in starts.values() if place > start), default=size)
        filled[name] = (stack.enter_context(guarded((stop - start) * item)) - filled["scratch"]) // item
