"""Dot products: what torch's kernels know, under masks whose shape they do not."""

from __future__ import annotations

from numba import njit

from regard.engines.fused.kernels.arguments import GROUP, ROW, F, kernel
from regard.engines.fused.kernels.backward import backward_pass
from regard.engines.fused.kernels.basics import FAST, address, at, fill, number, pack_rows
from regard.engines.fused.kernels.forward import forward_pass
from regard.engines.fused.kernels.linear import product, product_of_one
from regard.engines.fused.kernels.tiles import padded, scores_of_tiles


@njit(**FAST)
def pack(a, x, head, kv, r0, r1, t0, n, k):
    """Pack the features of a tile of keys, keys as lanes."""
    C, S = a[F.C], a[F.S]
    pack_rows(at(address(a[F.key], x), kv * C * S + t0), S, C, n, k, ROW, padded(n))
    return True


@njit(**FAST)
def compare(a, x, head, row, last, t0, j0, lanes, k, s):
    """Write the dot products of four rows, scaled."""
    C, L, scale = a[F.C], a[F.L], x[0]
    for i in range(GROUP):
        fill(at(s, i * ROW + j0), lanes, number(0.0, x))
    count = min(GROUP, last - row + 1)
    source = at(address(a[F.query], x), (head * L + row) * C)
    query = at(address(a[F.scratch], x), a[F.at_query])
    for i in range(count * C):
        query[i] = scale * source[i]
    if count == GROUP:
        product(at(s, j0), ROW, at(k, j0), ROW, query, C, 1, C, lanes)
        return True
    for i in range(count):
        product_of_one(at(s, i * ROW + j0), ROW, at(k, j0), ROW, at(query, i * C), C, 1, C, lanes)
    return True


_scores = scores_of_tiles(compare)
forward = kernel("int*", "real*")(forward_pass(pack, _scores))
backward = kernel("int*", "real*")(backward_pass(pack, _scores, None))
