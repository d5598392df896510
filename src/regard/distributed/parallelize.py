"""A model over a mesh of processes: tensor parallel, FSDP2 and context parallel, on torch.distributed as it is."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Protocol, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from regard._utils.errors import rejected
from regard.distributed.context_parallel import ContextParallel
from regard.distributed.layouts import Layout
from regard.distributed.mesh import check_mesh, fsdp_mesh
from regard.distributed.tensor_parallel import check_divisible, divide
from regard.nn.heads.self_attention import GroupedProjections, SequenceContext


class Divisible(Protocol):
    """What a model must have to be parallelized; language models of :mod:`regard_lab.models` do."""

    #: Its blocks, each of which is gathered when it is needed, and then given up.
    blocks: Any
    checkpoint_activations: bool

    def set_context(self, context: SequenceContext | None) -> None: ...


_M = TypeVar("_M", bound=nn.Module)
#: Methods beside forward that use parameters.
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
