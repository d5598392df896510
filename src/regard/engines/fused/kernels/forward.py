"""The forward pass over tiles, for any family of scores: the softmax is online.

The state of a block of rows is, for each row, its maximum so far, the sum of its weights relative to that, what its
entropy needs, and its largest score.
"""

from __future__ import annotations

import math

from numba import njit

from regard.engines.fused.kernels.arguments import BLOCK, CHUNK, GROUP, ROW, F
from regard.engines.fused.kernels.basics import FAST, address, at, exp, fill, log, maximum, number
from regard.engines.fused.kernels.linear import contract, product
from regard.engines.fused.kernels.tiles import kv_head, pack_lanes, padded, segment, tiles_in


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
def read(a, x, rows4, j0, j1, p, v, o):
    """Add the values of a tile, weighted, to four rows of output."""
    V = a[F.V]
    if a[F.value_lanes] == 0:  # few values: keys are the lanes
        for c in range(V):
            contract(at(o, rows4 * CHUNK + c), CHUNK, at(p, j0), at(v, c * ROW + j0), padded(j1 - j0))
        return
    for c in range(0, V, CHUNK):
        lanes = padded(min(CHUNK, V - c))
        y, values = at(o, (c // CHUNK * BLOCK + rows4) * CHUNK), at(v, c // CHUNK * ROW * CHUNK)
        product(y, CHUNK, at(values, j0 * CHUNK), CHUNK, at(p, j0), ROW, 1, j1 - j0, lanes)


@njit(**FAST)
def pack_values(a, x, kv, t0, n, v):
    """Pack the values of a tile: keys are the lanes where values are few, else values."""
    S, V = a[F.S], a[F.V]
    source = at(address(a[F.value], x), (kv * S + t0) * V)
    if a[F.value_lanes] == 0:
        for c in range(V):
            row = at(v, c * ROW)
            for j in range(n):
                row[j] = source[j * V + c]
            fill(at(row, n), padded(n) - n, number(0.0, x))
        return
    pack_lanes(source, V, n, V, v, ROW)
    for c in range(0, V, CHUNK):  # weights beyond the last key are zeros, but zero times garbage need not be
        fill(at(v, (c // CHUNK * ROW + n) * CHUNK), (-n % 4) * CHUNK, number(0.0, x))


@njit(**FAST)
def tile_weights(a, x, r0, r1, g, t0, j0, j1, head, s, p, state, o):
    """Turn scores into weights relative to each row's maximum so far, and bring the row's state up to date.

    Weights that come directly stay where they are.
    """
    L, K, V = a[F.L], a[F.K], a[F.V]
    m, totals, e, top = state, at(state, BLOCK), at(state, 2 * BLOCK), at(state, 3 * BLOCK)
    zero, minus = number(0.0, x), -number(math.inf, x)
    seen = False
    for i in range(GROUP):
        row = g * GROUP + i
        si, pi = at(s, i * ROW), at(p, i * ROW)
        if a[F.direct] != 0 and a[F.top] == 0 and a[F.entropy] == 0 and K == 0:
            total = sum_of(si, j0, j1)
            totals[row] += total
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
            totals[row] += sum_of(si, j0, j1)
            seen = seen or peak > zero
            if a[F.entropy] != 0:
                e[row] += direct_logs(si, j0, j1)
            fill(at(si, j1), padded(j1 - j0) - (j1 - j0), zero)
        else:
            if peak > m[row]:
                factor = exp(m[row] - peak)
                e[row] = factor * (e[row] + totals[row] * (m[row] - peak)) if totals[row] > zero else zero
                totals[row] *= factor
                if m[row] > minus:
                    for c in range(0, V, CHUNK):
                        y = at(o, (c // CHUNK * BLOCK + row) * CHUNK)
                        for v in range(min(CHUNK, V - c)):
                            y[v] *= factor
                m[row] = peak
            if m[row] > minus:
                totals[row] += exponentials(si, pi, j0, j1, m[row])
                seen = True
                if a[F.entropy] != 0:
                    e[row] += weighted_logs(si, pi, j0, j1, m[row])
            else:  # nothing is visible, or what is visible is no number
                fill(at(pi, j0), j1 - j0, zero)
                for j in range(j0, j1):
                    totals[row] = si[j] if si[j] != si[j] else totals[row]
            fill(at(pi, j1), padded(j1 - j0) - (j1 - j0), zero)
    return seen


@njit(**FAST)
def finish(a, x, head, r0, r1, state, o):
    """Write the output and the statistics of a block."""
    L, V = a[F.L], a[F.V]
    zero, one = number(0.0, x), number(1.0, x)
    totals = at(state, BLOCK)
    for row in range(r1 - r0):
        place = head * L + r0 + row
        share = one / totals[row] if totals[row] > zero or totals[row] != totals[row] else zero
        out = at(address(a[F.output], x), place * V)
        for c in range(0, V, CHUNK):
            y = at(o, (c // CHUNK * BLOCK + row) * CHUNK)
            for v in range(min(CHUNK, V - c)):
                out[c + v] = y[v] * share
        address(a[F.peak], x)[place] = state[row]
        address(a[F.total], x)[place] = totals[row]
        if a[F.top] != 0:
            address(a[F.top], x)[place] = state[3 * BLOCK + row]
        if a[F.entropy] != 0:
            address(a[F.entropy], x)[place] = state[2 * BLOCK + row]


def forward_pass(pack, tile_scores):
    """Return the forward kernel of a family."""

    @njit(**FAST)
    def received(a, x, head, r0, r1, k, s, state):
        """Add the finished weights of a block to what each key received, in a second sweep."""
        S, tile = a[F.S], a[F.tile]
        m, totals = state, at(state, BLOCK)
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
                        if j1 > j0 and totals[row] > zero:
                            si, share = at(s, i * ROW), one / totals[row]
                            for j in range(j0, j1):
                                weight = si[j] if a[F.direct] != 0 else exp(si[j] - m[row])
                                target[t0 + j] += weight * share

    def forward(a, x):
        scratch = address(a[F.scratch], x)
        k, v, s, p = (
            at(scratch, a[F.at_key]),
            at(scratch, a[F.at_value]),
            at(scratch, a[F.at_score]),
            at(scratch, a[F.at_weight]),
        )
        state, o = at(scratch, a[F.at_state]), at(scratch, a[F.at_output])
        L, tile = a[F.L], a[F.tile]
        zero, minus = number(0.0, x), -number(math.inf, x)
        blocks = 1 if a[F.segment_count] != 0 else (L + BLOCK - 1) // BLOCK
        chunks = (a[F.V] + CHUNK - 1) // CHUNK
        for item in range(a[F.first], a[F.last]):
            head, block = item // blocks, a[F.block] + item % blocks
            r0 = block * BLOCK
            r1 = min(L, r0 + BLOCK)
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

    return forward
