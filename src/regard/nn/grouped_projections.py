"""The projections of self-attention: one product makes queries, and fewer keys and values, as many as there are groups.

Dimensions: B batch, L rows, E width, H heads, G groups, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from regard._constraints import size
from regard._errors import rejected
from regard.nn._layer import Layer
from regard.nn._parts import unusual
from regard.nn.context import SequenceContext


class GroupedProjections(Layer):
    """What layers of self-attention share: matrices to queries, keys and values, and from the heads' outputs.

    Head h reads the keys and values of group ``h // (H/G)`` (Ainslie 2023, arXiv 2305.13245). How it weighs them is for
    a subclass to say.

    Parameters
    ----------
    embed_dim, num_heads : int
        E and H.
    num_kv_heads : int, optional
        G, which divides H; H by default.
    head_dim : int, optional
        D; E/H by default.
    bias : bool, default True
        Whether the projections to queries, keys and values have one.
    out_bias : bool, optional
        Whether the projection of the heads' outputs has one; as ``bias`` by default.
    device, dtype : optional
        Of the parameters.

    Attributes
    ----------
    context : SequenceContext, optional
        Who divides the sequence among processes (:class:`regard.distributed.ContextParallel`). None by default.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        E, H, name = size(self, "embed_dim", embed_dim), size(self, "num_heads", num_heads), type(self).__name__
        self.num_kv_heads = H if num_kv_heads is None else size(self, "num_kv_heads", num_kv_heads)
        if H % self.num_kv_heads:
            raise rejected(name, "num_kv_heads", f"divide num_heads {H}", num_kv_heads)
        if head_dim is None and E % H:
            raise rejected(name, "num_heads", f"divide embed_dim {E}", H)
        self.embed_dim, self.num_heads = E, H
        self.head_dim = E // H if head_dim is None else size(self, "head_dim", head_dim)
        self.context: SequenceContext | None = None
        where = {"device": device, "dtype": dtype}
        self.qkv: nn.Module = nn.Linear(E, (H + 2 * self.num_kv_heads) * self.head_dim, bias=bias, **where)
        self.out = nn.Linear(H * self.head_dim, E, bias=bias if out_bias is None else out_bias, **where)

    def reset_parameters(self) -> None:
        """Draw the matrices anew by Glorot's rule; biases are 0."""
        assert isinstance(self.qkv, nn.Linear)
        for layer in (self.qkv, self.out):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def projected(self, x: Tensor, turn: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, H, L, D), keys and values (B, G, L, D) of rows (B, L, E); ``turn`` maps the first two."""
        B, L, _ = x.shape
        made = self.qkv(x)
        if isinstance(made, tuple):  # of SplitProjection; there may be fewer heads than the layer has
            q, k, v = (each.view(B, L, -1, self.head_dim).transpose(1, 2) for each in made)
            return (q, k, v) if turn is None else (turn(q), turn(k), v)
        H, G = self.num_heads, self.num_kv_heads
        heads = made.view(B, L, -1, self.head_dim).transpose(1, 2)
        if turn is None:
            q, k, v = heads.split((H, G, G), 1)
            return q, k, v
        turned, v = heads.split((H + G, G), 1)  # one turn for both
        q, k = turn(turned).split((H, G), 1)
        return q, k, v

    @property
    def rows(self) -> tuple[int, int, int]:
        """How many rows of ``qkv.weight`` make queries, keys and values; they stand in this order."""
        keys = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, keys, keys

    def split_projection(self) -> None:
        """Let three layers project to queries, keys and values, each of which can be divided by heads.

        ``qkv`` becomes a :class:`SplitProjection` with the same numbers; the layer computes the same.
        """
        if isinstance(self.qkv, nn.Linear):
            self.qkv = SplitProjection(self.qkv, self.rows)

    def extra_repr(self) -> str:
        """Return the sizes, and which are not the default."""
        settings = [f"embed_dim={self.embed_dim}", f"num_heads={self.num_heads}"]
        usual = {"num_kv_heads": self.num_heads, "head_dim": self.embed_dim // self.num_heads}
        return ", ".join([*settings, *(each for name, value in usual.items() for each in unusual(self, name, value))])


class SplitProjection(nn.Module):
    """What one layer made, by three: rows of queries, of keys and of values.

    Parameters
    ----------
    whole : Linear
        Whose numbers it has, without a copy where they are on the meta device.
    rows : tuple of int
        How many rows of its weight each of the three gets, in order.
    """

    def __init__(self, whole: nn.Linear, rows: tuple[int, int, int]) -> None:
        super().__init__()
        for name, weight, bias in zip("qkv", whole.weight.split(rows), self._split(whole.bias, rows)):
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
            layer.weight = nn.Parameter(weight.detach().clone(), whole.weight.requires_grad)
            if bias is not None:
                layer.bias = nn.Parameter(bias.detach().clone(), whole.bias.requires_grad)
            self.add_module(name, layer)

    @staticmethod
    def _split(bias: Tensor | None, rows: tuple[int, int, int]) -> tuple[Tensor | None, ...]:
        return (None, None, None) if bias is None else bias.split(rows)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the rows (..., H·D), (..., G·D) and (..., G·D) of rows (..., E)."""
        return tuple(layer(x) for layer in self.children())
