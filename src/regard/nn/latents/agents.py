"""Agent attention: a few agents read the keys, and queries read the agents.

Dimensions: B sequences, N rows, M agents, C width, H heads, E = C/H width of a head.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor, nn

from regard import masks
from regard._utils.constraints import size
from regard._utils.errors import rejected
from regard._utils.mechanism import mechanism
from regard.functional import attention
from regard.nn.heads.self_heads import SelfHeads, SelfHeadsOptions, real_rows, segments


@mechanism(
    formula="softmax(Q Aᵀ / √E) softmax(A Kᵀ / √E) V, A: means of queries over M segments",
    sources=("han2024",),
    learned="W_q, W_k, W_v, W_o (C, C), biases, a convolution of values",
    cost="O(N·M·C + N·C²)",
    reads="scaled_dot",
)
class AgentAttention(SelfHeads):
    """Agent attention: M agents read the rows, and the rows read the agents (Han 2024, arXiv 2312.08874).

    ``softmax(Q Aᵀ / √E) softmax(A Kᵀ / √E) V`` in each head, at a cost linear in N. The agents A are means of queries
    over M segments of the sequence; the paper takes means over patches of an image, and adds learned biases of
    position. Row j of n valid rows is in segment ⌊j·M / n⌋. An agent sees all rows, so that there is no causal form.

    Parameters
    ----------
    embed_dim : int
        Width C of the rows.
    num_heads : int
        Number of heads H, which divides ``embed_dim``.
    num_agents : int, default 49
        Number M of agents.
    conv_size : int, optional
        Length of a convolution over the values of each head, an odd number, which is added to the output; None adds
        nothing.
    bias, engine, device, dtype : optional
        See :class:`~regard.nn.heads.self_heads.SelfHeads`.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import AgentAttention
    >>> AgentAttention(16, 2, num_agents=8)(torch.randn(3, 100, 16), torch.tensor([100, 20, 1])).shape
    torch.Size([3, 100, 16])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_agents: int = 49,
        conv_size: int | None = None,
        device: Any = None,
        dtype: Any = None,
        **options: Unpack[SelfHeadsOptions],
    ) -> None:
        super().__init__(embed_dim, num_heads, device=device, dtype=dtype, **options)
        self.num_agents = size(self, "num_agents", num_agents)
        self.conv = None
        if conv_size is not None:
            if size(self, "conv_size", conv_size) % 2 == 0:
                raise rejected(type(self).__name__, "conv_size", "be odd", conv_size)
            H, shape, around = self.num_heads, (conv_size, 1), (conv_size // 2, 0)
            self.conv = nn.Conv2d(H, H, shape, padding=around, groups=H, bias=False, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Re-initialize the projections by Glorot's rule, and the convolution as ``nn.Conv2d`` does."""
        super().reset_parameters()
        if self.conv is not None:
            self.conv.reset_parameters()

    def forward(self, x: Tensor, valid_lens: Tensor | None = None) -> Tensor:
        """Return rows (B, N, C) for rows (B, N, C), of which ``valid_lens`` (B,) are valid; others are ignored."""
        q, k, v = self.projected(x, valid_lens)
        if (real := real_rows(v, valid_lens)) is not None:
            v = torch.where(real, v, 0.0)
        share, seen = segments(q, valid_lens, self.num_agents)
        agents = share @ q
        gathered = attention(
            agents, k, v, None if valid_lens is None else masks.padding(valid_lens), engine=self.engine
        )
        read = attention(q, agents, gathered, masks.key_padding(seen), engine=self.engine)
        return self.merged(read if self.conv is None or not v.shape[2] else read + self.conv(v))

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"{super().extra_repr()}, num_agents={self.num_agents}"
