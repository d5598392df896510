"""Options of attention layers: what is done to queries, keys and values before, and to the heads' outputs after.

Dimensions: B batch, L rows, E width, H heads, G key–value heads, D width of a head. :class:`SelfAttention` makes these
by name; each is a module of its own, and can be used in other layers.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from regard._utils.constraints import Number, OneOf, flag, floats, size
from regard._utils.errors import rejected, shape
from regard._utils.mechanism import mechanism
from regard.nn._base import Layer, draw_linear, parameter
from regard.nn.positions.encodings import wide
from regard.scores.dot_products import unit

#: What rows of queries and keys are divided by, and what has a gate of its own.
NormKind = Literal["l2", "rms"]
GateScope = Literal["channel", "head"]


def unit_rows(rows: Tensor) -> Tensor:
    """Return rows (..., D) of length 1, computed in at least float32; rows of zeros stay zeros."""
    return unit(rows.to(wide(rows.dtype))).to(rows.dtype)


# Before the scores ----------------------------------------------------------------------------------------------------


@mechanism(
    formula="q ↦ γ_q ⊙ q / √(mean q² + ε) and k ↦ γ_k ⊙ k / √(mean k² + ε), or q / ‖q‖ and k / ‖k‖",
    sources=("dehghani2023", "henry2020"),
    learned='γ_q, γ_k (D), for "rms"',
    cost="O((L + S)·E)",
)
class QueryKeyNorm(Layer):
    """Normalize queries and keys within each head, so that scores stay bounded.

    "rms" divides a row by its root mean square and multiplies it by learned numbers, one for each channel, which heads
    share: ViT-22B (Dehghani 2023, arXiv 2302.05442), Qwen3 and Gemma 3. "l2" divides it by its length: scores are then
    cosines times a scale (Henry 2020, arXiv 2010.04245). Rows of zeros stay zeros. Rotary positions come after it.

    Parameters
    ----------
    head_dim : int
        Width D of a head.
    kind : {"rms", "l2"}, default "rms"
    eps : float, default 1e-6
        Added to the mean square, for "rms".
    device, dtype : optional
        Of the parameters ``query.weight`` and ``key.weight`` (D,).

    Examples
    --------
    >>> import torch
    >>> from regard.nn import QueryKeyNorm
    >>> query, key = torch.tensor([[[[3.0, 4.0]]]]), torch.zeros(1, 1, 1, 2)
    >>> QueryKeyNorm(2, "l2")(query, key)
    (tensor([[[[0.6000, 0.8000]]]]), tensor([[[[0., 0.]]]]))
    """

    def __init__(
        self, head_dim: int, kind: NormKind = "rms", eps: float = 1e-6, *, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        self.head_dim, self.kind = size(self, "head_dim", head_dim), OneOf(get_args(NormKind))(self, "kind", kind)
        self.eps = Number(ge=0)(self, "eps", eps)
        self.query = self.key = None
        if kind == "rms":
            self.query, self.key = (nn.RMSNorm(head_dim, eps=self.eps, device=device, dtype=dtype) for _ in range(2))

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return normalized queries (B, H, L, D) and keys (B, G, S, D)."""
        query = floats(self, "query", query, "B", "H", "L", self.head_dim)
        key = floats(self, "key", key, "B", "G", "S", self.head_dim)
        normed = unit_rows(key) if self.key is None else in_wider(self.key, key)
        return self.of_queries(query), normed

    def of_queries(self, query: Tensor) -> Tensor:
        """Return normalized queries (B, H, L, D)."""
        return unit_rows(query) if self.query is None else in_wider(self.query, query)

    def reset_parameters(self) -> None:
        """Reset the factors to 1."""
        for norm in (self.query, self.key):
            if norm is not None:
                norm.reset_parameters()

    def extra_repr(self) -> str:
        """Return the width and the kind."""
        return f"{self.head_dim}, {self.kind!r}"


def in_wider(norm: nn.RMSNorm, rows: Tensor) -> Tensor:
    """Apply a norm in its own dtype or that of the rows, whichever is wider: under autocast these differ."""
    normed: Tensor = norm(rows.to(torch.promote_types(rows.dtype, norm.weight.dtype)))
    return normed.to(rows.dtype)


@mechanism(
    formula="v ↦ λ₁ v₁ + λ₂ v, v₁ the values of the first layer",
    sources=("zhou2024",),
    learned="λ (2)",
    cost="O(S·E)",
)
class ValueResidual(Layer):
    """Mix a layer's values with those of the model's first layer, ``λ₁ v₁ + λ₂ v`` (ResFormer; Zhou 2024, 2410.17897).

    Parameters
    ----------
    device, dtype : optional
        Of ``weight`` (2,), which is λ and begins at ½ and ½.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import ValueResidual
    >>> ValueResidual()(torch.ones(1, 1, 1, 2), torch.full((1, 1, 1, 2), 3.0))
    tensor([[[[2., 2.]]]], grad_fn=<AddBackward0>)
    """

    def __init__(self, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.weight = parameter(2, device=device, dtype=dtype)
        self.reset_parameters()

    def forward(self, value: Tensor, first: Tensor) -> Tensor:
        """Return values (B, G, S, D), for the first layer's ``first`` of the same shape."""
        value = floats(self, "value", value, "B", "G", "S", "D")
        if not isinstance(first, Tensor) or first.shape != value.shape:
            got = shape(first) if isinstance(first, Tensor) else first
            raise rejected(type(self).__name__, "first", f"be a tensor of value's shape {shape(value)}", got)
        weight = self.weight.to(value.dtype)
        return weight[0] * first + weight[1] * value

    def reset_parameters(self) -> None:
        """Reset both weights to ½."""
        nn.init.constant_(self.weight, 0.5)


# After the weighted sum -----------------------------------------------------------------------------------------------


@mechanism(
    formula="y ↦ y − a (y·v̂) v̂, v̂ = v / ‖v‖ the query's own value",
    sources=("zhai2026",),
    learned="a = tanh(w) (H), if asked for",
    cost="O(L·E)",
)
class ExclusiveOutput(Layer):
    """Exclusive self-attention: remove the direction of a row's own value from its output (Zhai 2026, 2603.09078).

    ``y − a (y·v̂) v̂``, where v̂ is the row's own value divided by its length: what the row already has needs no
    attention.

    Parameters
    ----------
    num_heads : int
        Number of heads H.
    learned : bool, default False
        Whether a is the tanh of a parameter ``weight`` (H,) that begins at 0, rather than 1.
    device, dtype : optional
        Of the parameter.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import ExclusiveOutput
    >>> ExclusiveOutput(1)(torch.tensor([[[[3.0, 5.0]]]]), torch.tensor([[[[0.0, 2.0]]]]))
    tensor([[[[3., 0.]]]])
    """

    def __init__(self, num_heads: int, learned: bool = False, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.num_heads, self.learned = size(self, "num_heads", num_heads), flag(self, "learned", learned)
        self.weight = parameter(self.num_heads, device=device, dtype=dtype) if learned else None
        self.reset_parameters()

    def forward(self, heads: Tensor, value: Tensor) -> Tensor:
        """Return outputs (B, H, L, D), for the rows' own values (B, G, L, D)."""
        B, H, L, D = floats(self, "heads", heads, "B", self.num_heads, "L", "D").shape
        value = floats(self, "value", value, B, "G", L, D)
        own = unit_rows(value).repeat_interleave(H // value.shape[1], 1)
        along = (heads * own).sum(-1, keepdim=True)
        if self.weight is not None:
            along = along * self.weight.tanh().to(heads.dtype).view(-1, 1, 1)
        return heads - along * own

    def reset_parameters(self) -> None:
        """Reset the parameter to 0."""
        if self.weight is not None:
            nn.init.zeros_(self.weight)

    def extra_repr(self) -> str:
        """Return the number of heads, and whether a is learned."""
        return f"{self.num_heads}, learned=True" if self.learned else f"{self.num_heads}"


@mechanism(
    formula="y_h ↦ c_h y_h",
    sources=("shleifer2021",),
    learned="c (H)",
    cost="O(L·E)",
)
class HeadScale(Layer):
    """Multiply each head's output by a learned number (NormFormer; Shleifer 2021, arXiv 2110.09456).

    Parameters
    ----------
    num_heads : int
        Number of heads H.
    device, dtype : optional
        Of ``weight`` (H,), which begins at 1.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import HeadScale
    >>> HeadScale(2)(torch.ones(1, 2, 3, 4)).shape
    torch.Size([1, 2, 3, 4])
    """

    def __init__(self, num_heads: int, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.num_heads = size(self, "num_heads", num_heads)
        self.weight = parameter(self.num_heads, device=device, dtype=dtype)
        self.reset_parameters()

    def forward(self, heads: Tensor) -> Tensor:
        """Return outputs (B, H, L, D)."""
        heads = floats(self, "heads", heads, "B", self.num_heads, "L", "D")
        return heads * self.weight.to(heads.dtype).view(-1, 1, 1)

    def reset_parameters(self) -> None:
        """Reset the factors to 1."""
        nn.init.ones_(self.weight)

    def extra_repr(self) -> str:
        """Return the number of heads."""
        return f"{self.num_heads}"


@mechanism(
    formula="y ↦ σ(x W_g) ⊙ y",
    sources=("qiu2025",),
    learned="W_g (H·D, E) or (H, E), bias",
    cost="O(L·E²)",
)
class OutputGate(Layer):
    """Gated attention: multiply the heads' outputs by ``sigmoid(x W_g)`` (Qiu 2025, arXiv 2505.06708).

    The gate depends on the query's row, and comes before the output projection, as in Qwen3-Next.

    Parameters
    ----------
    embed_dim, num_heads, head_dim : int
        Width E of rows, number of heads H and their width D.
    scope : {"channel", "head"}, default "channel"
        Whether each of the H·D channels has a gate, or each head.
    bias : bool, default True
        Whether the gates have a bias, 0 at first.
    device, dtype : optional
        Of the parameters of ``gate``, a linear layer.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import OutputGate
    >>> OutputGate(8, 2, 4, "head")(torch.ones(1, 2, 3, 4), torch.zeros(1, 3, 8))[0, 0, 0]
    tensor([0.5000, 0.5000, 0.5000, 0.5000], grad_fn=<SelectBackward0>)
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        head_dim: int,
        scope: GateScope = "channel",
        *,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads = size(self, "embed_dim", embed_dim), size(self, "num_heads", num_heads)
        self.head_dim, self.scope = size(self, "head_dim", head_dim), OneOf(get_args(GateScope))(self, "scope", scope)
        gates = self.num_heads * (self.head_dim if scope == "channel" else 1)
        self.gate = nn.Linear(self.embed_dim, gates, bias=bias, device=device, dtype=dtype)
        self.reset_parameters()

    def forward(self, heads: Tensor, x: Tensor) -> Tensor:
        """Return outputs (B, H, L, D), gated by the layer's input rows (B, L, E)."""
        heads = floats(self, "heads", heads, "B", self.num_heads, "L", self.head_dim)
        x = floats(self, "x", x, heads.shape[0], heads.shape[2], self.embed_dim)
        return heads * self.gate(x).sigmoid().unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def reset_parameters(self) -> None:
        """Re-initialize the weight by Glorot's rule and set the bias to 0."""
        draw_linear(self.gate)

    def extra_repr(self) -> str:
        """Return the sizes and the scope."""
        return f"{self.embed_dim}, {self.num_heads}, {self.head_dim}, {self.scope!r}"
