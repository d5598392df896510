"""Nested tensors, which torch's encoder makes of padded ones, through layers that take padded ones.

Dimensions: B batch, N rows of a sequence, E width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from regard._errors import described, rejected, shape
from regard.masks import MaskLike, as_mask


def attend_nested(
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    need_weights: bool,
    attn_mask: MaskLike | None,
    *given: Any,
) -> tuple[Tensor, Any]:
    """Return a multi-head layer's answer for nested tensors; ``given`` are the further arguments of its call."""
    name = type(layer).__name__
    if key_padding_mask is not None or not (query.is_nested and key.is_nested and value.is_nested):
        expected = "be nested all three, and without a key_padding_mask, or none"
        raise rejected(name, "query, key and value", expected, "a mixture")
    if not layer.batch_first:
        raise rejected(name, "query", "be dense where batch_first is False", "a nested tensor")
    rows: dict[int, list[Tensor]] = {}
    inputs = ("query", query, layer.embed_dim), ("key", key, layer.kdim), ("value", value, layer.vdim)
    for argument, x, width in inputs:
        if id(x) not in rows:  # one object stays one: the layer looks at that
            rows[id(x)] = sequences(name, argument, x, width)
    lengths, ours, theirs = ([len(row) for row in rows[id(x)]] for x in (query, key, value))
    if len(ours) != len(lengths):
        raise rejected(name, "key", f"hold as many sequences as query, {len(lengths)}", len(ours))
    if theirs != ours:
        raise rejected(name, "value", f"hold sequences as long as key's, {ours}", theirs)
    dense = {which: pad_sequence(each, batch_first=True) for which, each in rows.items()}
    ends = [dense[id(x)] for x in (query, key, value)]
    if attn_mask is not None and not isinstance(attn_mask, Tensor):
        counts = (torch.tensor(each, device=query.device) for each in (lengths, ours))
        attn_mask = as_mask(attn_mask).for_lengths(*counts)
    output, extra = layer.forward(*ends, _padding(ours, key.device), need_weights, attn_mask, *given)
    if isinstance(extra, Tensor):  # weights (B, L, S) or (B, H, L, S): padding has none
        none = _padding(lengths, key.device).unflatten(0, (-1,) + (1,) * (extra.dim() - 3)).unsqueeze(-1)
        extra = torch.where(none, 0.0, extra)
    return _nested_like(query, [row[:length] for row, length in zip(output, lengths)], name), extra


def sequences(function: str, argument: str, nested: Tensor, width: int) -> list[Tensor]:
    """Return the sequences (N, E) of a nested tensor of this width, at least one, or raise."""
    if nested.layout == torch.jagged:
        if nested.dim() != 3 or isinstance(nested.shape[1], int):
            raise rejected(function, argument, f"have shape (B, N, {width}) with jagged N", shape(nested))
        rows = [_values(nested).narrow(0, start, length) for start, length in zip(*_spans(nested))]
    else:
        rows = list(nested.unbind())
    if not rows:
        raise rejected(function, argument, "hold at least one sequence", "an empty nested tensor")
    for row in rows:
        if row.dim() != 2 or row.shape[1] != width:
            raise rejected(function, argument, f"hold sequences of shape (N, {width})", described(row))
    return rows


def without_holes(layer: Any, argument: str, x: Tensor) -> Tensor:
    """Return a Transformer layer's nested input with its sequences one after the other, as linear layers need them.

    Torch's ``contiguous`` does so, too, but has no gradient. What lies so already is returned itself.
    """
    rows = sequences(type(layer).__name__, argument, x, layer.self_attn.embed_dim)
    if x.is_contiguous() and (x.layout != torch.jagged or sum(map(len, rows)) == _values(x).shape[0]):
        return x
    if x.layout != torch.jagged:
        return torch.nested.as_nested_tensor(rows)
    lengths = torch.tensor([0, *map(len, rows)], device=x.device)
    return torch.nested.nested_tensor_from_jagged(torch.cat(rows), lengths.cumsum(0))


def _values(nested: Any) -> Tensor:
    found: Tensor = nested.values()
    return found


def _spans(nested: Any) -> tuple[list[int], list[int]]:
    """Return where each sequence of a jagged tensor begins in its values, and how long it is."""
    offsets, lengths = nested.offsets(), nested.lengths()
    return offsets[:-1].tolist(), (offsets.diff() if lengths is None else lengths).tolist()


def _padding(lengths: list[int], device: torch.device) -> Tensor:
    """Return which of the rows of padded sequences are padding: (B, N)."""
    return torch.arange(max(lengths), device=device) >= torch.tensor(lengths, device=device).unsqueeze(1)


def _nested_like(query: Any, rows: list[Tensor], name: str) -> Tensor:
    """Return rows for each sequence of the query with the query's own structure, so that the two can be added."""
    if query.layout != torch.jagged:
        return torch.nested.as_nested_tensor(rows)
    packed, count = torch.cat(rows), _values(query).shape[0]
    starts, lengths = _spans(query)
    stops = [start + length for start, length in zip(starts, lengths)]
    if any(stop > start for stop, start in zip(stops, starts[1:])):
        raise rejected(name, "query", "hold sequences that do not overlap", "a jagged tensor in which they do")
    if len(packed) != count:  # zeros between the sequences
        places = [torch.arange(start, stop, device=packed.device) for start, stop in zip(starts, stops)]
        packed = packed.new_zeros(count, packed.shape[1]).index_copy(0, torch.cat(places), packed)
    return torch.nested.nested_tensor_from_jagged(packed, query.offsets(), query.lengths())
