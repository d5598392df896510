"""Fast weights: a memory that is a matrix.

Linear attention writes v kᵀ to a matrix and reads it with q; memory does not grow with the sequence. Where a key is
bound again, the sum rule adds up both values, the delta rule (Schlag et al. 2021) replaces the old one. Each of eight
keys is bound three times; the error is that of reading its newest value.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor

from regard.nn import fast_weights

KEYS, ROUNDS, WIDTH = 8, 3, 16


def errors(rule: str) -> Tensor:
    """Return for each step the mean square error over the keys that are bound by then."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.linalg.qr(torch.randn(WIDTH, KEYS, generator=generator)).Q.mT  # orthonormal rows (K, E)
    places = torch.cat([torch.randperm(KEYS, generator=generator) for _ in range(ROUNDS)])
    values = torch.randn(len(places), WIDTH, generator=generator)
    beta = torch.ones(1, 1, len(places))
    found = []
    for step in range(1, len(places) + 1):
        written = keys[places[:step]][None, None], values[:step][None, None]
        _, state = fast_weights(
            written[0], *written, beta[..., :step] if rule == "delta" else None, rule=rule, return_state=True
        )
        newest = {int(place): values[i] for i, place in enumerate(places[:step])}
        read = keys[list(newest)] @ state[0][0, 0]
        found.append((read - torch.stack(list(newest.values()))).square().mean())
    return torch.stack(found)


def draw() -> Figure:
    """Draw the error of both rules."""
    figure, axis = plt.subplots(figsize=(7, 3.6), constrained_layout=True)
    for rule in ("sum", "delta"):
        axis.plot(range(1, KEYS * ROUNDS + 1), errors(rule), label=f"{rule} rule")
    for edge in (KEYS, 2 * KEYS):
        axis.axvline(edge + 0.5, color="0.8")
    axis.set(xlabel="step; lines: every key is bound again", ylabel="mean square error")
    axis.legend(frameon=False)
    return figure


if __name__ == "__main__":
    draw()
    plt.show()
