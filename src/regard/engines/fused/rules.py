"""How the kernels turn scores into weights."""

from __future__ import annotations

import struct
from typing import NamedTuple

from regard.engines.fused.arguments import ENTMAX, SIGMOID, SOFTMAX
from regard.normalizers import Entmax, Entmax15, Normalizer, Sigmoid, Softmax, SoftmaxSink, Sparsemax


class Rule(NamedTuple):
    """A normalizer of the kernels.

    Attributes
    ----------
    kind : int
        ``SOFTMAX``, with or without sinks, ``SIGMOID`` or ``ENTMAX``.
    alpha : float
        α of entmax: 2 for sparsemax; 0 for other kinds.
    """

    kind: int = SOFTMAX
    alpha: float = 0.0

    @classmethod
    def of(cls, normalizer: Normalizer) -> Rule | None:
        """Return the rule of a normalizer, or None if the kernels have none."""
        if type(normalizer) in (Softmax, SoftmaxSink):
            return cls()
        if type(normalizer) is Sigmoid:
            return cls(SIGMOID)
        if isinstance(normalizer, Sparsemax | Entmax15 | Entmax) and type(normalizer) in (Sparsemax, Entmax15, Entmax):
            return cls(ENTMAX, normalizer.alpha)
        return None

    @property
    def numbers(self) -> dict[str, int]:
        """The kernel arguments; α as the bits of a double."""
        return {"normalizer": self.kind, "alpha": struct.unpack("q", struct.pack("d", self.alpha))[0]}
