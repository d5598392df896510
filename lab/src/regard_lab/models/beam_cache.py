"""Caches of beams: keys and values as rows that tables name, and multi-head attention to them.

Dimensions: R queries, Q rows of a table, T keys that a query sees, M rows that are kept, G key–value heads, D width of
a head; B sequences, N their steps together.
"""

from __future__ import annotations

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
from regard.nn import MultiheadAttention

# Keys and values as rows, of which tables say who sees which: what the beams of a search have in common is kept once


#: Steps that there is room for behind what was kept.
_ROOM = 16


@dataclass(frozen=True)
class KeyRows:
    """Keys and values as rows, and a table of those that each query sees.

    Attributes
    ----------
    key, value : Tensor (M, G, D)
    table : Tensor (Q, T) of int64
        The rows that queries see.
    counts : Tensor (Q,) of int64
        How many of them; those behind are any.
    """

    key: Tensor
    value: Tensor
    table: Tensor
    counts: Tensor
    _owners: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, key: Tensor, value: Tensor, lengths: Tensor) -> Self:
        """Return rows of which each query sees those of a sequence.

        Parameters
        ----------
        key, value : Tensor (N, G, D)
            The steps of B sequences, one after the other.
        lengths : Tensor (B,) of int64
            How many each has.
        """
        steps = torch.arange(int(lengths.max()), device=lengths.device)
        begins = (lengths.cumsum(0) - lengths)[:, None]
        return cls(key, value, begins + torch.where(steps < lengths[:, None], steps, 0), lengths)

    def select(self, rows: Tensor) -> KeyRows:
        """Return what these queries see, in this order."""
        return KeyRows(self.key, self.value, self.table.index_select(0, rows), self.counts.index_select(0, rows))

    def read(self, query: Tensor, which: Tensor | None = None) -> Tensor:
        """Return softmax(q kᵀ / √D) v, (R, H, D), of queries (R, H, D).

        ``which`` (R,) says what row of the table each has; by default those that have the same stand together.
        """
        which = self._which(len(query)) if which is None else which
        asked = query if query.dtype == self.key.dtype else query.to(self.key.dtype)
        scale = query.shape[-1] ** -0.5
        made = decoding.read_rows(asked, self.key, self.value, which, self.table, self.counts, scale)
        return made if made.dtype == query.dtype else made.to(query.dtype)

    def _which(self, queries: int) -> Tensor:
        """Return the row of the table of each of so many queries."""
        if queries not in self._owners:
            which, each = torch.arange(queries), queries // len(self.table)
            self._owners[queries] = which if each == 1 else which // each
        return self._owners[queries]

    @cached_property
    def gathered(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The keys and values (Q, G, T, D) themselves, and −inf or 0 (Q, 1, 1, T) where some see fewer than others."""
        key, value = (rows[self.table].transpose(1, 2) for rows in (self.key, self.value))
        T = self.table.shape[1]
        if bool((self.counts == T).all()):
            return key, value, None
        hidden = torch.arange(T, device=self.counts.device) >= self.counts[:, None]
        mask = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf)
        return key, value, mask[:, None, None]


def readable(rows: Tensor) -> Tensor:
    """Return keys and values in a dtype that the kernel reads, where there is one for their device."""
    return rows.float() if rows.device.type == "cpu" and rows.dtype not in decoding.DTYPES else rows


@dataclass
class _Store:
    """Rows of keys and values (capacity, 2, G, D), which are only added to, by whichever copy of a cache."""

    rows: Tensor
    count: int


class BeamCache:
    """The projected keys and values of the steps so far, for beams.

    Each step of R beams adds R rows, and a table says which rows a beam comes from. So when beams are chosen anew the
    table alone changes. Rows that no beam comes from any more are dropped when there is no room for further ones.

    Pass one to every call of a :class:`~regard.nn.MultiheadAttention` that decodes one step of R rows; each layer needs
    its own. What a copy of it is told, it does not know.

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
        """Return how many steps there are."""
        return 0 if self._table is None else self._table.shape[1]

    def truncate(self, length: int) -> None:
        """Forget all steps but the first ``length``."""
        if not 0 <= length <= len(self):
            raise rejected("BeamCache", "length", f"be at most {len(self)}", length)
        if length != len(self):
            self._table = self._table[:, :length] if self._table is not None and length else None

    def reorder(self, index: Tensor) -> None:
        """Make row r continue what was row ``index[r]``, (R',) of int."""
        if self._table is not None:
            self._table = self._table.index_select(0, index)

    def attend(self, layer: MultiheadAttention, x: Tensor) -> Tensor:
        """Add the keys and values of a step of rows (R, E), and return what the layer reads of all steps, (R, E)."""
        return self_attention_step(layer, x, self)

    def append(self, both: Tensor) -> None:
        """Append a step (R, 2, G, D) of keys and values."""
        R = len(both)
        if self._table is not None and len(self._table) != R:
            raise rejected("BeamCache", "key", f"be a step of its {len(self._table)} rows", f"one of {R}")
        both = readable(both)
        store = self._room(both)
        first = store.count
        if not torch.is_grad_enabled():
            store.rows[first : first + R] = both
        store.count += R
        own = torch.arange(first, first + R, device=both.device)[:, None]
        self._table = own if self._table is None else torch.cat([self._table, own], 1)

    @property
    def rows(self) -> KeyRows:
        """What there is to see."""
        assert self._store is not None and self._table is not None
        kept = self._store.rows
        R, T = self._table.shape
        return KeyRows(kept[:, 0], kept[:, 1], self._table, self._table.new_full((R,), T))

    def _room(self, both: Tensor) -> _Store:
        """Return a store to which a step (R, 2, G, D) may be added; with gradients, one to which it was added."""
        old, (R, _, G, D) = self._store, both.shape
        if torch.is_grad_enabled():  # what was returned before may be saved for a backward pass
            rows = both if old is None else torch.cat([old.rows[: old.count], both])
            self._store = _Store(rows, 0 if old is None else old.count)
        elif old is None or self._table is None:
            self._store = _Store(both.new_empty(_ROOM * R, 2, G, D), 0)
        elif old.count + R > len(old.rows):
            used, places = self._table.unique(return_inverse=True)
            alive = len(used)
            rows = both.new_empty(2 * alive + _ROOM * R, 2, G, D)
            rows[:alive] = old.rows.index_select(0, used)
            self._store, self._table = _Store(rows, alive), places
        assert self._store is not None
        return self._store


# Multi-head attention to rows that tables name: of beams to their steps, and of steps to sequences without padding ----
# Dimensions: B sequences, N their steps together, L queries of each, R queries, E width, H heads, D width of a head.


def project_memory(layer: MultiheadAttention, states: Tensor, lengths: Tensor) -> KeyRows:
    """Return a layer's keys and values of sequences, to be read by :func:`cross_attention`.

    Parameters
    ----------
    layer : MultiheadAttention
    states : Tensor (N, E)
        The steps of B sequences, one after the other.
    lengths : Tensor (B,) of int64
        How many each has, at least 1.
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
    return KeyRows.of(key, value, lengths)


def cross_attention(layer: MultiheadAttention, query: Tensor, rows: KeyRows) -> Tensor:
    """Return what queries (R, E) read of the keys and values of sequences, as the layer's output (R, E).

    Those that read the same sequence stand together, as many of one as of another.
    """
    E, bias = layer.embed_dim, layer.in_proj_bias
    weight = layer.q_proj_weight if layer.in_proj_weight is None else layer.in_proj_weight[:E]
    assert weight is not None
    q = F.linear(query, weight, None if bias is None else bias[:E])
    output: Tensor = layer.out_proj(_attended(layer, q.view(-1, layer.num_heads, layer.head_dim), rows).flatten(1))
    return output


def packed_self_attention(layer: MultiheadAttention, states: Tensor, lengths: Tensor, which: Tensor) -> Tensor:
    """Return what the steps of sequences read of each other, (N, E), where :func:`can_attend_packed`.

    Parameters
    ----------
    layer : MultiheadAttention
    states : Tensor (N, E)
        The steps of B sequences, one after the other.
    lengths : Tensor (B,) of int64
        How many each has.
    which : Tensor (N,) of int64
        Which sequence each belongs to.
    """
    assert layer.in_proj_weight is not None
    rows = F.linear(states, layer.in_proj_weight, layer.in_proj_bias)
    q, k, v = rows.view(len(rows), 3, layer.num_heads, layer.head_dim).unbind(1)
    output: Tensor = layer.out_proj(KeyRows.of(readable(k), readable(v), lengths).read(q, which).flatten(1))
    return output


def can_attend_packed(layer: MultiheadAttention, like: Tensor) -> bool:
    """Whether :func:`packed_self_attention` can be used, on a tensor's device."""
    usual = layer.in_proj_weight is not None and layer.rotary is None and not layer._extends
    return usual and _has_kernel(layer, like)


def self_attention_step(layer: MultiheadAttention, x: Tensor, cache: BeamCache) -> Tensor:
    """Return what a step of beams (R, E) reads of the steps before it and of itself, as the layer's output (R, E).

    A call that fails leaves the cache as it was: it may be tried again.
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
    """Return the heads' outputs (R, H, D) of queries (R, H, D); those that see the same rows stand together."""
    if _has_kernel(layer, q):
        return rows.read(q)
    k, v, mask = rows.gathered
    queries = q.unflatten(0, (len(k), -1)).transpose(1, 2)
    output, _ = layer._attend(queries, k.to(q.dtype), v.to(q.dtype), mask, False, None)
    return output.transpose(1, 2).flatten(0, 1)


def _has_kernel(layer: MultiheadAttention, like: Tensor) -> bool:
    """Whether a kernel of rows computes what a layer does: on the CPU, without gradients, unless calls are captured."""
    usual = layer.score is None and layer.normalizer == "softmax" and layer.engine == "auto"
    plain = not ((layer.training and layer.dropout) or torch.is_grad_enabled() or is_observed())
    return usual and plain and like.device.type == "cpu" and is_eager()
