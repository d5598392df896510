"""Whether the values of a tensor can be looked at now, or only its shape."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def in_transform() -> bool:
    """Whether a ``torch.func`` transform (vmap, grad, jvp, ...) or a forward-mode level is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


def is_blind(tensor: Tensor) -> bool:
    """Whether the tensor's values cannot be looked at."""
    if torch.compiler.is_compiling():
        return True
    if tensor.is_meta or isinstance(tensor, FakeTensor) or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    proxied = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)  # make_fx
    return proxied is not None or torch._C._get_tracing_state() is not None  # torch.jit.trace


def is_traced(tensor: Tensor) -> bool:
    """Whether code must be one composition of torch's operations, free of branches on values and of buffers."""
    return is_blind(tensor) or in_transform()
