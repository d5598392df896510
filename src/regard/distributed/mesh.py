"""Processes as a mesh with four named dimensions: what each of them divides."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from regard._utils.errors import rejected
from regard._utils.torch_private import flattened, joined

#: From the outside in: neighbours in ``tensor`` exchange most, and should be on one machine.
DIMENSIONS = ("data", "shard", "context", "tensor")
#: The ranks over which parameters are divided: those with other examples, and those with other parts of sequences.
FSDP = "shard_context"


def make_mesh(
    data: int = 1, shard: int = 1, context: int = 1, tensor: int = 1, device: str | torch.device = "cpu"
) -> DeviceMesh:
    """Return all processes as a mesh of data × shard × context × tensor.

    Parameters
    ----------
    data : int
        Groups that hold a copy of the model each, and read other examples.
    shard : int
        Processes that divide parameters, gradients and the optimizer's state among them, and read other examples.
    context : int
        Processes that divide sequences among them (and parameters, as those of ``shard``).
    tensor : int
        Processes that divide heads and hidden features among them, and read the same.
    device : str or torch.device
        The kind of device: "cpu" (gloo) or "cuda" (NCCL).

    Raises
    ------
    ValueError
        If their product is not the number of processes.

    Examples
    --------
    In a script that ``torchrun --nproc-per-node 4`` starts:

    >>> def mesh():
    ...     torch.distributed.init_process_group()
    ...     return make_mesh(shard=2, tensor=2)
    """
    sizes = {"data": data, "shard": shard, "context": context, "tensor": tensor}
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise rejected("make_mesh", name, "be an int of at least 1", size)
    if not (dist.is_available() and dist.is_initialized()):
        expected = "stand behind init_process_group"
        raise rejected("make_mesh", "the call", expected, "no initialized torch.distributed", RuntimeError)
    world = dist.get_world_size()
    if prod(sizes.values()) != world:
        came = " × ".join(f"{name} {size}" for name, size in sizes.items())
        raise rejected("make_mesh", "the product of the sizes", f"be {world}, the number of processes", came)
    kind = torch.device(device).type
    return init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=DIMENSIONS)


def check_mesh(function: str, mesh: Any) -> None:
    """Raise unless it is a mesh of :func:`make_mesh`'s names."""
    names = getattr(mesh, "mesh_dim_names", None)
    if not isinstance(mesh, DeviceMesh) or names != DIMENSIONS:
        expected = f"be a DeviceMesh with the dimensions {', '.join(DIMENSIONS)}, as make_mesh makes them"
        raise rejected(function, "mesh", expected, names or type(mesh).__name__)


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that parameters are divided over, and, where there is more than one group, copied over."""
    inner: DeviceMesh = flattened(mesh["shard", "context"], FSDP)
    return joined(mesh["data"], inner) if mesh["data"].size() > 1 else inner
