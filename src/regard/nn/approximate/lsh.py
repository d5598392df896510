"""Reformer's attention: rows attend to rows that random hashes put near them.

Dimensions: B sequences, N rows, H heads, E width of a head, R rounds of hashes, C rows of a chunk, M chunks.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from regard import masks
from regard._utils.constraints import size
from regard._utils.errors import rejected
from regard._utils.mechanism import mechanism
from regard.engines.aux import AuxRequest
from regard.functional import attention
from regard.masks import Mask
from regard.nn.approximate.base import ApproximateAttention
from regard.nn.heads.self_heads import SelfHeadsOptions

#: Added to the score of a row with itself, which it then reads only if it sees no other.
_SELF = -1e5


@mechanism(
    formula="Σ_r softmax_r(lse_r) Σ_j softmax_j(q_i·q_j / ‖q_j‖) v_j over j near i, sorted by argmax [q R_r; −q R_r]",
    sources=("kitaev2020",),
    learned="W_q, W_v, W_o (C, C), biases; R is random",
    cost="O(rounds·N·(chunk + buckets)·C + rounds·N·log N + N·C²)",
    reads="scaled_dot",
)
class LSHAttention(ApproximateAttention):
    """Reformer's attention: rows read the rows that random hashes put near them (Kitaev 2020, arXiv 2001.04451).

    Queries are keys, too: a score is ``q_i·q_j / ‖q_j‖``. In each round, rows are sorted by a random hash, the index of
    the largest of ``[q R; −q R]``, and cut into chunks. A row reads its own chunk and the one before; rounds are joined
    by their log-sum-exp. A row reads itself only if it sees no other row. **This is an approximation**: it leaves out
    pairs, and counts a pair once for each round that finds it. Its error falls with more rounds and larger chunks;
    :meth:`exact` computes what is approximated, the same scores of all pairs. Sequences of at most one chunk are exact.

    The definition is that of transformers' ``LSHSelfAttention``: the chunk before the first one of a round is the last
    one of the round before it, and that before the very first the last of all.

    Parameters
    ----------
    embed_dim : int
        Width C of the rows.
    num_heads : int
        Number of heads H, which divides ``embed_dim``.
    num_buckets : int, default 32
        Number of values of a hash, which must be even. The authors take two for each chunk.
    chunk : int, default 64
        Number of rows of a chunk.
    rounds : int, default 2
        Number of rounds R.
    bias, engine, device, dtype
        See :class:`~regard.nn.heads.self_heads.SelfHeads`.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid.

    Notes
    -----
    The random rotations are drawn with the layer and kept, so that the same input gives the same output; ``redraw()``
    draws them anew. The choice of rows has no gradient.

    Examples
    --------
    The relative error of rows in clusters, with more and more rounds:

    >>> import torch
    >>> from regard.nn import LSHAttention
    >>> generator = torch.Generator().manual_seed(0)
    >>> x = torch.randn(1, 16, 64, generator=generator).repeat_interleave(32, 1)
    >>> x = 2 * x + torch.randn(x.shape, generator=generator) / 2
    >>> for rounds in (1, 4, 16):
    ...     _ = torch.manual_seed(0)
    ...     layer = LSHAttention(64, 4, num_buckets=16, rounds=rounds)
    ...     exact = layer.exact(x)
    ...     print(rounds, f"{((layer(x) - exact).norm() / exact.norm()).item():.2f}")
    1 0.16
    4 0.06
    16 0.06
    """

    shared = True

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_buckets: int = 32,
        chunk: int = 64,
        rounds: int = 2,
        device: Any = None,
        dtype: Any = None,
        **options: Unpack[SelfHeadsOptions],
    ) -> None:
        super().__init__(embed_dim, num_heads, device=device, dtype=dtype, **options)
        if size(self, "num_buckets", num_buckets) % 2:
            raise rejected(type(self).__name__, "num_buckets", "be even", num_buckets)
        self.num_buckets, self.chunk, self.rounds = (
            num_buckets,
            size(self, "chunk", chunk),
            size(self, "rounds", rounds),
        )
        self.rotations: Tensor
        sizes = (num_heads, rounds, self.head_dim, num_buckets // 2)
        self.register_buffer("rotations", torch.empty(sizes, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Re-initialize the projections by Glorot's rule, and draw the rotations anew."""
        super().reset_parameters()
        self.redraw()

    @torch.no_grad()
    def redraw(self) -> None:
        """Draw the random rotations of the hashes anew."""
        self.rotations.copy_(torch.randn(self.rotations.shape))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, is_causal: bool) -> Tensor:
        own = masks.dense(torch.eye(q.shape[2], device=q.device).mul(_SELF)[None, None])
        both = own if mask is None else own & mask
        return attention(q, unit(k), v, both, is_causal=is_causal, scale=1.0, engine=self.engine)

    def approximate(self, q: Tensor, k: Tensor, v: Tensor, valid_lens: Tensor | None, is_causal: bool) -> Tensor:
        B, H, N, _ = q.shape
        if self.chunk >= N:
            return self.attend(q, k, v, None if valid_lens is None else masks.padding(valid_lens), is_causal)
        missing = -N % self.chunk
        q, v = (F.pad(each, (0, 0, 0, missing)) for each in (q, v))
        n = torch.full((B,), N, device=q.device) if valid_lens is None else valid_lens.to(q.device)
        order = self._order(q, n)  # (B, H, R, N): the row in each place
        chunked = (B, H, self.rounds * order.shape[3] // self.chunk, self.chunk)

        def placed(rows: Tensor) -> Tensor:
            """Return rows (B, H, N, E) in the order of each round, as chunks (B·H, M, C, E)."""
            index = order.flatten(2).unsqueeze(3).expand(-1, -1, -1, rows.shape[3])
            return rows.gather(2, index).view(*chunked, rows.shape[3]).flatten(0, 1)

        query, key, value = placed(q), placed(unit(q)), placed(v)
        row = order.view(chunked).flatten(0, 1)  # (B·H, M, C)
        bias = self._bias(row, n.repeat_interleave(H), is_causal)
        read, aux = attention(
            query, with_previous(key), with_previous(value), bias,
            scale=1.0, engine=self.engine, return_aux=AuxRequest(lse="grad"),
        )  # fmt: skip
        assert aux.lse is not None
        back = order.argsort(3)  # the place of each row
        lse = aux.lse.reshape(order.shape).gather(3, back).clamp(min=torch.finfo(aux.lse.dtype).min)  # finite: no key
        read = read.reshape(*order.shape, v.shape[3]).gather(3, back.unsqueeze(4).expand(*back.shape, read.shape[-1]))
        return (read * lse.softmax(2).unsqueeze(4).to(read.dtype)).sum(2)[:, :, :N]

    @torch.no_grad()
    def _order(self, rows: Tensor, n: Tensor) -> Tensor:
        """Return rows (B, H, N, E) sorted by their hashes in each round, padding last: indices (B, H, R, N)."""
        turned = rows.unsqueeze(2) @ self.rotations.to(rows.dtype)
        bucket = torch.cat([turned, -turned], -1).argmax(-1)
        beyond = torch.arange(rows.shape[2], device=rows.device) >= n.view(-1, 1, 1, 1)
        return torch.where(beyond, self.num_buckets, bucket).argsort(dim=3, stable=True)

    def _bias(self, row: Tensor, n: Tensor, is_causal: bool) -> Tensor:
        """Return what is added to scores, (B·H, M, C, 2·C): −∞ hides; ``row`` (B·H, M, C) holds the rows in chunks."""
        own, other = row.unsqueeze(3), with_previous(row.unsqueeze(3)).mT
        hidden = other >= n.view(-1, 1, 1, 1)
        if is_causal:
            hidden = hidden | (other > own)
        return torch.where(hidden, -torch.inf, torch.where(own == other, _SELF, 0.0))

    def extra_repr(self) -> str:
        """Return the settings."""
        sizes = f"num_buckets={self.num_buckets}, chunk={self.chunk}, rounds={self.rounds}"
        return f"{super().extra_repr()}, {sizes}"


def unit(rows: Tensor) -> Tensor:
    """Return rows of unit length; those near 0 stay shorter, as in the authors' code."""
    return rows * (rows.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * rows.shape[-1] ** -0.5


def with_previous(chunks: Tensor) -> Tensor:
    """Return each chunk (..., M, C, E) with the one before it in front, (..., M, 2·C, E)."""
    return torch.cat([chunks.roll(1, -3), chunks], -2)
