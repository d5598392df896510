"""Rows of a beam search, rearranged so that each returned sequence has the rows of its own beams.

Dimensions: B rows of the batch (beams), R returned sequences, T steps, G key heads, S keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from regard.inspect._record.calls import AttentionCall, dense_mask
from regard.inspect._record.layer_tracker import Caller

#: The note for a beam search without beam indices.
UNFOLLOWED = "Each step of a beam search is recorded as a separate run: the beams of each sequence are unknown."


@dataclass
class BeamSearch:
    """The calls of a beam search, layer by layer.

    Attributes
    ----------
    calls : dict of str to list of (Caller, AttentionCall)
        In the order of the steps.
    indices : Tensor (R, T), optional
        The row of step t from which token t of a sequence was chosen; −1 after its end.
    """

    calls: dict[str, list[tuple[Caller, AttentionCall]]] = field(default_factory=dict)
    indices: Tensor | None = None

    def add(self, layer: str, caller: Caller, call: AttentionCall) -> None:
        """Add a call of a layer."""
        self.calls.setdefault(layer, []).append((caller, call))

    def rename(self, layer: str, name: str) -> None:
        """Give a layer another name."""
        self.calls = {name if each == layer else each: calls for each, calls in self.calls.items()}

    def followed(self) -> dict[str, list[AttentionCall]] | None:
        """Return each layer's calls with the rows of the returned sequences; None if the beams are unknown."""
        if self.indices is None or not self.indices.numel():
            return None
        found: dict[str, list[AttentionCall]] = {}
        for layer, calls in self.calls.items():
            followed = _followed([call for _, call in calls], self.indices)
            if followed is None:
                return None
            found[layer] = followed
        return found


def _followed(calls: list[AttentionCall], indices: Tensor) -> list[AttentionCall] | None:
    T = indices.shape[1]
    whole = all(call.query.shape[2] == 1 for call in calls[1:])  # without a cache, each step recomputes all rows
    if len(calls) < T or not whole or int(indices.max()) >= len(calls[0].query):
        return None
    valid, rows = indices >= 0, indices.clamp(min=0)
    begins = _begins(calls[:T], rows)
    groups = max(call.key.shape[1] for call in calls)
    keys = [call.key.repeat_interleave(groups // max(call.key.shape[1], 1), 1) for call in calls[:T]]
    width = max(first + key.shape[2] for first, key in zip(begins, keys))
    R, E = len(indices), keys[0].shape[3]
    joint = keys[0].new_zeros(R, groups, width, E)
    for t, (first, key) in enumerate(zip(begins, keys)):
        joint[valid[:, t], :, first : first + key.shape[2]] = key[rows[valid[:, t], t]]
    found = []
    for t, (call, first) in enumerate(zip(calls, begins)):
        key = joint[:, :, first : first + call.key.shape[2]]
        found.append(_gathered(call, key, first, rows[:, t], valid[:, t]))
    return found


def _begins(calls: list[AttentionCall], rows: Tensor) -> list[int]:
    """Return the position of each call's first key: keys grow by one per step, or stay the same."""
    first = calls[0].key.shape[2]
    if len(calls) > 1 and calls[1].key.shape[2] == first:
        one, other = calls[0].marks, calls[1].marks
        if one is None or other is None or torch.equal(one[rows[:, 0]], other[rows[:, 1]]):
            return [0] * len(calls)
    return [first + t - call.key.shape[2] for t, call in enumerate(calls)]


def _gathered(call: AttentionCall, key: Tensor, first: int, rows: Tensor, valid: Tensor) -> AttentionCall:
    hidden = ~valid[:, None, None, None]
    mask = dense_mask(call)
    if mask is not None:
        mask = mask[rows] if len(mask) > 1 else mask
    if not bool(valid.all()):
        shown = valid[:, None, None, None].expand(-1, 1, call.query.shape[2], key.shape[2])
        if mask is None:
            mask = shown
        else:
            mask = mask & shown if mask.dtype == torch.bool else mask.masked_fill(hidden, -torch.inf)
    given = None if call.given is None else call.given[rows].masked_fill(hidden, 0.0)
    changes = tuple(
        each if each.weights is None else replace(each, weights=each.weights[rows].masked_fill(hidden, 0.0))
        for each in call.changes
    )
    query = call.query[rows]
    return replace(
        call, query=query, key=key, mask=mask, given=given, changes=changes, first=first, value=None, output=None
    )
