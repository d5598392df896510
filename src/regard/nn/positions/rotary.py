"""Rotary position encodings: rotate queries and keys by angles proportional to their positions."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from regard._utils.constraints import Number, flag, floats, integer, positive, size
from regard._utils.errors import described, rejected
from regard._utils.mechanism import mechanism
from regard.nn._base import Layer
from regard.nn.positions.encodings import angles, placed, wide
from regard.nn.positions.rotary_scaling import AngleScaling

#: What is known of each row's position: the cosine and the sine of its angles, first of all.
Rotation = tuple[Tensor, ...]


# Positions within a head ----------------------------------------------------------------------------------------------


class HeadPositions(Layer, ABC):
    """Base of positions that change the queries and keys of a head, for ``rotary=`` of attention layers.

    A subclass defines :meth:`rotation`, which all layers of a model can share, and :meth:`turn`.
    """

    #: Width D of a head.
    head_dim: int
    #: Whether queries and keys change alike; else :meth:`turn_keys` is the keys' own.
    symmetric = True

    def forward(self, x: Tensor, offset: int | Tensor = 0) -> Tensor:
        """Return queries with their positions, or keys if these change alike.

        Parameters
        ----------
        x : Tensor (B, H, L, D)
        offset : int or Tensor () or (B,), default 0
            The position of row 0.

        Returns
        -------
        Tensor (B, H, L, D)
            In the dtype of ``x``; angles are computed in float64, the rotation in at least float32.
        """
        return self.turn(*self._placed(x, offset))

    def of_keys(self, x: Tensor, offset: int | Tensor = 0) -> Tensor:
        """Return keys (B, G, L, D) with their positions; see :meth:`forward`."""
        return self.turn_keys(*self._placed(x, offset))

    def _placed(self, x: Tensor, offset: int | Tensor) -> tuple[Tensor, Rotation]:
        """Return the checked rows and their rotation."""
        x = floats(self, "x", x, "B", "H", "L", self.head_dim)
        where = placed(self, x.shape[2], offset, x.shape[0], x.device)
        return x, self.rotation(where, x.dtype)

    @abstractmethod
    def rotation(self, positions: Tensor, dtype: torch.dtype, length: int | Tensor | None = None) -> Rotation:
        """Return what :meth:`turn` needs to know of the positions (L,) or (B, L)."""

    @abstractmethod
    def turn(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Return queries (B, H, L, D) with the positions of a :meth:`rotation`."""

    def turn_keys(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Return keys (B, G, L, D) with the positions of a :meth:`rotation`."""
        return self.turn(x, rotation)

    def reset_parameters(self) -> None:
        """Do nothing: there are no parameters."""


@mechanism(
    formula="(a, b)_i ↦ (a cos pθ_i − b sin pθ_i, a sin pθ_i + b cos pθ_i), θ_i = b^(−2i/R)",
    sources=("su2021",),
    cost="O(L·E)",
)
class Rotary(HeadPositions):
    """Rotary position encoding: rotate pairs of columns of queries and keys by position (Su 2021, arXiv 2104.09864).

    Pair i of the row at position p is rotated by ``p · base^(−2i/R)``, for R columns. The dot product of a query at m
    and a key at n then depends on positions only through m − n. Apply it to queries and keys, not to values. There are
    no parameters.

    Parameters
    ----------
    head_dim : int
        Width D of a head.
    base : float, default 10000.0
        Wavelengths grow from 2π towards 2π · base, in positions.
    interleaved : bool, default False
        Whether pairs are columns (0, 1), (2, 3) and so on, as in the paper, GPT-J and the LLaMA release. Otherwise they
        are columns i and i + R/2, as in GPT-NeoX and Hugging Face's LLaMA. The two differ by a permutation of columns.
    fraction : float, default 1.0
        Share R / D of the columns to rotate, starting with the first; the others are unchanged. R, rounded down, must
        be even.
    scaling : AngleScaling, optional
        Scaled angles, for sequences longer than in training: a :class:`RotaryScaling`, :class:`NTKScaling`,
        :class:`YarnScaling` or :class:`LongRopeScaling`.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import Rotary
    >>> rotary = Rotary(2)
    >>> rotary(torch.tensor([1.0, 0.0]).expand(1, 1, 3, 2))[0, 0]
    tensor([[ 1.0000,  0.0000],
            [ 0.5403,  0.8415],
            [-0.4161,  0.9093]])
    """

    def __init__(
        self,
        head_dim: int,
        base: float = 10000.0,
        *,
        interleaved: bool = False,
        fraction: float = 1.0,
        scaling: AngleScaling | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = size(self, "head_dim", head_dim)
        self.base = positive(self, "base", base)
        flag(self, "interleaved", interleaved)
        self.interleaved, self.fraction = interleaved, Number(gt=0, le=1)(self, "fraction", fraction)
        if scaling is not None and not isinstance(scaling, AngleScaling):
            raise rejected("Rotary", "scaling", "be an AngleScaling or None", described(scaling), TypeError)
        self.scaling = scaling
        self.turned = math.floor(self.head_dim * self.fraction + 1e-9)
        if self.turned % 2 or not self.turned:
            name = "head_dim" if self.fraction == 1 else "head_dim · fraction"
            raise rejected("Rotary", name, "be even and at least 2", self.turned)

    def rotation(self, positions: Tensor, dtype: torch.dtype, length: int | Tensor | None = None) -> Rotation:
        """Return the cosines and sines of each row's angles, which all layers of a model can share.

        Parameters
        ----------
        positions : Tensor (L,) or (B, L) of int
        dtype : torch.dtype
            Dtype of the rows to rotate.
        length : int or Tensor () or (B,), optional
            Length of the sequences, for a scaling that depends on it; defaults to their last position + 1.

        Returns
        -------
        cos, sin : Tensor (L, R/2) or (B, 1, L, R/2)
            At least float32.
        """
        turn = angles(positions, self.turned, self.base)
        if self.scaling is not None:
            one = angles(torch.ones((), device=positions.device), self.turned, self.base)
            turn = turn * self._factors(self.scaling, one, positions, length)
        return self._waves(turn, dtype)

    def _factors(
        self, scaling: AngleScaling, frequencies: Tensor, positions: Tensor, length: int | Tensor | None
    ) -> Tensor:
        """Return the factors of angles: (R/2,), or (B, 1, R/2) if they depend on the length of the sequence."""
        if not scaling.needs_length:
            return scaling.factors(frequencies)
        if length is None:  # the last position + 1, or 0
            length = F.pad(positions + 1, (1, 0)).amax(-1)
        factors = scaling.factors(frequencies, torch.as_tensor(length, device=positions.device))
        return factors.unsqueeze(-2) if factors.dim() == 2 else factors

    def _waves(self, turn: Tensor, dtype: torch.dtype) -> Rotation:
        """Return the cosines and sines of angles (L, R/2) or (B, L, R/2), times the scaling's magnitude."""
        turn = turn.unsqueeze(1) if turn.dim() == 3 else turn
        waves = turn.cos(), turn.sin()
        if self.scaling is not None and self.scaling.magnitude != 1:
            waves = waves[0] * self.scaling.magnitude, waves[1] * self.scaling.magnitude
        return waves[0].to(wide(dtype)), waves[1].to(wide(dtype))

    def turn(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Rotate rows (B, H, L, D) by the :meth:`rotation` of their positions."""
        if x.shape[-1] != self.head_dim:
            raise rejected(type(self).__name__, "head_dim", f"be the width of a head, {x.shape[-1]}", self.head_dim)
        cos, sin = rotation[:2]
        front, rest = x[..., : self.turned].to(cos.dtype), x[..., self.turned :]
        a, b = front.unflatten(-1, (-1, 2)).unbind(-1) if self.interleaved else front.chunk(2, -1)
        pair = a * cos - b * sin, a * sin + b * cos
        front = torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)
        return torch.cat((front.to(x.dtype), rest), -1) if rest.shape[-1] else front.to(x.dtype)

    def extra_repr(self) -> str:
        """Return the width and the settings that differ from the defaults."""
        settings = [f"base={self.base:g}"] if self.base != 10000 else []
        settings += ["interleaved=True"] if self.interleaved else []
        settings += [f"fraction={self.fraction:g}"] if self.fraction != 1 else []
        settings += [f"scaling={self.scaling}"] if self.scaling is not None else []
        return ", ".join([f"{self.head_dim}", *settings])


# xPos: products that decay with distance ------------------------------------------------------------------------------


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
