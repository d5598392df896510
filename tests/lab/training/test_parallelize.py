"""A model over a mesh of processes learns what it learns in one."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn

from regard import masks
from regard_lab.models import DecoderLM, DecoderLMConfig, EncoderLM, EncoderLMConfig
from regard_lab.training.objectives import cross_entropy
from regard_lab.training.sharded import (
    clip_gradients,
    gather_model,
    load_sharded,
    make_mesh,
    materialize,
    parallelize,
    save_sharded,
    set_parameters,
)

ROWS, L, N, IGNORED = 4, 16, 53, -100
SIZES: dict[str, Any] = {"vocabulary": N, "width": 16, "layers": 2, "heads": 4, "max_length": L, "feedforward": 36}
LLAMA = SIZES | {"positions": "rotary", "norm": "rms", "activation": "silu", "gated": True, "bias": False}
CONFIGS: dict[str, Any] = {
    "llama": DecoderLMConfig(**LLAMA | {"kv_heads": 4, "tied": False}),
    "gpt": DecoderLMConfig(**SIZES),
    "grouped": DecoderLMConfig(**LLAMA | {"kv_heads": 2, "layers": 1}),
    "additive": DecoderLMConfig(**LLAMA | {"score": "additive", "layers": 1}),
    # One number, of which most processes have none.
    "cosine": DecoderLMConfig(**LLAMA | {"score": "cosine", "layers": 1}),
    "linear": DecoderLMConfig(**SIZES | {"feature_map": "elu", "kv_heads": 2}),
    "bert": EncoderLMConfig(**SIZES | {"pooled": False, "layers": 1}),
}
#: For so many processes: a config, and the sizes of the mesh.
MESHES: dict[int, list[tuple[str, dict[str, int]]]] = {
    2: [
        ("llama", {"shard": 2}),
        ("gpt", {"data": 2}),
        ("grouped", {"tensor": 2}),
        ("additive", {"context": 2}),
        ("bert", {"tensor": 2}),
        ("linear", {"tensor": 2}),
    ],
    4: [
        ("gpt", {"shard": 4}),
        ("llama", {"tensor": 4}),
        ("llama", {"shard": 2, "tensor": 2}),
        ("llama", {"data": 2, "shard": 2}),
        ("grouped", {"context": 2, "tensor": 2}),
        ("gpt", {"shard": 2, "context": 2}),
        ("cosine", {"data": 2, "context": 2}),
        ("bert", {"data": 2, "tensor": 2}),
        ("linear", {"shard": 2, "tensor": 2}),
    ],
}


def documents() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tokens, targets, ids and positions (ROWS, L) of two steps; rows have unequally many targets."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(N, (2, ROWS, L), generator=generator)
    targets = torch.randint(N, (2, ROWS, L), generator=generator)
    targets[torch.rand(2, ROWS, L, generator=generator) < torch.tensor([0.1, 0.8, 0.3, 0.9])[:, None]] = IGNORED
    ids = torch.tensor([[0] * 5 + [1] * 11] * 2 + [[0] * 9 + [1] * 7] * 2).expand(2, ROWS, L)
    starts = torch.tensor([[*range(5), *range(11)]] * 2 + [[*range(9), *range(7)]] * 2).expand(2, ROWS, L)
    return tokens, targets, ids, starts


def meta(name: str) -> Any:
    config = CONFIGS[name]
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            return (EncoderLM if isinstance(config, EncoderLMConfig) else DecoderLM)(config)
    finally:
        torch.set_default_dtype(torch.float32)


def plain(name: str) -> Any:
    model = meta(name).to_empty(device="cpu")
    torch.manual_seed(7)
    model.reset_parameters()
    return model


def learn(model: Any, place: int = 0, places: int = 1, cut: Any = lambda x: x) -> list[float]:
    """Take two steps of two batches each, with this place's rows; return the norms of the gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, fused=True)
    norms = []
    for step in range(2):
        data = [each[step] for each in documents()]
        count = int((data[1] != IGNORED).sum())
        own = [each.chunk(places)[place] for each in data]
        for batch in zip(*(each.split(max(1, ROWS // places // 2)) for each in own)):
            tokens, targets, ids, starts = batch
            given = {"mask": masks.document(ids), "positions": cut(starts)}
            if isinstance(model, EncoderLM):
                features = model.masked_features(model(cut(tokens), **given))
            else:
                features = model.features(cut(tokens), **given)
            mine = cut(targets)
            loss, _ = cross_entropy(features, model.projection, mine, ignore_index=IGNORED)
            (loss * (int((mine != IGNORED).sum()) / count)).backward()
        norms.append(float(clip_gradients(model.parameters(), 0.05)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def error(found: nn.Module, expected: nn.Module) -> float:
    pairs = list(zip(found.state_dict().items(), expected.state_dict().items()))
    assert all(a[0] == b[0] and a[1].shape == b[1].shape for a, b in pairs)
    return max(float((a[1] - b[1]).abs().max() / b[1].abs().max().clamp(min=1e-3)) for a, b in pairs)


def compared(name: str, sizes: dict[str, int], recomputed: bool) -> tuple[float, float]:
    mesh = make_mesh(**sizes)
    model = parallelize(meta(name), mesh, checkpoint_activations=recomputed)
    assert materialize(model, 7) is model
    expected = plain(name)
    found = gather_model(model, None)
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), expected.parameters())), "materialize"
    place = mesh["data"].get_local_rank() * mesh["shard"].size() + mesh["shard"].get_local_rank()
    cut = (lambda x: x) if model.context is None else (lambda x: model.context.shard(x, 1))
    norms = learn(model, place, mesh["data"].size() * mesh["shard"].size(), cut)
    expected_norms = learn(expected)
    found = gather_model(model, None)
    logits = model(cut(documents()[0][0]))  # and without its features being asked for
    assert torch.isfinite(logits).all()
    set_parameters(model, expected.state_dict())
    assert error(gather_model(model, None), expected) == 0
    off = max(abs(a - b) / b for a, b in zip(norms, expected_norms))
    return error(found, expected), off


def compare_all(rank: int) -> dict[str, tuple[float, float]]:
    size = dist.get_world_size()
    found = {f"{name}, {sizes}": compared(name, sizes, i == 0) for i, (name, sizes) in enumerate(MESHES[size])}
    empty_parts(size)
    refusals(size)
    narrow(size)
    return found


def empty_parts(size: int) -> None:
    """What some processes have no part of is written and read, too."""
    model = materialize(parallelize(meta("cosine"), make_mesh(shard=size)), 7)
    names = [tempfile.mkdtemp()]
    dist.broadcast_object_list(names)
    save_sharded(names[0], model)
    before = gather_model(model, None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(3.0)
    load_sharded(names[0], model)
    assert error(gather_model(model, None), before) == 0
    dist.barrier()
    if not dist.get_rank():
        shutil.rmtree(names[0])


def refusals(size: int) -> None:
    with pytest.raises(ValueError, match=rf"the product of the sizes must be {size}, the number of processes, got"):
        make_mesh(shard=size, tensor=2)
    with pytest.raises(ValueError, match="make_mesh: tensor must be an int of at least 1, got 0"):
        make_mesh(tensor=0)
    mesh = make_mesh(tensor=size)
    odd = {"width": 15, "heads": 3, "head_width": 5}
    with torch.device("meta"):
        for changes, expected in (
            (odd | {"feedforward": 32}, "tensor must divide the model's 3 heads"),
            ({"kv_heads": 1}, "tensor must divide the model's 1 kv_heads"),
            ({"feedforward": 33}, "tensor must divide the model's 33 hidden features"),
            ({"score": "additive"}, "tensor must be 1 for a score with parameters"),
            ({"positions": "alibi"}, "tensor must be 1 with ALiBi"),
        ):
            model = DecoderLM(DecoderLMConfig(**SIZES | changes))
            with pytest.raises(ValueError, match=expected):
                parallelize(model, mesh)
        model = DecoderLM(DecoderLMConfig(**SIZES))
        model.scale = nn.Parameter(torch.ones(()))
        with pytest.raises(ValueError, match=r"model must have no scalar parameters.*got .*scale"):
            parallelize(model, make_mesh(shard=size))
        with pytest.raises(TypeError, match="model must be a DecoderLM or an EncoderLM, got Linear"):
            parallelize(nn.Linear(2, 2), mesh)
        with pytest.raises(ValueError, match="mesh must be a DeviceMesh with the dimensions data, shard, context"):
            parallelize(model, mesh["tensor"])
        done = parallelize(meta("gpt"), mesh)
    with pytest.raises(ValueError, match="model must not be parallelized already"):
        parallelize(done, mesh)
    with pytest.raises(ValueError, match="materialize: model must come from parallelize"):
        materialize(nn.Linear(2, 2), 0)


def narrow(size: int) -> None:
    """Parameters that are gathered in bfloat16 are still kept, and updated, in float32."""
    model = parallelize(DecoderLM(CONFIGS["gpt"]), make_mesh(shard=size), param_dtype=torch.bfloat16)
    tokens = documents()[0][0]
    logits = model(tokens)
    assert logits.dtype == torch.bfloat16
    logits.float().logsumexp(-1).sum().backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.campaign(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_a_mesh_learns_what_one_process_learns(size: int) -> None:
    for found in ranks.run(compare_all, size):
        assert len(found) == len(MESHES[size])
        assert not {name: value for name, value in found.items() if not max(value) < 1e-9}, found
