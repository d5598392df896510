"""A Lightning strategy for sharded models.

Lightning's ``ModelParallelStrategy`` lets the module parallelize the model, and supports CPUs with gloo and GPUs with
NCCL. This strategy replaces the mesh, which has four dimensions here, and the checkpoints: Lightning overwrites a
folder of pickles. Here each process writes its shard as safetensors to a new folder, then the first one replaces the
file that names the folder, so that killing a process at any moment leaves the last checkpoint intact.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.optim import Optimizer

from regard_lab.training.checkpoints import SHARDS, remove_unused_shards
from regard_lab.training.learner import Learner
from regard_lab.training.options import TrainingError, TrainingOptions
from regard_lab.training.sharded import CheckpointError, load_sharded, make_mesh, materialize, parallelize, save_sharded
from regard_lab.training.sharded.checkpoint import new_folder


class ShardedStrategy(ModelParallelStrategy):
    """Shards parameters, heads or sequences across processes.

    Parameters
    ----------
    options : TrainingOptions
    """

    def __init__(self, options: TrainingOptions) -> None:
        self.sizes = options.mesh
        tensor = self.sizes["tensor"]
        super().__init__(data_parallel_size=options.devices // tensor, tensor_parallel_size=tensor)

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether Lightning calls :meth:`load_optimizer_state_dict`."""
        return True

    def divide(self, learner: Learner) -> None:
        """Shard a learner's model, and initialize its parameters if they are on the meta device."""
        mesh = make_mesh(**self.sizes, device=self.root_device)
        model, options = learner.model, learner.options
        is_new = any(parameter.is_meta for parameter in model.parameters())
        if not is_new:
            model.to(self.root_device)
        parallelize(model, mesh, checkpoint_activations=options.checkpoint_activations)
        if is_new:
            materialize(model, options.seed, self.root_device)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing: :meth:`save_checkpoint` writes each process's tensors."""
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the settings of an optimizer, without tensors."""
        return {"param_groups": [_settings(group) for group in optimizer.param_groups]}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers' settings; :meth:`load_checkpoint` has read the tensors."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"]):
            for group, settings in zip(optimizer.param_groups, state["param_groups"]):
                group.update(settings)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:  # noqa: ARG002
        """Write each process's tensors to a new folder, then replace the checkpoint file that names the folder."""
        path = Path(self.broadcast(str(filepath)))
        shards, problem = new_folder(path), ""
        optimizer = self.optimizers[0] if "optimizer_states" in checkpoint else None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_sharded(shards, self._learner.model, optimizer)
        except (CheckpointError, OSError) as error:
            raise TrainingError(
                f"train: cannot write a checkpoint to {path.parent}: {str(error).rstrip('.')}. The previous "
                "checkpoint is intact: fix the problem and continue with --resume."
            ) from error
        if self.is_global_zero:
            try:
                self.checkpoint_io.save_checkpoint(checkpoint | {SHARDS: shards.name}, path)
                remove_unused_shards(path.parent)
            except TrainingError as error:
                problem = str(error)
        problem = self.broadcast(problem)
        if problem:
            raise TrainingError(problem)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:  # noqa: ARG002
        """Read a checkpoint written by any number of processes."""
        path = Path(self.broadcast(str(checkpoint_path)))
        state: dict[str, Any] = self.checkpoint_io.load_checkpoint(path, map_location="cpu")
        _load(path, state, self._learner, self.optimizers[0])
        return state

    @torch.no_grad()
    def load_mean(self, learner: Learner, paths: list[Path]) -> None:
        """Load the mean of the checkpoints' parameters into a sharded model."""
        total: list[torch.Tensor] = []
        for path in paths:
            _load(path, torch.load(path, map_location="cpu", weights_only=True), learner)
            own = [_local(parameter).to(torch.float64, copy=True) for parameter in learner.model.parameters()]
            total = own if not total else [a + b for a, b in zip(total, own)]
        for parameter, mean in zip(learner.model.parameters(), total):
            _local(parameter).copy_(mean / len(paths))

    @property
    def _learner(self) -> Learner:
        assert isinstance(self.lightning_module, Learner)
        return self.lightning_module


def _load(path: Path, state: dict[str, Any], learner: Learner, optimizer: Optimizer | None = None) -> None:
    shards = str(state.get(SHARDS, ""))
    if not shards or Path(shards).name != shards:
        raise TrainingError(f"resume: {path} must name a folder of tensors next to it, got {shards!r}.")
    try:
        load_sharded(path.parent / shards, learner.model, optimizer)
    except CheckpointError as error:
        raise TrainingError(f"resume: {path} is damaged: {str(error).rstrip('.')}.") from error


def _local(parameter: Any) -> torch.Tensor:
    """Return this process's shard of a parameter."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
