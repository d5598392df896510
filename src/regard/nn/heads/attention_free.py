"""Attention Free Transformer: each channel has its own softmax over positions, without queries in the scores.

Dimensions: B sequences, N rows, C width, T largest number of rows, R rank of the position biases.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard import masks
from regard._utils.constraints import flag, lengths, size
from regard._utils.errors import rejected
from regard._utils.mechanism import mechanism
from regard.engines import EngineLike
from regard.functional import attention
from regard.nn._base import Layer, parameter, sequences, zero_padding


@mechanism(
    formula="σ(q_t) ⊙ Σ_j exp(k_j + w_tj) ⊙ v_j / Σ_j exp(k_j + w_tj), for each channel",
    sources=("zhai2021",),
    learned="W_q, W_k, W_v, W_o (C, C), biases, u, w (T, R)",
    cost="O(N²·C + N·C²)",
    reads="dot",
)
class AttentionFree(Layer):
    """Attention Free Transformer: a softmax over positions for each channel (AFT; Zhai 2021, arXiv 2105.14103).

    ``y_t = σ(q_t) ⊙ Σ_j exp(k_j + w_tj) ⊙ v_j / Σ_j exp(k_j + w_tj)``: a channel of the key, plus a learned bias of
    the two positions, is the score; queries are gates of the output. It is :func:`regard.attention` with one head of
    width 1 for each channel. AFT-full has ``w_tj = u_t·w_j`` of rank R; AFT-local keeps it for ``|t − j| < window`` and
    takes 0 elsewhere; AFT-simple has no biases (``rank=0``).

    Parameters
    ----------
    embed_dim : int
        Width C of the rows.
    max_length : int, optional
        Largest number T of rows; not needed with ``rank=0``.
    rank : int, default 128
        Rank R of the position biases; 0 is AFT-simple.
    window : int, optional
        Positions at this distance or more have a bias of 0: AFT-local.
    engine : str or Engine, default "auto"
        See :func:`regard.attention`.
    device, dtype : optional
        Device and dtype of the parameters.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid, or for a longer sequence.

    Notes
    -----
    Scores of any size are exact and hide what a mask hides. The authors compute ``exp(w) (exp(k) ⊙ v)``, a product of
    matrices, which is several times faster, and overflows or rounds to 0 for large k and w.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import AttentionFree
    >>> AttentionFree(16, max_length=100, rank=8)(torch.randn(2, 50, 16), is_causal=True).shape
    torch.Size([2, 50, 16])
    """

    def __init__(
        self,
        embed_dim: int,
        max_length: int | None = None,
        *,
        rank: int = 128,
        window: int | None = None,
        engine: EngineLike = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        C = self.embed_dim = size(self, "embed_dim", embed_dim)
        self.rank = 0 if rank == 0 and not isinstance(rank, bool) else size(self, "rank", rank)
        if self.rank and max_length is None:
            raise rejected(type(self).__name__, "max_length", "be given with position biases (or pass rank=0)", None)
        if window is not None and not self.rank:
            raise rejected(type(self).__name__, "window", "be None with rank=0", window)
        self.max_length = None if max_length is None else size(self, "max_length", max_length)
        self.window = None if window is None else size(self, "window", window)
        self.engine = engine
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(C, C, **where) for _ in range(4))
        T = self.max_length or 0
        self.query_positions = parameter(T, self.rank, **where) if self.rank else None
        self.key_positions = parameter(T, self.rank, **where) if self.rank else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Re-initialize the projections as ``nn.Linear`` does, and positions with deviation 0.01, as in the paper."""
        for part in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            part.reset_parameters()
        for rows in (self.query_positions, self.key_positions):
            if rows is not None:
                nn.init.normal_(rows, std=0.01)

    def forward(self, x: Tensor, valid_lens: Tensor | None = None, *, is_causal: bool = False) -> Tensor:
        """Return what the rows read.

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
        flag(self, "is_causal", is_causal)
        x = sequences(self, "x", x, self.embed_dim)
        N, mask = x.shape[1], None
        if valid_lens is not None:
            mask = masks.padding(lengths(self, "valid_lens", valid_lens, x.shape[0]))
            x = zero_padding(x, valid_lens)
        if self.query_positions is not None:
            assert self.max_length is not None
            if self.max_length < N:
                expected = f"have at most max_length {self.max_length} rows"
                raise rejected(type(self).__name__, "x", expected, f"{N} rows")
            bias = masks.dense(self._biases(N)[None, None])
            mask = bias if mask is None else mask & bias
        key, value = (each(x).mT.unsqueeze(3) for each in (self.k_proj, self.v_proj))  # (B, C, N, 1)
        read = attention(
            torch.ones_like(key), key, value, mask, is_causal=is_causal, scale=1.0, engine=self.engine
        ).squeeze(3)
        output: Tensor = self.out_proj(torch.sigmoid(self.q_proj(x)) * read.mT)
        return output

    def _biases(self, length: int) -> Tensor:
        """Return w_tj of the first rows, (N, N)."""
        assert self.query_positions is not None and self.key_positions is not None
        found = self.query_positions[:length] @ self.key_positions[:length].mT
        if self.window is None:
            return found
        index = torch.arange(length, device=found.device)
        return torch.where((index.unsqueeze(1) - index).abs() < self.window, found, 0.0)

    def extra_repr(self) -> str:
        """Return the settings that the projections do not show."""
        return f"max_length={self.max_length}, rank={self.rank}" + (f", window={self.window}" if self.window else "")
