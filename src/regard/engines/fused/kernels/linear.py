"""The two products that everything linear is made of."""

from __future__ import annotations

from numba import njit

from regard.engines.fused.kernels.basics import FAST, at, number
from regard.engines.fused.kernels.fields import CHUNK, TILE


def _update(distance):
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
        for j in range(lanes):
            a0, a1, a2, a3 = x0[j], x1[j], x2[j], x3[j]
            y0[j] += c0 * a0 + c1 * a1 + c2 * a2 + c3 * a3
            y1[j] += d0 * a0 + d1 * a1 + d2 * a2 + d3 * a3
            y2[j] += e0 * a0 + e1 * a1 + e2 * a2 + e3 * a3
            y3[j] += f0 * a0 + f1 * a1 + f2 * a2 + f3 * a3

    return update


#: Rows of keys: scores from features, and the gradient of weights from values.
update_keys = _update(TILE)
#: Rows of values or features: the read, and gradients of rows.
update_lanes = _update(CHUNK)


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
