"""The state of torch during a call: compilers, tracers, transforms, autocast and observers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from regard._utils.torch_private import (
    in_forward_mode,
    in_functorch,
    is_dispatched,
    is_fake,
    is_jit_tracing,
    is_proxied,
)

# Whether tensor values can be read ------------------------------------------------------------------------------------


def in_transform() -> bool:
    """Whether a ``torch.func`` transform (vmap, grad, jvp, ...) or a forward-mode level is active."""
    return in_functorch() or in_forward_mode()


def values_unavailable(tensor: Tensor) -> bool:
    """Whether the tensor's values cannot be read: under compilers, tracers and transforms, and for fake tensors."""
    if torch.compiler.is_compiling():
        return True
    if tensor.is_meta or is_fake(tensor) or in_functorch():
        return True
    return is_proxied() or is_jit_tracing()


def is_traced(tensor: Tensor) -> bool:
    """Whether code must be a composition of torch operations, without branches on values and without buffers."""
    return values_unavailable(tensor) or in_transform()


def is_symbolic(size: int) -> bool:
    """Whether a size is symbolic, so that no loop can depend on it."""
    if not torch.compiler.is_compiling():
        return isinstance(size, torch.SymInt)
    from torch.fx.experimental.symbolic_shapes import has_static_value  # already imported when compiling

    return not has_static_value(size)


def is_exported_to_onnx() -> bool:
    """Whether the call is exported to ONNX, which supports only some of torch's own operations."""
    if not torch.compiler.is_compiling() and "torch.onnx" not in sys.modules:
        return False  # an export has imported it; that takes longer than all else in the first call of a process
    return torch.onnx.is_in_onnx_export()


#: Observers of all attention calls, such as captures; shortcuts that bypass calls are disabled while there are any.
_observers: list[object] = []


@contextmanager
def observing_calls() -> Iterator[None]:
    """Make :func:`is_observed` True inside the block, in all threads."""
    observer = object()
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def is_observed() -> bool:
    """Whether attention calls are being observed."""
    return bool(_observers)


def in_dispatch_mode() -> bool:
    """Whether a dispatch mode, such as torch's FLOP counter, is active."""
    return is_dispatched()


# Autocast, as in torch's SDPA: inputs are cast once, and autocast is off inside ---------------------------------------


def autocast_is_active(device: str) -> bool:
    """Whether autocast is on for a device type; some types, like meta, do not support it."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def autocast_cast(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors in autocast's dtype, if it is on."""
    device = tensors[0].device.type
    if not autocast_is_active(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors]


def autocast_suspended(device: str) -> AbstractContextManager[object]:
    """Return a context in which autocast is off."""
    return torch.autocast(device, enabled=False) if autocast_is_active(device) else nullcontext()
