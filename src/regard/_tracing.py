"""Whether the values of a tensor can be looked at now, or only its shape."""

from __future__ import annotations

import torch
from torch import Tensor

from regard import _torch


def in_transform() -> bool:
    """Whether a ``torch.func`` transform (vmap, grad, jvp, ...) or a forward-mode level is active."""
    return _torch.in_functorch() or _torch.in_forward_mode()


def is_blind(tensor: Tensor) -> bool:
    """Whether the tensor's values cannot be looked at."""
    if torch.compiler.is_compiling():
        return True
    if tensor.is_meta or _torch.is_fake(tensor) or _torch.in_functorch():
        return True
    return _torch.is_proxied() or _torch.is_jit_tracing()


def is_traced(tensor: Tensor) -> bool:
    """Whether code must be one composition of torch's operations, free of branches on values and of buffers."""
    return is_blind(tensor) or in_transform()


def is_symbolic(size: int) -> bool:
    """Whether a size is not known yet: what is traced is to run with others, and no loop can depend on it."""
    if not torch.compiler.is_compiling():
        return isinstance(size, torch.SymInt)
    from torch.fx.experimental.symbolic_shapes import has_static_value  # who compiles has imported it

    return not has_static_value(size)


def is_exported_to_onnx() -> bool:
    """Whether ONNX, which knows torch's own operations alone, and not all of these, is to run what is traced."""
    return torch.onnx.is_in_onnx_export()


def is_watched() -> bool:
    """Whether something, such as torch's FLOP counter, follows the operators that run."""
    return _torch.is_dispatched()
