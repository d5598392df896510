"""A call of a kernel, its arguments by name."""

from __future__ import annotations

import ctypes

import torch

from regard.engines.fused import native
from regard.engines.fused.kernels.fields import FIELDS


class Call:
    """A kernel with most of its arguments; the rest come with each call, from any thread.

    Parameters
    ----------
    name : str
        As :func:`native.load` takes it.
    dtype : torch.dtype
    real : float
        The one real argument.
    """

    def __init__(self, name: str, dtype: torch.dtype, real: float) -> None:
        self.function = native.load(name, dtype)
        self.real = (ctypes.c_double if dtype == torch.float64 else ctypes.c_float)(real)
        self.values = dict.fromkeys(FIELDS, 0)

    def __call__(self, **values: int) -> None:
        array = (ctypes.c_int64 * len(FIELDS))(*(self.values | values).values())
        self.function(ctypes.addressof(array), ctypes.addressof(self.real))
