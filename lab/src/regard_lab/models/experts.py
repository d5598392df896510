"""Mixtures of experts: feed-forward networks of which each token passes a few (Shazeer 2017; Fedus 2021).

Dimensions: N tokens, E width, X experts, k chosen ones, F hidden width of an expert.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.nn import FeedForward

#: How the scores of experts become weights.
ROUTERS = ("softmax", "sigmoid")


class Experts(nn.Module):
    """A gated feed-forward network for each of X experts, of which a token passes the k that its router scores highest.

    ``y = Σ_e p_e(x) W₂ᵉ (SiLU(W_gᵉ x) ∘ W₁ᵉ x) + σ(w x) F(x)``, where p are the router's probabilities of the chosen
    experts and F is an expert that all tokens pass. With the router "sigmoid" a correction, which training does not
    learn by gradients, is added to scores to choose experts but not to weigh them (DeepSeek-V3).

    Parameters
    ----------
    width, hidden : int
        E and F.
    count, chosen : int
        X and k.
    shared : int, default 0
        Hidden width of the shared expert; 0 for none.
    shared_gate : bool, default False
        Whether the shared expert has the gate σ(w x).
    router : {"softmax", "sigmoid"}, default "softmax"
    normalized : bool, default True
        Whether the weights of the chosen experts are divided by their sum.
    scale : float, default 1.0
        Factor of the weights.

    Examples
    --------
    >>> Experts(8, 16, 4, 2, shared=16)(torch.randn(2, 5, 8)).shape
    torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        count: int,
        chosen: int,
        *,
        shared: int = 0,
        shared_gate: bool = False,
        router: str = "softmax",
        normalized: bool = True,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.chosen, self.router_kind, self.normalized, self.scale = chosen, router, normalized, scale
        self.router = nn.Linear(width, count, bias=False)
        self.up = nn.Parameter(torch.empty(count, 2 * hidden, width))  # of each expert the gate, then the other half
        self.down = nn.Parameter(torch.empty(count, width, hidden))
        self.shared = FeedForward(width, shared, "silu", gated=True, bias=False) if shared else None
        self.shared_gate = nn.Linear(width, 1, bias=False) if shared and shared_gate else None
        self.correction: Any
        self.register_buffer("correction", torch.zeros(count) if router == "sigmoid" else None)
        self.draw(0.02)

    def draw(self, std: float) -> None:
        """Draw the experts anew."""
        nn.init.normal_(self.up, std=std)
        nn.init.normal_(self.down, std=std)

    def forward(self, x: Tensor) -> Tensor:
        """Return rows (..., E)."""
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self.route(rows)
        found = torch.zeros_like(rows)
        order = chosen.flatten().argsort(stable=True)  # the choices, expert by expert
        counts = chosen.flatten().bincount(minlength=len(self.up)).tolist()
        for expert, some in enumerate(order.split(counts)):
            if len(some):
                tokens = some // self.chosen
                gate, up = F.linear(rows[tokens], self.up[expert]).chunk(2, -1)
                made = F.linear(F.silu(gate) * up, self.down[expert])
                found = found.index_add(0, tokens, made * weights.flatten()[some].unsqueeze(-1).to(made.dtype))
        if self.shared is not None:
            added = self.shared(rows)
            found = found + (added if self.shared_gate is None else self.shared_gate(rows).sigmoid() * added)
        return found.view(x.shape)

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the indices (N, k) of the experts that each token passes."""
        scores = self.router(rows).to(torch.promote_types(rows.dtype, torch.float32))
        scores = scores.softmax(-1) if self.router_kind == "softmax" else scores.sigmoid()
        chosen = (scores if self.correction is None else scores + self.correction).topk(self.chosen, -1).indices
        weights = scores.gather(-1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) if self.normalized else weights
        return weights * self.scale, chosen

    def extra_repr(self) -> str:
        """Return the number of experts."""
        return f"experts={len(self.up)}, chosen={self.chosen}, router={self.router_kind!r}"
