"""What channel and spatial attention keep.

A residual network with CBAM in its blocks (Woo et al. 2018) learns scikit-learn's handwritten digits in fields of
noise, as ``regard train classifier --images`` trains it. Left, the gates of all blocks' channels, of each digit the
mean over test images, less the mean of all digits: a block keeps what is green more for this digit than for others,
and what is pink less. Right, test images, and below them the gates of their places in the three blocks, of which what
is bright is kept: the first block keeps the digit and its surroundings, the others drop edges and corners.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor

from examples.vision_rollout import scattered
from regard_lab.models import ResidualBlock, ResNet
from regard_lab.tasks.classification import ImageClassificationOptions, ImageClassificationPipeline, ImageTraining

TESTED, EPOCHS = 400, 8.0
_Maps = list[tuple[Tensor, Tensor]]


def trained(pixels: np.ndarray, labels: np.ndarray) -> ImageClassificationPipeline:
    """Return a classifier of images (N, H, W)."""
    table = {
        "model": {"features": 8, "stages": 3, "layers": 1, "attention": "cbam", "reduction": 4},
        "augmentation": {"shift": 2},
        "training": {"epochs": EPOCHS, "learning_rate": 3e-3, "batch_examples": 32, "seed": 1},
    }
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder, "digits.npz"), images=pixels, labels=labels)
        options = ImageClassificationOptions.from_table(table | {"data": {"images": f"{folder}/digits.npz"}})
        classifier, _ = ImageTraining(options, Path(folder, "run"), lambda _: None).train()
    return classifier


@torch.no_grad()
def gates(classifier: ImageClassificationPipeline, images: Tensor) -> _Maps:
    """Return the gates of channels (B, C, 1, 1) and places (B, 1, h, w) of each block."""
    assert isinstance(classifier.model.model, ResNet)
    found: _Maps = []
    x = classifier.model.model.stem(images)
    for block in classifier.model.model.blocks:
        assert isinstance(block, ResidualBlock)
        branch = block.second(torch.relu(block.first(x)))
        found.append(block.attention(branch, return_map=True)[1])
        x = block(x)
    return found


def draw() -> Figure:
    """Train, then draw the gates."""
    digits, labels = load_digits(return_X_y=True)
    pixels = np.round(digits.reshape(-1, 8, 8) * 255 / 16).astype(np.uint8)
    order = np.random.default_rng(0).permutation(len(pixels))
    learn, test = order[TESTED:], order[:TESTED]
    random = np.random.default_rng(1)
    many = np.concatenate([scattered(pixels[learn], random) for _ in range(2)])
    classifier = trained(many, np.tile(labels[learn], 2))
    fitted = classifier.transform(list(scattered(pixels[test], random)[..., None]))
    right = float((classifier.probabilities(fitted).argmax(1).numpy() == labels[test]).mean())
    images = classifier.preprocessing.normalized(torch.from_numpy(fitted))
    maps = gates(classifier, images)
    channels = torch.cat([each.flatten(1) for each, _ in maps], 1)
    means = torch.stack([channels[torch.from_numpy(labels[test] == digit)].mean(0) for digit in range(10)])
    means = means - means.mean(0)
    figure = plt.figure(figsize=(13, 4.2), layout="constrained")
    left, side = figure.subfigures(1, 2, width_ratios=(1, 1.3))
    axis, most = left.subplots(), float(means.abs().max())
    image = axis.imshow(means, cmap="PiYG", aspect="auto", vmin=-most, vmax=most)
    axis.set(xlabel="channels of the three blocks", ylabel="digit", xticks=[], yticks=range(10))
    for width in np.cumsum([each.shape[1] for each, _ in maps])[:-1]:
        axis.axvline(width - 0.5, color="black", linewidth=1)
    left.colorbar(image, ax=axis, label="gate − its mean")
    for digit, (above, *below) in enumerate(side.subplots(1 + len(maps), 10).T):
        first = int(np.flatnonzero(labels[test] == digit)[0])
        above.imshow(fitted[first, ..., 0], cmap="gray")
        for axis, (_, places) in zip(below, maps):
            axis.imshow(places[first, 0], cmap="magma")
        for axis in (above, *below):
            axis.set(xticks=[], yticks=[])
    figure.suptitle(f"{right:.0%} of {TESTED} test images are named right")
    return figure


if __name__ == "__main__":
    draw()
    plt.show()
