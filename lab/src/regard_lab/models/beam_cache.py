"""Key–value caches for beam search: rows of keys and values, indexed by tables, and attention to them.

Dimensions: R queries, Q rows of a table, T keys per query, M stored rows, G key–value heads, D head size; B sequences,
N their steps in total.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from regard._utils.errors import rejected
from regard._utils.torch_private import is_eager
from regard._utils.tracing import is_observed
from regard.engines.fused import decoding
from regard.engines.fused.layers import Table
from regard.nn import MultiheadAttention

# Rows of keys and values with index tables, so that beams share their common prefixes ---------------------------------


#: Number of steps to allocate in advance.
_ROOM = 16


@dataclass(frozen=True)
class KeyRows:
    """Rows of keys and values, and a table of the rows that each query attends to.

    Attributes
    ----------
    key, value : Tensor (M, G, D)
    table : Tensor (Q, T) of int64
        Row indices for each query.
    counts : Tensor (Q,) of int64
        Number of valid indices in each row of the table; the rest are arbitrary.
    """

    key: Tensor
    value: Tensor
    table: Tensor
    counts: Tensor
    _owners: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, key: Tensor, value: Tensor, lengths: Tensor) -> Self:
        """Return rows for B concatenated sequences, with one table row per sequence.

        Parameters
        ----------
        key, value : Tensor (N, G, D)
            The steps of B sequences, concatenated.
        lengths : Tensor (B,) of int64
            Length of each sequence.
        """
        steps = torch.arange(int(lengths.max()), device=lengths.device)
        begins = (lengths.cumsum(0) - lengths)[:, None]
        return cls(key, value, begins + torch.where(steps < lengths[:, None], steps, 0), lengths)

    def select(self, rows: Tensor) -> KeyRows:
        """Return the same keys and values with these rows of the table."""
        return KeyRows(self.key, self.value, self.table.index_select(0, rows), self.counts.index_select(0, rows))

    def read(self, query: Tensor, which: Tensor | None = None) -> Tensor:
        """Return softmax(q kᵀ / √D) v, (R, H, D), for queries (R, H, D).

        ``which`` (R,) holds each query's row of the table; by default, queries with the same row are adjacent.
        """
        which = self._which(len(query)) if which is None else which
        asked = query if query.dtype == self.key.dtype else query.to(self.key.dtype)
        scale = query.shape[-1] ** -0.5
        made = decoding.read_rows(asked, self.key, self.value, which, self.table, self.counts, scale)
        return made if made.dtype == query.dtype else made.to(query.dtype)

    def lookup(self, queries: Tensor | int) -> Table:
        """Return what each query reads: their rows of the table, or so many queries by default."""
        which = self._which(queries) if isinstance(queries, int) else queries
        return Table(which, self.table, self.counts)

    def _which(self, queries: int) -> Tensor:
        """Return the default table row of each query."""
        if queries not in self._owners:
            which, each = torch.arange(queries), queries // len(self.table)
            self._owners[queries] = which if each == 1 else which // each
        return self._owners[queries]

    @cached_property
    def gathered(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The gathered keys and values (Q, G, T, D), and an additive mask (Q, 1, 1, T) if counts differ."""
        key, value = (rows[self.table].transpose(1, 2) for rows in (self.key, self.value))
        T = self.table.shape[1]
        if bool((self.counts == T).all()):
            return key, value, None
        hidden = torch.arange(T, device=self.counts.device) >= self.counts[:, None]
        mask = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf)
        return key, value, mask[:, None, None]


def readable(rows: Tensor) -> Tensor:
    """Return keys and values in a dtype that the CPU kernel supports."""
    return rows.float() if rows.device.type == "cpu" and rows.dtype not in decoding.DTYPES else rows


@dataclass
class _Store:
    """Append-only rows of keys and values (capacity, 2, G, D), shared by copies of a cache."""

    rows: Tensor
    count: int


class BeamCache:
    """A key–value cache for beam search.

    Each step of R beams appends R rows, and a table holds the rows of each beam's history, so that reordering beams
    changes only the table. When the cache is full, it drops rows that no beam uses any more.

    Pass it to every call of a :class:`~regard.nn.MultiheadAttention` that decodes one step of R rows; each layer needs
    its own. Updates of a copy do not affect the original.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import KVCache, MultiheadAttention
    >>> from regard_lab.models.beam_cache import BeamCache
    >>> layer = MultiheadAttention(8, 2, batch_first=True).eval()
    >>> beams, rows, chosen = BeamCache(), KVCache(), torch.tensor([1, 1, 2, 3])
    >>> for t, x in enumerate(torch.randn(3, 4, 1, 8)):
    ...     if t:
    ...         beams.reorder(chosen)
    ...         rows.reorder(chosen)
    ...     options = {"need_weights": False, "is_causal": True}
    ...     ours, theirs = (layer(x, x, x, **options, cache=each)[0] for each in (beams, rows))
    >>> torch.allclose(ours, theirs, atol=1e-6), len(beams)
    (True, 3)
    """

    def __init__(self) -> None:
        self._store: _Store | None = None
        self._table: Tensor | None = None  # (R, T)

    def __copy__(self) -> Self:
        twin = object.__new__(type(self))
        twin._store, twin._table = self._store, self._table
        return twin

    def __len__(self) -> int:
        """Return the number of steps."""
        return 0 if self._table is None else self._table.shape[1]

    def truncate(self, length: int) -> None:
        """Keep only the first ``length`` steps."""
        if not 0 <= length <= len(self):
            raise rejected("BeamCache", "length", f"be at most {len(self)}", length)
        if length != len(self):
            self._table = self._table[:, :length] if self._table is not None and length else None

    def reorder(self, index: Tensor) -> None:
        """Make row r continue the previous row ``index[r]``; ``index`` is (R',) of int."""
        if self._table is not None:
            self._table = self._table.index_select(0, index)

    def attend(self, layer: MultiheadAttention, x: Tensor) -> Tensor:
        """Append the keys and values of a step (R, E), and return the layer's output (R, E) over all steps."""
        return self_attention_step(layer, x, self)

    def append(self, both: Tensor) -> None:
        """Append a step (R, 2, G, D) of keys and values."""
        R = len(both)
        if self._table is not None and len(self._table) != R:
            raise rejected("BeamCache", "key", f"be a step of its {len(self._table)} rows", f"one of {R}")
        both = readable(both)
        rows, _, first = self.extend(both, both.shape[1:])
        if not torch.is_grad_enabled():
            rows[first : first + R] = both

    def extend(self, like: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor, int]:
        """Make room for a step of R rows (2, G, D), of the dtype of ``like`` (R, …).

        Returns the stored rows, the table, and the stored row at which the step begins.
        """
        store, R = self._room(like, shape), len(like)
        first = store.count
        store.count += R
        own = torch.arange(first, first + R, device=like.device)[:, None]
        self._table = own if self._table is None else torch.cat([self._table, own], 1)
        return store.rows, self._table, first

    @property
    def rows(self) -> KeyRows:
        """The current keys, values and table."""
        assert self._store is not None and self._table is not None
        kept = self._store.rows
        R, T = self._table.shape
        return KeyRows(kept[:, 0], kept[:, 1], self._table, self._table.new_full((R,), T))

    def _room(self, both: Tensor, shape: Sequence[int]) -> _Store:
        """Return a store with room for a step (R, 2, G, D); with gradients, one that already contains it."""
        old, R = self._store, len(both)
        if torch.is_grad_enabled():  # earlier rows may be saved for a backward pass: do not write in place
            rows = both if old is None else torch.cat([old.rows[: old.count], both])
            self._store = _Store(rows, 0 if old is None else old.count)
        elif old is None or self._table is None:
            self._store = _Store(both.new_empty(_ROOM * R, *shape), 0)
        elif old.count + R > len(old.rows):
            used, places = self._table.unique(return_inverse=True)
            alive = len(used)
            rows = both.new_empty(2 * alive + _ROOM * R, *shape)
            rows[:alive] = old.rows.index_select(0, used)
            self._store, self._table = _Store(rows, alive), places
        assert self._store is not None
        return self._store


# Multi-head attention with index tables: beams to their histories, and packed sequences without padding ---------------
# Dimensions: B sequences, N their steps in total, L queries of each, R queries, E hidden size, H heads, D head size.


def project_memory(layer: MultiheadAttention, states: Tensor, like: Tensor | KeyRows) -> KeyRows:
    """Project encoder states to a layer's keys and values, for :func:`cross_attention`.

    Parameters
    ----------
    layer : MultiheadAttention
    states : Tensor (N, E)
        The steps of B sequences, concatenated.
    like : Tensor (B,) of int64, or KeyRows
        Length of each sequence, at least 1; or rows of the same sequences.
    """
    E, width = layer.embed_dim, layer.num_kv_heads * layer.head_dim
    bias = None if layer.in_proj_bias is None else layer.in_proj_bias[E:]
    if layer.in_proj_weight is not None:
        both = F.linear(states, layer.in_proj_weight[E:], bias)
    else:
        biases = [None, None] if bias is None else bias.split(width)
        weights = layer.k_proj_weight, layer.v_proj_weight
        both = torch.cat([F.linear(states, w, b) for w, b in zip(weights, biases) if w is not None], -1)
    key, value = readable(both).unflatten(-1, (2, layer.num_kv_heads, layer.head_dim)).unbind(1)
    if isinstance(like, KeyRows):
        return KeyRows(key, value, like.table, like.counts, like._owners)
    return KeyRows.of(key, value, like)


def cross_attention(layer: MultiheadAttention, query: Tensor, rows: KeyRows) -> Tensor:
    """Return the layer's output (R, E) for queries (R, E) attending to the keys and values of sequences.

    Queries of the same sequence are adjacent, with the same number for each sequence.
    """
    E, bias = layer.embed_dim, layer.in_proj_bias
    weight = layer.q_proj_weight if layer.in_proj_weight is None else layer.in_proj_weight[:E]
    assert weight is not None
    q = F.linear(query, weight, None if bias is None else bias[:E])
    output: Tensor = layer.out_proj(_attended(layer, q.view(-1, layer.num_heads, layer.head_dim), rows).flatten(1))
    return output


def packed_self_attention(layer: MultiheadAttention, states: Tensor, lengths: Tensor, which: Tensor) -> Tensor:
    """Return the self-attention output (N, E) of concatenated sequences; requires :func:`can_attend_packed`.

    Parameters
    ----------
    layer : MultiheadAttention
    states : Tensor (N, E)
        The steps of B sequences, concatenated.
    lengths : Tensor (B,) of int64
        Length of each sequence.
    which : Tensor (N,) of int64
        The sequence of each step.
    """
    assert layer.in_proj_weight is not None
    rows = F.linear(states, layer.in_proj_weight, layer.in_proj_bias)
    q, k, v = rows.view(len(rows), 3, layer.num_heads, layer.head_dim).unbind(1)
    output: Tensor = layer.out_proj(KeyRows.of(readable(k), readable(v), lengths).read(q, which).flatten(1))
    return output


def can_attend_packed(layer: MultiheadAttention, like: Tensor) -> bool:
    """Whether :func:`packed_self_attention` supports this layer, on the device of ``like``."""
    usual = layer.in_proj_weight is not None and layer.rotary is None and not layer._extends
    return usual and _has_kernel(layer, like)


def self_attention_step(layer: MultiheadAttention, x: Tensor, cache: BeamCache) -> Tensor:
    """Return the layer's self-attention output (R, E) for a step of beams (R, E), and append the step to the cache.

    If the call fails, the cache does not change, so you can retry.
    """
    E, H, D, bias = layer.embed_dim, layer.num_heads, layer.head_dim, layer.in_proj_bias
    if layer.in_proj_weight is not None:
        rows = F.linear(x, layer.in_proj_weight, bias).view(len(x), 3, H, D)
        q, both = rows[:, 0], rows[:, 1:]
    else:
        width = layer.num_kv_heads * D
        biases = [None] * 3 if bias is None else bias.split([E, width, width])
        weights = layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight
        query, *others = (F.linear(x, w, b) for w, b in zip(weights, biases) if w is not None)
        q, both = query.view(-1, H, D), torch.stack(others, 1).unflatten(-1, (-1, D))
    if layer.rotary is not None:
        q, key = (layer.rotary(each[:, :, None], len(cache))[:, :, 0] for each in (q, both[:, 0]))
        both = torch.stack([key, both[:, 1]], 1)
    cache.append(both)
    try:
        output: Tensor = layer.out_proj(_attended(layer, q, cache.rows).flatten(1))
    except BaseException:
        cache.truncate(len(cache) - 1)
        raise
    return output


def _attended(layer: MultiheadAttention, q: Tensor, rows: KeyRows) -> Tensor:
    """Return the heads' outputs (R, H, D) for queries (R, H, D); queries of the same table row are adjacent."""
    if _has_kernel(layer, q):
        return rows.read(q)
    k, v, mask = rows.gathered
    queries = q.unflatten(0, (len(k), -1)).transpose(1, 2)
    output, _ = layer._attend(queries, k.to(q.dtype), v.to(q.dtype), mask, False, None)
    return output.transpose(1, 2).flatten(0, 1)


def _has_kernel(layer: MultiheadAttention, like: Tensor) -> bool:
    """Whether the CPU kernel supports this call: no gradients, no dropout, no capture, default score and softmax."""
    usual = layer.score is None and layer.normalizer == "softmax" and layer.engine == "auto"
    plain = not ((layer.training and layer.dropout) or torch.is_grad_enabled() or is_observed())
    return usual and plain and like.device.type == "cpu" and is_eager()
