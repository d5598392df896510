"""A mask or bias written out as a matrix."""

from __future__ import annotations

from typing import Any, Self, final

import torch
from torch import Tensor

from regard._errors import described, rejected, shape
from regard._part import brief
from regard.masks._checks import lookup
from regard.masks.base import Extent, Mask, Sizes
from regard.masks.intervals import Span, run
from regard.masks.tiling import Tiling

_KIND = "be a bool tensor (True = may attend) or a float tensor (added to the score; -inf hides)"


def dense(tensor: Tensor) -> Mask:
    """Return the mask, or bias, that is written out in a tensor: torch's ``attn_mask``.

    Visible iff ``tensor[b, h, q, k]`` is True, or is not −inf and is added to the score.

    Parameters
    ----------
    tensor : Tensor (L, S), (H, L, S) or (B, H, L, S), bool or float
        A size of 1 is shared along that dimension. Three dimensions are heads first, as torch broadcasts them;
        one matrix per sequence is (B, 1, L, S). A float tensor gets gradients.

    Raises
    ------
    TypeError
        If the tensor is neither bool nor float, or not a tensor.
    ValueError
        If it has another number of dimensions; when used, if its sizes are not those of the call, or if it is
        (H, L, S) with as many heads as sequences, where it may have been meant as one matrix per sequence.

    Examples
    --------
    >>> import torch
    >>> from regard import masks
    >>> mask = masks.dense(torch.tensor([[0.0, -1.0, float("-inf")]]))
    >>> b = h = torch.tensor(0)
    >>> mask(0, 0, 0, torch.arange(3)), mask.bias(b, h, torch.tensor(0), torch.arange(3))
    (tensor([ True,  True, False]), tensor([ 0., -1.,  0.]))
    """
    return Dense.of(tensor, "masks.dense", "tensor")


@final
class Dense(Mask):
    """Pairs marked True, or not −inf, in a tensor (L, S), (H, L, S) or (B, H, L, S) with 1 where it is shared."""

    def __init__(self, values: Tensor, origin: tuple[str, str]) -> None:
        self.values = values
        self._origin = origin

    @classmethod
    def of(cls, tensor: Any, function: str, argument: str) -> Self:
        """Return the mask of a checked tensor; errors name this argument of this function."""
        if not isinstance(tensor, Tensor) or not (tensor.dtype == torch.bool or tensor.is_floating_point()):
            raise rejected(function, argument, _KIND, described(tensor), TypeError)
        if tensor.is_nested or tensor.layout != torch.strided:
            layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise rejected(function, argument, "be a dense tensor", f"a {layout} one", TypeError)
        if tensor.dim() not in (2, 3, 4):
            raise rejected(function, argument, "have shape (L, S), (H, L, S) or (B, H, L, S)", shape(tensor))
        return cls(tensor, (function, argument))

    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:
        """Return the marks, or where the number is not −inf."""
        found = lookup(self.values, *(b, h, q_idx, kv_idx)[-self.values.dim() :])
        return ~found.isneginf() if self.has_bias else found

    def bias(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:
        """Return the numbers, 0 in place of −inf."""
        if not self.has_bias:
            return None
        found = lookup(self.values, *(b, h, q_idx, kv_idx)[-self.values.dim() :])
        return found.masked_fill(found.isneginf(), 0.0)

    @property
    def has_bias(self) -> bool:
        """Whether the tensor holds floats."""
        return self.values.is_floating_point()

    def fit(self, extent: Extent, device: torch.device) -> Mask:  # noqa: ARG002
        """Check the tensor's sizes."""
        B, H, L, S = whole = (extent.B, extent.H, extent.L, extent.S)
        came = tuple(self.values.shape)
        fits = all(size in (1, full) for size, full in zip(came, whole[-len(came) :]))
        if fits and not (len(came) == 3 and came[0] == B == H != 1):
            return self
        expected = f"have shape (L, S) = {(L, S)}, (H, L, S) = {(H, L, S)} or (B, H, L, S) = {whole}, or 1 where shared"
        hint = ""
        if fits:
            expected = f"say whether it is (1, H, L, S) or (B, 1, L, S), as there are {B} of both: unsqueeze(0) or (1)"
        elif len(came) == 3 and came[0] == B and all(x in (1, y) for x, y in zip(came[1:], (L, S))):
            hint = "; for one matrix per sequence, unsqueeze(1)"
        elif len(came) == 2 and came == (B, S):
            hint = "; for the padding of each sequence, use masks.key_padding"
        raise rejected(*self._origin, expected, f"{came}{hint}")

    @property
    def bounds_are_exact(self) -> bool:
        """Always."""
        return True

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return which tiles have a visible pair, and which only such; keys are reduced first, then queries."""
        seen = self._seen()
        some = tiling.over_queries(tiling.over_keys(seen, "any"), "any")
        return some, tiling.over_queries(tiling.over_keys(seen, "all"), "all")

    def span(self, extent: Extent, device: torch.device) -> Span | None:  # noqa: ARG002
        """Return the keys that all queries see, or all keys for some queries; unknown for a matrix of both."""
        if self.values.shape[-1] == 1:
            return None, self._seen()[..., 0] * extent.S
        return run(self._seen()) if self.values.shape[-2] == 1 else None

    def _seen(self) -> Tensor:
        """Return where a pair is visible: (B or 1, H or 1, L or 1, S or 1)."""
        seen = ~self.values.detach().isneginf() if self.has_bias else self.values
        return seen[(None,) * (4 - seen.dim())]

    def sizes(self) -> Sizes:
        """Return the tensor's sizes, where not shared."""
        padded: list[Any] = [None] * (4 - self.values.dim()) + [
            size if size != 1 else None for size in self.values.shape
        ]
        return padded[0], padded[1], padded[2], padded[3]

    def __repr__(self) -> str:
        return f"dense({brief(self.values)})"
