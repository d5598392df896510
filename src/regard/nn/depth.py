"""Attention over depth: a layer reads the outputs of all layers before it, in place of their sum.

Dimensions: B sequences, N rows, E width, U earlier outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard._utils.constraints import Number, flag, size
from regard._utils.errors import described, rejected
from regard._utils.mechanism import mechanism
from regard.engines import EngineLike
from regard.engines.aux import Aux, AuxRequest
from regard.functional import attention
from regard.nn._base import Layer, parameter, sequences


@mechanism(
    formula="Σ_i softmax_i(w·(γ ⊙ rms(u_i))) u_i over the outputs u_0, u_1, … of earlier layers",
    sources=("chen2026",),
    learned="w, γ (E)",
    cost="O(N·U·E)",
    reads="dot",
)
class AttentionResidual(Layer):
    """The input of a layer: a learned mixture of the outputs of all earlier layers (Chen 2026, arXiv 2603.15031).

    A residual stream is the sum of all earlier outputs u_0 (the embedding), u_1, …. Attention residuals take
    ``Σ_i softmax_i(w·(γ ⊙ rms(u_i))) u_i`` instead, with ``rms(u) = u / √(mean u² + ε)``, for each row on its own: the
    learned w is the only query, normalized outputs are keys, the outputs themselves values. Give each layer that reads
    (attention and feed-forward network) an ``AttentionResidual`` of its own. w starts at 0, so that all outputs
    weigh the same. In the paper's block form, outputs are the sums of blocks of layers.

    Parameters
    ----------
    embed_dim : int
        Width E.
    eps : float, default 1e-6
        ε.
    normalize_values : bool, default False
        Whether values are ``rms(u_i)``, too.
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
    >>> from regard.nn import AttentionResidual
    >>> outputs = [torch.randn(2, 5, 16)]
    >>> for layer in (torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)):
    ...     outputs.append(layer(AttentionResidual(16)(outputs)))
    >>> x = AttentionResidual(16)(outputs)  # w is 0: the mean
    >>> torch.allclose(x, torch.stack(outputs).mean(0), atol=1e-6)
    True
    """

    def __init__(
        self,
        embed_dim: int,
        *,
        eps: float = 1e-6,
        normalize_values: bool = False,
        engine: EngineLike = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.embed_dim, self.eps = size(self, "embed_dim", embed_dim), Number(gt=0)(self, "eps", eps)
        flag(self, "normalize_values", normalize_values)
        self.normalize_values, self.engine = normalize_values, engine
        self.query = parameter(embed_dim, device=device, dtype=dtype)
        self.weight = parameter(embed_dim, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set w to 0 and γ to 1."""
        nn.init.zeros_(self.query)
        nn.init.ones_(self.weight)

    def forward(
        self, outputs: Sequence[Tensor], *, return_aux: AuxRequest | None = None
    ) -> Tensor | tuple[Tensor, Aux]:
        """Return the mixture.

        Parameters
        ----------
        outputs : sequence of Tensor (B, N, E)
            The outputs of earlier layers, in any order.
        return_aux : AuxRequest, optional
            Auxiliary outputs to return; weights are (B, N, 1, 1, U).

        Returns
        -------
        output : Tensor (B, N, E)
        aux : Aux
            Only if requested.
        """
        if isinstance(outputs, Tensor) or not isinstance(outputs, Sequence) or not outputs:
            expected = "be a list of at least one tensor (B, N, E)"
            raise rejected(type(self).__name__, "outputs", expected, described(outputs), TypeError)
        first = sequences(self, "outputs[0]", outputs[0], self.embed_dim)
        for i, each in enumerate(outputs):
            if not isinstance(each, Tensor) or each.shape != first.shape:
                raise rejected(type(self).__name__, f"outputs[{i}]", "be like outputs[0]", described(each))
        stacked = torch.stack(list(outputs), 2)  # (B, N, U, E)
        wide = stacked.to(torch.promote_types(stacked.dtype, torch.float32))
        unit = (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()).to(stacked.dtype)
        key, value = unit * self.weight, unit if self.normalize_values else stacked
        query = self.query.expand(*first.shape[:2], 1, 1, self.embed_dim)
        answer = attention(
            query, key.unsqueeze(2), value.unsqueeze(2), scale=1.0, engine=self.engine, return_aux=return_aux
        )
        read = answer if isinstance(answer, Tensor) else answer[0]
        output = read.view(first.shape)
        return output if isinstance(answer, Tensor) else (output, answer[1])

    def extra_repr(self) -> str:
        """Return the width."""
        return str(self.embed_dim)
