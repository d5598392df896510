"""A step of multi-head latent attention: cached latents, or keys and values that are expanded from them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from benchmarks.cases.contenders import seeded
from benchmarks.registry import Call, Case, Contender, Goal, Point, Result, register
from benchmarks.work import Work

#: Heads, and the widths of latents, keys, values and rotary keys, as in DeepSeek-V2-Lite.
HEADS, LATENT, WIDTH, TURNED = 16, 512, 128, 64
EXPANDED, KEPT = "SDPA, expanded by each step", "SDPA, expanded keys and values kept"


@cache
def _decoding(positions: int) -> tuple[regard.nn.MultiheadLatentAttention, Tensor, Tensor]:
    """Return a layer whose output is its heads', the row of a step, and latents (1, 1, N, C + R) up to its own."""
    torch.manual_seed(0)
    E = HEADS * WIDTH
    layer = regard.nn.MultiheadLatentAttention(
        E, HEADS, latent_dim=LATENT, head_dim=WIDTH, rotary=regard.nn.Rotary(TURNED, interleaved=True)
    ).requires_grad_(requires_grad=False)
    torch.nn.init.eye_(layer.out.weight)
    (x,) = seeded((1, positions, E))
    return layer, x[:, -1:], _rows(layer, x, 0)


def _query(layer: regard.nn.MultiheadLatentAttention, x: Tensor, positions: int) -> Tensor:
    """Return the queries (1, H, 1, D + R) of the last position."""
    query = layer.query(x).view(1, 1, HEADS, -1).transpose(1, 2)
    assert layer.rotary is not None
    return torch.cat((query[..., :WIDTH], layer.rotary(query[..., WIDTH:].contiguous(), positions - 1)), -1)


def _expanded(layer: regard.nn.MultiheadLatentAttention, latents: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys (1, H, N, D + R) and values (1, H, N, V)."""
    both = F.linear(latents[0, 0, :, :LATENT], layer.key_value.weight).view(1, -1, HEADS, 2 * WIDTH).transpose(1, 2)
    turned = latents[..., LATENT:].expand(-1, HEADS, -1, -1)
    return torch.cat((both[..., :WIDTH], turned), -1), both[..., WIDTH:]


def _rows(layer: regard.nn.MultiheadLatentAttention, x: Tensor, first: int) -> Tensor:
    """Return latents and rotary keys (1, 1, L, C + R) of rows from a position on."""
    both = layer.latent(x).unsqueeze(1)
    assert layer.rotary is not None
    turned = layer.rotary(both[..., LATENT:].contiguous(), first)
    return torch.cat((layer.latent_norm(both[..., :LATENT]), turned), -1)


def build(point: Point) -> Work:
    """Return the expanded queries, keys and values of a step, in whose terms the result is checked."""
    layer, x, latents = _decoding(point.size)
    wide = latents.double()
    both = F.linear(wide[0, 0, :, :LATENT], layer.key_value.weight.double())
    both = both.view(1, -1, HEADS, 2 * WIDTH).transpose(1, 2)
    key = torch.cat((both[..., :WIDTH], wide[..., LATENT:].expand(-1, HEADS, -1, -1)), -1)
    return Work(_query(layer, x, point.size), key.float(), both[..., WIDTH:].float().contiguous())


def _heads(rows: Tensor) -> Result:
    return {"output": rows.view(1, 1, HEADS, WIDTH).transpose(1, 2)}


@torch.no_grad()
def _by_each_step(work: Work) -> Call:
    N = work.key.shape[2]
    layer, x, latents = _decoding(N)
    kept = latents.clone()

    @torch.no_grad()
    def step() -> Result:
        kept[:, :, -1:] = _rows(layer, x, N - 1)
        read = F.scaled_dot_product_attention(_query(layer, x, N), *_expanded(layer, kept))
        return _heads(layer.out(read.transpose(1, 2).flatten(2)))

    return step


@torch.no_grad()
def _kept(work: Work) -> Call:
    N = work.key.shape[2]
    layer, x, latents = _decoding(N)
    key, value = (t.contiguous() for t in _expanded(layer, latents))

    @torch.no_grad()
    def step() -> Result:
        key[:, :, -1:], value[:, :, -1:] = _expanded(layer, _rows(layer, x, N - 1))
        read = F.scaled_dot_product_attention(_query(layer, x, N), key, value)
        return _heads(layer.out(read.transpose(1, 2).flatten(2)))

    return step


@torch.no_grad()
def _ours(work: Work) -> Call:
    N = work.key.shape[2]
    layer, x, latents = _decoding(N)
    kept = regard.nn.KVCache(capacity=N)
    kept.append(latents, latents[..., :0])

    @torch.no_grad()
    def step() -> Result:
        kept.truncate(N - 1)
        rows: Any = layer(x, cache=kept)
        return _heads(rows)

    return step


register(
    Case(
        name="mla-decode",
        title=f"A step of multi-head latent attention: {HEADS} heads of {WIDTH}, latents of {LATENT} + {TURNED}",
        unit="positions",
        build=build,
        contenders={EXPANDED: Contender(_by_each_step), KEPT: Contender(_kept), "regard": Contender(_ours)},
        baseline=KEPT,
        points=(Point(1024), Point(4096), Point(16384)),
        quick=64,
        goals=(Goal("mla-decode", "speed", 4.0, 4096),),
        notes=(
            "Each is the whole layer, its projections included. The first keeps latents and computes all keys and "
            "values from them, as transformers does; the second keeps these, which are 9 times as many numbers."
        ),
    )
)
