"""Adversarial training of classifiers of texts: learn each text's label a step away from it, too, where it costs most.

Dimensions: B batch, L tokens, W width of their vectors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard_lab.models import SequenceClassifier
from regard_lab.models.heads import Head
from regard_lab.tasks.classification.objective import LabelledBatch, NameLabels
from regard_lab.training.objectives import Loss


class AdversarialLabels(NameLabels):
    """Name the label of each text, and of its vectors moved uphill (Goodfellow 2015; Miyato 2017, arXiv 1605.07725).

    For a text with vectors x (L, W) and label y::

        g = ∇ₓ ℓ(x, y)        r = ε ‖x‖ g / ‖g‖        cost = (ℓ(x, y) + ℓ(x + r, y)) / 2

    where r counts as a constant, and norms are over all tokens of the text that have an influence. The vectors are what
    filters read, where a classifier has some, and otherwise what its embedding gives. Behind the vectors a step takes
    two passes forward and three backward, in place of one each. Validation knows nothing of it.

    Parameters
    ----------
    labels : sequence of C str
    step : float
        ε, the length of r as a share of the length of x.
    smoothing : float, default 0.0
        As :class:`~regard_lab.tasks.classification.objective.NameLabels` has it.
    """

    def __init__(self, labels: Sequence[str], step: float, smoothing: float = 0.0) -> None:
        super().__init__(labels, smoothing)
        self.step = step

    def loss(self, model: nn.Module, batch: LabelledBatch) -> Loss:
        assert isinstance(model, Head)
        filtered = isinstance(model, SequenceClassifier) and model.windows is not None
        moved = (_Filtered if filtered else _Embedded)(model)
        plain = super().loss(moved, batch)
        gradient = torch.autograd.grad(plain.value, moved.vectors, retain_graph=True)[0]
        moved.by = uphill(moved.vectors, gradient, self.step)
        worse = super().loss(moved, batch)
        return Loss((plain.value + worse.value) / 2, plain.shown, plain.count)


class _Moved(nn.Module, ABC):
    """A classifier that keeps a batch's vectors, and then reads them moved."""

    model: Head
    vectors: Tensor
    by: Tensor | None = None

    def __init__(self, model: Head) -> None:
        super().__init__()
        self.model = model

    def see(self, vectors: Tensor) -> Tensor:
        """Return vectors as they are to be read."""
        if self.by is not None:
            return vectors + self.by.to(vectors.dtype)
        # Where all that made them is frozen, they have no gradient yet.
        self.vectors = vectors if vectors.requires_grad else vectors.detach().requires_grad_()
        return self.vectors

    @abstractmethod
    def forward(self, tokens: Tensor, **inputs: Any) -> Tensor:
        """Return the logits of the labels."""


class _Filtered(_Moved):
    """Its vectors are what filters read, which is made once."""

    model: SequenceClassifier
    keep: Tensor | None = None

    def forward(self, tokens: Tensor, **inputs: Any) -> Tensor:
        if self.by is None:
            self.vectors, self.keep = self.model.read(tokens, **inputs)
        return self.model.score(self.see(self.vectors), self.keep)


class _Embedded(_Moved):
    """Its vectors are what its embedding gives."""

    def forward(self, tokens: Tensor, **inputs: Any) -> Tensor:
        hook = self.model.model.embedding.register_forward_hook(lambda *given: self.see(given[2]))
        try:
            return self.model(tokens, **inputs)
        finally:
            hook.remove()


def uphill(rows: Tensor, gradient: Tensor, step: float) -> Tensor:
    """Return what moves each text's rows (B, L, W) along its gradient, a share ``step`` of their length.

    Rows without a gradient are padding, and count for nothing; a text without any stays where it is.

    Examples
    --------
    >>> rows, gradient = torch.tensor([[[3.0, 4.0], [9.0, 9.0]]]), torch.tensor([[[0.0, 2.0], [0.0, 0.0]]])
    >>> uphill(rows, gradient, 0.1).tolist()
    [[[0.0, 0.5], [0.0, 0.0]]]
    """
    rows, gradient = rows.detach().float(), gradient.float()
    counts = (gradient != 0).any(-1, keepdim=True)
    # Gradients may be so small that their squares are not told from 0.
    slope = gradient / gradient.abs().amax((1, 2), keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    length, steepness = (each.square().sum((1, 2), keepdim=True).sqrt() for each in (rows * counts, slope))
    return step * length * slope / steepness.clamp(min=1)  # one element is ±1, or all are 0
