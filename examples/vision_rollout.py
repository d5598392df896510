"""A vision transformer finds the digit.

scikit-learn's handwritten digits, each somewhere in a field of noise twice as wide. A small transformer over 10 × 10
patches, with one stage of convolutions before them, learns which digit it is; what is trained is what ``regard train
classifier --images`` trains. Above, test images; below, how much its class token draws on each patch, through all
layers (attention rollout, Abnar and Zuidema 2020): what it draws on less lies in the dark. Its answers stand above; a
wrong one is red, with the right one. There the map says no more than where it looked.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

from regard.inspect import capture, plot_image, rollout
from regard_lab.tasks.classification import ImageClassificationOptions, ImageClassificationPipeline, ImageTraining

SIDE, COPIES, SHOWN, TESTED, EPOCHS = 20, 3, 8, 200, 6.0


def scattered(digits: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return digits (N, 8, 8), each at a random place of noise, (N, SIDE, SIDE)."""
    fields = random.integers(0, 110, (len(digits), SIDE, SIDE), np.uint8)
    for field, digit, (top, left) in zip(fields, digits, random.integers(0, SIDE - 8, (len(digits), 2))):
        part = field[top : top + 8, left : left + 8]
        part[...] = np.maximum(part, digit)
    return fields


def trained(images: np.ndarray, labels: np.ndarray) -> ImageClassificationPipeline:
    """Return a classifier of images (N, SIDE, SIDE)."""
    table = {
        "kind": "transformer",
        "model": {
            "patch": 1, "stem": 1, "stem_width": 32, "width": 48, "heads": 3, "layers": 3, "feedforward": 96,
            "class_token": True, "pooling": "first",
        },
        "augmentation": {"shift": 2},
        "training": {"epochs": EPOCHS, "learning_rate": 3e-3, "seed": 1},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder, "digits.npz"), images=images, labels=labels)
        options = ImageClassificationOptions.from_table(table | {"data": {"images": f"{folder}/digits.npz"}})
        classifier, _ = ImageTraining(options, Path(folder, "run"), lambda _: None).train()
    return classifier


def draw() -> Figure:
    """Train, then draw where the class token's answer comes from."""
    digits, labels = load_digits(return_X_y=True)
    pixels = np.round(digits.reshape(-1, 8, 8) * 255 / 16).astype(np.uint8)
    order = np.random.default_rng(0).permutation(len(pixels))
    learn, test = order[TESTED:], order[:TESTED]
    random = np.random.default_rng(1)
    many = np.concatenate([scattered(pixels[learn], random) for _ in range(COPIES)])
    classifier = trained(many, np.tile(labels[learn], COPIES))
    shown = scattered(pixels[test], random)
    fitted = classifier.transform(list(shown[..., None]))
    named = classifier.probabilities(fitted).argmax(1)
    right = float((named.numpy() == labels[test]).mean())
    images = classifier.preprocessing.normalized(torch.from_numpy(fitted[:SHOWN]))
    with capture(classifier.model) as record, torch.no_grad():
        classifier.model(images)
    figure, axes = plt.subplots(2, SHOWN, figsize=(1.6 * SHOWN, 3.8), constrained_layout=True)
    for i, (above, below) in enumerate(axes.T):
        above.imshow(shown[i], cmap="gray")
        answer, truth = classifier.labels[int(named[i])], str(labels[test][i])
        above.set_title(answer if answer == truth else f"{answer} (is {truth})", color="k" if answer == truth else "C3")
        plot_image(rollout(record, batch=i)[0, 1:], shown[i], (SIDE // 2, SIDE // 2), below)
        for axis in (above, below):
            axis.set(xticks=[], yticks=[])
    figure.suptitle(f"{right:.0%} of {TESTED} test images are classified correctly")
    return figure


if __name__ == "__main__":
    draw()
    plt.show()
