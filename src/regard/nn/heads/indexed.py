"""DeepSeek sparse attention: a small indexer chooses the keys that latent attention reads."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard import masks
from regard._utils.constraints import OneOf, flag, floats, size
from regard._utils.errors import rejected
from regard._utils.mechanism import mechanism
from regard._utils.tracing import is_exported_to_onnx, is_symbolic, values_unavailable
from regard.masks import Extent, Mask, MaskLike
from regard.nn._base import Layer, draw_linear
from regard.nn.heads.causal import appended
from regard.nn.heads.latent import LatentOptions, MultiheadLatentAttention
from regard.nn.kv_cache import StepCache, cached_steps
from regard.nn.positions.rotary import Rotary, Rotation

#: Number of index scores that are held at once, over all heads of the indexer.
HELD = 1 << 22


class LightningIndexer(Layer):
    """The indexer of DeepSeek sparse attention: cheap scores of all keys, and the K best for each query.

    The score of key j for query t is ``I_tj = Σ_h w_th · relu(q_th · k_j / √D)``, with ``w_t = W_w x_t / √H``: queries
    of H heads, one key per position, which is normalized over its features (DeepSeek-AI 2025, arXiv 2512.02556).
    Queries and keys are rotated in their first columns. Scores are computed for a few queries at a time; what is kept
    is K indices per query. All heads of the attention share them. The choice has no gradient;
    :class:`DeepSeekSparseAttention` returns a loss that trains the indexer.

    Of equal scores any may be chosen: ReLU makes many of them 0.

    Parameters
    ----------
    embed_dim : int
        Width E of the rows.
    num_heads, head_dim : int
        Number of heads H and their width D.
    topk : int
        Number K of keys per query.
    query_dim : int, optional
        Width of the rows from which queries are computed; defaults to E.
    rotary : Rotary, optional
        Rotary encoding of queries and keys of width D.
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard import masks
    >>> from regard.nn import LightningIndexer
    >>> indexer, x = LightningIndexer(8, num_heads=2, head_dim=4, topk=2), torch.randn(1, 5, 8)
    >>> keys = indexer(x, attn_mask=masks.causal())
    >>> keys.shape, sorted(keys[0, 0].tolist()), sorted(keys[0, 1].tolist())
    (torch.Size([1, 5, 2]), [-1, 0], [0, 1])
    """

    def __init__(
        self,
        embed_dim: int,
        *,
        num_heads: int,
        head_dim: int,
        topk: int,
        query_dim: int | None = None,
        rotary: Rotary | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads = size(self, "embed_dim", embed_dim), size(self, "num_heads", num_heads)
        self.head_dim, self.topk = size(self, "head_dim", head_dim), size(self, "topk", topk)
        self.query_dim = self.embed_dim if query_dim is None else size(self, "query_dim", query_dim)
        if rotary is not None and rotary.head_dim != self.head_dim:
            raise rejected("LightningIndexer", "rotary", f"have width head_dim, {self.head_dim}", rotary.head_dim)
        self.rotary = rotary
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.query = nn.Linear(self.query_dim, self.num_heads * self.head_dim, bias=False, **where)
        self.key = nn.Linear(self.embed_dim, self.head_dim, bias=False, **where)
        self.key_norm = nn.LayerNorm(self.head_dim, 1e-6, **where)
        self.weight = nn.Linear(self.embed_dim, self.num_heads, bias=False, **where)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Re-initialize the weights by Glorot's rule, and the norm."""
        draw_linear(self.query, self.key, self.weight)
        self.key_norm.reset_parameters()

    def forward(
        self,
        x: Tensor,
        query: Tensor | None = None,
        *,
        attn_mask: MaskLike | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """Return the indices of the chosen keys (B, L, min(K, L)), int32; −1 where fewer keys are visible.

        Parameters
        ----------
        x : Tensor (B, L, E)
            Rows, one for each key.
        query : Tensor (B, L, query_dim), optional
            Rows from which queries are computed; defaults to ``x``.
        attn_mask : Tensor, Mask or callable, optional
            See :func:`regard.attention`; it must not depend on the head. Biases do not count.
        rotation : tuple of Tensor, optional
            :meth:`Rotary.rotation` of the rows' positions; by default these are 0 to L − 1.
        """
        x = floats(self, "x", x, "B", "L", self.embed_dim)
        query = floats(self, "query", x if query is None else query, "B", "L", self.query_dim)
        if self.rotary is not None and rotation is None:
            rotation = self.rotary.rotation(torch.arange(x.shape[1], device=x.device), x.dtype)
        queries, weights = self.queries(x, query, rotation)
        (B, _, L, _), mask = queries.shape, None
        if attn_mask is not None:
            mask = masks.as_mask(attn_mask).bind(Extent(B, 1, L, L), x.device)
        return self.chosen(queries, weights, self.keys(x, rotation), mask, 1)

    def queries(self, x: Tensor, query: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
        """Return queries (B, H, L, D) and the weights of heads (B, H, L) of rows (B, L, E) and (B, L, query_dim)."""
        B, L, _ = x.shape
        queries = self.query(query).view(B, L, self.num_heads, self.head_dim).transpose(1, 2)
        if self.rotary is not None:
            assert rotation is not None
            queries = self.rotary.turn(queries, rotation)
        return queries, self.weight(x).transpose(1, 2) * self.num_heads**-0.5

    def keys(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        """Return keys (B, 1, L, D) of rows (B, L, E)."""
        keys: Tensor = self.key_norm(self.key(x)).unsqueeze(1)
        if self.rotary is not None:
            assert rotation is not None
            keys = self.rotary.turn(keys, rotation)
        return keys

    def scores(self, queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
        """Return scores (B, L, S) of queries (B, H, L, D), weights (B, H, L) and keys (B, 1, S, D)."""
        dtype = torch.promote_types(queries.dtype, torch.float32)
        queries, weights, keys = queries.to(dtype), weights.to(dtype), keys.to(dtype)
        dots = F.relu(queries.flatten(1, 2) @ keys.squeeze(1).transpose(1, 2) * self.head_dim**-0.5)
        return (dots.unflatten(1, queries.shape[1:3]) * weights.unsqueeze(-1)).sum(1)

    @torch.no_grad()
    def chosen(self, queries: Tensor, weights: Tensor, keys: Tensor, mask: Mask | None, heads: int) -> Tensor:
        """Return the indices of the best visible keys (B, L, min(K, S)) under a bound mask of so many heads."""
        L, S = queries.shape[2], keys.shape[2]
        found = []
        for first, last in _tiles(L, S * self.num_heads):
            scores = self.scores(queries[:, :, first:last], weights[:, :, first:last], keys)
            visible = _visible(mask, queries.shape[0], heads, first, last, S, scores.device)
            if visible is not None:
                scores = scores.masked_fill(~visible, -torch.inf)
            values, indices = _largest(scores, min(self.topk, S))
            found.append(indices.masked_fill(values == -torch.inf, -1).to(torch.int32))
        return torch.cat(found, 1) if found else queries.new_zeros(queries.shape[0], 0, min(self.topk, S)).int()

    def extra_repr(self) -> str:
        """Return the sizes."""
        names = ("embed_dim", "num_heads", "head_dim", "topk", "query_dim")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


def _largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest scores of each row and where they are, the first ones of equal scores.

    Keys that no head scores above 0 have score 0; later keys of score 0 must not change which are chosen.
    """
    if scores.is_cpu and not values_unavailable(scores) and k:
        values, indices = scores.topk(k, -1)
        least = values[..., -1:]
        is_tied = ((scores == least).sum(-1) > (values == least).sum(-1)) & (least[..., 0] > -torch.inf)
        if not bool(is_tied.any()):
            return values, indices
    stable = {} if is_exported_to_onnx() else {"stable": True}  # ONNX has no other sort
    values, indices = scores.sort(dim=-1, descending=True, **stable)
    return values[..., :k], indices[..., :k]


def _tiles(rows: int, width: int) -> list[tuple[int, int]]:
    """Return the first and one past the last row of tiles with at most ``HELD`` numbers, or one row.

    One tile of all rows where a compiler does not know how many there are.
    """
    if is_symbolic(rows) or is_symbolic(width):
        return [(0, rows)]
    step = max(HELD // max(width, 1), 1)
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]


def _visible(
    mask: Mask | None, batch: int, heads: int, first: int, last: int, S: int, device: torch.device
) -> Tensor | None:
    """Return which keys are visible to queries in at least one head, (B or 1, l, S), or None for all."""
    if mask is None:
        return None
    b, h = torch.arange(batch, device=device).view(-1, 1, 1, 1), torch.arange(heads, device=device).view(-1, 1, 1)
    rows, columns = torch.arange(first, last, device=device).unsqueeze(1), torch.arange(S, device=device)
    if mask.has_bias:  # a bias of −inf hides, too
        seen = mask.matrix(b, h, rows, columns, torch.float32).detach() > -torch.inf
    else:
        shown = mask.visible(b, h, rows, columns)
        if shown is None:
            return None
        seen = shown[(None,) * (4 - shown.dim())]
    return seen.any(1)


@mechanism(
    formula="multi-head latent attention to the K keys with the largest Σ_h w_th relu(q_th · k_j / √D)",
    sources=("deepseek2025", "deepseek2024"),
    learned="those of latent attention; of the indexer W_q (H_I·D_I, ·), W_k (D_I, E), W_w (H_I, E), a norm",
    cost="O(L²·H_I·D_I + L·K·H·(D+R+V))",
    cache="those of its attention and the indexer's key per token",
)
class DeepSeekSparseAttention(MultiheadLatentAttention):
    """DeepSeek sparse attention (DSA): latent attention to the keys that a :class:`LightningIndexer` chooses.

    Each query sees the K keys with the largest index scores among those that the mask shows, in all heads the same
    (DeepSeek-AI 2025, arXiv 2512.02556); the attention is :class:`MultiheadLatentAttention` (DeepSeek-AI 2024, arXiv
    2405.04434) under :func:`regard.masks.selected`. No matrix of L × S scores is kept.

    The output has no gradient to the indexer. It is trained by the Kullback–Leibler divergence from its softmax to the
    attention weights, averaged over heads: over all visible keys in a warm-up, in which only the indexer learns and
    attention may be dense (``topk`` as long as sequences), and over the chosen keys later. The loss is the mean over
    rows that see a key. Its gradient reaches the indexer alone; it is computed a few queries at a time, and again in
    the backward pass, in O(L·S) operations.

    Parameters
    ----------
    embed_dim, num_heads, latent_dim, head_dim, value_dim, rotary, rotary_dim, query_latent_dim, mscale, scale_latents,
    bias, eps, dropout, engine, device, dtype
        See :class:`MultiheadLatentAttention`.
    index_heads, index_dim : int
        Number of heads of the indexer and their width (``index_n_heads``, ``index_head_dim``).
    topk : int
        Number K of keys that each query sees (``index_topk``).
    index_interleaved : bool, default False
        Whether the indexer's rotary encoding pairs columns (0, 1), (2, 3) and so on, as in GLM-5; DeepSeek's pairs
        columns i and i + R/2, unlike its attention.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import DeepSeekSparseAttention, KVCache, Rotary
    >>> layer = DeepSeekSparseAttention(
    ...     32, 4, latent_dim=12, head_dim=8, rotary=Rotary(4, interleaved=True), index_heads=2, index_dim=8, topk=3
    ... ).eval()
    >>> x, cache = torch.randn(2, 7, 32), KVCache()
    >>> whole, loss = layer(x, is_causal=True, loss="selected")
    >>> loss.shape, bool(loss > 0)
    (torch.Size([]), True)
    >>> with torch.no_grad():
    ...     steps = [layer(t, cache=cache) for t in x.split(1, 1)]
    >>> torch.allclose(torch.cat(steps, 1), whole, atol=1e-5)
    True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        latent_dim: int,
        head_dim: int,
        index_heads: int,
        index_dim: int,
        topk: int,
        index_interleaved: bool = False,
        rotary: Rotary | None = None,
        device: Any = None,
        dtype: Any = None,
        **options: Unpack[LatentOptions],
    ) -> None:
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(
            embed_dim, num_heads, latent_dim=latent_dim, head_dim=head_dim, rotary=rotary, **where, **options
        )
        size(self, "index_dim", index_dim)
        turned = None
        if rotary is not None:
            if index_dim < rotary.turned:
                raise rejected("DeepSeekSparseAttention", "index_dim", f"be at least {rotary.turned}", index_dim)
            # The same angles, in the first columns.
            turned = Rotary(
                index_dim,
                rotary.base,
                interleaved=flag(self, "index_interleaved", index_interleaved),
                fraction=rotary.turned / index_dim,
                scaling=rotary.scaling,
            )
        self.indexer = LightningIndexer(
            embed_dim, num_heads=index_heads, head_dim=index_dim, topk=topk, query_dim=self.query.in_features,
            rotary=turned, **where,
        )  # fmt: skip

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        attn_mask: MaskLike | None = None,
        *,
        is_causal: bool = False,
        rotation: Rotation | None = None,
        cache: StepCache | None = None,
        loss: Literal["all", "selected"] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return rows (B, L, E), and the indexer's loss () if requested.

        Parameters
        ----------
        x : Tensor (B, L, E)
        attn_mask : Tensor, Mask or callable, optional
            See :func:`regard.attention`; it covers L queries and S keys, the cached ones and those of ``x``.
        is_causal : bool, default False
            Also hide keys after the query. Query 0 is at key 0.
        rotation : tuple of Tensor, optional
            :meth:`Rotary.rotation` of the rows' positions. By default, positions continue those in the cache.
        cache : KVCache, optional
            Latents and rotary keys of earlier steps as its keys (B, 1, N, C + R), and the indexer's keys as its values.
        loss : {"all", "selected"}, optional
            Also return the indexer's loss over all visible keys, or over the selected ones; not with a cache.
        """
        x = floats(self, "x", x, "B", "L", self.embed_dim)
        if loss is not None:
            OneOf(("all", "selected"))(self, "loss", loss)
            if cache is not None:
                raise rejected("DeepSeekSparseAttention", "cache", "be None with a loss", cache)
        before = cached_steps(self, cache)
        rotation = self._rotation(x, rotation, before)
        latent = self._query_input(x)
        query, rows = self._queries(latent, rotation), self._rows(x, rotation)
        # The indexer learns from its own loss alone.
        asked, weights = self.indexer.queries(x.detach(), latent.detach(), rotation)
        keys = self.indexer.keys(x.detach(), rotation)
        offered = keys
        if cache is not None:
            rows, offered = appended(cache, rows, keys)
        try:
            mask = None if attn_mask is None else masks.as_mask(attn_mask)
            if is_causal:
                causal = masks.causal(align="upper_left")
                mask = causal if mask is None else mask & causal
            extent = Extent(x.shape[0], self.num_heads, x.shape[1], rows.shape[2])
            bound = None if mask is None else mask.bind(extent, x.device)
            indices = self.indexer.chosen(asked, weights, offered, bound, self.num_heads)
            heads = self._attend_to(query, rows, indices, mask)
        except BaseException:
            if cache is not None:  # undo the append, so that the call can be retried
                with suppress(ValueError):  # impossible in a full window, which was overwritten
                    cache.truncate(before)
            raise
        if loss is None:
            return self._output(heads)
        if loss == "selected":
            selected = masks.selected(indices.unsqueeze(1)).bind(extent, x.device)
            bound = selected if bound is None else selected & bound
        return self._output(heads), self._divergence(query, rows, asked, weights, keys, bound)

    def _attend_to(self, query: Tensor, rows: Tensor, indices: Tensor, mask: Mask | None) -> Tensor:
        """Return the heads' outputs (B, H, L, V) of the chosen keys."""
        plain = mask is None or not mask.has_bias
        shown: MaskLike
        if query.shape[2] == 1 and plain and indices.shape[2] < rows.shape[2]:  # a step reads the chosen rows alone
            place = indices.transpose(1, 2).long().clamp(min=0).expand(-1, -1, rows.shape[3])
            rows, shown = rows.squeeze(1).gather(1, place).unsqueeze(1), (indices >= 0).unsqueeze(1)
        else:
            chosen = masks.selected(indices.unsqueeze(1))
            shown = chosen if mask is None else chosen & mask
        heads: Tensor = self._attend(query, rows, shown, False, None)
        return heads

    def _divergence(
        self, query: Tensor, rows: Tensor, asked: Tensor, weights: Tensor, keys: Tensor, mask: Mask | None
    ) -> Tensor:
        """Return the mean over rows of KL(attention weights, averaged over heads ‖ softmax of index scores).

        ``mask`` is bound; hidden keys count in neither.
        """
        B, H, L, _ = query.shape
        S = rows.shape[2]
        with torch.no_grad():
            read = self._keys_and_values(rows)[0]
        query = query.detach()

        def tile(first: int, last: int, asked: Tensor, weights: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
            guess = self.indexer.scores(asked[:, :, first:last], weights[:, :, first:last], keys)
            visible = _visible(mask, B, H, first, last, S, guess.device)
            with torch.no_grad():
                target = _mean_weights(query[:, :, first:last], read, self.scale, mask, first, guess.dtype)
            if visible is not None:
                guess = guess.masked_fill(~visible, -torch.inf)
                full = visible.any(-1, keepdim=True)
                guess = torch.where(full, guess, 0.0)  # a row that sees nothing has target 0
            logs = guess.log_softmax(-1)
            terms = torch.where(target > 0, target * (target.clamp(min=1e-38).log() - logs), 0.0)
            return terms.sum(), (target.sum(-1) > 0).sum()

        total, count = query.new_zeros(()).to(torch.promote_types(query.dtype, torch.float32)), 0
        for first, last in _tiles(L, S * max(H, self.indexer.num_heads)):
            if torch.is_grad_enabled():
                terms, full = checkpoint(tile, first, last, asked, weights, keys, use_reentrant=False)
            else:
                terms, full = tile(first, last, asked, weights, keys)
            total, count = total + terms, count + full
        return total / torch.as_tensor(count, device=query.device).clamp(min=1)


def _mean_weights(
    query: Tensor, key: Tensor, scale: float, mask: Mask | None, first: int, dtype: torch.dtype
) -> Tensor:
    """Return the softmax weights (B, l, S) of queries (B, H, l, D) from row ``first`` on, averaged over heads."""
    B, H, L, _ = query.shape
    scores = (query.to(dtype) @ key.to(dtype).transpose(2, 3)) * scale
    if mask is not None:
        device = query.device
        b, h = torch.arange(B, device=device).view(-1, 1, 1, 1), torch.arange(H, device=device).view(-1, 1, 1)
        q_idx, kv_idx = torch.arange(first, first + L, device=device), torch.arange(key.shape[2], device=device)
        scores = scores + mask.matrix(b, h, q_idx.unsqueeze(1), kv_idx, dtype)
    peak = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - torch.where(peak == -torch.inf, 0.0, peak))
    total = weights.sum(-1, keepdim=True)
    return (weights / torch.where(total == 0, 1.0, total)).mean(1)
