"""What approximations of self-attention share: a call, and the exact result to compare with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from regard import masks
from regard._utils.constraints import flag
from regard._utils.errors import rejected
from regard.functional import attention
from regard.masks import Mask
from regard.nn.heads.self_heads import SelfHeads


class ApproximateAttention(SelfHeads, ABC):
    """Base of multi-head self-attention layers that approximate the softmax.

    :meth:`exact` is softmax attention with the same projections, so that ``layer(x) - layer.exact(x)`` is the error.
    Subclasses define :meth:`approximate` for the heads. The parameters are those of
    :class:`~regard.nn.heads.self_heads.SelfHeads`.
    """

    #: Why there is no causal form, or "" where there is one.
    not_causal: ClassVar[str] = ""

    def forward(self, x: Tensor, valid_lens: Tensor | None = None, *, is_causal: bool = False) -> Tensor:
        """Return the approximate attention of rows to each other.

        Parameters
        ----------
        x : Tensor (B, N, C)
        valid_lens : Tensor (B,) of int, optional
            Number of valid rows per sequence; later rows are ignored, and count as zeros as queries.
        is_causal : bool, default False
            Whether a row sees only itself and earlier rows.

        Returns
        -------
        output : Tensor (B, N, C)
        """
        self._check_causal(is_causal)
        q, k, v = self.projected(x, valid_lens)
        return self.merged(self.approximate(q, k, v, valid_lens, is_causal))

    def exact(self, x: Tensor, valid_lens: Tensor | None = None, *, is_causal: bool = False) -> Tensor:
        """Return what :meth:`forward` approximates: softmax attention with the same projections, in O(N²) time."""
        self._check_causal(is_causal)
        q, k, v = self.projected(x, valid_lens)
        mask = None if valid_lens is None else masks.padding(valid_lens)
        return self.merged(self.attend(q, k, v, mask, is_causal))

    @abstractmethod
    def approximate(self, q: Tensor, k: Tensor, v: Tensor, valid_lens: Tensor | None, is_causal: bool) -> Tensor:
        """Return the heads' outputs (B, H, N, E) of queries, keys and values (B, H, N, E)."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, is_causal: bool) -> Tensor:
        """Return the heads' exact outputs (B, H, N, E)."""
        return attention(q, k, v, mask, is_causal=is_causal, engine=self.engine)

    def _check_causal(self, is_causal: Any) -> None:
        flag(self, "is_causal", is_causal)
        if is_causal and self.not_causal:
            raise rejected(type(self).__name__, "is_causal", f"be False, as {self.not_causal}", is_causal)
