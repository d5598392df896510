"""Exported to ONNX with sizes left open, and run there: every mask, normalizer and score answers as here."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from tiers import sized
from torch import Tensor, nn

import regard
from regard import masks
from regard import nn as layers
from regard.normalizers import Entmax
from regard.normalizers.base import TABLE as NORMALIZERS
from regard.scores.base import TABLE as SCORES

pytestmark = pytest.mark.slow

Calls = Mapping[str, Callable[..., Tensor]]

#: B, L and S at export, and where the program is run: alone, of one row, with more queries than keys and fewer.
TRACED = (2, 9, 11)
RUN = [TRACED, (3, 5, 7), (1, 8, 6), (2, 1, 3)]
LENGTHS = torch.tensor([3, 0, 2])  # the second sequence has no key at all


class Program(nn.Module):
    """Several calls as one program, so that there is one export."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.calls = calls
        self.layers = nn.ModuleList(call for call in calls.values() if isinstance(call, nn.Module))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, n: Tensor, dense: Tensor) -> tuple[Tensor, ...]:
        return tuple(call(q, k, v, n, dense) for call in self.calls.values())


def inputs(B: int, L: int, S: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(B * L * S)
    q, k, v = (torch.randn(size, generator=generator) for size in ((B, 4, L, 4), (B, 2, S, 4), (B, 2, S, 6)))
    dense = torch.rand(B, 1, L, S, generator=generator) > 0.5
    dense[:, :, 0] = False
    return q, k, v, LENGTHS[:B], dense


def exported(module: nn.Module, args: tuple[Tensor, ...], shapes: Any) -> onnxruntime.InferenceSession:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it tells of packages that nobody needs here
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module.eval(), args, dynamo=True, dynamic_shapes=shapes, verbose=False, optimize=False
        )
    assert program is not None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(program.model_proto.SerializeToString(), options)


def answers(session: onnxruntime.InferenceSession, given: dict[str, Tensor]) -> list[np.ndarray]:
    """Return what a session answers to inputs by name, of which a program may read only some."""
    return session.run(None, {each.name: given[each.name].numpy() for each in session.get_inputs()})


def check(calls: Calls) -> None:
    """Hold that ONNX runs the calls with all sizes as they run here, in the rounding of float32."""
    module, B, L, S = Program(calls), *(torch.export.Dim.DYNAMIC,) * 3
    shapes = {"q": {0: B, 2: L}, "k": {0: B, 2: S}, "v": {0: B, 2: S}, "n": {0: B}, "dense": {0: B, 2: L, 3: S}}
    session = exported(module, inputs(*TRACED), shapes)
    for sizes in RUN:
        args = inputs(*sizes)
        with torch.no_grad():
            expected = module(*args)
        for name, ours, theirs in zip(calls, expected, answers(session, dict(zip(shapes, args))), strict=True):
            bound = 64 * torch.finfo(torch.float32).eps * max(1.0, float(ours.abs().max()))
            np.testing.assert_allclose(theirs, ours.numpy(), rtol=0, atol=bound, err_msg=f"{name} {sizes}")


def of_mask(make: Callable[[Tensor, Tensor], Any], **named: Any) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor, n: Tensor, dense: Tensor) -> Tensor:
        return regard.attention(q, k, v, make(n, dense), enable_gqa=True, **named)

    return call


def hidden(n: Tensor, dense: Tensor) -> masks.Mask:
    """A mask in which a query sees nothing: behind its window, everything is padding."""
    return masks.window(2, 0, align="upper_left") & masks.padding(n)


MASKS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "none": lambda n, dense: None,
    "causal": lambda n, dense: masks.causal(align="upper_left"),
    "causal, lower right": lambda n, dense: masks.causal(align="lower_right"),
    "window and padding": hidden,
    "window or sinks": lambda n, dense: masks.window(1, 1, align="upper_left") | masks.sinks(1),
    "not padding": lambda n, dense: ~masks.padding(n),
    "prefix": lambda n, dense: masks.causal(align="upper_left") | masks.prefix(n),
    "dilated": lambda n, dense: masks.dilated(2, align="upper_left"),
    "key padding": lambda n, dense: masks.key_padding(dense[:, 0, -1]),
    "document": lambda n, dense: masks.document(dense[:, 0, :, 0].long(), dense[:, 0, -1].long()),
    "dense": lambda n, dense: dense,
    "float": lambda n, dense: torch.where(dense, 0.5, -torch.inf),
    "alibi": lambda n, dense: masks.alibi(4, align="upper_left") & masks.padding(n),
    "relative": lambda n, dense: masks.relative(torch.arange(5.0), align="lower_right") & masks.padding(n),
    "function": lambda n, dense: lambda b, h, q_idx, kv_idx: (q_idx + kv_idx) % 3 == 0,
}


@pytest.mark.slow
def test_masks() -> None:
    check({name: of_mask(MASKS[name]) for name in list(MASKS)[:: sized(1, 3)]})


@pytest.mark.campaign
def test_normalizers() -> None:
    names = [name for name, cls in NORMALIZERS.items() if not cls.random]
    calls = {name: of_mask(hidden, normalizer=name) for name in names}
    check(calls | {"entmax of 3": of_mask(hidden, normalizer=Entmax(3.0))})


@pytest.mark.campaign
def test_scores() -> None:
    generator = torch.Generator().manual_seed(0)
    made = {name: cls.sample(4, 4, 11, generator) for name, cls in SCORES.items()}
    calls = {name: of_mask(hidden, score=score) for name, score in made.items()}
    check(calls | {"softcap": of_mask(hidden, softcap=2.0), "plain": of_mask(lambda n, dense: None, score="gaussian")})


E, H = 12, 2
#: Layers with states, latents, chosen keys and gates.
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Comba": lambda: layers.Comba(E, H),
    "DeltaNet": lambda: layers.DeltaNet(E, H),
    "GatedDeltaNet": lambda: layers.GatedDeltaNet(E, H),
    "KimiDeltaAttention": lambda: layers.KimiDeltaAttention(E, H),
    "Mamba": lambda: layers.Mamba(E),
    "Mamba2": lambda: layers.Mamba2(E, H),
    "LogLinearGatedDeltaNet": lambda: layers.LogLinearGatedDeltaNet(E, H, max_len=128),
    "LogLinearMamba2": lambda: layers.LogLinearMamba2(E, H, max_len=128),
    "TitansMemory": lambda: layers.TitansMemory(E, H),
    "MesaNet": lambda: layers.MesaNet(E, H),
    "MesaNet, approximate": lambda: layers.MesaNet(E, H, iterations=5),
    "Retention": lambda: layers.Retention(E, H),
    "GatedLinearAttention": lambda: layers.GatedLinearAttention(E, H),
    "GatedSlotAttention": lambda: layers.GatedSlotAttention(E, H, num_slots=4),
    "HGRN2": lambda: layers.HGRN2(E, H),
    "LightningAttention": lambda: layers.LightningAttention(E, H),
    "RWKV6Attention": lambda: layers.RWKV6Attention(E, H),
    "RWKV7Attention": lambda: layers.RWKV7Attention(E, H),
    "DeepSeekSparseAttention": lambda: layers.DeepSeekSparseAttention(
        E, H, latent_dim=5, head_dim=4, query_latent_dim=6, index_heads=2, index_dim=4, topk=3
    ),
    "MixtureOfBlockAttention": lambda: layers.MixtureOfBlockAttention(E, H, block_size=4, topk=2),
    "NativeSparseAttention": lambda: layers.NativeSparseAttention(E, H, block_size=4, num_blocks=3, window=8),
    "ForgettingAttention": lambda: layers.ForgettingAttention(E, H),
    "PathAttention": lambda: layers.PathAttention(E, H),
    "TensorProductAttention": lambda: layers.TensorProductAttention(E, H),
    "MultiMatrixFactorizationAttention": lambda: layers.MultiMatrixFactorizationAttention(E, H),
    "GroupedTiedAttention": lambda: layers.GroupedTiedAttention(E, H),
    "MultiheadLatentAttention": lambda: layers.MultiheadLatentAttention(E, H, latent_dim=5, head_dim=4),
    "DifferentialAttention": lambda: layers.DifferentialAttention(E, H),
    "MultiTokenAttention": lambda: layers.MultiTokenAttention(E, H),
    "LaserAttention": lambda: layers.LaserAttention(E, H),
    "SelfAttention": lambda: layers.SelfAttention(E, H, output_gate="channel", qk_norm="rms", exclusive="fixed"),
}


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    torch.manual_seed(0)
    layer, free = LAYERS[name](), torch.export.Dim.DYNAMIC
    session = exported(layer, (torch.randn(2, 9, E),), {"x": {0: free, 1: free}})
    for B, L in ((2, 9), (3, 17), (1, 70)):
        x = torch.randn(B, L, E)
        with torch.no_grad():
            np.testing.assert_allclose(answers(session, {"x": x})[0], layer(x).numpy(), rtol=0, atol=1e-4)
