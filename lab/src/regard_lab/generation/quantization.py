"""Matrices of models that decode on a processor: laid out for it, or in int8."""

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

#: Matrices of a layer of attention that products read.
_PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


def quantize(model: M) -> M:
    """Return a copy of a model whose matrices are in int8, for decoding on a CPU.

    A step of decoding reads every weight once, so it takes a fraction of the time. Weights are rounded to 255 levels,
    what they are multiplied by as it comes (torch's dynamic quantization); outputs are near those of the model, not the
    same. Embeddings stay as they are; a tied one is rounded where it scores the vocabulary. The copy can neither be
    trained nor saved: save the model.

    Parameters
    ----------
    model : DecoderLM, TransformerEncoderDecoder or TransformerCaptioner
        On a CPU, in float32.

    Raises
    ------
    TypeError, ValueError
        If it is no such model, or its weights were packed before.

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
        expected = "be a DecoderLM or a Transformer that writes"
        raise rejected("quantize", "model", expected, described(model), TypeError)
    weight, _ = model.projection
    if isinstance(weight, PackedWeight):
        raise rejected("quantize", "model", "have weights of its own", "packed ones: load it anew")
    if not can_pack(weight):
        raise rejected("quantize", "model", "be on the CPU in float32", f"{weight.dtype} on {weight.device}")
    made = copy.deepcopy(model).eval()
    _pack(made, int8=True)
    return made


def pack_weights(model: nn.Module) -> None:
    """Lay the matrices of a model out as this processor multiplies by them fastest, in place: its outputs stay.

    Products with few rows, as in the steps of few sequences or of one with its beams, gain most by it
    (``python -m benchmarks.decoding`` measures how much). The model then can neither be trained nor saved. What is not
    on a CPU in float32, or is no model that :func:`quantize` knows, stays as it is.

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
    """Yield the modules and the names of the matrices that steps read; a tied one becomes the output's own."""
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
