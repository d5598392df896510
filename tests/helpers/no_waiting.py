"""A mode that forbids what waits for a device: reading a number, and results whose shape depends on values."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: Parts of the names of operators that wait.
WAITS = (
    "_local_scalar_dense",
    "nonzero.",
    "masked_select",
    "unique",
    "is_nonzero",
    "aten.equal.",
    "repeat_interleave.Tensor",
)


class NoWaiting(TorchDispatchMode):
    """Raises where an operator would wait for a device; ``names`` are the operators that ran."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        self.names.append(name)
        if any(each in name for each in WAITS) and not _is_here(args[0]):
            raise AssertionError(f"{name} waits for the device")
        index = args[1] if "index" in name and isinstance(args[1], (list, tuple)) else ()
        if any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in index):
            raise AssertionError(f"{name} with bools waits for the device")
        return function(*args, **kwargs or {})


def _is_here(tensor):
    return type(tensor) is torch.Tensor and tensor.is_cpu
