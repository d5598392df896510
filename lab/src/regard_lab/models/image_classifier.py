"""Image classifiers: a linear layer on the pooled features of a vision transformer or residual network.

Dimensions: B batch, C channels, H and W pixels, E feature size, K labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from torch import Tensor, nn

from regard._utils.constraints import probability
from regard._utils.errors import rejected
from regard_lab.models.resnet import ResNet
from regard_lab.models.vision_transformer import VisionTransformer

#: The models that accept a classification head.
VisionModel = VisionTransformer | ResNet


class ImageClassifier(nn.Module):
    """An image model with a linear classification head.

    Parameters
    ----------
    model : VisionTransformer or ResNet
    labels : sequence of K str
        Unique label names, at least two.
    dropout : float, default 0.0
        Dropout probability before the linear layer.
    teacher : bool, default False
        Add a second linear layer on the distillation token of ``model``, and average the logits of both (Touvron 2020,
        arXiv 2012.12877).

    Examples
    --------
    >>> import torch
    >>> from regard_lab.models import ResNet, ResNetConfig
    >>> model = ImageClassifier(ResNet(ResNetConfig(features=4, layers=1)), ["cat", "dog"]).eval()
    >>> model(torch.randn(2, 3, 16, 16)).shape
    torch.Size([2, 2])
    """

    #: What the logits mean, as in :class:`~regard_lab.models.heads.Head`.
    problem = "single_label"

    def __init__(
        self, model: VisionModel, labels: Sequence[str], dropout: float = 0.0, *, teacher: bool = False
    ) -> None:
        super().__init__()
        self.labels = tuple(labels)
        if len(self.labels) < 2 or len(set(self.labels)) < len(self.labels):
            raise rejected("ImageClassifier", "labels", "be at least two, all different", list(labels)[:5])
        if teacher and not (isinstance(model, VisionTransformer) and model.config.distilled):
            raise rejected("ImageClassifier", "teacher", "be False for a model without a distillation token", True)
        self.model = model
        self.dropout = nn.Dropout(probability(self, "dropout", dropout))
        self.output = nn.Linear(model.config.width, len(self.labels))
        self.taught = nn.Linear(model.config.width, len(self.labels)) if teacher else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialize the linear layers with standard deviation 0.02; the model does not change."""
        for head in (self.output, self.taught):
            if head is not None:
                nn.init.normal_(head.weight, std=0.02)
                nn.init.zeros_(head.bias)

    def train(self, mode: bool = True) -> Self:
        """Set the mode; a completely frozen model stays in evaluation mode, to keep its batch norm statistics."""
        super().train(mode)
        if not any(each.requires_grad for each in self.model.parameters()):
            self.model.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (B, K) of images (B, C, H, W)."""
        found = self.model(images)
        logits: Tensor = self.output(self.dropout(self.model.pool(found)))
        return logits if self.taught is None else (logits + self.taught(found[:, 1])) / 2

    def predictions(self, logits: Tensor) -> Tensor:
        """Return the probabilities (B, K) for logits (B, K)."""
        return logits.softmax(-1)

    def extra_repr(self) -> str:
        """Return the labels, or their number if there are more than five."""
        return f"labels={list(self.labels)}" if len(self.labels) <= 5 else f"{len(self.labels)} labels"
