"""What each word of a translation looked at.

The model in the box, a Transformer (Vaswani 2017) with one head that was guided by word links (Chen 2016): French words
down, English across.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from regard_lab import pretrained
from regard_lab.generation import PredictionOptions
from regard_lab.tasks.translation.alignment import alignment

SENTENCES = ("the zone of international control", "My sister has never seen the sea.", "I love you")


def draw() -> Figure:
    """Draw the weights of words."""
    predictions = pretrained.load().predict(SENTENCES, PredictionOptions(alignment=True))
    figure, axes = plt.subplots(1, len(predictions), figsize=(11, 3.8), constrained_layout=True)
    for each, axis in zip(predictions, axes):
        seen = alignment(each)
        axis.imshow(seen.weights, cmap="Blues", vmin=0, vmax=1)
        axis.set_xticks(range(len(seen.source)), seen.source, rotation=60, ha="left", rotation_mode="anchor")
        axis.set_yticks(range(len(seen.target)), seen.target)
        axis.tick_params(length=0, top=True, labeltop=True, labelbottom=False)
        axis.spines[:].set_visible(False)
        axis.set_title(each.text, y=-0.18, fontsize=11)
    return figure


if __name__ == "__main__":
    draw()
    plt.show()
