"""KERPLE: a learned bias that falls with distance, by a logarithm or a power."""

from __future__ import annotations

from typing import Any, Literal, final, get_args

import torch
from torch import Tensor, nn

from regard._utils.constraints import OneOf, size
from regard._utils.errors import rejected, shape
from regard._utils.mechanism import mechanism
from regard._utils.part import brief
from regard.masks import Extent, Mask
from regard.masks.band import Offset, checked
from regard.masks.base import Sizes, lookup
from regard.masks.biases import PositionBias
from regard.nn._base import parameter
from regard.nn.positions.relative import BiasLayer

#: How the bias falls with distance.
Kind = Literal["log", "power"]


@final
class _Kerple(PositionBias):
    """A bias of the distance with two numbers for each head."""

    name = "kerple"

    def __init__(self, kind: str, slope: Tensor, rate: Tensor, align: str | None, offset: Offset) -> None:
        super().__init__(align, offset)
        self.kind, self.slope, self.rate = kind, slope, rate

    def _twin(self) -> _Kerple:
        return _Kerple(self.kind, self.slope, self.rate, self.align, self.offset)

    def bias(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:
        """Return −slope · log(1 + rate · |distance|), or −slope · |distance|^rate."""
        slope, rate = lookup(self.slope, h), lookup(self.rate, h)
        distance = (self.positions(b, q_idx) - kv_idx).abs().to(slope.dtype)
        if self.kind == "log":
            return -slope * torch.log1p(rate * distance)
        near = distance == 0  # its power has no derivative in the rate
        return -slope * torch.where(near, 0.0, torch.where(near, 1.0, distance) ** rate)

    def fit(self, extent: Extent, device: torch.device) -> Mask:
        """Resolve the alignment; check the number of heads."""
        if len(self.slope) != extent.H:
            expected = f"be the number of query heads of the call, {extent.H}"
            raise rejected("KerpleBias", "num_heads", expected, shape(self.slope))
        return super().fit(extent, device)

    def sizes(self) -> Sizes:
        """Return the number of heads H."""
        return super().sizes()[0], len(self.slope), None, None

    def __repr__(self) -> str:
        return self._call(repr(self.kind), brief(self.slope), brief(self.rate))


@mechanism(
    formula="s(q, k) − r₁ log(1 + r₂ |k − q|), or s(q, k) − r₁ |k − q|^r₂",
    sources=("chi2022",),
    learned="r₁, r₂ (H)",
    cost="O(L·S)",
)
class KerpleBias(BiasLayer):
    """KERPLE: a bias per head that falls with distance, by two learned numbers (Chi 2022, arXiv 2205.09921).

    "log" is ``−r₁ log(1 + r₂ |d|)``; "power" is ``−r₁ |d|^r₂`` with r₂ below 2. Both r are positive: they are the
    exponentials of ``log_slope`` and ``log_rate``, and for "power" r₂ is ``2 · sigmoid(log_rate)``. The paper uses
    causal attention; without it, the bias is symmetric in the distance.

    Parameters
    ----------
    num_heads : int
        Number of query heads H.
    kind : {"log", "power"}, default "log"
    device, dtype : optional
        Of the parameters (H,), with which r₁ and r₂ begin at 1.

    Examples
    --------
    >>> import torch, regard
    >>> from regard.nn import KerpleBias
    >>> q = torch.randn(2, 4, 5, 8)
    >>> regard.attention(q, q, q, regard.masks.causal() & KerpleBias(4)()).shape
    torch.Size([2, 4, 5, 8])
    """

    def __init__(self, num_heads: int, kind: Kind = "log", *, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.num_heads, self.kind = size(self, "num_heads", num_heads), OneOf(get_args(Kind))(self, "kind", kind)
        self.log_slope = parameter(self.num_heads, device=device, dtype=dtype)
        self.log_rate = parameter(self.num_heads, device=device, dtype=dtype)
        self.reset_parameters()

    def mask(self, align: str | None, offset: Offset) -> Mask:
        rate = self.log_rate.exp() if self.kind == "log" else 2 * self.log_rate.sigmoid()
        return _Kerple(self.kind, self.log_slope.exp(), rate, *checked("kerple", align, offset))

    def reset_parameters(self) -> None:
        """Reset r₁ and r₂ to 1."""
        nn.init.zeros_(self.log_slope)
        nn.init.zeros_(self.log_rate)

    def extra_repr(self) -> str:
        """Return the number of heads and the kind."""
        return f"{self.num_heads}, {self.kind!r}"
