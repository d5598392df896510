"""Layers with packed weights as one compiled kernel, where nothing needs torch's operations one by one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._utils.torch_private import OutProjection, is_eager
from regard._utils.tracing import is_observed
from regard.engines.fused import library
from regard.engines.fused.layers import Layers, LayerWeights, Linear, Stored, Table
from regard.nn import MultiheadAttention, TransformerDecoderLayer, TransformerEncoderLayer
from regard_lab.models.beam_cache import BeamCache, KeyRows
from regard_lab.models.packed_weight import PackedWeight

Layer = TransformerEncoderLayer | TransformerDecoderLayer
#: The types of parts in layers that were not modified.
_PARTS = frozenset({MultiheadAttention, nn.Linear, OutProjection, nn.LayerNorm, nn.Dropout})


def packed_layers(layers: Sequence[Layer], last_norm: nn.Module) -> Layers | None:
    """Return layers and the norm behind them as one kernel; None if there is an :func:`obstacle`.

    Parameters
    ----------
    layers : sequence of TransformerEncoderLayer or TransformerDecoderLayer
    last_norm : Module
        A LayerNorm, or an Identity.
    """
    if obstacle(layers) is not None:
        return None
    norm = last_norm if isinstance(last_norm, nn.LayerNorm) else None
    first = layers[0]
    weights = [_weights(each) for each in layers]
    return Layers(weights, first.self_attn.num_heads, norm_first=first.norm_first, last_norm=norm)


def obstacle(layers: Sequence[Layer]) -> str | None:
    """Return why torch runs the layers, operation by operation, rather than one kernel; None if the kernel does."""
    if not layers:
        return "there are no layers"
    if library.problem() is not None:
        return library.problem()
    if not all(isinstance(weight, PackedWeight) for layer in layers for weight in _matrices(layer)):
        return "not all weights are packed (regard_lab.generation.pack_weights)"
    if torch.is_grad_enabled():
        return "gradients are enabled"
    if is_observed() or not is_eager() or torch.is_autocast_enabled("cpu"):
        return "an inspector, a compiler, a transform or autocast is active"
    return next((reason for reason in map(_obstacle, layers) if reason is not None), None)


def _matrices(layer: Layer) -> list[Tensor | None]:
    made: list[Tensor | None] = [layer.linear1.weight, layer.linear2.weight]
    for each in (layer.self_attn, layer.multihead_attn if isinstance(layer, TransformerDecoderLayer) else None):
        if each is not None:
            made += [each.out_proj.weight, *([] if each.in_proj_weight is None else [each.in_proj_weight])]
    return made


def _obstacle(layer: Layer) -> str | None:
    if layer.training:
        return "the model is in training mode"
    if layer.activation is not F.relu:
        return "the activation is not ReLU"
    for part in layer.children():
        if type(part) not in _PARTS or part._forward_hooks or part._forward_pre_hooks:
            return "a part of a layer was exchanged, or has a hook"
        if not isinstance(part, MultiheadAttention):
            continue
        usual = part.score is None and part.normalizer == "softmax" and part.engine == "auto"
        if not usual or part.rotary is not None or part.in_proj_weight is None or part._extends:
            return "an attention is not multi-head softmax of scaled dot products, with as many heads of keys"
    weight = _norm(layer, 1).weight
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        return "the model is not in float32 on the CPU"
    return None


def _weights(layer: Layer) -> LayerWeights:
    own, E = layer.self_attn, layer.self_attn.embed_dim
    norm_other = other_query = other_output = None
    if isinstance(layer, TransformerDecoderLayer):
        other = layer.multihead_attn
        assert other.in_proj_weight is not None
        bias = None if other.in_proj_bias is None else other.in_proj_bias[:E]
        norm_other, other_query = _norm(layer, 2), _linear(other.in_proj_weight[:E], bias)
        other_output = _linear(other.out_proj.weight, other.out_proj.bias)
    return LayerWeights(
        _norm(layer, 1),
        _linear(own.in_proj_weight, own.in_proj_bias),
        _linear(own.out_proj.weight, own.out_proj.bias),
        norm_other,
        other_query,
        other_output,
        _norm(layer, 2 if norm_other is None else 3),
        _linear(layer.linear1.weight, layer.linear1.bias),
        _linear(layer.linear2.weight, layer.linear2.bias),
    )


def _norm(layer: Layer, number: int) -> nn.LayerNorm:
    norm = getattr(layer, f"norm{number}")
    assert isinstance(norm, nn.LayerNorm)
    return norm


def _linear(weight: Tensor | None, bias: Tensor | None) -> Linear:
    assert isinstance(weight, PackedWeight)
    return Linear(weight.panels, bias)


# Running them ---------------------------------------------------------------------------------------------------------
# Dimensions: R rows, E width, H heads, D head size, B sequences, N their steps in total.


def run_step(kernel: Layers, x: Tensor, cache: BeamCache, memory: Sequence[KeyRows]) -> None:
    """Replace the rows (R, E) of a decoding step by the output of the layers, and append the step to the cache.

    Raises
    ------
    RuntimeError
        If an inspector was activated after the state was made.
    """
    if is_observed():
        raise RuntimeError("This decoding began before the inspector was active: call start() inside its context.")
    count, E, H = kernel.count, kernel.width, kernel.heads
    rows, table, place = cache.extend(x, (2, count * H, E // H))
    kernel.run(x, Stored(rows, Table(None, table, None), E), place, memory, memory[0].lookup(len(x)))


def run_sequences(kernel: Layers, x: Tensor, lengths: Tensor) -> None:
    """Replace the steps (N, E) of B concatenated sequences by the output of the layers; a step sees its sequence."""
    stored = x.new_empty(len(x), 2, kernel.heads, kernel.width // kernel.heads)
    which = torch.arange(len(lengths)).repeat_interleave(lengths)
    table = KeyRows.of(stored[:, 0], stored[:, 1], lengths).lookup(which)
    kernel.run(x, Stored(stored, table, 0), 0, cuts=lengths.cumsum(0))
