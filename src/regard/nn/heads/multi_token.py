"""Multi-token attention: a weight depends on the scores of neighbouring queries and keys."""

from __future__ import annotations

from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import masks
from regard._utils.constraints import Integer, size
from regard._utils.errors import rejected
from regard._utils.mechanism import mechanism
from regard.engines.aux import AuxRequest
from regard.functional import attention
from regard.masks import MaskLike
from regard.nn._base import parameter, resolve_part
from regard.nn.heads.self_attention import HeadOptions, SelfAttention
from regard.normalizers.talking_heads import TalkingHeads

_SCORES = AuxRequest(scores=True)


@mechanism(
    formula="softmax(mask(Σ_{a,b} θ_ab s_{t−a, j−b})), hidden s as 0;  heads of a group mixed by W",
    sources=("golovneva2025",),
    learned="θ (H, c_q, c_k), W (H/c_h, c_h, c_h), and those of SelfAttention",
    cost="O(L·E² + L²·(E + H·c_q·c_k))",
)
class MultiTokenAttention(SelfAttention):
    """Self-attention whose scores are convolved over queries and keys (Golovneva 2025, arXiv 2504.00927).

    The score of query t and key j becomes ``Σ_ab θ[h, a, b] s[t − a, j − b]`` for a from 0 to c_q − 1, and b from
    −⌊(c_k − 1)/2⌋ to ⌊c_k/2⌋. Scores that the mask hides count as 0 in the sum, and are hidden after it: with a causal
    mask nothing comes from the future. After softmax, the weights of each group of c_h heads are mixed by a matrix. The
    paper's group norm of the output with its scale by depth is not part of the layer; ``output_gate`` is not either.

    All scores (B, H, L, S) are held in memory, several times. There is no cache: a step needs the scores of earlier
    queries.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of heads H.
    query_kernel, key_kernel : int, default 6, 11
        Sizes c_q and c_k of the convolution.
    head_kernel : int, default 1
        Number of heads c_h of a group, which divides H; 1 for no mixing.
    num_kv_heads, head_dim, bias, out_bias, rotary, engine, device, dtype : optional
        See :class:`SelfAttention`.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import MultiTokenAttention, Rotary
    >>> layer = MultiTokenAttention(16, 4, 3, 5, head_kernel=2, rotary=Rotary(4))
    >>> layer(torch.randn(2, 7, 16), is_causal=True).shape
    torch.Size([2, 7, 16])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        query_kernel: int = 6,
        key_kernel: int = 11,
        *,
        head_kernel: int = 1,
        device: Any = None,
        dtype: Any = None,
        **options: Unpack[HeadOptions],
    ) -> None:
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(embed_dim, num_heads, **where, **options)
        self.query_kernel = size(self, "query_kernel", query_kernel)
        self.key_kernel = size(self, "key_kernel", key_kernel)
        self.head_kernel = Integer(ge=1)(self, "head_kernel", head_kernel)
        if self.num_heads % self.head_kernel:
            raise rejected(type(self).__name__, "head_kernel", f"divide num_heads {num_heads}", head_kernel)
        self.kernel = parameter(self.num_heads, self.query_kernel, self.key_kernel, **where)
        groups = self.num_heads // self.head_kernel
        self.mixing = parameter(groups, self.head_kernel, self.head_kernel, **where) if head_kernel > 1 else None
        self._reset_kernels()

    def _is_plain_step(self, q: Tensor, mask: MaskLike | None, is_causal: bool, request: AuxRequest | None) -> bool:  # noqa: ARG002
        return False

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: MaskLike | None,
        is_causal: bool,
        request: AuxRequest | None,
        offset: Tensor | None = None,
    ) -> Any:
        """Return the heads' outputs (B, H, L, D), and the requested auxiliary outputs."""
        name = type(self).__name__
        if self.context is not None or k.shape[2] != q.shape[2]:
            got = "context parallelism" if self.context is not None else "a cache"
            raise rejected(name, "x", "be a whole sequence, as scores of earlier queries are needed", got)
        if self.mixing is not None and self.normalizer != "softmax":
            raise rejected(name, "normalizer", "be 'softmax' with a head_kernel above 1", repr(self.normalizer))
        found = super()._attend(q, k, v, mask, is_causal, _SCORES, offset)
        scores = found[1].scores
        assert scores is not None, "they were asked for"
        hidden = scores == -torch.inf
        mixed = torch.where(hidden, -torch.inf, self._convolved(torch.where(hidden, 0.0, scores)))
        normalizer = resolve_part(self.normalizer)
        if self.mixing is not None:
            normalizer = TalkingHeads(after=torch.block_diag(*self.mixing))
        parts: dict[str, Any] = {"score": "constant", "normalizer": normalizer, "engine": self.engine}
        grouped = self.num_kv_heads != self.num_heads
        return attention(q, k, v, masks.dense(mixed), enable_gqa=grouped, return_aux=request, **parts)

    def _convolved(self, scores: Tensor) -> Tensor:
        """Return sums of scores (B, H, L, S) over the kernel of each head."""
        after = (self.key_kernel - 1) // 2
        padded = F.pad(scores, (self.key_kernel - 1 - after, after, self.query_kernel - 1, 0))
        weight = self.kernel.to(scores.dtype).flip((1, 2)).unsqueeze(1)
        return F.conv2d(padded, weight, groups=self.num_heads)

    def reset_parameters(self) -> None:
        """Re-initialize the projections by Glorot's rule; kernels and mixing become the identity."""
        super().reset_parameters()
        if "kernel" in self._parameters:  # the base class calls this before it exists
            self._reset_kernels()

    def _reset_kernels(self) -> None:
        with torch.no_grad():
            self.kernel.zero_()
            self.kernel[:, 0, (self.key_kernel - 1) // 2] = 1.0
            if self.mixing is not None:
                self.mixing.copy_(torch.eye(self.head_kernel).expand_as(self.mixing))

    def extra_repr(self) -> str:
        """Return the sizes."""
        own = f"query_kernel={self.query_kernel}, key_kernel={self.key_kernel}, head_kernel={self.head_kernel}"
        return f"{super().extra_repr()}, {own}"
