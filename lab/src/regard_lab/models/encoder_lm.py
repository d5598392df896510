"""The encoder-only language model: every token attends to both sides (Devlin 2018; Liu 2019; Lan 2019).

Dimensions: B batch, L tokens, E width, W embedding width, N vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import masks
from regard._utils.errors import described, rejected, shape
from regard.engines.aux import Aux, AuxRequest
from regard.masks import Mask, MaskLike
from regard.nn.transformer import ACTIVATIONS
from regard_lab._options import option
from regard_lab.models.attending import DEEPEST, size
from regard_lab.models.language_blocks import (
    Block,
    BlockStack,
    LanguageConfig,
    PositionEmbedding,
    draw,
    embedded,
    norm,
    rotary,
)
from regard_lab.models.mixers import softmax
from regard_lab.models.pooling import OF_ENCODERS, pooled

__all__ = ["PRESETS", "EncoderLM", "EncoderLMConfig"]


@dataclass(frozen=True)
class EncoderLMConfig(LanguageConfig):
    """Everything that an :class:`~regard_lab.models.EncoderLM` is built from."""

    function = "EncoderLMConfig"
    layers: int = option(4, "blocks, one after the other; without any, rows are those of the embedding", ge=0,
                         le=2 * DEEPEST)  # fmt: skip
    norm_first: bool = option(False, "whether what enters a block is normalized, or each sum")
    segments: int = option(2, "kinds of segments that a token may belong to; 0 for none", ge=0, le=1 << 16)
    #: Lan 2019, arXiv 1909.11942; also the next option.
    embedding_width: int | None = size(None, "width W of the embeddings, which are projected to E; E by default")
    shared: bool = option(False, "whether all layers have the parameters of one")
    pooling: str = option("first", "what stands for a sequence: its first row, or of each feature the mean or the "
                          "largest", choices=OF_ENCODERS)  # fmt: skip
    pooled: bool = option(True, "whether what stands for a sequence goes through another layer")
    masked_head: bool = option(True, "whether there is a head that scores the vocabulary")
    #: Liu 2019, arXiv 1907.11692: positions start after the padding id.
    first_position: int = option(0, "row of the first position among learned ones", ge=0, le=1 << 16)
    skip_padding: bool = option(False, "whether positions count only what is no padding")

    @classmethod
    def presets(cls) -> Mapping[str, Mapping[str, Any]]:
        return PRESETS

    def check(self) -> None:
        super().check()
        if self.positions == "disentangled":
            with torch.device("meta"):
                softmax(self)  # raises where its sizes contradict each other

    @property
    def embedded(self) -> int:
        """Width W of the embeddings."""
        return self.width if self.embedding_width is None else self.embedding_width


_BERT: dict[str, Any] = {"vocabulary": 30522, "max_length": 512, "norm_eps": 1e-12, "dropout": 0.1}
_BERT |= {"attention_dropout": 0.1}
_ROBERTA = _BERT | {"vocabulary": 50265, "segments": 1, "norm_eps": 1e-5, "first_position": 2, "skip_padding": True}
_ALBERT = _BERT | {"vocabulary": 30000, "embedding_width": 128, "shared": True, "activation": "gelu_tanh"}
_OWN: dict[str, Any] = {"vocabulary": 8000, "positions": "rotary", "norm": "rms", "norm_first": True}
_OWN |= {"activation": "silu", "gated": True, "bias": False, "segments": 2, "pooled": False, "dropout": 0.1}
#: Tokens that are masked teach the row of a mark before the text nothing.
_OWN |= {"pooling": "mean"}
#: Presets by name; those named after papers have the papers' sizes (BERT's small ones: Turc 2019, arXiv 1908.08962).
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _OWN | {"width": 128, "layers": 4, "heads": 4},
    "small": _OWN | {"width": 256, "layers": 6, "heads": 4},
    "base": _OWN | {"width": 384, "layers": 6, "heads": 6},
    "bert-tiny": _BERT | {"width": 128, "layers": 2, "heads": 2},
    "bert-mini": _BERT | {"width": 256, "layers": 4, "heads": 4},
    "bert-small": _BERT | {"width": 512, "layers": 4, "heads": 8},
    "bert-base": _BERT | {"width": 768, "layers": 12, "heads": 12},
    "bert-large": _BERT | {"width": 1024, "layers": 24, "heads": 16},
    "roberta-base": _ROBERTA | {"width": 768, "layers": 12, "heads": 12, "pooled": False},
    "roberta-large": _ROBERTA | {"width": 1024, "layers": 24, "heads": 16, "pooled": False},
    "albert-base": _ALBERT | {"width": 768, "layers": 12, "heads": 12},
}


class EncoderLM(BlockStack):
    """A bidirectional stack of self-attention and feed-forward blocks, with an optional masked-language-model head.

    ::

        x = N(embedding + position + segment)
        x ← N(x + MHA(x, x))        x ← N(x + FFN(x))        once per layer
        logits = W N(φ(U x)) + b

    The config selects a BERT, RoBERTa or ALBERT architecture (ALBERT shares parameters across layers), or pre-norm
    blocks, with any score and normalizer. With ``positions="disentangled"`` each layer has the positions of DeBERTa
    (:class:`regard.nn.DisentangledPositions`), with embeddings of its own. Padding does not change the output.

    Parameters
    ----------
    config : EncoderLMConfig

    Examples
    --------
    >>> model = EncoderLM(EncoderLMConfig(50, width=16, layers=2, heads=4)).eval()
    >>> tokens = torch.tensor([[3, 1, 4, 1], [5, 9, 0, 0]])
    >>> rows = model(tokens, attention_mask=tokens != 0)
    >>> rows.shape, model.logits(rows).shape
    (torch.Size([2, 4, 16]), torch.Size([2, 4, 50]))
    >>> torch.allclose(rows[1, :2], model(tokens[1:, :2])[0], atol=1e-5)
    True
    """

    config: EncoderLMConfig

    def __init__(self, config: EncoderLMConfig) -> None:
        super().__init__()
        self.config = config
        E, W, N = config.width, config.embedded, config.vocabulary
        self.embedding = nn.Embedding(N, W)
        self.positions = PositionEmbedding(config, config.first_position, W)
        self.segments = nn.Embedding(config.segments, W) if config.segments else None
        self.embedding_norm = nn.Identity() if config.norm_first else norm(config, W)
        self.widen = nn.Linear(W, E) if W != E else None
        self.dropout = nn.Dropout(config.dropout)
        count = min(config.layers, 1) if config.shared else config.layers
        place = "before" if config.norm_first else "after"
        self.blocks = nn.ModuleList(Block(config, place, softmax(config)) for _ in range(count))  # type: ignore[assignment]
        self.norm = norm(config) if config.norm_first else nn.Identity()
        self.rotary = rotary(config)
        self.pooler = nn.Linear(E, E) if config.pooled else None
        self.masked_head = MaskedHead(config) if config.masked_head else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialize the parameters as in BERT; the last layer of each block gets a smaller scale in deep models."""
        draw(self, self.blocks, self.config.layers)
        if self.masked_head is not None:
            self.masked_head.reset_parameters()

    def forward(
        self,
        tokens: Tensor,
        *,
        attention_mask: Tensor | None = None,
        segments: Tensor | None = None,
        mask: MaskLike | None = None,
        positions: Tensor | None = None,
        return_aux: AuxRequest | None = None,
        aux: list[Aux] | None = None,
    ) -> Tensor:
        """Return the hidden states (B, L, E).

        Parameters
        ----------
        tokens : Tensor (B, L) of int
        attention_mask : Tensor (B, L) of bool, optional
            True for real tokens, False for padding on either side. If a context splits sequences across processes,
            pass ``mask=masks.key_padding(...)`` for the whole sequence instead.
        segments : Tensor (B, L) of int, optional
            The segment of each token; the first by default.
        mask : Tensor (B, 1, L, L) of bool, Mask or callable, optional
            Additional attention mask; True = may attend. For packed documents, pass ``masks.document(ids)``.
        positions : Tensor (L,) or (B, L) of int, optional
            Position of each token; 0, 1, 2, … by default.
        return_aux : AuxRequest, optional
            Auxiliary outputs to compute in each layer's attention.
        aux : list of Aux, optional
            Receives the requested auxiliary outputs, one entry per layer.

        Raises
        ------
        ValueError
            If an argument is invalid, or there are more tokens than learned positions.
        """
        self._check(tokens, attention_mask, segments)
        at = self._positions(tokens, attention_mask) if positions is None else positions
        x = self.positions(embedded(self.embedding, tokens), at)
        if self.segments is not None:
            x = x + (self.segments.weight[0] if segments is None else self.segments(segments))
        x = self.dropout(self.embedding_norm(x))
        x = x if self.widen is None else self.widen(x)
        rotation = None if self.rotary is None else self.rotary.rotation(at, x.dtype)
        shown = self._mask(attention_mask, mask)
        for i in range(self.config.layers):
            x, found, *_ = self.blocks[i % len(self.blocks)](x, shown, rotation, None, return_aux)
            if aux is not None and found is not None:
                aux.append(found)
        return self.norm(x)

    def pool(self, rows: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Pool the hidden states (B, L, E) of each sequence into one vector (B, E), by the config's ``pooling``.

        ``attention_mask`` (B, L) is True for real tokens. The result passes through the pooler layer, if there is one.
        """
        row = pooled(self.config.pooling, rows, attention_mask)
        return row if self.pooler is None else torch.tanh(self.pooler(row))

    def logits(self, rows: Tensor) -> Tensor:
        """Return the masked-language-model logits (..., N) for hidden states (..., E)."""
        return F.linear(self.masked_features(rows), *self.projection)

    def masked_features(self, rows: Tensor) -> Tensor:
        """Transform hidden states (..., E) into the input (..., W) of the output projection."""
        return self._head.forward(rows)

    @property
    def projection(self) -> tuple[Tensor, Tensor]:
        """The output projection for :meth:`masked_features`: weight (N, W) and bias (N,)."""
        head = self._head
        return self.embedding.weight if head.weight is None else head.weight, head.bias

    @property
    def _head(self) -> MaskedHead:
        if self.masked_head is None:
            raise rejected("EncoderLM", "masked_head", "be True to predict masked tokens", False)
        return self.masked_head

    def _positions(self, tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
        if self.config.skip_padding and attention_mask is not None:
            # As in RoBERTa, padding uses the embedding before the first position, if there is one.
            before = -1 if self.config.first_position and self.config.positions == "learned" else 0
            return torch.where(attention_mask, attention_mask.cumsum(1) - 1, before)
        return self._places(tokens)

    def _mask(self, attention_mask: Tensor | None, mask: MaskLike | None) -> Mask | None:
        parts: list[Mask] = [] if attention_mask is None else [masks.key_padding(attention_mask)]
        parts += [] if mask is None else [masks.as_mask(mask)]
        parts += [masks.alibi(self.config.heads)] if self.config.positions == "alibi" else []
        return reduce(and_, parts) if parts else None

    def _check(self, tokens: Tensor, attention_mask: Tensor | None, segments: Tensor | None) -> None:
        if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.is_floating_point():
            raise rejected("EncoderLM", "tokens", "be an integer tensor (B, L)", described(tokens))
        for name, given in (("attention_mask", attention_mask), ("segments", segments)):
            if given is not None and given.shape != tokens.shape:
                raise rejected("EncoderLM", name, f"have the shape of tokens, {shape(tokens)}", shape(given))
        if attention_mask is not None and self.context is not None:
            expected = "be None if a context splits the sequence: pass mask=masks.key_padding(...) for all of it"
            raise rejected("EncoderLM", "attention_mask", expected, shape(attention_mask))
        if attention_mask is not None and attention_mask.dtype != torch.bool:
            raise rejected("EncoderLM", "attention_mask", "be of type torch.bool", attention_mask.dtype)


class MaskedHead(nn.Module):
    """The masked-language-model head: ``W N(φ(U x)) + b``; W is the token embedding if weights are tied.

    Parameters
    ----------
    config : EncoderLMConfig
    """

    def __init__(self, config: EncoderLMConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.dense, self.norm = nn.Linear(config.width, config.embedded), norm(config, config.embedded)
        self.weight = None if config.tied else nn.Parameter(torch.empty(config.vocabulary, config.embedded))
        self.bias = nn.Parameter(torch.empty(config.vocabulary))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialize the untied output weight, if there is one, and set the bias to 0."""
        nn.init.zeros_(self.bias)
        if self.weight is not None:
            nn.init.normal_(self.weight, std=0.02)

    def forward(self, rows: Tensor) -> Tensor:
        """Transform hidden states (..., E) into (..., W)."""
        return self.norm(ACTIVATIONS[self.activation](self.dense(rows)))
