"""The kernels of a step of decoding, as functions of tensors.

Dimensions: R queries, Q rows of a table, T rows that one names, H and G heads of queries and of keys, D their width; N
numbers of a row, C runs of them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from regard.engines.fused import library, pool

DTYPES = (torch.float32, torch.float64)
#: Numbers that the largest register holds.
_REGISTER = 16
#: Multiplications that are worth a thread.
_WORTH = 1 << 16


def read_rows(
    query: Tensor, key: Tensor, value: Tensor, which: Tensor, table: Tensor, counts: Tensor, scale: float
) -> Tensor:
    """Return softmax(scale · q kᵀ) v (R, H, D) of the rows of keys and values that a table names.

    Parameters
    ----------
    query : Tensor (R, H, D)
        On the CPU, of float32 or float64.
    key, value : Tensor (M, G, D)
        Of the same dtype, and equally laid out.
    which : Tensor (R,) of int64
        The row of the table that each query has.
    table : Tensor (Q, T) of int64
        The rows that are seen.
    counts : Tensor (Q,) of int64
        How many of them; those behind are any.
    scale : float

    Examples
    --------
    >>> rows = torch.tensor([[[1.0]], [[2.0]], [[4.0]]])
    >>> which, table, counts = torch.tensor([0, 1, 0]), torch.tensor([[0, 2], [1, 0]]), torch.tensor([2, 1])
    >>> read_rows(torch.zeros(3, 1, 1), rows, rows, which, table, counts, 1.0).flatten()
    tensor([2.5000, 2.0000, 2.5000])
    """
    (R, H, D), T = query.shape, table.shape[1]
    query, key, value = (x if x.stride()[1:] == (D, 1) else x.contiguous() for x in (query, key, value))
    if key.stride(0) != value.stride(0):
        key, value = key.contiguous(), value.contiguous()
    which, table, counts = which.contiguous(), table.contiguous(), counts.contiguous()
    if library.problem() is not None:
        return _read_in_torch(query, key, value, table[which], counts[which], scale)
    function, out = library.load("decoding.read_rows", query.dtype), query.new_empty(R, H, D)
    sizes = H, key.shape[1], D, scale, out.data_ptr(), H * D

    def part(first: int, last: int) -> None:
        scores = query.new_empty(H * (T + _REGISTER))
        function(
            query.data_ptr(), query.stride(0), key.data_ptr(), value.data_ptr(), key.stride(0), which.data_ptr(),
            table.data_ptr(), T, counts.data_ptr(), first, last, *sizes, scores.data_ptr(),
        )  # fmt: skip

    _shared(part, R, 2 * H * D * T)
    return out


def log_sums(x: Tensor, run: int) -> tuple[Tensor, Tensor]:
    """Return log Σ exp of rows (R, N), and the maxima (R, C) of runs of so many numbers; the last may be shorter.

    Examples
    --------
    >>> total, maxima = log_sums(torch.tensor([[0.0, 0.0, 0.0]]), 2)
    >>> total.exp(), maxima
    (tensor([3.]), tensor([[0., 0.]]))
    """
    R, N = x.shape
    if library.problem() is not None:
        runs = pad(x, (0, -N % run), value=-torch.inf).unflatten(1, (-1, run))
        return x.logsumexp(1), runs.amax(2)
    x = x if x.stride(1) == 1 else x.contiguous()
    total, maxima = x.new_empty(R), x.new_empty(R, -(-N // run))
    function = library.load("decoding.log_sums", x.dtype)

    def part(first: int, last: int) -> None:
        function(x.data_ptr(), x.stride(0), first, last, N, run, total.data_ptr(), maxima.data_ptr())

    _shared(part, R, N)
    return total, maxima


def _read_in_torch(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, counts: Tensor, scale: float) -> Tensor:
    """Compute :func:`read_rows` without compiled kernels; ``rows`` (R, T) and ``counts`` (R,) are of each query."""
    key, value = (x[rows].transpose(1, 2) for x in (key, value))  # (R, G, T, D)
    visible = torch.arange(rows.shape[1]) < counts[:, None]
    return scaled_dot_product_attention(
        query.unsqueeze(2), key, value, visible[:, None, None], scale=scale, enable_gqa=True
    ).squeeze(2)


def _shared(part: Callable[[int, int], None], count: int, each: int) -> None:
    """Let threads have parts of so many rows, where they are worth it."""
    threads = min(torch.get_num_threads(), count * each // _WORTH, count)
    if threads < 2:
        part(0, count)
        return
    cuts = pairwise([count * i // threads for i in range(threads + 1)])
    pool.run([lambda first=first, last=last: part(first, last) for first, last in cuts])
