"""A Neural Turing Machine learns to copy.

A network that writes to and reads from a memory (Graves et al. 2014) is shown bits, then a sign, then silence, in which
it must repeat them. Left, what it was shown and what it says; right, the rows of memory that it writes and reads.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from regard.nn import NeuralTuringMachine

BITS, LONGEST, STEPS = 3, 4, 500


def copying(length: int, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return inputs (B, 2n + 1, bits + 1) and the bits (B, n, bits) that are to be said at the end."""
    bits = torch.randint(0, 2, (batch, length, BITS), generator=generator).float()
    inputs = torch.zeros(batch, 2 * length + 1, BITS + 1)
    inputs[:, :length, :BITS] = bits
    inputs[:, length, BITS] = 1
    return inputs, bits


def trained() -> NeuralTuringMachine:
    """Return a machine that copies."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    machine = NeuralTuringMachine(
        BITS + 1, BITS, hidden_size=32, memory_rows=8, memory_width=12, controller="feedforward"
    )
    optimizer = torch.optim.Adam(machine.parameters(), 1e-2)
    for step in range(STEPS):
        length = step % LONGEST + 1
        inputs, bits = copying(length, 32, generator)
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(machine(inputs)[0][:, -length:], bits).backward()
        torch.nn.utils.clip_grad_norm_(machine.parameters(), 5.0)
        optimizer.step()
    return machine


def draw() -> Figure:
    """Draw a copy and the machine's attention."""
    machine = trained()
    inputs, _ = copying(LONGEST, 1, torch.Generator().manual_seed(5))
    with torch.no_grad():
        said, _, (reads, writes) = machine(inputs, return_maps=True)
    said[:, : LONGEST + 1] = -torch.inf  # before the silence nobody listens
    figure, axes = plt.subplots(2, 2, figsize=(9, 4.6), constrained_layout=True)
    shown = (
        ("shown", inputs[0].mT, "bit, end"),
        ("written", writes[0, :, 0].mT, "row"),
        ("said", said[0].sigmoid().mT, "bit"),
        ("read", reads[0, :, 0].mT, "row"),
    )
    for axis, (title, values, label) in zip(axes.flat, shown):
        axis.imshow(values, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        axis.set(title=title, xlabel="step", ylabel=label)
    return figure


if __name__ == "__main__":
    draw()
    plt.show()
