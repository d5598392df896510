"""The feed-forward network of Transformers: two matrices with a nonlinearity between them, or three with a gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from regard._catalogue import mechanism
from regard._constraints import flag, probability, size
from regard._errors import unknown_name
from regard.nn._layer import Layer

#: What stands between the matrices, by name; "gelu_tanh" is the approximation that GPT-2 was trained with.
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


@mechanism(
    formula="W₂ φ(W₁ x), or W₂ (φ(W_g x) ∘ W₁ x) with a gate",
    sources=("vaswani2017", "shazeer2020"),
    learned="W₁ (F, E), W₂ (E, F), with a gate W_g (F, E), biases",
    cost="O(L·E·F)",
)
class FeedForward(Layer):
    """A hidden layer for each row by itself: ``W₂ φ(W₁ x + b₁) + b₂`` (Vaswani 2017, arXiv 1706.03762).

    With a gate it is ``W₂ (φ(W_g x) ∘ W₁ x)``: with ``"silu"`` SwiGLU, with ``"gelu"`` GEGLU (Shazeer 2020, arXiv
    2002.05202).

    Parameters
    ----------
    embed_dim : int
        Width E of the rows.
    hidden_dim : int
        Width F of the hidden layer.
    activation : {"relu", "gelu", "gelu_tanh", "silu"}, default "gelu"
        φ.
    gated : bool, default False
    bias : bool, default True
    dropout : float, default 0.0
        Probability of dropping a hidden feature, in training.
    device, dtype : optional
        Of the parameters.

    Raises
    ------
    ValueError, TypeError
        If an argument is wrong, in one sentence.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import FeedForward
    >>> FeedForward(8, 32, "silu", gated=True, bias=False)(torch.randn(2, 5, 8)).shape
    torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        activation: str = "gelu",
        *,
        gated: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        E, hidden = size(self, "embed_dim", embed_dim), size(self, "hidden_dim", hidden_dim)
        flag(self, "gated", gated)
        flag(self, "bias", bias)
        if activation not in ACTIVATIONS:
            raise unknown_name(type(self).__name__, "activation", str(activation), ACTIVATIONS)
        self.activation, self.dropout = activation, probability(self, "dropout", dropout)
        where: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.gate = nn.Linear(E, hidden, **where) if gated else None
        self.up = nn.Linear(E, hidden, **where)
        self.down = nn.Linear(hidden, E, **where)

    def forward(self, x: Tensor) -> Tensor:
        """Return rows (..., E) of rows (..., E)."""
        rise = ACTIVATIONS[self.activation]
        hidden = rise(self.up(x)) if self.gate is None else rise(self.gate(x)) * self.up(x)
        return self.down(F.dropout(hidden, self.dropout) if self.dropout and self.training else hidden)

    def reset_parameters(self) -> None:
        """Draw the parameters anew, as torch's linear layers do."""
        for layer in self.children():
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()

    def extra_repr(self) -> str:
        """Return the nonlinearity, and the dropout if there is one."""
        return ", ".join([repr(self.activation), *([f"dropout={self.dropout}"] if self.dropout else [])])
