"""Absolute position encodings, added to the rows: sinusoidal and learned.

Call them as ``layer(x, offset=0)``: row i of ``x`` is at position i + offset, where the offset is an int, or an integer
tensor () or (B,), one per sequence. When decoding, it is the length of the cache. For position biases of scores, see
:mod:`regard.nn.positions.relative`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._utils.constraints import count, integer, offsets, positive, probability, size
from regard._utils.errors import rejected, shape
from regard._utils.mechanism import mechanism
from regard._utils.tracing import values_unavailable
from regard.nn._base import Layer, parameter, sequences


def placed(layer: object, length: int, offset: Any, batch: int | None, device: Any) -> Tensor:
    """Check the offset and return the positions of rows: int64 (L,), or (B, L) for an offset per sequence."""
    function = type(layer).__name__
    steps = torch.arange(length, device=device)
    if not isinstance(offset, Tensor):
        return steps + integer(function, "offset", offset)
    offset = offsets(function, "offset", offset)
    if offset.dim() == 1 and batch is not None and offset.shape[0] != batch:
        raise rejected(function, "offset", f"have one entry per sequence ({batch})", shape(offset))
    return steps + offset.unsqueeze(-1) if offset.dim() else steps + offset


def angles(positions: Tensor, width: int, base: float) -> Tensor:
    """Return position · base^(−2i / width) for i = 0 … ⌈width / 2⌉ − 1: (..., ⌈width / 2⌉).

    In float64 where the device has it: in float32 the angle of position 10⁶ would be wrong in its second decimal.
    """
    dtype = torch.float32 if positions.device.type == "mps" else torch.float64
    powers = torch.arange(0, width, 2, device=positions.device, dtype=dtype) / -width
    return positions.unsqueeze(-1).to(dtype) * torch.pow(base, powers)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the compute dtype: at least float32."""
    return torch.promote_types(dtype, torch.float32)


@mechanism(
    formula="x_p + e_p;  e_p[2i] = sin(p / b^(2i/E)), e_p[2i+1] = cos(p / b^(2i/E))",
    sources=("vaswani2017",),
    cost="O(L·E)",
)
class SinusoidalPositions(Layer):
    """Add sinusoidal encodings: sines in even columns, cosines in odd ones (Vaswani 2017, arXiv 1706.03762).

    ``e_p[2i] = sin(p / base^(2i/E))`` and ``e_p[2i+1] = cos(p / base^(2i/E))``. There is no maximum length and there
    are no parameters. An odd width ends with a sine.

    Parameters
    ----------
    embed_dim : int
        Width E of the rows.
    dropout : float, default 0.0
        Probability of dropping an entry of the sum, in training.
    base : float, default 10000.0
        Wavelengths grow from 2π towards 2π · base, in positions.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import SinusoidalPositions
    >>> layer = SinusoidalPositions(4)
    >>> layer(torch.zeros(1, 2, 4))
    tensor([[[0.0000, 1.0000, 0.0000, 1.0000],
             [0.8415, 0.5403, 0.0100, 0.9999]]])
    """

    def __init__(self, embed_dim: int, dropout: float = 0.0, *, base: float = 10000.0) -> None:
        super().__init__()
        self.embed_dim = size(self, "embed_dim", embed_dim)
        self.dropout = probability(self, "dropout", dropout)
        self.base = positive(self, "base", base)

    def forward(self, x: Tensor, offset: int | Tensor = 0) -> Tensor:
        """Return the rows plus their encodings.

        Parameters
        ----------
        x : Tensor (B, L, E)
        offset : int or Tensor () or (B,), default 0
            The position of row 0.

        Returns
        -------
        Tensor (B, L, E)
            In the dtype of ``x``, rounded once.
        """
        x = sequences(self, "x", x, self.embed_dim)
        where = placed(self, x.shape[1], offset, x.shape[0], x.device)
        added = (x + self.waves(where).to(wide(x.dtype))).to(x.dtype)
        return F.dropout(added, self.dropout, self.training)

    def encoding(
        self, length: int, offset: int | Tensor = 0, *, device: Any = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return the encodings of ``length`` rows.

        Parameters
        ----------
        length : int
            Number of rows L.
        offset : int or Tensor () or (B,), default 0
            The position of row 0.
        device, dtype : optional
            Device and dtype of the result; default to the offset's device and torch's default dtype.

        Returns
        -------
        Tensor (L, E), or (B, L, E) for an offset per sequence
        """
        length = count(self, "length", length)
        if device is None and isinstance(offset, Tensor):
            device = offset.device
        return self.waves(placed(self, length, offset, None, device)).to(dtype or torch.get_default_dtype())

    def waves(self, positions: Tensor) -> Tensor:
        turned = angles(positions, self.embed_dim, self.base)
        return torch.stack((turned.sin(), turned.cos()), -1).flatten(-2)[..., : self.embed_dim]

    def reset_parameters(self) -> None:
        """Do nothing: the layer has no parameters."""

    def extra_repr(self) -> str:
        """Return the width and the settings that differ from the defaults."""
        settings = [f"dropout={self.dropout}"] if self.dropout else []
        return ", ".join([f"{self.embed_dim}", *settings, *([f"base={self.base:g}"] if self.base != 10000 else [])])


@mechanism(
    formula="x_p + w_p",
    sources=("gehring2017", "vaswani2017"),
    learned="w (N, E)",
    cost="O(L·E)",
)
class LearnedPositions(Layer):
    """Add a learned row for each position: ``x_p + w_p``.

    Gehring et al. (2017, arXiv 1705.03122) introduced them; Vaswani et al. (2017, arXiv 1706.03762) compare them with
    sinusoids. ``weight`` (N, E) has the layout of an ``nn.Embedding`` over positions.

    Parameters
    ----------
    max_length : int
        Number of positions N.
    embed_dim : int
        Width E of the rows.
    dropout : float, default 0.0
        Probability of dropping an entry of the sum, in training.
    device, dtype : optional
        Device and dtype of the parameter.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import LearnedPositions
    >>> LearnedPositions(10, 4)(torch.randn(2, 3, 4), offset=7).shape
    torch.Size([2, 3, 4])
    """

    def __init__(
        self, max_length: int, embed_dim: int, dropout: float = 0.0, *, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        self.max_length, self.embed_dim = size(self, "max_length", max_length), size(self, "embed_dim", embed_dim)
        self.dropout = probability(self, "dropout", dropout)
        self.weight = parameter(self.max_length, self.embed_dim, device=device, dtype=dtype)
        self.reset_parameters()

    def forward(self, x: Tensor, offset: int | Tensor = 0) -> Tensor:
        """Return the rows plus their position embeddings.

        Parameters
        ----------
        x : Tensor (B, L, E)
        offset : int or Tensor () or (B,), default 0
            The position of row 0.

        Returns
        -------
        Tensor (B, L, E)
            In the dtype of ``x``.

        Raises
        ------
        ValueError
            If a position is not in [0, N). Values of an offset tensor on a GPU or under tracing are not checked here;
            torch's embedding lookup raises its own error.
        """
        x = sequences(self, "x", x, self.embed_dim)
        where = placed(self, x.shape[1], offset, x.shape[0], x.device)
        self._check(x.shape[1], offset)
        added = (x + F.embedding(where, self.weight)).to(x.dtype)
        return F.dropout(added, self.dropout, self.training)

    def _check(self, length: int, offset: int | Tensor) -> None:
        if isinstance(offset, Tensor):
            if values_unavailable(offset) or offset.device.type != "cpu" or not offset.numel():
                return
            least, most = int(offset.min()), int(offset.max())
        else:
            least = most = offset
        if least < 0 or most + length > self.max_length:
            came = f"{least if least < 0 else most} ({length} rows)"
            raise rejected("LearnedPositions", "offset", f"keep positions in [0, {self.max_length})", came)

    def reset_parameters(self) -> None:
        """Re-initialize the rows from a normal distribution with standard deviation 0.02."""
        nn.init.normal_(self.weight, std=0.02)

    def extra_repr(self) -> str:
        """Return the sizes, and the dropout if there is one."""
        settings = [f"dropout={self.dropout}"] if self.dropout else []
        return ", ".join([f"{self.max_length}, {self.embed_dim}", *settings])
