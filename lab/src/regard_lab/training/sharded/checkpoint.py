"""Sharded checkpoints: each process writes its own part, and any number of processes can read them.

torch.distributed.checkpoint writes them as safetensors. Its default format stores metadata in a pickle, which can run
code when loaded, so it is not used.
"""

from __future__ import annotations

import logging
import shutil
import uuid
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from regard._utils.errors import rejected
from regard.nn.heads.self_attention import GroupedProjections
from regard_lab.training.sharded.parallelize import reshard

#: Name prefixes of model and optimizer tensors.
_MODEL, _OPTIMIZER = "model.", "optimizer."
#: Suffix of shard folders.
SUFFIX = ".shards"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, is damaged, or belongs to another model."""


def save_sharded(folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Write the tensors of a model and its optimizer state to a new folder; all ranks must call it.

    The checkpoint is complete when the call has returned on all ranks. To write several checkpoints in turn, write each
    to its own folder, and then atomically replace a file that names the last one (:func:`new_folder`,
    :func:`remove_unreferenced`).

    Parameters
    ----------
    folder : str or Path
        Visible to all ranks; must be new or empty.
    model : Module
        Parallel (:func:`parallelize`) or plain.
    optimizer : Optimizer, optional
        Its hyperparameters are not written.

    Raises
    ------
    CheckpointError
        If a rank cannot write, or dies.
    ValueError
        If the folder is not empty.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise rejected("save_sharded", "folder", "be new, or empty", str(folder))
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    # Several names share one step counter, but files cannot hold a tensor twice.
    state = {name: tensor if tensor.dim() else tensor.clone() for name, tensor in _state(model, optimizer).items()}
    try:
        with _quiet():
            save(state, storage_writer=writer, no_dist=not dist.is_initialized())
    except (CheckpointException, OSError, RuntimeError) as error:
        raise CheckpointError(f"save_sharded: cannot write a checkpoint to {folder}: {_cause(error)}.") from error


@torch.no_grad()
def load_sharded(folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Load a checkpoint of :func:`save_sharded`, written by any number of ranks; all ranks must call it.

    Parameters
    ----------
    folder : str or Path
    model : Module
        Of the same config; parallel or plain, not on the meta device.
    optimizer : Optimizer, optional
        Of the same kind.

    Raises
    ------
    CheckpointError
        If there is no checkpoint, files are missing or damaged, or it belongs to another model.
    """
    reader = HuggingFaceStorageReader(str(folder))
    try:
        known = reader.read_metadata()
    except Exception as error:  # damaged headers can raise anything
        raise CheckpointError(f"load_sharded: {folder} is not a sharded checkpoint: {_cause(error)}.") from error
    if optimizer is not None:
        _prepare(optimizer, model, known)
    state = _state(model, optimizer)
    for name, tensor in state.items():
        _check(folder, name, tensor, known)
    try:
        with _quiet():
            load(state, storage_reader=reader, no_dist=not dist.is_initialized())
    except (CheckpointException, OSError, RuntimeError) as error:
        raise CheckpointError(f"load_sharded: {folder} is damaged: {_cause(error)}.") from error


def new_folder(stem: Path) -> Path:
    """Return an unused folder name next to a file, the same on all ranks."""
    names = [f"{stem.name}-{uuid.uuid4().hex[:12]}{SUFFIX}"]
    if dist.is_initialized():
        dist.broadcast_object_list(names, 0)
    return stem.parent / names[0]


def remove_unreferenced(folder: Path, kept: Sequence[str]) -> None:
    """Delete all shard folders except ``kept``: those of killed writers, and those of replaced checkpoints."""
    for path in folder.glob(f"*{SUFFIX}"):
        if path.name not in kept and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Return all tensors by names that are the same for every mesh; those of plain layers are views."""
    reshard(model)
    rows = {name: each.rows for name, each in model.named_modules() if isinstance(each, GroupedProjections)}
    found = {_MODEL + name: part for name, part in _split(model.state_dict(), rows)}
    if optimizer is None:
        return found
    for name, parameter in model.named_parameters():
        for kind, value in optimizer.state.get(parameter, {}).items():
            if value.dim():
                found |= {f"{_OPTIMIZER}{kind}.{each}": part for each, part in _split({name: value}, rows)}
            else:
                names = [each for each, _ in _split({name: parameter}, rows)]
                found |= {f"{_OPTIMIZER}{kind}.{each}": value for each in names}
    return found


def _split(tensors: dict[str, Tensor], rows: dict[str, tuple[int, int, int]]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors by name; joint query–key–value projections are split into three."""
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        layer = stem.removesuffix(".qkv")
        if stem.endswith(".qkv") and layer in rows:
            for part, own in zip("qkv", tensor.detach().split(rows[layer])):
                yield f"{stem}.{part}.{kind}", own
        else:
            yield name, tensor.detach()


def _prepare(optimizer: torch.optim.Optimizer, model: nn.Module, known: Metadata) -> None:
    """Create zero optimizer states with the names in a checkpoint, if the optimizer has not stepped yet."""
    kinds: dict[str, int] = {}  # maximum number of dimensions of each kind of state
    for name, entry in known.state_dict_metadata.items():
        if name.startswith(_OPTIMIZER) and isinstance(entry, TensorStorageMetadata):
            kind = name.removeprefix(_OPTIMIZER).partition(".")[0]
            kinds[kind] = max(kinds.get(kind, 0), len(entry.size))
    # As in torch's optimizers: step counters are on the CPU, except for fused kernels.
    on_device = bool(optimizer.defaults.get("fused") or optimizer.defaults.get("capturable"))
    for parameter in model.parameters():
        if not parameter.requires_grad or optimizer.state.get(parameter):
            continue
        for kind, dims in kinds.items():
            steps = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
            optimizer.state[parameter][kind] = torch.zeros_like(parameter.detach()) if dims else steps


def _check(folder: str | Path, name: str, tensor: Tensor, known: Metadata) -> None:
    """Raise unless a checkpoint holds the whole tensor with the same shape."""
    entry = known.state_dict_metadata.get(name)
    if not isinstance(entry, TensorStorageMetadata):
        raise CheckpointError(f"load_sharded: {folder} does not contain {name}.")
    if entry.size != tensor.shape:
        came = f"{tuple(entry.size)}: it belongs to another model, or a file is missing"
        raise CheckpointError(f"load_sharded: {name} in {folder} must have shape {tuple(tensor.shape)}, got {came}.")
    parts = {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks}
    if sum(prod(sizes) for _, sizes in parts) != entry.size.numel():
        raise CheckpointError(f"load_sharded: {folder} contains only parts of {name}: a file is missing.")


def _cause(error: BaseException) -> str:
    """Return the cause of an error in one line, from the first rank that reports one."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".") or type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from saying that one process is no group, and that a rank has nothing to write."""
    logger = logging.getLogger("torch.distributed.checkpoint")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
            yield
    finally:
        logger.setLevel(level)
