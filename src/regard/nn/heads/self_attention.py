"""Self-attention for language models: grouped queries, rotary positions, KV caches, context parallelism."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, TypedDict, get_args, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as torch_attention  # bound once: users replace it

from regard._utils.constraints import Number, OneOf, flag, floats, positive, probability, size
from regard._utils.errors import described, rejected, shape
from regard._utils.mechanism import mechanism
from regard.engines import EngineLike
from regard.engines.aux import Aux, AuxRequest
from regard.engines.local_linear import LocalLinear, as_order
from regard.functional import attention
from regard.masks import MaskLike, as_mask
from regard.nn._base import Layer, PartLayer, draw_linear, head_sizes, non_default, parameter, resolve_part
from regard.nn.heads.options import (
    ExclusiveOutput,
    GateScope,
    HeadScale,
    NormKind,
    OutputGate,
    QueryKeyNorm,
    ValueResidual,
)
from regard.nn.heads.scored import ScoredAttention
from regard.nn.kv_cache import KVCache, StepCache, cached_steps
from regard.nn.positions.disentangled import DisentangledPositions
from regard.nn.positions.rotary import HeadPositions, Rotation
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


class ProjectionOptions(TypedDict, total=False):
    """Keyword arguments that every layer with :class:`GroupedProjections` takes."""

    num_kv_heads: int | None
    head_dim: int | None
    bias: bool
    out_bias: bool | None


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
        E, H, self.head_dim = head_sizes(self, embed_dim, num_heads, head_dim)
        self.embed_dim, self.num_heads = E, H
        self.num_kv_heads = H if num_kv_heads is None else size(self, "num_kv_heads", num_kv_heads)
        if H % self.num_kv_heads:
            raise rejected(type(self).__name__, "num_kv_heads", f"divide num_heads {H}", num_kv_heads)
        self.context: SequenceContext | None = None
        where = {"device": device, "dtype": dtype}
        self.qkv: nn.Module = nn.Linear(E, (H + 2 * self.num_kv_heads) * self.head_dim, bias=bias, **where)
        self.out = nn.Linear(H * self.head_dim, E, bias=bias if out_bias is None else out_bias, **where)

    def reset_parameters(self) -> None:
        """Re-initialize the weights by Glorot's rule and set biases to 0."""
        draw_linear(self.qkv, self.out)

    def projected(self, x: Tensor, turn: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, H, L, D), keys and values (B, G, L, D) of rows (B, L, E); ``turn`` rotates q and k."""
        B, L, _ = x.shape
        qkv = self.qkv(x)
        if isinstance(qkv, tuple):  # from SplitProjection, which may hold a subset of the heads
            q, k, v = (each.view(B, L, each.shape[-1] // self.head_dim, self.head_dim).transpose(1, 2) for each in qkv)
            return (q, k, v) if turn is None else (turn(q), turn(k), v)
        H, G = self.num_heads, self.num_kv_heads
        heads = qkv.view(B, L, qkv.shape[-1] // self.head_dim, self.head_dim).transpose(1, 2)
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


class KeysValues(NamedTuple):
    """Keys and values of all rows that queries may see, for layers that share them.

    Attributes
    ----------
    key, value : Tensor (B, G, S, D)
        With norms and positions.
    prefix : (Tensor, Tensor), optional
        Those (1, G, P, D) of a prefix that all sequences share.
    offset : Tensor (B,) of int, optional
        Number of keys before the first query, those of a prefix included; by default, queries are the last keys.
    """

    key: Tensor
    value: Tensor
    prefix: tuple[Tensor, Tensor] | None = None
    offset: Tensor | None = None


class HeadOptions(ProjectionOptions, total=False):
    """Keyword arguments of :class:`SelfAttention` that layers derived from it take, too."""

    rotary: HeadPositions | None
    engine: EngineLike


#: How much of the own value is removed.
Exclusive = Literal["fixed", "learned"]

#: The default scale of cosines.
_COSINE_SCALE = 10.0


@mechanism(
    formula="concat_h softmax(R(X W_Qʰ) R(X W_Kᵍ)ᵀ / √D) X W_Vᵍ · W_O",
    sources=("vaswani2017", "ainslie2023", "su2021"),
    learned="W_QKV ((H + 2·G)·D, E), W_O (E, H·D), biases; those of the options",
    cost="O(L·E² + L²·E)",
    cache="2·G·D per token",
)
class SelfAttention(PartLayer, GroupedProjections):
    """Multi-head self-attention of language models, with a fused query, key and value projection.

    Head h of width D is ``softmax(R(X W_Qʰ) R(X W_Kᵍ)ᵀ / √D) X W_Vᵍ`` (Vaswani 2017, arXiv 1706.03762), where R is the
    rotary encoding, if any (Su 2021, arXiv 2104.09864), and head h reads the keys of group ``g = h // (H/G)`` (Ainslie
    2023, arXiv 2305.13245). Masks are those of :func:`regard.attention`: True shows a pair. For cross-attention, or for
    the masks and parameter names of torch's module, use :class:`MultiheadAttention`.

    What happens between scores and weights is a part: ``normalizer=SoftmaxSink(nn.Parameter(torch.zeros(H)))`` adds
    learned sinks, ``score=`` another comparison. What is done to rows before and after is an option, and a module.
    Options apply in this order: queries and keys are normalized, rotated and scaled; values are mixed with those of the
    first layer; outputs of heads lose the direction of the own value, are scaled, and gated. Engines keep their speed.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of heads H.
    num_kv_heads : int, optional
        Number of key–value heads G, which divides H; defaults to H.
    head_dim : int, optional
        Width D of a head; defaults to E/H.
    bias : bool, default True
        Whether the query, key and value projections have a bias, and the output gate.
    out_bias : bool, optional
        Whether the output projection has a bias; defaults to ``bias``.
    dropout : float, default 0.0
        Probability of dropping a weight, in training.
    score : str, Score, callable or ScoredAttention, optional
        See :func:`regard.attention`; it compares rows of width D.
    normalizer : str or Normalizer, default "softmax"
    rotary : Rotary or other HeadPositions, optional
        Positions of queries and keys, such as :class:`Rotary`.
    disentangled : DisentangledPositions, optional
        Biases of the distance between query and key, for heads of width D; queries are the last keys. Not under context
        parallelism.
    qk_norm : {"rms", "l2"} or QueryKeyNorm, optional
        Normalize queries and keys within each head, before they are rotated: see :class:`QueryKeyNorm`.
    scale : float, optional
        Factor of the scores. Defaults to 1/√D, and to 10 for ``qk_norm="l2"``; with a ``score``, to the score's own.
        With ``disentangled``, it is that of the positions.
    learn_scale : bool, default False
        Whether the factor is a parameter ``score_scale`` (H,), one for each head, with ``scale`` as initial value: a
        learned temperature. Only without a ``score``.
    softcap : float, optional
    order : int or LocalLinear, default 0
        See :func:`regard.attention`; not under context parallelism.
    exclusive : {"fixed", "learned"}, optional
        Remove the direction of a row's own value from its output, wholly or by a learned share of each head: exclusive
        self-attention; see :class:`ExclusiveOutput`.
    value_residual : bool, default False
        Mix values with those of the model's first layer, the argument ``first_values``: see :class:`ValueResidual`.
    head_scale : bool, default False
        Multiply each head's output by a learned number: see :class:`HeadScale`.
    output_gate : {"channel", "head"}, optional
        Multiply the heads' outputs by sigmoid gates, one for each of the H·D channels or for each head: gated
        attention; see :class:`OutputGate`.
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

    The attention of Qwen3-Next, and one of gpt-oss:

    >>> from regard.normalizers import SoftmaxSink
    >>> gated = SelfAttention(16, 4, bias=False, qk_norm="rms", output_gate="channel", rotary=Rotary(4, fraction=0.5))
    >>> sinks = SelfAttention(16, 4, normalizer=SoftmaxSink(torch.nn.Parameter(torch.zeros(4))), rotary=Rotary(4))
    >>> gated(x, is_causal=True).shape, sinks(x, is_causal=True).shape
    (torch.Size([3, 5, 16]), torch.Size([3, 5, 16]))
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
        rotary: HeadPositions | None = None,
        disentangled: DisentangledPositions | None = None,
        qk_norm: NormKind | QueryKeyNorm | None = None,
        scale: float | None = None,
        learn_scale: bool = False,
        softcap: float | None = None,
        order: int | LocalLinear = 0,
        exclusive: Exclusive | None = None,
        value_residual: bool = False,
        head_scale: bool = False,
        output_gate: GateScope | None = None,
        engine: EngineLike = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(
            embed_dim, num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, bias=bias, out_bias=out_bias, **where
        )
        name, H, D = type(self).__name__, self.num_heads, self.head_dim
        self.dropout = probability(self, "dropout", dropout)
        self.score, self.normalizer, self.rotary, self.engine = score, normalizer, rotary, engine
        self.scale = None if scale is None else Number(note=" or None")(self, "scale", scale)
        self.softcap = None if softcap is None else positive(self, "softcap", softcap)
        as_order(order)  # checks it
        self.order = order
        if flag(self, "learn_scale", learn_scale) and score is not None:
            raise rejected(name, "learn_scale", "be False with a score", learn_scale)
        self.score_scale = parameter(H, **where) if learn_scale else None
        if disentangled is not None:
            self._check_disentangled(disentangled)
        self.disentangled = disentangled
        if qk_norm is not None and not isinstance(qk_norm, QueryKeyNorm):
            qk_norm = QueryKeyNorm(D, OneOf(get_args(NormKind))(self, "qk_norm", qk_norm), **where)
        self.qk_norm = qk_norm
        mixes = flag(self, "value_residual", value_residual)
        self.value_residual = ValueResidual(**where) if mixes else None
        self.exclusive = self.output_gate = None
        if exclusive is not None:
            learned = OneOf(get_args(Exclusive))(self, "exclusive", exclusive) == "learned"
            self.exclusive = ExclusiveOutput(H, learned, **where)
        self.head_scale = HeadScale(H, **where) if flag(self, "head_scale", head_scale) else None
        if output_gate is not None:
            scope = OneOf(get_args(GateScope))(self, "output_gate", output_gate)
            self.output_gate = OutputGate(self.embed_dim, H, D, scope, bias=bias, **where)
        self.reset_parameters()

    @overload
    def forward(self, x: Tensor, attn_mask: MaskLike | None = ..., *, is_causal: bool = ..., rotation: Rotation | None = ..., first_values: Tensor | None = ..., cache: StepCache | None = ..., return_aux: None = ..., return_keys: Literal[False] = ...) -> Tensor: ...  # noqa: E501  # fmt: skip
    @overload
    def forward(self, x: Tensor, attn_mask: MaskLike | None = ..., *, is_causal: bool = ..., rotation: Rotation | None = ..., first_values: Tensor | None = ..., cache: StepCache | None = ..., return_aux: AuxRequest, return_keys: Literal[False] = ...) -> tuple[Tensor, Aux]: ...  # noqa: E501  # fmt: skip
    @overload
    def forward(self, x: Tensor, attn_mask: MaskLike | None = ..., *, is_causal: bool = ..., rotation: Rotation | None = ..., first_values: Tensor | None = ..., cache: StepCache | None = ..., return_aux: AuxRequest | None = ..., return_keys: Literal[True]) -> tuple[Any, ...]: ...  # noqa: E501  # fmt: skip
    def forward(
        self,
        x: Tensor,
        attn_mask: MaskLike | None = None,
        *,
        is_causal: bool = False,
        rotation: Rotation | None = None,
        first_values: Tensor | None = None,
        cache: StepCache | None = None,
        return_aux: AuxRequest | None = None,
        return_keys: bool = False,
    ) -> Tensor | tuple[Any, ...]:
        """Return rows (B, L, E), the auxiliary outputs if requested, and keys and values if requested.

        Parameters
        ----------
        x : Tensor (B, L, E)
        attn_mask : Tensor, Mask or callable, optional
            See :func:`regard.attention`; it covers L queries and S keys, the cached ones and those of ``x``.
        is_causal : bool, default False
            Also hide keys after the query. Query 0 is at key 0.
        rotation : tuple of Tensor, optional
            :meth:`Rotary.rotation` of the rows' positions. By default, positions continue those in the cache.
        first_values : Tensor (B, G, L, D), optional
            :meth:`values` of the first layer for the same rows; only and always with ``value_residual``.
        cache : KVCache, optional
            Keys and values of earlier steps; those of ``x`` are appended.
        return_aux : AuxRequest, optional
            Auxiliary outputs to return, per head.
        return_keys : bool, default False
            Whether to also return the :class:`KeysValues` that queries were compared with, the cached ones included,
            for :class:`CrossLayerAttention` in later layers.
        """
        x = floats(self, "x", x, "B", "L", self.embed_dim)
        if cache is not None and self.context is not None:
            raise rejected(type(self).__name__, "cache", "be None under context parallelism", cache)
        before = cached_steps(self, cache)
        if self.disentangled is not None and isinstance(cache, KVCache) and cache.window is not None:
            expected = "have no window with disentangled positions, which depend on the distance of each key"
            raise rejected(type(self).__name__, "cache", expected, cache.window)
        q, k, v = self._projected(x, self._rotation(x, rotation, before))
        v = own = self._mixed(v, first_values)
        if cache is not None:
            k, v = cache.append(k, v)
        keys = KeysValues(k, v) if cache is None else KeysValues(k, v, cache.prefix, cache.offset)
        try:
            output = self._read(q, keys, attn_mask, is_causal, return_aux)
        except BaseException:
            if cache is not None:  # undo the append, so that the call can be retried
                with suppress(ValueError):  # impossible in a full window, which was overwritten
                    cache.truncate(before)
            raise
        found = self._returned(output, own, x, return_aux)
        if not return_keys:
            return found
        return (*found, keys) if isinstance(found, tuple) else (found, keys)

    def _rotation(self, x: Tensor, rotation: Rotation | None, before: int) -> Rotation | None:
        """Return the rotation of rows (B, L, E) that so many others come before."""
        if self.rotary is None or rotation is not None:
            return rotation
        length = before + x.shape[1] if self.context is None else x.shape[1] * self.context.size
        if self.context is None:
            steps = torch.arange(before, length, device=x.device)
        else:
            steps = self.context.positions(length, x.device)
        return self.rotary.rotation(steps, x.dtype, length)

    def _read(
        self, q: Tensor, keys: KeysValues, mask: MaskLike | None, is_causal: bool, request: AuxRequest | None
    ) -> Any:
        """Return the heads' outputs (B, H, L, D), and the requested auxiliary outputs."""
        k, v, prefix, offset = keys
        if self._is_plain_step(q, mask, is_causal, request):
            return _step(q, k, v, mask, prefix)
        if prefix is not None:
            k, v = (torch.cat([first.expand(q.shape[0], -1, -1, -1), own], 2) for first, own in zip(prefix, (k, v)))
            if isinstance(mask, Tensor):  # it does not cover the prefix
                mask = F.pad(mask, (prefix[0].shape[2], 0), value=True)
        return self._attend(q, k, v, mask, is_causal, request, offset)

    def _returned(self, output: Any, own: Tensor, x: Tensor, request: AuxRequest | None) -> Any:
        """Return rows (B, L, E), and the requested auxiliary outputs."""
        heads, aux = (output, None) if request is None else output
        rows: Tensor = self.out(self._finished(heads, own, x).transpose(1, 2).flatten(2))
        return rows if aux is None else (rows, aux)

    def values(self, x: Tensor) -> Tensor:
        """Return the values (B, G, L, D) of rows (B, L, E): ``first_values`` of later layers, if this is the first."""
        return self.projected(floats(self, "x", x, "B", "L", self.embed_dim))[2]

    def _projected(self, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, H, L, D), keys and values (B, G, L, D), with norms, positions and the learned scale."""
        turn = None
        if self.rotary is not None:
            assert rotation is not None, "forward computes it"
            turn = partial(self.rotary.turn, rotation=rotation)
        if self.qk_norm is None and (self.rotary is None or self.rotary.symmetric):
            q, k, v = self.projected(x, turn)
        else:
            q, k, v = self.projected(x)
            if self.qk_norm is not None:
                q, k = self.qk_norm(q, k)
            if self.rotary is not None and rotation is not None:
                q, k = self.rotary.turn(q, rotation), self.rotary.turn_keys(k, rotation)
        return self._scaled(q), k, v

    def _scaled(self, q: Tensor) -> Tensor:
        return q if self.score_scale is None else q * self.score_scale.to(q.dtype).view(-1, 1, 1)

    def _mixed(self, v: Tensor, first: Tensor | None) -> Tensor:
        """Return values (B, G, L, D), mixed with those of the first layer."""
        if self.value_residual is None and first is None:
            return v
        if self.value_residual is None or first is None:
            expected = "be None without value_residual" if first is not None else f"have shape {shape(v)}"
            raise rejected(type(self).__name__, "first_values", expected, first if first is None else shape(first))
        mixed: Tensor = self.value_residual(v, first)
        return mixed

    def _finished(self, heads: Tensor, own: Tensor, x: Tensor) -> Tensor:
        """Return the heads' outputs (B, H, L, D) without the own value's direction, scaled and gated."""
        heads = heads if self.exclusive is None else self.exclusive(heads, own)
        heads = heads if self.head_scale is None else self.head_scale(heads)
        return heads if self.output_gate is None else self.output_gate(heads, x)

    def _check_disentangled(self, given: Any) -> None:
        """Raise unless these positions are of the layer's heads, and their scale can be that of the scores."""
        name, sizes = type(self).__name__, (self.num_heads, self.head_dim)
        if not isinstance(given, DisentangledPositions):
            raise rejected(name, "disentangled", "be DisentangledPositions or None", described(given), TypeError)
        if (given.num_heads, given.head_dim) != sizes:
            expected = f"have the layer's num_heads and head_dim, {sizes}"
            raise rejected(name, "disentangled", expected, (given.num_heads, given.head_dim))
        if self.score is not None or self.scale is not None or self.score_scale is not None:
            expected = "be None with a score or a scale, which is that of the positions"
            raise rejected(name, "disentangled", expected, type(given).__name__)

    @property
    def _factor(self) -> float | None:
        """The ``scale`` of the attention call; None for that of the score."""
        if self.disentangled is not None:
            return self.disentangled.scale
        if self.score_scale is not None:
            return 1.0  # it is in the queries
        return self._usual if self.scale is None and self.score is None else self.scale

    @property
    def _usual(self) -> float | None:
        """The default scale, if it is not that of the score."""
        return _COSINE_SCALE if self.qk_norm is not None and self.qk_norm.kind == "l2" else None

    def _is_plain_step(self, q: Tensor, mask: MaskLike | None, is_causal: bool, request: AuxRequest | None) -> bool:
        """Whether this is one query per sequence, with the default parts and at most a key padding mask."""
        plain = self.score is None and self.normalizer == "softmax" and self.engine == "auto"
        plain = plain and self._factor is None and self.softcap is None and self.order == 0
        marked = mask is None or (type(mask) is Tensor and mask.dtype == torch.bool and mask.shape[1:-1] == (1, 1))
        alone = request is None and not is_causal and not (self.training and self.dropout) and self.context is None
        return q.shape[2] == 1 and plain and marked and alone

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
        """Return the heads' outputs (B, H, L, D), and the requested auxiliary outputs.

        ``offset`` (B,) is the number of keys before the first query, if queries are not the last keys.
        """
        score = resolve_part(self.score.score() if isinstance(self.score, ScoredAttention) else self.score)
        order: dict[str, Any] = {} if self.order == 0 else {"order": self.order}
        if order and self.context is not None:
            raise rejected(type(self).__name__, "order", "be 0 under context parallelism", self.order)
        if self.disentangled is not None:
            if self.context is not None:
                got = type(self.disentangled).__name__
                raise rejected(type(self).__name__, "disentangled", "be None under context parallelism", got)
            biases = self.disentangled(q, k, offset, align=None if offset is not None else "lower_right")
            mask = biases if mask is None else as_mask(mask) & biases
        attend = attention if self.context is None else self.context.attend
        return attend(
            q,
            k,
            v,
            mask,
            self.dropout if self.training else 0.0,
            is_causal,
            self._factor,
            enable_gqa=self.num_kv_heads != self.num_heads,
            score=score,
            normalizer=resolve_part(self.normalizer),
            softcap=self.softcap,
            engine=self.engine,
            return_aux=request,
            **order,
        )

    def reset_parameters(self) -> None:
        """Re-initialize the weights by Glorot's rule, set biases to 0, and reset the parameters of options."""
        super().reset_parameters()
        if isinstance(self.score, ScoredAttention):
            self.score.reset_parameters()
        if self.score_scale is not None:
            usual = self.head_dim**-0.5 if self._usual is None else self._usual
            nn.init.constant_(self.score_scale, usual if self.scale is None else self.scale)
        options = self.qk_norm, self.value_residual, self.exclusive, self.head_scale, self.output_gate, self.rotary
        for option in (*options, self.disentangled):
            if option is not None:
                option.reset_parameters()

    def extra_repr(self) -> str:
        """Return the sizes and the settings that differ from the defaults."""
        usual: dict[str, Any] = {"dropout": 0.0, "score": None, "normalizer": "softmax", "scale": None}
        usual |= {"softcap": None, "order": 0, "engine": "auto"}
        return ", ".join(
            [super().extra_repr(), *(each for name, value in usual.items() for each in non_default(self, name, value))]
        )


def _step(q: Tensor, k: Tensor, v: Tensor, mask: Any, prefix: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return the outputs (B, H, 1, D) of one query per sequence, treating the heads of a group as rows.

    Parameters
    ----------
    q : Tensor (B, H, 1, D)
    k, v : Tensor (B, G, S, D)
        Values may have another width.
    mask : Tensor (B, 1, 1, S) of bool, or None
    prefix : (Tensor, Tensor), optional
        Keys and values (1, G, P, D) shared by all sequences.
    """
    B, H, _, D = q.shape
    G = k.shape[1]
    rows = q.view(B, G, H // G, D) if q.is_contiguous() else q.reshape(B, G, H // G, D)
    if prefix is not None:
        return _shared_step(rows, k, v, mask, *prefix).reshape(B, H, 1, -1)
    output = attention(rows, k, v) if mask is None else torch_attention(rows, k, v, mask)
    return output.reshape(B, H, 1, -1)


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
