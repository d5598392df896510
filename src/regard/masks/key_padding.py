"""Real keys marked one by one."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from regard._errors import described, rejected, shape
from regard._part import brief
from regard.masks._checks import lookup
from regard.masks.base import Extent, Mask, Sizes
from regard.masks.intervals import Span, run
from regard.masks.tiling import Tiling


def key_padding(keep: Tensor) -> Mask:
    """Return the mask that shows the keys marked True, to every query and head.

    Visible iff ``keep[b, k]``. (torch's MultiheadAttention has the opposite ``key_padding_mask``, True = padding:
    pass ``~key_padding_mask``. A tokenizer's ``attention_mask`` of ones and zeros: pass ``attention_mask.bool()``.)

    Parameters
    ----------
    keep : Tensor (B, S) or (S,), bool
        True marks a real key.

    Raises
    ------
    TypeError
        If ``keep`` is not a bool tensor.
    ValueError
        If it has another number of dimensions; when used, if its sizes are not B and S.

    Examples
    --------
    >>> import torch
    >>> from regard import masks
    >>> print(masks.key_padding(torch.tensor([[False, True, True, False]])).draw(2))
    key_padding(tensor[1, 4])
    2 queries ↓, 4 keys →; █ visible, · not
      0
    0 ·██·
    1 ·██·
    """
    expected = "be a bool tensor (B, S) or (S,), True for a real key"
    if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
        raise rejected("masks.key_padding", "keep", expected, described(keep), TypeError)
    if keep.dim() not in (1, 2):
        raise rejected("masks.key_padding", "keep", expected, described(keep))
    return KeyPadding(keep)


@final
class KeyPadding(Mask):
    """Keys marked True in a (B, S) or (S,) tensor."""

    def __init__(self, keep: Tensor) -> None:
        self.keep = keep

    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return the marks."""
        index: Any = (b, kv_idx)[-self.keep.dim() :]
        return lookup(self.keep, *index)

    def fit(self, extent: Extent, device: torch.device) -> Mask:  # noqa: ARG002
        """Check the tensor's sizes."""
        if tuple(self.keep.shape) != (extent.B, extent.S)[-self.keep.dim() :]:
            expected = f"have shape (B, S) = {(extent.B, extent.S)} or (S,) = ({extent.S},)"
            raise rejected("masks.key_padding", "keep", expected, shape(self.keep))
        return self

    @property
    def bounds_are_exact(self) -> bool:
        """Always."""
        return True

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return which tiles have a marked key, and which only such."""
        keep = self.keep if self.keep.dim() == 1 else self.keep[:, None, None]
        return tiling.over_keys(keep, "any"), tiling.over_keys(keep, "all")

    def span(self, extent: Extent, device: torch.device) -> Span | None:  # noqa: ARG002
        """Return where the marked keys are, if they are neighbours."""
        return run(torch.atleast_2d(self.keep)[:, None, None])

    def sizes(self) -> Sizes:
        """Return B and S of the tensor."""
        return self.keep.shape[0] if self.keep.dim() == 2 else None, None, None, self.keep.shape[-1]

    def __repr__(self) -> str:
        return f"key_padding({brief(self.keep)})"
