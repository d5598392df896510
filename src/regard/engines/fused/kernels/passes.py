"""The forward and the backward pass over tiles, for any family of scores.

A family gives three functions: ``pack`` brings a tile of keys into scratch memory, if a block of rows can be in reach
of it, ``compare`` writes the scores of
four queries and these keys (or, where ``direct``, their weights), ``pull`` takes the gradient of scores back to rows.

Work items are blocks of queries of one head. For a block, tiles of keys pass by; the softmax is online.
"""

from __future__ import annotations

import math

from numba import njit

from regard.engines.fused.kernels.basics import FAST, add_rows, address, at, byte_address, exp, fill, log, maximum, number
from regard.engines.fused.kernels.basics import pack_rows
from regard.engines.fused.kernels.fields import BLOCK, CHUNK, GROUP, PAD, TILE, F
from regard.engines.fused.kernels.linear import contract, contract_lanes, update_keys, update_keys_by_one, update_lanes


@njit(**FAST)
def padded(count):
    """Return ``count`` rounded up to a whole number of vectors."""
    return (count + PAD - 1) // PAD * PAD


@njit(**FAST)
def tiles_in(start, stop, tile):
    """Return how many tiles a range of keys has; a range with a step that is not constant could raise."""
    return (stop - start + tile - 1) // tile


@njit(**FAST)
def kv_head(a, head):
    """Return the flat key head of a flat query head."""
    H, G = a[F.H], a[F.G]
    return head // H * G + head % H // (H // G)


@njit(**FAST)
def bounds(a, head, first, last):
    """Return the keys that any of the rows ``first`` to ``last`` (inclusive) may see: start and stop."""
    if a[F.start] == 0:
        return 0, a[F.S]
    lo, hi = address(a[F.start], a), address(a[F.stop], a)
    base = head // a[F.H] * a[F.interval_b] + head % a[F.H] * a[F.interval_h]
    step = a[F.interval_r]
    start, stop = a[F.S], 0
    for row in range(first, last + 1):
        if lo[base + row * step] < hi[base + row * step]:
            start = min(start, lo[base + row * step])
            stop = max(stop, hi[base + row * step])
    return start, max(start, stop)


@njit(**FAST)
def hide(a, x, head, row, t0, j0, j1, s, added_col, hidden):
    """Replace the score of every pair of a row that may not meet by ``hidden``, and add the bias to the others.

    The tile's keys begin at ``t0``; scores ``j0 ≤ j < j1`` of it are meant.
    """
    if a[F.start] != 0:
        base = head // a[F.H] * a[F.interval_b] + head % a[F.H] * a[F.interval_h] + row * a[F.interval_r]
        lo, hi = address(a[F.start], a)[base] - t0, address(a[F.stop], a)[base] - t0
        for j in range(j0, min(j1, lo)):
            s[j] = hidden
        for j in range(max(j0, hi), j1):
            s[j] = hidden
    if a[F.has_added] != 0 and added_col >= 0:
        b, h = head // a[F.H], head % a[F.H]
        offset = b * a[F.added_b] + h * a[F.added_h] + row * a[F.added_r] + added_col
        added = at(address(a[F.added], x), offset)
        masked = -number(math.inf, x)
        for j in range(j0, j1):
            s[j] = hidden if added[j] == masked else s[j] + added[j]


@njit(**FAST)
def keep_best(s, j0, j1, t0, best, keys, K):
    """Merge the scores of a row into its K best so far, sorted from the largest down."""
    for j in range(j0, j1):
        if s[j] > best[K - 1]:
            i = K - 1
            while i > 0 and best[i - 1] < s[j]:
                best[i] = best[i - 1]
                keys[i] = keys[i - 1]
                i -= 1
            best[i] = s[j]
            keys[i] = t0 + j


@njit(**FAST)
def row_max(s, j0, j1):
    """Return the largest of a row's scores."""
    peak = -number(math.inf, s)
    for j in range(j0, j1):
        peak = maximum(peak, s[j])
    return peak


@njit(**FAST)
def exponentials(s, p, j0, j1, peak):
    """Write ``exp(s − peak)`` and return the sum."""
    total = number(0.0, s)
    for j in range(j0, j1):
        e = exp(s[j] - peak)
        p[j] = e
        total += e
    return total


@njit(**FAST)
def weighted_logs(s, p, j0, j1, peak):
    """Return ``Σ p (s − peak)``, what is hidden left out."""
    total = number(0.0, s)
    zero = number(0.0, s)
    for j in range(j0, j1):
        total += p[j] * (s[j] - peak) if p[j] > zero else zero
    return total


@njit(**FAST)
def direct_logs(p, j0, j1):
    """Return ``Σ p log p``."""
    total = number(0.0, p)
    zero, one = number(0.0, p), number(1.0, p)
    for j in range(j0, j1):
        positive = p[j] > zero
        q = p[j] if positive else one
        total += q * log(q)
    return total


@njit(**FAST)
def sum_of(p, j0, j1):
    """Return the sum of a row."""
    total = number(0.0, p)
    for j in range(j0, j1):
        total += p[j]
    return total


@njit(**FAST)
def segment(a, head, r0, r1, index):
    """Return start, stop and column of ``added`` of one range of keys of a block."""
    if a[F.segment_count] == 0:
        start, stop = bounds(a, head, r0, r1 - 1)
        return start, stop, start if a[F.has_added] != 0 else -1
    segments = at(address(a[F.segments], a), 3 * index)
    return segments[0], segments[1], segments[2]


@njit(**FAST)
def group_range(a, head, first, last, t0, n):
    """Return which keys of a tile a group of rows may see; the first is at the start of a vector."""
    start, stop = bounds(a, head, first, last)
    j0, j1 = max(start - t0, 0) // PAD * PAD, min(stop - t0, n)
    return j0, j1


@njit(**FAST)
def read(a, x, rows4, j0, j1, p, v, o):
    """Add the values of a tile, weighted, to four rows of output."""
    V = a[F.V]
    if a[F.value_lanes] == 0:  # few values: keys are the lanes
        for c in range(V):
            contract(at(o, rows4 * CHUNK + c), CHUNK, at(p, j0), at(v, c * TILE + j0), padded(j1 - j0))
        return
    for c in range(0, V, CHUNK):
        lanes = padded(min(CHUNK, V - c))
        y, values = at(o, (c // CHUNK * BLOCK + rows4) * CHUNK), at(v, c // CHUNK * TILE * CHUNK)
        partial = at(address(a[F.scratch], x), a[F.at_partial])
        contract_lanes(y, at(values, j0 * CHUNK), at(p, j0), (j1 - j0 + 3) // 4, lanes, partial)


@njit(**FAST)
def pack_values(a, x, kv, t0, n, v):
    """Pack the values of a tile: keys are the lanes where values are few, else values."""
    S, V = a[F.S], a[F.V]
    source = at(address(a[F.value], x), (kv * S + t0) * V)
    if a[F.value_lanes] == 0:
        for c in range(V):
            row = at(v, c * TILE)
            for j in range(n):
                row[j] = source[j * V + c]
            fill(at(row, n), padded(n) - n, number(0.0, x))
        return
    pack_lanes(source, V, n, V, v, TILE)
    for c in range(0, V, CHUNK):  # weights beyond the last key are zeros, but zero times garbage need not be
        fill(at(v, (c // CHUNK * TILE + n) * CHUNK), (-n % 4) * CHUNK, number(0.0, x))


@njit(**FAST)
def pack_lanes(source, source_row, rows, width, target, height):
    """Pack rows as chunks of lanes: chunk by chunk, ``height`` rows each."""
    for c in range(0, width, CHUNK):
        lanes = min(CHUNK, width - c)
        pack_rows(at(source, c), source_row, rows, lanes, at(target, c // CHUNK * height * CHUNK), CHUNK, padded(lanes))


@njit(**FAST)
def add_lanes(source, height, rows, width, target, target_row):
    """Add chunks of lanes to an array of whole rows."""
    for c in range(0, width, CHUNK):
        lanes = min(CHUNK, width - c)
        add_rows(at(source, c // CHUNK * height * CHUNK), CHUNK, rows, lanes, at(target, c), target_row)


def forward_pass(pack, compare):
    """Return the forward kernel of a family."""

    @njit(**FAST)
    def tile_scores(a, x, head, r0, r1, g, t0, n, added_col, k, s):
        """Write the scores of a group of rows; return the range of keys they are of, empty if none is in reach."""
        row, last = r0 + g * GROUP, r1 - 1
        j0, j1 = group_range(a, head, row, min(row + GROUP - 1, last), t0, n)
        if j1 <= j0:
            return 0, 0
        if not compare(a, x, head, row, last, t0, j0, padded(j1 - j0), k, s):
            return 0, 0
        hidden = number(0.0, x) if a[F.direct] != 0 else -number(math.inf, x)
        if a[F.start] != 0 or a[F.has_added] != 0:
            for i in range(GROUP):
                hide(a, x, head, min(row + i, last), t0, j0, j1, at(s, i * TILE), added_col, hidden)
        return j0, j1

    @njit(**FAST)
    def tile_weights(a, x, r0, r1, g, t0, j0, j1, head, s, p, state, o):
        """Turn scores into weights relative to each row's maximum so far, and bring the row's state up to date.

        Weights that come directly stay where they are.
        """
        L, K, V = a[F.L], a[F.K], a[F.V]
        m, l, e, top = state, at(state, BLOCK), at(state, 2 * BLOCK), at(state, 3 * BLOCK)
        zero, minus = number(0.0, x), -number(math.inf, x)
        seen = False
        for i in range(GROUP):
            row = g * GROUP + i
            si, pi = at(s, i * TILE), at(p, i * TILE)
            if a[F.direct] != 0 and a[F.top] == 0 and a[F.entropy] == 0 and K == 0:
                total = sum_of(si, j0, j1)
                l[row] += total
                seen = seen or total > zero
                fill(at(si, j1), padded(j1 - j0) - (j1 - j0), zero)
                continue
            peak = row_max(si, j0, j1)
            if r0 + row < r1 and K > 0:
                place = (head * L + r0 + row) * K
                best, keys = at(address(a[F.best], x), place), at(address(a[F.best_key], a), place)
                floor = zero if a[F.direct] != 0 else minus
                if peak > floor and peak > best[K - 1]:
                    keep_best(si, j0, j1, t0, best, keys, K)
            top[row] = peak if peak > top[row] else top[row]
            if a[F.direct] != 0:
                l[row] += sum_of(si, j0, j1)
                seen = seen or peak > zero
                if a[F.entropy] != 0:
                    e[row] += direct_logs(si, j0, j1)
                fill(at(si, j1), padded(j1 - j0) - (j1 - j0), zero)
            else:
                if peak > m[row]:
                    factor = exp(m[row] - peak)
                    e[row] = factor * (e[row] + l[row] * (m[row] - peak)) if l[row] > zero else zero
                    l[row] *= factor
                    if m[row] > minus:
                        for c in range(0, V, CHUNK):
                            y = at(o, (c // CHUNK * BLOCK + row) * CHUNK)
                            for v in range(min(CHUNK, V - c)):
                                y[v] *= factor
                    m[row] = peak
                if m[row] > minus:
                    l[row] += exponentials(si, pi, j0, j1, m[row])
                    seen = True
                    if a[F.entropy] != 0:
                        e[row] += weighted_logs(si, pi, j0, j1, m[row])
                else:  # nothing is visible, or what is visible is no number
                    fill(at(pi, j0), j1 - j0, zero)
                    for j in range(j0, j1):
                        l[row] = si[j] if si[j] != si[j] else l[row]
                fill(at(pi, j1), padded(j1 - j0) - (j1 - j0), zero)
        return seen

    @njit(**FAST)
    def received(a, x, head, r0, r1, k, s, state):
        """Add the finished weights of a block to what each key received, in a second sweep."""
        S, tile = a[F.S], a[F.tile]
        m, l = state, at(state, BLOCK)
        zero, one = number(0.0, x), number(1.0, x)
        target = at(address(a[F.received], x), (head - a[F.head_first]) * S)
        for index in range(max(a[F.segment_count], 1)):
            start, stop, col = segment(a, head, r0, r1, index)
            for tile_index in range(tiles_in(start, stop, tile)):
                t0 = start + tile_index * tile
                n = min(tile, stop - t0)
                if not pack(a, x, head, kv_head(a, head), r0, r1, t0, n, k):
                    continue
                for g in range((r1 - r0 + GROUP - 1) // GROUP):
                    j0, j1 = tile_scores(a, x, head, r0, r1, g, t0, n, col + t0 - start if col >= 0 else -1, k, s)
                    for i in range(min(GROUP, r1 - r0 - g * GROUP)):
                        row = g * GROUP + i
                        if j1 > j0 and l[row] > zero:
                            si, share = at(s, i * TILE), one / l[row]
                            for j in range(j0, j1):
                                weight = si[j] if a[F.direct] != 0 else exp(si[j] - m[row])
                                target[t0 + j] += weight * share

    @njit(**FAST)
    def finish(a, x, head, r0, r1, state, o):
        """Write the output and the statistics of a block."""
        L, V = a[F.L], a[F.V]
        zero, one = number(0.0, x), number(1.0, x)
        l = at(state, BLOCK)
        for row in range(r1 - r0):
            place = head * L + r0 + row
            share = one / l[row] if l[row] > zero or l[row] != l[row] else zero
            out = at(address(a[F.output], x), place * V)
            for c in range(0, V, CHUNK):
                y = at(o, (c // CHUNK * BLOCK + row) * CHUNK)
                for v in range(min(CHUNK, V - c)):
                    out[c + v] = y[v] * share
            address(a[F.peak], x)[place] = state[row]
            address(a[F.total], x)[place] = l[row]
            if a[F.top] != 0:
                address(a[F.top], x)[place] = state[3 * BLOCK + row]
            if a[F.entropy] != 0:
                address(a[F.entropy], x)[place] = state[2 * BLOCK + row]

    def forward(a, x):
        scratch = address(a[F.scratch], x)
        k, v, s, p = at(scratch, a[F.at_key]), at(scratch, a[F.at_value]), at(scratch, a[F.at_score]), at(scratch, a[F.at_weight])
        state, o = at(scratch, a[F.at_state]), at(scratch, a[F.at_output])
        L, tile, rows = a[F.L], a[F.tile], a[F.rows]
        zero, minus = number(0.0, x), -number(math.inf, x)
        blocks = 1 if a[F.segment_count] != 0 else (L + rows - 1) // rows
        chunks = (a[F.V] + CHUNK - 1) // CHUNK
        for item in range(a[F.first], a[F.last]):
            head, block = item // blocks, a[F.block] + item % blocks
            r0 = block * rows
            r1 = min(L, r0 + rows)
            fill(state, BLOCK, zero if a[F.direct] != 0 else minus)
            fill(at(state, BLOCK), 2 * BLOCK, zero)
            fill(at(state, 3 * BLOCK), BLOCK, zero if a[F.direct] != 0 else minus)
            fill(o, chunks * BLOCK * CHUNK, zero)
            for index in range(max(a[F.segment_count], 1)):
                start, stop, col = segment(a, head, r0, r1, index)
                for tile_index in range(tiles_in(start, stop, tile)):
                    t0 = start + tile_index * tile
                    n = min(tile, stop - t0)
                    kv = kv_head(a, head)
                    if not pack(a, x, head, kv, r0, r1, t0, n, k):
                        continue
                    packed = False
                    for g in range((r1 - r0 + GROUP - 1) // GROUP):
                        j0, j1 = tile_scores(a, x, head, r0, r1, g, t0, n, col + t0 - start if col >= 0 else -1, k, s)
                        if j1 <= j0 or not tile_weights(a, x, r0, r1, g, t0, j0, j1, head, s, p, state, o):
                            continue
                        if not packed:
                            pack_values(a, x, kv, t0, n, v)
                            packed = True
                        read(a, x, g * GROUP, j0, j1, s if a[F.direct] != 0 else p, v, o)
            finish(a, x, head, r0, r1, state, o)
            if a[F.received] != 0:
                received(a, x, head, r0, r1, k, s, state)

    return forward, tile_scores


def backward_pass(pack, tile_scores, pull, linear):
    """Return the backward kernel of a family; ``linear`` where the score is a dot product, whose pull is known."""

    @njit(**FAST)
    def row_weights(a, x, head, row, j0, j1, s, p, alive):
        """Write the weights of one row; none where it does not exist."""
        zero, one = number(0.0, x), number(1.0, x)
        place = head * a[F.L] + row
        m, l = address(a[F.peak], x)[place], address(a[F.total], x)[place]
        if not alive or l == zero:
            fill(at(p, j0), padded(j1 - j0), zero)
            return
        share = one / l
        if a[F.direct] != 0:
            for j in range(j0, j1):
                p[j] = s[j] * share
        else:
            for j in range(j0, j1):
                p[j] = exp(s[j] - m) * share
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
    def score_gradients(a, x, head, row, last, t0, j0, j1, p, dp, col):
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

    def backward(a, x):
        scratch = address(a[F.scratch], x)
        k, v, s, p = at(scratch, a[F.at_key]), at(scratch, a[F.at_value]), at(scratch, a[F.at_score]), at(scratch, a[F.at_weight])
        grads, dv = at(scratch, a[F.at_state]), at(scratch, a[F.at_output])
        rows_, dk, dp, dq = at(scratch, a[F.at_rows]), at(scratch, a[F.at_d_key]), at(scratch, a[F.at_d_score]), at(scratch, a[F.at_d_query])
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
                            row_weights(a, x, head, min(row + i, r1 - 1), j0, j1, at(s, i * TILE), at(p, i * TILE), alive)
                        weight_gradients(a, x, head * L + row, step, j0, lanes, v, dp)
                        if step == 0:
                            for i in range(1, r1 - row):
                                one_row_gradient(a, x, head * L + row + i, j0, lanes, v, at(dp, i * TILE))
                        score_gradients(a, x, head, row, r1 - 1, t0, j0, j1, p, dp, added_col)
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

    return backward
