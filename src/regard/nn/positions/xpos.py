"""xPos: rotary positions with products that decay with distance."""

from __future__ import annotations

import torch
from torch import Tensor

from regard._utils.constraints import integer, positive
from regard._utils.mechanism import mechanism
from regard.nn.positions.encodings import wide
from regard.nn.positions.rotary import Rotary, Rotation


@mechanism(
    formula="q ↦ RoPE(q) ζ^(p/s), k ↦ RoPE(k) ζ^(−p/s), ζ_i = (2i/D + 0.4) / 1.4",
    sources=("sun2022",),
    cost="O(L·E)",
)
class XPos(Rotary):
    """xPos: rotary positions whose dot products decay with distance (Sun 2022, arXiv 2212.10554).

    Pair i of a query at position p is rotated as by :class:`Rotary`, and multiplied by ``ζ_i^((p − center) / decay)``
    with ``ζ_i = (2i/D + 0.4) / 1.4``; a key is divided by it. The product of the two depends on the distance alone, and
    shrinks by ``ζ_i^(distance / decay)``: slow pairs keep their reach. It grows where the key follows the query: use it
    with a causal mask.

    The centre has no effect but rounding. Numbers stay within float32's range for positions within about 60 · ``decay``
    of it. Other implementations move the centre with the length of the sequence, which makes cached keys stale; here it
    is fixed.

    Parameters
    ----------
    head_dim : int
        Width D of a head, even.
    base : float, default 10000.0
        See :class:`Rotary`.
    decay : float, default 512.0
        Distance s over which pair i shrinks by ζ_i.
    center : int, default 0
        Position at which nothing is scaled.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import XPos
    >>> xpos, row = XPos(2, decay=1.0), torch.tensor([1.0, 0.0]).expand(1, 1, 3, 2)
    >>> xpos(row).norm(dim=-1), xpos.of_keys(row).norm(dim=-1)
    (tensor([[[1.0000, 0.2857, 0.0816]]]), tensor([[[ 1.0000,  3.5000, 12.2500]]]))
    """

    symmetric = False

    def __init__(self, head_dim: int, base: float = 10000.0, *, decay: float = 512.0, center: int = 0) -> None:
        super().__init__(head_dim, base)
        self.decay, self.center = positive(self, "decay", decay), integer(self, "center", center)

    def rotation(self, positions: Tensor, dtype: torch.dtype, length: int | Tensor | None = None) -> Rotation:
        """Return the cosines and sines of each row's angles, and the factors of its pairs (L, D/2) or (B, 1, L, D/2).

        Parameters
        ----------
        positions, dtype, length
            See :meth:`Rotary.rotation`.
        """
        cos, sin = super().rotation(positions, dtype, length)
        precise = torch.float32 if positions.device.type == "mps" else torch.float64
        pairs = torch.arange(0, self.turned, 2, device=positions.device, dtype=precise)
        zeta = (pairs / self.turned + 0.4) / 1.4
        power = zeta ** ((positions.unsqueeze(-1).to(precise) - self.center) / self.decay)
        return cos, sin, (power.unsqueeze(1) if power.dim() == 3 else power).to(wide(dtype))

    def turn(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Rotate queries (B, H, L, D), and multiply by the factors."""
        cos, sin, power = rotation
        return super().turn(x, (cos * power, sin * power))

    def turn_keys(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Rotate keys (B, G, L, D), and divide by the factors."""
        cos, sin, power = rotation
        return super().turn(x, (cos / power, sin / power))

    def extra_repr(self) -> str:
        """Return the width and the settings that differ from the defaults."""
        settings = [f"decay={self.decay:g}"] if self.decay != 512 else []
        settings += [f"center={self.center}"] if self.center else []
        return ", ".join([super().extra_repr(), *settings])
