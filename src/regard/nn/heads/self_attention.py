"""Self-attention for language models: grouped queries, rotary positions, KV caches, context parallelism."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as torch_attention  # bound once: users replace it

from regard._utils.constraints import OneOf, floats, probability, size
from regard._utils.errors import rejected
from regard._utils.mechanism import mechanism
from regard.engines import EngineLike
from regard.engines.aux import Aux, AuxRequest
from regard.functional import attention
from regard.masks import MaskLike
from regard.nn._base import Layer, PartLayer, non_default, resolve_part
from regard.nn.heads.scored import ScoredAttention
from regard.nn.kv_cache import StepCache
from regard.nn.positions.rotary import Rotary, Rotation
from regard.normalizers import NormalizerLike
from regard.scores import ScoreLike

# Context parallelism, as layers see it --------------------------------------------------------------------------------


class SequenceContext(Protocol):
    """The interface of context parallelism: each process runs the same layers on its slice of the sequence.

    :class:`regard.distributed.ContextParallel` implements it. Masks cover the whole sequence, all other tensors the
    slice.
    """

    @property
    def size(self) -> int:
        """Number of processes that share the sequence equally."""

    @property
    def attend(self) -> Any:
        """The replacement of :func:`regard.attention`, with its signature, for the slices of all processes."""

    def positions(self, length: int, device: torch.device | str | None = None) -> Tensor:
        """Return the positions (length / size,) of this process in a sequence of this length."""


# The projections of self-attention: one matrix for queries, keys and values, with fewer key–value heads than queries
# Dimensions: B batch, L rows, E width, H heads, G groups, D width of a head.


class GroupedProjections(Layer):
    """Base of self-attention layers: the query, key and value projections, and the output projection.

    Head h reads the keys and values of group ``h // (H/G)`` (Ainslie 2023, arXiv 2305.13245). Subclasses define the
    attention itself.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of heads H.
    num_kv_heads : int, optional
        Number of key–value heads G, which divides H; defaults to H.
    head_dim : int, optional
        Width D of a head; defaults to E/H.
    bias : bool, default True
        Whether the query, key and value projections have a bias.
    out_bias : bool, optional
        Whether the output projection has a bias; defaults to ``bias``.
    device, dtype : optional
        Device and dtype of the parameters.

    Attributes
    ----------
    context : SequenceContext, optional
        Context parallelism (:class:`regard.distributed.ContextParallel`), if any. None by default.
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
        """Re-initialize the weights by Glorot's rule and set biases to 0."""
        assert isinstance(self.qkv, nn.Linear)
        for layer in (self.qkv, self.out):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def projected(self, x: Tensor, turn: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, H, L, D), keys and values (B, G, L, D) of rows (B, L, E); ``turn`` rotates q and k."""
        B, L, _ = x.shape
        qkv = self.qkv(x)
        if isinstance(qkv, tuple):  # from SplitProjection, which may hold a subset of the heads
            q, k, v = (each.view(B, L, -1, self.head_dim).transpose(1, 2) for each in qkv)
            return (q, k, v) if turn is None else (turn(q), turn(k), v)
        H, G = self.num_heads, self.num_kv_heads
        heads = qkv.view(B, L, -1, self.head_dim).transpose(1, 2)
        if turn is None:
            q, k, v = heads.split((H, G, G), 1)
            return q, k, v
        turned, v = heads.split((H + G, G), 1)  # rotate both at once
        q, k = turn(turned).split((H, G), 1)
        return q, k, v

    @property
    def rows(self) -> tuple[int, int, int]:
        """Number of rows of ``qkv.weight`` for queries, keys and values, in this order."""
        keys = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, keys, keys

    def split_projection(self) -> None:
        """Split ``qkv`` into separate query, key and value layers, each of which can be sharded by heads.

        ``qkv`` becomes a :class:`SplitProjection` with the same weights; the layer computes the same.
        """
        if isinstance(self.qkv, nn.Linear):
            self.qkv = SplitProjection(self.qkv, self.rows)

    def extra_repr(self) -> str:
        """Return the sizes that differ from the defaults."""
        settings = [f"embed_dim={self.embed_dim}", f"num_heads={self.num_heads}"]
        usual = {"num_kv_heads": self.num_heads, "head_dim": self.embed_dim // self.num_heads}
        return ", ".join(
            [*settings, *(each for name, value in usual.items() for each in non_default(self, name, value))]
        )


class SplitProjection(nn.Module):
    """A linear layer split by rows into three: for queries, keys and values.

    Parameters
    ----------
    whole : Linear
        The layer to split.
    rows : tuple of int
        Number of rows of its weight for each of the three, in order.
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


# Self-attention -------------------------------------------------------------------------------------------------------


@mechanism(
    formula="concat_h softmax(R(X W_Qʰ) R(X W_Kᵍ)ᵀ / √D) X W_Vᵍ · W_O",
    sources=("vaswani2017", "ainslie2023", "su2021"),
    learned="W_QKV ((H + 2·G)·D, E), W_O (E, H·D), biases",
    cost="O(L·E² + L²·E)",
)
class SelfAttention(PartLayer, GroupedProjections):
    """Multi-head self-attention of language models, with a fused query, key and value projection.

    Head h of width D is ``softmax(R(X W_Qʰ) R(X W_Kᵍ)ᵀ / √D) X W_Vᵍ`` (Vaswani 2017, arXiv 1706.03762), where R is the
    rotary encoding, if any (Su 2021, arXiv 2104.09864), and head h reads the keys of group ``g = h // (H/G)`` (Ainslie
    2023, arXiv 2305.13245). Masks are those of :func:`regard.attention`: True shows a pair. For cross-attention, or for
    the masks and parameter names of torch's module, use :class:`MultiheadAttention`.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of heads H.
    num_kv_heads : int, optional
        Number of key–value heads G, which divides H; defaults to H.
    head_dim : int, optional
        Width D of a head; defaults to E/H.
    bias : bool, default True
        Whether the query, key and value projections have a bias.
    out_bias : bool, optional
        Whether the output projection has a bias; defaults to ``bias``.
    dropout : float, default 0.0
        Probability of dropping a weight, in training.
    score : str, Score, callable or ScoredAttention, optional
        See :func:`regard.attention`; it compares rows of width D.
    normalizer : str or Normalizer, default "softmax"
    rotary : Rotary, optional
        Rotary encoding of queries and keys.
    qk_norm : {"rms"}, optional
        Divide the rows of queries and keys within each head by their root mean square, before they are rotated, and
        multiply by learned ``q_norm.weight`` and ``k_norm.weight`` (D,), as in ViT-22B (Dehghani 2023, arXiv
        2302.05442) and Qwen3.
    output_gate : {"channel"}, optional
        Multiply the heads' outputs by ``sigmoid(gate(x))``, with one gate for each of the H·D channels (gated
        attention; Qiu 2025, arXiv 2505.06708).
    engine : str or Engine, default "auto"
    device, dtype : optional
        Device and dtype of the parameters.

    Attributes
    ----------
    context : SequenceContext, optional
        Context parallelism (:class:`regard.distributed.ContextParallel`), if any: inputs are then this process's slice,
        and masks cover the whole sequence. None by default.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid.

    Examples
    --------
    >>> import torch
    >>> from regard import masks
    >>> from regard.nn import KVCache, Rotary, SelfAttention
    >>> layer = SelfAttention(16, 4, num_kv_heads=2, rotary=Rotary(4)).eval()
    >>> x, cache = torch.randn(3, 5, 16), KVCache()
    >>> whole = layer(x, masks.causal() & masks.window(2, 0))
    >>> steps = [layer(t, masks.window(2, 0, align="lower_right"), cache=cache) for t in x.split(1, 1)]
    >>> torch.allclose(torch.cat(steps, 1), whole, atol=1e-5)
    True
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
        dropout: float = 0.0,
        score: ScoreLike | ScoredAttention | None = None,
        normalizer: NormalizerLike = "softmax",
        rotary: Rotary | None = None,
        qk_norm: str | None = None,
        output_gate: str | None = None,
        engine: EngineLike = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        heads: dict[str, Any] = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "bias": bias, "out_bias": out_bias}
        super().__init__(embed_dim, num_heads, **heads, **where)
        self.dropout = probability(self, "dropout", dropout)
        self.score, self.normalizer, self.rotary, self.engine = score, normalizer, rotary, engine
        self.qk_norm = OneOf(("rms", None))(self, "qk_norm", qk_norm)
        self.output_gate = OneOf(("channel", None))(self, "output_gate", output_gate)
        self.q_norm, self.k_norm = (nn.RMSNorm(self.head_dim, eps=1e-6, **where) if qk_norm else None for _ in range(2))
        inner = self.num_heads * self.head_dim
        self.gate = nn.Linear(self.embed_dim, inner, bias=bias, **where) if output_gate else None
        self.reset_parameters()

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
            Keys and values of earlier steps; those of ``x`` are appended.
        return_aux : AuxRequest, optional
            Auxiliary outputs to return, per head.
        """
        x = floats(self, "x", x, "B", "L", self.embed_dim)
        if cache is not None and self.context is not None:
            raise rejected("SelfAttention", "cache", "be None under context parallelism", cache)
        before = 0 if cache is None else len(cache)
        turn = None
        if self.rotary is not None:
            if rotation is None:
                if self.context is None:
                    steps = torch.arange(before, before + x.shape[1], device=x.device)
                else:
                    steps = self.context.positions(x.shape[1] * self.context.size, x.device)
                rotation = self.rotary.rotation(steps, x.dtype)
            turn = partial(self.rotary.turn, rotation=rotation)
        q, k, v = self.projected(x, turn)
        if cache is not None:
            k, v = cache.append(k, v)
        try:
            prefix = None if cache is None else cache.prefix
            if self._is_plain_step(q, attn_mask, is_causal, return_aux):
                output: Any = _step(q, k, v, attn_mask, prefix)
            else:
                if prefix is not None:
                    k, v = (torch.cat([first.expand(len(x), -1, -1, -1), own], 2) for first, own in zip(prefix, (k, v)))
                    if isinstance(attn_mask, Tensor):  # it does not cover the prefix
                        attn_mask = F.pad(attn_mask, (prefix[0].shape[2], 0), value=True)
                output = self._attend(q, k, v, attn_mask, is_causal, return_aux)
        except BaseException:
            if cache is not None:  # undo the append, so that the call can be retried
                with suppress(ValueError):  # impossible in a full window, which was overwritten
                    cache.truncate(before)
            raise
        heads, aux = (output, None) if return_aux is None else output
        merged = heads.transpose(1, 2).flatten(2)
        rows: Tensor = self.out(merged if self.gate is None else merged * self.gate(x).sigmoid())
        return rows if aux is None else (rows, aux)

    def projected(self, x: Tensor, turn: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, H, L, D), keys and values (B, G, L, D) of rows (B, L, E); ``turn`` rotates q and k."""
        if self.q_norm is None or self.k_norm is None:
            return super().projected(x, turn)
        q, k, v = super().projected(x)
        q, k = self.q_norm(q), self.k_norm(k)
        return (q, k, v) if turn is None else (turn(q), turn(k), v)

    def _is_plain_step(self, q: Tensor, mask: MaskLike | None, is_causal: bool, request: AuxRequest | None) -> bool:
        """Whether this is one query per sequence, with the default parts and at most a key padding mask."""
        plain = self.score is None and self.normalizer == "softmax" and self.engine == "auto"
        marked = mask is None or (type(mask) is Tensor and mask.dtype == torch.bool and mask.shape[1:3] == (1, 1))
        alone = request is None and not is_causal and not (self.training and self.dropout) and self.context is None
        return q.shape[2] == 1 and plain and marked and alone

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: MaskLike | None, is_causal: bool, request: AuxRequest | None
    ) -> Any:
        """Return the heads' outputs (B, H, L, D), and the requested auxiliary outputs."""
        score = resolve_part(self.score.score() if isinstance(self.score, ScoredAttention) else self.score)
        attend = attention if self.context is None else self.context.attend
        return attend(
            q,
            k,
            v,
            mask,
            self.dropout if self.training else 0.0,
            is_causal,
            enable_gqa=self.num_kv_heads != self.num_heads,
            score=score,
            normalizer=resolve_part(self.normalizer),
            engine=self.engine,
            return_aux=request,
        )

    def reset_parameters(self) -> None:
        """Re-initialize the weights by Glorot's rule and set biases to 0."""
        super().reset_parameters()
        if isinstance(self.score, ScoredAttention):
            self.score.reset_parameters()
        if self.q_norm is not None and self.k_norm is not None:
            self.q_norm.reset_parameters()
            self.k_norm.reset_parameters()
        if self.gate is not None:
            nn.init.xavier_uniform_(self.gate.weight)
            if self.gate.bias is not None:
                nn.init.zeros_(self.gate.bias)

    def extra_repr(self) -> str:
        """Return the sizes and the settings that differ from the defaults."""
        usual: dict[str, Any] = {"dropout": 0.0, "score": None, "normalizer": "softmax", "engine": "auto"}
        usual |= {"qk_norm": None, "output_gate": None}
        return ", ".join(
            [super().extra_repr(), *(each for name, value in usual.items() for each in non_default(self, name, value))]
        )


def _step(q: Tensor, k: Tensor, v: Tensor, mask: Any, prefix: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return the outputs (B, H, 1, D) of one query per sequence, treating the heads of a group as rows.

    Parameters
    ----------
    q : Tensor (B, H, 1, D)
    k, v : Tensor (B, G, S, D)
    mask : Tensor (B, 1, 1, S) of bool, or None
    prefix : (Tensor, Tensor), optional
        Keys and values (1, G, P, D) shared by all sequences.
    """
    B, H, _, D = q.shape
    G = k.shape[1]
    rows = q.view(B, G, H // G, D) if q.is_contiguous() else q.reshape(B, G, H // G, D)
    if prefix is not None:
        return _shared_step(rows, k, v, mask, *prefix).reshape(B, H, 1, D)
    output = attention(rows, k, v) if mask is None else torch_attention(rows, k, v, mask)
    return output.reshape(B, H, 1, D)


def _shared_step(rows: Tensor, k: Tensor, v: Tensor, mask: Any, first_k: Tensor, first_v: Tensor) -> Tensor:
    """Return outputs (B, G, R, D) over a shared prefix and each sequence's own keys, with one softmax.

    One matrix product covers the rows of all sequences, so that the shared keys are read once.
    """
    B, G, R, D = rows.shape
    P = first_k.shape[2]
    together = rows.transpose(0, 1).reshape(G, B * R, D)
    shared = (together @ first_k[0].transpose(1, 2)).view(G, B, R, P).transpose(0, 1)
    own = rows @ k.transpose(2, 3)
    if mask is not None:
        own = own.masked_fill(~mask, -torch.inf)
    weights = (torch.cat([shared, own], -1) * D**-0.5).softmax(-1)  # (B, G, R, P + S)
    read = weights[..., :P].transpose(0, 1).reshape(G, B * R, P) @ first_v[0]
    return read.view(G, B, R, -1).transpose(0, 1) + weights[..., P:] @ v
