"""Differential attention: the difference of two softmaxes, which cancels what both see."""

from __future__ import annotations

import math
from typing import Any, Literal, Unpack, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._utils.constraints import OneOf, count, flag, positive
from regard._utils.errors import rejected
from regard._utils.mechanism import mechanism
from regard.engines.aux import AuxRequest
from regard.masks import MaskLike
from regard.nn._base import non_default, parameter
from regard.nn.heads.self_attention import HeadOptions, SelfAttention
from regard.nn.positions.encodings import wide

#: Which heads make a pair.
Pairing = Literal["adjacent", "halves"]

#: Standard deviation of the initial vectors of λ.
_STD = 0.1


@mechanism(
    formula="(1 − λ₀) RMS_h((softmax(Q₁K₁ᵀ / √D) − λ softmax(Q₂K₂ᵀ / √D)) V) W_O, λ = exp(a₁·b₁) − exp(a₂·b₂) + λ₀",
    sources=("ye2024",),
    learned="W_QKV ((H + 2·G)·D, E), W_O (E, H·D), a₁, b₁, a₂, b₂ (D), biases",
    cost="O(L·E² + L²·E)",
    cache="2·G·D per token",
)
class DifferentialAttention(SelfAttention):
    """Self-attention with differences of softmaxes as weights (Ye 2024, arXiv 2410.05258).

    H heads of width D make H/2 pairs. A pair has two sets of queries and keys of width D, and values of width 2·D::

        y = (1 − λ₀) · RMS((softmax(Q₁K₁ᵀ / √D) − λ · softmax(Q₂K₂ᵀ / √D)) V)
        λ = exp(a₁·b₁) − exp(a₂·b₂) + λ₀        λ₀ = 0.8 − 0.6 · exp(−0.3 · depth)

    RMS divides each row of a pair by its root mean square over the 2·D features. Weights may be negative and sum to
    1 − λ. With as many heads of this width as :class:`SelfAttention` has, the layer has as many projections; the paper
    counts pairs, and halves their number. There is no dropout of weights: the paper does not define it.

    The engine computes H softmaxes over values of width 2·D. Fields of an :class:`~regard.Aux` are theirs: the first
    softmax of each pair, and then the second of each.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of heads H, which is even.
    depth : int, default 0
        Index of the layer in its model, from 0. (The paper counts from 1 and subtracts 1.)
    pairing : {"adjacent", "halves"}, default "adjacent"
        Pairs are heads (0, 1), (2, 3) and so on, as in the paper's code, or heads h and h + H/2, as in transformers'
        DiffLlama; key–value heads likewise. The two differ by a permutation of the projections' rows.
    num_kv_heads, head_dim, bias, out_bias, rotary, engine, device, dtype : optional
        See :class:`SelfAttention`; ``num_kv_heads`` is even.
    norm_weight : bool, default False
        Whether rows are multiplied by learned ``norm.weight`` (2·D,) after RMS, as in the paper's code. transformers
        does not.
    norm_eps : float, default 1e-5
        Added to the mean square.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import DifferentialAttention, KVCache, Rotary
    >>> layer = DifferentialAttention(16, 4, depth=1, num_kv_heads=2, rotary=Rotary(4)).eval()
    >>> x, cache = torch.randn(3, 5, 16), KVCache()
    >>> steps = [layer(t, cache=cache) for t in x.split(1, 1)]
    >>> torch.allclose(torch.cat(steps, 1), layer(x, is_causal=True), atol=1e-5)
    True
    >>> round(layer.lambda_init, 3)
    0.356
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        depth: int = 0,
        pairing: Pairing = "adjacent",
        norm_weight: bool = False,
        norm_eps: float = 1e-5,
        device: Any = None,
        dtype: Any = None,
        **options: Unpack[HeadOptions],
    ) -> None:
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(embed_dim, num_heads, **where, **options)
        name = type(self).__name__
        self.depth = count(self, "depth", depth)
        self.pairing = OneOf(get_args(Pairing))(self, "pairing", pairing)
        flag(self, "norm_weight", norm_weight)
        for argument, given in (("num_heads", self.num_heads), ("num_kv_heads", self.num_kv_heads)):
            if given % 2:
                raise rejected(name, argument, "be even: heads are in pairs", given)
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * self.depth)
        for each in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            self.register_parameter(each, parameter(self.head_dim, **where))
        self.norm_eps = positive(self, "norm_eps", norm_eps)
        self.norm = nn.RMSNorm(2 * self.head_dim, eps=self.norm_eps, elementwise_affine=norm_weight, **where)
        self._reset_lambda()

    @property
    def lambda_(self) -> Tensor:
        """The factor λ of the second softmax, ()."""
        first, second = (
            (getattr(self, f"lambda_q{i}").to(self._wide) * getattr(self, f"lambda_k{i}").to(self._wide)).sum().exp()
            for i in (1, 2)
        )
        return first - second + self.lambda_init

    @property
    def _wide(self) -> torch.dtype:
        return wide(self.out.weight.dtype)

    def _is_plain_step(self, q: Tensor, mask: MaskLike | None, is_causal: bool, request: AuxRequest | None) -> bool:  # noqa: ARG002
        return False

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: MaskLike | None,
        is_causal: bool,
        request: AuxRequest | None,
        offset: Tensor | None = None,
    ) -> Any:
        """Return the pairs' outputs (B, H/2, L, 2·D), and the requested auxiliary outputs."""
        values = torch.cat([self._split(v, 0), self._split(v, 1)], -1)
        if self.pairing == "adjacent":
            q, k = (torch.cat([self._split(rows, 0), self._split(rows, 1)], 1) for rows in (q, k))
        answer = super()._attend(q, k, values.repeat(1, 2, 1, 1), mask, is_causal, request, offset)
        both, aux = (answer, None) if request is None else answer
        first, second = both.to(wide(both.dtype)).chunk(2, 1)
        rows = first - self.lambda_.to(first.dtype) * second
        weight = None if self.norm.weight is None else self.norm.weight.to(rows.dtype)
        rows = F.rms_norm(rows, (2 * self.head_dim,), weight, self.norm_eps)
        rows = (rows * (1 - self.lambda_init)).to(both.dtype)
        return rows if aux is None else (rows, aux)

    def _split(self, rows: Tensor, which: int) -> Tensor:
        """Return the first or the second head (B, H/2, L, D) of each pair."""
        return rows[:, which::2] if self.pairing == "adjacent" else rows.chunk(2, 1)[which]

    def reset_parameters(self) -> None:
        """Re-initialize the projections by Glorot's rule, and the vectors of λ with standard deviation 0.1."""
        super().reset_parameters()
        if "norm" in self._modules:  # the base class calls this before it exists
            self.norm.reset_parameters()
            self._reset_lambda()

    def _reset_lambda(self) -> None:
        for each in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            nn.init.normal_(self.get_parameter(each), std=_STD)

    def extra_repr(self) -> str:
        """Return the sizes and the settings that differ from the defaults."""
        own = [f"depth={self.depth}", *non_default(self, "pairing", "adjacent")]
        return ", ".join([super().extra_repr(), *own])
