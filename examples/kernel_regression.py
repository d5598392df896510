"""Kernel regression: edges, bandwidths, weights.

``regard.regression`` is attention over the training data as scikit-learn estimators. Above, an average (order 0) is
biased at the edges, where all points lie on one side; a line through them (order 1, Stone 1977) follows their slope.
Beside it the leave-one-out error by which the bandwidth was chosen, and the weights of order 1: a few at the edges are
negative. Below, three features of which the third has no part in y = sin x0 + x1²/4 + noise: a bandwidth for each,
learned by gradient descent on the leave-one-out error, is so wide for it that its differences hardly count.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from regard.regression import NadarayaWatsonRegressor, plot_fit, plot_loo, plot_weights

#: How the bandwidth of three features is chosen.
WAYS = ("scott", "loo", "learned")


def curve(count: int = 60, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return points (count, 1) on [0, 3] and noisy values of a curve that is steep at both edges."""
    generator = np.random.default_rng(seed)
    x = np.sort(generator.uniform(0, 3, count))
    return x[:, None], truth(x) + 0.7 * generator.standard_normal(count)


def truth(x: np.ndarray) -> np.ndarray:
    """Return the curve without noise."""
    return 3 * x + np.sin(2 * x)


def three_features(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return points (count, 3) and values that the third feature has no part in."""
    generator = np.random.default_rng(seed)
    X = generator.uniform(-3, 3, (count, 3))
    return X, np.sin(X[:, 0]) + X[:, 1] ** 2 / 4 + 0.2 * generator.standard_normal(count)


def chosen(count: int = 300) -> dict[str, tuple[np.ndarray, float]]:
    """Return the bandwidths that each way chooses, and the mean squared error on new points."""
    learn, test = three_features(count, seed=1), three_features(1000, seed=2)
    found = {}
    for way in WAYS:
        model = NadarayaWatsonRegressor(bandwidth=way).fit(*learn)
        found[way] = model.bandwidth_, float(np.mean((model.predict(test[0]) - test[1]) ** 2))
    return found


def draw() -> Figure:
    """Draw both orders, the search for a bandwidth, the weights, and bandwidths for three features."""
    figure, axes = plt.subplots(2, 3, figsize=(14, 8), constrained_layout=True)
    X, y = curve()
    grid = np.linspace(0, 3, 200)
    line = NadarayaWatsonRegressor(bandwidth="loo", order=1).fit(X, y)
    average = NadarayaWatsonRegressor(bandwidth=line.bandwidth_).fit(X, y)
    axis = plot_fit(line, axes[0, 0], band=False)
    axis.lines[-1].set_label("order 1")
    axis.plot(grid, average.predict(grid[:, None]), color="C3", label="order 0, the same bandwidth")
    axis.plot(grid, truth(grid), "--", color="0.5", label="truth")
    axis.legend(frameon=False)
    axis.set_title("order 0 and order 1")
    plot_loo(line, axes[0, 1]).set_title("bandwidth by leave-one-out error")
    plot_weights(line, ax=axes[0, 2]).set_title("weights of order 1")

    found = chosen()
    for place, (way, (widths, error)) in enumerate(found.items()):
        axes[1, 0].bar(np.arange(3) + 0.27 * (place - 1), widths, 0.25, label=f"{way}: error {error:.3f}")
    axes[1, 0].set(yscale="log", xticks=range(3), xticklabels=("x0", "x1", "x2 (irrelevant)"), ylabel="bandwidth")
    axes[1, 0].legend(title="on 1,000 new points", frameon=False)
    axes[1, 0].set_title("learned bandwidths")
    model = NadarayaWatsonRegressor(bandwidth="learned").fit(*three_features(300, seed=1))
    for feature, axis in ((1, axes[1, 1]), (2, axes[1, 2])):
        plot_fit(model, axis, feature=feature).set_title(f"learned bandwidths, over x{feature}")
    return figure


if __name__ == "__main__":
    draw()
    plt.show()
