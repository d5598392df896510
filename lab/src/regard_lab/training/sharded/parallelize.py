"""A language model over a mesh of processes: FSDP2, context parallelism, and heads and hidden features divided."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from math import prod
from typing import Any, Protocol, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from regard._utils.errors import rejected
from regard._utils.torch_private import flattened, joined
from regard.distributed.context_parallel import ContextParallel
from regard.distributed.layouts import Layout
from regard.nn import FeedForward
from regard.nn.heads.self_attention import GroupedProjections, SequenceContext

# Processes as a mesh with four named dimensions: what each of them divides --------------------------------------------


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


# Heads and hidden features divided among processes that read the same (Shoeybi 2019, arXiv 1909.08053) ----------------
# Each process has some heads, and some hidden features of each feed-forward network: matrices into them are divided by
# rows, matrices out of them by columns, and what the latter make is added up over the processes.


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


# A model over a mesh of processes: tensor parallel, FSDP2 and context parallel, on torch.distributed as it is ---------


class Divisible(Protocol):
    """What a model must have to be parallelized; language models of :mod:`regard_lab.models` do."""

    #: Its blocks, each of which is gathered when it is needed, and then given up.
    blocks: Any
    checkpoint_activations: bool

    def set_context(self, context: SequenceContext | None) -> None: ...


_M = TypeVar("_M", bound=nn.Module)
#: Methods other than forward that use parameters.
_METHODS = ("features",)
#: Of each parallel model the one that it was made of, without numbers.
_PLAIN: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()


def parallelize(
    model: _M,
    mesh: DeviceMesh,
    *,
    layout: Layout = "zigzag",
    param_dtype: torch.dtype | None = None,
    checkpoint_activations: bool = False,
) -> _M:
    r"""Divide a model's work and its parameters over a mesh of processes, in place.

    Along ``tensor``, heads and hidden features are divided (:mod:`torch.distributed.tensor.parallel`); along
    ``context``, sequences (:class:`ContextParallel`); along ``shard`` and ``context`` together, parameters, gradients
    and the state of an optimizer (FSDP2, :func:`torch.distributed.fsdp.fully_shard`), block by block; along ``data``,
    they are copied.

    Gradients are *sums* over all ranks but those of ``tensor``, and not means: a rank's loss is the sum over its own
    tokens, divided by the number of tokens of all ranks and all batches of a step. So they are those of one process to
    rounding, whatever each rank was given.

    Parameters
    ----------
    model : Module
        A language model of :mod:`regard_lab.models`. On the meta device it takes no memory; :func:`materialize` then
        draws its numbers. Otherwise it has the same numbers on all ranks.
    mesh : DeviceMesh
        Of :func:`make_mesh`.
    layout : {"contiguous", "zigzag"}
        How sequences are divided along ``context``.
    param_dtype : torch.dtype, optional
        What parameters are gathered and calculated with in; gradients are summed in float32. By default their own.
    checkpoint_activations : bool, default False
        Keep the inputs of blocks alone for the backward pass, and compute the rest again.

    Returns
    -------
    Module
        The model, its parameters DTensors. Of a layer's ``qkv.weight`` they are ``qkv.q.weight``, ``qkv.k.weight`` and
        ``qkv.v.weight``, as each is divided by heads.

    Raises
    ------
    ValueError, TypeError
        If a mesh of other dimensions is given, the model is none of that kind, or the number of heads or of hidden
        features cannot be divided.

    Examples
    --------
    In a script that ``torchrun --nproc-per-node 4`` starts:

    >>> def build(config):
    ...     from regard_lab.models import DecoderLM
    ...     with torch.device("meta"):
    ...         model = DecoderLM(config)
    ...     return materialize(parallelize(model, make_mesh(shard=2, tensor=2)), seed=0)
    """
    check_mesh("parallelize", mesh)
    if not hasattr(model, "set_context") or not hasattr(model, "blocks"):
        raise rejected("parallelize", "model", "be a DecoderLM or an EncoderLM", type(model).__name__, TypeError)
    if isinstance(model, FSDPModule):
        raise rejected("parallelize", "model", "be one that is not parallel yet", type(model).__name__)
    check_divisible(model, mesh["tensor"].size())
    scalars = [name for name, each in model.named_parameters() if not each.dim()]
    if scalars:
        expected = "have parameters of one dimension or more, which can be divided"
        raise rejected("parallelize", "model", expected, f"single numbers, {', '.join(scalars[:3])}")
    plain = _without_numbers(model)
    # Also where heads are not divided, so that a checkpoint has the same names for every mesh.
    for module in model.modules():
        if isinstance(module, GroupedProjections):
            module.split_projection()
    divided = cast(Divisible, model)
    if mesh["tensor"].size() > 1:
        divide(model, mesh["tensor"])
    if mesh["context"].size() > 1:
        divided.set_context(ContextParallel(mesh["context"].get_group(), layout))
    divided.checkpoint_activations = checkpoint_activations
    policy = MixedPrecisionPolicy() if param_dtype is None else MixedPrecisionPolicy(param_dtype, torch.float32)
    over = fsdp_mesh(mesh)
    for block in divided.blocks:
        fully_shard(block, mesh=over, mp_policy=policy)
    # The root is kept between the passes: the projection to the vocabulary is read by the loss, outside of forward.
    fully_shard(model, mesh=over, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    for name in _METHODS:
        if hasattr(model, name):
            register_fsdp_forward_method(model, name)
    _PLAIN[model] = plain
    return model


def reshard(model: nn.Module) -> None:
    """Give up what was gathered for a forward pass, so that parameters are DTensors again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def plain_of(function: str, model: nn.Module) -> nn.Module:
    """Return the model that a parallel one was made of, on the meta device."""
    if model not in _PLAIN:
        raise rejected(function, "model", "be one that parallelize returned", type(model).__name__)
    return _PLAIN[model]


def _without_numbers(model: _M) -> _M:
    """Return a copy of a model on the meta device."""
    tensors: Iterable[Tensor] = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {}
    for tensor in tensors:
        made = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    return copy.deepcopy(model, memo)
