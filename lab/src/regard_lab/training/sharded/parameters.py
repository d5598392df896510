"""Parameters that processes divide: drawn, set, gathered, and the norm of their gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode

from regard._utils.errors import rejected, shape
from regard.nn.heads.self_attention import GroupedProjections
from regard_lab.training.sharded.parallelize import plain_of, reshard

# Gradients of parameters that lie on several meshes: their norm, and their scale --------------------------------------


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


# The parameters of a parallel model from whole ones and back: drawn, given, gathered ----------------------------------


_M = TypeVar("_M", bound=nn.Module)
#: In-place functions that initialize a tensor without reading it; first the random ones.
_RANDOM = ("normal_", "uniform_", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_")
_DRAWS = {*_RANDOM, "kaiming_normal_", "constant_", "zeros_", "ones_", "zero_", "fill_", "copy_"}


def materialize(model: _M, seed: int, device: torch.device | str | None = None) -> _M:
    """Draw the parameters of a parallel model that was made on the meta device.

    They are those that ``torch.manual_seed(seed); plain.reset_parameters()`` draws in one process on the CPU, bit for
    bit, for every mesh: each process draws each parameter whole, one after the other, and keeps its own part.

    Parameters
    ----------
    model : Module
        That :func:`parallelize` returned.
    seed : int
    device : torch.device or str, optional
        Where parameters are to live; by default the current one of the mesh's kind.

    Returns
    -------
    Module
        The model.
    """
    plain = plain_of("materialize", model)
    reshard(model)
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        if any(buffer.is_meta for buffer in model.buffers()):
            expected = "have no buffers on the meta device, which nothing draws"
            raise rejected("materialize", "model", expected, type(model).__name__)
        kind = next(p.device_mesh.device_type for p in model.parameters() if isinstance(p, DTensor))
        model.to_empty(device=kind if device is None else device)
    sinks = _sinks(plain, model)
    drawing = _Drawing({id(p): sinks[name] for name, p in plain.named_parameters()})
    torch.manual_seed(seed)
    reset: Any = plain.reset_parameters
    with torch.no_grad(), drawing:
        reset()
    missed = [name for name, p in plain.named_parameters() if id(p) not in drawing.drawn]
    if missed:
        expected = "draw all parameters in reset_parameters"
        raise rejected("materialize", "model", expected, f"{', '.join(missed[:3])} not drawn")
    return model


@torch.no_grad()
def set_parameters(model: nn.Module, given: Mapping[str, Tensor]) -> None:
    """Give a parallel model the parameters of a plain one, of which each process keeps its own part.

    Parameters
    ----------
    model : Module
        That :func:`parallelize` returned, with memory.
    given : mapping of str to Tensor
        As the plain model's ``state_dict`` has them; the same on all ranks.
    """
    plain = plain_of("set_parameters", model)
    reshard(model)
    sinks, wanted = _sinks(plain, model), dict(plain.named_parameters())
    for name, parameter in wanted.items():
        if name not in given or given[name].shape != parameter.shape:
            came = shape(given[name]) if name in given else "nothing of that name"
            raise rejected("set_parameters", name, f"have shape {shape(parameter)}", came)
        sinks[name](given[name])


@torch.no_grad()
def gather_model(model: nn.Module, rank: int | None = 0) -> Any:
    """Return a plain model in the memory of the CPU, with the numbers of a parallel one.

    All ranks call it, as each has a part of the numbers; one parameter is gathered at a time.

    Parameters
    ----------
    model : Module
        That :func:`parallelize` returned.
    rank : int or None, default 0
        Who gets it; the others get it on the meta device. None is all of them.
    """
    plain = plain_of("gather_model", model)
    reshard(model)
    mine = rank is None or torch.distributed.get_rank() == rank
    numbers = {}
    for name, tensor in {**dict(plain.named_parameters()), **dict(plain.named_buffers())}.items():
        parts = [_whole(each).cpu() for each in _parts(model, name)]
        if mine:
            numbers[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
            assert numbers[name].shape == tensor.shape
    made = copy.deepcopy(plain)
    if mine:
        made.load_state_dict(numbers, assign=True)
    return made.train(model.training)


def _whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor; collective where it is divided."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    for dim in range(tensor.device_mesh.ndim):  # outermost first: the last division is undone first
        placements = list(tensor.placements)
        placements[dim] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def _parts(model: nn.Module, name: str) -> list[Tensor]:
    """Return what stands in a parallel model for a parameter or buffer of the plain one."""
    known: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if name in known:
        return [known[name]]
    stem, _, kind = name.rpartition(".")
    return [known[f"{stem}.{part}.{kind}"] for part in "qkv"]


def _sinks(plain: nn.Module, model: nn.Module) -> dict[str, Callable[[Tensor], None]]:
    """Return what takes each whole parameter of the plain model and keeps this process's part of it."""
    found: dict[str, Callable[[Tensor], None]] = {}
    rows = {name: module.rows for name, module in plain.named_modules() if isinstance(module, GroupedProjections)}
    for name, _ in plain.named_parameters():
        parts = _parts(model, name)
        layer = name.rpartition(".qkv.")[0]

        def write(whole: Tensor, parts: list[Tensor] = parts, layer: str = layer) -> None:
            for part, own in zip(parts, [whole] if len(parts) == 1 else whole.split(rows[layer])):
                _write(part, own)

        found[name] = write
    return found


def _write(part: Tensor, whole: Tensor) -> None:
    """Give a parameter this process's part of a whole one."""
    if isinstance(part, DTensor):
        mesh = part.device_mesh
        for dim in reversed(range(mesh.ndim)):  # innermost first: divide heads, then the rest
            placement: Any = part.placements[dim]
            if isinstance(placement, Replicate):
                continue
            chunks = whole.chunk(mesh.size(dim), placement.dim)
            place = mesh.get_local_rank(dim)
            whole = chunks[place] if place < len(chunks) else whole.narrow(placement.dim, 0, 0)
        part = part.to_local()
    part.copy_(whole)


class _Drawing(TorchFunctionMode):
    """Draws what is written to parameters of the meta device whole on the CPU, and hands it on."""

    def __init__(self, sinks: dict[int, Callable[[Tensor], None]]) -> None:
        super().__init__()
        self.sinks, self.drawn = sinks, set[int]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("tensor")
        name = getattr(func, "__name__", "")
        if id(first) not in self.sinks or not name.endswith("_") or name.startswith("_"):
            return func(*args, **kwargs)
        if name not in _DRAWS:
            raise rejected("materialize", "reset_parameters", "draw parameters as torch.nn.init does", name)
        whole = torch.empty(first.shape, dtype=first.dtype)
        kwargs.pop("tensor", None)
        func(whole, *args[1:], **kwargs)
        self.sinks[id(first)](whole)
        self.drawn.add(id(first))
        return first
