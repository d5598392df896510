"""Pool a sequence of hidden states into one vector: one token, mean, max, or convolutional window features.

Dimensions: B batch, L tokens, E hidden size, J to K window sizes in tokens, F filters per window size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._utils.constraints import size
from regard._utils.errors import rejected

#: Poolings of bidirectional encoders and of causal decoders.
OF_ENCODERS, OF_DECODERS = ("first", "mean", "max"), ("last", "mean", "max")

#: The largest window size allowed, and the default, in tokens.
WIDEST, WINDOW = 64, 3
#: The most filters of one window size.
MOST_FILTERS = 1 << 14


def pooled(pooling: str, rows: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """Return one vector (B, E) for each sequence.

    Parameters
    ----------
    pooling : {"first", "last", "mean", "max"}
    rows : Tensor (B, L, E)
    attention_mask : Tensor (B, L) of bool, optional
        True for real tokens; all by default. The mean of a sequence without real tokens is a vector of zeros.

    Examples
    --------
    >>> rows, real = torch.tensor([[[1.0, 5.0], [3.0, 1.0], [9.0, 9.0]]]), torch.tensor([[True, True, False]])
    >>> [pooled(each, rows, attention_mask=real).tolist() for each in ("first", "last", "mean", "max")]
    [[[1.0, 5.0]], [[3.0, 1.0]], [[2.0, 3.0]], [[3.0, 5.0]]]
    """
    if pooling == "first":
        return rows[:, 0]
    if attention_mask is None:
        return rows[:, -1] if pooling == "last" else rows.mean(1) if pooling == "mean" else rows.amax(1)
    if pooling == "last":
        last = (attention_mask * torch.arange(1, attention_mask.shape[1] + 1, device=attention_mask.device)).amax(1) - 1
        return rows[torch.arange(len(rows), device=rows.device), last.clamp(min=0)]
    real = attention_mask.unsqueeze(-1)
    if pooling == "max":
        return torch.where(real | ~real.any(1, keepdim=True), rows, -torch.inf).amax(1)
    share = real.to(rows.dtype)
    return (rows * share).sum(1) / share.sum(1).clamp(min=1)


class WindowFeatures(nn.Module):
    """The maximum and mean over all windows of J to K tokens of convolutional filters (Kim 2014, arXiv 1408.5882).

    ::

        f_kt = relu(W_k [x_t; …; x_{t+k−1}] + b_k)          k = J … K
        features = [max_t f_Jt; …; max_t f_Kt; mean_t f_Jt; …; mean_t f_Kt]

    Both ends of a sequence are zero-padded; every window holds at least one real token.

    Parameters
    ----------
    width : int
        E.
    filters : int
        F, at most 16,384.
    window : int
        K, at most 64.
    narrowest : int, default 1
        J, at most K.
    means : bool, default True
        Include the mean of each filter as well as its maximum. Kim 2014 used only maxima, and windows of 3 to 5
        tokens.

    Attributes
    ----------
    features : int
        Number of features: 2·(K − J + 1)·F, or half as many without means.

    Examples
    --------
    >>> found = WindowFeatures(16, filters=5, window=3)
    >>> found(torch.zeros(2, 7, 16), torch.ones(2, 7, dtype=torch.bool)).shape
    torch.Size([2, 30])
    """

    def __init__(self, width: int, filters: int, window: int, narrowest: int = 1, *, means: bool = True) -> None:
        super().__init__()
        sizes = {"width": width, "filters": filters, "window": window, "narrowest": narrowest}
        width, filters, window, narrowest = (size(self, name, given) for name, given in sizes.items())
        for name, given, most in (
            ("filters", filters, MOST_FILTERS), ("window", window, WIDEST), ("narrowest", narrowest, window),
        ):  # fmt: skip
            if given > most:
                raise rejected(type(self).__name__, name, f"be at most {most:,}", given)
        self.width, self.widths, self.means = width, range(narrowest, window + 1), means
        self.convolutions = nn.ModuleList(nn.Conv1d(width, filters, k, padding=k - 1) for k in self.widths)
        self.features = (1 + means) * len(self.widths) * filters

    def reset_parameters(self) -> None:
        """Reinitialize the filters with torch's defaults."""
        for each in self.convolutions:
            each.reset_parameters()  # type: ignore[operator]

    def forward(self, rows: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the features (B, ·) of hidden states (B, L, E).

        ``attention_mask`` (B, L) is True for real tokens; all by default. A sequence without real tokens gets zeros.

        Raises
        ------
        ValueError
            If the shapes do not match.
        """
        if rows.ndim != 3 or rows.shape[-1] != self.width:
            raise rejected(type(self).__name__, "rows", f"have shape (B, L, {self.width})", tuple(rows.shape))
        if attention_mask is not None and attention_mask.shape != rows.shape[:2]:
            raise rejected(
                type(self).__name__,
                "attention_mask",
                f"have shape {tuple(rows.shape[:2])}",
                tuple(attention_mask.shape),
            )
        if attention_mask is None:
            attention_mask = torch.ones(rows.shape[:2], dtype=torch.bool, device=rows.device)
        by_column = torch.where(attention_mask.unsqueeze(-1), rows, 0.0).transpose(1, 2)  # (B, E, L)
        real = attention_mask.to(rows.dtype).unsqueeze(1)  # (B, 1, L)
        largest, means = [], []
        for k, convolution in zip(self.widths, self.convolutions):
            # max_pool1d gives the same result but cannot be exported with a dynamic length.
            holds = F.pad(real, (k - 1, k - 1)).unfold(-1, k, 1).amax(-1)  # (B, 1, L + k − 1)
            found = F.relu(convolution(by_column)) * holds  # (B, F, L + k − 1)
            largest.append(found.amax(-1))
            if self.means:
                means.append(found.sum(-1) / holds.sum(-1).clamp(min=1))
        return torch.cat(largest + means, -1)
