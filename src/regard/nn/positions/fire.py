"""FIRE: a bias that is a small network's answer to the distance, relative to the query's position."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from regard._utils.constraints import positive, size
from regard._utils.errors import rejected
from regard._utils.mechanism import mechanism
from regard.masks import Extent, Mask
from regard.masks.band import Offset, checked
from regard.masks.base import Sizes
from regard.masks.biases import PositionBias
from regard.nn._base import parameter
from regard.nn.positions.relative import BiasLayer


@final
class _Fire(PositionBias):
    """A network of the relative distance, with one output for each head."""

    name = "fire"

    def __init__(self, tensors: tuple[Tensor, ...], align: str | None, offset: Offset) -> None:
        super().__init__(align, offset)
        self.held = tensors  # c, the threshold, weight and bias of the hidden layer (W,), of the output (H, W), (H,)

    def _twin(self) -> _Fire:
        return _Fire(self.held, self.align, self.offset)

    def bias(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:
        """Return the network's output for ``ψ(|distance|) / ψ(max(position, threshold))``."""
        c, threshold, w_in, b_in, w_out, b_out = self.held
        place = self.positions(b, q_idx)
        distance = (place - kv_idx).abs().to(c.dtype)
        reach = torch.maximum((place + 1).to(c.dtype), threshold.abs())
        x = torch.log1p(c.abs() * distance) / torch.log1p(c.abs() * reach)
        hidden = torch.relu(x.unsqueeze(-1) * w_in + b_in)  # (..., l, s, W)
        if h.dim() < 3:  # a single pair, maybe under vmap, where w_out[h] would read the index
            weight, bias = (torch.ops.aten.index.Tensor(each, [h]) for each in (w_out, b_out))
            return (hidden * weight).sum(-1) + bias
        found = hidden @ w_out[h.flatten()].mT + b_out[h.flatten()]  # (..., l, s, H)
        found = found.movedim(-1, -3)
        return found.squeeze(1) if found.dim() > 4 else found

    def fit(self, extent: Extent, device: torch.device) -> Mask:
        """Resolve the alignment; check the number of heads."""
        heads = self.held[5].shape[0]
        if heads != extent.H:
            raise rejected("FireBias", "num_heads", f"be the number of query heads of the call, {extent.H}", heads)
        return super().fit(extent, device)

    def sizes(self) -> Sizes:
        """Return the number of heads H."""
        return super().sizes()[0], self.held[5].shape[0], None, None

    def __repr__(self) -> str:
        return self._call(f"{self.held[5].shape[0]} heads")


@mechanism(
    formula="s(q, k) + W₂ ReLU(w₁ ψ(|q − k|) / ψ(max(q + 1, T)) + b₁) + b₂, ψ(x) = log(1 + c x)",
    sources=("li2023",),
    learned="c, T, w₁, b₁ (W), W₂ (H, W), b₂ (H)",
    cost="O(L·S·W·H)",
)
class FireBias(BiasLayer):
    """FIRE: a bias per head by a small network of the relative distance (Li 2023, arXiv 2310.04418).

    The network, with one hidden layer of W features and ReLU, sees ``ψ(|q − k|) / ψ(max(q + 1, T))`` with
    ``ψ(x) = log(1 + c x)``: the distance relative to the query's position, so that longer sequences stay within [0, 1].
    Positions up to the learned threshold T share one scale.

    The bias depends on both positions; it is computed tile by tile, with W·H products for each pair, which is more than
    the scores themselves cost.

    Parameters
    ----------
    num_heads : int
        Number of query heads H.
    hidden_size : int, default 32
        Number of features W of the hidden layer.
    threshold : float, default 512.0
        Initial T.
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch, regard
    >>> from regard.nn import FireBias
    >>> q = torch.randn(2, 4, 5, 8)
    >>> regard.attention(q, q, q, regard.masks.causal() & FireBias(4)()).shape
    torch.Size([2, 4, 5, 8])
    """

    def __init__(
        self,
        num_heads: int,
        hidden_size: int = 32,
        threshold: float = 512.0,
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.hidden_size = size(self, "num_heads", num_heads), size(self, "hidden_size", hidden_size)
        self.initial = positive(self, "threshold", threshold)
        self.c = parameter(device=device, dtype=dtype)
        self.threshold = parameter(device=device, dtype=dtype)
        self.hidden = nn.Linear(1, self.hidden_size, device=device, dtype=dtype)
        self.output = nn.Linear(self.hidden_size, self.num_heads, device=device, dtype=dtype)
        self.reset_parameters()

    def mask(self, align: str | None, offset: Offset) -> Mask:
        layers = self.hidden.weight[:, 0], self.hidden.bias, self.output.weight, self.output.bias
        return _Fire((self.c, self.threshold, *layers), *checked("fire", align, offset))

    def reset_parameters(self) -> None:
        """Reset c to 0.1 and T to its initial value, and re-initialize the network as ``nn.Linear`` does."""
        nn.init.constant_(self.c, 0.1)
        nn.init.constant_(self.threshold, self.initial)
        self.hidden.reset_parameters()
        self.output.reset_parameters()

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"{self.num_heads}, hidden_size={self.hidden_size}, threshold={self.initial:g}"
