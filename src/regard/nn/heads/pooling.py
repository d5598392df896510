"""Pooling by gated attention: one vector for a bag of instances.

Dimensions: B bags, N instances, E width, C hidden features, H pooled vectors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard import masks
from regard._utils.constraints import flag, lengths, size
from regard._utils.mechanism import mechanism
from regard.engines import EngineLike
from regard.engines.aux import Aux, AuxRequest
from regard.functional import attention
from regard.nn._base import Layer, sequences, zero_padding


@mechanism(
    formula="Σ_i softmax_i(wᵀ(tanh(V x_i) ⊙ σ(U x_i))) x_i",
    sources=("ilse2018",),
    learned="V, U (C, E), w (H, C), biases",
    cost="O(N·C·E)",
)
class GatedAttentionPooling(Layer):
    """Attention pooling of multiple-instance learning: a weighted mean of a bag (Ilse 2018, arXiv 1802.04712).

    ``Σ_i softmax_i(wᵀ(tanh(V x_i + b) ⊙ σ(U x_i + c))) x_i``: the score of an instance is a small network of it alone.
    Without the gate U it is the paper's plain attention pooling. Permuting the instances changes nothing.

    Parameters
    ----------
    input_size : int
        Width E of the instances.
    hidden_size : int
        Number C of hidden features.
    num_pooled : int, default 1
        Number H of pooled vectors, each with weights of its own.
    gated : bool, default True
        Whether hidden features have a gate.
    bias : bool, default True
        Whether V and U have a bias.
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
    >>> from regard import AuxRequest
    >>> from regard.nn import GatedAttentionPooling
    >>> layer = GatedAttentionPooling(16, 8)
    >>> y, aux = layer(torch.randn(2, 50, 16), torch.tensor([50, 7]), return_aux=AuxRequest(weights=True))
    >>> y.shape, aux.weights.shape
    (torch.Size([2, 1, 16]), torch.Size([2, 1, 1, 50]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_pooled: int = 1,
        *,
        gated: bool = True,
        bias: bool = True,
        engine: EngineLike = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        E, C = size(self, "input_size", input_size), size(self, "hidden_size", hidden_size)
        flag(self, "gated", gated)
        flag(self, "bias", bias)
        self.input_size, self.num_pooled, self.engine = E, size(self, "num_pooled", num_pooled), engine
        self.hidden = nn.Linear(E, C, bias, device, dtype)
        self.gate = nn.Linear(E, C, bias, device, dtype) if gated else None
        self.score = nn.Linear(C, num_pooled, False, device, dtype)

    def reset_parameters(self) -> None:
        """Re-initialize the maps as ``nn.Linear`` does."""
        for each in (self.hidden, self.gate, self.score):
            if each is not None:
                each.reset_parameters()

    def forward(
        self, x: Tensor, valid_lens: Tensor | None = None, *, return_aux: AuxRequest | None = None
    ) -> Tensor | tuple[Tensor, Aux]:
        """Return the pooled vectors.

        Parameters
        ----------
        x : Tensor (B, N, E)
        valid_lens : Tensor (B,) of int, optional
            Number of valid instances per bag; later ones are ignored. An empty bag gives 0.
        return_aux : AuxRequest, optional
            Auxiliary outputs to return; weights are (B, H, 1, N).

        Returns
        -------
        output : Tensor (B, H, E)
        aux : Aux
            Only if requested.
        """
        x = sequences(self, "x", x, self.input_size)
        mask = None
        if valid_lens is not None:
            mask = masks.padding(lengths(self, "valid_lens", valid_lens, x.shape[0]))
            x = zero_padding(x, valid_lens)
        hidden = torch.tanh(self.hidden(x))
        if self.gate is not None:
            hidden = hidden * torch.sigmoid(self.gate(x))
        key = self.score(hidden).mT.unsqueeze(3)  # (B, H, N, 1): the score is the key times a query of 1
        value = x.to(key.dtype).unsqueeze(1)
        answer = attention(
            torch.ones_like(key[:, :, :1]), key, value, mask, scale=1.0, engine=self.engine, return_aux=return_aux
        )
        read = answer if isinstance(answer, Tensor) else answer[0]
        return read.squeeze(2) if isinstance(answer, Tensor) else (read.squeeze(2), answer[1])

    def extra_repr(self) -> str:
        """Return the number of pooled vectors."""
        return f"num_pooled={self.num_pooled}"
