"""Product-key memory: each row reads a few of very many learned values, found by two small searches.

Dimensions: N rows, E width, H heads, n keys of each half (n² values), D width of a query, V width of a value.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard._utils.constraints import Integer, OneOf, TensorOf, size
from regard._utils.errors import rejected
from regard._utils.mechanism import mechanism
from regard.nn._base import Layer, parameter

QueryNorm = Literal["batch", "layer", "none"]


@mechanism(
    formula="Σ_{(i,j) ∈ top-k} softmax(q₁·a_i + q₂·b_j) v_{ij}, summed over heads, [q₁; q₂] = norm(W x)",
    sources=("lample2019",),
    learned="W (HD, E), a, b (H, n, D/2), v (n², V), norm",
    cost="O(N·H·(E·D + n·D + k² + k·V))",
)
class ProductKeyMemory(Layer):
    """Product-key memory: each row reads k of n² learned values (Lample 2019, arXiv 1907.05242).

    The key of value (i, j) is ``[a_i; b_j]``, so that its score is ``q₁·a_i + q₂·b_j`` with the halves of the query.
    The k best of n² keys are among the k × k pairs of the best a and the best b: the search is exact and compares 2·n
    keys. Weights are the softmax of the k best scores. Heads have their own queries and keys and share the values;
    their reads are added.

    Parameters
    ----------
    embed_dim : int
        Width E of the rows.
    num_keys : int
        Number n of keys of each half; there are n² values.
    num_heads : int, default 4
        Number of heads H.
    topk : int, default 32
        Number k of values that a head reads, at most n.
    query_dim : int, optional
        Width D of a query, which must be even; defaults to E, or E + 1 if that is odd.
    value_dim : int, optional
        Width V of values and outputs; defaults to E.
    query_norm : {"batch", "layer", "none"}, default "batch"
        Norm of the queries of each head. The paper's batch norm spreads reads over more of the values; it mixes rows
        in training, padding included.
    device, dtype : optional
        Device and dtype of the parameters.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid.

    Notes
    -----
    The choice of keys has no gradient; scores of chosen keys, values and queries have. For large memories, give the
    values an optimizer for sparse updates and a larger learning rate, as the authors do.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import ProductKeyMemory
    >>> layer = ProductKeyMemory(16, num_keys=64, num_heads=2, topk=8)
    >>> layer.values.shape, layer(torch.randn(2, 5, 16)).shape
    (torch.Size([4096, 16]), torch.Size([2, 5, 16]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_keys: int,
        num_heads: int = 4,
        topk: int = 32,
        *,
        query_dim: int | None = None,
        value_dim: int | None = None,
        query_norm: QueryNorm = "batch",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        E, n, H = (
            size(self, "embed_dim", embed_dim),
            size(self, "num_keys", num_keys),
            size(self, "num_heads", num_heads),
        )
        self.embed_dim, self.num_keys, self.num_heads = E, n, H
        self.topk = Integer(ge=1, le=n, note=", num_keys")(self, "topk", topk)
        self.query_dim = E + E % 2 if query_dim is None else size(self, "query_dim", query_dim)
        if self.query_dim % 2:
            raise rejected(type(self).__name__, "query_dim", "be even", query_dim)
        self.value_dim = E if value_dim is None else size(self, "value_dim", value_dim)
        OneOf(get_args(QueryNorm))(self, "query_norm", query_norm)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(E, H * self.query_dim, **where)
        norms = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm, "none": nn.Identity}
        self.norm = nn.Identity() if query_norm == "none" else norms[query_norm](self.query_dim, **where)
        self.keys = parameter(2, H, n, self.query_dim // 2, **where)
        self.values = parameter(n * n, self.value_dim, **where)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Re-initialize queries as ``nn.Linear`` does, keys within ±1/√(D/2), values with deviation 1/√V."""
        self.q_proj.reset_parameters()
        if not isinstance(self.norm, nn.Identity):
            self.norm.reset_parameters()
        bound = (self.query_dim // 2) ** -0.5
        nn.init.uniform_(self.keys, -bound, bound)
        nn.init.normal_(self.values, std=self.value_dim**-0.5)

    def forward(self, x: Tensor, *, return_indices: bool = False) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Return what the rows read.

        Parameters
        ----------
        x : Tensor (N, E) or (B, N, E)
        return_indices : bool, default False
            Whether to also return which values were read.

        Returns
        -------
        output : Tensor (N, V) or (B, N, V)
        indices : Tensor (..., H, k) of int
            Only if requested: rows of ``values``; value (i, j) is row ``i·n + j``.
        weights : Tensor (..., H, k)
            Only if requested.
        """
        rows: Tensor = TensorOf(("N", self.embed_dim), ("B", "N", self.embed_dim))(self, "x", x)
        lead = rows.shape[:-1]
        query = self.norm(self.q_proj(rows).reshape(-1, self.query_dim))
        halves = query.view(-1, self.num_heads, 2, self.query_dim // 2)
        scores = torch.einsum("nhpd,phkd->pnhk", halves, self.keys.to(halves.dtype))
        (best_a, a), (best_b, b) = (each.topk(self.topk, -1) for each in scores)
        pairs = (best_a.unsqueeze(-1) + best_b.unsqueeze(-2)).flatten(-2)  # (N, H, k²), in order of a, then of b
        best, place = pairs.topk(self.topk, -1)
        indices = a.gather(-1, place // self.topk) * self.num_keys + b.gather(-1, place % self.topk)
        weights = best.softmax(-1)
        read = F.embedding_bag(
            indices.flatten(1), self.values, per_sample_weights=weights.flatten(1).to(self.values.dtype), mode="sum"
        )
        output = read.view(*lead, self.value_dim)
        if not return_indices:
            return output
        return output, *(each.view(*lead, self.num_heads, self.topk) for each in (indices, weights))

    def extra_repr(self) -> str:
        """Return the sizes that the projections do not show."""
        return f"num_keys={self.num_keys}, num_heads={self.num_heads}, topk={self.topk}"
