"""Worked examples, to check by hand.

Left, the weights that softmax makes of three dot products, and the output. Middle and right, masked softmax of the same
scores for two sequences of two queries: with one length for each sequence, and with one for each query.
``python -m examples.worked_examples`` prints the numbers, and self-attention over four columns, worked out in full.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor

import regard
from regard import AuxRequest
from regard.nn import masked_softmax

QUERY = torch.tensor([[1.0, -1.0, 2.0]])
KEYS = torch.tensor([[2.0, 1.0, -2.0], [1.0, 2.0, -1.0], [3.0, -2.0, 0.0]])
VALUES = torch.tensor([[2.0, 3.0], [1.0, 2.0], [3.0, 1.0]])

X = torch.tensor([[1.0, 0, 1], [0, 2, 1], [1, 0, 1], [0, 2, 1]])
W_K = torch.tensor([[0.0, 1, 0, 1], [0, 1, 1, 1], [1, 0, 0, 0]])
W_Q = torch.tensor([[1.0, 1, 0, 0], [0, 0, 0, 1], [1, 0, 1, 1]])
W_V = torch.tensor([[0.0, 0, 1, 1], [2, 3, 0, 1]])


def dot_product() -> tuple[Tensor, Tensor, Tensor]:
    """Return scores (1, 3), weights (1, 3) and the output (1, 2)."""
    output, aux = regard.attention(QUERY, KEYS, VALUES, score="dot", return_aux=AuxRequest(weights=True, scores=True))
    assert aux.scores is not None and aux.weights is not None
    return aux.scores, aux.weights, output


def self_attention() -> Tensor:
    """Return the outputs as rows (3, 2): columns of X attend to one another by plain dot products."""
    query, key, value = ((weight @ X).mT for weight in (W_Q, W_K, W_V))
    return regard.attention(query, key, value, score="dot")


def lengths() -> tuple[Tensor, Tensor]:
    """Return masked weights (2, 2, 4) of the same scores by one length for each sequence, and for each query."""
    scores = torch.rand(2, 2, 4, generator=torch.Generator().manual_seed(0))
    return masked_softmax(scores, torch.tensor([2, 3])), masked_softmax(scores, torch.tensor([[1, 3], [2, 4]]))


def draw() -> Figure:
    """Draw the weights of the dot products, and those of masked softmax."""
    figure, axes = plt.subplots(1, 3, figsize=(12, 2.6), constrained_layout=True)
    scores, weights, output = dot_product()
    shown = ", ".join(f"{value:.4f}" for value in output[0].tolist())
    titles = (
        f"scores {[int(s) for s in scores[0].tolist()]} → output ({shown})",
        "valid_lens = (2, 3)",
        "valid_lens = ((1, 3), (2, 4))",
    )
    for axis, values, title in zip(axes, (weights, *(w.flatten(0, 1) for w in lengths())), titles):
        axis.imshow(values, cmap="Blues", vmin=0, vmax=1)
        for (row, column), value in zip(
            torch.cartesian_prod(*map(torch.arange, values.shape)).tolist(), values.flatten()
        ):
            axis.text(column, row, f"{value:.2g}", ha="center", va="center", color="white" if value > 0.6 else "black")
        axis.set_title(title, fontsize=9)
        rows, columns = values.shape
        axis.set(xlabel="key", ylabel="query", xticks=range(columns), yticks=range(rows))
        if rows == 4:
            axis.set(ylabel="sequence, query", yticklabels=["0, 0", "0, 1", "1, 0", "1, 1"])
    return figure


if __name__ == "__main__":
    for name, found in zip(("scores", "weights", "output"), dot_product()):
        print(f"{name}: {found[0].tolist()}")
    print(f"self-attention, the first two rows of the output:\n{self_attention().mT[:2]}")
    for found in lengths():
        print(f"masked softmax:\n{found}")
