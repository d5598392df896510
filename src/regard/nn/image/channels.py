"""Gates over the channels and positions of an image (B, C, H, W).

A gate is a sigmoid in [0, 1] per channel or position; gates are not normalized.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard._utils.constraints import Number, OneOf, floats, positive, size
from regard._utils.errors import rejected, shape
from regard._utils.mechanism import mechanism
from regard.nn._base import Layer

# Squeeze-and-excitation, ECA, CBAM ------------------------------------------------------------------------------------


def image(layer: object, argument: str, value: Any, channels: int | None = None) -> Tensor:
    """Check that ``value`` is a non-empty float tensor (B, C, H, W), and return it."""
    found = floats(layer, argument, value, "B", "C" if channels is None else channels, "H", "W")
    if 0 in found.shape[1:]:
        raise rejected(type(layer).__name__, argument, "have at least one channel and pixel", shape(found))
    return found


def odd(layer: object, argument: str, value: Any) -> int:
    """Check that a kernel size is odd, and return it."""
    if size(layer, argument, value) % 2 == 0:
        raise rejected(type(layer).__name__, argument, "be odd", value)
    return int(value)


def gated(x: Tensor, gate: Tensor, return_map: bool) -> Tensor | tuple[Tensor, Tensor]:
    """Return the image times its gate, and the gate if requested."""
    return (x * gate, gate) if return_map else x * gate


class _Bottleneck(Layer):
    """A bottleneck ``W_2 ReLU(W_1 z)`` with C / reduction hidden features, at least one."""

    def __init__(
        self, channels: int, reduction: int = 16, *, bias: bool = False, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        self.channels, self.reduction = size(self, "channels", channels), size(self, "reduction", reduction)
        hidden = max(1, self.channels // self.reduction)
        self.fc1 = nn.Linear(self.channels, hidden, bias, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden, self.channels, bias, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Draw both matrices as ``nn.Linear`` does."""
        self.fc1.reset_parameters()
        self.fc2.reset_parameters()

    def excite(self, pooled: Tensor) -> Tensor:
        """Return scores (B, C) of pooled channels (B, C)."""
        found: Tensor = self.fc2(F.relu(self.fc1(pooled)))
        return found


@mechanism(
    formula="x · σ(W_2 ReLU(W_1 mean_HW(x)))",
    sources=("hu2018",),
    learned="W_1 (C/r, C), W_2 (C, C/r)",
    cost="O(C·H·W + C²/r)",
)
class SqueezeExcitation(_Bottleneck):
    """Squeeze-and-excitation: a gate per channel from the means of all channels (Hu 2018, arXiv 1709.01507).

    ``s = σ(W_2 ReLU(W_1 z))`` with ``z_c`` the mean of channel c over all positions; the output is ``s_c x_c``.

    Parameters
    ----------
    channels : int
        Number of channels C.
    reduction : int, default 16
        Reduction r; the hidden layer has max(1, C // r) features.
    bias : bool, default False
        Whether to add learned biases; the paper's formula has none.
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import SqueezeExcitation
    >>> output, gates = SqueezeExcitation(32)(torch.randn(2, 32, 5, 7), return_map=True)
    >>> output.shape, gates.shape
    (torch.Size([2, 32, 5, 7]), torch.Size([2, 32, 1, 1]))
    """

    def forward(self, x: Tensor, *, return_map: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Return the image with its channels weighted.

        Parameters
        ----------
        x : Tensor (B, C, H, W)
        return_map : bool, default False
            Whether to also return the gates.

        Returns
        -------
        output : Tensor (B, C, H, W)
        map : Tensor (B, C, 1, 1)
            Only if requested.
        """
        x = image(self, "x", x, self.channels)
        gate = torch.sigmoid(self.excite(x.mean((2, 3))))
        return gated(x, gate[..., None, None], return_map)


@mechanism(
    formula="x · σ(conv1d_k(mean_HW(x)))",
    sources=("wang2020",),
    learned="kernel (k)",
    cost="O(C·H·W + C·k)",
)
class ECA(Layer):
    """Efficient channel attention: a gate per channel from the means of k neighbours (Wang 2020, arXiv 1910.03151).

    ``s = σ(conv1d_k(z))`` with ``z_c`` the mean of channel c over all positions, and zero padding. By default,
    ``k = |(log2(C) + b) / γ|_odd``, the nearest odd number, rounding ties up.

    Parameters
    ----------
    channels : int
        Number of channels C.
    kernel_size : int, optional
        Number of neighbours k, odd; defaults to the paper's function of C.
    gamma : float, default 2.0
    b : float, default 1.0
        The constants γ and b of that function.
    device, dtype : optional
        Device and dtype of the kernel.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import ECA
    >>> ECA(64)
    ECA(
      64
      (conv): Conv1d(1, 1, kernel_size=(3,), stride=(1,), padding=(1,), bias=False)
    )
    >>> ECA(64)(torch.randn(2, 64, 5, 7)).shape
    torch.Size([2, 64, 5, 7])
    """

    def __init__(
        self,
        channels: int,
        kernel_size: int | None = None,
        *,
        gamma: float = 2.0,
        b: float = 1.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.channels = size(self, "channels", channels)
        gamma, b = positive(self, "gamma", gamma), Number()(self, "b", b)
        adaptive = 2 * int(abs((math.log2(self.channels) + b) / gamma) // 2) + 1
        k = adaptive if kernel_size is None else odd(self, "kernel_size", kernel_size)
        self.conv = nn.Conv1d(1, 1, k, padding=k // 2, bias=False, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Draw the kernel as ``nn.Conv1d`` does."""
        self.conv.reset_parameters()

    def forward(self, x: Tensor, *, return_map: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Return the image with its channels weighted; see :meth:`SqueezeExcitation.forward`."""
        x = image(self, "x", x, self.channels)
        gate = torch.sigmoid(self.conv(x.mean((2, 3)).unsqueeze(1))).squeeze(1)
        return gated(x, gate[..., None, None], return_map)

    def extra_repr(self) -> str:
        """Return the number of channels."""
        return str(self.channels)


@mechanism(
    formula="x · σ(MLP(mean_HW(x)) + MLP(max_HW(x)))",
    sources=("woo2018",),
    learned="W_0 (C/r, C), W_1 (C, C/r)",
    cost="O(C·H·W + C²/r)",
)
class ChannelAttention(_Bottleneck):
    """CBAM's channel gate, from the means and maxima of all channels (Woo 2018, arXiv 1807.06521).

    ``σ(MLP(mean) + MLP(max))`` with one ``MLP(z) = W_1 ReLU(W_0 z)`` for both.

    Parameters
    ----------
    channels : int
        Number of channels C.
    reduction : int, default 16
        Reduction r; the hidden layer has max(1, C // r) features.
    bias : bool, default False
        Whether to add learned biases; the paper's formula has none.
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import ChannelAttention
    >>> ChannelAttention(32, reduction=8)(torch.randn(2, 32, 5, 7)).shape
    torch.Size([2, 32, 5, 7])
    """

    def forward(self, x: Tensor, *, return_map: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Return the image with its channels weighted; see :meth:`SqueezeExcitation.forward`."""
        x = image(self, "x", x, self.channels)
        gate = torch.sigmoid(self.excite(x.mean((2, 3))) + self.excite(x.amax((2, 3))))
        return gated(x, gate[..., None, None], return_map)


@mechanism(
    formula="x · σ(conv_k×k([mean_C(x); max_C(x)]))",
    sources=("woo2018",),
    learned="kernel (1, 2, k, k)",
    cost="O(H·W·(C + k²))",
)
class SpatialAttention(Layer):
    """CBAM's spatial gate, from the mean and maximum over channels (Woo 2018, arXiv 1807.06521).

    ``σ(conv([mean; max]))`` with a k × k kernel and zero padding.

    Parameters
    ----------
    kernel_size : int, default 7
        The side k of the kernel, odd.
    bias : bool, default False
        Whether the convolution adds a learned bias; the paper's formula has none.
    device, dtype : optional
        Device and dtype of the kernel.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import SpatialAttention
    >>> output, gates = SpatialAttention()(torch.randn(2, 32, 5, 7), return_map=True)
    >>> output.shape, gates.shape
    (torch.Size([2, 32, 5, 7]), torch.Size([2, 1, 5, 7]))
    """

    def __init__(self, kernel_size: int = 7, *, bias: bool = False, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        k = odd(self, "kernel_size", kernel_size)
        self.conv = nn.Conv2d(2, 1, k, padding=k // 2, bias=bias, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Draw the kernel as ``nn.Conv2d`` does."""
        self.conv.reset_parameters()

    def forward(self, x: Tensor, *, return_map: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Return the image with its positions weighted.

        Parameters
        ----------
        x : Tensor (B, C, H, W)
            Any number of channels.
        return_map : bool, default False
            Whether to also return the gates.

        Returns
        -------
        output : Tensor (B, C, H, W)
        map : Tensor (B, 1, H, W)
            Only if requested.
        """
        x = image(self, "x", x)
        pooled = torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)
        return gated(x, torch.sigmoid(self.conv(pooled)), return_map)


@mechanism(
    formula="M_s(x') · x', x' = M_c(x) · x",
    sources=("woo2018",),
    learned="those of ChannelAttention and SpatialAttention",
    cost="O(H·W·(C + k²) + C²/r)",
)
class CBAM(Layer):
    """Convolutional block attention: channel gates, then spatial gates (Woo 2018, arXiv 1807.06521).

    ``x' = M_c(x) x`` by :class:`ChannelAttention`, and ``M_s(x') x'`` by :class:`SpatialAttention`.

    Parameters
    ----------
    channels : int
        Number of channels C.
    reduction : int, default 16
        Reduction r; the hidden layer has max(1, C // r) features.
    kernel_size : int, default 7
        The side of the spatial kernel, odd.
    bias : bool, default False
        Whether both gates add learned biases.
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import CBAM
    >>> output, (channels, places) = CBAM(32)(torch.randn(2, 32, 5, 7), return_map=True)
    >>> output.shape, channels.shape, places.shape
    (torch.Size([2, 32, 5, 7]), torch.Size([2, 32, 1, 1]), torch.Size([2, 1, 5, 7]))
    """

    def __init__(
        self,
        channels: int,
        reduction: int = 16,
        kernel_size: int = 7,
        *,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.channels, reduction = size(self, "channels", channels), size(self, "reduction", reduction)
        kernel_size = odd(self, "kernel_size", kernel_size)
        self.channel = ChannelAttention(channels, reduction, bias=bias, device=device, dtype=dtype)
        self.spatial = SpatialAttention(kernel_size, bias=bias, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Re-initialize both."""
        self.channel.reset_parameters()
        self.spatial.reset_parameters()

    def forward(self, x: Tensor, *, return_map: bool = False) -> Tensor | tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the image with its channels and positions weighted.

        Parameters
        ----------
        x : Tensor (B, C, H, W)
        return_map : bool, default False
            Whether to also return the gates.

        Returns
        -------
        output : Tensor (B, C, H, W)
        maps : Tensor (B, C, 1, 1) and Tensor (B, 1, H, W)
            Only if requested: the channel gates and the spatial gates.
        """
        x, channels = self.channel(image(self, "x", x, self.channels), return_map=True)
        x, places = self.spatial(x, return_map=True)
        return (x, (channels, places)) if return_map else x


# Multi-head convolutional attention -----------------------------------------------------------------------------------


COMBINATIONS = ("sum", "mean")


@mechanism(
    formula="x · σ(Σ_k deconv_k(ReLU(conv_k(x)))), k in kernel sizes",
    sources=("georgescu2022",),
    learned="for each k: conv (C/r, C, k, k), deconv (C/r, C, k, k), biases",
    cost="O(H·W·C²/r·Σk²)",
)
class MultiheadConvAttention(Layer):
    """Multi-head convolutional attention with several kernel sizes (Georgescu 2022, arXiv 2204.04218).

    The output is ``x σ(Σ_k h_k(x))``. In a head ``h_k = deconv_k(ReLU(conv_k(x)))``, an unpadded convolution reduces
    height and width by k − 1 and the channels to C / r, and a transposed convolution restores both. Several inputs (the
    paper's modalities) are concatenated along their channels.

    An image smaller than a kernel is centered in zeros of the kernel's size, and the head's result is cropped, so that
    any height and width works.

    Parameters
    ----------
    channels : int
        Total number of channels C of all inputs.
    kernel_sizes : sequence of int, default (1, 3, 5)
        One head for each.
    reduction : float, default 0.5
        Reduction r: heads have max(1, ⌊C / r⌋) features. The authors' code uses 0.5, which widens.
    combine : {"sum", "mean"}
        How to combine heads; the paper uses the sum.
    bias : bool, default True
        Whether convolutions add learned biases.
    device, dtype : optional
        Device and dtype of the parameters.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid.

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
        OneOf(COMBINATIONS)(self, "combine", combine)
        self.combine = combine
        hidden = max(1, int(C / positive(self, "reduction", reduction)))
        how = {"bias": bias, "device": device, "dtype": dtype}
        self.squeeze = nn.ModuleList(nn.Conv2d(C, hidden, k, **how) for k in self.kernel_sizes)
        self.restore = nn.ModuleList(nn.ConvTranspose2d(hidden, C, k, **how) for k in self.kernel_sizes)

    def reset_parameters(self) -> None:
        """Re-initialize the convolutions as torch does."""
        for part in (*self.squeeze, *self.restore):
            part.reset_parameters()

    def forward(self, *inputs: Tensor, return_map: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Return the inputs, concatenated along their channels, times their gates.

        Parameters
        ----------
        *inputs : Tensor (B, Ci, H, W)
            One image, or several of one batch, height and width, whose channels sum to C.
        return_map : bool, default False
            Whether to also return the gates.

        Returns
        -------
        output : Tensor (B, C, H, W)
        map : Tensor (B, C, H, W)
            Only if requested.
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
        """Return the scores of one head, (B, C, H, W)."""
        H, W = x.shape[2:]
        short = [max(0, self.kernel_sizes[i] - n) for n in (H, W)]
        top, left = (n // 2 for n in short)
        if any(short):
            x = F.pad(x, (left, short[1] - left, top, short[0] - top))
        restored: Tensor = self.restore[i](F.relu(self.squeeze[i](x)))
        return restored[:, :, top : top + H, left : left + W]

    def extra_repr(self) -> str:
        """Return how heads are combined, unless it is the default."""
        return "" if self.combine == "sum" else f"combine={self.combine!r}"
