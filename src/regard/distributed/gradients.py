"""Gradients of parameters that lie on several meshes: their norm, and their scale."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], most: float) -> Tensor:
    """Scale gradients so that the norm of all of them together is at most so large.

    As :func:`torch.nn.utils.clip_grad_norm_`, which cannot add up what lies on several meshes: with tensor parallelism
    norms and embeddings lie on another one than matrices.

    Parameters
    ----------
    parameters : iterable of Tensor
        The same on all ranks, in the same order; those without a gradient are left out.
    most : float

    Returns
    -------
    Tensor ()
        The norm before.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros(())
    total = gradient_norm(grads)
    scale_gradients(grads, (most / (total + 1e-6)).clamp(max=1.0))
    return total


def scale_gradients(grads: Iterable[Tensor], factor: Tensor | float) -> None:
    """Multiply gradients, in place."""
    local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    for grad in local:
        grad.mul_(factor)


def gradient_norm(grads: Iterable[Tensor]) -> Tensor:
    """Return the norm of all gradients, () on each rank; those that are divided are added up over their ranks."""
    squares: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[Tensor]] = {}
    for grad in grads:
        place, local = None, grad
        if isinstance(grad, DTensor):
            divided = tuple(dim for dim, each in enumerate(grad.placements) if not each.is_replicate())
            place, local = (grad.device_mesh, divided), grad.to_local()
        squares.setdefault(place, []).append(torch.linalg.vector_norm(local).square())
    sums = []
    for place, held in squares.items():
        total = torch.stack(held).sum()
        if place is not None:
            mesh, dims = place
            for dim in dims:
                dist.all_reduce(total, group=mesh.get_group(dim))
        sums.append(total)
    return torch.stack(sums).sum().sqrt()
