"""Every layer under ``torch.compile`` (one program for all sizes) and ``torch.fx`` (one node of the graph)."""

from __future__ import annotations

import copy
import inspect
import operator
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.regard.nn.layer_samples.options import Contextual
from tests.regard.nn.layer_samples.positions import Read
from tests.regard.nn.layer_samples.sample import LayerCall
from torch import Tensor, fx, nn

from regard import masks
from regard import nn as layers
from regard.nn import LinearAttention, MultiheadAttention, Rotary, SelfAttention, TransformerEncoderLayer

#: Batch sizes and lengths, in the order of calls. In the first call no two sizes are equal: torch would unify them.
SIZES = ((3, 4), (3, 7), (5, 9))
#: A size that must run without recompiling.
OTHER = (4, 11)
H, E, LONGEST = 2, 12, 20


@dataclass(frozen=True)
class Case:
    """A layer and its calls at any batch size and length; ``loops`` if a loop over lengths is unrolled."""

    name: str
    build: Callable[[], nn.Module]
    call: Callable[[Callable[..., Tensor], int, int], LayerCall]
    variant: str = ""
    loops: bool = False

    def __str__(self) -> str:
        return f"{self.name}-{self.variant}" if self.variant else self.name


def lengths(B: int, L: int) -> Tensor:
    return torch.arange(B) % L + 1


def padding(B: int, L: int) -> Tensor:
    """Return a key padding mask, True where padded."""
    return torch.arange(L) >= lengths(B, L)[:, None]


def rows(**how: Any) -> Any:
    return lambda new, B, L: ((new(B, L, E),), how)


def padded_rows(**how: Any) -> Any:
    return lambda new, B, L: ((new(B, L, E), lengths(B, L)), how)


def image(new: Any, B: int, L: int) -> LayerCall:
    return (new(B, E, L, L + 2),), {}


def padded_ends(new: Any, B: int, L: int) -> LayerCall:
    return (new(B, L, E), new(B, L + 1, E), new(B, L + 1, E), lengths(B, L + 1)), {}


def ends(*more: Any, **how: Any) -> Any:
    """Return calls of self-attention."""
    return lambda new, B, L: ((*[new(B, L, E)] * 3, *(each(B, L) for each in more)), how)


def masked_stack(new: Any, B: int, L: int) -> LayerCall:
    return (new(B, L, E), torch.full((L, L), -torch.inf).triu(1)), {}


def padded_own(new: Any, B: int, L: int) -> LayerCall:
    return (new(B, L, E), None, None, lengths(B, L)), {}


def continued(new: Any, B: int, L: int) -> LayerCall:
    state = new(B, H, E // H, E // H), new(B, H, E // H).square()
    return (new(B, L, E),), {"is_causal": True, "state": state, "return_state": True}


def steps(new: Any, B: int, L: int) -> LayerCall:
    """Return calls of recurrent layers, with few steps: each is traced by itself."""
    T = L // 3 + 1
    return (new(B, T, E), None, lengths(B, T)), {}


def memory(*more: Callable[[Any, int, int], Tensor]) -> Any:
    return lambda new, B, L: ((new(B, E), new(B, L, 5), *(each(new, B, L) for each in more)), {})


def two_sets(new: Any, B: int, L: int) -> LayerCall:
    return (new(B, L, E), new(B, L + 1, E), lengths(B, L + 1)), {}


def pair(**how: Any) -> Any:
    return lambda new, B, L: ((new(B, L, E), new(B, L + 1, E)), how)


def offsets(new: Any, B: int, L: int) -> LayerCall:
    return (new(B, L, E), torch.arange(B)), {}


def steps_after(new: Any, B: int, L: int) -> LayerCall:
    return (new(B, L, E),), {"valid_lens": lengths(B, L), "documents": torch.arange(L) // 3}


def few_steps(new: Any, B: int, L: int) -> LayerCall:
    """Return calls of a layer that loops over blocks, with one block."""
    T = L // 3 + 1
    return (new(B, T, E),), {"valid_lens": lengths(B, T)}


def points(new: Any, B: int, L: int) -> LayerCall:
    return (new(B, L, E), new(B, L, 3), lengths(B, L)), {}


def several(new: Any, B: int, L: int) -> LayerCall:
    return ([new(B, L, E) for _ in range(4)],), {}


def on_maps(new: Any, B: int, L: int) -> LayerCall:
    return (new(B, 3, E), new(B, L * 3, E), [(L, 3)], new(B, 3, 2).sigmoid()), {}


SIZED: dict[str, Any] = {"batch_first": True, "dropout": 0.0, "dim_feedforward": 10}
RECURRENT = (
    "Comba", "DeltaNet", "GatedDeltaNet", "GatedLinearAttention", "GatedSlotAttention", "HGRN2", "KimiDeltaAttention",
    "LightningAttention", "LogLinearGatedDeltaNet", "LogLinearMamba2", "Mamba2", "MesaNet", "RWKV6Attention",
    "RWKV7Attention", "Retention",
)  # fmt: skip
IMAGES = ("CBAM", "ChannelAttention", "ECA", "MultiheadConvAttention", "SelfAttention2d", "SqueezeExcitation")
CASES = [
    *(Case(name, lambda name=name: getattr(layers, name)(E), image) for name in IMAGES),
    Case("SpatialAttention", lambda: layers.SpatialAttention(3), image),
    *(
        Case("NonLocalBlock", lambda mode=mode: layers.NonLocalBlock(E, mode=mode, pool=2), image, mode)
        for mode in ("embedded", "dot", "concat")
    ),
    Case("SAB", lambda: layers.SAB(E, 6, H), padded_rows()),
    Case("ISAB", lambda: layers.ISAB(E, 6, H, 3), padded_rows()),
    Case("PMA", lambda: layers.PMA(E, H, 2), padded_rows()),
    Case("MAB", lambda: layers.MAB(E, E, 6, H), two_sets),
    Case("DotProductAttention", layers.DotProductAttention, padded_ends),
    Case("DotProductAttention", layers.DotProductAttention, rows(is_causal=True), "causal"),
    Case("GeneralAttention", lambda: layers.GeneralAttention(E), padded_ends),
    Case("AdditiveAttention", lambda: layers.AdditiveAttention(E, E, 6), padded_ends),
    Case("ConcatAttention", lambda: layers.ConcatAttention(E, E, 6), padded_ends),
    Case("LocationAttention", lambda: layers.LocationAttention(E, LONGEST), padded_ends),
    Case("CosineAttention", lambda: layers.CosineAttention(2.0), padded_ends),
    Case("KernelAttention", lambda: layers.KernelAttention(width=3.0), padded_ends),
    Case("HardAttention", lambda: layers.HardAttention(E).eval(), padded_ends),
    Case("HardAttention", lambda: layers.HardAttention(E), padded_ends, "drawn"),
    Case("HardAttention", lambda: layers.HardAttention(E, estimator="gumbel"), padded_ends, "gumbel"),
    *(
        Case("LocalAttention", lambda how=how: layers.LocalAttention(E, 2, **how), padded_ends, name)
        for name, how in {"": {}, "inside": {"renormalize": True}, "monotonic": {"mode": "monotonic"}}.items()
    ),
    Case(
        "LocalAttention",
        lambda: layers.LocalAttention(E, 2, mode="monotonic"),
        lambda new, B, L: (padded_ends(new, B, L)[0], {"positions": torch.arange(L)}),
        "positions",
    ),
    Case("PositionalAttention", lambda: layers.PositionalAttention(LONGEST), padded_rows()),
    Case(
        "FactorizedPositionalAttention",
        lambda: layers.FactorizedPositionalAttention(LONGEST, 3),
        padded_rows(is_causal=True),
    ),
    Case(
        "DecomposableAttention",
        lambda: layers.DecomposableAttention(E, 6, 3),
        lambda new, B, L: ((new(B, L, E), new(B, L + 1, E), lengths(B, L), lengths(B, L + 1)), {}),
    ),
    Case("IntraAttention", lambda: layers.IntraAttention(E, 6), steps, loops=True),
    Case("LinearAttention", lambda: LinearAttention(E, H), padded_own),
    Case("LinearAttention", lambda: LinearAttention(E, H), rows(is_causal=True), "causal"),
    Case("LinearAttention", lambda: LinearAttention(E, H, form="parallel"), rows(is_causal=True), "parallel"),
    Case("LinearAttention", lambda: LinearAttention(E, H, form="recurrent"), rows(is_causal=True), "steps", True),
    Case("LinearAttention", lambda: LinearAttention(E, H), continued, "continued"),
    Case(
        "LinearAttention",
        lambda: LinearAttention(E, H),
        lambda new, B, L: ((new(B, L, E),), {"is_causal": True, "documents": torch.arange(L) // 3}),
        "documents",
    ),
    Case("FastWeights", lambda: layers.FastWeights(E, H), padded_own),
    Case("FastWeights", lambda: layers.FastWeights(E, H, rule="sum"), rows(return_state=True), "sum"),
    Case("LinearSelfAttention", lambda: layers.LinearSelfAttention(E, 4, num_kv_heads=H), rows()),
    Case(
        "LinearSelfAttention",
        lambda: layers.LinearSelfAttention(E, 4),
        lambda new, B, L: ((new(B, L, E), masks.document(torch.arange(L) // 3)), {}),
        "documents",
    ),
    Case("ContentAddressing", lambda: layers.ContentAddressing(E, 5, H), memory(lambda _, B, L: lengths(B, L))),
    Case("NTMReadHead", lambda: layers.NTMReadHead(E, 5), memory()),
    Case("NTMWriteHead", lambda: layers.NTMWriteHead(E, 5), memory()),
    Case(
        "DNCReadHead",
        lambda: layers.DNCReadHead(E, 5),
        memory(lambda new, B, L: new(B, 1, L).softmax(-1), lambda new, B, L: new(B, L, L).softmax(-1) / 2),
    ),
    Case(
        "DNCWriteHead",
        lambda: layers.DNCWriteHead(E, 5),
        memory(lambda new, B, L: new(B, L).sigmoid(), lambda new, B, L: new(B, L).softmax(-1)),
        loops=True,  # over powers of 2 below the length
    ),
    Case("NeuralTuringMachine", lambda: layers.NeuralTuringMachine(E, 3, 6, 5, 4), steps, loops=True),
    Case(
        "DifferentiableNeuralComputer",
        lambda: layers.DifferentiableNeuralComputer(E, 3, 6, 5, 4),
        steps,
        loops=True,
    ),
    Case("MultiheadAttention", lambda: MultiheadAttention(E, H, batch_first=True), ends()),
    Case(
        "MultiheadAttention",
        lambda: MultiheadAttention(E, H, batch_first=True, num_kv_heads=1, rotary=Rotary(E // H)),
        ends(need_weights=False, is_causal=True),
        "grouped",
    ),
    Case(
        "MultiheadAttention",
        lambda: MultiheadAttention(E, H, add_bias_kv=True, add_zero_attn=True, batch_first=True),
        ends(padding, lambda B, L: True, lambda B, L: torch.ones(L, L, dtype=torch.bool).triu(1)),
        "appended",
    ),
    Case(
        "MultiheadAttention",
        lambda: MultiheadAttention(E, H),
        lambda new, B, L: ((new(L, B, E), new(L + 1, B, E), new(L + 1, B, E)), {}),
        "batch second",
    ),
    Case(
        "TransformerEncoderLayer",
        lambda: TransformerEncoderLayer(E, H, **SIZED),
        lambda new, B, L: ((new(B, L, E), None, padding(B, L)), {}),
    ),
    Case("TransformerDecoderLayer", lambda: layers.TransformerDecoderLayer(E, H, **SIZED), pair(tgt_is_causal=True)),
    Case(
        "TransformerEncoder",
        lambda: layers.TransformerEncoder(TransformerEncoderLayer(E, H, norm_first=True, **SIZED), 2),
        masked_stack,
    ),
    Case(
        "TransformerDecoder",
        lambda: layers.TransformerDecoder(layers.TransformerDecoderLayer(E, H, **SIZED), 2),
        pair(tgt_is_causal=True),
    ),
    Case("Transformer", lambda: layers.Transformer(E, H, 1, 1, **SIZED), pair(tgt_is_causal=True)),
    Case("SelfAttention", lambda: SelfAttention(E, 4, num_kv_heads=H), rows()),
    Case("SelfAttention", lambda: SelfAttention(E, H, rotary=Rotary(E // H)), rows(is_causal=True), "rotary"),
    Case(
        "SelfAttention",
        lambda: SelfAttention(E, H),
        lambda new, B, L: ((new(B, L, E), masks.causal() & masks.window(2, 0)), {}),
        "masks",
    ),
    Case(
        "SelfAttention",
        lambda: SelfAttention(
            E, 4, num_kv_heads=H, qk_norm="rms", exclusive="learned", head_scale=True, output_gate="channel"
        ),
        rows(is_causal=True),
        "options",
    ),
    Case(
        "CrossLayerAttention",
        lambda: layers.CrossLayerAttention(E, 4, num_kv_heads=H),
        lambda new, B, L: ((new(B, L, E), layers.KeysValues(new(B, H, L, 3), new(B, H, L, 3))), {"is_causal": True}),
    ),
    Case("MultiTokenAttention", lambda: layers.MultiTokenAttention(E, 4, 3, 3, head_kernel=2), rows(is_causal=True)),
    Case("LaserAttention", lambda: layers.LaserAttention(E, H), rows(is_causal=True)),
    Case("DifferentialAttention", lambda: layers.DifferentialAttention(E, 4), rows(is_causal=True)),
    Case(
        "QueryKeyNorm", lambda: layers.QueryKeyNorm(E), lambda new, B, L: ((new(B, H, L, E), new(B, H, L + 1, E)), {})
    ),
    Case("ValueResidual", layers.ValueResidual, lambda new, B, L: ((new(B, H, L, E), new(B, H, L, E)), {})),
    Case(
        "ExclusiveOutput",
        lambda: layers.ExclusiveOutput(H),
        lambda new, B, L: ((new(B, H, L, E), new(B, H, L, E)), {}),
    ),
    Case("HeadScale", lambda: layers.HeadScale(H), lambda new, B, L: ((new(B, H, L, E),), {})),
    Case("OutputGate", lambda: layers.OutputGate(E, H, 5), lambda new, B, L: ((new(B, H, L, 5), new(B, L, E)), {})),
    Case("FeedForward", lambda: layers.FeedForward(E, 10, "silu", gated=True), rows()),
    Case("SinusoidalPositions", lambda: layers.SinusoidalPositions(E), offsets),
    Case("LearnedPositions", lambda: layers.LearnedPositions(LONGEST, E), rows(offset=2)),
    Case("LearnedPositions", lambda: layers.LearnedPositions(LONGEST, E), offsets, "offsets"),
    Case("Rotary", lambda: Rotary(E), lambda new, B, L: ((new(B, H, L, E), torch.arange(B)), {})),
    Case(
        "Rotary",
        lambda: Rotary(E, scaling=layers.NTKScaling(2.0, 3)),
        lambda new, B, L: ((new(B, H, L, E),), {}),
        "dynamic",
    ),
    Case("XPos", lambda: layers.XPos(E), lambda new, B, L: ((new(B, H, L, E), torch.arange(B)), {})),
    Case("PolarPositions", lambda: layers.PolarPositions(H, E), lambda new, B, L: ((new(B, H, L, E),), {})),
    Case(
        "MultiAxisRotary",
        lambda: layers.MultiAxisRotary(E, (1, E // 2 - 1), "axial"),
        lambda new, B, L: ((new(B, H, L, E),), {"positions": torch.arange(2 * L).view(L, 2)}),
    ),
    Case("RelativeBias", lambda: Read(layers.RelativeBias(3, 8, 4)), padded_ends),
    Case("RelativePositions", lambda: Read(layers.RelativePositions(4, 2, value_dim=4)), padded_ends),
    Case("KerpleBias", lambda: Read(layers.KerpleBias(3)), padded_ends),
    Case("FireBias", lambda: Read(layers.FireBias(3, 5)), padded_ends),
    Case("ContextualPositions", lambda: Contextual(layers.ContextualPositions(4)), ends()),
    Case("DisentangledPositions", lambda: Contextual(layers.DisentangledPositions(3, 4, 6, 8)), ends()),
    Case("TransformerXLPositions", lambda: Contextual(layers.TransformerXLPositions(3, 4, 5)), ends()),
    Case("SelectiveBias", lambda: Contextual(layers.SelectiveBias()), ends()),
    Case("AlibiBias", lambda: Read(layers.AlibiBias(3, learn=True)), padded_ends),
    *(Case(name, lambda name=name: getattr(layers, name)(E, H), steps_after) for name in RECURRENT),
    Case("Mamba", lambda: layers.Mamba(E, state_dim=3), steps_after),
    Case("TTTLinear", lambda: layers.TTTLinear(E, H), few_steps, loops=True),
    Case("ShortConvolution", lambda: layers.ShortConvolution(E), steps_after),
    Case("AgentAttention", lambda: layers.AgentAttention(E, H, num_agents=3), padded_rows()),
    Case("AttentionFree", lambda: layers.AttentionFree(E, LONGEST, rank=3), padded_rows(is_causal=True)),
    Case("AttentionResidual", lambda: layers.AttentionResidual(E), several),
    Case("CoordinateAttention", lambda: layers.CoordinateAttention(E), image),
    Case("CrissCrossAttention", lambda: layers.CrissCrossAttention(E, 2), image),
    Case("GlobalContext", lambda: layers.GlobalContext(E, 2), image),
    Case("CrossCovarianceAttention", lambda: layers.CrossCovarianceAttention(E, H), padded_rows()),
    Case(
        "MultiheadLatentAttention",
        lambda: layers.MultiheadLatentAttention(E, H, latent_dim=5, head_dim=4, rotary=Rotary(2)),
        rows(is_causal=True),
    ),
    Case(
        "DeepSeekSparseAttention",
        lambda: layers.DeepSeekSparseAttention(
            E, H, latent_dim=5, head_dim=4, rotary=Rotary(2), query_latent_dim=6, index_heads=2, index_dim=4, topk=3
        ),
        rows(is_causal=True, loss="selected"),
    ),
    Case("DeformableAttention", lambda: layers.DeformableAttention(E, H, num_levels=1, num_points=2), on_maps),
    Case("EfficientAttention", lambda: layers.EfficientAttention(E, H), padded_rows()),
    Case("ExternalAttention", lambda: layers.ExternalAttention(E, 5), padded_rows()),
    Case("ForgettingAttention", lambda: layers.ForgettingAttention(E, H), padded_rows()),
    Case("TensorProductAttention", lambda: layers.TensorProductAttention(E, H, rotary=Rotary(E // H)), padded_rows()),
    Case("MultiMatrixFactorizationAttention", lambda: layers.MultiMatrixFactorizationAttention(E, H), padded_rows()),
    Case("GroupedTiedAttention", lambda: layers.GroupedTiedAttention(E, H, head_dim=4), padded_rows()),
    Case("PathAttention", lambda: layers.PathAttention(E, H, forget=True), padded_rows()),
    Case("GatedAttentionPooling", lambda: layers.GatedAttentionPooling(E, 4, 2), padded_rows()),
    Case("GatedCrossAttention", lambda: layers.GatedCrossAttention(E, H), two_sets),
    Case(
        "GraphAttention",
        lambda: layers.GraphAttention(E, 3, H),
        lambda new, B, L: ((new(B, L, E), None, lengths(B, L)), {}),
    ),
    Case("HopfieldAttention", lambda: layers.HopfieldAttention(E, H, rounds=2), two_sets),
    Case("LinformerAttention", lambda: layers.LinformerAttention(E, H, LONGEST, num_projected=3), padded_rows()),
    Case("NystromAttention", lambda: layers.NystromAttention(E, H, num_landmarks=3), padded_rows()),
    Case("PerformerAttention", lambda: layers.PerformerAttention(E, H, num_features=5), padded_rows(is_causal=True)),
    Case("MixtureOfBlockAttention", lambda: layers.MixtureOfBlockAttention(E, H, block_size=2, topk=3), padded_rows()),
    Case(
        "NativeSparseAttention",
        lambda: layers.NativeSparseAttention(E, H, block_size=2, num_blocks=4, window=3),
        padded_rows(),
    ),
    Case("PerceiverAttention", lambda: layers.PerceiverAttention(E, H), two_sets),
    Case("PerceiverResampler", lambda: layers.PerceiverResampler(E, 3, H), padded_rows()),
    Case("PointTransformerAttention", lambda: layers.PointTransformerAttention(E, 3), points),
    Case("ProductKeyMemory", lambda: layers.ProductKeyMemory(E, 4, 2, 3), rows()),
    Case("SlotAttention", lambda: layers.SlotAttention(E, 3), padded_rows()),
]
every_layer = pytest.mark.parametrize("case", CASES, ids=str)
#: Layers that return masks, with arguments; in the table they sit inside an attention.
MASKS = {
    "AlibiBias": (layers.AlibiBias(3), {"offset": 1}),
    "ContextualPositions": (layers.ContextualPositions(4), {name: torch.ones(2, 3, 5, 4) for name in ("query", "key")}),
    "DisentangledPositions": (
        layers.DisentangledPositions(3, 4, 5),
        {name: torch.ones(2, 3, 5, 4) for name in ("query", "key")},
    ),
    "FireBias": (layers.FireBias(3, 5), {"offset": 1}),
    "KerpleBias": (layers.KerpleBias(3), {"offset": 1}),
    "SelectiveBias": (layers.SelectiveBias(), {name: torch.ones(2, 3, 5, 4) for name in ("query", "key")}),
    "RelativeBias": (layers.RelativeBias(3, 8, 4), {"offset": 1}),
    "RelativePositions": (layers.RelativePositions(4, 2), {"query": torch.ones(2, 3, 5, 4), "offset": 1}),
    "TransformerXLPositions": (layers.TransformerXLPositions(3, 4, 5), {"query": torch.ones(2, 3, 5, 4)}),
}


def built(case: Case) -> nn.Module:
    torch.manual_seed(3)
    return case.build().double()


def numbers(B: int, L: int, leaves: list[Tensor] | None = None) -> Callable[..., Tensor]:
    """Return a function that draws normal tensors; with ``leaves``, they require gradients and are collected there."""
    generator = torch.Generator().manual_seed(100 * B + L)

    def new(*shape: int) -> Tensor:
        made = torch.randn(shape, generator=generator, dtype=torch.float64)
        if leaves is not None:
            leaves.append(made.requires_grad_())
        return made

    return new


def outputs(answer: Any) -> list[Tensor]:
    """Return the tensors of an answer, in order."""
    if isinstance(answer, Tensor):
        return [answer]
    return [tensor for each in answer for tensor in outputs(each)] if isinstance(answer, tuple) else []


def trained(run: Any, layer: nn.Module, case: Case, B: int, L: int) -> list[Tensor]:
    """Return the outputs of a call, and the gradients of its inputs and parameters."""
    leaves: list[Tensor] = []
    args, kwargs = case.call(numbers(B, L, leaves), B, L)
    layer.zero_grad()
    torch.manual_seed(5)
    found = outputs(run(*args, **kwargs))
    sum(each.square().sum() for each in found).backward()  # type: ignore[union-attr]
    if isinstance(layer, layers.HardAttention):
        layer.forget()  # as a training step does
    return [*found, *(torch.zeros_like(x) if x.grad is None else x.grad for x in (*leaves, *layer.parameters()))]


#: Layers that the table leaves out, and why.
OF_ONE_SIZE = {
    "LightningIndexer": "a part of DeepSeek's layer that returns indices, without a gradient",
    **dict.fromkeys(
        ("Atlas", "LaCT", "TTTMLP", "TitansMAC", "TitansMAG", "TitansMAL", "TitansMemory"),
        "pass for each size, but compiling their loops for unknown sizes takes minutes",
    ),
    "LSHAttention": "passes, but compiling its sorted chunks for unknown sizes takes minutes",
}


def test_every_layer_is_in_the_table() -> None:
    kinds = {name: getattr(layers, name) for name in layers.__all__}
    modules = {name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, nn.Module)}
    modules = {name for name in modules if not inspect.isabstract(kinds[name])}
    assert {case.name for case in CASES} == modules - OF_ONE_SIZE.keys()


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "dynamic"])
@every_layer
def test_one_program_serves_all_sizes(case: Case, dynamic: bool | None) -> None:
    layer = built(case)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)

    def check(B: int, L: int) -> None:
        for found, right in zip(trained(compiled, layer, case, B, L), trained(layer, layer, case, B, L)):
            torch.testing.assert_close(found, right)

    for B, L in SIZES:
        check(B, L)
    with torch.compiler.set_stance("default" if case.loops else "fail_on_recompile"):
        check(*OTHER)


class Model(nn.Module):
    """A model with one layer, all of whose arguments are proxies when traced."""

    def __init__(self, layer: nn.Module, call: LayerCall) -> None:
        super().__init__()
        self.count, self.names = len(call[0]), list(call[1])
        self.first, self.layer = nn.Identity(), layer

    def forward(self, args: Any, kwargs: Any) -> Any:
        """Return what the layer returns."""
        args = self.first(args)
        return self.layer(*(args[i] for i in range(self.count)), **{name: kwargs[name] for name in self.names})


def called(graph: fx.GraphModule) -> list[Any]:
    return [node.target for node in graph.graph.nodes if node.op == "call_module"]


def test_fx_takes_a_layer_as_a_node() -> None:
    for case in CASES:
        if case.name in MASKS:  # see below
            continue
        call = case.call(numbers(*OTHER), *OTHER)
        model = Model(built(case), call)
        traced = fx.symbolic_trace(model)
        assert called(traced) == ["first", "layer"], case
        traced.graph.lint()
        torch.manual_seed(5)
        right = outputs(model(*call))
        torch.manual_seed(5)
        for a, b in zip(outputs(traced(*call)), right, strict=True):
            assert torch.equal(a, b), case


@pytest.mark.parametrize("name", MASKS)
def test_fx_takes_a_layer_that_makes_masks_as_a_node(name: str) -> None:
    layer, kwargs = MASKS[name]
    traced = fx.symbolic_trace(Model(layer, ((), kwargs)))
    assert called(traced) == ["first", "layer"]
    assert repr(traced((), kwargs)) == repr(layer(**kwargs))


def test_graphs_with_layers_can_be_changed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(E, E), SelfAttention(E, H), layers.FeedForward(E, 10), nn.LayerNorm(E))
    traced = fx.symbolic_trace(model)
    assert called(traced) == ["0", "1", "2", "3"]
    for node in list(traced.graph.nodes):
        if node.op == "call_module" and type(traced.get_submodule(node.target)).__module__.startswith("regard.nn"):
            with traced.graph.inserting_after(node):
                negated = traced.graph.call_function(operator.neg, (node,))
            node.replace_all_uses_with(negated, lambda user, negated=negated: user is not negated)
    traced.recompile()
    x = torch.randn(3, 4, E)
    assert torch.equal(traced(x), model[3](-model[2](-model[1](model[0](x)))))
    assert type(traced.get_submodule("1")) is SelfAttention


def test_fx_takes_a_layer_of_a_users_own_as_a_node() -> None:
    class Doubled(layers.FeedForward):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(2 * x)

    model = nn.Sequential(Doubled(E, 10))
    x = torch.randn(3, E)
    assert torch.equal(fx.symbolic_trace(model)(x), model(x))


def test_hooks_run_with_the_graph_and_not_when_it_is_made() -> None:
    model, seen = nn.Sequential(SelfAttention(E, H)), []
    model[0].register_forward_pre_hook(lambda layer, args: seen.append("before"))
    model[0].register_forward_hook(lambda layer, args, output: seen.append("after"))
    traced = fx.symbolic_trace(model)
    assert not seen
    traced(torch.randn(3, 4, E))
    assert seen == ["before", "after"]


@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        copy.deepcopy,
        lambda layer: pickle.loads(pickle.dumps(layer)),
        SelfAttention._replicate_for_data_parallel,
    ],
    ids=["copied", "copied deeply", "pickled", "replicated"],
)
def test_copies_are_nodes_too(copied: Callable[[nn.Module], nn.Module]) -> None:
    layer = copied(SelfAttention(E, H))
    assert type(layer) is SelfAttention and SelfAttention.__module__ == "regard.nn.heads.self_attention"
    assert called(fx.symbolic_trace(nn.Sequential(layer))) == ["0"]


@pytest.mark.parametrize("way", ["compiled", "exported", "traced"])
def test_a_graph_of_fx_goes_on_to_other_tracers(way: str) -> None:
    torch.manual_seed(0)
    model = fx.symbolic_trace(nn.Sequential(nn.Linear(E, E), SelfAttention(E, H), layers.FeedForward(E, 10)))
    x = torch.randn(3, 4, E)
    torch._dynamo.reset()
    if way == "compiled":
        made: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    elif way == "exported":
        made = torch.export.export(model, (x,)).module()
    else:
        made = torch.jit.trace(model, (x,))
    torch.testing.assert_close(made(x), model(x))


def test_fx_traces_few_layers_alone() -> None:
    """docs/differences.md says which."""
    fx.symbolic_trace(nn.TransformerDecoderLayer(E, H))
    fx.symbolic_trace(layers.FeedForward(E, 10))
    with pytest.raises(fx.proxy.TraceError):
        fx.symbolic_trace(nn.MultiheadAttention(E, H))
    with pytest.raises(fx.proxy.TraceError):
        fx.symbolic_trace(layers.TransformerDecoderLayer(E, H))
    with pytest.raises(TypeError, match="SelfAttention: x must be a float tensor"):
        fx.symbolic_trace(SelfAttention(E, H))
