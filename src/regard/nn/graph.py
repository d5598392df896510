"""Attention over graphs: nodes read their neighbours.

Dimensions: B graphs, N nodes, E width, H heads, D width of a head.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard import masks
from regard._utils.constraints import INTEGERS, Number, OneOf, TensorOf, flag, lengths, probability, size
from regard._utils.errors import rejected
from regard._utils.mechanism import mechanism
from regard._utils.tracing import values_unavailable
from regard.engines import EngineLike
from regard.engines.aux import Aux, AuxRequest
from regard.functional import attention
from regard.masks import Mask, MaskLike
from regard.nn._base import Layer, combined_mask, parameter, sequences, zero_padding
from regard.scores import Score


class LeakyScore(Score):
    """The score ``wᵀ LeakyReLU(q + k)`` of projected queries and keys, with w (H, C) for each head.

    Parameters
    ----------
    w : Tensor (H, C)
    slope : float
        Of the negative half.
    """

    def __init__(self, w: Tensor, slope: float) -> None:
        self.w, self.slope = w, slope

    @property
    def per_head(self) -> bool:
        """Whether w differs per head: it does."""
        return True

    def compare(self, query: Tensor, key: Tensor) -> Tensor:
        hidden = F.leaky_relu(query.unsqueeze(-2) + key.unsqueeze(-3), self.slope)  # (B, H, l, s, C)
        return (hidden @ self.w[:, None, :, None]).squeeze(-1)

    def pair_size(self, width: int) -> int:
        return width

    def pair_flops(self, width: int) -> int:
        return 4 * width


@mechanism(
    formula="softmax_j(aᵀ LeakyReLU(W_q x_i + W_k x_j)) W_k x_j over neighbours j; GAT: LeakyReLU(aᵀ W x_i + bᵀ W x_j)",
    sources=("brody2022", "velickovic2018"),
    learned="W_q, W_k (HD, E), a (H, D), bias; GAT: W (HD, E), a, b (H, D), bias",
    cost="O(N²·H·D + N·E·H·D); with lists of K neighbours O(N·K·H·D + N·E·H·D)",
)
class GraphAttention(Layer):
    """Graph attention: nodes read their neighbours (GATv2: Brody 2022, arXiv 2105.14491; GAT: Veličković 2018).

    In each head ``y_i = Σ_j softmax_j(e_ij) v_j`` over the neighbours j of node i. By ``version``:

    - 2: ``e_ij = aᵀ LeakyReLU(W_q x_i + W_k x_j)``, ``v_j = W_k x_j``;
    - 1: ``e_ij = LeakyReLU(aᵀ W x_i + bᵀ W x_j)``, ``v_j = W x_j`` (arXiv 1710.10903). It ranks neighbours alike for
      all nodes: the order of ``bᵀ W x_j`` does not depend on i.

    Edges are a mask, or lists of neighbours: of a large graph with few edges, lists of K neighbours take O(N·K) where a
    mask takes O(N²).

    Parameters
    ----------
    in_features : int
        Width E of the nodes.
    head_dim : int
        Width D of a head.
    num_heads : int, default 1
        Number of heads H.
    version : {2, 1}
    concat : bool, default True
        Whether heads are concatenated (H·D features) or averaged (D features).
    self_loops : bool, default True
        Whether each node is its own neighbour, too.
    negative_slope : float, default 0.2
        Slope of LeakyReLU below 0.
    bias : bool, default True
        Whether a bias is added to the output.
    dropout : float, default 0.0
        Probability of dropping a weight, in training.
    engine : str or Engine, default "auto"
        See :func:`regard.attention`.
    device, dtype : optional
        Device and dtype of the parameters.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid.

    Examples
    --------
    A path of four nodes:

    >>> import torch
    >>> from regard.nn import GraphAttention
    >>> edges = torch.tensor([[0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1], [0, 0, 1, 0]]).bool()
    >>> neighbours = torch.tensor([[1, -1], [0, 2], [1, 3], [2, -1]])
    >>> layer, nodes = GraphAttention(6, 4, num_heads=2), torch.randn(1, 4, 6)
    >>> layer(nodes, edges).shape
    torch.Size([1, 4, 8])
    >>> torch.allclose(layer(nodes, neighbours), layer(nodes, edges), atol=1e-6)
    True
    """

    def __init__(
        self,
        in_features: int,
        head_dim: int,
        num_heads: int = 1,
        *,
        version: Literal[1, 2] = 2,
        concat: bool = True,
        self_loops: bool = True,
        negative_slope: float = 0.2,
        bias: bool = True,
        dropout: float = 0.0,
        engine: EngineLike = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        E, D, H = (
            size(self, "in_features", in_features),
            size(self, "head_dim", head_dim),
            size(self, "num_heads", num_heads),
        )
        OneOf((1, 2))(self, "version", version)
        for name, value in (("concat", concat), ("self_loops", self_loops), ("bias", bias)):
            flag(self, name, value)
        self.in_features, self.head_dim, self.num_heads, self.version = E, D, H, version
        self.concat, self.self_loops = concat, self_loops
        self.negative_slope = Number(ge=0)(self, "negative_slope", negative_slope)
        self.dropout, self.engine = probability(self, "dropout", dropout), engine
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.query = nn.Linear(E, H * D, False, **where) if version == 2 else None
        self.key = nn.Linear(E, H * D, False, **where)
        self.a = parameter(H, D, **where)
        self.b = parameter(H, D, **where) if version == 1 else None
        self.bias = parameter(H * D if concat else D, **where) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Re-initialize by Glorot's rule, and the bias to 0."""
        for part in (self.query, self.key):
            if part is not None:
                nn.init.xavier_uniform_(part.weight)
        for row in (self.a, self.b):
            if row is not None:
                nn.init.xavier_uniform_(row)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        nodes: Tensor,
        edges: MaskLike | None = None,
        valid_lens: Tensor | None = None,
        *,
        return_aux: AuxRequest | None = None,
    ) -> Tensor | tuple[Tensor, Aux]:
        """Return what the nodes read.

        Parameters
        ----------
        nodes : Tensor (B, N, E)
        edges : Tensor or Mask, optional
            A bool tensor (N, N) or (B, N, N), or a mask: True at [i, j] where i reads j. An integer tensor (N, K) or
            (B, N, K): the neighbours of each node, −1 for none; one that is listed twice counts twice. None is every
            pair.
        valid_lens : Tensor (B,) of int, optional
            Number of valid nodes per graph; later ones are not read, and count as zeros.
        return_aux : AuxRequest, optional
            Auxiliary outputs to return, per head.

        Returns
        -------
        output : Tensor (B, N, H·D), or (B, N, D) for the mean of heads
            A node without neighbours reads 0.
        aux : Aux
            Only if requested: of N keys, or of K (and the node itself) for lists, with B·N sequences of one query.
        """
        nodes = sequences(self, "nodes", nodes, self.in_features)
        if valid_lens is not None:
            nodes = zero_padding(nodes, lengths(self, "valid_lens", valid_lens, *nodes.shape[:2]))
        k = self._split(self.key(nodes))
        q, key, weight = self._compared(nodes, k)
        listed = isinstance(edges, Tensor) and edges.dtype in INTEGERS
        if listed:
            mask: Mask | Tensor | None
            near, mask = self._neighbours(cast(Tensor, edges), nodes, valid_lens)
            q, key, k = q.transpose(1, 2).flatten(0, 1).unsqueeze(2), gathered(key, near), gathered(k, near)
        else:
            mask = self._mask(edges, valid_lens)
        answer = attention(
            q, key, k, mask, self.dropout if self.training else 0.0,
            score=LeakyScore(weight, self.negative_slope), engine=self.engine, return_aux=return_aux,
        )  # fmt: skip
        read = answer if isinstance(answer, Tensor) else answer[0]
        heads = read.squeeze(2).unflatten(0, nodes.shape[:2]) if listed else read.transpose(1, 2)  # (B, N, H, D)
        output = heads.flatten(2) if self.concat else heads.mean(2)
        output = output if self.bias is None else output + self.bias
        return output if isinstance(answer, Tensor) else (output, answer[1])

    def _mask(self, edges: MaskLike | None, valid_lens: Tensor | None) -> Mask | None:
        mask = combined_mask(self, None, edges)
        if mask is not None and self.self_loops:
            mask = mask | masks.window(0, 0)
        if valid_lens is not None:
            real = masks.padding(valid_lens)
            mask = real if mask is None else mask & real
        return mask

    def _neighbours(self, near: Tensor, nodes: Tensor, valid_lens: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return lists (B, N, K) of neighbours, with each node itself if it is one, and a mask (B·N, 1, 1, K)."""
        B, N, _ = nodes.shape
        near = TensorOf((N, "K"), (B, N, "K"), integer=True)(self, "edges", near).long().expand(B, N, -1)
        if near.numel() and not values_unavailable(near) and not -1 <= int(near.amin()) <= int(near.amax()) < N:
            expected = f"hold nodes from 0 to {N - 1}, and -1 for none"
            raise rejected(type(self).__name__, "edges", expected, f"{int(near.amin())} to {int(near.amax())}")
        if self.self_loops:
            own = torch.arange(N, device=near.device).view(1, N, 1)
            near = torch.cat([near.masked_fill(near == own, -1), own.expand(B, N, 1)], 2)
        seen = near >= 0
        if valid_lens is not None:
            seen = seen & (near < valid_lens.to(near.device).view(B, 1, 1))
        return near.clamp(min=0), seen.flatten(0, 1)[:, None, None]

    def _compared(self, nodes: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows that are added, (B, H, N, C) each, and the weights (H, C) of what the ReLU returns."""
        if self.query is not None:
            return self._split(self.query(nodes)), k, self.a
        q, key = (k @ cast(Tensor, row).to(k.dtype).unsqueeze(2) for row in (self.a, self.b))  # (B, H, N, 1)
        return q, key, torch.ones_like(self.a[:, :1])

    def _split(self, rows: Tensor) -> Tensor:
        return rows.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2)

    def extra_repr(self) -> str:
        """Return the settings that the maps do not show."""
        return f"num_heads={self.num_heads}, version={self.version}"


def gathered(rows: Tensor, near: Tensor) -> Tensor:
    """Return the rows (B·N, H, K, C) that lists (B, N, K) name among rows (B, H, N, C)."""
    index = near.flatten(1)[:, None, :, None].expand(-1, rows.shape[1], -1, rows.shape[3])
    found = rows.gather(2, index).unflatten(2, near.shape[1:])  # (B, H, N, K, C)
    return found.transpose(1, 2).flatten(0, 1)
