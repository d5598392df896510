"""Biases that are made of scores: contextual positions (CoPE) and selective attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard import masks
from regard._utils.constraints import Integer, count, floats, size
from regard._utils.errors import rejected
from regard._utils.mechanism import mechanism
from regard.masks import Extent, Mask
from regard.masks.band import Offset
from regard.nn._base import Layer, parameter
from regard.nn.positions.encodings import wide


def finite(rows: Tensor) -> Tensor:
    """Return rows in at least float32, with zeros in place of rows that are not finite: padding may hold anything."""
    return torch.where(rows.isfinite().all(-1, keepdim=True), rows, 0.0).to(wide(rows.dtype))


def _scores(layer: Any, query: Tensor, key: Tensor) -> Tensor:
    """Return scaled dot products (B, H, L, S) of finite queries and keys."""
    B, H, _, D = query.shape
    key = floats(layer, "key", key, B, "G", "S", D)
    if H % max(key.shape[1], 1):
        raise rejected(type(layer).__name__, "key", f"have a number of heads that divides {H}", key.shape[1])
    return query @ finite(key).repeat_interleave(H // max(key.shape[1], 1), 1).mT / D**0.5


def _visible(query: Tensor, keys: int, offset: Offset, align: str | None) -> Tensor:
    """Return which keys (B or 1, 1, L, S) are not after their query."""
    B, H, L, _ = query.shape
    extent, device = Extent(B, H, L, keys), query.device
    mask = masks.causal(align, offset).bind(extent, device)
    b, q_idx, kv_idx = (torch.arange(n, device=device) for n in (B, L, keys))
    head = torch.zeros(1, 1, 1, dtype=torch.int64, device=device)
    return mask(b.view(-1, 1, 1, 1), head, q_idx.unsqueeze(1), kv_idx)


@mechanism(
    formula="s(q, k_j) + q·e[m_j], m_j = min(Σ_{j ≤ u ≤ t} σ(q·k_u / √D), M − 1), interpolated",
    sources=("golovneva2024",),
    learned="e (M, D)",
    cost="O(L·M·D + L·S·D)",
)
class ContextualPositions(Layer):
    """CoPE: the position of a key is a count of gates between it and the query (Golovneva 2024, arXiv 2405.18719).

    Each query counts, from itself back, the keys u whose gate ``σ(q·k_u / √D)`` is open: ``m_j`` is the sum of the
    gates of keys j to t, at most M − 1. The score gets ``q·e[m_j]``, linear between the embeddings of the two nearest
    whole positions. Keys after the query do not count, and must be hidden: use it with a causal mask. Padding before
    the query counts as well.

    The bias depends on all scores of a row. It is a matrix (B, H, L, S) in memory, and the dot products are computed
    twice.

    Parameters
    ----------
    head_dim : int
        Width D of a head.
    max_positions : int, default 64
        Number of positions M.
    device, dtype : optional
        Of ``weight`` (M, D), which begins at 0. Heads share it.

    Examples
    --------
    >>> import torch, regard
    >>> from regard.nn import ContextualPositions
    >>> q, k, v = torch.randn(3, 2, 4, 5, 8).unbind(0)
    >>> regard.attention(q, k, v, regard.masks.causal() & ContextualPositions(8)(q, k)).shape
    torch.Size([2, 4, 5, 8])
    """

    def __init__(self, head_dim: int, max_positions: int = 64, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.head_dim = size(self, "head_dim", head_dim)
        self.max_positions = Integer(ge=2)(self, "max_positions", max_positions)
        self.weight = parameter(self.max_positions, self.head_dim, device=device, dtype=dtype)
        self.reset_parameters()

    def forward(self, query: Tensor, key: Tensor, offset: Offset = None, *, align: str | None = None) -> Mask:
        """Return the bias of these queries and keys as a mask.

        Parameters
        ----------
        query : Tensor (B, H, L, D)
        key : Tensor (B, G, S, D)
            Those of the attention call.
        offset, align : optional
            Positions of the queries; see :func:`regard.masks.causal`.

        Returns
        -------
        Mask
            Its tensor is (B, H, L, S).
        """
        query = finite(floats(self, "query", query, "B", "H", "L", self.head_dim))
        scores = _scores(self, query, key)
        gates = torch.where(_visible(query, key.shape[2], offset, align), scores.sigmoid(), 0.0)
        counts = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=self.max_positions - 1)
        below = counts.detach().floor().clamp(max=self.max_positions - 2)
        share, index = counts - below, below.long()
        table = query @ self.weight.to(scores.dtype).mT  # (B, H, L, M)
        return masks.dense(torch.lerp(table.gather(-1, index), table.gather(-1, index + 1), share))

    def reset_parameters(self) -> None:
        """Reset the embeddings to 0."""
        nn.init.zeros_(self.weight)

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"{self.head_dim}, {self.max_positions}"


@mechanism(
    formula="s(q_t, k_j) − Σ_{u < t} F_uj, F_uj = max(q_u·k_j / √D, 0) of one head, 0 for j = 0 and j ≥ u",
    sources=("leviathan2024",),
    cost="O(L·S·D)",
)
class SelectiveBias(Layer):
    """Selective attention: a token may hide earlier keys from later tokens (Leviathan 2024, arXiv 2410.02703).

    The positive scores of one head say how little later tokens need each key. They add up over the tokens before the
    query, and are subtracted from the scores of all heads. The first key is never hidden, and no token hides
    itself. There are no parameters. Use it with a causal mask, on whole sequences: a step alone lacks the scores of
    earlier queries.

    The bias is a matrix (B, 1, L, L) in memory, and the dot products of one head are computed twice.

    Parameters
    ----------
    head : int, default 0
        Index of the head whose scores decide.

    Examples
    --------
    >>> import torch, regard
    >>> from regard.nn import SelectiveBias
    >>> q, k, v = torch.randn(3, 2, 4, 5, 8).unbind(0)
    >>> regard.attention(q, k, v, regard.masks.causal() & SelectiveBias()(q, k)).shape
    torch.Size([2, 4, 5, 8])
    """

    def __init__(self, head: int = 0) -> None:
        super().__init__()
        self.head = count(self, "head", head)

    def forward(self, query: Tensor, key: Tensor) -> Mask:
        """Return the bias of these queries and keys as a mask.

        Parameters
        ----------
        query : Tensor (B, H, L, D)
        key : Tensor (B, G, L, D)
            Those of the attention call.

        Returns
        -------
        Mask
            Its tensor is (B, 1, L, L).
        """
        query = floats(self, "query", query, "B", "H", "L", "D")
        B, H, L, D = query.shape
        key = floats(self, "key", key, B, "G", L, D)
        if self.head >= H:
            raise rejected("SelectiveBias", "head", f"be below the number of heads, {H}", self.head)
        group = self.head // max(H // max(key.shape[1], 1), 1)
        scores = _scores(self, finite(query[:, self.head : self.head + 1]), key[:, group : group + 1])
        place = torch.arange(L, device=query.device)
        counts = (place < place.unsqueeze(1)) & (place > 0)
        said = torch.where(counts, scores.relu(), 0.0)
        return masks.dense(said - said.cumsum(-2))

    def reset_parameters(self) -> None:
        """Do nothing: there are no parameters."""

    def extra_repr(self) -> str:
        """Return the head."""
        return f"head={self.head}"
