"""Multi-head convolutional attention: a gate for each number of an image, from convolutions of several kernel sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard._catalogue import mechanism
from regard._constraints import Options, positive, size
from regard._errors import rejected, shape
from regard.nn._layer import Layer
from regard.nn.channels import gated, image

COMBINATIONS = ("sum", "mean")


@mechanism(
    formula="x · σ(Σ_k deconv_k(ReLU(conv_k(x)))), k in kernel sizes",
    sources=("georgescu2022",),
    learned="for each k: conv (C/r, C, k, k), deconv (C/r, C, k, k), biases",
    cost="O(H·W·C²/r·Σk²)",
)
class MultiheadConvAttention(Layer):
    """Multi-head convolutional attention with several kernel sizes (Georgescu 2022, arXiv 2204.04218).

    The output is ``x σ(Σ_k h_k(x))``. A head ``h_k = deconv_k(ReLU(conv_k(x)))`` first squeezes both the image, which
    loses k − 1 rows and columns to a convolution without padding, and the channels, of which C / r are left; a
    transposed convolution restores both. The kernel size thus sets how much of the place a head looks at. Several
    inputs (the paper's modalities) are joined along their channels.

    An image smaller than a kernel is laid into the middle of zeros as large as the kernel, and the head's result is cut
    out of the same place, so that any height and width will do.

    Parameters
    ----------
    channels : int
        How many channels C, of all inputs together.
    kernel_sizes : sequence of int, default (1, 3, 5)
        One head for each.
    reduction : float, default 0.5
        The r of the paper: heads have max(1, ⌊C / r⌋) features; the authors' code widens by 0.5.
    combine : {"sum", "mean"}
        What heads are joined by; the paper adds them.
    bias : bool, default True
        Whether convolutions add learned biases.
    device, dtype : optional
        Of the parameters.

    Raises
    ------
    ValueError, TypeError
        If an argument is wrong.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import MultiheadConvAttention
    >>> layer = MultiheadConvAttention(8)
    >>> output, gates = layer(torch.randn(2, 4, 1, 7), torch.randn(2, 4, 1, 7), return_map=True)
    >>> output.shape, gates.shape
    (torch.Size([2, 8, 1, 7]), torch.Size([2, 8, 1, 7]))
    """

    def __init__(
        self,
        channels: int,
        kernel_sizes: tuple[int, ...] | list[int] = (1, 3, 5),
        reduction: float = 0.5,
        *,
        combine: str = "sum",
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        C = self.channels = size(self, "channels", channels)
        if not isinstance(kernel_sizes, (tuple, list)) or not kernel_sizes:
            expected = "be a tuple or list of at least one int"
            raise rejected("MultiheadConvAttention", "kernel_sizes", expected, repr(kernel_sizes), TypeError)
        self.kernel_sizes = tuple(size(self, f"kernel_sizes[{i}]", k) for i, k in enumerate(kernel_sizes))
        Options(COMBINATIONS)(self, "combine", combine)
        self.combine = combine
        hidden = max(1, int(C / positive(self, "reduction", reduction)))
        how = {"bias": bias, "device": device, "dtype": dtype}
        self.squeeze = nn.ModuleList(nn.Conv2d(C, hidden, k, **how) for k in self.kernel_sizes)
        self.restore = nn.ModuleList(nn.ConvTranspose2d(hidden, C, k, **how) for k in self.kernel_sizes)

    def reset_parameters(self) -> None:
        """Draw the convolutions as torch does."""
        for part in (*self.squeeze, *self.restore):
            part.reset_parameters()

    def forward(self, *inputs: Tensor, return_map: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Return the inputs, joined along their channels, times their gates.

        Parameters
        ----------
        *inputs : Tensor (B, Ci, H, W)
            One image, or several of one batch, height and width whose channels make C together.
        return_map : bool, default False
            Also return the gates.

        Returns
        -------
        output : Tensor (B, C, H, W)
        map : Tensor (B, C, H, W)
            Only where asked for.
        """
        if not inputs:
            raise rejected("MultiheadConvAttention", "inputs", "be at least one image (B, C, H, W)", "none", TypeError)
        for i, each in enumerate(inputs):
            found = image(self, f"inputs[{i}]", each).shape
            if (found[0], *found[2:]) != (inputs[0].shape[0], *inputs[0].shape[2:]):
                expected = f"have batch, height and width of inputs[0] {shape(inputs[0])}"
                raise rejected("MultiheadConvAttention", f"inputs[{i}]", expected, shape(each))
        x = inputs[0] if len(inputs) == 1 else torch.cat(inputs, 1)
        if x.shape[1] != self.channels:
            expected = f"have {self.channels} channels together"
            raise rejected("MultiheadConvAttention", "inputs", expected, ", ".join(shape(each) for each in inputs))
        heads = [self._head(x, i) for i in range(len(self.kernel_sizes))]
        total = sum(heads[1:], heads[0])
        return gated(x, torch.sigmoid(total / len(heads) if self.combine == "mean" else total), return_map)

    def _head(self, x: Tensor, i: int) -> Tensor:
        """Return what one head scores each number, (B, C, H, W)."""
        H, W = x.shape[2:]
        short = [max(0, self.kernel_sizes[i] - n) for n in (H, W)]
        top, left = (n // 2 for n in short)
        if any(short):
            x = F.pad(x, (left, short[1] - left, top, short[0] - top))
        restored: Tensor = self.restore[i](F.relu(self.squeeze[i](x)))
        return restored[:, :, top : top + H, left : left + W]

    def extra_repr(self) -> str:
        """Return how heads are joined, where it is not the default."""
        return "" if self.combine == "sum" else f"combine={self.combine!r}"
