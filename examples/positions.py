"""Positions: what attention knows of order.

Sinusoids are added to the rows; rotary positions turn queries and keys, so that their product depends on the distance
alone; ALiBi and T5's buckets add a bias to the score, here without training (T5's table is drawn at random).
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor

from regard import masks
from regard.nn import RelativeBias, Rotary, SinusoidalPositions

N = 64


def bias_of(mask: masks.Mask, heads: int) -> Tensor:
    """Return what a mask adds to scores, (H, N, N)."""
    bound = mask.bind(masks.Extent(1, heads, N, N), "cpu")
    index = torch.arange(N)
    pairs = torch.zeros(1, 1, 1, 1, dtype=torch.long), torch.arange(heads).view(-1, 1, 1), index[:, None], index
    return bound.matrix(*pairs, torch.float32)[0].detach()


def draw() -> Figure:
    """Draw the four kinds."""
    torch.manual_seed(0)
    figure, axes = plt.subplots(1, 4, figsize=(18, 3.6), constrained_layout=True)
    encoding = SinusoidalPositions(64)(torch.zeros(1, N, 64))[0]
    added = axes[0].imshow(encoding, cmap="RdBu", aspect="auto", vmin=-1, vmax=1)
    figure.colorbar(added, ax=axes[0], label="value")
    axes[0].set(title="sinusoidal", xlabel="feature", ylabel="position")
    rotary = Rotary(64)
    row = torch.ones(1, 1, 256, 64)
    turned = rotary(row)[0, 0]
    axes[1].plot(turned @ turned[0] / 64)
    axes[1].set(title="rotary: product with position 0", xlabel="distance", ylabel="product, relative to distance 0")
    slopes = bias_of(masks.alibi(8) & masks.causal(), 8)
    for head in range(0, 8, 2):
        axes[2].plot(slopes[head, -1].exp(), label=f"head {head + 1}")
    axes[2].set(title="ALiBi: factor of a weight, last query", xlabel="key", ylabel="factor")
    axes[2].legend(frameon=False)
    table = RelativeBias(1, num_buckets=16, max_distance=48)
    torch.nn.init.normal_(table.weight)
    bias = bias_of(table(), 1)[0]
    most = float(bias.abs().max())
    figure.colorbar(axes[3].imshow(bias, cmap="RdBu", vmin=-most, vmax=most), ax=axes[3], label="added to the score")
    axes[3].set(title="T5: a bias per bucket of distances", xlabel="key", ylabel="query")
    return figure


if __name__ == "__main__":
    draw()
    plt.show()
