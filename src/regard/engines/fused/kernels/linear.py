"""The two products that everything linear is made of."""

from __future__ import annotations

from numba import njit

from regard.engines.fused.kernels.basics import FAST, at, number
from regard.engines.fused.kernels.fields import CHUNK, TILE

#: Groups of four rows that are summed up before they are added to the rest.
PARTIAL = 32


def _update(distance, constant=0):
    @njit(**FAST)
    def update(y, x, c, c_row, c_col, lanes):
        """Add ``Σ_n c[m, n] · x_n`` to y_m, for four rows y_m and four rows x_n; c[m, n] is c[m·c_row + n·c_col]."""
        y0, y1, y2, y3 = at(y, 0), at(y, distance), at(y, 2 * distance), at(y, 3 * distance)
        x0, x1, x2, x3 = at(x, 0), at(x, distance), at(x, 2 * distance), at(x, 3 * distance)
        d, e, f = at(c, c_row), at(c, 2 * c_row), at(c, 3 * c_row)
        c0, c1, c2, c3 = c[0], c[c_col], c[2 * c_col], c[3 * c_col]
        d0, d1, d2, d3 = d[0], d[c_col], d[2 * c_col], d[3 * c_col]
        e0, e1, e2, e3 = e[0], e[c_col], e[2 * c_col], e[3 * c_col]
        f0, f1, f2, f3 = f[0], f[c_col], f[2 * c_col], f[3 * c_col]
        for j in range(constant if constant else lanes):
            a0, a1, a2, a3 = x0[j], x1[j], x2[j], x3[j]
            y0[j] += c0 * a0 + c1 * a1 + c2 * a2 + c3 * a3
            y1[j] += d0 * a0 + d1 * a1 + d2 * a2 + d3 * a3
            y2[j] += e0 * a0 + e1 * a1 + e2 * a2 + e3 * a3
            y3[j] += f0 * a0 + f1 * a1 + f2 * a2 + f3 * a3

    return update


#: Rows of keys: scores from features, and the gradient of weights from values.
update_keys = _update(TILE)
_by_64, _by_32, _by_16 = (_update(CHUNK, lanes) for lanes in (64, 32, 16))


@njit(**FAST)
def update_lanes(y, y_step, x, x_step, c, c_row, c_col, c_step, steps, lanes):
    """Update rows of values or features ``steps`` times, y, x and c moving on; a constant number of lanes unrolls."""
    done = 0
    for _ in range(lanes // 64):
        for i in range(steps):
            _by_64(at(y, i * y_step + done), at(x, i * x_step + done), at(c, i * c_step), c_row, c_col, 64)
        done += 64
    if lanes - done >= 32:
        for i in range(steps):
            _by_32(at(y, i * y_step + done), at(x, i * x_step + done), at(c, i * c_step), c_row, c_col, 32)
        done += 32
    if lanes - done >= 16:
        for i in range(steps):
            _by_16(at(y, i * y_step + done), at(x, i * x_step + done), at(c, i * c_step), c_row, c_col, 16)


@njit(**FAST)
def contract_lanes(y, x, c, steps, lanes, partial):
    """Add ``Σ_j c[m, j] · x_j`` to four rows y_m, for 4 · ``steps`` rows x_j; c[m, j] is c[m·TILE + j].

    Partial sums of a few rows each keep the error of a long sum small.
    """
    for first in range(0, steps, PARTIAL):
        for m in range(4):
            row = at(partial, m * CHUNK)
            for i in range(lanes):
                row[i] = number(0.0, y)
        count = min(PARTIAL, steps - first)
        update_lanes(partial, 0, at(x, 4 * first * CHUNK), 4 * CHUNK, at(c, 4 * first), TILE, 1, 4, count, lanes)
        for m in range(4):
            row, target = at(partial, m * CHUNK), at(y, m * CHUNK)
            for i in range(lanes):
                target[i] += row[i]


@njit(**FAST)
def update_keys_by_one(y, x, c, c_row, lanes):
    """Add ``c[m] · x`` to y_m, for four rows y_m."""
    y0, y1, y2, y3 = at(y, 0), at(y, TILE), at(y, 2 * TILE), at(y, 3 * TILE)
    c0, c1, c2, c3 = c[0], c[c_row], c[2 * c_row], c[3 * c_row]
    for j in range(lanes):
        a = x[j]
        y0[j] += c0 * a
        y1[j] += c1 * a
        y2[j] += c2 * a
        y3[j] += c3 * a


@njit(**FAST)
def contract(o, o_row, p, x, lanes):
    """Add ``Σ_j p_m[j] · x[j]`` to o[m], for four rows p_m of keys."""
    p0, p1, p2, p3 = at(p, 0), at(p, TILE), at(p, 2 * TILE), at(p, 3 * TILE)
    zero = number(0.0, p)
    s0, s1, s2, s3 = zero, zero, zero, zero
    for j in range(lanes):
        a = x[j]
        s0 += p0[j] * a
        s1 += p1[j] * a
        s2 += p2[j] * a
        s3 += p3[j] * a
    o[0] += s0
    o[o_row] += s1
    o[2 * o_row] += s2
    o[3 * o_row] += s3
