"""Scores of the distance ‖(q − k) / width‖: Gaussian, boxcar, triangular, Epanechikov, in few dimensions."""

from __future__ import annotations

import math

from numba import njit

from regard.engines.fused.kernels._kernel import kernel
from regard.engines.fused.kernels.basics import FAST, address, at, log, number, pack_rows
from regard.engines.fused.kernels.fields import GROUP, TILE, F
from regard.engines.fused.kernels.passes import backward_pass, forward_pass, padded

GAUSSIAN, BOXCAR, TRIANGULAR, EPANECHIKOV = 0, 1, 2, 3


@njit(**FAST)
def pack(a, x, kv, t0, n, k):
    """Pack the features of a tile of keys, keys as lanes, and the box around them."""
    C, S = a[F.C], a[F.S]
    pack_rows(at(address(a[F.key], x), kv * C * S + t0), S, C, n, k, TILE, padded(n))
    if a[F.kind] == GAUSSIAN:
        return
    low, high = at(k, C * TILE), at(k, C * TILE + C)
    for c in range(C):
        row = at(k, c * TILE)
        least, most = number(math.inf, x), -number(math.inf, x)
        for j in range(n):
            least = row[j] if row[j] < least else least
            most = row[j] if row[j] > most else most
        low[c], high[c] = least, most


@njit(**FAST)
def in_reach(C, rows, row, count, low, high, inverse):
    """Whether the box around some rows comes within one width of the box around the keys."""
    zero = number(0.0, low)
    square = zero
    for c in range(C):
        least, most = rows[c], rows[c]
        for i in range(1, count):
            least, most = min(least, rows[i * row + c]), max(most, rows[i * row + c])
        gap = max(max(low[c] - most, least - high[c]), zero) * inverse[c]
        square += gap * gap
    return square <= number(1.001, low)  # a little more than one, so that rounding excludes nothing


def _squares(count, first):
    @njit(**FAST)
    def squares(s, k, q, inverse, lanes):
        """Set s to (or add to it) the squared distance in a few features."""
        q0, i0, k0 = q[0], inverse[0], at(k, 0)
        q1, i1, k1 = (q[1], inverse[1], at(k, TILE)) if count > 1 else (q0, i0, k0)
        q2, i2, k2 = (q[2], inverse[2], at(k, 2 * TILE)) if count > 2 else (q0, i0, k0)
        for j in range(lanes):
            d = (q0 - k0[j]) * i0
            total = d * d
            if count > 1:
                d = (q1 - k1[j]) * i1
                total += d * d
            if count > 2:
                d = (q2 - k2[j]) * i2
                total += d * d
            s[j] = total if first else s[j] + total

    return squares


_first1, _first2, _first3 = (_squares(n, True) for n in (1, 2, 3))
_more1, _more2, _more3 = (_squares(n, False) for n in (1, 2, 3))


@njit(**FAST)
def square_distances(s, k, q, inverse, C, lanes):
    """Write the squared distances of one row and the keys of a tile, in units of the width."""
    if C >= 3:
        _first3(s, k, q, inverse, lanes)
    elif C == 2:
        _first2(s, k, q, inverse, lanes)
    elif C == 1:
        _first1(s, k, q, inverse, lanes)
    else:
        for j in range(lanes):
            s[j] = number(0.0, s)
    for c in range(3, C - 2, 3):
        _more3(s, at(k, c * TILE), at(q, c), at(inverse, c), lanes)
    rest = C - C % 3
    if C > 3 and C % 3 == 2:
        _more2(s, at(k, rest * TILE), at(q, rest), at(inverse, rest), lanes)
    elif C > 3 and C % 3 == 1:
        _more1(s, at(k, rest * TILE), at(q, rest), at(inverse, rest), lanes)


@njit(**FAST)
def kernel_weights(s, kind, lanes):
    """Replace squared distances by kernel weights, 0 beyond reach."""
    zero, one = number(0.0, s), number(1.0, s)
    if kind == BOXCAR:
        for j in range(lanes):
            s[j] = one if s[j] <= one else zero
    elif kind == TRIANGULAR:
        for j in range(lanes):
            s[j] = one - math.sqrt(s[j]) if s[j] < one else zero
    else:
        for j in range(lanes):
            s[j] = one - s[j] if s[j] < one else zero


@njit(**FAST)
def compare(a, x, head, row, last, j0, lanes, k, s):
    """Write the scores of four rows, or their kernel weights; answer False where no key is in reach."""
    C, L, kind, scale = a[F.C], a[F.L], a[F.kind], x[0]
    inverse = at(address(a[F.weight], x), head % a[F.H] * a[F.weight_head])
    count = min(GROUP, last - row + 1)
    query = at(address(a[F.query], x), (head * L + row) * C)
    if kind != GAUSSIAN and not in_reach(C, query, C, count, at(k, C * TILE), at(k, C * TILE + C), inverse):
        return False
    half = number(-0.5, x) * scale
    zero, minus = number(0.0, x), -number(math.inf, x)
    for i in range(GROUP):
        si = at(s, i * TILE + j0)
        square_distances(si, at(k, j0), at(query, min(i, count - 1) * C), inverse, C, lanes)
        if kind == GAUSSIAN:
            for j in range(lanes):
                si[j] = half * si[j]
            continue
        squares = at(s, (GROUP + i) * TILE + j0)
        for j in range(lanes):
            squares[j] = si[j]
        kernel_weights(si, kind, lanes)
        if a[F.direct] == 0:
            for j in range(lanes):
                inside = si[j] > zero
                value = log(si[j] if inside else number(1.0, x))
                si[j] = scale * value if inside else minus
    return True


@njit(**FAST)
def slopes(kind, scale, squares, ds, lanes):
    """Replace d score by d squared distance."""
    zero, one, half = number(0.0, ds), number(1.0, ds), number(0.5, ds)
    if kind == GAUSSIAN:
        for j in range(lanes):
            ds[j] *= -half * scale
    elif kind == BOXCAR:
        for j in range(lanes):
            ds[j] = zero
    elif kind == TRIANGULAR:
        for j in range(lanes):
            moved = (squares[j] < one) & (squares[j] > zero)
            distance = math.sqrt(squares[j] if moved else half * half)
            ds[j] = -ds[j] * scale * half / (distance * (one - distance)) if moved else zero
    else:
        for j in range(lanes):
            inside = squares[j] < one
            ds[j] = -ds[j] * scale / (one - (squares[j] if inside else zero)) if inside else zero


@njit(**FAST)
def pull_feature(ds, k, q, inverse, dk, lanes):
    """Add one feature's share to the keys' gradient; return the query's, and the sum ``ds · ((q − k) / width)²``."""
    zero = number(0.0, ds)
    dq, dw = zero, zero
    for j in range(lanes):
        d = (q - k[j]) * inverse
        h = ds[j] * d
        dw += h * d
        dq += h
        dk[j] -= h
    return dq, dw


@njit(**FAST)
def pull(a, x, head, row, last, j0, lanes, k, s, ds, dq, dk, dw):
    """Take the gradient of four rows' scores to queries and keys, less a factor 2 / width, and to the width."""
    C, L = a[F.C], a[F.L]
    inverse = at(address(a[F.weight], x), head % a[F.H] * a[F.weight_head])
    query = at(address(a[F.query], x), (head * L + row) * C)
    for i in range(min(GROUP, last - row + 1)):
        dsi = at(ds, i * TILE + j0)
        slopes(a[F.kind], x[0], at(s, (GROUP + i) * TILE + j0), dsi, lanes)
        for c in range(C):
            place = c * TILE + j0
            dq_c, dw_c = pull_feature(dsi, at(k, place), query[i * C + c], inverse[c], at(dk, place), lanes)
            dq[i * C + c] += dq_c
            dw[c] += dw_c


_forward, _scores = forward_pass(pack, compare)
forward = kernel("int*", "real*")(_forward)
backward = kernel("int*", "real*")(backward_pass(pack, _scores, pull, False))
