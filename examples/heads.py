"""Heads of a layer that learned to reverse.

One layer of multi-head attention over letters and their positions learns to write a sequence backwards; its four heads
share the antidiagonal among them. Each picture is one head: the mean of its weights over 256 sequences.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from regard.nn import LearnedPositions, MultiheadAttention

LETTERS, N, WIDTH, HEADS, STEPS = 12, 12, 32, 4, 300
TICKS = range(0, N, 3)


class Reverser(nn.Module):
    """Embedding, positions, attention, logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, WIDTH)
        self.positions = LearnedPositions(N, WIDTH)
        self.attention = MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.output = nn.Linear(WIDTH, LETTERS)

    def forward(self, letters: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (B, N, letters) and the weights of every head (B, H, N, N)."""
        rows = self.positions(self.embedding(letters))
        read, weights = self.attention(rows, rows, rows, average_attn_weights=False)
        return self.output(read), weights


def draw() -> Figure:
    """Train, then draw the heads."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = Reverser()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(STEPS):
        letters = torch.randint(LETTERS, (64, N), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(letters)[0].flatten(0, 1), letters.flip(1).flatten()).backward()
        optimizer.step()
    letters = torch.randint(LETTERS, (256, N), generator=generator)
    with torch.no_grad():
        logits, weights = model(letters)
    right = float((logits.argmax(-1) == letters.flip(1)).float().mean())
    figure, axes = plt.subplots(1, HEADS, figsize=(12, 3.3), constrained_layout=True)
    for head, axis in enumerate(axes):
        image = axis.imshow(weights[:, head].mean(0), cmap="Blues", vmin=0, vmax=1)
        axis.set(title=f"head {head + 1}", xlabel="position read", xticks=TICKS, yticks=TICKS)
    axes[0].set_ylabel("position written")
    figure.colorbar(image, ax=axes, label="mean weight")
    figure.suptitle(f"{right:.0%} of the letters are right")
    return figure


if __name__ == "__main__":
    draw()
    plt.show()
