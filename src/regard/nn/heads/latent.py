"""Multi-head latent attention: keys and values of all heads are linear in one short latent per position."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, TypedDict, overload

import torch
from torch import Tensor, nn

from regard._utils.constraints import count, flag, floats, positive, probability, size
from regard._utils.errors import rejected
from regard._utils.mechanism import mechanism
from regard.engines import EngineLike
from regard.engines.aux import Aux, AuxRequest
from regard.functional import attention
from regard.masks import MaskLike
from regard.nn._base import Layer, draw_linear
from regard.nn.heads.causal import appended
from regard.nn.heads.options import in_wider
from regard.nn.kv_cache import StepCache, cached_steps
from regard.nn.positions.rotary import Rotary, Rotation

# Dimensions: B batch, L rows, S keys, E width, H heads, D width of a head's own keys, V of its values, R width of the
# rotary key that heads share, C width of a latent.


class LatentOptions(TypedDict, total=False):
    """Optional keyword arguments of :class:`MultiheadLatentAttention`."""

    value_dim: int | None
    rotary_dim: int | None
    query_latent_dim: int | None
    mscale: float
    scale_latents: bool
    bias: bool
    eps: float
    dropout: float
    engine: EngineLike


@mechanism(
    formula="concat_h softmax([q_h; R(q'_h)] [W_hᴷ c; R(W_R x)]ᵀ / √(D+R)) W_hⱽ c · W_O, c = rms(W_C x)",
    sources=("deepseek2024",),
    learned="W_C (C, E), W_R (R, E), W_Kⱽ (H·(D+V), C), W_Q (H·(D+R), E) or two factors, W_O (E, H·V), norms",
    cost="O(L·E·C + L·C·H·(D+V) + L²·H·(D+R+V)); O(S·H·(2·C+R)) for a step with cached latents",
    cache="C + R per token",
)
class MultiheadLatentAttention(Layer):
    """Multi-head latent attention (MLA): the cache holds one latent per position instead of keys and values.

    The latent of a position is ``c = rms(W_C x)``, of width C. Head h has the key ``[W_hᴷ c; R(W_R x)]``, whose second
    part is rotated and the same for all heads, and the value ``W_hⱽ c`` (DeepSeek-AI 2024, arXiv 2405.04434). The scale
    is ``mscale² / √(D+R)``. A cache keeps C + R numbers per position.

    For one step, or few, multiplying the queries by ``W_hᴷ`` and the outputs by ``W_hⱽ`` is cheaper than computing all
    keys and values from their latents: ``q · W_hᴷ c = (W_hᴷᵀ q) · c``. With a cache, the layer does so whenever it
    takes fewer multiplications. The two ways differ by rounding.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of heads H.
    latent_dim : int
        Width C of a latent (``kv_lora_rank`` in Hugging Face's configs).
    head_dim : int
        Width D of the part of a query and a key that belongs to a head and is not rotated (``qk_nope_head_dim``).
    value_dim : int, optional
        Width V of a head's values (``v_head_dim``); defaults to D.
    rotary : Rotary, optional
        Rotary encoding of the other part (DeepSeek's checkpoints use ``interleaved=True``).
    rotary_dim : int, optional
        Width R of that part (``qk_rope_head_dim``); defaults to the width of ``rotary``, or 0. Without ``rotary`` it is
        not rotated, as in Kimi Linear.
    query_latent_dim : int, optional
        Width of a latent from which queries are computed (``q_lora_rank``); by default they are linear in x.
    mscale : float, default 1.0
        Factor of queries and keys for sequences longer than in training: for YaRN, ``0.1 · mscale_all_dim · ln(factor)
        + 1``. Scores are multiplied by its square. Use it instead of a factor of the cosines, not in addition.
    scale_latents : bool, default False
        Whether to multiply the latents by ``√(E/C)``, and those of queries by ``√(E/query_latent_dim)``, as
        LongCat-Flash does (``mla_scale_kv_lora``, ``mla_scale_q_lora``).
    bias : bool, default False
        Whether the projections to latents and the output projection have a bias.
    eps : float, default 1e-6
        Of the norms of latents.
    dropout : float, default 0.0
        Probability of dropping a weight, in training.
    engine : str or Engine, default "auto"
    device, dtype : optional
        Device and dtype of the parameters.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import KVCache, MultiheadLatentAttention, Rotary
    >>> layer = MultiheadLatentAttention(32, 4, latent_dim=12, head_dim=8, rotary=Rotary(4, interleaved=True)).eval()
    >>> x, cache = torch.randn(3, 5, 32), KVCache()
    >>> whole = layer(x, is_causal=True)
    >>> with torch.no_grad():
    ...     steps = [layer(t, cache=cache) for t in x.split(1, 1)]
    >>> torch.allclose(torch.cat(steps, 1), whole, atol=1e-5)
    True
    >>> cache.key.shape, cache.value.shape  # 12 + 4 numbers per position, instead of 4 · (12 + 8)
    (torch.Size([3, 1, 5, 16]), torch.Size([3, 1, 5, 0]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        latent_dim: int,
        head_dim: int,
        value_dim: int | None = None,
        rotary: Rotary | None = None,
        rotary_dim: int | None = None,
        query_latent_dim: int | None = None,
        mscale: float = 1.0,
        scale_latents: bool = False,
        bias: bool = False,
        eps: float = 1e-6,
        dropout: float = 0.0,
        engine: EngineLike = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads = size(self, "embed_dim", embed_dim), size(self, "num_heads", num_heads)
        self.latent_dim, self.head_dim = size(self, "latent_dim", latent_dim), size(self, "head_dim", head_dim)
        self.value_dim = self.head_dim if value_dim is None else size(self, "value_dim", value_dim)
        width = 0 if rotary is None else rotary.head_dim
        self.rotary_dim = width if rotary_dim is None else count(self, "rotary_dim", rotary_dim)
        if rotary is not None and self.rotary_dim != width:
            raise rejected(type(self).__name__, "rotary_dim", f"be the width of rotary, {width}", self.rotary_dim)
        self.rotary = rotary
        self.query_latent_dim = None if query_latent_dim is None else size(self, "query_latent_dim", query_latent_dim)
        self.mscale, self.eps = positive(self, "mscale", mscale), positive(self, "eps", eps)
        self.scale_latents = flag(self, "scale_latents", scale_latents)
        self.dropout, self.engine = probability(self, "dropout", dropout), engine
        flag(self, "bias", bias)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        E, H, C, rank = self.embed_dim, self.num_heads, self.latent_dim, self.query_latent_dim
        width = H * (self.head_dim + self.rotary_dim)
        if rank is None:
            self.query = nn.Linear(E, width, bias=False, **where)
        else:
            self.query_latent = nn.Linear(E, rank, bias=bias, **where)
            self.query_norm = nn.RMSNorm(rank, self.eps, **where)
            self.query = nn.Linear(rank, width, bias=False, **where)
        self.latent = nn.Linear(E, C + self.rotary_dim, bias=bias, **where)
        self.latent_norm = nn.RMSNorm(C, self.eps, **where)
        self.key_value = nn.Linear(C, H * (self.head_dim + self.value_dim), bias=False, **where)
        self.out = nn.Linear(H * self.value_dim, E, bias=bias, **where)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Re-initialize the weights by Glorot's rule, biases to 0 and norms to 1."""
        draw_linear(self)
        for each in self.modules():
            if isinstance(each, nn.RMSNorm | nn.LayerNorm):
                each.reset_parameters()

    @property
    def scale(self) -> float:
        """The factor of dot products, ``mscale² / √(D+R)``."""
        return float(self.mscale**2 * (self.head_dim + self.rotary_dim) ** -0.5)

    @overload
    def forward(self, x: Tensor, attn_mask: MaskLike | None = ..., *, is_causal: bool = ..., rotation: Rotation | None = ..., cache: StepCache | None = ..., return_aux: None = ...) -> Tensor: ...  # noqa: E501  # fmt: skip
    @overload
    def forward(self, x: Tensor, attn_mask: MaskLike | None = ..., *, is_causal: bool = ..., rotation: Rotation | None = ..., cache: StepCache | None = ..., return_aux: AuxRequest) -> tuple[Tensor, Aux]: ...  # noqa: E501  # fmt: skip
    def forward(
        self,
        x: Tensor,
        attn_mask: MaskLike | None = None,
        *,
        is_causal: bool = False,
        rotation: Rotation | None = None,
        cache: StepCache | None = None,
        return_aux: AuxRequest | None = None,
    ) -> Tensor | tuple[Tensor, Aux]:
        """Return rows (B, L, E), and the requested auxiliary outputs.

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
            Latents and rotary keys of earlier steps, (B, 1, N, C + R), as its keys; its values have width 0. Those of
            ``x`` are appended.
        return_aux : AuxRequest, optional
            Auxiliary outputs to return, per head.
        """
        x = floats(self, "x", x, "B", "L", self.embed_dim)
        before = cached_steps(self, cache)
        rotation = self._rotation(x, rotation, before)
        query = self._queries(self._query_input(x), rotation)
        rows = self._rows(x, rotation)
        if cache is not None:
            rows = appended(cache, rows, rows[..., :0])[0]
        try:
            found: Any = self._attend(query, rows, attn_mask, is_causal, return_aux)
        except BaseException:
            if cache is not None:  # undo the append, so that the call can be retried
                with suppress(ValueError):  # impossible in a full window, which was overwritten
                    cache.truncate(before)
            raise
        if return_aux is None:
            return self._output(found)
        return self._output(found[0]), found[1]

    def _rotation(self, x: Tensor, rotation: Rotation | None, before: int) -> Rotation | None:
        if self.rotary is None or rotation is not None:
            return rotation
        return self.rotary.rotation(torch.arange(before, before + x.shape[1], device=x.device), x.dtype)

    def _query_input(self, x: Tensor) -> Tensor:
        """Return what queries are linear in: x, or its latents for queries."""
        if self.query_latent_dim is None:
            return x
        latent = in_wider(self.query_norm, self.query_latent(x))
        return latent * (self.embed_dim / self.query_latent_dim) ** 0.5 if self.scale_latents else latent

    def _queries(self, latent: Tensor, rotation: Rotation | None) -> Tensor:
        """Return the queries (B, H, L, D + R)."""
        query: Tensor = self.query(latent).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        if self.rotary is None:
            return query
        assert rotation is not None
        own, shared = query.split((self.head_dim, self.rotary_dim), -1)
        return torch.cat((own, self.rotary.turn(shared, rotation)), -1)

    def _rows(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        """Return what a cache keeps: latents and rotary keys (B, 1, L, C + R)."""
        latent, shared = self.latent(x).unsqueeze(1).split((self.latent_dim, self.rotary_dim), -1)
        latent = in_wider(self.latent_norm, latent)
        if self.scale_latents:
            latent = latent * (self.embed_dim / self.latent_dim) ** 0.5
        if self.rotary is not None:
            assert rotation is not None
            shared = self.rotary.turn(shared, rotation)
        return torch.cat((latent, shared), -1)

    def _absorbs(self, L: int, S: int) -> bool:
        """Whether comparing queries with latents takes fewer multiplications than computing keys and values."""
        D, V, R, C = self.head_dim, self.value_dim, self.rotary_dim, self.latent_dim
        return L * S * (2 * C + R) + L * C * (D + V) < S * C * (D + V) + L * S * (D + R + V)

    def _attend(
        self, query: Tensor, rows: Tensor, mask: MaskLike | None, is_causal: bool, request: AuxRequest | None
    ) -> Any:
        """Return the heads' outputs (B, H, L, V), and the requested auxiliary outputs."""
        settings: dict[str, Any] = {
            "attn_mask": mask,
            "dropout_p": self.dropout if self.training else 0.0,
            "is_causal": is_causal,
            "scale": self.scale,
            "engine": self.engine,
            "return_aux": request,
        }
        if not self._absorbs(query.shape[2], rows.shape[2]):
            return attention(query, *self._keys_and_values(rows), **settings)
        # Sums of whole rows, whose rotary keys are then dropped: kernels are made for values as wide as keys.
        inner = self._absorbed(query)
        if _is_step(inner, mask, is_causal, request) and not settings["dropout_p"]:
            # The heads are rows that share their keys: one product for all of them.
            found = attention(inner.transpose(1, 2), rows, rows, mask, scale=self.scale, engine=self.engine)
            return self._valued(found.transpose(1, 2))
        found = attention(inner, rows, rows, enable_gqa=True, **settings)
        return self._valued(found) if request is None else (self._valued(found[0]), found[1])

    def _keys_and_values(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys (B, H, S, D + R) and values (B, H, S, V) of latents and rotary keys (B, 1, S, C + R)."""
        latent, shared = rows.split((self.latent_dim, self.rotary_dim), -1)
        both = self.key_value(latent.squeeze(1)).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        own, value = both.split((self.head_dim, self.value_dim), -1)
        if not self.rotary_dim:
            return own, value
        return torch.cat((own, shared.expand(-1, self.num_heads, -1, -1)), -1), value

    def _weights(self) -> tuple[Tensor, Tensor]:
        """Return the matrices (H, D, C) and (H, V, C) that make keys and values from latents."""
        weight = self.key_value.weight.view(self.num_heads, -1, self.latent_dim)
        key, value = weight.split((self.head_dim, self.value_dim), 1)
        return key, value

    def _absorbed(self, query: Tensor) -> Tensor:
        """Return queries (B, H, L, C + R) that compare with latents and rotary keys."""
        own, shared = query.split((self.head_dim, self.rotary_dim), -1)
        return torch.cat((_by_head(own, self._weights()[0]), shared), -1)

    def _valued(self, read: Tensor) -> Tensor:
        """Return sums of values (B, H, L, V) from sums of latents and rotary keys (B, H, L, C + R)."""
        return _by_head(read[..., : self.latent_dim], self._weights()[1].transpose(1, 2))

    def _output(self, heads: Tensor) -> Tensor:
        projected: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        return projected

    def extra_repr(self) -> str:
        """Return the sizes and the settings that differ from the defaults."""
        sizes = [
            f"{name}={getattr(self, name)}"
            for name in ("embed_dim", "num_heads", "latent_dim", "head_dim", "value_dim", "rotary_dim")
        ]
        usual = {"query_latent_dim": None, "mscale": 1.0, "scale_latents": False, "dropout": 0.0, "engine": "auto"}
        return ", ".join(
            [
                *sizes,
                *(f"{name}={getattr(self, name)!r}" for name, each in usual.items() if getattr(self, name) != each),
            ]
        )


def _is_step(query: Tensor, mask: MaskLike | None, is_causal: bool, request: AuxRequest | None) -> bool:
    """Whether this is one query per sequence, with at most a key padding mask."""
    marked = mask is None or (type(mask) is Tensor and mask.dtype == torch.bool and mask.shape[1:-1] == (1, 1))
    return query.shape[2] == 1 and marked and not is_causal and request is None


def _by_head(rows: Tensor, weight: Tensor) -> Tensor:
    """Return ``rows[:, h] @ weight[h]`` of rows (B, H, L, M) and weights (H, M, N), reading each weight once."""
    B, H, L, M = rows.shape
    product = torch.bmm(rows.transpose(0, 1).reshape(H, B * L, M), weight)
    return product.view(H, B, L, weight.shape[-1]).transpose(0, 1)
