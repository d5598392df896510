"""A matrix that is kept as a processor multiplies by it fastest: for models that decode, and learn no more.

Dimensions: N outputs, E inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, final

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.engines.fused.panels import Panels

#: Tensor attributes and methods that do not access its data.
_ATTRIBUTES = ("shape", "dtype", "device", "requires_grad", "is_nested", "is_sparse", "ndim")
_WITHOUT_DATA = {getattr(Tensor, name).__get__ for name in _ATTRIBUTES}
_WITHOUT_DATA |= {Tensor.is_floating_point, Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__}


@final
class PackedWeight(Tensor):
    """A packed weight matrix (N, E), which only :func:`torch.nn.functional.linear` can use.

    Its layout (:class:`~regard.engines.fused.panels.Panels`) speeds up products with few rows most. In int8 each row of
    the matrix is rounded to 255 levels, and each row of activations to 16 bits on the fly. Slices of rows are packed on
    first use. You cannot train, save, or move it to another device.

    Examples
    --------
    >>> weight, rows = torch.randn(3, 8), torch.randn(2, 8)
    >>> packed = PackedWeight.of(weight)
    >>> torch.allclose(torch.nn.functional.linear(rows, packed), rows @ weight.T, atol=1e-5)
    True
    >>> torch.nn.functional.linear(rows, packed[:2]).shape
    torch.Size([2, 2])
    """

    panels: Panels
    _parts: dict[tuple[int, int], PackedWeight]

    @classmethod
    def of(cls, weight: Tensor, *, int8: bool = False) -> Self:
        """Pack a float32 matrix (N, E) on the CPU."""
        return cls._holding(Panels.of(weight.detach(), int8=int8))

    @classmethod
    def _holding(cls, panels: Panels) -> Self:
        # A single expanded element: the tensor has the right shape but no data.
        shape = panels.outputs, panels.inputs
        made: Self = Tensor._make_subclass(cls, torch.zeros(()).expand(shape), False)
        made.panels, made._parts = panels, {}
        return made

    @property
    def is_int8(self) -> bool:
        """Whether it is rounded."""
        return self.panels.scales is not None

    def unpacked(self) -> Tensor:
        """Return it as a tensor of float32 (N, E)."""
        return self.panels.dense()

    def rows(self, start: int, stop: int) -> PackedWeight:
        """Return some of its rows (stop − start, E)."""
        if (start, stop) == (0, self.shape[0]):
            return self
        if (start, stop) not in self._parts:
            self._parts[start, stop] = PackedWeight._holding(self.panels.rows(start, stop))
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
    """Whether a matrix can be packed: float32, on the CPU."""
    plain = not isinstance(weight, PackedWeight) and weight.dim() == 2 and weight.numel() > 0
    return plain and weight.device.type == "cpu" and weight.dtype == torch.float32


def _linear(input: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Return rows (..., N) of rows (..., E)."""
    if torch.is_grad_enabled() and input.requires_grad:
        raise RuntimeError("a packed weight is for decoding, without gradients: use torch.no_grad()")
    if not input.numel():
        return input.new_zeros(*input.shape[:-1], weight.shape[0])
    rows = input.detach().float() if input.dtype != torch.float32 or input.requires_grad else input
    made = weight.panels.product(rows.reshape(-1, input.shape[-1]), bias).view(*input.shape[:-1], -1)
    return made if input.dtype == torch.float32 else made.to(input.dtype)
