"""What the steps of a gated recurrence write, forget and read."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Steps(NamedTuple):
    """The inputs of a recurrence, all float32 or all float64; a GPU's kernels take 16-bit query, key and value.

    With the state S (K, V) before a step and S' after it:

        S' = diag(decay) S − aᵀ (e S) + rate · kᵀ (v − [delta] r diag(decay) S)        y = scale · q S'

    or, with a bonus u, ``y = scale · q (S + rate · diag(u) kᵀ v)``.

    Attributes
    ----------
    query : Tensor (B, H or G, L, K)
    key : Tensor (B, G, L, K)
    value : Tensor (B, H, L, V)
    log_decay : Tensor (B, H, L, 1 or K), optional
    rate : Tensor (B, H, L, 1), optional
    erase : pair of Tensor (B, H, L, K), optional
        a and e.
    bonus : Tensor (H, K), optional
    resets : Tensor (B, L) of bool, optional
        The steps before which the state is set to 0.
    delta : bool
    scale : float
    reader : Tensor (B, G, L, K), optional
        r of the delta rule; None is the key.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor | None = None
    rate: Tensor | None = None
    erase: tuple[Tensor, Tensor] | None = None
    bonus: Tensor | None = None
    resets: Tensor | None = None
    delta: bool = False
    scale: float = 1.0
    reader: Tensor | None = None

    def decay(self) -> Tensor | None:
        """Return the logarithms of decays (B, H, L, 1 or K), −inf where the state is set to 0."""
        if self.resets is None:
            return self.log_decay
        decay = self.key.new_zeros(()) if self.log_decay is None else self.log_decay
        B, H, L, _ = self.value.shape
        return torch.where(self.resets[:, None, :, None], -torch.inf, decay).expand(B, H, L, -1)
