"""Stand-ins for formulas that nobody stated: the part's own code, in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from regard.normalizers.base import Normalizer
from regard.scores import Score
from regard.testing.case import named
from regard.testing.formulas import Array
from regard.testing.normalizer_formulas import Weighing

if TYPE_CHECKING:
    from regard.testing.statement import Statement


def _tensor(array: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float64))


class OwnComparison:
    """A score's own ``project`` and ``compare``, in float64, with gradients by autograd."""

    def __init__(self, score: Score, query: Array, key: Array) -> None:
        K, B = query.shape[:2]
        self.sources = [_tensor(rows.reshape(K * B, *rows.shape[2:])).requires_grad_() for rows in (query, key)]
        self.score = score.map_tensors(_leaf)
        with torch.enable_grad():
            self._scores = self.score.compare(*self.score.project(*self.sources))
        self.values = self._scores.detach().numpy().reshape(K, B, *self._scores.shape[1:]).astype(query.dtype)

    def pull(self, grad: Array, amplitude: Array) -> dict[str, tuple[Array, Array]]:  # noqa: ARG002
        names = ["query", "key", *(name for name, _ in named("score", self.score))]
        leaves = [*self.sources, *self.score.tensors()]
        K, B = grad.shape[:2]
        found: dict[str, tuple[Array, Array]] = {}
        parts = []
        for k in range(K):  # one problem at a time, as the score's tensors are common to all
            share = np.zeros_like(grad)
            share[k] = np.where(self.values[k] > -np.inf, grad[k], 0)
            parts.append(self._pulled(leaves, share.reshape(K * B, *grad.shape[2:])))
        for i, name in enumerate(names):
            if not name:
                continue
            each = [part[i].reshape(K, B, *part[i].shape[1:])[k] if i < 2 else part[i] for k, part in enumerate(parts)]
            found[name] = (np.stack(each), np.abs(np.stack(each)))
        return found

    def _pulled(self, leaves: list[Tensor], grad: Array) -> list[Array]:
        if not self._scores.requires_grad:
            return [np.zeros(leaf.shape) for leaf in leaves]
        found = torch.autograd.grad(self._scores, leaves, _tensor(grad), retain_graph=True, allow_unused=True)
        return [np.zeros(leaf.shape) if g is None else g.numpy() for leaf, g in zip(leaves, found)]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().double().cpu().requires_grad_() if tensor.is_floating_point() else tensor


def own_modification(statement: Statement, scores: Array) -> tuple[Array, Array]:
    """Return what a score's ``modify`` makes of scaled scores (K, B, H, L, S), and its derivative."""
    from regard.testing.statement import indices

    score = statement.score
    if type(score).modify is Score.modify:
        return scores, np.ones_like(scores)
    index = indices(statement.extent)
    found = []
    for each in scores:
        source = _tensor(each).requires_grad_()
        with torch.enable_grad():
            moved = score.map_tensors(_leaf).modify(source, *index)
        (slope,) = torch.autograd.grad(moved, source, torch.ones_like(moved), allow_unused=True)
        found.append((moved.detach().numpy(), np.zeros(moved.shape) if slope is None else slope.numpy()))
    values, slopes = (np.stack(part).astype(scores.dtype) for part in zip(*found))
    return values, slopes


class OwnWeighing(Weighing):
    """A normalizer's own definition, with its gradient by autograd."""

    def __init__(self) -> None:
        super().__init__(_own_weights, lambda weights, _: weights)

    def pull(self, scores: Array, weights: Array, grad: Array, normalizer: Normalizer) -> Array:  # noqa: ARG002
        """Return the gradient to the scores, given that to the weights."""
        source = _tensor(scores).requires_grad_()
        with torch.enable_grad():
            found = normalizer.map_tensors(_leaf).weights(source)
        if not found.requires_grad:
            return np.zeros_like(grad)
        return torch.autograd.grad(found, source, _tensor(grad))[0].numpy().astype(grad.dtype)

    def amplitude(self, weights: Array, grad: Array, normalizer: Normalizer) -> Array:  # noqa: ARG002
        """Return the size of what is summed, taken as softmax's."""
        return weights * (grad + (weights * grad).sum(-1, keepdims=True))


def _own_weights(scores: Array, normalizer: Normalizer) -> Array:
    with torch.no_grad():
        return normalizer.map_tensors(_leaf).weights(_tensor(scores)).numpy().astype(scores.dtype)
