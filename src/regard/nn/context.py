"""What a layer asks of whoever divides a sequence among processes."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class SequenceContext(Protocol):
    """How a sequence is divided among processes, each of which runs the same layers on its own slice.

    :class:`regard.distributed.ContextParallel` is one. Masks speak of the whole sequence, all else of the slice.
    """

    @property
    def size(self) -> int:
        """How many processes hold the sequence, each equally much of it."""

    @property
    def attend(self) -> Any:
        """What stands for :func:`regard.attention`, with its signature: each process has its own queries and keys."""

    def positions(self, length: int, device: torch.device | str | None = None) -> Tensor:
        """Return which positions (length / size,) of a sequence of this length the process holds."""
