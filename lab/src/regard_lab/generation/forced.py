"""Forced decoding: scores of given targets, and the attention with which they are written.

Dimensions: A attention maps, T target tokens, S source tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.nn.packed_weight import PackedWeight
from regard_lab.models.base import END, EncoderDecoder
from regard_lab.text.ragged import pad
from regard_lab.training.losses import cross_entropy

#: The numbers of a source and of a target.
Numbers = tuple[Sequence[int], Sequence[int]]


def pad_to_device(model: EncoderDecoder, sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return sequences as a tensor (B, S) and their lengths (B,), where the model is."""
    device = next(model.parameters()).device
    numbers, lengths = pad(sequences)
    return numbers.to(device), lengths.to(device)


@torch.no_grad()
def score_targets(model: EncoderDecoder, pairs: Sequence[Numbers]) -> list[float]:
    """Return the log-probability of targets with their end marks."""
    sources = pad_to_device(model, [source for source, _ in pairs])
    target, _ = pad_to_device(model, [[*target, END] for _, target in pairs])
    before = torch.cat([target.new_full((len(pairs), 1), END), target[:, :-1]], 1)
    weight, bias = model.projection
    weight = weight.unpacked() if isinstance(weight, PackedWeight) else weight
    _, each = cross_entropy(model.features(*sources, before), (weight, bias), target)  # (B, T)
    return list(each.double().sum(1).tolist())


@torch.no_grad()
def attention_maps(model: EncoderDecoder, pairs: Sequence[Numbers]) -> list[Tensor]:
    """Return the attention weights (A, T, S) with which targets were written for sources."""
    if not pairs:
        return []
    source, lengths = pad_to_device(model, [source for source, _ in pairs])
    target, _ = pad_to_device(model, [[END, *target[:-1]] for _, target in pairs])
    weights = model.align(source, lengths, target).cpu()
    return [each[:, : len(target), : len(source)] for each, (source, target) in zip(weights, pairs)]


def attention_weights(model: EncoderDecoder, pairs: Sequence[Numbers], name: str | None) -> list[Tensor]:
    """Return the weights (T, S) of one attention map, or the mean of all, with which targets were written."""
    place = slice(None) if name is None else [model.maps.index(name)]
    return [each[place].mean(0) for each in attention_maps(model, pairs)]


@torch.no_grad()
def posteriors(model: EncoderDecoder, pairs: Sequence[Numbers], name: str | None) -> list[Tensor]:
    """Return how much of each token of targets is due to each source token, (T, S), by one map or the mean of all."""
    if not pairs:
        return []
    source, lengths = pad_to_device(model, [source for source, _ in pairs])
    target, _ = pad_to_device(model, [[END, *target[:-1]] for _, target in pairs])
    written, _ = pad_to_device(model, [target for _, target in pairs])
    posterior = model.posterior(source, lengths, target, written, name).cpu()
    return [each[: len(target), : len(source)] for each, (source, target) in zip(posterior, pairs)]
