"""A call and its neighbours as NumPy arrays: the input of the oracle."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.engines.local_linear import LocalLinear
from regard.masks import Extent, Mask
from regard.normalizers.base import Normalizer
from regard.scores import Constant, Score
from regard.testing.case import CaseCall
from regard.testing.formulas import Array

#: The relative distance of a neighbour's inputs from those of the call; absolute for inputs of 0.
JITTER = 2.0**-6


@dataclass(frozen=True)
class NumpyCall:
    """K problems that differ only in their inputs and scale; the first is the call itself.

    Attributes
    ----------
    query, key, value : Tensor (K, ...)
        In the dtype of the call, with its dimensions after K.
    mask : Mask or None
        Bound to the extent.
    visible : array (B, H, L, S), bool
    bias : array (B, H, L, S) or None
    keep : array (B, H, L, S) or None
        Factors for the weights, as from dropout.
    scales : array (K,)
        The scale of each problem.
    lead : tuple of int
        The broadcast leading dimensions.
    ridge : float
        Of order 1; 0 for order 0.
    shifts : array (K, 1, 1, 1, S), optional
        Added to the scores of neighbours that have no features in which to differ, or whose score reads none.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    score: Score
    normalizer: Normalizer
    mask: Mask | None
    visible: Array
    bias: Array | None
    scales: Array
    softcap: float | None
    lead: tuple[int, ...]
    heads: int
    keep: Array | None = None
    ridge: float = 0.0
    shifts: Array | None = None

    @classmethod
    def of(cls, call: CaseCall, neighbours: int = 0) -> NumpyCall:
        """Return a call and some neighbours, whose inputs and scale differ by random factors close to 1."""
        call = call.on_cpu()
        query, key, value = (_neighbours(t, neighbours, i) for i, t in enumerate((call.query, call.key, call.value)))
        leads = [t.shape[:-3] for t in (call.query, call.key, call.value)]
        lead = tuple(torch.broadcast_shapes(*leads))
        heads = max(t.shape[-3] if t.dim() > 2 else 1 for t in (call.query, call.key, call.value))
        if 0 in (t.shape[-3] if t.dim() > 2 else 1 for t in (call.query, call.key, call.value)):
            heads = 0
        extent = Extent(math.prod(lead), heads, query.shape[-2], key.shape[-2])
        mask = None if call.mask is None else call.mask.bind(extent, query.device)
        visible, bias = evaluate_mask(mask, extent)
        scale = call.score.default_scale(query.shape[-1]) if call.scale is None else call.scale
        scales = scale + JITTER * (scale or 1.0) * np.random.default_rng(0).uniform(-1, 1, neighbours + 1)
        scales[0] = scale
        shifts = None
        if isinstance(call.score, Constant) or 0 in (query.shape[-1], key.shape[-1]):
            shifts = JITTER**2 * np.random.default_rng(1).uniform(-1, 1, (neighbours + 1, 1, 1, 1, extent.S))
            shifts[0] = 0
        return cls(
            query, key, value, call.score, call.normalizer, mask, visible, bias, scales, call.softcap, lead, heads,
            ridge=call.order.ridge if isinstance(call.order, LocalLinear) else 0.0, shifts=shifts,
        )  # fmt: skip

    @property
    def extent(self) -> Extent:
        """B, H, L and S of one problem."""
        return Extent(math.prod(self.lead), self.heads, self.query.shape[-2], self.key.shape[-2])

    @property
    def wide(self) -> type[np.floating[Any]]:
        """The NumPy type for computations, wider than the dtype of the call."""
        return np.longdouble if self.query.dtype == torch.float64 else np.float64

    def array(self, tensor: Tensor) -> Array:
        """Return a tensor as an array of the wider type."""
        return tensor.detach().double().cpu().numpy().astype(self.wide)

    def but(self, **changes: Any) -> NumpyCall:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    def canonical(self, rows: Any) -> Any:
        """Return (K, ...) rows, a tensor or an array, as (K, B, heads, length, width)."""
        K, *inner, length, width = rows.shape
        if not inner:
            inner, rows = [1], rows.reshape(K, 1, length, width)
        lead, heads = inner[:-1], inner[-1]
        shape = (K, *self.lead, heads, length, width)
        rows = rows.reshape(K, *(1,) * (len(self.lead) - len(lead)), *lead, heads, length, width)
        rows = np.broadcast_to(rows, shape) if isinstance(rows, np.ndarray) else rows.expand(shape)
        return rows.reshape(K, math.prod(self.lead), heads, length, width)

    def summed(self, rows: Array, shape: tuple[int, ...]) -> Array:
        """Undo :meth:`canonical` for gradients: (K, B, heads, length, width) summed to ``(K, *shape)``."""
        K, _, heads, length, width = rows.shape
        rows = rows.reshape(K, *self.lead, heads, length, width)
        given = shape if len(shape) > 2 else (1, *shape)
        padded = (K, *(1,) * (rows.ndim - 1 - len(given)), *given)
        axes = tuple(axis for axis, (full, own) in enumerate(zip(rows.shape, padded)) if own != full)
        return rows.sum(axes, keepdims=True).reshape(K, *shape)


def evaluate_mask(mask: Mask | None, extent: Extent) -> tuple[Array, Array | None]:
    """Return which pairs are visible, and the bias of their scores: (B, H, L, S), by evaluating the mask for each."""
    shape = tuple(extent)
    if mask is None:
        return np.ones(shape, dtype=bool), None
    index = indices(extent, mask)
    seen = mask(*index).expand(shape)
    bias = mask.cast(torch.float64).bias(*index) if mask.has_bias else None
    return seen.cpu().numpy(), None if bias is None else bias.detach().expand(shape).cpu().numpy()


def indices(extent: Extent, mask: Mask | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return b, h, q_idx and kv_idx of every pair, broadcasting against each other."""
    tensors = [] if mask is None else mask.tensors()
    device = tensors[0].device if tensors else torch.device("cpu")
    return extent.indices(device)


def _neighbours(tensor: Tensor, count: int, salt: int) -> Tensor:
    """Return the tensor and its neighbours, stacked along a new first dimension."""
    tensor = tensor.detach()
    if not count:
        return tensor.unsqueeze(0)
    generator = torch.Generator().manual_seed(salt)
    noise = JITTER * (2 * torch.rand(count, *tensor.shape, generator=generator) - 1)
    wide = tensor.double()
    moved = (wide + noise.to(tensor.device) * torch.where(wide == 0, 1.0, wide)).to(tensor.dtype)
    return torch.cat((tensor.unsqueeze(0), moved))
