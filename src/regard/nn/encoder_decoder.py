"""The whole Transformer: an encoder, and a decoder that attends to its output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._catalogue import mechanism
from regard._errors import rejected, shape
from regard.engines import EngineLike
from regard.nn._layer import Layer
from regard.nn._scored import ScoredAttention
from regard.nn.kv_cache import KVCache
from regard.nn.transformer import (
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)
from regard.normalizers import NormalizerLike
from regard.scores import ScoreLike


class TransformerParts(TypedDict, total=False):
    """Keyword arguments that all layers of a Transformer take, as :class:`~regard.nn.MultiheadAttention` has them."""

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
)
class Transformer(Layer):
    """An encoder and a decoder; ``torch.nn.Transformer`` (Vaswani 2017, arXiv 1706.03762).

    ``M = encoder(x)``, ``decoder(y, M)``, each a stack with a layer norm after it. Loads torch's ``state_dict`` and
    agrees with torch to rounding; initial weights are torch's, too.

    Parameters
    ----------
    d_model, nhead : int
        Width E, and number of heads H.
    num_encoder_layers, num_decoder_layers : int, default 6
    dim_feedforward, dropout, activation
        As :class:`~regard.nn.TransformerEncoderLayer` has them.
    custom_encoder, custom_decoder : Module, optional
        In place of the stacks.
    layer_norm_eps, batch_first, norm_first, bias, device, dtype
        As :class:`~regard.nn.TransformerEncoderLayer` has them.
    **parts
        ``num_kv_heads``, ``score``, ``normalizer``, ``rotary`` and ``engine``, for all layers.

    Raises
    ------
    ValueError, TypeError
        If an argument is wrong, in one sentence.

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
        """Draw the parameters anew: all matrices by Glorot's rule, as torch does."""
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

        Padding of ``src`` is that of the memory, too, only where ``memory_key_padding_mask`` says so, as in torch.
        ``cache`` is the decoder's. To decode step by step, call ``encoder`` once and ``decoder`` with the cache.
        """
        for name, x in (("src", src), ("tgt", tgt)):
            if x.size(-1) != self.d_model:  # nested tensors have a size, and not all a shape
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
