"""A device that is not there: tensors that say they are on "cuda", with values on the CPU.

An operation on tensors of both devices raises, as on a GPU; one on the stand-in gives what the CPU gives. So code that
forgets to move a tensor is found on a machine without a GPU.
"""

from __future__ import annotations

from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("cuda", 0)
#: Types of devices that mean the stand-in: torch's C++ code takes it for "meta".
THERE = ("cuda", "meta")


class OnDevice(torch.Tensor):
    """A tensor with a device of its own, and its values in ``held``."""

    @staticmethod
    def __new__(cls, held):
        shadow = torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device="meta")
        self = torch.Tensor._make_subclass(cls, shadow, False)
        self.held = held
        return self

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})

    def __repr__(self, **_):
        return f"OnDevice({self.held!r})"

    def data_ptr(self):
        return self.held.data_ptr()

    def untyped_storage(self):
        return self.held.untyped_storage()

    device = property(lambda _: DEVICE)
    is_cuda = property(lambda _: True)
    is_meta = is_cpu = property(lambda _: False)


def run(function, args, kwargs):
    """Run an operation on what tensors hold, and return it on the device of its arguments."""
    flat, _ = tree_flatten((args, kwargs))
    there = [x for x in flat if isinstance(x, OnDevice)]
    device = kwargs.get("device")
    if function is torch.ops.aten._to_copy.default and device is not None:
        moved = function(*tree_map(_held, args), **{**kwargs, "device": _plain(device)})
        return OnDevice(moved) if device.type in THERE else moved
    if device is not None and torch.device(device).type in THERE:
        return tree_map(_wrapped, function(*tree_map(_held, args), **{**tree_map(_held, kwargs), "device": "cpu"}))
    if not there:
        return function(*args, **kwargs)
    _check(function, flat)
    result = function(*tree_map(_held, args), **tree_map(_held, kwargs))
    if function in (torch.ops.aten.copy_.default, torch.ops.aten._local_scalar_dense.default):
        return args[0] if function is torch.ops.aten.copy_.default else result
    if device is not None:  # made on the CPU, by request
        return result
    name = function._schema.name  # of "__lshift__", too, which is not in place
    if name.endswith("_") and not name.endswith("__") and isinstance(args[0], OnDevice):
        return args[0]
    return tree_map(_wrapped, result)


def _check(function, flat):
    """Raise for tensors of both devices, but numbers and the indices that torch moves by itself."""
    if function in (torch.ops.aten.copy_.default, torch.ops.aten.index.Tensor, torch.ops.aten._index_put_impl_.default):
        return
    if function in (torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default):
        return
    apart = [x for x in flat if isinstance(x, torch.Tensor) and not isinstance(x, OnDevice) and x.dim()]
    if apart:
        raise RuntimeError(
            f"{function} has tensors on cuda:0 and on {apart[0].device}, of shape {tuple(apart[0].shape)}"
        )


def _plain(device):
    return torch.device("cpu") if device.type in THERE else device


def _held(x):
    return x.held if isinstance(x, OnDevice) else x


def _wrapped(x):
    return OnDevice(x) if isinstance(x, torch.Tensor) and not isinstance(x, OnDevice) and x.device.type == "cpu" else x


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})


@contextmanager
def stand_in():
    """Let "cuda" be a device in a ``with`` block."""
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(…, device=…) moves what it has made on the CPU
    try:
        with patch.object(torch.cuda, "_lazy_init", lambda: None), _Mode():
            yield DEVICE
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
