"""The backward pass over tiles, for any family of scores: weights are found again from what the forward pass kept."""

from __future__ import annotations

from numba import njit

from regard.engines.fused.kernels.arguments import BAND, BLOCK, CHUNK, GROUP, ROW, F
from regard.engines.fused.kernels.basics import FAST, add_rows, address, at, exp, fill, number, pack_rows
from regard.engines.fused.kernels.linear import product, product_of_one
from regard.engines.fused.kernels.tiles import (
    add_lanes,
    group_range,
    kv_head,
    pack_lanes,
    padded,
    segment,
    tiles_in,
    unpack_lanes,
)


@njit(**FAST)
def row_weights(a, x, head, row, j0, j1, s, p, alive):
    """Write the weights of one row; none where it does not exist."""
    zero, one = number(0.0, x), number(1.0, x)
    place = head * a[F.L] + row
    peak, total = address(a[F.peak], x)[place], address(a[F.total], x)[place]
    if not alive or total == zero:
        fill(at(p, j0), padded(j1 - j0), zero)
        return
    share = one / total
    if a[F.direct] != 0:
        for j in range(j0, j1):
            p[j] = s[j] * share
    else:
        for j in range(j0, j1):
            p[j] = exp(s[j] - peak) * share
    fill(at(p, j1), padded(j1 - j0) - (j1 - j0), zero)


@njit(**FAST)
def weight_gradients(a, x, place, count, j0, lanes, v, dp):
    """Write what the gradient of a group's output, ``count`` rows, is to their weights: ``grad · value``."""
    V = a[F.V]
    grad = at(address(a[F.grad], x), place * V)
    for i in range(GROUP):
        fill(at(dp, i * ROW + j0), lanes, number(0.0, x))
    if count == GROUP:
        product(at(dp, j0), ROW, at(v, j0), ROW, grad, V, 1, V, lanes)
        return
    for i in range(count):
        product_of_one(at(dp, i * ROW + j0), ROW, at(v, j0), ROW, at(grad, i * V), V, 1, V, lanes)


@njit(**FAST)
def score_gradients(a, x, head, row, last, j0, j1, p, dp, delta, col):
    """Replace d weight by d score in four rows, and hand it to the bias where it wants it; delta is by row."""
    zero = number(0.0, x)
    for i in range(GROUP):
        pi, di = at(p, i * ROW), at(dp, i * ROW)
        place = min(row + i, last)
        for j in range(j0, j1):
            di[j] = pi[j] * (di[j] - delta[i]) if pi[j] != zero else zero
        fill(at(di, j1), padded(j1 - j0) - (j1 - j0), zero)
        if a[F.d_added] != 0 and col >= 0 and row + i <= last:
            b, h = head // a[F.H], head % a[F.H]
            offset = a[F.added_at] + b * a[F.added_b] + h * a[F.added_h] + place * a[F.added_r] + col
            target = at(address(a[F.d_added], x), offset)
            for j in range(j0, j1):
                target[j] += di[j]


@njit(**FAST)
def clear_outside(rows, b0, b1, j0, j1):
    """Set four rows to zero in the range of a band that is not their own."""
    zero = number(0.0, rows)
    for i in range(GROUP):
        fill(at(rows, i * ROW + b0), j0 - b0, zero)
        fill(at(rows, i * ROW + j1), b1 - j1, zero)


@njit(**FAST)
def pull_band(width, row, count, b0, b1, factors, rows, gradient):
    """Add a band's factors, ``count`` rows of them for keys, times as many rows of a block to the keys' gradient."""
    for c in range(0, width, CHUNK):
        lanes = padded(min(CHUNK, width - c))
        x = at(rows, (c // CHUNK * BLOCK + row) * CHUNK)
        y = at(gradient, c // CHUNK * ROW * CHUNK)
        for j in range(b0, b1, GROUP):
            product(at(y, j * CHUNK), CHUNK, x, CHUNK, at(factors, j), 1, ROW, count, lanes)


@njit(**FAST)
def pull_queries(width, row, j0, j1, ds, keys, dq):
    """Add the gradient of four rows' dot products to queries."""
    for c in range(0, width, CHUNK):
        lanes = padded(min(CHUNK, width - c))
        y, x = at(dq, (c // CHUNK * BLOCK + row) * CHUNK), at(keys, (c // CHUNK * ROW + j0) * CHUNK)
        product(y, CHUNK, x, CHUNK, at(ds, j0), ROW, 1, j1 - j0, lanes)


def backward_pass(pack, tile_scores, pull):
    """Return the backward kernel of a family; ``pull`` is None where the score is a dot product."""
    linear = pull is None

    @njit(**FAST)
    def begin_block(a, x, head, r0, r1, delta, grads, rows, dq):
        """Pack what the keys' gradients are sums of: the gradients of a block's output, and its queries.

        ``delta`` is each row's ``grad · output``, the mean of what the gradient is to its weights.
        """
        V, C, zero = a[F.V], a[F.C], number(0.0, x)
        fill(delta, BLOCK, zero)
        for i in range(r1 - r0):
            place = (head * a[F.L] + r0 + i) * V
            grad, output = at(address(a[F.grad], x), place), at(address(a[F.output], x), place)
            for c in range(V):
                delta[i] += grad[c] * output[c]
        fill(grads, (V + CHUNK - 1) // CHUNK * BLOCK * CHUNK, zero)
        pack_lanes(at(address(a[F.grad], x), (head * a[F.L] + r0) * V), V, r1 - r0, V, grads, BLOCK)
        if linear:
            fill(rows, (C + CHUNK - 1) // CHUNK * BLOCK * CHUNK, zero)
            fill(dq, (C + CHUNK - 1) // CHUNK * BLOCK * CHUNK, zero)
            pack_lanes(at(address(a[F.query], x), (head * a[F.L] + r0) * C), C, r1 - r0, C, rows, BLOCK)

    @njit(**FAST)
    def begin_tile(a, x, kv, t0, n, v, keys, dk, dv):
        """Pack a tile's values, keys as lanes, and clear the gradients of its keys and values."""
        V, S, C, zero = a[F.V], a[F.S], a[F.C], number(0.0, x)
        height = padded(n)
        pack_rows(at(address(a[F.value_keys], x), kv * V * S + t0), S, V, n, v, ROW, height)
        for c in range(0, V, CHUNK):
            fill(at(dv, c // CHUNK * ROW * CHUNK), height * CHUNK, zero)
        if linear:
            pack_lanes(at(address(a[F.key_raw], x), (kv * S + t0) * C), C, n, C, keys, ROW)
            for c in range(0, C, CHUNK):
                fill(at(dk, c // CHUNK * ROW * CHUNK), height * CHUNK, zero)
        else:
            for c in range(C):
                fill(at(dk, c * ROW), height, zero)

    @njit(**FAST)
    def end_tile(a, x, mine, t0, n, dk, dv):
        """Add the gradients of a tile's keys and values to all keys' and values'."""
        V, S, C = a[F.V], a[F.S], a[F.C]
        add_lanes(dv, ROW, n, V, at(address(a[F.d_value], x), (mine * S + t0) * V), V)
        if linear:
            add_lanes(dk, ROW, n, C, at(address(a[F.d_key], x), (mine * S + t0) * C), C)
        else:
            add_rows(dk, ROW, C, n, at(address(a[F.d_key], x), mine * C * S + t0), S)

    @njit(**FAST)
    def group(a, x, head, r0, r1, g, t0, n, col, b0, b1, k, s, v, keys, p, ds, delta, dq, dk):
        """Write the weights of four rows and the gradients of their scores, and pull these back to queries."""
        j0, j1 = tile_scores(a, x, head, r0, r1, g, t0, n, col, k, s)
        if j1 <= j0:
            clear_outside(p, b0, b1, b1, b1)
            clear_outside(ds, b0, b1, b1, b1)
            return
        row, last = r0 + g * GROUP, r1 - 1
        lanes = padded(j1 - j0)
        for i in range(GROUP):
            row_weights(a, x, head, min(row + i, last), j0, j1, at(s, i * ROW), at(p, i * ROW), row + i <= last)
        weight_gradients(a, x, head * a[F.L] + row, min(GROUP, r1 - row), j0, lanes, v, ds)
        score_gradients(a, x, head, row, last, j0, j1, p, ds, at(delta, g * GROUP), col)
        clear_outside(p, b0, b1, j0, min(j0 + lanes, b1))
        if linear:
            clear_outside(ds, b0, b1, j0, min(j0 + lanes, b1))
            pull_queries(a[F.C], g * GROUP, j0, j1, ds, keys, dq)
        else:
            d_query = at(address(a[F.d_query], x), (head * a[F.L] + row) * a[F.C])
            d_weight = at(address(a[F.d_weight], x), (head - a[F.head_first]) * 2 * a[F.C])
            pull(a, x, head, row, last, t0, j0, lanes, k, s, ds, d_query, dk, d_weight)

    def backward(a, x):
        scratch = address(a[F.scratch], x)
        k, v, s, p = (
            at(scratch, a[F.at_key]),
            at(scratch, a[F.at_value]),
            at(scratch, a[F.at_score]),
            at(scratch, a[F.at_weight]),
        )
        grads, dv = at(scratch, a[F.at_state]), at(scratch, a[F.at_output])
        rows, dk, ds, dq = (
            at(scratch, a[F.at_rows]),
            at(scratch, a[F.at_d_key]),
            at(scratch, a[F.at_d_score]),
            at(scratch, a[F.at_d_query]),
        )
        delta = at(scratch, a[F.at_delta])
        L, C, V, tile = a[F.L], a[F.C], a[F.V], a[F.tile]
        keys = at(k, C * ROW)
        blocks = 1 if a[F.segment_count] != 0 else (L + BLOCK - 1) // BLOCK
        for item in range(a[F.first], a[F.last]):
            head, block = item // blocks, a[F.block] + item % blocks
            r0 = block * BLOCK
            r1 = min(L, r0 + BLOCK)
            kv = kv_head(a, head)
            begin_block(a, x, head, r0, r1, delta, grads, rows, dq)
            for index in range(max(a[F.segment_count], 1)):
                start, stop, col = segment(a, head, r0, r1, index)
                for tile_index in range(tiles_in(start, stop, tile)):
                    t0 = start + tile_index * tile
                    n = min(tile, stop - t0)
                    if not pack(a, x, head, kv, r0, r1, t0, n, k):
                        continue
                    begin_tile(a, x, kv, t0, n, v, keys, dk, dv)
                    tile_col = col + t0 - start if col >= 0 else -1
                    for first in range(0, r1 - r0, BAND):
                        count = min(BAND, (r1 - r0 - first + GROUP - 1) // GROUP * GROUP)
                        b0, b1 = group_range(a, head, r0 + first, min(r0 + first + count, r1) - 1, t0, n)
                        if b1 <= b0:
                            continue
                        b1 = b0 + padded(b1 - b0)
                        for i in range(0, count, GROUP):
                            g, pi, di = (first + i) // GROUP, at(p, i * ROW), at(ds, i * ROW)
                            group(a, x, head, r0, r1, g, t0, n, tile_col, b0, b1, k, s, v, keys, pi, di, delta, dq, dk)
                        pull_band(V, first, count, b0, b1, p, grads, dv)
                        if linear:
                            pull_band(C, first, count, b0, b1, ds, rows, dk)
                    end_tile(a, x, kv - a[F.kv_first], t0, n, dk, dv)
            if linear:
                unpack_lanes(dq, BLOCK, r1 - r0, C, at(address(a[F.d_query], x), (head * L + r0) * C), C)

    return backward
