"""The work of a point: tensors, and a formula for the correct result that is independent of regard's code."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

#: Numbers of one chunk of the formula, and of all chunks; above the second, rows are sampled.
CHUNK, TOTAL = 1 << 23, 1 << 26

#: ``scores(query, key, parameters)`` (B, H, l, S), in the dtype of its arguments.
Formula = Callable[[Tensor, Tensor, dict[str, Tensor]], Tensor]
#: ``weigh(scores)`` (..., S): the weights of whole rows, where something is visible.
Weigh = Callable[[Tensor], Tensor]
#: ``visible(rows)`` (B or 1, 1, l, S) for row indices (l,): True where a query may attend.
Visible = Callable[[Tensor], Tensor]


def scaled_dot(query: Tensor, key: Tensor, parameters: dict[str, Tensor]) -> Tensor:  # noqa: ARG001
    """Return q·k/√E."""
    return query @ key.mT / math.sqrt(query.shape[-1])


def softmax(scores: Tensor) -> Tensor:
    """Return exp(s) / Σ exp(s)."""
    return scores.softmax(-1)


@dataclass
class Work:
    """What is to be calculated at a point.

    Attributes
    ----------
    query : Tensor (B, H, L, E)
    key : Tensor (B, G, S, E)
    value : Tensor (B, G, S, V)
    backward : bool
        Whether gradients are wanted; then the inputs and parameters require them.
    scores : callable
        The score, written as in a textbook.
    weigh : callable
        How scores become weights.
    parameters : dict of str to Tensor
        Learned parameters of the score.
    visible : callable or None
    bias : Tensor (B or 1, H or 1, L, S), or None
        Added to the scores; learned like the parameters.
    topk : int
        Largest weights wanted of each row, with the entropy; 0 for neither.
    features : int
        Numbers that the formula holds for each pair.
    pair_flops : float or None
        Operations of a visible pair's forward pass; None for those of a dot product and a read.
    kernel : str
        Which of several scores or normalizers it is, where a case has several.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    backward: bool = False
    scores: Formula = scaled_dot
    parameters: dict[str, Tensor] = field(default_factory=dict)
    visible: Visible | None = None
    topk: int = 0
    features: int = 1
    pair_flops: float | None = None
    kernel: str = ""
    weigh: Weigh = softmax
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        size = (*self.query.shape[:3], self.value.shape[-1])
        self.grad = torch.randn(size, generator=torch.Generator().manual_seed(1))
        if self.backward:
            for tensor in self.inputs.values():
                tensor.requires_grad_()

    @property
    def inputs(self) -> dict[str, Tensor]:
        """What gradients are taken to, by name."""
        bias = {} if self.bias is None else {"bias": self.bias}
        return {"query": self.query, "key": self.key, "value": self.value, **bias, **self.parameters}

    def dense(self) -> Tensor | None:
        """Return the mask as a matrix."""
        return None if self.visible is None else self.visible(torch.arange(self.query.shape[2]))

    def pairs(self) -> int:
        """Return how many pairs may meet, over batches and heads."""
        B, H, L, _ = self.query.shape
        S = self.key.shape[2]
        if self.visible is None:
            return B * H * L * S
        total = 0
        for rows in torch.arange(L).split(max(CHUNK // S, 1)):
            seen = self.visible(rows)
            total += int(seen.sum()) * (B // seen.shape[0]) * (H // seen.shape[1])
        return total

    def flops(self) -> float:
        """Return the operations that the visible pairs need; a backward pass costs 2.5 forward passes."""
        pair = self.pair_flops
        if pair is None:
            pair = 2.0 * (self.query.shape[-1] + self.value.shape[-1])
        return self.pairs() * pair * (3.5 if self.backward else 1.0)

    def bytes(self) -> float:
        """Return the bytes that must be read once: query, key, value and the bias."""
        read = [self.query, self.key, self.value] + ([] if self.bias is None else [self.bias])
        return float(sum(t.numel() * t.element_size() for t in read))

    def achieved(self, result: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the value to compare with :meth:`expected`; by default the contender's result itself."""
        return result

    def rows(self) -> Tensor:
        """Return the rows that are checked: all, or a sample with the first and the last."""
        B, H, L, _ = self.query.shape
        count = max(TOTAL // max(B * H * self.key.shape[2] * self.features, 1), 64)
        if count >= L:
            return torch.arange(L)
        drawn = torch.randperm(L, generator=torch.Generator().manual_seed(2))[: count - 2]
        return torch.cat((torch.tensor([0, L - 1]), drawn)).unique()

    def expected(self, rows: Tensor, dtype: torch.dtype, *, weights: bool = False) -> dict[str, Tensor]:
        """Return the formula's result in ``dtype`` at ``rows``.

        Gradients are those of an output gradient at those rows alone. ``weights`` adds the weights themselves,
        (B, H, rows, S).
        """
        with torch.set_grad_enabled(self.backward):
            leaves = {name: t.detach().to(dtype).requires_grad_(self.backward) for name, t in self.inputs.items()}
            grads = {name: torch.zeros_like(t) for name, t in leaves.items()} if self.backward else {}
            B, H = self.query.shape[:2]
            step = max(CHUNK // max(B * H * self.key.shape[2] * self.features, 1), 1)
            found: dict[str, list[Tensor]] = {}
            for part in rows.split(step):
                alpha, output = self._rows(leaves, part)
                if self.backward:
                    given = self.grad[:, :, part].to(dtype)
                    for name, gradient in zip(grads, torch.autograd.grad(output, list(leaves.values()), given)):
                        grads[name] += gradient
                row = {"output": output.detach()}
                if self.topk:
                    row["entropy"] = -torch.special.xlogy(alpha, alpha).sum(-1)
                    row["topk"] = alpha.topk(self.topk, -1).values
                if weights:
                    row["weights"] = alpha.detach()
                for name, tensor in row.items():
                    found.setdefault(name, []).append(tensor)
        result = {name: torch.cat(tensors, 2) for name, tensors in found.items()}
        for name, gradient in grads.items():
            result[f"d_{name}"] = gradient[:, :, rows] if name == "query" else gradient
        return result

    def _rows(self, leaves: dict[str, Tensor], rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the output of some rows."""
        query, key, value = leaves["query"][:, :, rows], leaves["key"], leaves["value"]
        B, H, L, E = query.shape
        G = key.shape[1]
        parameters = {name: leaves[name] for name in self.parameters}
        # The query heads of a group are further rows of its key head.
        scores = self.scores(query.reshape(B, G, H // G * L, E), key, parameters).reshape(B, H, L, -1)
        if self.bias is not None:
            scores = scores + leaves["bias"][:, :, rows]
        if self.visible is not None:
            scores = scores.masked_fill(~self.visible(rows), -torch.inf)
        # A query that may attend to nothing gets zeros.
        alpha = self.weigh(scores).masked_fill(scores.isneginf().all(-1, keepdim=True), 0.0)
        return alpha, (alpha.reshape(B, G, H // G * L, -1) @ value).reshape(B, H, L, -1)
