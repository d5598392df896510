"""A small GPT and a small ViT as one writes them, with ours in torch's place, through what one does with a model."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engines_here import HERE
from tests.regard.test_onnx import answers, exported
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard import masks
from regard.nn import MultiheadAttention, TransformerEncoderLayer

pytestmark = pytest.mark.slow

DYNAMIC = torch.export.Dim.DYNAMIC
WINDOW = 4


class Block(nn.Module):
    """A decoder's block with grouped queries; ``ours`` is whose attention it calls."""

    def __init__(self, width: int, parts: dict[str, Any], ours: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.parts, self.ours = parts, ours

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).split([x.shape[-1], x.shape[-1] // 2, x.shape[-1] // 2], -1)
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (q, k, v))
        mask: Any = masks.causal() & masks.window(WINDOW, 0) & masks.padding(lengths)
        if self.ours:
            read = regard.attention(q, k, v, mask, enable_gqa=True, **self.parts)
        else:
            i = torch.arange(x.shape[1])
            near = (i[:, None] >= i) & (i[:, None] - i <= WINDOW)
            read = F.scaled_dot_product_attention(
                q, k, v, near & (i < lengths[:, None])[:, None, None], enable_gqa=True
            )
        x = x + self.out(read.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, ours: bool = True, **parts: Any) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, 16), nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(Block(16, parts, ours) for _ in range(1))
        self.head = nn.Linear(16, 11)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x, lengths)
        return self.head(x)


class ViT(nn.Module):
    """Patches, a class token, an encoder layer of ours, and a mask of images that have fewer patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 16, 4, 4), nn.Parameter(torch.zeros(1, 1, 16))
        self.layer = TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True, norm_first=True)
        self.pool = MultiheadAttention(16, 2, batch_first=True, normalizer="sigmoid")
        self.head = nn.Linear(16, 5)

    def forward(self, images: Tensor, missing: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).mT
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        x = self.layer(x, src_key_padding_mask=missing)
        return self.head(self.pool(x[:, :1], x, x, key_padding_mask=missing, need_weights=False)[0][:, 0])


def gpt(**named: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(**named)


def text(B: int, N: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(B * N)
    # Behind the second sequence's window is padding alone: queries there see nothing.
    return torch.randint(11, (B, N), generator=generator), torch.tensor([N, 1, N // 2, N])[:B]


def pictures(B: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(B)
    return torch.randn(B, 3, 8, 8, generator=generator), torch.arange(5) > torch.tensor([4, 2, 0])[:B, None]


#: One setting for each engine that traces: torch's kernel, ours, and tiles.
PARTS: list[dict[str, Any]] = [{}, {"score": "laplacian"}, {"normalizer": "sigmoid"}]
every_part = pytest.mark.parametrize("parts", PARTS, ids=str)


def loss(model: nn.Module, tokens: Tensor, lengths: Tensor) -> Tensor:
    real = torch.arange(tokens.shape[1]) < lengths[:, None]
    return F.cross_entropy(model(tokens, lengths)[real].float(), tokens.roll(-1, 1)[real])


def test_a_gpt_learns_what_it_learns_with_torch() -> None:
    found = []
    for ours in (True, False):
        model = gpt(ours=ours)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        for _ in range(3):
            optimizer.zero_grad()
            loss(model, *text(3, 12)).backward()
            optimizer.step()
        found.append([*model.parameters()])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


@every_part
def test_autocast(parts: dict[str, Any]) -> None:
    model, batch = gpt(**parts), text(3, 12)
    exact = model(*batch)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(*batch)
        loss(model, *batch).backward()
    assert output.dtype == torch.bfloat16
    assert (output.float() - exact).abs().max() < 3 * torch.finfo(torch.bfloat16).eps * exact.abs().max()
    assert all(
        p.grad is not None and p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters()
    )


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("parts", PARTS[1:], ids=str)
@torch.no_grad()
def test_one_compilation_serves_every_length(parts: dict[str, Any]) -> None:
    torch._dynamo.reset()
    model, counter = gpt(**parts), CompileCounterWithBackend("eager")
    compiled = torch.compile(model, dynamic=True, fullgraph=True, backend=counter)
    frames = []
    for sizes in ((2, 9), (3, 12), (4, 31)):
        torch.testing.assert_close(compiled(*text(*sizes)), model(*text(*sizes)), rtol=1e-4, atol=1e-5)
        frames.append(counter.frame_count)
    assert frames == frames[:1] * 3


@pytest.mark.campaign(keep=1)
@every_part
def test_an_exported_gpt_takes_every_length(parts: dict[str, Any]) -> None:
    model = gpt(**parts).eval()
    program = torch.export.export(
        model, text(2, 9), dynamic_shapes={"tokens": {0: DYNAMIC, 1: DYNAMIC}, "lengths": {0: DYNAMIC}}
    )
    for sizes in ((2, 9), (3, 12), (4, 64)):
        torch.testing.assert_close(program.module()(*text(*sizes)), model(*text(*sizes)), rtol=1e-4, atol=1e-5)


@pytest.mark.campaign
def test_onnx_runs_a_gpt_and_a_vit() -> None:
    model = gpt(score="laplacian").eval()
    shapes = {"tokens": {0: DYNAMIC, 1: DYNAMIC}, "lengths": {0: DYNAMIC}}
    session = exported(model, text(2, 9), shapes)
    for sizes in ((2, 9), (1, 3), (4, 64)):
        found = answers(session, dict(zip(shapes, text(*sizes))))[0]
        torch.testing.assert_close(torch.from_numpy(found), model(*text(*sizes)), rtol=1e-4, atol=1e-5)
    vit = ViT().eval()
    shapes = {"images": {0: DYNAMIC}, "missing": {0: DYNAMIC}}
    session = exported(vit, pictures(2), shapes)
    for B in (1, 3):
        found = answers(session, dict(zip(shapes, pictures(B))))[0]
        torch.testing.assert_close(torch.from_numpy(found), vit(*pictures(B)), rtol=1e-4, atol=1e-5)


@pytest.mark.campaign
def test_a_vit_traces_and_trains() -> None:
    torch._dynamo.reset()
    model = ViT()
    expected = model(*pictures(3))
    compiled = torch.compile(model, dynamic=True, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for B in (2, 3):
            torch.testing.assert_close(compiled(*pictures(B)), model(*pictures(B)), rtol=1e-4, atol=1e-5)
    program = torch.export.export(
        copy.deepcopy(model).eval(), pictures(2), dynamic_shapes={"images": {0: DYNAMIC}, "missing": {0: DYNAMIC}}
    )
    torch.testing.assert_close(program.module()(*pictures(3)), expected, rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        model(*pictures(3)).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("engine", HERE)
def test_the_flop_counter_counts_every_engine(engine: str) -> None:
    B, H, L, S, E, V = 2, 4, 9, 9, 16, 16
    q, k, v = torch.randn(3, B, H, L, E, requires_grad=True).unbind(0)
    with FlopCounterMode(display=False) as counter:
        output = regard.attention(q, k, v, engine=engine)
        forward = counter.get_total_flops()
        output.sum().backward()
    assert forward == 2 * B * H * L * S * (E + V)
    kept = engine in ("streaming", "flex", "reference")  # of one tile, scores need no second look
    assert counter.get_total_flops() == 3 * forward + (0 if kept else 2 * B * H * L * S * E)
    torch.testing.assert_close(output, regard.attention(q, k, v, engine=engine))


WORKER = """
import sys
import torch, torch.distributed as dist
sys.path[:0] = {path!r}
from test_own_models import gpt, loss, text
from torch.nn.parallel import DistributedDataParallel
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://{store}", rank=rank, world_size=2)
model = DistributedDataParallel(gpt(score="laplacian"))
tokens, lengths = text(4, 12)
loss(model, tokens[rank::2], lengths[rank::2]).backward()
if rank == 0:
    torch.save([p.grad for p in model.parameters()], {out!r})
dist.destroy_process_group()
"""


@pytest.mark.campaign
def test_two_processes_train_one_gpt(tmp_path: Path) -> None:
    path, out = [str(Path(__file__).parent), *sys.path], str(tmp_path / "gradients.pt")
    code = WORKER.format(path=path, store=tmp_path / "store", out=out)
    processes = [subprocess.Popen([sys.executable, "-c", code, str(rank)]) for rank in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    model, (tokens, lengths) = gpt(score="laplacian"), text(4, 12)
    sum(loss(model, tokens[rank::2], lengths[rank::2]) / 2 for rank in range(2)).backward()
    torch.testing.assert_close(torch.load(out), [p.grad for p in model.parameters()], rtol=1e-4, atol=1e-6)
