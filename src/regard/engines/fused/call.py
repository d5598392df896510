"""A call of a kernel: every array it is given is checked against the extent that the kernel goes by."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from regard.engines.fused import native
from regard.engines.fused.kernels.fields import FIELDS, SHAPES

#: The types of arrays that do not hold the compute dtype.
_DTYPES = {
    "query_class": torch.uint8,
    "key_class": torch.uint8,
    "best_key": torch.int64,
    "start": torch.int64,
    "stop": torch.int64,
    "segments": torch.int64,
}


class Call:
    """A kernel with most of its arguments; the rest come with each call, from any thread.

    Parameters
    ----------
    name : str
        As :func:`native.load` takes it.
    dtype : torch.dtype
    real : float
        The one real argument.
    sizes : dict of str to int
        Every size that the shapes in ``fields.SHAPES`` speak of, by its name.
    """

    def __init__(self, name: str, dtype: torch.dtype, real: float, sizes: Mapping[str, int]) -> None:
        self.function = native.load(name, dtype)
        self.name, self.dtype, self.sizes = name, dtype, sizes
        self.real = (ctypes.c_double if dtype == torch.float64 else ctypes.c_float)(real)
        self.numbers = dict.fromkeys(FIELDS, 0) | {name: n for name, n in sizes.items() if name in FIELDS}
        self.arrays: dict[str, Tensor] = {}

    def give(self, arrays: Mapping[str, Tensor | None], numbers: Mapping[str, int]) -> None:
        """Add arguments that all calls have in common; arrays that are None are none."""
        given = {name: tensor for name, tensor in arrays.items() if tensor is not None}
        self.numbers |= {**numbers, **self.addresses(given, self.sizes)}
        self.arrays |= given  # they live as long as the call

    def __call__(
        self, arrays: Mapping[str, Tensor], numbers: Mapping[str, int], sizes: Mapping[str, int] | None = None
    ) -> None:
        """Run the kernel with further arguments; ``sizes`` are those that belong to these arrays alone."""
        found = self.addresses(arrays, self.sizes if sizes is None else {**self.sizes, **sizes})
        self.execute({**self.numbers, **numbers, **found})

    def execute(self, numbers: Mapping[str, int]) -> None:
        """Run the kernel with these arguments and no other."""
        array = (ctypes.c_int64 * len(FIELDS))(*numbers.values())
        self.function(ctypes.addressof(array), ctypes.addressof(self.real))

    def addresses(self, arrays: Mapping[str, Tensor], sizes: Mapping[str, int]) -> dict[str, int]:
        """Return where the arrays are; raise RuntimeError if one is not what the kernel takes it for."""
        shapes = SHAPES[self.name.partition(".")[2]]
        for name, tensor in arrays.items():
            expected = math.prod([sizes[size] for size in shapes[name]])
            fits = tensor.numel() == expected and tensor.dtype == _DTYPES.get(name, self.dtype)
            if not fits or not tensor.is_contiguous() or tensor.device.type != "cpu":
                raise RuntimeError(
                    f"kernel {self.name}: array {name!r} must be contiguous, on the CPU, of {expected} numbers of type "
                    f"{_DTYPES.get(name, self.dtype)} ({' × '.join(f'{s} {sizes[s]}' for s in shapes[name])}), "
                    f"got {tuple(tensor.shape)}, strides {tensor.stride()}, {tensor.dtype}, {tensor.device}."
                )
        return {name: tensor.data_ptr() for name, tensor in arrays.items()}
