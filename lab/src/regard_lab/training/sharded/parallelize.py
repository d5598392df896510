"""Parallel training of language models on a mesh of processes: FSDP2, context and tensor parallelism."""

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
from regard.nn import CrossLayerAttention, FeedForward, RecurrentAttention
from regard.nn.heads.self_attention import GroupedProjections, SequenceContext, SplitProjection
from regard_lab.models.experts import Experts

# The mesh of processes ------------------------------------------------------------------------------------------------


#: Mesh dimensions, outermost first; ``tensor`` communicates most and should stay on one machine.
DIMENSIONS = ("data", "shard", "context", "tensor")
#: The flattened dimension over which parameters are sharded.
FSDP = "shard_context"


def make_mesh(
    data: int = 1, shard: int = 1, context: int = 1, tensor: int = 1, device: str | torch.device = "cpu"
) -> DeviceMesh:
    """Return all processes as a mesh of data × shard × context × tensor.

    Parameters
    ----------
    data : int
        Number of model replicas, with different examples each.
    shard : int
        Number of processes that shard parameters, gradients and optimizer state, with different examples each.
    context : int
        Number of processes that split sequences (and shard parameters, like ``shard``).
    tensor : int
        Number of processes that split heads and hidden features, with the same examples.
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
        raise RuntimeError("make_mesh: call torch.distributed.init_process_group first.")
    world = dist.get_world_size()
    if prod(sizes.values()) != world:
        came = " × ".join(f"{name} {size}" for name, size in sizes.items())
        raise rejected("make_mesh", "the product of the sizes", f"be {world}, the number of processes", came)
    kind = torch.device(device).type
    return init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=DIMENSIONS)


def check_mesh(function: str, mesh: Any) -> None:
    """Raise unless ``mesh`` has the dimensions of :func:`make_mesh`."""
    names = getattr(mesh, "mesh_dim_names", None)
    if not isinstance(mesh, DeviceMesh) or names != DIMENSIONS:
        expected = f"be a DeviceMesh with the dimensions {', '.join(DIMENSIONS)}, as make_mesh makes them"
        raise rejected(function, "mesh", expected, names or type(mesh).__name__)


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh for FSDP: one dimension to shard over, preceded by one to replicate over if ``data`` > 1."""
    inner: DeviceMesh = flattened(mesh["shard", "context"], FSDP)
    return joined(mesh["data"], inner) if mesh["data"].size() > 1 else inner


# Tensor parallelism (Shoeybi 2019, arXiv 1909.08053) ------------------------------------------------------------------
# Each process has some heads and some hidden features of each feed-forward network: input projections are split by
# rows, output projections by columns, and the outputs are summed over processes.


#: The parameters of an attention layer that are split; it must have no other trainable ones.
_DIVIDED = ("qkv.", "out.")


def check_divisible(model: nn.Module, size: int) -> None:
    """Raise if heads or hidden features cannot be split evenly across ``size`` processes."""
    if size == 1:
        return
    for module in model.modules():
        if isinstance(module, GroupedProjections):
            if not isinstance(module.qkv, nn.Linear | SplitProjection):
                expected = f"be 1 with {type(module).__name__}, whose projections are not split by heads"
                raise rejected("parallelize", "tensor", expected, size)
            for what, count in (("heads", module.num_heads), ("kv_heads", module.num_kv_heads)):
                if count % size:
                    raise rejected("parallelize", "tensor", f"divide the model's {count} {what}", size)
            shared = [name for name, _ in module.named_parameters() if not name.startswith(_DIVIDED)]
            if shared:
                expected = f"be 1 for a score with parameters ({', '.join(shared)})"
                raise rejected("parallelize", "tensor", expected, size)
        elif isinstance(module, RecurrentAttention | Experts):
            expected = "be 1 with layers that have a state, or experts, which are not split"
            raise rejected("parallelize", "tensor", expected, size)
        elif isinstance(module, FeedForward) and module.up.out_features % size:
            expected = f"divide the model's {module.up.out_features} hidden features"
            raise rejected("parallelize", "tensor", expected, size)
    if getattr(getattr(model, "config", None), "positions", None) == "alibi":
        raise rejected("parallelize", "tensor", "be 1 with ALiBi, whose slopes differ between heads", size)


def divide(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split heads and hidden features over a one-dimensional mesh, in place.

    Embeddings, norms and the output projection are replicated.
    """
    for module in model.modules():
        if isinstance(module, GroupedProjections):
            plan: dict[str, ParallelStyle] = {f"qkv.{name}": ColwiseParallel() for name in "qkv"}
            # Convert the input to a DTensor once, so that its gradient is reduced once instead of three times.
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


# Tensor, FSDP2 and context parallelism combined -----------------------------------------------------------------------


class Divisible(Protocol):
    """The interface that :func:`parallelize` needs; language models of :mod:`regard_lab.models` have it."""

    #: The blocks, whose parameters are gathered when needed and then freed.
    blocks: Any
    checkpoint_activations: bool

    def set_context(self, context: SequenceContext | None) -> None: ...


_M = TypeVar("_M", bound=nn.Module)
#: Methods other than forward that use parameters.
_METHODS = ("features",)
#: For each parallel model, the original one on the meta device.
_PLAIN: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()


def parallelize(
    model: _M,
    mesh: DeviceMesh,
    *,
    layout: Layout = "zigzag",
    param_dtype: torch.dtype | None = None,
    checkpoint_activations: bool = False,
) -> _M:
    r"""Parallelize a model over a mesh of processes, in place.

    ``tensor`` splits heads and hidden features (:mod:`torch.distributed.tensor.parallel`); ``context`` splits sequences
    (:class:`ContextParallel`); ``shard`` and ``context`` together shard parameters, gradients and optimizer state,
    block by block (FSDP2, :func:`torch.distributed.fsdp.fully_shard`); ``data`` replicates them.

    Gradients are *sums*, not means, over all ranks except those of ``tensor``. Define a rank's loss as the sum over its
    own tokens, divided by the number of tokens of all ranks and all batches of a step. Then gradients equal those of
    one process up to rounding, however tokens are distributed.

    Parameters
    ----------
    model : Module
        A language model of :mod:`regard_lab.models`, either on the meta device, to be initialized by
        :func:`materialize`, or with the same parameters on all ranks.
    mesh : DeviceMesh
        From :func:`make_mesh`.
    layout : {"contiguous", "zigzag"}
        How ``context`` splits sequences.
    param_dtype : torch.dtype, optional
        Dtype of gathered parameters and of computation; gradients are reduced in float32. By default the parameters'.
    checkpoint_activations : bool, default False
        Store only the inputs of blocks, and recompute the rest in the backward pass.

    Returns
    -------
    Module
        The model, with DTensor parameters. A layer's ``qkv.weight`` becomes ``qkv.q.weight``, ``qkv.k.weight`` and
        ``qkv.v.weight``, because each is split by heads.

    Raises
    ------
    ValueError, TypeError
        If the mesh has other dimensions, the model has another type, or the numbers of heads or hidden features are not
        divisible.

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
        raise rejected("parallelize", "model", "not be parallelized already", type(model).__name__)
    check_divisible(model, mesh["tensor"].size())
    if any(isinstance(module, CrossLayerAttention) for module in model.modules()):
        expected = "have keys and values in each layer: those that layers share are not sharded"
        raise rejected("parallelize", "model", expected, type(model).__name__)
    scalars = [name for name, each in model.named_parameters() if not each.dim()]
    if scalars:
        expected = "have no scalar parameters, which cannot be sharded"
        raise rejected("parallelize", "model", expected, ", ".join(scalars[:3]))
    plain = _without_numbers(model)
    # Even without tensor parallelism, so that checkpoints have the same names for every mesh.
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
    # Keep the root gathered between the passes, because the loss uses the output projection outside of forward.
    fully_shard(model, mesh=over, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo supports no other reduction
    for name in _METHODS:
        if hasattr(model, name):
            register_fsdp_forward_method(model, name)
    _PLAIN[model] = plain
    return model


def reshard(model: nn.Module) -> None:
    """Free gathered parameters, so that parameters are sharded DTensors again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def plain_of(function: str, model: nn.Module) -> nn.Module:
    """Return the original model of a parallel one, on the meta device."""
    if model not in _PLAIN:
        raise rejected(function, "model", "come from parallelize", f"a {type(model).__name__} that does not")
    return _PLAIN[model]


def _without_numbers(model: _M) -> _M:
    """Return a copy of a model on the meta device."""
    tensors: Iterable[Tensor] = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {}
    for tensor in tensors:
        made = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    return copy.deepcopy(model, memo)
