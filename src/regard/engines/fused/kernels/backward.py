"""The backward pass over tiles, for any family of scores: weights are found again from what the forward pass kept."""

from __future__ import annotations

from numba import njit

from regard.engines.fused.kernels.basics import FAST, add_rows, address, at, exp, fill, number
from regard.engines.fused.kernels.fields import BLOCK, CHUNK, GROUP, TILE, F
from regard.engines.fused.kernels.linear import contract_lanes, update_keys, update_keys_by_one, update_lanes
from regard.engines.fused.kernels.tiles import add_lanes, kv_head, pack_lanes, padded, segment, tiles_in


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
def weight_gradients(a, x, place, step, j0, lanes, v, dp):
    """Write what the gradient of four rows of output is to their weights: ``grad · value``."""
    V = a[F.V]
    grad = at(address(a[F.grad], x), place * V)
    for i in range(GROUP):
        fill(at(dp, i * TILE + j0), lanes, number(0.0, x))
    whole = V // 4 * 4
    for c in range(0, whole, 4):
        update_keys(at(dp, j0), at(v, c * TILE + j0), at(grad, c), step * V, 1, lanes)
    for c in range(whole, V):
        update_keys_by_one(at(dp, j0), at(v, c * TILE + j0), at(grad, c), step * V, lanes)


@njit(**FAST)
def one_row_gradient(a, x, place, j0, lanes, v, dp):
    """Write ``grad · value`` of one row."""
    V = a[F.V]
    grad = at(address(a[F.grad], x), place * V)
    row = at(dp, j0)
    fill(row, lanes, number(0.0, x))
    for c in range(V):
        g, value = grad[c], at(v, c * TILE + j0)
        for j in range(lanes):
            row[j] += g * value[j]


@njit(**FAST)
def score_gradients(a, x, head, row, last, j0, j1, p, dp, col):
    """Replace d weight by d score in four rows, and hand it to the bias where it wants it."""
    zero = number(0.0, x)
    for i in range(GROUP):
        pi, di = at(p, i * TILE), at(dp, i * TILE)
        place = min(row + i, last)
        delta = address(a[F.delta], x)[head * a[F.L] + place]
        for j in range(j0, j1):
            di[j] = pi[j] * (di[j] - delta) if pi[j] != zero else zero
        fill(at(di, j1), padded(j1 - j0) - (j1 - j0), zero)
        if a[F.d_added] != 0 and col >= 0 and row + i <= last:
            b, h = head // a[F.H], head % a[F.H]
            offset = b * a[F.added_b] + h * a[F.added_h] + place * a[F.added_r] + col
            target = at(address(a[F.d_added], x), offset)
            for j in range(j0, j1):
                target[j] += di[j]


@njit(**FAST)
def pull_values(a, row, j0, j1, p, grads, dv):
    """Add four rows' weights times the gradients of their output to the values' gradient."""
    V = a[F.V]
    for c in range(0, V, CHUNK):
        lanes = padded(min(CHUNK, V - c))
        x = at(grads, (c // CHUNK * BLOCK + row) * CHUNK)
        y = at(dv, c // CHUNK * TILE * CHUNK)
        update_lanes(at(y, j0 * CHUNK), 4 * CHUNK, x, 0, at(p, j0), 1, TILE, 4, (j1 - j0 + 3) // 4, lanes)


@njit(**FAST)
def pull_rows(a, x, row, j0, j1, ds, keys, queries, dq, dk):
    """Take the gradient of four rows' dot products to queries and keys."""
    C = a[F.C]
    partial = at(address(a[F.scratch], x), a[F.at_partial])
    for c in range(0, C, CHUNK):
        lanes = padded(min(CHUNK, C - c))
        rows, tile = c // CHUNK * BLOCK * CHUNK + row * CHUNK, c // CHUNK * TILE * CHUNK
        steps, first = (j1 - j0 + 3) // 4, tile + j0 * CHUNK
        contract_lanes(at(dq, rows), at(keys, first), at(ds, j0), steps, lanes, partial)
        update_lanes(at(dk, first), 4 * CHUNK, at(queries, rows), 0, at(ds, j0), 1, TILE, 4, steps, lanes)


def backward_pass(pack, tile_scores, pull, linear):
    """Return the backward kernel of a family; ``linear`` where the score is a dot product, whose pull is known."""

    def backward(a, x):
        scratch = address(a[F.scratch], x)
        k, v, s, p = (
            at(scratch, a[F.at_key]),
            at(scratch, a[F.at_value]),
            at(scratch, a[F.at_score]),
            at(scratch, a[F.at_weight]),
        )
        grads, dv = at(scratch, a[F.at_state]), at(scratch, a[F.at_output])
        rows_, dk, dp, dq = (
            at(scratch, a[F.at_rows]),
            at(scratch, a[F.at_d_key]),
            at(scratch, a[F.at_d_score]),
            at(scratch, a[F.at_d_query]),
        )
        L, S, C, V, tile, rows = a[F.L], a[F.S], a[F.C], a[F.V], a[F.tile], a[F.rows]
        zero = number(0.0, x)
        blocks = 1 if a[F.segment_count] != 0 else (L + rows - 1) // rows
        v_chunks, c_chunks = (V + CHUNK - 1) // CHUNK, (C + CHUNK - 1) // CHUNK
        for item in range(a[F.first], a[F.last]):
            head, block = item // blocks, a[F.block] + item % blocks
            r0 = block * rows
            r1 = min(L, r0 + rows)
            kv = kv_head(a, head)
            mine = kv - a[F.kv_first]
            fill(grads, v_chunks * BLOCK * CHUNK, zero)
            pack_lanes(at(address(a[F.grad], x), (head * L + r0) * V), V, r1 - r0, V, grads, BLOCK)
            if linear:
                fill(rows_, c_chunks * BLOCK * CHUNK, zero)
                fill(dq, c_chunks * BLOCK * CHUNK, zero)
                pack_lanes(at(address(a[F.query], x), (head * L + r0) * C), C, r1 - r0, C, rows_, BLOCK)
            for index in range(max(a[F.segment_count], 1)):
                start, stop, col = segment(a, head, r0, r1, index)
                for tile_index in range(tiles_in(start, stop, tile)):
                    t0 = start + tile_index * tile
                    n = min(tile, stop - t0)
                    if not pack(a, x, head, kv, r0, r1, t0, n, k):
                        continue
                    keys = at(k, C * TILE)
                    used = False
                    for g in range((r1 - r0 + GROUP - 1) // GROUP):
                        row = r0 + g * GROUP
                        added_col = col + t0 - start if col >= 0 else -1
                        j0, j1 = tile_scores(a, x, head, r0, r1, g, t0, n, added_col, k, s)
                        if j1 <= j0:
                            continue
                        if not used:
                            used = True
                            height = padded(n)
                            source = at(address(a[F.value], x), (kv * S + t0) * V)
                            for c in range(V):
                                vc = at(v, c * TILE)
                                for j in range(n):
                                    vc[j] = source[j * V + c]
                                fill(at(vc, n), height - n, zero)
                            for c in range(0, V, CHUNK):
                                fill(at(dv, c // CHUNK * TILE * CHUNK), (n + 4) * CHUNK, zero)
                            if linear:
                                source = at(address(a[F.key_raw], x), (kv * S + t0) * C)
                                pack_lanes(source, C, n, C, keys, TILE)
                                for c in range(0, C, CHUNK):
                                    fill(at(keys, (c // CHUNK * TILE + n) * CHUNK), (-n % 4) * CHUNK, zero)
                                    fill(at(dk, c // CHUNK * TILE * CHUNK), (n + 4) * CHUNK, zero)
                            else:
                                for c in range(C):
                                    fill(at(dk, c * TILE), height, zero)
                        lanes = padded(j1 - j0)
                        step = 1 if row + GROUP <= r1 else 0
                        for i in range(GROUP):
                            alive = row + i < r1
                            row_weights(
                                a, x, head, min(row + i, r1 - 1), j0, j1, at(s, i * TILE), at(p, i * TILE), alive
                            )
                        weight_gradients(a, x, head * L + row, step, j0, lanes, v, dp)
                        if step == 0:
                            for i in range(1, r1 - row):
                                one_row_gradient(a, x, head * L + row + i, j0, lanes, v, at(dp, i * TILE))
                        score_gradients(a, x, head, row, r1 - 1, j0, j1, p, dp, added_col)
                        pull_values(a, g * GROUP, j0, j1, p, grads, dv)
                        if linear:
                            pull_rows(a, x, g * GROUP, j0, j1, dp, keys, rows_, dq, dk)
                        else:
                            d_query = at(address(a[F.d_query], x), (head * L + row) * C)
                            d_weight = at(address(a[F.d_weight], x), (head - a[F.head_first]) * 2 * C)
                            pull(a, x, head, row, r1 - 1, t0, j0, lanes, k, s, dp, d_query, dk, d_weight)
                    if not used:
                        continue
                    add_lanes(dv, TILE, n, V, at(address(a[F.d_value], x), (mine * S + t0) * V), V)
                    if linear:
                        add_lanes(dk, TILE, n, C, at(address(a[F.d_key], x), (mine * S + t0) * C), C)
                    else:
                        add_rows(dk, TILE, C, n, at(address(a[F.d_key], x), mine * C * S + t0), S)
            if linear:
                add_lanes(dq, BLOCK, r1 - r0, C, at(address(a[F.d_query], x), (head * L + r0) * C), C)

    return backward
