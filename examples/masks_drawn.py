"""Masks say which pairs may meet.

Each is a predicate; they compose with ``&``, ``|`` and ``~``. Dark pairs are visible. The last two add a bias to the
score instead, which multiplies the weight by its exponential: nearer keys get more.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from regard import masks

N = 24
IDS = torch.tensor([0] * 7 + [1] * 4 + [2] * 13)
DRAWN = {
    "causal()": masks.causal(),
    "window(5, 2)": masks.window(5, 2),
    "causal() & window(5, 0)": masks.causal() & masks.window(5, 0),
    "causal() & (window(5, 0) | sinks(3))": masks.causal() & (masks.window(5, 0) | masks.sinks(3)),
    "document(ids)": masks.document(IDS),
    "document(ids) & causal()": masks.document(IDS) & masks.causal(),
    "prefix(8) | causal()": masks.prefix(8) | masks.causal(),
    "dilated(3)": masks.dilated(3),
    "padding(lengths)": masks.padding(torch.tensor([15])),
    "~window(3, 3)": ~masks.window(3, 3),
    "alibi(slopes) & causal()": masks.alibi(torch.tensor([0.5])) & masks.causal(),
    "relative(table)": masks.relative(torch.linspace(-2, 2, 17).square().neg()),
}


def draw() -> Figure:
    """Draw each mask over 24 queries and keys."""
    figure, axes = plt.subplots(4, 3, figsize=(9, 11.5), constrained_layout=True)
    index = torch.arange(N)
    for (name, mask), axis in zip(DRAWN.items(), axes.flat):
        bound = mask.bind(masks.Extent(1, 1, N, N), "cpu")
        pairs = torch.zeros(1, 1, 1, 1, dtype=torch.long), torch.zeros(1, 1, 1, dtype=torch.long), index[:, None], index
        added = bound.matrix(*pairs, torch.float32)[0, 0]
        image = axis.imshow(added.exp(), cmap="Blues", vmin=0, vmax=1)
        axis.set_title(name.replace(" & (", " &\n("), fontsize=13)
        axis.set(xticks=[0, N - 1], yticks=[0, N - 1])
        axis.tick_params(labelsize=12)
    for axis in axes[-1]:
        axis.set_xlabel("key", labelpad=-8, fontsize=13)
    for axis in axes[:, 0]:
        axis.set_ylabel("query", labelpad=-12, fontsize=13)
    bar = figure.colorbar(image, ax=axes, location="bottom", shrink=0.6, aspect=40)
    bar.set_label("factor of a weight before softmax divides: 0 is hidden", fontsize=13)
    return figure


if __name__ == "__main__":
    draw()
    plt.show()
