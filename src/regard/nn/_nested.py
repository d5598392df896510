"""Nested tensors, which torch's encoder makes of padded ones, through layers that take padded ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from regard._errors import rejected


def attend_nested(
    layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, *given: Any
) -> tuple[Tensor, Any]:
    """Return a multi-head layer's answer for nested tensors; ``given`` are the further arguments of its call."""
    name = type(layer).__name__
    if key_padding_mask is not None or not (query.is_nested and key.is_nested and value.is_nested):
        expected = "be nested all three, and without a key_padding_mask, or none"
        raise rejected(name, "query, key and value", expected, "a mixture")
    if not layer.batch_first:
        raise rejected(name, "query", "be dense where batch_first is False", "a nested tensor")
    rows = {id(x): list(x.unbind()) for x in (query, key, value)}
    if not rows[id(query)]:
        raise rejected(name, "query", "hold at least one sequence", "an empty nested tensor")
    dense = {which: pad_sequence(each, batch_first=True) for which, each in rows.items()}
    lengths = torch.tensor([len(x) for x in rows[id(key)]], device=key.device)
    padding = torch.arange(dense[id(key)].shape[1], device=key.device) >= lengths.unsqueeze(1)
    ends = [dense[id(x)] for x in (query, key, value)]
    output, extra = layer.forward(ends[0], ends[1], ends[2], padding, *given)
    real = [row[: len(x)] for row, x in zip(output, rows[id(query)])]
    if query.layout == torch.jagged:  # with the query's own offsets, so that the two can be added
        offsets: Any = query.offsets  # type: ignore[attr-defined]
        return torch.nested.nested_tensor_from_jagged(torch.cat(real), offsets()), extra
    return torch.nested.as_nested_tensor(real), extra
