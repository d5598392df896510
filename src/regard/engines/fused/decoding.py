"""The kernels of a step of decoding, as functions of tensors.

Dimensions: R queries, Q rows of a table, T rows that one names, H and G heads of queries and of keys, D their width; N
numbers of a row, C runs of them.
"""

from __future__ import annotations

from array import array

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

    pool.shared(part, R, R * 2 * H * D * T // _WORTH)
    return out


def log_sums(x: Tensor, run: int, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return log Σ exp of rows (R, N), and the maxima (R, C) of runs of so many numbers; the last may be shorter.

    ``hidden`` (·,) of int64 names numbers of each row that count for the sums alone: they are then set to −inf, in
    place if ``x`` is contiguous in its rows, and the maxima are those of what is left.

    Examples
    --------
    >>> total, maxima = log_sums(torch.tensor([[0.0, 0.0, 0.0]]), 2)
    >>> total.exp(), maxima
    (tensor([3.]), tensor([[0., 0.]]))
    """
    R, N = x.shape
    if library.problem() is not None:
        total = x.logsumexp(1)
        if hidden is not None:
            x.index_fill_(1, hidden, -torch.inf)
        return total, pad(x, (0, -N % run), value=-torch.inf).unflatten(1, (-1, run)).amax(2)
    x = x if x.stride(1) == 1 else x.contiguous()
    total, maxima = x.new_empty(R), x.new_empty(R, -(-N // run))
    function = library.load("decoding.log_sums", x.dtype)
    places = (0, 0) if hidden is None else (hidden.data_ptr(), len(hidden))

    def part(first: int, last: int) -> None:
        function(x.data_ptr(), x.stride(0), first, last, N, run, *places, total.data_ptr(), maxima.data_ptr())

    pool.shared(part, R, R * N // _WORTH)
    return total, maxima


def largest_sums(
    x: Tensor, offset: Tensor, maxima: Tensor, run: int, count: int, mark: int
) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Return the largest sums (B, count) of a row's offset and one of its numbers, and which row and number these are.

    The largest comes first, and of equal ones that of the first row and number. An offset that is NaN is the first sum.
    Also returns whether all sums are finite, and none is that of number ``mark``.

    Parameters
    ----------
    x : Tensor (B, K, N)
        Contiguous, on the CPU, of float32 or float64; so are the others.
    offset : Tensor (B, K)
    maxima : Tensor (B, K, C)
        Those of runs of so many numbers.
    run : int
    count : int
        At most K · N.
    mark : int

    Examples
    --------
    >>> x, offset = torch.tensor([[[1.0, 5.0], [4.0, 3.0]]]), torch.tensor([[0.0, 2.0]])
    >>> largest_sums(x, offset, x.amax(-1, keepdim=True), 2, 3, 0)
    (tensor([[6., 5., 5.]]), tensor([[1, 0, 1]]), tensor([[0, 1, 1]]), False)
    """
    B, K, N = x.shape
    if library.problem() is not None:
        found, places = (offset[..., None] + x).flatten(1).topk(count)
        rows, numbers = places // N, places % N
        return found, rows, numbers, bool((found.isfinite() & (numbers != mark)).all())
    found, (rows, numbers) = x.new_empty(B, count), torch.empty(2, B, count, dtype=torch.int64)
    function = library.load("decoding.largest_sums", x.dtype)

    def part(first: int, last: int) -> None:
        function(
            x.data_ptr(), offset.data_ptr(), maxima.data_ptr(), first, last, K, N, run, count, found.data_ptr(),
            rows.data_ptr(), numbers.data_ptr(), mark, at,
        )  # fmt: skip

    marked = array("q", (0,))
    at = marked.buffer_info()[0]
    pool.shared(part, B, B * (K * N // run) // _WORTH)
    return found, rows, numbers, not marked[0]


def _read_in_torch(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, counts: Tensor, scale: float) -> Tensor:
    """Compute :func:`read_rows` without compiled kernels; ``rows`` (R, T) and ``counts`` (R,) are of each query."""
    key, value = (x[rows].transpose(1, 2) for x in (key, value))  # (R, G, T, D)
    visible = torch.arange(rows.shape[1]) < counts[:, None]
    return scaled_dot_product_attention(
        query.unsqueeze(2), key, value, visible[:, None, None], scale=scale, enable_gqa=True
    ).squeeze(2)
