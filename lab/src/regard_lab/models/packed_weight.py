"""A matrix that is kept as a processor multiplies by it fastest: for models that decode, and learn no more.

Dimensions: N outputs, E inputs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, final

import torch
import torch.nn.functional as F
from torch import Tensor

from regard._utils.torch_private import block_linear, linear_blocks

#: int8 matrices with more outputs than this use oneDNN, which is faster with hundreds of rows. FBGEMM, torch's default,
#: is faster with few rows and small matrices.
_LARGE = 4096
#: Number of rows that share a range for rounding; with fewer, products take longer.
_RANGED = 64
#: Tensor attributes and methods that do not access its data.
_ATTRIBUTES = ("shape", "dtype", "device", "requires_grad", "is_nested", "is_sparse", "ndim")
_WITHOUT_DATA = {getattr(Tensor, name).__get__ for name in _ATTRIBUTES}
_WITHOUT_DATA |= {Tensor.is_floating_point, Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__}


@final
class PackedWeight(Tensor):
    """A packed weight matrix (N, E), which only :func:`torch.nn.functional.linear` can use.

    In float32 it has oneDNN's blocked layout, which speeds up products with few rows most. In int8 each row is rounded
    to 255 levels, and activations are quantized on the fly to 127 (torch's dynamic quantization). Slices of rows are
    packed on first use. You cannot train, save, or move it to another device.

    Examples
    --------
    >>> weight, rows = torch.randn(3, 8), torch.randn(2, 8)
    >>> packed = PackedWeight.of(weight)
    >>> torch.allclose(torch.nn.functional.linear(rows, packed), rows @ weight.T, atol=1e-5)
    True
    >>> torch.nn.functional.linear(rows, packed[:2]).shape
    torch.Size([2, 2])
    """

    _kind: _Float32 | _Int8
    _parts: dict[tuple[int, int], PackedWeight]

    @classmethod
    def of(cls, weight: Tensor, *, int8: bool = False) -> Self:
        """Pack a float32 matrix (N, E) on the CPU."""
        weight = weight.detach()
        # A single expanded element: the tensor has the right shape but no data.
        made: Self = Tensor._make_subclass(cls, weight.new_zeros(()).expand(weight.shape), False)
        made._kind, made._parts = (_Int8 if int8 else _Float32)(weight), {}
        return made

    @property
    def is_int8(self) -> bool:
        """Whether it is rounded."""
        return isinstance(self._kind, _Int8)

    def unpacked(self) -> Tensor:
        """Return it as a tensor of float32 (N, E)."""
        return self._kind.unpacked()

    def rows(self, start: int, stop: int) -> PackedWeight:
        """Return some of its rows (stop − start, E)."""
        if (start, stop) == (0, self.shape[0]):
            return self
        if (start, stop) not in self._parts:
            self._parts[start, stop] = PackedWeight.of(self.unpacked()[start:stop].contiguous(), int8=self.is_int8)
        return self._parts[start, stop]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func in _WITHOUT_DATA:
            return super().__torch_function__(func, types, args, kwargs)
        if func is Tensor.__getitem__ and isinstance(args[1], slice) and args[1].step in (None, 1):
            start, stop, _ = args[1].indices(args[0].shape[0])
            return args[0].rows(start, stop)
        if func is Tensor.split and kwargs.get("dim", 0) == 0 and len(args) == 2:
            return args[0]._split(args[1])
        if func is Tensor.__deepcopy__:
            return args[0]  # immutable
        if func is Tensor.__repr__:
            return f"PackedWeight({tuple(args[0].shape)}, {'int8' if args[0].is_int8 else 'float32'})"
        name = getattr(func, "__name__", str(func))
        raise TypeError(
            f"a packed weight is for products with rows alone, not for {name}: use the model it was made of"
        )

    def _split(self, sizes: Sequence[int]) -> tuple[PackedWeight, ...]:
        """Return rows of these counts, one after the other."""
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return tuple(self.rows(end - size, end) for end, size in zip(ends, sizes))


def can_pack(weight: Tensor) -> bool:
    """Whether a matrix is one that this processor has a layout for: float32, on the CPU."""
    plain = not isinstance(weight, PackedWeight) and weight.dim() == 2 and weight.numel() > 0
    return (
        plain and weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()
    )


def _linear(input: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Return rows (..., N) of rows (..., E)."""
    if torch.is_grad_enabled() and input.requires_grad:
        raise RuntimeError("a packed weight is for decoding, without gradients: use torch.no_grad()")
    if not input.numel():
        return input.new_zeros(*input.shape[:-1], weight.shape[0])
    rows = input.detach().float() if input.dtype != torch.float32 or input.requires_grad else input
    if input.dim() != 2:
        made = weight._kind.product(rows.reshape(-1, input.shape[-1]), bias).view(*input.shape[:-1], -1)
    else:
        made = weight._kind.product(rows, bias)
    return made if input.dtype == torch.float32 else made.to(input.dtype)


class _Float32:
    """Blocks of a matrix, as oneDNN lays them out."""

    def __init__(self, weight: Tensor) -> None:
        self._blocks = linear_blocks(weight.contiguous())

    def unpacked(self) -> Tensor:
        made: Tensor = self._blocks.to_dense()
        return made

    def product(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        return block_linear(rows, self._blocks, bias)


class _Int8:
    """A matrix in int8, with a scale for each output; torch lays it out together with a bias: the latest it met."""

    def __init__(self, weight: Tensor) -> None:
        scales = (weight.abs().amax(1).double() / 127).clamp(min=torch.finfo(torch.float32).tiny)
        with warnings.catch_warnings():  # about the planned move to torchao
            warnings.simplefilter("ignore")
            zeros = torch.zeros(len(weight), dtype=torch.long)
            self._rounded = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        self._laid: tuple[Tensor | None, Any] | None = None

    def unpacked(self) -> Tensor:
        return self._rounded.dequantize()

    def product(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        laid = self._laid
        if laid is None or not _same(laid[0], bias):
            laid = self._laid = bias, self._lay(bias)
        parts = [torch.ops.quantized.linear_dynamic(some, laid[1], reduce_range=True) for some in rows.split(_RANGED)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _lay(self, bias: Tensor | None) -> Any:
        before, engines = torch.backends.quantized.engine, torch.backends.quantized.supported_engines
        large = self._rounded.shape[0] > _LARGE and "onednn" in engines
        try:
            torch.backends.quantized.engine = "onednn" if large else before
            return torch.ops.quantized.linear_prepack(self._rounded, bias)
        finally:
            torch.backends.quantized.engine = before


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two biases are the same memory."""
    if one is None or other is None:
        return one is other
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape
