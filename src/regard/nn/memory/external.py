"""External attention: rows read a small learned memory that all inputs share.

Dimensions: B sequences, N rows, C width, M memory rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard._utils.constraints import lengths, size
from regard._utils.mechanism import mechanism
from regard.nn._base import Layer, sequences, zero_padding


@mechanism(
    formula="A M_v, A = softmax over rows of X M_kᵀ, divided by its sums over the memory",
    sources=("guo2021",),
    learned="M_k (M, C), M_v (M, C)",
    cost="O(N·M·C)",
)
class ExternalAttention(Layer):
    """External attention: rows read a learned memory in place of each other (Guo 2021, arXiv 2105.02358).

    ``y = A M_v``, where A is normalized twice: the softmax of ``X M_kᵀ`` over the rows of X, then divided by its sum
    over the M rows of the memory. The first step lets rows compete, so that there is no causal form.

    Parameters
    ----------
    embed_dim : int
        Width C of the rows.
    memory_size : int, default 64
        Number M of memory rows.
    device, dtype : optional
        Device and dtype of the parameters.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import ExternalAttention
    >>> ExternalAttention(16)(torch.randn(3, 100, 16), torch.tensor([100, 20, 1])).shape
    torch.Size([3, 100, 16])
    """

    def __init__(self, embed_dim: int, memory_size: int = 64, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.embed_dim, self.memory_size = size(self, "embed_dim", embed_dim), size(self, "memory_size", memory_size)
        self.keys = nn.Linear(embed_dim, memory_size, False, device, dtype)
        self.values = nn.Linear(memory_size, embed_dim, False, device, dtype)

    def reset_parameters(self) -> None:
        """Re-initialize both memories as ``nn.Linear`` does."""
        self.keys.reset_parameters()
        self.values.reset_parameters()

    def forward(
        self, x: Tensor, valid_lens: Tensor | None = None, *, return_weights: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return what the rows read.

        Parameters
        ----------
        x : Tensor (B, N, C)
        valid_lens : Tensor (B,) of int, optional
            Number of valid rows per sequence; later rows do not compete, and their output is 0.
        return_weights : bool, default False
            Whether to also return A.

        Returns
        -------
        output : Tensor (B, N, C)
        weights : Tensor (B, N, M)
            Only if requested.
        """
        x = sequences(self, "x", x, self.embed_dim)
        real = None
        if valid_lens is not None:
            x = zero_padding(x, lengths(self, "valid_lens", valid_lens, *x.shape[:2]))
            real = (torch.arange(x.shape[1], device=x.device) < valid_lens.to(x.device).view(-1, 1)).unsqueeze(2)
        scores = self.keys(x)
        if real is not None:
            scores = scores.masked_fill(~real, torch.finfo(scores.dtype).min)
        # A row's softmax over rows may round to 0 in all of the memory: divide in logarithms.
        weights = scores.log_softmax(1).softmax(2)
        if real is not None:
            weights = torch.where(real, weights, 0.0)
        output: Tensor = self.values(weights.to(x.dtype))
        return (output, weights) if return_weights else output
