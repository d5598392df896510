"""Soft, sparse and hard attention.

The same twelve scores under each normalizer: softmax gives every key something, entmax and sparsemax cut the tail off,
sigmoid treats each key by itself, argmax takes one. Below, the mean of many draws of sampled hard attention is softmax.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from regard import normalizers

SHOWN = {
    "softmax": normalizers.Softmax(),
    "entmax, α = 1.5": normalizers.Entmax15(),
    "sparsemax": normalizers.Sparsemax(),
    "sigmoid": normalizers.Sigmoid(),
    "argmax": normalizers.Argmax(),
}
DRAWS = 2000


def draw() -> Figure:
    """Draw the weights as bars."""
    torch.manual_seed(0)
    scores = torch.randn(1, 12).mul(1.2).sort().values
    figure, axes = plt.subplots(2, 3, figsize=(11, 5), sharex=True, sharey=True, constrained_layout=True)
    for (name, normalizer), axis in zip(SHOWN.items(), axes.flat):
        axis.bar(range(12), normalizer.weights(scores)[0])
        axis.set_title(name)
    drawn = normalizers.Sampled().weights(scores.expand(DRAWS, -1)).mean(0)
    last = axes.flat[-1]
    last.bar(range(12), drawn)
    last.plot(range(12), normalizers.Softmax().weights(scores)[0], "k_", markersize=18, label="softmax")
    last.set_title(f"sampled, mean of {DRAWS:,} draws")
    last.legend(frameon=False)
    for axis in axes[-1]:
        axis.set_xlabel("key, by its score")
    for axis in axes[:, 0]:
        axis.set_ylabel("weight")
    return figure


if __name__ == "__main__":
    draw()
    plt.show()
