"""Guarded memory: place every array of a compiled kernel between inaccessible pages.

A kernel that reads or writes past the end of an array then crashes immediately with a signal. Memory before the array,
and all scratch memory, holds NaN, which exposes wrong reads; wrong writes before the array are detected after the
kernel returns.
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

from regard.engines.fused.arguments import FIELDS
from regard.engines.fused.kernel_call import KernelCall

_PAGE = mmap.PAGESIZE
#: A byte that makes NaN in every float type and −1 in every int type.
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
    """Yield the address of ``size`` poisoned bytes that end at an inaccessible page.

    Raises
    ------
    AssertionError
        If the bytes before them were overwritten.
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
            raise AssertionError(f"a kernel wrote before the start of its array of {size} bytes")
    finally:
        _munmap(base, whole)


@contextmanager
def guarded_kernels() -> Iterator[None]:
    """Run the kernels of engine ``fused`` on guarded copies of all their arrays in a ``with`` block.

    Each part of the scratch memory is guarded separately. Kernels run one at a time.

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
        arguments = call.filled(arrays, numbers, sizes)  # with the usual checks
        given = {name: tensor for name, tensor in {**call.arrays, **arrays}.items() if tensor is not None}
        filled = dict(zip(FIELDS, arguments))
        with lock, ExitStack() as stack:
            for name, tensor in given.items():
                size = _extent(tensor)
                filled[name] = stack.enter_context(guarded(size))
                ctypes.memmove(filled[name], tensor.data_ptr(), size)
            _guard_scratch(stack, filled, call.sizes["scratch_numbers"], call.dtype.itemsize)
            call.execute(array("q", filled.values()))
            for name, tensor in given.items():
                ctypes.memmove(tensor.data_ptr(), filled[name], _extent(tensor))

    with patch.object(KernelCall, "__call__", run):
        yield


def _extent(tensor: Tensor) -> int:
    """Return the number of bytes from the first element of a tensor to the end of its last one."""
    if tensor.numel() == 0:
        return 0
    return (1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))) * tensor.element_size()


def _guard_scratch(stack: ExitStack, filled: dict[str, int], size: int, item: int) -> None:
    """Put each part of the scratch memory into separate guarded memory; a part ends where the next begins."""
    filled["scratch"] = stack.enter_context(guarded(size * item))
    starts = {name: place for name, place in filled.items() if name.startswith("at_")}
    for name, start in starts.items():
        stop = min((place for place in starts.values() if place > start), default=size)
        filled[name] = (stack.enter_context(guarded((stop - start) * item)) - filled["scratch"]) // item
