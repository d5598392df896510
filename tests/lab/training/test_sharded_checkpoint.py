"""Checkpoints that some processes write and another number of them read."""

from __future__ import annotations

import errno
import os
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from regard_lab.models import DecoderLM, DecoderLMConfig
from regard_lab.training.sharded import CheckpointError, load_sharded, make_mesh, materialize, parallelize, save_sharded
from regard_lab.training.sharded.checkpoint import new_folder, remove_unreferenced

CONFIG = DecoderLMConfig(
    53, width=16, layers=2, heads=4, kv_heads=2, feedforward=36, max_length=16, norm="rms", gated=True
)  # fmt: skip
TOKENS = torch.arange(32).view(2, 16)


def stepped(model: Any) -> torch.optim.AdamW:
    """Return an optimizer that has taken a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    model(TOKENS).logsumexp(-1).sum().backward()
    optimizer.step()
    return optimizer


def plain(seed: int = 0) -> tuple[DecoderLM, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = DecoderLM(CONFIG)
    return model, stepped(model)


def state(model: DecoderLM, optimizer: torch.optim.AdamW) -> dict[str, torch.Tensor]:
    found = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        found |= {f"{name}, {kind}": value for kind, value in optimizer.state[parameter].items()}
    return found


def same(folder: Path, expected: dict[str, torch.Tensor]) -> bool:
    """Whether one process reads from a folder what it should, with a new optimizer."""
    model = DecoderLM(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    load_sharded(folder, model, optimizer)
    found = state(model, optimizer)
    return found.keys() == expected.keys() and all(torch.equal(found[name], each) for name, each in expected.items())


def again(folder: Path, before: str, after: str, meshes: list[dict[str, int]], rank: int) -> None:
    """Read with each mesh, into a model with other numbers, and write."""
    for i, sizes in enumerate(meshes):
        with torch.device("meta"):
            model = DecoderLM(CONFIG)
        materialize(parallelize(model, make_mesh(**sizes)), 5 + i)
        optimizer = stepped(model) if i else torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        load_sharded(folder / before, model, optimizer)
        save_sharded(folder / f"{after}{i}", model, optimizer)
    if len(meshes) > 1:
        failures(folder, model, rank)


def failures(folder: Path, model: Any, rank: int) -> None:
    with pytest.raises(ValueError, match="folder must be new, or empty"):
        save_sharded(folder / "two0", model)
    if rank == 1:
        os._exit(1)
    start = time.monotonic()
    with pytest.raises(CheckpointError, match=r"save_sharded: cannot write a checkpoint to .*lost: .*\.$") as info:
        save_sharded(folder / "lost", model)
    assert "\n" not in str(info.value) and time.monotonic() - start < ranks.PATIENCE


@pytest.mark.campaign
@pytest.mark.slow
def test_another_number_of_processes(tmp_path: Path) -> None:
    """One, four, two and one again; at the end one of two is killed."""
    model, optimizer = plain()
    expected = state(model, optimizer)
    save_sharded(tmp_path / "one", model, optimizer)
    assert same(tmp_path / "one", expected)
    ranks.run(partial(again, tmp_path, "one", "four", [{"shard": 2, "tensor": 2}]), 4)
    meshes = [{"shard": 2}, {"tensor": 2}, {"data": 2}]
    ranks.run(partial(again, tmp_path, "four0", "two", meshes), 2, answers=1)
    for name in ("four0", "two0", "two1", "two2"):
        assert same(tmp_path / name, expected), name
        files = sorted(path.name for path in (tmp_path / name).iterdir())
        assert files and all(name.endswith(".safetensors") for name in files)
    assert len(list((tmp_path / "four0").iterdir())) == 4


class TestDamage:
    def test_files_that_are_missing_or_damaged(self, tmp_path: Path) -> None:
        model, optimizer = plain()
        save_sharded(tmp_path / "whole", model)
        with pytest.raises(CheckpointError, match=r"does not contain optimizer\."):
            load_sharded(tmp_path / "whole", model, optimizer)
        with pytest.raises(CheckpointError, match=r"load_sharded: .* is not a sharded checkpoint: No such file"):
            load_sharded(tmp_path / "none", model)
        (tmp_path / "empty").mkdir()
        with pytest.raises(CheckpointError, match=r"does not contain model\.embedding\.weight"):
            load_sharded(tmp_path / "empty", model)
        other = DecoderLM(DecoderLMConfig(53, width=8, layers=2, heads=4))
        with pytest.raises(
            CheckpointError, match=r"must have shape \(53, 8\), got \(53, 16\): it belongs to another model"
        ):
            load_sharded(tmp_path / "whole", other)
        for cut in (3, 100, -10):
            shutil.copytree(tmp_path / "whole", tmp_path / f"cut{cut}")
            (file,) = (tmp_path / f"cut{cut}").iterdir()
            file.write_bytes(file.read_bytes()[:cut])
            with pytest.raises(CheckpointError) as info:
                load_sharded(tmp_path / f"cut{cut}", model)
            assert "\n" not in str(info.value)

    def test_numbers_that_cannot_be_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model, _ = plain()
        save_sharded(tmp_path / "whole", model)

        def fails(*_: object) -> None:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(HuggingFaceStorageReader, "read_data", fails)
        with pytest.raises(CheckpointError, match=r"load_sharded: .* is damaged: Input/output error\.$"):
            load_sharded(tmp_path / "whole", model)

    def test_no_pickle_is_read(self, tmp_path: Path) -> None:
        import torch.distributed.checkpoint as dcp

        model, _ = plain()
        dcp.save({"model.norm.weight": torch.ones(16)}, checkpoint_id=str(tmp_path / "pickled"), no_dist=True)
        assert (tmp_path / "pickled" / ".metadata").exists()
        with pytest.raises(CheckpointError, match=r"does not contain model\.embedding\.weight"):
            load_sharded(tmp_path / "pickled", model)

    def test_what_nobody_refers_to_is_removed(self, tmp_path: Path) -> None:
        first, second = (new_folder(tmp_path / "last.ckpt") for _ in range(2))
        assert first != second and first.parent == tmp_path
        for folder in (first, second):
            folder.mkdir()
            (folder / "shard").touch()
        (tmp_path / "other").mkdir()
        remove_unreferenced(tmp_path, [second.name])
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["other", second.name])
