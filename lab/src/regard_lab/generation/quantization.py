"""Faster decoding on a CPU: packed or int8 weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TypeVar

from torch import Tensor, nn

from regard._utils.errors import described, rejected
from regard.nn import MultiheadAttention, TransformerDecoderLayer, TransformerEncoderLayer
from regard_lab.models import DecoderLM
from regard_lab.models.packed_weight import PackedWeight, can_pack
from regard_lab.models.transformer import TransformerSequenceDecoder

M = TypeVar("M", DecoderLM, TransformerSequenceDecoder)

#: Projection weights of attention layers.
_PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


def quantize(model: M) -> M:
    """Return a copy of a model with int8 weights, for decoding on a CPU.

    A decoding step reads every weight once, so smaller weights make it faster. Each output's weights are rounded to 255
    levels, and each row of activations to 16 bits on the fly; outputs are close to the model's, but not equal.
    Embeddings keep their dtype, but a tied output projection is quantized. You cannot train or save the copy; save the
    original model.

    Parameters
    ----------
    model : DecoderLM, TransformerEncoderDecoder or TransformerCaptioner
        On a CPU, in float32.

    Raises
    ------
    TypeError, ValueError
        If it is another kind of model, or its weights are already packed.

    Examples
    --------
    >>> import torch
    >>> from regard_lab.models import DecoderLM, DecoderLMConfig
    >>> model = DecoderLM(DecoderLMConfig(50, width=32, layers=2)).eval()
    >>> tokens = torch.tensor([[3, 1, 4]])
    >>> with torch.no_grad():
    ...     float((quantize(model)(tokens) - model(tokens)).abs().max()) < 0.05
    True
    """
    if not isinstance(model, DecoderLM | TransformerSequenceDecoder):
        expected = "be a DecoderLM, TransformerEncoderDecoder or TransformerCaptioner"
        raise rejected("quantize", "model", expected, described(model), TypeError)
    weight, _ = model.projection
    if isinstance(weight, PackedWeight):
        raise rejected("quantize", "model", "have ordinary weights", "packed ones: load the model again")
    if not can_pack(weight):
        raise rejected("quantize", "model", "be on the CPU in float32", f"{weight.dtype} on {weight.device}")
    made = copy.deepcopy(model).eval()
    _pack(made, int8=True)
    return made


def pack_weights(model: nn.Module) -> None:
    """Pack a model's weights in place into the layout that this CPU multiplies fastest; outputs agree to rounding.

    The encoder and the decoder of a Transformer translator or captioner then run as one kernel each, if they use ReLU,
    softmax of scaled dot products, and as many heads of keys as of queries, without gradients, hooks or an inspector;
    otherwise torch runs them (``regard_lab.models.packed_layers.obstacle`` says why).

    Decoding a few sequences or beams gains most (``python -m benchmarks.decoding`` measures how much). You cannot train
    or save the model afterwards. Models that are not on a CPU in float32, or that :func:`quantize` does not support,
    do not change.

    Parameters
    ----------
    model : Module

    Examples
    --------
    >>> import torch
    >>> from regard_lab.models import DecoderLM, DecoderLMConfig
    >>> model, tokens = DecoderLM(DecoderLMConfig(50, width=32, layers=2)).eval(), torch.tensor([[3, 1, 4]])
    >>> with torch.no_grad():
    ...     before = model(tokens)
    ...     pack_weights(model)
    ...     torch.allclose(model(tokens), before, atol=1e-5)
    True
    """
    if isinstance(model, DecoderLM | TransformerSequenceDecoder) and can_pack(model.projection[0]):
        _pack(model, int8=False)


def _matrices(model: DecoderLM | TransformerSequenceDecoder) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules and parameter names of all weights; a tied output projection becomes a separate weight."""
    if isinstance(model, DecoderLM):
        if model.output is None:
            model.output = nn.Linear(model.config.width, model.config.vocabulary, bias=False, device="meta")
            model.output.weight = model.embedding.weight
        yield from [(each, "weight") for each in model.modules() if type(each) is nn.Linear]
        return
    if model.output.weight is None:
        model.output.weight = nn.Parameter(model.projection[0].detach())
    yield model.output, "weight"
    for module in list(model.modules()):
        if isinstance(module, MultiheadAttention):
            yield from [(module, name) for name in _PROJECTIONS if getattr(module, name) is not None]
            yield module.out_proj, "weight"
        elif isinstance(module, TransformerEncoderLayer | TransformerDecoderLayer):
            yield from [(module.linear1, "weight"), (module.linear2, "weight")]


def _pack(model: DecoderLM | TransformerSequenceDecoder, *, int8: bool) -> None:
    for place, name in _matrices(model):
        weight: Tensor = getattr(place, name)
        delattr(place, name)
        setattr(place, name, PackedWeight.of(weight, int8=int8))
