"""Scores of the distance (q − k) / width, in few dimensions.

The Gaussian, boxcar, triangular and Epanechnikov's kernel are of the Euclidean distance, squared below; the Laplacian
is of the Manhattan distance.
"""

from __future__ import annotations

import math

from numba import njit

from regard.engines.fused.kernels.arguments import (
    BLOCK,
    BOXCAR,
    COMPACT,
    EPANECHNIKOV,
    GROUP,
    LAPLACIAN,
    ROW,
    TRIANGULAR,
    F,
    kernel,
)
from regard.engines.fused.kernels.backward import backward_pass
from regard.engines.fused.kernels.basics import FAST, address, at, fused_multiply_add, log_of_rest, number, pack_rows
from regard.engines.fused.kernels.forward import forward_pass
from regard.engines.fused.kernels.tiles import padded, scores_of_tiles

#: Features that are summed up before they are added to the rest.
FEATURES = 12
#: What ``_pairs`` writes where it is neither a compact kernel's weights nor, as for the Laplacian, absolute values.
SQUARES = -1


@njit(**FAST)
def pack(a, x, head, kv, r0, r1, t0, n, k):
    """Pack the features of a tile of keys, keys as lanes, and the box around them; not if it is out of reach."""
    C, S, L, tile, kind = a[F.C], a[F.S], a[F.L], a[F.tile], a[F.kind]
    if kind >= COMPACT:
        box = at(k, C * ROW)
        inverse = at(address(a[F.weight], x), head % a[F.H] * a[F.weight_head])
        if a[F.boxes] != 0:
            if t0 == 0:  # a block begins: the boxes around all of its rows, and around each group
                rows = at(address(a[F.query], x), (head * L + r0) * C)
                box_of(rows, C, 1, r1 - r0, C, at(box, 2 * C))
                for g in range((r1 - r0 + GROUP - 1) // GROUP):
                    count = min(GROUP, r1 - r0 - g * GROUP)
                    box_of(at(rows, g * GROUP * C), C, 1, count, C, at(box, (4 + 2 * g) * C))
            near = at(address(a[F.boxes], x), (kv * ((S + tile - 1) // tile) + t0 // tile) * 2 * C)
            for c in range(2 * C):
                box[c] = near[c]
            if not in_reach(C, at(box, 2 * C), box, inverse):
                return False
        else:
            box_of(at(address(a[F.key], x), kv * C * S + t0), 1, S, n, C, box)
    pack_rows(at(address(a[F.key], x), kv * C * S + t0), S, C, n, k, ROW, padded(n))
    return True


@njit(**FAST)
def box_of(points, step, feature_step, count, C, box):
    """Write the least and then the largest of each feature of some points; what is no number counts for nothing."""
    for c in range(C):
        least, most = number(math.inf, box), -number(math.inf, box)
        for i in range(count):
            value = points[i * step + c * feature_step]
            least = value if value < least else least
            most = value if value > most else most
        box[c], box[C + c] = least, most


@njit(**FAST)
def in_reach(C, one, other, inverse):
    """Whether two boxes come within one width of each other."""
    zero = number(0.0, one)
    square = zero
    for c in range(C):
        gap = max(max(other[c] - one[C + c], one[c] - other[C + c]), zero) * inverse[c]  # noqa: PLW3301
        square += gap * gap
    return square <= number(1.001, one)  # a little more than one, so that rounding excludes nothing


def _pairs(count, kind, first=True, near_rim=False):
    @njit(**FAST)
    def apart(q, k, inverse, rest):
        """Return (q − k) / width: as exactly as by division where a key near the rim makes the last digit count."""
        d = q - k
        return fused_multiply_add(d, inverse, d * rest) if near_rim else d * inverse

    @njit(**FAST)
    def pairs(s, k, q, inverse, rest, lanes):
        """Write a compact kernel's weights in up to three features, or write or add the distance in these."""
        q0, i0, r0, k0 = q[0], inverse[0], rest[0], at(k, 0)
        q1, i1, r1, k1 = (q[1], inverse[1], rest[1], at(k, ROW)) if count > 1 else (q0, i0, r0, k0)
        q2, i2, r2, k2 = (q[2], inverse[2], rest[2], at(k, 2 * ROW)) if count > 2 else (q0, i0, r0, k0)
        zero, one = number(0.0, s), number(1.0, s)
        for j in range(lanes):
            d = apart(q0, k0[j], i0, r0)
            total = abs(d) if kind == LAPLACIAN else d * d
            if count > 1:
                d = apart(q1, k1[j], i1, r1)
                total += abs(d) if kind == LAPLACIAN else d * d
            if count > 2:
                d = apart(q2, k2[j], i2, r2)
                total += abs(d) if kind == LAPLACIAN else d * d
            if kind == BOXCAR:
                s[j] = one if total <= one else zero
            elif kind == TRIANGULAR:
                s[j] = one - math.sqrt(total) if total < one else zero
            elif kind == EPANECHNIKOV:
                s[j] = one - total if total < one else zero
            else:
                s[j] = total if first else s[j] + total

    return pairs


_boxcar1, _boxcar2, _boxcar3 = (_pairs(n, BOXCAR) for n in (1, 2, 3))
_triangular1, _triangular2, _triangular3 = (_pairs(n, TRIANGULAR, near_rim=True) for n in (1, 2, 3))
_epanechnikov1, _epanechnikov2, _epanechnikov3 = (_pairs(n, EPANECHNIKOV, near_rim=True) for n in (1, 2, 3))


def _distances(kind, near_rim=False):
    """Return the function that sums up squares, or for the Laplacian absolute values, over any number of features."""
    first1, first2, first3 = (_pairs(n, kind, True, near_rim) for n in (1, 2, 3))
    more1, more2, more3 = (_pairs(n, kind, False, near_rim) for n in (1, 2, 3))

    @njit(**FAST)
    def some(s, k, q, inverse, rest, C, lanes):
        """Write what some features add to the distances."""
        if C >= 3:
            first3(s, k, q, inverse, rest, lanes)
        elif C == 2:
            first2(s, k, q, inverse, rest, lanes)
        elif C == 1:
            first1(s, k, q, inverse, rest, lanes)
        else:
            for j in range(lanes):
                s[j] = number(0.0, s)
        for c in range(3, C - 2, 3):
            more3(s, at(k, c * ROW), at(q, c), at(inverse, c), at(rest, c), lanes)
        last = C - C % 3
        if C > 3 and C % 3 == 2:
            more2(s, at(k, last * ROW), at(q, last), at(inverse, last), at(rest, last), lanes)
        elif C > 3 and C % 3 == 1:
            more1(s, at(k, last * ROW), at(q, last), at(inverse, last), at(rest, last), lanes)

    @njit(**FAST)
    def distances(s, partial, k, q, inverse, rest, C, lanes):
        """Write the distances of one row and the keys of a tile, in units of the width.

        Partial sums of a few features each keep the error of a long sum small.
        """
        some(s, k, q, inverse, rest, min(C, FEATURES), lanes)
        for c in range(FEATURES, C, FEATURES):
            some(partial, at(k, c * ROW), at(q, c), at(inverse, c), at(rest, c), min(C - c, FEATURES), lanes)
            for j in range(lanes):
                s[j] += partial[j]

    return distances


_square_distances, _manhattan_distances = _distances(SQUARES), _distances(LAPLACIAN)
_square_distances_near_rim = _distances(SQUARES, near_rim=True)


@njit(**FAST)
def weigh(s, kind, scale, lanes):
    """Replace distances by the Gaussian's or the Laplacian's scores, or by a compact kernel's weights, 0 beyond reach.

    The factor ``scale`` is the scores' alone.
    """
    zero, one = number(0.0, s), number(1.0, s)
    if kind < COMPACT:
        factor = -scale if kind == LAPLACIAN else number(-0.5, s) * scale
        for j in range(lanes):
            s[j] = factor * s[j]
    elif kind == BOXCAR:
        for j in range(lanes):
            s[j] = one if s[j] <= one else zero
    elif kind == TRIANGULAR:
        for j in range(lanes):
            s[j] = one - math.sqrt(s[j]) if s[j] < one else zero
    else:
        for j in range(lanes):
            s[j] = one - s[j] if s[j] < one else zero


@njit(**FAST)
def log_weights(s, kind, scale, lanes):
    """Replace squared distances by the scores of a compact kernel, −inf beyond reach."""
    zero, one, minus = number(0.0, s), number(1.0, s), -number(math.inf, s)
    if kind == BOXCAR:
        for j in range(lanes):
            s[j] = zero if s[j] <= one else minus
    elif kind == TRIANGULAR:
        for j in range(lanes):
            inside = s[j] < one
            value = log_of_rest(math.sqrt(s[j]) if inside else zero)
            s[j] = scale * value if inside else minus
    else:
        for j in range(lanes):
            inside = s[j] < one
            value = log_of_rest(s[j] if inside else zero)
            s[j] = scale * value if inside else minus


@njit(**FAST)
def near_weights(s, k, q, inverse, rest, C, kind, lanes):
    """Write the weights of a compact kernel in one, two or three features, in one go."""
    if kind == BOXCAR:
        if C == 3:
            _boxcar3(s, k, q, inverse, rest, lanes)
        elif C == 2:
            _boxcar2(s, k, q, inverse, rest, lanes)
        else:
            _boxcar1(s, k, q, inverse, rest, lanes)
    elif kind == TRIANGULAR:
        if C == 3:
            _triangular3(s, k, q, inverse, rest, lanes)
        elif C == 2:
            _triangular2(s, k, q, inverse, rest, lanes)
        else:
            _triangular1(s, k, q, inverse, rest, lanes)
    elif C == 3:
        _epanechnikov3(s, k, q, inverse, rest, lanes)
    elif C == 2:
        _epanechnikov2(s, k, q, inverse, rest, lanes)
    else:
        _epanechnikov1(s, k, q, inverse, rest, lanes)


@njit(**FAST)
def compare(a, x, head, row, last, t0, j0, lanes, k, s):
    """Write the scores of four rows, or their kernel weights; answer False where no key is in reach."""
    C, L, kind, scale = a[F.C], a[F.L], a[F.kind], x[0]
    inverse = at(address(a[F.weight], x), head % a[F.H] * a[F.weight_head])
    rest = at(address(a[F.weight_rest], x), head % a[F.H] * a[F.weight_head])
    count = min(GROUP, last - row + 1)
    query = at(address(a[F.query], x), (head * L + row) * C)
    if kind >= COMPACT:
        box = at(k, C * ROW)
        mine = at(box, (4 + 2 * (row % BLOCK // GROUP)) * C)
        if a[F.boxes] == 0:
            box_of(query, C, 1, count, C, mine)
        if not in_reach(C, mine, box, inverse):
            return False
    if a[F.direct] != 0 and a[F.d_query] == 0 and 0 < C <= 3:
        for i in range(GROUP):
            q = at(query, min(i, count - 1) * C)
            near_weights(at(s, i * ROW + j0), at(k, j0), q, inverse, rest, C, kind, lanes)
        return True
    for i in range(GROUP):
        si = at(s, i * ROW + j0)
        partial, q = at(s, 2 * GROUP * ROW), at(query, min(i, count - 1) * C)
        if kind == LAPLACIAN:
            _manhattan_distances(si, partial, at(k, j0), q, inverse, rest, C, lanes)
        elif kind > BOXCAR:
            _square_distances_near_rim(si, partial, at(k, j0), q, inverse, rest, C, lanes)
        else:
            _square_distances(si, partial, at(k, j0), q, inverse, rest, C, lanes)
        if a[F.d_query] != 0 and kind >= COMPACT:  # the backward pass needs them again
            squares = at(s, (GROUP + i) * ROW + j0)
            for j in range(lanes):
                squares[j] = si[j]
        if a[F.direct] == 0 and kind >= COMPACT:
            log_weights(si, kind, scale, lanes)
        else:
            weigh(si, kind, scale, lanes)
    return True


@njit(**FAST)
def slopes(kind, scale, squares, ds, lanes):
    """Replace d score by d squared distance; by half of d Manhattan distance."""
    zero, one, half = number(0.0, ds), number(1.0, ds), number(0.5, ds)
    if kind < COMPACT:
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
def pull_sign(ds, k, q, inverse, dk, lanes):
    """Do as ``pull_feature`` for the Manhattan distance: return the query's share, and ``ds · |(q − k) / width|``."""
    zero, one = number(0.0, ds), number(1.0, ds)
    dq, dw = zero, zero
    for j in range(lanes):
        d = (q - k[j]) * inverse
        sign = one if d > zero else (-one if d < zero else zero)
        h = ds[j] * sign
        dw += h * d
        dq += h
        dk[j] -= h
    return dq, dw


@njit(**FAST)
def pull(a, x, head, row, last, t0, j0, lanes, k, s, ds, dq, dk, dw):
    """Take the gradient of four rows' scores to queries and keys, less a factor 2 / width, and to the width."""
    C, L = a[F.C], a[F.L]
    inverse = at(address(a[F.weight], x), head % a[F.H] * a[F.weight_head])
    query = at(address(a[F.query], x), (head * L + row) * C)
    for i in range(min(GROUP, last - row + 1)):
        dsi = at(ds, i * ROW + j0)
        slopes(a[F.kind], x[0], at(s, (GROUP + i) * ROW + j0), dsi, lanes)
        for c in range(C):
            place = c * ROW + j0
            if a[F.kind] == LAPLACIAN:
                dq_c, dw_c = pull_sign(dsi, at(k, place), query[i * C + c], inverse[c], at(dk, place), lanes)
            else:
                dq_c, dw_c = pull_feature(dsi, at(k, place), query[i * C + c], inverse[c], at(dk, place), lanes)
            dq[i * C + c] += dq_c
            dw[c] += dw_c


_scores = scores_of_tiles(compare)
forward = kernel("int*", "real*")(forward_pass(pack, _scores))
backward = kernel("int*", "real*")(backward_pass(pack, _scores, pull))
