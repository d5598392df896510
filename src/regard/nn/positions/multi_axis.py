"""Rotary positions along several axes: time, rows and columns of images and video."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from regard._utils.constraints import OneOf, TensorOf, floats, size
from regard._utils.errors import described, rejected
from regard._utils.mechanism import mechanism
from regard.nn.positions.encodings import angles, placed
from regard.nn.positions.rotary import Rotary, Rotation
from regard.nn.positions.rotary_scaling import AngleScaling

#: Which pairs of columns an axis rotates, and at which frequencies.
Layout = Literal["axial", "interleaved", "sections"]


@mechanism(
    formula="pair i ↦ turned by p_a(i) θ_i, a(i) the axis of the pair",
    sources=("heo2024", "wang2024"),
    cost="O(L·E)",
)
class MultiAxisRotary(Rotary):
    """Rotary positions with several coordinates: each pair of columns is rotated by the position along one axis.

    ``layout`` says which axis a pair i of the R/2 belongs to, and its frequency, for sections of n₁, n₂ … pairs:

    * "axial": the first n₁ pairs are of the first axis, the next n₂ of the second, and so on; each axis has frequencies
      from 1 down, ``base^(−i/n)``. With two equal sections this is the 2-D encoding of vision Transformers (Heo 2024,
      arXiv 2403.13298) and of Qwen2-VL's images; with three, one for video.
    * "sections": the same pairs, with the frequencies ``base^(−2i/R)`` of :class:`Rotary`: M-RoPE (Wang 2024, arXiv
      2409.12191), as in Qwen2-VL.
    * "interleaved": as "sections", but pairs are dealt to the axes in turn, until an axis has its number; the first
      axis gets the rest. M-RoPE of Qwen3-VL.

    Where all coordinates of a row are equal, as in text, "sections" and "interleaved" are :class:`Rotary`. Positions
    without an axis, such as those of a cache, are equal along all axes.

    Parameters
    ----------
    head_dim : int
        Width D of a head.
    sections : sequence of int
        Number of pairs of each axis. Their sum is R/2; columns after the first R are not rotated.
    layout : {"axial", "sections", "interleaved"}
    base, scaling
        See :class:`Rotary`; a scaling needs frequencies that the axes share, which "axial" has not.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import MultiAxisRotary, SelfAttention
    >>> rotary = MultiAxisRotary(8, (2, 2), "axial", base=100.0)
    >>> places = rotary.grid(2, 3)  # of an image of 2 × 3 patches
    >>> places.tolist()
    [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    >>> layer, x = SelfAttention(16, 2, rotary=rotary), torch.randn(1, 6, 16)
    >>> layer(x, rotation=rotary.rotation(places, x.dtype)).shape
    torch.Size([1, 6, 16])
    """

    def __init__(
        self,
        head_dim: int,
        sections: Sequence[int],
        layout: Layout,
        *,
        base: float = 10000.0,
        scaling: AngleScaling | None = None,
    ) -> None:
        name = type(self).__name__
        if not isinstance(sections, Sequence) or isinstance(sections, str) or not sections:
            raise rejected(name, "sections", "be a sequence of ints", described(sections), TypeError)
        self_sections = tuple(size(name, "sections", each) for each in sections)
        pairs, width = sum(self_sections), size(name, "head_dim", head_dim)
        if 2 * pairs > width:
            raise rejected(name, "sections", f"have a sum of at most {width // 2} pairs, half of head_dim", pairs)
        super().__init__(width, base, fraction=2 * pairs / width, scaling=scaling)
        self.sections, self.layout = self_sections, OneOf(get_args(Layout))(self, "layout", layout)
        if scaling is not None and layout == "axial":
            raise rejected(name, "scaling", "be None for layout 'axial'", described(scaling))
        self._axis = self._axes(pairs)

    def _axes(self, pairs: int) -> tuple[int, ...]:
        """Return the axis of each pair."""
        if self.layout != "interleaved":
            return tuple(axis for axis, count in enumerate(self.sections) for _ in range(count))
        axes, number = [0] * pairs, len(self.sections)
        for axis, count in enumerate(self.sections[1:], 1):
            if axis + number * (count - 1) >= pairs:
                expected = f"leave room to deal {pairs} pairs in turn (the first axis gets the rest)"
                raise rejected(type(self).__name__, "sections", expected, self.sections)
            axes[axis : number * count : number] = [axis] * count
        return tuple(axes)

    def forward(self, x: Tensor, offset: int | Tensor = 0, *, positions: Tensor | None = None) -> Tensor:
        """Rotate queries or keys.

        Parameters
        ----------
        x : Tensor (B, H, L, D)
        offset : int or Tensor () or (B,), default 0
            The position of row 0 along all axes, without ``positions``.
        positions : Tensor (L, A) or (B, L, A) of int, optional
            Positions along the A axes.

        Returns
        -------
        Tensor (B, H, L, D)
        """
        if positions is None:
            return super().forward(x, offset)
        B, _, L, _ = floats(self, "x", x, "B", "H", "L", self.head_dim).shape
        axes = len(self.sections)
        positions = TensorOf((L, axes), (B, L, axes), integer=True)(self, "positions", positions)
        return self.turn(x, self.rotation(positions, x.dtype))

    def _placed(self, x: Tensor, offset: int | Tensor) -> tuple[Tensor, Rotation]:
        x = floats(self, "x", x, "B", "H", "L", self.head_dim)
        where = placed(self, x.shape[2], offset, x.shape[0], x.device)
        along_all = where.unsqueeze(-1).expand(*where.shape, len(self.sections))
        return x, self.rotation(along_all, x.dtype)

    def rotation(self, positions: Tensor, dtype: torch.dtype, length: int | Tensor | None = None) -> Rotation:
        """Return the cosines and sines of each row's angles.

        Parameters
        ----------
        positions : Tensor (L, A) or (B, L, A), or (L,) for the same along all axes, of int
        dtype, length
            See :meth:`Rotary.rotation`; the length defaults to the largest position + 1 along any axis.

        Returns
        -------
        cos, sin : Tensor (L, R/2) or (B, 1, L, R/2)
        """
        axes = len(self.sections)
        positions = TensorOf(("L",), ("L", axes), ("B", "L", axes), integer=True)(self, "positions", positions)
        if positions.dim() == 1:
            positions = positions.unsqueeze(-1).expand(-1, axes)
        where = positions[..., list(self._axis)]
        frequencies = self._frequencies(positions.device)
        turn = where.to(frequencies.dtype) * frequencies
        if self.scaling is not None:
            furthest = positions.amax(-1)
            turn = turn * self._factors(self.scaling, frequencies, furthest, length)
        return self._waves(turn, dtype)

    def _frequencies(self, device: torch.device) -> Tensor:
        """Return the frequency (R/2,) of each pair."""
        one = torch.ones((), device=device)
        if self.layout != "axial":
            return angles(one, self.turned, self.base)
        return torch.cat([angles(one, 2 * count, self.base) for count in self.sections])

    @staticmethod
    def grid(*sizes: int, device: torch.device | str | None = None) -> Tensor:
        """Return the positions (N, A) of a grid of these A sizes, in the order of its flattened cells."""
        return torch.cartesian_prod(*(torch.arange(each, device=device) for each in sizes)).view(-1, len(sizes))

    def extra_repr(self) -> str:
        """Return the width, the sections and the layout."""
        settings = [f"{self.head_dim}, {self.sections}, {self.layout!r}"]
        settings += [f"base={self.base:g}"] if self.base != 10000 else []
        return ", ".join([*settings, *([f"scaling={self.scaling}"] if self.scaling is not None else [])])
