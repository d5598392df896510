"""Kernel regression is attention without training.

Keys are the inputs seen, values their targets (Nadaraya 1964, Watson 1964). Above, four kernels on y = 2 sin x + x^0.8
with noise; in the middle, the attention weights behind each curve, queries down, training points across. Below, four
widths of the Gaussian on y = 2 sin x + x, and the width that gradient descent on the leave-one-out error finds.
"""

from __future__ import annotations

from collections.abc import Callable

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor

import regard
from regard import AuxRequest, masks, scores

KERNELS: dict[str, Callable[[float], scores.Score]] = {
    "Gaussian": scores.Gaussian,
    "boxcar": scores.Boxcar,
    "triangular": scores.Triangular,
    "Epanechnikov": scores.Epanechnikov,
}
WIDTHS = (0.1, 0.3, 1.0, 3.0)
#: The weight that the darkest colour stands for.
MOST = 0.15


def made(count: int, power: float, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return points (count,) on [0, 5] and noisy values of 2 sin x + x^power."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, generator=generator).mul(5).sort().values
    return x, 2 * x.sin() + x**power + noise * torch.randn(count, generator=generator)


def smooth(query: Tensor, x: Tensor, y: Tensor, score: scores.Score, **options: object) -> tuple[Tensor, Tensor]:
    """Return the curve at the queries, and the weights (L, S)."""
    output, aux = regard.attention(
        query[:, None], x[:, None], y[:, None], score=score, return_aux=AuxRequest(weights=True), **options
    )
    assert aux.weights is not None
    return output[:, 0], aux.weights.detach()


def learned_width(x: Tensor, y: Tensor, steps: int = 200) -> float:
    """Return the width of least leave-one-out error: each point is predicted from all the others."""
    others = masks.dense(~torch.eye(len(x), dtype=torch.bool))
    log_width = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.Adam([log_width], lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        curve = regard.attention(
            x[:, None], x[:, None], y[:, None], others, score=scores.Gaussian(log_width.exp()), engine="reference"
        )
        (curve[:, 0] - y).square().mean().backward()
        optimizer.step()
    return float(log_width.detach().exp())


def draw() -> Figure:
    """Draw kernels, their weights, and widths."""
    figure, axes = plt.subplots(3, 4, figsize=(13, 8.5), constrained_layout=True)
    grid = torch.linspace(0, 5, 200)
    x, y = made(50, 0.8, 0.5, seed=0)
    for (name, kernel), curve_axis, weight_axis in zip(KERNELS.items(), axes[0], axes[1]):
        curve, weights = smooth(grid, x, y, kernel(1.0))
        curve_axis.plot(grid, 2 * grid.sin() + grid**0.8, "--", color="0.6", label="truth")
        curve_axis.plot(grid, curve, color="C0", label="regression")
        curve_axis.plot(x, y, ".", color="C1", label="points")
        curve_axis.set_title(f"{name}, σ = 1")
        image = weight_axis.imshow(weights, aspect="auto", cmap="Blues", extent=(0, len(x), 5, 0), vmin=0, vmax=MOST)
        weight_axis.set(xlabel="training point, by x", ylabel="query x")
        curve_axis.set(xlabel="x")
    figure.colorbar(image, ax=axes[1], label="weight", extend="max")
    axes[0, 0].set_ylabel("y")
    axes[2, 0].set_ylabel("y")
    axes[0, 0].legend(frameon=False, fontsize=8)
    x, y = made(40, 1.0, 1.0, seed=1)
    best = learned_width(x, y)
    for width, axis in zip(WIDTHS, axes[2]):
        axis.plot(grid, 2 * grid.sin() + grid, "--", color="0.6")
        axis.plot(grid, smooth(grid, x, y, scores.Gaussian(best))[0], color="C2", label=f"learned σ = {best:.2f}")
        axis.plot(grid, smooth(grid, x, y, scores.Gaussian(width))[0], color="C0", label=f"σ = {width}")
        axis.plot(x, y, ".", color="C1")
        axis.legend(frameon=False, fontsize=8)
        axis.set_xlabel("x")
    return figure


if __name__ == "__main__":
    draw()
    plt.show()
