"""A call of a kernel: every array it is given is checked against the extent that the kernel goes by."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from regard.engines.fused import library
from regard.engines.fused.arguments import FIELDS, REALS, SHAPES, F

#: The types of arrays that do not hold the compute dtype.
_DTYPES = {
    "query_class": torch.uint8,
    "key_class": torch.uint8,
    "best_key": torch.int64,
    "own": torch.int64,
    "start": torch.int64,
    "stop": torch.int64,
    "segments": torch.int64,
    "planes": torch.int64,
    "order": torch.int64,
    "query_rows": torch.int64,
    "key_rows": torch.int64,
}


#: The place of each argument by its name.
PLACES: dict[str, int] = vars(F)
#: The arguments that say how far sequences, heads and rows lie apart, of arrays that are read where they are.
_STRIDES = {name: tuple(PLACES[f"{name}_{size}"] for size in "bgs") for name in ("key", "value")}


class KernelCall:
    """A kernel with most of its arguments; the rest come with each call, from any thread.

    Parameters
    ----------
    name : str
        As :func:`library.load` takes it.
    dtype : torch.dtype
    sizes : dict of str to int
        Every size that the shapes in ``arguments.SHAPES`` speak of, by its name.
    arrays : dict of str to Tensor or None
        Those that all calls have in common; None is none.
    numbers : dict of str to int
        The same for numbers.
    stored : torch.dtype, optional
        The dtype of keys and values (B, G, S, width), if the kernel reads them where they are: with any strides, as
        long as the numbers of a row are adjacent.
    """

    def __init__(
        self,
        name: str,
        dtype: torch.dtype,
        sizes: Mapping[str, int],
        arrays: Mapping[str, Tensor | None],
        numbers: Mapping[str, int],
        stored: torch.dtype | None = None,
    ) -> None:
        self.function = library.load(name, dtype if stored is None else stored)
        self.stored = stored
        self.name, self.dtype, self.sizes = name, dtype, sizes
        self.reals = ((ctypes.c_double if dtype == torch.float64 else ctypes.c_float) * REALS)()
        self.shapes = SHAPES[name.partition(".")[2]]
        known = sizes.keys()
        self.counts = {
            name: math.prod([sizes[size] for size in shape]) for name, shape in self.shapes.items() if known >= {*shape}
        }
        self.arrays: Mapping[str, Tensor | None] = arrays
        self.arguments = array("q", bytes(8 * len(FIELDS)))
        self.arguments = self.filled(arrays, {**{size: n for size, n in sizes.items() if size in PLACES}, **numbers})

    def given(
        self,
        arrays: Mapping[str, Tensor | None],
        *reals: float,
        numbers: Mapping[str, int] = MappingProxyType({}),
        sizes: Mapping[str, int] | None = None,
    ) -> KernelCall:
        """Return the call with further arrays and numbers, and its real arguments; those left out are 0."""
        call = object.__new__(KernelCall)
        call.__dict__.update(self.__dict__)
        call.reals = type(self.reals)(*reals)
        call.arguments = self.filled(arrays, numbers, sizes)
        call.arrays = {**self.arrays, **arrays}  # they live as long as the call
        return call

    def __call__(
        self,
        arrays: Mapping[str, Tensor | None],
        numbers: Mapping[str, int],
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        """Run the kernel with further arguments; ``sizes`` are those that belong to these arrays alone."""
        self.execute(self.filled(arrays, numbers, sizes))

    def execute(self, arguments: array[int]) -> None:
        """Run the kernel with these arguments and no other."""
        self.function(arguments.buffer_info()[0], ctypes.addressof(self.reals))

    def filled(
        self,
        arrays: Mapping[str, Tensor | None],
        numbers: Mapping[str, int],
        sizes: Mapping[str, int] | None = None,
    ) -> array[int]:
        """Return all arguments, in their places; raise RuntimeError if an array is not what the kernel takes it for."""
        arguments = self.arguments[:]
        for name, number in numbers.items():
            arguments[PLACES[name]] = number
        for name, tensor in arrays.items():
            if tensor is None:
                continue
            if self.stored is not None and name in _STRIDES:
                self._place(arguments, name, tensor)
                continue
            expected, dtype = self.counts.get(name), _DTYPES.get(name, self.dtype)
            if expected is None:
                known = {**self.sizes, **(sizes or {})}
                expected = math.prod([known[size] for size in self.shapes[name]])
            if not (
                tensor.numel() == expected
                and tensor.dtype == dtype
                and tensor.is_contiguous()
                and tensor.is_cpu
                and not tensor.is_neg()  # its memory would hold other numbers
            ):
                raise RuntimeError(
                    f"kernel {self.name}: array {name!r} must be contiguous, on the CPU, of {expected} numbers of type "
                    f"{dtype} ({' × '.join(self.shapes[name])}), "
                    f"got {tuple(tensor.shape)}, strides {tensor.stride()}, {tensor.dtype}, {tensor.device}."
                )
            arguments[PLACES[name]] = tensor.data_ptr()
        return arguments

    def _place(self, arguments: array[int], name: str, tensor: Tensor) -> None:
        """Set the arguments of an array that is read where it is."""
        expected, strides = tuple([self.sizes[size] for size in self.shapes[name]]), tensor.stride()
        adjacent = strides[3] == 1 or expected[3] <= 1  # the stride of a single number may be any
        if not (
            tensor.shape == expected
            and adjacent
            and tensor.dtype == self.stored
            and tensor.is_cpu
            and not tensor.is_neg()
        ):
            raise RuntimeError(
                f"kernel {self.name}: array {name!r} must have shape {expected}, adjacent numbers in each row and type "
                f"{self.stored}, and be on the CPU, "
                f"got {tuple(tensor.shape)}, strides {strides}, {tensor.dtype}, {tensor.device}."
            )
        arguments[PLACES[name]] = tensor.data_ptr()
        for place, stride in zip(_STRIDES[name], strides):
            arguments[place] = stride
