"""Sets: pooling by attention learns the maximum.

A set attention block and pooling by multi-head attention (Lee et al. 2019) learn the largest number of a set, in any
order and of any size. Left, answers on new sets; right, the weights of the pooling, by rank in the set.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from regard import AuxRequest
from regard.nn import PMA, SAB

SIZE, STEPS = 10, 400


class Largest(nn.Module):
    """SAB, PMA, and a line."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = SAB(1, 32, 4)
        self.pool = PMA(32, 4)
        self.output = nn.Linear(32, 1)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Return the largest of each set (B, N, 1) of these sizes."""
        return self.output(self.pool(self.encode(x, lengths), lengths)).flatten()


def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return sets (B, N, 1), their sizes, and their maxima."""
    x, lengths = (
        torch.rand(size, SIZE, 1, generator=generator),
        torch.randint(2, SIZE + 1, (size,), generator=generator),
    )
    hidden = torch.arange(SIZE) >= lengths[:, None]
    return x, lengths, x[..., 0].masked_fill(hidden, -1).amax(1)


def draw() -> Figure:
    """Train, then draw answers and weights."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = Largest()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(STEPS):
        x, lengths, target = batch(64, generator)
        optimizer.zero_grad()
        (model(x, lengths) - target).square().mean().backward()
        optimizer.step()
    x, lengths, target = batch(300, generator)
    with torch.no_grad():
        answer = model(x, lengths)
        whole = torch.rand(200, SIZE, 1, generator=generator).sort(1, descending=True).values
        _, aux = model.pool(model.encode(whole), return_aux=AuxRequest(weights=True))
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), constrained_layout=True)
    axes[0].plot([0, 1], [0, 1], color="0.7")
    axes[0].plot(target, answer, ".")
    axes[0].set(xlabel="largest of the set", ylabel="answer")
    axes[1].bar(range(1, SIZE + 1), aux.weights.mean((0, 1, 2)))
    axes[1].set(xlabel="rank in the set", ylabel="mean weight of the pooling")
    return figure


if __name__ == "__main__":
    draw()
    plt.show()
