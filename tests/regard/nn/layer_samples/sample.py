"""Samples of layers, the table of them, and NumPy for their formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

#: Positional and keyword arguments.
LayerCall = tuple[tuple[Any, ...], dict[str, Any]]
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Sample:
    """One way to make and call a layer.

    Attributes
    ----------
    name : str
        The layer's name in the catalogue.
    build : callable
        Return the layer; takes ``device`` and ``dtype``.
    call : callable
        ``call(new)`` returns the arguments of its forward; ``new(*shape)`` makes normal numbers.
    formula : callable
        ``formula(layer, *args, **kwargs)`` returns the first output in NumPy, from float64 parameters (``array(...)``)
        and inputs, written out without the library.
    hidden : callable, optional
        ``hidden(call, value)`` returns the same call with ``value`` in everything that its padding hides; None where
        the layer has no padding.
    variant : str
        Tells samples of one layer apart.
    training : bool
        Whether the layer's formula is that of training mode.
    compiles : bool
        Whether it works under ``torch.compile(fullgraph=True)``.
    """

    name: str
    build: Callable[..., nn.Module]
    call: Callable[[Callable[..., Tensor]], LayerCall]
    formula: Callable[..., Any]
    hidden: Callable[[LayerCall, float], LayerCall] | None = None
    variant: str = ""
    training: bool = False
    compiles: bool = True

    def __str__(self) -> str:
        """Return what tests are named by."""
        return f"{self.name}-{self.variant}" if self.variant else self.name


#: Every sample; the shared test requires at least one for each layer of the catalogue.
SAMPLES: list[Sample] = []


def sample(*args: Any, **kwargs: Any) -> Sample:
    """Make a sample and put it into the table; the arguments are those of :class:`Sample`."""
    made = Sample(*args, **kwargs)
    SAMPLES.append(made)
    return made


def array(tensor: Tensor) -> Array:
    """Return a tensor in NumPy's float64 (or integers)."""
    found: Array = tensor.detach().cpu().numpy()
    return found.astype(np.float64) if found.dtype.kind == "f" else found


def softmax(scores: Array, visible: Array | bool = True) -> Array:
    """Return weights over the last axis; hidden scores get 0, rows that see nothing zeros."""
    seen = np.where(visible, scores, -np.inf)
    peak = np.max(seen, -1, keepdims=True)
    powers = np.exp(seen - np.where(np.isfinite(peak), peak, 0))
    total = powers.sum(-1, keepdims=True)
    return powers / np.where(total == 0, 1, total)


def first(lengths: Array, queries: int, keys: int) -> Array:
    """Return which keys (B, L, S) are real, for lengths (B,) or (B, L)."""
    lengths = np.broadcast_to(lengths[:, None] if lengths.ndim == 1 else lengths, (len(lengths), queries))
    return np.arange(keys) < lengths[..., None]


def filled(tensor: Tensor, lengths: Tensor, value: float) -> Tensor:
    """Return sequences (B, N, ...) with ``value`` beyond each one's length (B,)."""
    beyond = torch.arange(tensor.shape[1]) >= lengths.unsqueeze(1)
    return torch.where(beyond.view(*beyond.shape, *[1] * (tensor.dim() - 2)), value, tensor)


@dataclass(frozen=True)
class Padded:
    """Makes calls of sequence layers with padding, and the same calls with something else in it.

    Attributes
    ----------
    places : tuple of int
        Which positional arguments are the padded sequences (B, N, E).
    lengths : Tensor (B,)
        Their lengths.
    """

    places: tuple[int, ...]
    lengths: Tensor = field(default_factory=lambda: torch.tensor([3, 5]))

    def __call__(self, call: LayerCall, value: float) -> LayerCall:
        """Return the call with ``value`` in the padding."""
        args, kwargs = call
        changed = [filled(t, self.lengths, value) if i in self.places else t for i, t in enumerate(args)]
        return tuple(changed), kwargs
