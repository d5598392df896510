"""The attention weights of one layer in one run, computed on demand.

Dimensions: B batch, H query heads, G key–value heads, L queries, S keys, E and V widths of a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import AuxRequest, TopK
from regard._utils.errors import rejected
from regard.inspect._record.calls import AttentionCall, Projected, gradients_of
from regard.inspect._record.numbering import names_cross_attention, number_of


class LayerRecord(ABC):
    """The attention weights (B, H, L, S) of one layer in one run, or a summary of them.

    During generation, a layer is called with one query at a time and a growing number of keys; these calls form one
    matrix.

    Attributes
    ----------
    name : str
        The layer's name in the model.
    windows : int
        How many windows each sequence is cut into, consecutive in the batch; 1 for whole sequences.
    reads : str, optional
        "self" or "cross" attention, if the inputs of the module show it; "linear" for a recurrence.
    skipped : int
        How many queries of the first call come before the first row, because a capture kept the last ones only.
    """

    def __init__(self, name: str, reads: str | None = None, windows: int = 1) -> None:
        self.name, self.reads, self.windows, self.skipped = name, reads, windows, 0

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int, int]:
        """B, H, L and S."""

    @property
    @abstractmethod
    def heads_per_group(self) -> int:
        """How many query heads read one head of keys."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The size of the kept tensors in bytes."""

    @abstractmethod
    def weights(
        self, *, batch: int | slice | None = None, head: int | slice | None = None, rows: int | slice | None = None,
        cols: int | slice | None = None,
    ) -> Tensor:  # fmt: skip
        """Return weights: all, one (an int drops the dimension), or some (a slice).

        Only the requested rows are computed, each over all of its keys.

        Parameters
        ----------
        batch, head, rows, cols : int or slice, optional
            Which sequences, heads, queries and keys.

        Returns
        -------
        Tensor (B, H, L, S) of float32
            Without the dimensions indexed by an int.
        """

    @abstractmethod
    def entropy(self) -> Tensor:
        """Return the entropy (B, H, L) of each query's weights in nats; learned sinks are excluded."""

    @abstractmethod
    def topk(self, k: int = 5) -> TopK:
        """Return the k largest weights of each query and the indices of their keys, (B, H, L, k) each.

        With fewer than k keys, the rest have weight 0 and index −1.
        """

    @abstractmethod
    def received(self) -> Tensor:
        """Return how much attention each key receives, (B, H, S): the sum of its weights over all queries."""

    @abstractmethod
    def grow(self, attended: AttentionCall) -> None:
        """Append the rows of a call."""

    @property
    def number(self) -> int | None:
        """The number of the layer in the model, from its name: 3 of ``model.layers.3.self_attn``; None without one.

        In hybrid models it differs from the position in the record, which holds attention layers alone.
        """
        return number_of(self.name)

    @property
    def kind(self) -> str:
        """Whether this is "self" or "cross" attention, or a "linear" recurrence.

        Decided by the layer's name, else by the inputs of its module, else by whether L and S differ.
        """
        _, _, L, S = self.shape
        if self.reads == "linear":
            return "cross" if L != S else "linear"
        if names_cross_attention(self.name):
            return "cross"
        return self.reads or ("cross" if L != S else "self")


class AttentionRecord(LayerRecord):
    """The attention weights of one layer in one run, computed from queries and keys on demand.

    Attributes
    ----------
    name : str
        The layer's name in the model.
    shape : (int, int, int, int)
        B, H, L and S.
    """

    def __init__(
        self, name: str, attended: AttentionCall | Projected, reads: str | None = None, windows: int = 1
    ) -> None:
        super().__init__(name, reads, windows)
        self._calls = [attended]
        self._key: Tensor | None = None
        self._value: Tensor | None = None

    @property
    def calls(self) -> list[AttentionCall]:
        """The calls, in order, that make up the rows."""
        self._calls = [each.attended() if isinstance(each, Projected) else each for each in self._calls]
        return self._calls  # type: ignore[return-value]

    @property
    def key(self) -> Tensor:
        """The keys (B, G, S, E) of all calls."""
        return self.calls[0].key if self._key is None else self._key

    @property
    def value(self) -> Tensor | None:
        """The values (B, G, S, V) of all calls, if kept."""
        return self.calls[0].value if self._value is None else self._value

    def grow(self, attended: AttentionCall) -> None:
        key = self._key = _after(self.key, attended.key, attended.first)
        if self.value is not None and attended.value is not None:
            self._value = _after(self.value, attended.value, attended.first)
        value = self.value
        self.calls.append(attended)
        for i, each in enumerate(self.calls):  # each call holds a view of the whole
            at = slice(each.first, each.first + each.key.shape[2])
            self.calls[i] = replace(each, key=key[:, :, at], value=None if value is None else value[:, :, at])

    @property
    def shape(self) -> tuple[int, int, int, int]:
        B, H = self.calls[0].query.shape[:2]
        return B, H, sum(each.query.shape[2] for each in self.calls), self.key.shape[2]

    @property
    def heads_per_group(self) -> int:
        return self.shape[1] // max(self.calls[0].key.shape[1], 1)

    @property
    def nbytes(self) -> int:
        outputs = sum(each.output.nbytes for each in self.calls if each.output)
        values = 0 if self.value is None else self.value.nbytes
        given = sum(each.given.nbytes for each in self.calls if each.given is not None)
        return sum(each.query.nbytes for each in self.calls) + self.key.nbytes + values + outputs + given

    def weights(
        self, *, batch: int | slice | None = None, head: int | slice | None = None, rows: int | slice | None = None,
        cols: int | slice | None = None,
    ) -> Tensor:  # fmt: skip
        return self._part("weights", _weights, batch, head, rows, cols)

    def gradients(
        self, *, batch: int | slice | None = None, head: int | slice | None = None, rows: int | slice | None = None,
        cols: int | slice | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the gradients of a loss with respect to the weights, ``∂loss/∂α_ij = ∂loss/∂o_i · v_j``.

        They need a capture with ``gradients=True`` and a backward pass; the latest one counts. Like the weights, they
        are computed on demand, in the same layout: ``weights() * gradients()`` is attention times gradient. In
        training mode they are the gradients with respect to the weights after dropout.

        Parameters
        ----------
        batch, head, rows, cols
            As in :meth:`weights`.

        Returns
        -------
        Tensor (B, H, L, S) of float32
            Without the dimensions indexed by an int.

        Raises
        ------
        ValueError
            If values were not kept, or no gradient reached this run.
        """
        return self._part("gradients", gradients_of, batch, head, rows, cols)

    def _part(
        self, function: str, read: Callable[[AttentionCall, int, int], Tensor], batch: int | slice | None,
        head: int | slice | None, rows: int | slice | None, cols: int | slice | None,
    ) -> Tensor:  # fmt: skip
        B, H, L, S = self.shape
        given = {"batch": (batch, B), "head": (head, H), "rows": (rows, L), "cols": (cols, S)}
        index = tuple(index_of(function, name, each, size) for name, (each, size) in given.items())
        first, last, step = index[2].indices(L) if isinstance(index[2], slice) else (index[2], index[2] + 1, 1)
        if step < 1:
            raise rejected(function, "rows", "go forward", rows)
        parts, at = [], 0
        for call in self.calls:
            length = call.query.shape[2]
            begin, end = max(first - at, 0), min(last - at, length)
            if begin < end:
                found = read(call, begin, end)
                parts.append(_placed(found, call.first, S))
            at += length
        whole = torch.cat(parts, 2) if parts else torch.zeros(B, H, 0, S)
        within = slice(0, None, step) if isinstance(index[2], slice) else 0
        for dim, each in reversed(list(enumerate((index[0], index[1], within, index[3])))):
            whole = whole[(slice(None),) * dim + (each,)]
        return whole

    def lse(self) -> Tensor:
        """Return the log-sum-exp (B, H, L) of each query's scores: a weight is exp(score − lse).

        Raises
        ------
        ValueError
            If only the weights were recorded, or they are of order 1, no exponentials of scores.
        """
        if any(each.given is not None for each in self.calls):
            raise rejected("lse", "record", "hold queries and keys", f"only weights in {self.name!r}")
        if any(each.order != 0 for each in self.calls):
            raise rejected("lse", "record", "hold weights of order 0", f"order 1 in {self.name!r}")
        return torch.cat([_whole(each, AuxRequest(lse=True)).lse for each in self.calls], 2)

    def entropy(self) -> Tensor:
        return torch.cat([_whole(each, AuxRequest(entropy=True)).entropy for each in self.calls], 2)

    def topk(self, k: int = 5) -> TopK:
        found = [_whole(each, AuxRequest(topk=k)).topk for each in self.calls]
        indices = [shifted(each.indices, call.first) for each, call in zip(found, self.calls)]
        return TopK(torch.cat([each.weights for each in found], 2), torch.cat(indices, 2))

    def received(self) -> Tensor:
        S = self.shape[3]
        found = [_whole(each, AuxRequest(received=True)).received for each in self.calls]
        return torch.stack([_placed(each, call.first, S) for each, call in zip(found, self.calls)]).sum(0)

    def __repr__(self) -> str:
        B, H, L, S = self.shape
        calls = f", {len(self.calls)} calls" if len(self.calls) > 1 else ""
        return f"AttentionRecord({self.name!r}: {B} × {H} heads, {L} queries, {S} keys{calls})"


def _whole(call: AttentionCall, request: AuxRequest) -> Any:
    return call.rows(0, call.query.shape[2], request)


def _placed(values: Tensor, first: int, S: int) -> Tensor:
    """Pad values of some keys with zeros to all S keys."""
    return F.pad(values, (first, S - first - values.shape[-1]))


def shifted(indices: Tensor, first: int) -> Tensor:
    """Shift indices of keys by ``first``; −1 stays."""
    return torch.where(indices < 0, indices, indices + first)


def _after(old: Tensor, new: Tensor, first: int) -> Tensor:
    """Return old and new keys of a cache, the new ones from position ``first``; either may repeat grouped heads."""
    groups = max(old.shape[1], new.shape[1])
    old, new = (each.repeat_interleave(groups // each.shape[1], 1) for each in (old, new))
    return torch.cat((old[:, :, :first], new), 2) if first else new


def _weights(call: AttentionCall, first: int, last: int) -> Tensor:
    found = call.rows(first, last, AuxRequest(weights=True)).weights
    assert found is not None
    return found


def index_of(function: str, name: str, given: int | slice | None, size: int) -> int | slice:
    """Return an index of a dimension of this size: a slice, or a number that is not negative."""
    if given is None:
        return slice(None)
    if isinstance(given, slice):
        return given
    if isinstance(given, bool) or not isinstance(given, int) or not -size <= given < size:
        raise rejected(function, name, f"be a slice, or a number below {size}", repr(given))
    return given % size
