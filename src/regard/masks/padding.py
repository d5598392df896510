"""Padding, prefix, sink and key padding masks."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from regard._utils.constraints import TensorOf, count
from regard._utils.errors import described, rejected, shape
from regard._utils.mechanism import mechanism
from regard._utils.part import brief
from regard._utils.tracing import values_unavailable
from regard.masks.base import Extent, Mask, Sizes, Span, Tiling, constant, lookup, run

# Masks that show the first n keys: padding, prefix and sinks ----------------------------------------------------------


_LENGTHS = TensorOf(("B",), ("B", "L"), integer=True)
_PREFIXES = TensorOf(("B",), integer=True, other="an int or ")


@mechanism(formula="visible iff j < n_b, for sequence b", cost="O(L·n·E)")
def padding(lengths: Tensor) -> Mask:
    """Return the mask that hides padding after the end of each sequence of keys.

    Visible iff ``k < lengths[b]``, or ``k < lengths[b, q]``.

    Parameters
    ----------
    lengths : Tensor (B,) or (B, L), integer
        Number of valid keys per sequence, or per query.

    Raises
    ------
    TypeError
        If ``lengths`` is not an integer tensor. For a bool tensor (B, S) of valid keys, use
        :func:`~regard.masks.key_padding`.
    ValueError
        If ``lengths`` has another number of dimensions or, when used, sizes other than B and L. On the CPU also if a
        length (B,) is negative or, when used, exceeds S. Lengths per query and on other devices are not checked.

    Examples
    --------
    >>> import torch
    >>> from regard import masks
    >>> mask = masks.padding(torch.tensor([2, 3]))
    >>> print(mask.draw(2, 4, b=1))
    padding(tensor[2])
    2 queries ↓, 4 keys →; █ visible, · not; sequence 1 of 2
      0
    0 ███·
    1 ███·
    """
    if isinstance(lengths, Tensor) and lengths.dtype == torch.bool:
        expected = "be an integer tensor (for a bool tensor (B, S) of valid keys, use masks.key_padding)"
        raise rejected("masks.padding", "lengths", expected, described(lengths), TypeError)
    lengths = _LENGTHS("masks.padding", "lengths", lengths)
    return FirstKeys("padding", _counts("masks.padding", "lengths", lengths))


@mechanism(formula="visible iff j < n", sources=("raffel2020",), cost="O(L·n·E)")
def prefix(n: int | Tensor) -> Mask:
    """Return the prefix mask, which shows the first n keys. A prefix language model uses ``causal() | prefix(n)``.

    Visible iff ``k < n``, or ``k < n[b]``.

    Parameters
    ----------
    n : int or Tensor (B,), integer

    Raises
    ------
    TypeError
        If ``n`` is neither an int nor an integer tensor.
    ValueError
        If ``n`` is negative (checked for tensors on the CPU only), or a tensor that is not (B,).

    Examples
    --------
    >>> from regard import masks
    >>> print((masks.causal() | masks.prefix(2)).draw(4))
    causal() | prefix(2)
    4 queries ↓, 4 keys →; █ visible, · not
      0
    0 ██··
    1 ██··
    2 ███·
    3 ████
    """
    if isinstance(n, Tensor):
        _PREFIXES("masks.prefix", "n", n)
        return FirstKeys("prefix", _counts("masks.prefix", "n", n))
    return FirstKeys("prefix", count("masks.prefix", "n", n))


@mechanism(formula="visible iff j < n, beside a window", sources=("xiao2023",), cost="O(L·n·E)")
def sinks(n: int) -> Mask:
    """Return the attention sink mask, which shows the first n keys: ``causal() & (window(256, 0) | sinks(4))``.

    Visible iff ``k < n``.

    Parameters
    ----------
    n : int

    Raises
    ------
    TypeError
        If ``n`` is not an int.
    ValueError
        If ``n`` is negative.

    Notes
    -----
    These are the attention sinks of Xiao et al., "Efficient streaming language models with attention sinks" (2023):
    keys that every query may attend to. They are not a learned term in the softmax denominator.

    Examples
    --------
    >>> from regard import masks
    >>> print((masks.causal() & (masks.window(1, 0) | masks.sinks(1))).draw(5))
    causal() & (window(1, 0) | sinks(1))
    5 queries ↓, 5 keys →; █ visible, · not
      0
    0 █····
    1 ██···
    2 ███··
    3 █·██·
    4 █··██
    """
    return FirstKeys("sinks", count("masks.sinks", "n", n))


def _counts(function: str, argument: str, counts: Tensor) -> Tensor:
    """Return the tensor, or raise if a count is negative."""
    if _is_readable(counts) and (least := int(counts.min())) < 0:
        raise rejected(function, argument, "be at least 0", least)
    return counts


def _is_readable(counts: Tensor) -> bool:
    """Whether reading counts (B,) is possible and cheap."""
    return counts.is_cpu and counts.dim() == 1 and counts.shape[0] > 0 and not values_unavailable(counts)


@final
class FirstKeys(Mask):
    """The first n keys, where n may differ per sequence (B,) or per query (B, L)."""

    def __init__(self, name: str, n: int | Tensor) -> None:
        self.name = name
        self.n = n

    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return which keys satisfy k < n."""
        if isinstance(self.n, Tensor):
            return kv_idx < lookup(self.n, *(b, q_idx)[: self.n.dim()])
        return kv_idx < self.n

    def fit(self, extent: Extent, device: torch.device) -> Mask:  # noqa: ARG002
        """Check the tensor's sizes, and that no length exceeds the number of keys."""
        if not isinstance(self.n, Tensor):
            return self
        if tuple(self.n.shape) != (extent.B, extent.L)[: self.n.dim()]:
            per_query = f", or per query {(extent.B, extent.L)}" if self.name == "padding" else ""
            argument = "lengths" if self.name == "padding" else "n"
            expected = f"have one entry per sequence ({extent.B}){per_query}"
            raise rejected(f"masks.{self.name}", argument, expected, shape(self.n))
        if self.name == "padding" and _is_readable(self.n) and (longest := int(self.n.max())) > extent.S:
            raise rejected("masks.padding", "lengths", f"be at most {extent.S}, the number of keys", longest)
        return self

    @property
    def bounds_are_exact(self) -> bool:
        """Always."""
        return True

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return which tiles begin before the n-th key, and which end before it."""
        if not isinstance(self.n, Tensor):
            return tiling.k_lo < self.n, tiling.k_hi < self.n
        if self.n.dim() == 1:
            n = self.n.reshape(-1, 1, 1, 1)
            return tiling.k_lo < n, tiling.k_hi < n
        n = self.n[:, None, :, None]
        return tiling.k_lo < tiling.over_queries(n, "amax"), tiling.k_hi < tiling.over_queries(n, "amin")

    def span(self, extent: Extent, device: torch.device) -> Span | None:
        """Return the span that stops at n."""
        if not isinstance(self.n, Tensor):
            return None, constant(min(self.n, extent.S), device)
        n = self.n.to(torch.int64)
        return None, n[:, None, None] if n.dim() == 1 else n[:, None]

    def sizes(self) -> Sizes:
        """Return the sizes B and L of the tensor, and the largest n for S."""
        if not isinstance(self.n, Tensor):
            return None, None, None, None
        longest = int(self.n.max()) if self.n.numel() else 0
        return self.n.shape[0], self.n.shape[1] if self.n.dim() == 2 else None, None, max(longest, 1)

    def __repr__(self) -> str:
        shown: Any = brief(self.n) if isinstance(self.n, Tensor) else self.n
        return f"{self.name}({shown})"


# Key padding ----------------------------------------------------------------------------------------------------------


@mechanism(formula="visible iff key j of sequence b is marked", cost="O(L·S·E)")
def key_padding(keep: Tensor) -> Mask:
    """Return the key padding mask, which shows the keys marked True to all queries and heads.

    Visible iff ``keep[b, k]``. For the ``key_padding_mask`` of torch's MultiheadAttention, in which True is padding,
    pass ``~key_padding_mask``; for a tokenizer's ``attention_mask``, pass ``attention_mask.bool()``.

    Parameters
    ----------
    keep : Tensor (B, S) or (S,), bool
        True for valid keys.

    Raises
    ------
    TypeError
        If ``keep`` is not a bool tensor.
    ValueError
        If ``keep`` has another number of dimensions or, when used, sizes other than B and S.

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
    expected = "be a bool tensor (B, S) or (S,), True for valid keys"
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
        """Return the marked keys."""
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
        """Return which tiles contain a marked key, and which contain no other."""
        keep = self.keep if self.keep.dim() == 1 else self.keep[:, None, None]
        return tiling.over_keys(keep, "any"), tiling.over_keys(keep, "all")

    def span(self, extent: Extent, device: torch.device) -> Span | None:  # noqa: ARG002
        """Return the span of the marked keys, if they are contiguous."""
        return run(torch.atleast_2d(self.keep)[:, None, None])

    def sizes(self) -> Sizes:
        """Return the sizes B and S of the tensor."""
        return self.keep.shape[0] if self.keep.dim() == 2 else None, None, None, self.keep.shape[-1]

    def __repr__(self) -> str:
        return f"key_padding({brief(self.keep)})"
