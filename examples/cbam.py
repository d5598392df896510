"""CBAM looks at channels, then at places.

A small convolutional network learns which of scikit-learn's two photographs a patch comes from. Its attention module
(Woo et al. 2018) weighs channels and places, and each place that it looks at has a small price. Next to each
photograph: the weights of its places, and the weights of its channels. For the maps, photographs are continued by
reflection, since the zeros that convolutions add at a border would show as a frame.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_sample_image
from torch import Tensor, nn
from torch.nn import functional as F

from regard.nn import CBAM

SIDE, CHANNELS, STEPS, PRICE, MARGIN = 48, 16, 150, 0.1, 32


class Classifier(nn.Module):
    """Two convolutions, CBAM, and the mean over places."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, CHANNELS, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
            nn.ReLU(),
        )
        self.cbam = CBAM(CHANNELS, reduction=2)
        self.output = nn.Linear(CHANNELS, 2)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits (B, 2) of images (B, 3, H, W), weights of channels (B, C, 1, 1) and places (B, 1, h, w)."""
        seen, (channels, places) = self.cbam(self.features(images), return_map=True)
        return self.output(seen.mean((2, 3))), channels, places


def photographs() -> Tensor:
    """Return the two photographs as (2, 3, H, W), with mean 0 and variance 1."""
    pictures = torch.stack([torch.tensor(load_sample_image(name)) for name in ("china.jpg", "flower.jpg")])
    pictures = F.avg_pool2d(pictures.permute(0, 3, 1, 2).float(), 2)
    return (pictures - pictures.mean()) / pictures.std()


def trained(images: Tensor) -> Classifier:
    """Return a network that classifies patches of the two."""
    torch.manual_seed(2)
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    height, width = images.shape[-2:]
    for _ in range(STEPS):
        labels = torch.randint(2, (32,))
        tops, lefts = torch.randint(height - SIDE, (32,)).tolist(), torch.randint(width - SIDE, (32,)).tolist()
        patches = [images[b, :, y : y + SIDE, x : x + SIDE] for b, y, x in zip(labels.tolist(), tops, lefts)]
        optimizer.zero_grad()
        logits, _, places = model(torch.stack(patches))
        (F.cross_entropy(logits, labels) + PRICE * places.mean()).backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def draw() -> Figure:
    """Draw photographs, maps of places and weights of channels."""
    images = photographs()
    with torch.enable_grad():
        model = trained(images)
    _, channels, places = model(F.pad(images, (MARGIN,) * 4, mode="reflect"))
    places = places[..., MARGIN // 2 : -MARGIN // 2, MARGIN // 2 : -MARGIN // 2]
    figure, axes = plt.subplots(2, 3, figsize=(12, 5.6), constrained_layout=True)
    for b, row in enumerate(axes):
        shown = images[b].permute(1, 2, 0)
        row[0].imshow((shown - shown.min()) / (shown.max() - shown.min()))
        looked = row[1].imshow(places[b, 0], cmap="magma", vmin=0, vmax=1)
        figure.colorbar(looked, ax=row[1], label="weight")
        row[2].bar(range(CHANNELS), channels[b].flatten())
        row[2].set(xlabel="channel", ylabel="weight", ylim=(0, 1), xticks=range(0, CHANNELS, 5))
        for axis in row[:2]:
            axis.set(xticks=[], yticks=[])
    for axis, title in zip(axes[0], ("photograph", "places", "channels")):
        axis.set_title(title)
    return figure


if __name__ == "__main__":
    draw()
    plt.show()
