"""Classification and regression heads on language models: for sequences, tokens and pairs of sequences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import masks
from regard._utils.constraints import count, probability, size
from regard._utils.errors import rejected, unknown_name
from regard._utils.tracing import values_unavailable
from regard_lab.models.decoder_lm import DecoderLM
from regard_lab.models.encoder_lm import EncoderLM
from regard_lab.models.pooling import WINDOW, WindowFeatures, pooled

# Dimensions: B batch, L tokens, E hidden size, C labels.


#: What the logits mean: exactly one label is right, any number may be right, or the logits are the predicted values.
PROBLEMS = ("single_label", "multi_label", "regression")
#: The models that accept a head.
LanguageModel = EncoderLM | DecoderLM


class Head(nn.Module, ABC):
    """A language model with a linear layer that computes label logits from its hidden states.

    Parameters
    ----------
    model : EncoderLM or DecoderLM
    labels : sequence of str
        Unique label names; at least two for ``"single_label"``.
    dropout : float, default 0.1
        Dropout probability before the linear layer.
    bias : bool, default True
        Whether the linear layer has a bias.
    pad : int, optional
        Id of the padding token. Without ``attention_mask``, tokens with this id are padding. A decoder's last token is
        the last one with another id, even if ``attention_mask`` marks padding tokens as real.
    problem : {"single_label", "multi_label", "regression"}
        What the logits mean: see :meth:`predictions`.
    **options
        Options of the subclass.
    """

    def __init__(
        self,
        model: LanguageModel,
        labels: Sequence[str],
        dropout: float = 0.1,
        *,
        bias: bool = True,
        pad: int | None = None,
        problem: str = "single_label",
        **options: Any,
    ) -> None:
        super().__init__()
        self.labels = tuple(labels)
        if problem not in PROBLEMS:
            raise unknown_name(type(self).__name__, "problem", str(problem), PROBLEMS)
        least, count = (2, "two") if problem == "single_label" else (1, "one")
        if len(self.labels) < least or len(set(self.labels)) < len(self.labels):
            raise rejected(type(self).__name__, "labels", f"be at least {count}, all different", list(labels)[:5])
        self.problem = problem
        self.model = model
        self.dropout = nn.Dropout(probability(self, "dropout", dropout))
        self.output = nn.Linear(self._scored(**options), len(self.labels), bias=bias)
        self.pad = pad
        Head.reset_parameters(self)  # other submodules initialized themselves

    def _scored(self) -> int:
        """Return the number of input features of the linear layer; subclasses create their modules here."""
        return self.model.config.width

    def reset_parameters(self) -> None:
        """Reinitialize the linear layer with standard deviation 0.02; the model does not change."""
        nn.init.normal_(self.output.weight, std=0.02)
        if self.output.bias is not None:
            nn.init.zeros_(self.output.bias)

    @abstractmethod
    def forward(self, tokens: Tensor, *, attention_mask: Tensor | None = None, **inputs: Any) -> Tensor:
        """Return the label logits.

        Parameters
        ----------
        tokens : Tensor (B, L) of int
        attention_mask : Tensor (B, L) of bool, optional
            True for real tokens, False for padding.
        **inputs
            Other inputs of the model, such as ``segments``.
        """

    def rows(self, tokens: Tensor, attention_mask: Tensor | None, **inputs: Any) -> Tensor:
        """Return the model's hidden states (B, L, E); real tokens never attend to padding."""
        if isinstance(self.model, EncoderLM):
            return self.model(tokens, attention_mask=attention_mask, **inputs)
        # Causal attention never sees padding on the right, so the mask is needed only for padding on the left.
        if attention_mask is not None and (values_unavailable(attention_mask) or _starts_with_padding(attention_mask)):
            inputs["mask"] = masks.key_padding(attention_mask)
        return self.model.features(tokens, **inputs)

    def predictions(self, logits: Tensor) -> Tensor:
        """Turn logits (..., C) into predictions, as transformers' pipelines do.

        Softmax probabilities for ``"single_label"``, sigmoid probabilities for ``"multi_label"``, and the logits
        themselves for ``"regression"``.
        """
        if self.problem == "single_label":
            return logits.softmax(-1)
        return logits.sigmoid() if self.problem == "multi_label" else logits

    def extra_repr(self) -> str:
        """Return the labels, or their number if there are more than five."""
        return f"labels={list(self.labels)}" if len(self.labels) <= 5 else f"{len(self.labels)} labels"


def _starts_with_padding(attention_mask: Tensor) -> bool:
    """Whether padding precedes a real token in any sequence."""
    return bool((attention_mask[:, 1:] & ~attention_mask[:, :-1]).any())


class SequenceClassifier(Head):
    """Classify whole sequences: one text, or two concatenated texts.

    Parameters
    ----------
    model, labels, dropout, bias, pad, problem
        As in :class:`Head`.
    filters : int, default 0
        If positive, classify the outputs of this many convolutional filters per window size instead of a pooled
        hidden state; see :class:`~regard_lab.models.heads.WindowFeatures`.
    window, narrowest : int, default 3 and 1
        The largest and the smallest window size, in tokens.
    means : bool, default True
        Include the mean of each filter as well as its maximum.
    both_ways : bool, default False
        Feed the filters 3·E features per token: its normalized embedding, and the decoder's hidden states for the
        sequence read forward and backward (Peters 2018, arXiv 1802.05365). Pretrain the decoder in both directions. If
        all blocks are frozen, they run without gradients and only the embedding features train the embedding.

    Raises
    ------
    ValueError
        If ``both_ways`` is used with an encoder or without filters.

    Examples
    --------
    >>> from regard_lab.models import EncoderLM, EncoderLMConfig, SequenceClassifier
    >>> model = SequenceClassifier(EncoderLM(EncoderLMConfig(50, width=16)), ["bad", "good"])
    >>> model(torch.tensor([[3, 1, 4]])).shape
    torch.Size([1, 2])
    """

    #: The options of the filters.
    filtering: dict[str, Any]
    filters: int
    windows: WindowFeatures | None

    def _scored(
        self, filters: int = 0, window: int = WINDOW, narrowest: int = 1, means: bool = True, both_ways: bool = False
    ) -> int:
        self.filters = count(self, "filters", filters)
        window, narrowest = size(self, "window", window), size(self, "narrowest", narrowest)
        self.both_ways, sizes = both_ways, {"filters": self.filters, "window": window, "narrowest": narrowest}
        self.filtering = sizes | {"means": means, "both_ways": both_ways}
        if both_ways and not isinstance(self.model, DecoderLM):
            raise rejected(type(self).__name__, "both_ways", "be False for an encoder, which sees both sides", True)
        if both_ways and not self.filters:
            raise rejected(type(self).__name__, "both_ways", "be False without filters", True)
        width = self.model.config.width * (3 if both_ways else 1)
        self.windows = WindowFeatures(width, self.filters, window, narrowest, means=means) if self.filters else None
        return super()._scored() if self.windows is None else self.windows.features

    def reset_parameters(self) -> None:
        """Reinitialize the linear layer with standard deviation 0.02, and the filters; the model does not change."""
        super().reset_parameters()
        if self.windows is not None:
            self.windows.reset_parameters()

    def read(self, tokens: Tensor, attention_mask: Tensor | None = None, **inputs: Any) -> tuple[Tensor, Tensor | None]:
        """Return the features (B, L, ·) for :meth:`score`, and the mask of tokens to pool."""
        counted = attention_mask
        if self.pad is not None and (attention_mask is None or self._takes_last):
            counted = tokens != self.pad if attention_mask is None else attention_mask & (tokens != self.pad)
        if attention_mask is None and isinstance(self.model, EncoderLM):
            attention_mask = counted
        return (self._both_ways if self.both_ways else self.rows)(tokens, attention_mask, **inputs), counted

    @property
    def _takes_last(self) -> bool:
        """Whether the head pools the last token that is not padding."""
        return self.windows is None and self.model.config.pooling == "last"

    def score(self, rows: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the logits (B, C) from the features and mask that :meth:`read` returned."""
        return self.output(self.dropout((self.windows or self.model.pool)(rows, attention_mask)))

    def _both_ways(self, tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return each token's embedding, forward and backward hidden states, (B, L, 3E); padding is on the right."""
        steps, width = torch.arange(tokens.shape[1], device=tokens.device), self.model.config.width
        lengths = tokens.shape[1] if attention_mask is None else attention_mask.sum(1, keepdim=True)
        back = (lengths - 1 - steps).clamp(min=0).expand_as(tokens)  # indices of the reversed sequence
        learns = any(each.requires_grad for block in self.model.blocks for each in block.parameters())
        with nullcontext() if learns else torch.no_grad():
            forward, backward = (self.rows(each, None) for each in (tokens, tokens.gather(1, back)))
        vectors = self.model.dropout(F.layer_norm(self.model.embedding(tokens), (width,)))
        return torch.cat([vectors, forward, backward.gather(1, back.unsqueeze(-1).expand_as(backward))], -1)

    def forward(self, tokens: Tensor, *, attention_mask: Tensor | None = None, **inputs: Any) -> Tensor:
        """Return the logits (B, C)."""
        return self.score(*self.read(tokens, attention_mask, **inputs))


class TokenClassifier(Head):
    """Classify each token.

    Examples
    --------
    >>> from regard_lab.models import EncoderLM, EncoderLMConfig, TokenClassifier
    >>> model = TokenClassifier(EncoderLM(EncoderLMConfig(50, width=16)), ["other", "name"])
    >>> model(torch.tensor([[3, 1, 4]])).shape
    torch.Size([1, 3, 2])
    """

    def forward(self, tokens: Tensor, *, attention_mask: Tensor | None = None, **inputs: Any) -> Tensor:
        """Return the logits (B, L, C); ignore those of padding."""
        return self.output(self.dropout(self.rows(tokens, attention_mask, **inputs)))


class PairClassifier(Head):
    """Classify pairs of separately encoded sequences by [u, v, |u − v|] (Reimers 2019, arXiv 1908.10084).

    u and v are mean-pooled hidden states, so an encoded sequence can be compared with many others.

    Examples
    --------
    >>> from regard_lab.models import EncoderLM, EncoderLMConfig, PairClassifier
    >>> model = PairClassifier(EncoderLM(EncoderLMConfig(50, width=16)), ["other", "same"])
    >>> model(torch.tensor([[3, 1, 4]]), torch.tensor([[1, 5]])).shape
    torch.Size([1, 2])
    """

    def _scored(self) -> int:
        return 3 * self.model.config.width

    def forward(
        self,
        tokens: Tensor,
        others: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        others_attention_mask: Tensor | None = None,
        **inputs: Any,
    ) -> Tensor:
        """Return the logits (B, C) of pairs of ``tokens`` (B, L) and ``others`` (B, M)."""
        if others is None:
            raise rejected("PairClassifier", "others", "be given: the second sequence of each pair", None)
        u, v = self.embed(tokens, attention_mask, **inputs), self.embed(others, others_attention_mask, **inputs)
        return self.output(self.dropout(torch.cat([u, v, (u - v).abs()], -1)))

    def embed(self, tokens: Tensor, attention_mask: Tensor | None = None, **inputs: Any) -> Tensor:
        """Return the mean hidden state (B, E) of each sequence's real tokens."""
        return pooled("mean", self.rows(tokens, attention_mask, **inputs), attention_mask)
