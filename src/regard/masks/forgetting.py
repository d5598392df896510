"""Forgetting: a bias of cumulative log gates, one number per key."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from regard._utils.errors import described, rejected, shape
from regard._utils.part import brief
from regard._utils.tracing import values_unavailable
from regard.masks.band import Offset, checked
from regard.masks.base import Extent, Mask, Sizes, lookup
from regard.masks.biases import _Bias


def forgetting(log_gates: Tensor, align: str | None = None, offset: Offset = None) -> Mask:
    """Return the bias of forgetting attention: scores decrease by the log gates between key and query.

    Adds ``c_t − c_k``, with ``c = cumsum(log_gates)`` and t = q + offset: the sum of the log gates of the keys after k,
    up to the query's position. It hides nothing; use ``causal() & forgetting(log_gates)``. The sum is never a matrix:
    the mask holds c, in float64, so that differences of neighbours stay exact in long sequences. A query before the
    first key counts as being there, and one after the last key as being at that one.

    Parameters
    ----------
    log_gates : Tensor (S,), (H, S) or (B, H, S), float
        Logarithms of the forget gates, at most 0, as of ``logsigmoid``. H may be 1. Gets gradients.
    align, offset
        See :func:`~regard.masks.causal`.

    Raises
    ------
    TypeError
        If ``log_gates`` is not a float tensor.
    ValueError
        If it has another number of dimensions or, when used, sizes that do not match the call. On the CPU also if a log
        gate is above 0.

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
    expected = "be a float tensor (S,), (H, S) or (B, H, S) of numbers that are at most 0"
    if not isinstance(log_gates, Tensor) or not log_gates.is_floating_point():
        raise rejected("masks.forgetting", "log_gates", expected, described(log_gates), TypeError)
    if log_gates.dim() not in (1, 2, 3):
        raise rejected("masks.forgetting", "log_gates", expected, shape(log_gates))
    if log_gates.is_cpu and log_gates.numel() and not values_unavailable(log_gates):
        greatest = float(log_gates.detach().amax())
        if greatest > 0:
            raise rejected("masks.forgetting", "log_gates", expected, greatest)
    total = log_gates.to(torch.float64).cumsum(-1)[(None,) * (3 - log_gates.dim())]
    dtype = torch.promote_types(log_gates.dtype, torch.float32)
    return Forgetting(total, dtype, *checked("forgetting", align, offset))


@final
class Forgetting(_Bias):
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
            return None
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
