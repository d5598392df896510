"""Coordinate attention and the global context block: gates and sums from pooled rows, columns and images.

Dimensions: B images, C channels, H height, W width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard._utils.constraints import size
from regard._utils.mechanism import mechanism
from regard.engines import EngineLike
from regard.engines.aux import AuxRequest
from regard.functional import attention
from regard.nn._base import Layer
from regard.nn.image.channels import gated, image
from regard.nn.image.non_local import places


@mechanism(
    formula="x ⊙ σ(W_h f_h) ⊙ σ(W_w f_w), [f_h; f_w] = δ(BN(W [mean over columns; mean over rows])), δ: hard swish",
    sources=("hou2021",),
    learned="W (C', C), W_h, W_w (C, C'), biases, batch norm",
    cost="O(H·W·C + (H + W)·C·C')",
)
class CoordinateAttention(Layer):
    """Coordinate attention: a gate for each row and one for each column of an image (Hou 2021, arXiv 2103.02907).

    The means over columns (C, H) and over rows (C, W) pass, one after the other, through a shared map to C' features,
    a batch norm and a hard swish, and through two maps back to C channels: ``x ⊙ σ(W_h f_h) ⊙ σ(W_w f_w)``.

    Parameters
    ----------
    channels : int
        Number of channels C.
    reduction : int, default 32
        C' is max(8, C // reduction).
    device, dtype : optional
        Device and dtype of the parameters.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import CoordinateAttention
    >>> output, gate = CoordinateAttention(16)(torch.randn(2, 16, 5, 7), return_map=True)
    >>> gate.shape
    torch.Size([2, 16, 5, 7])
    """

    def __init__(self, channels: int, reduction: int = 32, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        C = self.channels = size(self, "channels", channels)
        hidden = max(8, C // size(self, "reduction", reduction))
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.squeeze = nn.Conv2d(C, hidden, 1, **where)
        self.norm = nn.BatchNorm2d(hidden, **where)
        self.restore_rows = nn.Conv2d(hidden, C, 1, **where)
        self.restore_columns = nn.Conv2d(hidden, C, 1, **where)

    def reset_parameters(self) -> None:
        """Re-initialize the maps and the norm as torch does."""
        for part in (self.squeeze, self.norm, self.restore_rows, self.restore_columns):
            part.reset_parameters()

    def forward(self, x: Tensor, *, return_map: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Return the image (B, C, H, W) times its gates, and their product (B, C, H, W) if ``return_map``."""
        x = image(self, "x", x, self.channels)
        both = torch.cat([x.mean(3, keepdim=True), x.mean(2, keepdim=True).mT], 2)  # (B, C, H + W, 1)
        hidden = F.hardswish(self.norm(self.squeeze(both)))
        rows, columns = hidden.split(list(x.shape[2:]), 2)
        gate = torch.sigmoid(self.restore_rows(rows)) * torch.sigmoid(self.restore_columns(columns.mT))
        return gated(x, gate, return_map)


@mechanism(
    formula="x + W_2 ReLU(LN(W_1 Σ_j softmax_j(w·x_j) x_j))",
    sources=("cao2019",),
    learned="w (C), W_1 (C', C), W_2 (C, C'), biases, layer norm",
    cost="O(H·W·C + C·C')",
    reads="dot",
)
class GlobalContext(Layer):
    """Global context block (GCNet): every pixel gets the same sum over the image (Cao 2019, arXiv 1904.11492).

    ``x + W_2 ReLU(LN(W_1 c))`` with ``c = Σ_j softmax_j(w·x_j) x_j``: a non-local block with one query for all pixels.
    W_2 starts at 0, so that the block starts as the identity.

    Parameters
    ----------
    channels : int
        Number of channels C.
    reduction : int, default 16
        C' is max(1, C // reduction).
    engine : str or Engine, default "auto"
        See :func:`regard.attention`.
    device, dtype : optional
        Device and dtype of the parameters.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import GlobalContext
    >>> x = torch.randn(2, 16, 5, 7)
    >>> output, weights = GlobalContext(16)(x, return_map=True)
    >>> torch.equal(output, x), weights.shape
    (True, torch.Size([2, 5, 7]))
    """

    def __init__(
        self,
        channels: int,
        reduction: int = 16,
        *,
        engine: EngineLike = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        C = self.channels = size(self, "channels", channels)
        hidden, self.engine = max(1, C // size(self, "reduction", reduction)), engine
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.score = nn.Linear(C, 1, False, **where)
        self.squeeze = nn.Linear(C, hidden, **where)
        self.norm = nn.LayerNorm(hidden, **where)
        self.restore = nn.Linear(hidden, C, **where)
        self._start()

    def _start(self) -> None:
        nn.init.zeros_(self.restore.weight)
        nn.init.zeros_(self.restore.bias)

    def reset_parameters(self) -> None:
        """Re-initialize the maps as ``nn.Linear`` does, and W_2 to 0."""
        for part in (self.score, self.squeeze, self.norm):
            part.reset_parameters()
        self._start()

    def forward(self, x: Tensor, *, return_map: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Return the image (B, C, H, W) plus its context, and the weights (B, H, W) of pixels if ``return_map``."""
        x = image(self, "x", x, self.channels)
        rows = places(x).unsqueeze(1)  # (B, 1, N, C)
        query = self.score.weight.to(rows.dtype).expand(x.shape[0], 1, 1, -1)
        wanted = AuxRequest(weights=True) if return_map else None
        answer = attention(query, rows, rows, scale=1.0, engine=self.engine, return_aux=wanted)
        context = answer if isinstance(answer, Tensor) else answer[0]
        added = self.restore(F.relu(self.norm(self.squeeze(context.flatten(1)))))
        output = x + added.unsqueeze(2).unsqueeze(3)
        if isinstance(answer, Tensor):
            return output
        assert answer[1].weights is not None, "requested"
        return output, answer[1].weights.view(x.shape[0], *x.shape[2:])
