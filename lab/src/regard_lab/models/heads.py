"""Heads on language models: labels of sequences, of tokens, and of pairs of sequences."""

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

# Dimensions: B batch, L tokens, E width, C labels.


#: What scores of labels mean: one label is right, each may be, or they are the values themselves.
PROBLEMS = ("single_label", "multi_label", "regression")
#: What a head may stand on.
LanguageModel = EncoderLM | DecoderLM


class Head(nn.Module, ABC):
    """A language model, and a matrix that makes scores of labels of its rows.

    Parameters
    ----------
    model : EncoderLM or DecoderLM
    labels : sequence of str
        Their names, all different; at least two where one of them is right.
    dropout : float, default 0.1
        Probability of dropping a feature before the matrix, in training.
    bias : bool, default True
        Of the scores.
    pad : int, optional
        The number of padding. Without ``keep``, tokens of this number are padding; and the last row of a decoder is
        that of the last token of another number, also where ``keep`` counts this one as real.
    problem : {"single_label", "multi_label", "regression"}
        What the scores mean: see :meth:`predictions`.
    **options
        What else a head takes.
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
        Head.reset_parameters(self)  # what else there is was drawn when it was made

    def _scored(self) -> int:
        """Return how many features are scored, and make what makes them, of the options that only this head takes."""
        return self.model.config.width

    def reset_parameters(self) -> None:
        """Draw the head's matrix anew with standard deviation 0.02; the model stays as it is."""
        nn.init.normal_(self.output.weight, std=0.02)
        if self.output.bias is not None:
            nn.init.zeros_(self.output.bias)

    @abstractmethod
    def forward(self, tokens: Tensor, *, keep: Tensor | None = None, **inputs: Any) -> Tensor:
        """Return the logits of the labels.

        Parameters
        ----------
        tokens : Tensor (B, L) of int
        keep : Tensor (B, L) of bool, optional
            Which tokens are real; the others are padding.
        **inputs
            What else the model takes, such as ``segments``.
        """

    def rows(self, tokens: Tensor, keep: Tensor | None, **inputs: Any) -> Tensor:
        """Return the model's rows (B, L, E); no real token sees padding."""
        if isinstance(self.model, EncoderLM):
            return self.model(tokens, keep=keep, **inputs)
        # What reads forward never sees padding that stands behind.
        if keep is not None and (values_unavailable(keep) or bool((keep[:, 1:] & ~keep[:, :-1]).any())):
            inputs["mask"] = masks.key_padding(keep)
        return self.model.features(tokens, **inputs)

    def predictions(self, logits: Tensor) -> Tensor:
        """Return what logits (..., C) say of the labels.

        Probabilities that sum to 1 where one label is right, a probability of each where several may be, and the values
        themselves in regression: what transformers' pipelines return.
        """
        if self.problem == "single_label":
            return logits.softmax(-1)
        return logits.sigmoid() if self.problem == "multi_label" else logits

    def extra_repr(self) -> str:
        """Return the labels, or how many there are."""
        return f"labels={list(self.labels)}" if len(self.labels) <= 5 else f"{len(self.labels)} labels"


class SequenceClassifier(Head):
    """Score labels of whole sequences: of one text, or of two that stand one behind the other.

    Parameters
    ----------
    model, labels, dropout, bias, pad, problem
        As :class:`Head` has them.
    filters : int, default 0
        Where it is above 0, what so many filters find in windows of each width is scored, in place of one row that
        stands for the sequence; see :class:`~regard_lab.models.heads.WindowFeatures`.
    window, narrowest : int, default 3 and 1
        Tokens of the widest and of the narrowest window.
    means : bool, default True
        Whether the mean value of each filter is scored beside its largest.
    both_ways : bool, default False
        Whether filters read 3·E numbers of each token: its vector, normalized, and the rows that a decoder makes of the
        sequence forward and backward (Peters 2018, arXiv 1802.05365). The decoder should have learned both. What blocks
        without a parameter that learns make has no gradient, so that the embedding learns by its vectors alone.

    Raises
    ------
    ValueError
        If a sequence is to be read both ways by an encoder, or without filters.

    Examples
    --------
    >>> from regard_lab.models import EncoderLM, EncoderLMConfig, SequenceClassifier
    >>> model = SequenceClassifier(EncoderLM(EncoderLMConfig(50, width=16)), ["bad", "good"])
    >>> model(torch.tensor([[3, 1, 4]])).shape
    torch.Size([1, 2])
    """

    #: The options that say what filters there are.
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
            raise rejected(type(self).__name__, "both_ways", "be False of an encoder, which sees both sides", True)
        if both_ways and not self.filters:
            raise rejected(type(self).__name__, "both_ways", "be False without filters", True)
        width = self.model.config.width * (3 if both_ways else 1)
        self.windows = WindowFeatures(width, self.filters, window, narrowest, means=means) if self.filters else None
        return super()._scored() if self.windows is None else self.windows.features

    def reset_parameters(self) -> None:
        """Draw the head's matrix anew with standard deviation 0.02, and the filters; the model stays as it is."""
        super().reset_parameters()
        if self.windows is not None:
            self.windows.reset_parameters()

    def read(self, tokens: Tensor, keep: Tensor | None = None, **inputs: Any) -> tuple[Tensor, Tensor | None]:
        """Return the features (B, L, ·) that labels are scored by, and which of them count."""
        counted = keep
        if self.pad is not None and (keep is None or self._takes_last):
            counted = tokens != self.pad if keep is None else keep & (tokens != self.pad)
        if keep is None and isinstance(self.model, EncoderLM):
            keep = counted
        return (self._both_ways if self.both_ways else self.rows)(tokens, keep, **inputs), counted

    @property
    def _takes_last(self) -> bool:
        """Whether the last row that is no padding stands for a sequence."""
        return self.windows is None and self.model.config.pooling == "last"

    def score(self, rows: Tensor, keep: Tensor | None = None) -> Tensor:
        """Return the logits (B, C) of sequences of what :meth:`read` gave."""
        return self.output(self.dropout((self.windows or self.model.pool)(rows, keep)))

    def _both_ways(self, tokens: Tensor, keep: Tensor | None) -> Tensor:
        """Return of each token its vector, and its rows forward and backward, (B, L, 3E); padding stands behind."""
        steps, width = torch.arange(tokens.shape[1], device=tokens.device), self.model.config.width
        lengths = tokens.shape[1] if keep is None else keep.sum(1, keepdim=True)
        back = (lengths - 1 - steps).clamp(min=0).expand_as(tokens)  # where a reader from the end is at each step
        learns = any(each.requires_grad for block in self.model.blocks for each in block.parameters())
        with nullcontext() if learns else torch.no_grad():
            forward, backward = (self.rows(each, None) for each in (tokens, tokens.gather(1, back)))
        vectors = self.model.dropout(F.layer_norm(self.model.embedding(tokens), (width,)))
        return torch.cat([vectors, forward, backward.gather(1, back.unsqueeze(-1).expand_as(backward))], -1)

    def forward(self, tokens: Tensor, *, keep: Tensor | None = None, **inputs: Any) -> Tensor:
        """Return the logits (B, C)."""
        return self.score(*self.read(tokens, keep, **inputs))


class TokenClassifier(Head):
    """Score labels of each token.

    Examples
    --------
    >>> from regard_lab.models import EncoderLM, EncoderLMConfig, TokenClassifier
    >>> model = TokenClassifier(EncoderLM(EncoderLMConfig(50, width=16)), ["other", "name"])
    >>> model(torch.tensor([[3, 1, 4]])).shape
    torch.Size([1, 3, 2])
    """

    def forward(self, tokens: Tensor, *, keep: Tensor | None = None, **inputs: Any) -> Tensor:
        """Return the logits (B, L, C); those of padding mean nothing."""
        return self.output(self.dropout(self.rows(tokens, keep, **inputs)))


class PairClassifier(Head):
    """Score labels of two sequences that are read apart: u and v, with |u − v| (Reimers 2019, arXiv 1908.10084).

    Each sequence is the mean of its rows, so that one that was read can be compared with many.

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
        keep: Tensor | None = None,
        keep_others: Tensor | None = None,
        **inputs: Any,
    ) -> Tensor:
        """Return the logits (B, C) of pairs of ``tokens`` (B, L) and ``others`` (B, M)."""
        if others is None:
            raise rejected("PairClassifier", "others", "be given: the second sequence of each pair", None)
        u, v = self.embed(tokens, keep, **inputs), self.embed(others, keep_others, **inputs)
        return self.output(self.dropout(torch.cat([u, v, (u - v).abs()], -1)))

    def embed(self, tokens: Tensor, keep: Tensor | None = None, **inputs: Any) -> Tensor:
        """Return the mean row (B, E) of each sequence's real tokens."""
        return pooled("mean", self.rows(tokens, keep, **inputs), keep)
