"""Biases that hide nothing: ALiBi, learned relative biases, and those of forget gates."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from regard._utils.constraints import size
from regard._utils.errors import described, rejected, shape
from regard._utils.mechanism import mechanism
from regard._utils.part import brief
from regard._utils.tracing import values_unavailable
from regard.masks.band import Aligned, Offset, checked
from regard.masks.base import Extent, Mask, Sizes, Tiling, lookup


@mechanism(formula="adds −m_h · |i − j|", sources=("press2022",), cost="O(L·S·E)")
def alibi(slopes: int | Tensor, align: str | None = None, offset: Offset = None) -> Mask:
    """Return attention with linear biases (ALiBi): scores decrease linearly with distance, at a rate per head.

    Adds ``−slopes[h] · |q + offset − k|`` and hides nothing. For a language model, use ``causal() & alibi(8)``.

    Parameters
    ----------
    slopes : int or Tensor (H,), float
        A number of heads gives the paper's slopes: ``2^(−8 i / H)`` for i = 1…H if H is a power of two; else those
        of the next lower power of two P, then every other slope of 2P heads. A tensor gets gradients.
    align, offset
        See :func:`~regard.masks.causal`.

    Raises
    ------
    TypeError
        If ``slopes`` is neither an int nor a float tensor.
    ValueError
        If the int is less than 1, or the tensor is not one-dimensional or, when used, lacks one entry per query head.

    References
    ----------
    Press, Smith and Lewis, "Train short, test long: attention with linear biases enables input length extrapolation"
    (2022).

    Examples
    --------
    >>> import torch
    >>> from regard import masks
    >>> b, h, q = torch.tensor(0), torch.tensor(1), torch.tensor(2)
    >>> masks.alibi(8).bias(b, h, q, torch.arange(4))
    tensor([-0.5000, -0.2500, -0.0000, -0.2500])
    """
    if isinstance(slopes, Tensor):
        if not slopes.is_floating_point():
            raise rejected("masks.alibi", "slopes", "be an int or a float tensor (H,)", described(slopes), TypeError)
        if slopes.dim() != 1:
            raise rejected("masks.alibi", "slopes", "be an int or a float tensor (H,)", described(slopes))
        return Alibi(slopes, *checked("alibi", align, offset))
    heads = size("masks.alibi", "slopes", slopes)
    return Alibi(geometric(heads), *checked("alibi", align, offset))


def geometric(heads: int) -> tuple[float, ...]:
    """Return the slopes of the ALiBi paper for a number of heads.

    Examples
    --------
    >>> from regard.masks.biases import geometric
    >>> geometric(4)
    (0.25, 0.0625, 0.015625, 0.00390625)
    >>> geometric(3)
    (0.0625, 0.00390625, 0.25)
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    between = [2 ** (-8 * i / (2 * power)) for i in range(1, 2 * power, 2)]
    return tuple(slopes + between[: heads - power])


@mechanism(formula="adds b_h at distance j − i", sources=("raffel2020",), cost="O(L·S·E)")
def relative(table: Tensor, align: str | None = None, offset: Offset = None) -> Mask:
    """Return a learned bias per distance, clipped at R.

    Adds ``table[h, clamp(k − q − offset, −R, R) + R]`` and hides nothing.

    Parameters
    ----------
    table : Tensor (2 R + 1,) or (H, 2 R + 1), float
        Biases for distances −R (key before the query) to R (key after it). Gets gradients.
    align, offset
        See :func:`~regard.masks.causal`.

    Raises
    ------
    TypeError
        If ``table`` is not a float tensor.
    ValueError
        If its last size is even, it has another number of dimensions or, when used, it lacks one row per head.

    Examples
    --------
    >>> import torch
    >>> from regard import masks
    >>> mask = masks.relative(torch.tensor([-1.0, 0.0, 2.0]))
    >>> b = h = torch.tensor(0)
    >>> mask.bias(b, h, torch.arange(3)[:, None], torch.arange(3))
    tensor([[ 0.,  2.,  2.],
            [-1.,  0.,  2.],
            [-1., -1.,  0.]])
    """
    expected = "be a float tensor (2 R + 1,) or (H, 2 R + 1)"
    if not isinstance(table, Tensor) or not table.is_floating_point():
        raise rejected("masks.relative", "table", expected, described(table), TypeError)
    if table.dim() not in (1, 2) or table.shape[-1] % 2 == 0:
        raise rejected("masks.relative", "table", expected, described(table))
    return Relative(table, *checked("relative", align, offset))


@mechanism(formula="adds Σ_{j < t ≤ i} log f_t", sources=("lin2025",), cost="O(L·S·E)")
def forgetting(log_gates: Tensor, align: str | None = None, offset: Offset = None) -> Mask:
    """Return the bias of forgetting attention: scores decrease by the log gates between key and query.

    Adds ``c_t − c_k``, with ``c = cumsum(log_gates)`` and t = q + offset: the sum of the log gates of the keys after k,
    up to the query's position. It hides nothing; use ``causal() & forgetting(log_gates)``. The sum is never a matrix:
    the mask holds c, in float64, so that differences of neighbours stay exact in long sequences. A query before the
    first key counts as being there, and one after the last key as being at that one.

    Parameters
    ----------
    log_gates : Tensor (S,), (H, S) or (B, H, S), float
        Logarithms of the forget gates, at most 0 and finite, as of ``logsigmoid``. H may be 1. Gets gradients. A gate
        that forgets everything is a mask: :func:`~regard.masks.document`.
    align, offset
        See :func:`~regard.masks.causal`.

    Raises
    ------
    TypeError
        If ``log_gates`` is not a float tensor.
    ValueError
        If it has another number of dimensions or, when used, sizes that do not match the call. On the CPU also if a log
        gate is above 0 or −inf.

    References
    ----------
    Lin et al., "Forgetting Transformer: Softmax Attention with a Forget Gate", 2025, arXiv 2503.02130.

    Examples
    --------
    >>> import torch
    >>> from regard import masks
    >>> mask = masks.forgetting(torch.tensor([-5.0, -1.0, -2.0, 0.0]))
    >>> b = h = torch.tensor(0)
    >>> mask.bias(b, h, torch.tensor(2), torch.arange(3))
    tensor([-3., -2.,  0.])
    """
    expected = "be a float tensor (S,), (H, S) or (B, H, S) of finite numbers that are at most 0"
    if not isinstance(log_gates, Tensor) or not log_gates.is_floating_point():
        raise rejected("masks.forgetting", "log_gates", expected, described(log_gates), TypeError)
    if log_gates.dim() not in (1, 2, 3):
        raise rejected("masks.forgetting", "log_gates", expected, shape(log_gates))
    if log_gates.is_cpu and log_gates.numel() and not values_unavailable(log_gates):
        least, greatest = (float(x) for x in log_gates.detach().aminmax())
        if greatest > 0 or least == -torch.inf:  # differences of sums of −inf would be NaN
            raise rejected("masks.forgetting", "log_gates", expected, greatest if greatest > 0 else least)
    total = log_gates.to(torch.float64).cumsum(-1)[(None,) * (3 - log_gates.dim())]
    dtype = torch.promote_types(log_gates.dtype, torch.float32)
    return Forgetting(total, dtype, *checked("forgetting", align, offset))


class PositionBias(Aligned):
    """A bias that depends on positions and hides nothing."""

    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:  # noqa: ARG002
        return None

    @property
    def has_bias(self) -> bool:
        return True

    @property
    def hides(self) -> bool:
        return False

    @property
    def bounds_are_exact(self) -> bool:
        return True

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        return tiling.full()


@final
class Alibi(PositionBias):
    """The negative distance times the head's slope."""

    name = "alibi"

    def __init__(self, slopes: Tensor | tuple[float, ...], align: str | None, offset: Offset) -> None:
        super().__init__(align, offset)
        self.slopes = slopes
        #: Dtype of the paper's slopes, set by :meth:`cast`.
        self._dtype = torch.float32

    def _twin(self) -> Alibi:
        twin = Alibi(self.slopes, self.align, self.offset)
        twin._shift, twin._dtype = self._shift, self._dtype
        return twin

    def cast(self, dtype: torch.dtype) -> Alibi:
        """Return the mask with slopes of this dtype."""
        twin = super().cast(dtype)
        if twin.differs(dtype):
            twin._dtype = dtype
        return twin

    def in_tensors(self, dtype: torch.dtype, device: torch.device) -> Mask:
        """Return the mask with tensors as its offset and slopes."""
        made = super().in_tensors(dtype, device)
        assert isinstance(made, Alibi)
        if isinstance(made.slopes, Tensor):
            return made
        return Alibi(torch.tensor(made.slopes, dtype=dtype, device=device), None, made.offset)

    def differs(self, dtype: torch.dtype) -> bool:
        """Whether the slopes have another dtype."""
        return self._dtype != dtype if isinstance(self.slopes, tuple) else super().differs(dtype)

    def bias(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:
        """Return −slope · |distance|."""
        slopes = self.slopes
        if not isinstance(slopes, Tensor):
            slopes = torch.tensor(slopes, dtype=self._dtype, device=kv_idx.device)
        return -lookup(slopes, h) * (self.positions(b, q_idx) - kv_idx).abs()

    def fit(self, extent: Extent, device: torch.device) -> Mask:
        """Resolve the alignment; check the number of heads."""
        if len(self.slopes) != extent.H:
            expected = f"have one entry per query head ({extent.H})"
            raise rejected("masks.alibi", "slopes", expected, len(self.slopes))
        return super().fit(extent, device)

    def sizes(self) -> Sizes:
        """Return the number of heads H."""
        return super().sizes()[0], len(self.slopes), None, None

    def __repr__(self) -> str:
        paper = isinstance(self.slopes, tuple)
        return self._call(len(self.slopes) if paper else brief(self.slopes))


@final
class Relative(PositionBias):
    """A learned bias per distance, clipped at R."""

    name = "relative"

    def __init__(self, table: Tensor, align: str | None, offset: Offset) -> None:
        super().__init__(align, offset)
        self.table = table

    def _twin(self) -> Relative:
        return Relative(self.table, self.align, self.offset)

    def bias(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:
        """Return the table's entry for the distance."""
        radius = self.table.shape[-1] // 2
        entry = (kv_idx - self.positions(b, q_idx)).clamp(-radius, radius) + radius
        return lookup(self.table, *(h, entry)[-self.table.dim() :])

    def fit(self, extent: Extent, device: torch.device) -> Mask:
        """Resolve the alignment; check the number of heads."""
        if self.table.dim() == 2 and self.table.shape[0] != extent.H:
            expected = f"have one row per query head ({extent.H})"
            raise rejected("masks.relative", "table", expected, shape(self.table))
        return super().fit(extent, device)

    def sizes(self) -> Sizes:
        """Return the number of heads H, if the table has rows."""
        return super().sizes()[0], self.table.shape[0] if self.table.dim() == 2 else None, None, None

    def __repr__(self) -> str:
        return self._call(brief(self.table))


@final
class Forgetting(PositionBias):
    """Differences of cumulative log gates (B or 1, H or 1, S), which are kept in float64."""

    name = "forgetting"

    def __init__(self, total: Tensor, dtype: torch.dtype, align: str | None, offset: Offset) -> None:
        super().__init__(align, offset)
        self.total = total
        #: Dtype of the differences, set by :meth:`cast`.
        self._dtype = dtype

    def _twin(self) -> Forgetting:
        twin = Forgetting(self.total, self._dtype, self.align, self.offset)
        twin._shift = self._shift
        return twin

    def cast(self, dtype: torch.dtype) -> Forgetting:
        """Return the mask with differences of this dtype; sums stay in float64."""
        if not self.differs(dtype):
            return self
        twin = self._twin()
        twin._dtype = dtype
        return twin

    def differs(self, dtype: torch.dtype) -> bool:
        """Whether differences have another dtype."""
        return self._dtype != dtype

    def bias(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:
        """Return the sum of log gates after the key, up to the query."""
        S = self.total.shape[-1]
        if S == 0:
            sizes = torch.broadcast_shapes(*(index.shape for index in (b, h, q_idx, kv_idx)))
            return self.total.new_zeros(sizes, dtype=self._dtype)
        places = self.positions(b, q_idx).clamp(0, S - 1)
        return (lookup(self.total, b, h, places) - lookup(self.total, b, h, kv_idx)).to(self._dtype)

    def fit(self, extent: Extent, device: torch.device) -> Mask:
        """Resolve the alignment; check the sizes."""
        B, H, S = self.total.shape
        if B not in (1, extent.B) or H not in (1, extent.H) or S != extent.S:
            expected = f"have shape (B or 1, H or 1, S) with (B, H, S) = ({extent.B}, {extent.H}, {extent.S})"
            raise rejected("masks.forgetting", "log_gates", expected, shape(self.total))
        return super().fit(extent, device)

    def sizes(self) -> Sizes:
        """Return the sizes of the tensor."""
        B, H, S = self.total.shape
        return super().sizes()[0] if B == 1 else B, None if H == 1 else H, None, S

    def __repr__(self) -> str:
        return self._call(brief(self.total.squeeze((0, 1))))
