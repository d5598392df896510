"""Products with a matrix of weights where nothing is learned: of equal rows once, and by the faster library."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_ONEDNN = getattr(getattr(torch.ops, "mkldnn", None), "_linear_pointwise", None)


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``rows · weightᵀ + bias``, (..., N).

    Without gradients, oneDNN makes float32 products on a CPU: of few rows it makes them faster than the BLAS that
    torch takes otherwise, most of all with a whole vocabulary and on several threads.
    """
    if (
        _ONEDNN is None
        or torch.is_grad_enabled()
        or not (rows.dtype == weight.dtype == torch.float32 and rows.device.type == "cpu" and rows.numel())
        or torch.is_autocast_enabled("cpu")
        or not torch.backends.mkldnn.enabled
        or torch.compiler.is_compiling()
    ):
        return F.linear(rows, weight, bias)
    made: Tensor = _ONEDNN(rows, weight, bias, "none", [], "")
    return made


def shared_linear(rows: Tensor, weight: Tensor, bias: Tensor, alike: Tensor | None) -> Tensor:
    """Return ``rows · weightᵀ + bias`` (R, N), computed once for rows that are equal.

    Parameters
    ----------
    rows : Tensor (R, P)
    weight, bias : Tensor (N, P), (N,)
    alike : Tensor (R,) int64, or None
        Rows with the same number are equal.
    """
    if alike is None:
        return linear(rows, weight, bias)
    numbers, place = alike.unique(return_inverse=True)
    if len(numbers) == len(rows):
        return linear(rows, weight, bias)
    first = torch.empty_like(numbers).scatter_(0, place, torch.arange(len(rows), device=rows.device))
    return linear(rows.index_select(0, first), weight, bias).index_select(0, place)


def cell_step(
    rows: Tensor, state: tuple[Tensor, ...], weights: list[Tensor], alike: tuple[Tensor | None, Tensor | None]
) -> tuple[Tensor, ...]:
    """Return the state of a recurrent cell one step after, as torch's cells do: hidden, and an LSTM's cell.

    Parameters
    ----------
    rows : Tensor (R, P)
        What enters.
    state : (Tensor (R, Q),) or (Tensor (R, Q), Tensor (R, Q))
        A GRU's hidden state; an LSTM's hidden and cell.
    weights : list of Tensor
        Of an ``nn.GRU``'s or ``nn.LSTM``'s layer: (·Q, P), (·Q, Q), and their biases.
    alike : (Tensor (R,) or None, Tensor (R,) or None)
        Rows of ``rows``, and of the hidden state, with the same number are equal.
    """
    if torch.is_grad_enabled() or rows.device.type != "cpu":
        return torch.lstm_cell(rows, state, *weights) if len(state) == 2 else (torch.gru_cell(rows, *state, *weights),)
    hidden = state[0]
    entering = shared_linear(rows, weights[0], weights[2], alike[0])  # (R, 4Q or 3Q)
    before = shared_linear(hidden, weights[1], weights[3], alike[1])
    if len(state) == 2:
        take, keep, new, show = (entering + before).chunk(4, 1)
        cell = keep.sigmoid() * state[1] + take.sigmoid() * new.tanh()
        return show.sigmoid() * cell.tanh(), cell
    reset, keep, new = entering.chunk(3, 1)
    was_reset, was_keep, was_new = before.chunk(3, 1)
    keep = (keep + was_keep).sigmoid()
    new = (new + (reset + was_reset).sigmoid() * was_new).tanh()
    return (new + keep * (hidden - new),)
