"""Rotary position encodings: rotate queries and keys by angles proportional to their positions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._utils.constraints import Number, flag, floats, positive, size
from regard._utils.errors import rejected
from regard._utils.mechanism import mechanism
from regard.nn._base import Layer
from regard.nn.positions.encodings import angles, placed, wide

#: The cosine and the sine of each row's angles.
Rotation = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class RotaryScaling:
    """Scale rotary angles so that longer sequences stay within the angles seen in training.

    By default all angles are divided by ``factor`` (Chen 2023, arXiv 2306.15595). With ``original_length``, angles of
    wavelengths above ``original_length / low`` are divided by ``factor``, those of wavelengths below
    ``original_length / high`` are kept, and those in between are interpolated (Llama 3.1; Dubey 2024, arXiv
    2407.21783).

    Parameters
    ----------
    factor : float
        Ratio of the new to the original sequence length.
    original_length : int, optional
        Sequence length in training.
    low, high : float
        Numbers of rotations within ``original_length``.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import RotaryScaling
    >>> RotaryScaling(4.0).factors(torch.tensor([1.0, 0.001]))
    tensor([0.2500, 0.2500])
    >>> RotaryScaling(8.0, original_length=8192).factors(torch.tensor([1.0, 0.001, 0.0001]))
    tensor([1.0000, 0.2136, 0.1250])
    """

    factor: float
    original_length: int | None = None
    low: float = 1.0
    high: float = 4.0

    def __post_init__(self) -> None:
        positive(self, "factor", self.factor)
        if self.original_length is not None:
            size(self, "original_length", self.original_length)
            positive(self, "low", self.low)
            if not self.low < self.high:
                raise rejected("RotaryScaling", "high", f"be above low, {self.low:g}", self.high)

    def factors(self, frequencies: Tensor) -> Tensor:
        """Return the factors of angles, given their frequencies in radians per position."""
        if self.original_length is None:
            return torch.full_like(frequencies, 1 / self.factor)
        turns = self.original_length * frequencies / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return kept + (1 - kept) / self.factor


@mechanism(
    formula="(a, b)_i ↦ (a cos pθ_i − b sin pθ_i, a sin pθ_i + b cos pθ_i), θ_i = b^(−2i/R)",
    sources=("su2021",),
    cost="O(L·E)",
)
class Rotary(Layer):
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
    scaling : RotaryScaling, optional
        Scaled angles, for sequences longer than in training.

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
        scaling: RotaryScaling | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = size(self, "head_dim", head_dim)
        self.base = positive(self, "base", base)
        flag(self, "interleaved", interleaved)
        self.interleaved, self.fraction = interleaved, Number(gt=0, le=1)(self, "fraction", fraction)
        self.scaling = scaling
        self.turned = math.floor(self.head_dim * self.fraction + 1e-9)
        if self.turned % 2 or not self.turned:
            name = "head_dim" if self.fraction == 1 else "head_dim · fraction"
            raise rejected("Rotary", name, "be even and at least 2", self.turned)

    def forward(self, x: Tensor, offset: int | Tensor = 0) -> Tensor:
        """Rotate queries or keys.

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
        x = floats(self, "x", x, "B", "H", "L", self.head_dim)
        where = placed(self, x.shape[2], offset, x.shape[0], x.device)
        return self.turn(x, self.rotation(where, x.dtype))

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Return the cosines and sines of each row's angles, which all layers of a model can share.

        Parameters
        ----------
        positions : Tensor (L,) or (B, L) of int
        dtype : torch.dtype
            Dtype of the rows to rotate.

        Returns
        -------
        cos, sin : Tensor (L, R/2) or (B, 1, L, R/2)
            At least float32.
        """
        turn = angles(positions, self.turned, self.base)
        if self.scaling is not None:
            turn = turn * self.scaling.factors(angles(torch.ones((), device=positions.device), self.turned, self.base))
        turn = turn.unsqueeze(1) if turn.dim() == 3 else turn
        return turn.cos().to(wide(dtype)), turn.sin().to(wide(dtype))

    def turn(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Rotate rows (B, H, L, D) by the :meth:`rotation` of their positions."""
        cos, sin = rotation
        front, rest = x[..., : self.turned].to(cos.dtype), x[..., self.turned :]
        a, b = front.unflatten(-1, (-1, 2)).unbind(-1) if self.interleaved else front.chunk(2, -1)
        pair = a * cos - b * sin, a * sin + b * cos
        front = torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)
        return torch.cat((front.to(x.dtype), rest), -1) if rest.shape[-1] else front.to(x.dtype)

    def reset_parameters(self) -> None:
        """Do nothing: the layer has no parameters."""

    def extra_repr(self) -> str:
        """Return the width and the settings that differ from the defaults."""
        settings = [f"base={self.base:g}"] if self.base != 10000 else []
        settings += ["interleaved=True"] if self.interleaved else []
        return ", ".join(
            [f"{self.head_dim}", *settings, *([f"fraction={self.fraction:g}"] if self.fraction != 1 else [])]
        )
