"""Attention by a kernel of the distance: Nadaraya–Watson regression as a layer, its width learned or fixed."""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from regard import scores
from regard._catalogue import mechanism
from regard._constraints import Options, positive, size
from regard.nn._scored import ScoredAttention, ScoredParts
from regard.scores.base import KernelName
from regard.scores.distance import kernels


@mechanism(
    formula="Σ_i K((q − k_i) / σ) v_i / Σ_j K((q − k_j) / σ)",
    sources=("nadaraya1964", "watson1964", "epanechikov1969"),
    learned="log σ, or one for each feature",
    cost="O(L·S·(E + V))",
    reads="gaussian",
)
class KernelAttention(ScoredAttention):
    """Kernel regression, ``Σ_i K((q − k_i) / σ) v_i / Σ_j K((q − k_j) / σ)`` (Nadaraya 1964; Watson 1964).

    A kernel is the exponential of a score of :mod:`regard.scores` that depends on a distance, such as
    :class:`~regard.scores.Gaussian` or :class:`~regard.scores.Epanechikov`. A query that no key reaches gets zeros.
    The boxcar's width has no gradient.

    Parameters
    ----------
    kernel : str, default "gaussian"
        A score of a distance, by name.
    width : float, default 1.0
        σ at first, in the units of queries and keys.
    num_features : int, optional
        Learn a width for each of so many features E; one for all where it is not given.
    learn_width : bool, default True
        Whether log σ is a parameter; else a buffer.
    dropout, normalizer, scale, engine
        As :class:`ScoredAttention` has them.
    device, dtype : optional
        Of the width.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import KernelAttention
    >>> x = torch.linspace(0, 5, 50).view(1, 50, 1)
    >>> layer = KernelAttention(width=0.3)
    >>> layer(torch.tensor([[[1.0], [2.0]]]), x, x.sin()).shape, layer.width
    (torch.Size([1, 2, 1]), tensor([0.3000], grad_fn=<ExpBackward0>))
    """

    log_width: Tensor

    def __init__(
        self,
        kernel: KernelName = "gaussian",
        width: float = 1.0,
        num_features: int | None = None,
        dropout: float = 0.0,
        *,
        learn_width: bool = True,
        device: Any = None,
        dtype: Any = None,
        **parts: Unpack[ScoredParts],
    ) -> None:
        super().__init__(dropout, **parts)
        self.kernel, self.initial = Options(kernels())(self, "kernel", kernel), positive(self, "width", width)
        count = 1 if num_features is None else size(self, "num_features", num_features)
        value = torch.empty(count, device=device, dtype=dtype)
        if learn_width:
            self.log_width = nn.Parameter(value)
        else:
            self.register_buffer("log_width", value)
        self.reset_parameters()

    @property
    def width(self) -> Tensor:
        """Return σ, (1,) or (E,)."""
        return self.log_width.exp()

    def score(self) -> scores.Score:
        return kernels()[self.kernel](self.width)

    def reset_parameters(self) -> None:
        """Set the width to its first value."""
        nn.init.constant_(self.log_width, math.log(self.initial))

    def _sizes(self) -> list[str]:
        return [repr(self.kernel), f"width={self.initial}"]
