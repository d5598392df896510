"""Heads and hidden features divided among processes that read the same (Shoeybi 2019, arXiv 1909.08053).

Each process has some heads, and some hidden features of each feed-forward network: matrices into them are divided by
rows, matrices out of them by columns, and what the latter make is added up over the processes.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from regard._utils.errors import rejected
from regard.nn import FeedForward
from regard.nn.heads.self_attention import GroupedProjections

#: What is divided of a layer; all else of it must not be learned.
_DIVIDED = ("qkv.", "out.")


def check_divisible(model: nn.Module, size: int) -> None:
    """Raise where heads or hidden features cannot be divided among so many processes."""
    if size == 1:
        return
    for module in model.modules():
        if isinstance(module, GroupedProjections):
            for what, count in (("heads", module.num_heads), ("kv_heads", module.num_kv_heads)):
                if count % size:
                    raise rejected("parallelize", "tensor", f"divide the model's {count} {what}", size)
            shared = [name for name, _ in module.named_parameters() if not name.startswith(_DIVIDED)]
            if shared:
                expected = f"be 1 where the score learns something itself ({', '.join(shared)})"
                raise rejected("parallelize", "tensor", expected, size)
        elif isinstance(module, FeedForward) and module.up.out_features % size:
            expected = f"divide the model's {module.up.out_features} hidden features"
            raise rejected("parallelize", "tensor", expected, size)
    if getattr(getattr(model, "config", None), "positions", None) == "alibi":
        raise rejected("parallelize", "tensor", "be 1 with ALiBi, whose slopes differ from head to head", size)


def divide(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide heads and hidden features over a mesh of one dimension, in place.

    Embeddings, norms and the projection to the vocabulary are whole on each process.
    """
    for module in model.modules():
        if isinstance(module, GroupedProjections):
            plan: dict[str, ParallelStyle] = {f"qkv.{name}": ColwiseParallel() for name in "qkv"}
            # The input is made a DTensor once, so that its gradient is added up once, and not for each of three.
            plan |= {"qkv": _replicated_input(), "out": RowwiseParallel()}
            parallelize_module(module, mesh, plan)
        elif isinstance(module, FeedForward):
            plan = {"": _replicated_input(), "up": ColwiseParallel(), "down": RowwiseParallel()}
            if module.gate is not None:
                plan["gate"] = ColwiseParallel()
            own = plan.pop("")
            parallelize_module(module, mesh, plan)
            parallelize_module(module, mesh, own)


def _replicated_input() -> ParallelStyle:
    return PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
