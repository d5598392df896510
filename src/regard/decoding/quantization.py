"""Linear layers in int8, and weights laid out for small batches: for decoding on processors."""

from __future__ import annotations

import copy
import warnings

import torch
from torch import nn

from regard._errors import described, rejected
from regard.models import DecoderLM


def quantize(model: DecoderLM) -> DecoderLM:
    """Return a copy of a model whose linear layers hold int8 weights, for decoding on a CPU.

    A step of decoding reads every weight once, so it takes a fraction of the time. Weights are rounded to 255 levels,
    inputs of a layer as they come (torch's dynamic quantization); outputs are near those of the model, not the same.
    The embedding stays as it is; a tied one is rounded where it scores the vocabulary. The copy cannot be trained or
    saved: save the model.

    Parameters
    ----------
    model : DecoderLM
        On a CPU, in float32.

    Raises
    ------
    TypeError, ValueError
        If it is no such model.

    Examples
    --------
    >>> from regard.models import DecoderLM, DecoderLMConfig
    >>> model = DecoderLM(DecoderLMConfig(50, width=32, layers=2)).eval()
    >>> tokens = torch.tensor([[3, 1, 4]])
    >>> float((quantize(model)(tokens) - model(tokens)).abs().max()) < 0.05
    True
    """
    if not isinstance(model, DecoderLM):
        raise rejected("quantize", "model", "be a DecoderLM", described(model), TypeError)
    weight = model.embedding.weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        raise rejected("quantize", "model", "be on the CPU in float32", f"{weight.dtype} on {weight.device}")
    made = copy.deepcopy(model).eval()
    if made.output is None:
        made.output = nn.Linear(made.config.width, made.config.vocabulary, bias=False)
        made.output.weight = nn.Parameter(weight.detach())
    with warnings.catch_warnings():  # that it is to move to torchao
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(made, {nn.Linear}, dtype=torch.qint8, inplace=True)


def arrange_weights(model: nn.Module, *, head: bool = True) -> None:
    """Lay the weights of a model's linear layers out input by input, in place: their values and shapes stay.

    Products of a matrix with up to 64 rows, as in the steps of few sequences, then take less time on a CPU, those with
    4 to 64 about half; with hundreds of rows they take as long as before.

    Parameters
    ----------
    model : Module
    head : bool, default True
        Whether the matrix that scores the vocabulary of a DecoderLM, which may be its embedding, is one of them. That
        suits a single sequence: with 2 to 8, a step takes less time where it lies as it was.

    Examples
    --------
    >>> layer = nn.Linear(8, 3)
    >>> arrange_weights(layer)
    >>> layer.weight.shape, layer.weight.stride()
    (torch.Size([3, 8]), (1, 3))
    """
    decoders = [each for each in model.modules() if isinstance(each, DecoderLM)]
    heads = [each.embedding if each.output is None else each.output for each in decoders]
    for module in model.modules():
        if (module in heads and head) or (isinstance(module, nn.Linear) and module not in heads):
            module.weight.data = module.weight.data.t().contiguous().t()
