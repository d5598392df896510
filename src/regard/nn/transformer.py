"""Drop-in replacements of torch's Transformer layers, and the feed-forward network."""

from __future__ import annotations

import copy
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._utils.constraints import flag, probability, size
from regard._utils.errors import described, rejected, shape, unknown_name
from regard._utils.mechanism import mechanism
from regard.engines import EngineLike
from regard.nn._base import Layer
from regard.nn.heads.multihead import MultiheadAttention, is_causal_matrix, without_garbage, without_holes
from regard.nn.heads.scored import ScoredAttention
from regard.nn.kv_cache import KVCache
from regard.normalizers import NormalizerLike
from regard.scores import ScoreLike

# The feed-forward network ---------------------------------------------------------------------------------------------


#: Activations by name; "gelu_tanh" is the approximation that GPT-2 was trained with.
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


@mechanism(
    formula="W₂ φ(W₁ x), or W₂ (φ(W_g x) ∘ W₁ x) with a gate",
    sources=("vaswani2017", "shazeer2020"),
    learned="W₁ (F, E), W₂ (E, F), with a gate W_g (F, E), biases",
    cost="O(L·E·F)",
)
class FeedForward(Layer):
    """The feed-forward network of a Transformer: ``W₂ φ(W₁ x + b₁) + b₂`` (Vaswani 2017, arXiv 1706.03762).

    With a gate it is ``W₂ (φ(W_g x) ∘ W₁ x)``: SwiGLU with ``"silu"``, GEGLU with ``"gelu"`` (Shazeer 2020, arXiv
    2002.05202).

    Parameters
    ----------
    embed_dim : int
        Width E of the rows.
    hidden_dim : int
        Width F of the hidden layer.
    activation : {"relu", "gelu", "gelu_tanh", "silu"}, default "gelu"
        φ.
    gated : bool, default False
    bias : bool, default True
    dropout : float, default 0.0
        Probability of dropping a hidden feature, in training.
    device, dtype : optional
        Device and dtype of the parameters.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import FeedForward
    >>> FeedForward(8, 32, "silu", gated=True, bias=False)(torch.randn(2, 5, 8)).shape
    torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        activation: str = "gelu",
        *,
        gated: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        E, hidden = size(self, "embed_dim", embed_dim), size(self, "hidden_dim", hidden_dim)
        flag(self, "gated", gated)
        flag(self, "bias", bias)
        if activation not in ACTIVATIONS:
            raise unknown_name(type(self).__name__, "activation", str(activation), ACTIVATIONS)
        self.activation, self.dropout = activation, probability(self, "dropout", dropout)
        where: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.gate = nn.Linear(E, hidden, **where) if gated else None
        self.up = nn.Linear(E, hidden, **where)
        self.down = nn.Linear(hidden, E, **where)

    def forward(self, x: Tensor) -> Tensor:
        """Return rows (..., E) for rows (..., E)."""
        rise = ACTIVATIONS[self.activation]
        hidden = rise(self.up(x)) if self.gate is None else rise(self.gate(x)) * self.up(x)
        return self.down(F.dropout(hidden, self.dropout) if self.dropout and self.training else hidden)

    def reset_parameters(self) -> None:
        """Re-initialize the parameters as torch's linear layers do."""
        for layer in self.children():
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()

    def extra_repr(self) -> str:
        """Return the activation, and the dropout if there is any."""
        return ", ".join([repr(self.activation), *([f"dropout={self.dropout}"] if self.dropout else [])])


# Encoder and decoder layers and stacks --------------------------------------------------------------------------------


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}


class _TransformerLayer(Layer, ABC):
    """Base of the encoder and decoder layers: attentions, feed-forward network, norms, residual connections."""

    #: torch's names of the attentions; the first is the self-attention.
    attentions: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        num_kv_heads: int | None = None,
        score: ScoreLike | ScoredAttention | None = None,
        normalizer: NormalizerLike = "softmax",
        rotary: nn.Module | None = None,
        engine: EngineLike = "auto",
    ) -> None:
        super().__init__()
        where = {"device": device, "dtype": dtype}
        parts: dict[str, Any] = {"num_kv_heads": num_kv_heads, "engine": engine}
        width, hidden = size(self, "d_model", d_model), size(self, "dim_feedforward", dim_feedforward)
        dropout = probability(self, "dropout", dropout)
        self.batch_first, self.norm_first = batch_first, norm_first
        # torch's order, which optimizers and random initialization depend on.
        for i, name in enumerate(self.attentions):
            parts |= {"rotary": None if i else rotary, "score": copy.deepcopy(score) if i else score}
            parts |= {"normalizer": copy.deepcopy(normalizer) if i else normalizer}
            made = MultiheadAttention(width, nhead, dropout, bias, batch_first=batch_first, **where, **parts)
            self.add_module(name, made)
        self.linear1 = nn.Linear(width, hidden, bias=bias, **where)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(hidden, width, bias=bias, **where)
        steps = range(1, len(self.attentions) + 2)
        for i in steps:
            self.add_module(f"norm{i}", nn.LayerNorm(width, eps=layer_norm_eps, bias=bias, **where))
        for i in steps:
            self.add_module(f"dropout{i}", nn.Dropout(dropout))
        if not callable(activation) and activation not in _ACTIVATIONS:
            raise rejected(type(self).__name__, "activation", "be 'relu', 'gelu' or a function", described(activation))
        self.activation = _ACTIVATIONS[activation] if isinstance(activation, str) else activation

    def reset_parameters(self) -> None:
        """Re-initialize the parameters."""
        _reset(self.children())

    def extra_repr(self) -> str:
        """Return the position of the norms, unless it is the default."""
        return "norm_first=True" if self.norm_first else ""

    def _step(self, x: Tensor, number: int, block: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply a block with residual connection and norm."""
        norm = self._modules[f"norm{number}"]
        assert norm is not None
        made = block(norm(x)) if self.norm_first else block(x)
        total = x + (getattr(self, f"dropout{number}")(made) if self.training else made)
        return total if self.norm_first else norm(total)

    def _feed_forward(self, x: Tensor) -> Tensor:
        hidden = self.activation(self.linear1(x))
        made: Tensor = self.linear2(self.dropout(hidden) if self.training else hidden)
        return made

    def _clean(self, argument: str, x: Tensor, padding: Any) -> Tensor:
        """Make nested inputs contiguous, and zero non-finite values in padding."""
        if x.is_nested:
            return without_holes(self, argument, x)
        transposed = x.dim() == 3 and not self.batch_first
        rows = x.transpose(0, 1) if transposed else x
        cached = padding.shape[-1] - rows.shape[-2] if isinstance(padding, Tensor) and padding.dim() else -1
        if cached >= 0 and padding.shape[:-1] == rows.shape[:-2]:  # otherwise attention raises
            rows = without_garbage(rows, padding[..., cached:])
        return rows.transpose(0, 1) if transposed else rows


@mechanism(
    formula="x ← N(x + MHA(x, x, x)); x ← N(x + W₂ φ(W₁ x))",
    sources=("vaswani2017",),
    learned="those of MHA, W₁ (F, E), W₂ (E, F), biases, two layer norms N",
    cost="O(L·E² + L²·E + L·E·F)",
    cache="2·E per token",
)
class TransformerEncoderLayer(_TransformerLayer):
    """Self-attention and a feed-forward network; replaces ``torch.nn.TransformerEncoderLayer``.

    ``x ← N(x + MHA(x, x, x))``, then ``x ← N(x + W₂ φ(W₁ x))`` with layer norms N (Vaswani 2017, arXiv 1706.03762);
    with ``norm_first``, ``x ← x + MHA(N(x))`` and ``x ← x + W₂ φ(W₁ N(x))``. Loads torch's ``state_dict`` and agrees
    with torch up to rounding. Non-finite values in padding count as 0 and do not affect outputs or gradients.

    Parameters
    ----------
    d_model, nhead : int
        Width E, and number of heads H.
    dim_feedforward : int, default 2048
        Width F of the hidden layer.
    dropout : float, default 0.1
        Dropout probability of weights, hidden features and block outputs, in training.
    activation : "relu", "gelu" or callable, default relu
        φ.
    layer_norm_eps : float, default 1e-5
    batch_first : bool, default False
        Sequences are (B, N, E) rather than (N, B, E).
    norm_first : bool, default False
    bias : bool, default True
        Whether projections and norms have a bias.
    device, dtype : optional
        Device and dtype of the parameters.
    num_kv_heads, score, normalizer, rotary, engine
        See :class:`~regard.nn.MultiheadAttention`.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import TransformerEncoderLayer
    >>> layer = TransformerEncoderLayer(16, 4, 32, batch_first=True, num_kv_heads=1, normalizer="sparsemax")
    >>> layer(torch.randn(3, 5, 16), is_causal=True).shape
    torch.Size([3, 5, 16])
    """

    attentions = ("self_attn",)
    self_attn: MultiheadAttention

    def forward(
        self,
        src: Tensor,
        src_mask: Any = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Return sequences of the shape of ``src``, (N, B, E), (B, N, E) if ``batch_first``, or (N, E).

        Masks, ``is_causal`` and ``cache`` are those of :class:`~regard.nn.MultiheadAttention`: True hides.
        """
        masks: dict[str, Any] = {"key_padding_mask": src_key_padding_mask, "attn_mask": src_mask}
        masks |= {"is_causal": is_causal, "cache": cache}
        x = self._clean("src", src, src_key_padding_mask)
        x = self._step(x, 1, lambda y: self.self_attn(y, y, y, need_weights=False, **masks)[0])
        return self._step(x, 2, self._feed_forward)


@mechanism(
    formula="x ← N(x + MHA(x, x, x)); x ← N(x + MHA(x, M, M)); x ← N(x + W₂ φ(W₁ x))",
    sources=("vaswani2017",),
    learned="those of two MHA, W₁ (F, E), W₂ (E, F), biases, three layer norms N",
    cost="O((L + S)·E² + (L² + L·S)·E + L·E·F)",
    cache="2·E per token, 2·E per row of the memory",
)
class TransformerDecoderLayer(_TransformerLayer):
    """Self-attention, cross-attention and a feed-forward network; replaces ``torch.nn.TransformerDecoderLayer``.

    ``x ← N(x + MHA(x, x, x))``, ``x ← N(x + MHA(x, M, M))``, ``x ← N(x + W₂ φ(W₁ x))`` for a memory M and layer norms N
    (Vaswani 2017, arXiv 1706.03762); with ``norm_first``, norms apply to block inputs. Loads torch's ``state_dict`` and
    agrees with torch up to rounding.

    Parameters
    ----------
    d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias, device, dtype
        See :class:`TransformerEncoderLayer`.
    num_kv_heads, score, normalizer, engine
        See :class:`~regard.nn.MultiheadAttention`. They apply to both attentions, which share no parameters.
    rotary : Module, optional
        For the self-attention.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import TransformerDecoderLayer
    >>> layer = TransformerDecoderLayer(16, 4, 32, batch_first=True)
    >>> layer(torch.randn(3, 5, 16), torch.randn(3, 7, 16), tgt_is_causal=True).shape
    torch.Size([3, 5, 16])
    """

    attentions = ("self_attn", "multihead_attn")
    self_attn: MultiheadAttention
    multihead_attn: MultiheadAttention

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Any = None,
        memory_mask: Any = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
        *,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Return sequences of the shape of ``tgt``, (N, B, E), (B, N, E) if ``batch_first``, or (N, E).

        Masks, ``is_causal`` and ``cache`` (of the self-attention) are those of :class:`~regard.nn.MultiheadAttention`:
        True hides.
        """
        own: dict[str, Any] = {"key_padding_mask": tgt_key_padding_mask, "attn_mask": tgt_mask}
        own |= {"is_causal": tgt_is_causal, "cache": cache}
        other: dict[str, Any] = {"key_padding_mask": memory_key_padding_mask, "attn_mask": memory_mask}
        other |= {"is_causal": memory_is_causal}
        x = self._clean("tgt", tgt, tgt_key_padding_mask)
        x = self._step(x, 1, lambda y: self.self_attn(y, y, y, need_weights=False, **own)[0])
        x = self._step(x, 2, lambda y: self.multihead_attn(y, memory, memory, need_weights=False, **other)[0])
        return self._step(x, 3, self._feed_forward)


class _Stack(Layer, ABC):
    """A stack of copies of a layer, followed by an optional norm."""

    def __init__(self, layer: nn.Module, num_layers: int, norm: nn.Module | None) -> None:
        super().__init__()
        self.num_layers = size(self, "num_layers", num_layers)
        self.layers = nn.ModuleList([copy.deepcopy(layer) for _ in range(num_layers)])
        self.norm = norm

    def reset_parameters(self) -> None:
        """Re-initialize the parameters, independently for each layer."""
        _reset(module for module in (*self.layers, self.norm) if module is not None)

    def _through(self, x: Tensor, *rest: Tensor, cache: Sequence[KVCache] | None, **masks: Any) -> Tensor:
        """Apply the layers and the norm."""
        if cache is not None and len(cache) != self.num_layers:
            expected = f"hold one KVCache for each of {self.num_layers} layers"
            raise rejected(type(self).__name__, "cache", expected, len(cache))
        if cache is not None and len({id(each) for each in cache}) != len(cache):
            raise rejected(type(self).__name__, "cache", "hold a different KVCache for each layer", "one used twice")
        for i, layer in enumerate(self.layers):
            x = layer(x, *rest, **masks, **({} if cache is None else {"cache": cache[i]}))
        return x if self.norm is None else self.norm(x)


@mechanism(
    formula="x ← layer_i(x) for i = 1 … N; x ← norm(x)",
    sources=("vaswani2017",),
    learned="those of its layers and norm",
    cost="O(N·(L·E² + L²·E + L·E·F))",
    cache="N·2·E per token",
)
class TransformerEncoder(_Stack):
    """A stack of encoder layers; replaces ``torch.nn.TransformerEncoder`` (Vaswani 2017, arXiv 1706.03762).

    With ``is_causal=True`` it is a decoder-only language model, which decodes step by step with ``cache``. Padded rows
    of the output are not zeroed; torch's stack zeroes them only in evaluation, without gradients and given
    ``src_key_padding_mask``.

    Parameters
    ----------
    encoder_layer : Module
        A :class:`TransformerEncoderLayer`, or torch's. It is copied, so all layers start with equal parameters;
        ``reset_parameters()`` re-initializes them independently.
    num_layers : int
    norm : Module, optional
        Applied after the last layer.
    enable_nested_tensor, mask_check : bool
        No effect: masks skip padding.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import KVCache, TransformerEncoder, TransformerEncoderLayer
    >>> model = TransformerEncoder(TransformerEncoderLayer(16, 4, 32, batch_first=True), 2).eval()
    >>> x, cache = torch.randn(3, 5, 16), [KVCache(), KVCache()]
    >>> steps = [model(t, is_causal=True, cache=cache) for t in x.split(1, 1)]
    >>> torch.allclose(torch.cat(steps, 1), model(x, is_causal=True), atol=1e-5)
    True
    """

    def __init__(
        self,
        encoder_layer: nn.Module,
        num_layers: int,
        norm: nn.Module | None = None,
        enable_nested_tensor: bool = True,
        mask_check: bool = True,
    ) -> None:
        super().__init__(encoder_layer, num_layers, norm)
        self.enable_nested_tensor, self.mask_check = enable_nested_tensor, mask_check

    def forward(
        self,
        src: Tensor,
        mask: Any = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
        *,
        cache: Sequence[KVCache] | None = None,
    ) -> Tensor:
        """Return sequences of the shape of ``src``; arguments are those of the layers, with one cache per layer.

        ``is_causal=None`` detects whether ``mask`` is the causal mask.
        """
        masks = {"src_mask": mask, "src_key_padding_mask": src_key_padding_mask, "is_causal": _causal(mask, is_causal)}
        return self._through(src, cache=cache, **masks)


@mechanism(
    formula="x ← layer_i(x, M) for i = 1 … N; x ← norm(x)",
    sources=("vaswani2017",),
    learned="those of its layers and norm",
    cost="O(N·((L + S)·E² + (L² + L·S)·E + L·E·F))",
    cache="N·2·E per token, and per row of the memory",
)
class TransformerDecoder(_Stack):
    """A stack of decoder layers; replaces ``torch.nn.TransformerDecoder`` (Vaswani 2017, arXiv 1706.03762).

    Parameters
    ----------
    decoder_layer : Module
        A :class:`TransformerDecoderLayer`, or torch's; it is copied.
    num_layers : int
    norm : Module, optional
        Applied after the last layer.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import TransformerDecoder, TransformerDecoderLayer
    >>> model = TransformerDecoder(TransformerDecoderLayer(16, 4, 32, batch_first=True), 2)
    >>> model(torch.randn(3, 5, 16), torch.randn(3, 7, 16), tgt_is_causal=True).shape
    torch.Size([3, 5, 16])
    """

    def __init__(self, decoder_layer: nn.Module, num_layers: int, norm: nn.Module | None = None) -> None:
        super().__init__(decoder_layer, num_layers, norm)

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Any = None,
        memory_mask: Any = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
        *,
        cache: Sequence[KVCache] | None = None,
    ) -> Tensor:
        """Return sequences of the shape of ``tgt``; arguments are those of the layers, with one cache per layer.

        ``tgt_is_causal=None`` detects whether ``tgt_mask`` is the causal mask.
        """
        masks: dict[str, Any] = {"tgt_mask": tgt_mask, "tgt_key_padding_mask": tgt_key_padding_mask}
        masks |= {"memory_mask": memory_mask, "memory_key_padding_mask": memory_key_padding_mask}
        masks |= {"tgt_is_causal": _causal(tgt_mask, tgt_is_causal), "memory_is_causal": memory_is_causal}
        return self._through(tgt, memory, cache=cache, **masks)


def _causal(mask: Any, is_causal: bool | None) -> bool:
    """Whether a stack is causal, from its argument or else its mask."""
    return is_causal_matrix(mask) if is_causal is None else is_causal


def _reset(modules: Any) -> None:
    for module in modules:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


# The encoder–decoder Transformer --------------------------------------------------------------------------------------


class TransformerParts(TypedDict, total=False):
    """Keyword arguments of all layers of a Transformer; see :class:`~regard.nn.MultiheadAttention`."""

    num_kv_heads: int | None
    score: ScoreLike | ScoredAttention | None
    normalizer: NormalizerLike
    rotary: nn.Module | None
    engine: EngineLike


@mechanism(
    formula="decoder(y, M) with M = encoder(x)",
    sources=("vaswani2017",),
    learned="those of its layers, two layer norms",
    cost="O(N·((L + S)·(E² + E·F) + (L + S)²·E))",
    cache="N·2·E per token, and per row of the memory",
)
class Transformer(Layer):
    """An encoder–decoder Transformer; replaces ``torch.nn.Transformer`` (Vaswani 2017, arXiv 1706.03762).

    ``M = encoder(x)``, ``decoder(y, M)``; each is a stack followed by a layer norm. Loads torch's ``state_dict`` and
    agrees with torch up to rounding, including initial weights.

    Parameters
    ----------
    d_model, nhead : int
        Width E, and number of heads H.
    num_encoder_layers, num_decoder_layers : int, default 6
    dim_feedforward, dropout, activation
        See :class:`~regard.nn.TransformerEncoderLayer`.
    custom_encoder, custom_decoder : Module, optional
        Replacements of the stacks.
    layer_norm_eps, batch_first, norm_first, bias, device, dtype
        See :class:`~regard.nn.TransformerEncoderLayer`.
    **parts
        ``num_kv_heads``, ``score``, ``normalizer``, ``rotary`` and ``engine``, for all layers.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import Transformer
    >>> model = Transformer(16, 4, 2, 2, 32, batch_first=True, num_kv_heads=2)
    >>> model(torch.randn(3, 7, 16), torch.randn(3, 5, 16), tgt_is_causal=True).shape
    torch.Size([3, 5, 16])
    """

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        custom_encoder: nn.Module | None = None,
        custom_decoder: nn.Module | None = None,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        **parts: Unpack[TransformerParts],
    ) -> None:
        super().__init__()
        where = {"device": device, "dtype": dtype}
        sizes: tuple[Any, ...] = (d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps)
        layout: dict[str, Any] = {"batch_first": batch_first, "norm_first": norm_first, "bias": bias}

        def norm() -> nn.Module:
            return nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias, **where)

        if custom_encoder is None:
            encoder_layer = TransformerEncoderLayer(*sizes, **layout, **where, **parts)
            custom_encoder = TransformerEncoder(encoder_layer, num_encoder_layers, norm())
        if custom_decoder is None:
            decoder_layer = TransformerDecoderLayer(*sizes, **layout, **where, **parts)
            custom_decoder = TransformerDecoder(decoder_layer, num_decoder_layers, norm())
        self.encoder, self.decoder = custom_encoder, custom_decoder
        self.d_model, self.nhead, self.batch_first = d_model, nhead, batch_first
        self._reset_parameters()

    def reset_parameters(self) -> None:
        """Re-initialize all matrices by Glorot's rule, as torch does."""
        for stack in (self.encoder, self.decoder):
            if isinstance(stack, (TransformerEncoder, TransformerDecoder)):
                stack.reset_parameters()
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(
        self,
        src: Tensor,
        tgt: Tensor,
        src_mask: Any = None,
        tgt_mask: Any = None,
        memory_mask: Any = None,
        src_key_padding_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        src_is_causal: bool | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
        *,
        cache: Sequence[KVCache] | None = None,
    ) -> Tensor:
        """Return sequences of the shape of ``tgt``; arguments are those of the two stacks.

        As in torch, padding of ``src`` is hidden in the memory only if ``memory_key_padding_mask`` says so. ``cache``
        is the decoder's. To decode step by step, call ``encoder`` once, and ``decoder`` with the cache.
        """
        for name, x in (("src", src), ("tgt", tgt)):
            if x.size(-1) != self.d_model:  # nested tensors support size, but not all have a shape
                raise rejected(type(self).__name__, name, f"have width d_model {self.d_model}", shape(x))
        masks = {"mask": src_mask, "src_key_padding_mask": src_key_padding_mask, "is_causal": src_is_causal}
        memory = self.encoder(src, **masks)
        masks = {"tgt_mask": tgt_mask, "tgt_key_padding_mask": tgt_key_padding_mask, "tgt_is_causal": tgt_is_causal}
        masks |= {"memory_mask": memory_mask, "memory_key_padding_mask": memory_key_padding_mask}
        masks |= {"memory_is_causal": memory_is_causal} | ({} if cache is None else {"cache": cache})
        return self.decoder(tgt, memory, **masks)

    @staticmethod
    def generate_square_subsequent_mask(sz: int, device: Any = None, dtype: Any = None) -> Tensor:
        """Return the causal mask (sz, sz) as torch writes it, −inf above the diagonal; ``is_causal`` needs none."""
        return torch.full((sz, sz), -torch.inf, dtype=dtype, device=device).triu(1)
