"""The additive score: Σ_c w_c tanh(a_c + b_c), in a few operations and a share of one division for each feature.

Three forms, each right where it is used, chosen for a pair by the classes of its two rows alone, so that no pair's
score depends on what else is in the tile:

- SMALL: both rows' features are small. ``tanh(a + b) = (tanh a + tanh b) / (1 + tanh a · tanh b)``, with the
  hyperbolic tangents made once for each row: nothing is lost near 0.
- NORMAL: ``tanh(a + b) = (e^{2a} e^{2b} − 1) / (e^{2a} e^{2b} + 1)``, with the exponentials made once for each row.
  Four features share a division, which the product of four denominators must survive. Numerators are summed, not
  ``1 − 2 / (…)``: where little remains of a tanh, nothing as large as 1 is rounded.
- RAW: the definition, where that product could overflow or an input is infinite.
"""

from __future__ import annotations

from numba import njit

from regard.engines.fused.kernels.arguments import GROUP, PAD, ROW, SMALL_FEATURE, F, kernel
from regard.engines.fused.kernels.backward import backward_pass
from regard.engines.fused.kernels.basics import (
    FAST,
    address,
    at,
    byte_address,
    exp,
    fill,
    maximum,
    number,
    pack_rows,
    tanh,
)
from regard.engines.fused.kernels.forward import forward_pass
from regard.engines.fused.kernels.tiles import kv_head, padded, scores_of_tiles

#: Classes of rows, the larger of two deciding; SMALL only where both are.
SMALL, NORMAL, RAW = 0, 1, 2
#: What ``mixed`` says: pairs of SMALL rows may occur, RAW rows may occur.
WITH_SMALL, WITH_RAW = 1, 2


@njit(**FAST)
def pack(a, x, head, kv, r0, r1, t0, n, k):
    """Pack a tile of keys, in the SMALL form too where pairs of such may occur, and the keys' classes."""
    C, S = a[F.C], a[F.S]
    plane = C * ROW
    pack_rows(at(address(a[F.key], x), kv * C * S + t0), S, C, n, k, ROW, padded(n))
    if a[F.mixed] != 0:
        classes, source = at(k, plane), at(byte_address(a[F.key_class]), kv * S + t0)
        for j in range(n):
            classes[j] = number(source[j], x)
        fill(at(classes, n), padded(n) - n, number(float(NORMAL), x))
    if a[F.mixed] & WITH_SMALL != 0:
        pack_rows(at(address(a[F.key_small], x), kv * C * S + t0), S, C, n, at(k, plane + ROW), ROW, padded(n))
    return True


@njit(**FAST)
def powers(source, C, limit, target, width):
    """Write ``e^{2x}`` of a row, filled up to ``width`` features with those of 0; return its class."""
    one, two, largest = number(1.0, source), number(2.0, source), number(0.0, source)
    for c in range(C):
        value = source[c]
        largest = maximum(largest, abs(value))
        value = limit if value > limit else value
        value = -limit if value < -limit else value
        target[c] = exp(two * value)
    for c in range(C, width):
        target[c] = one
    if not largest <= limit:
        return RAW
    return NORMAL if largest > number(SMALL_FEATURE, source) else SMALL


@kernel("int*", "real*")
def prepare(a, x):
    """Convert rows to the NORMAL form, transposed for keys, and write the class of each row.

    ``query`` are rows of C features, in heads of S rows, ``output`` is for rows of V features, ``scratch`` for a whole
    group of rows meanwhile; ``direct`` asks for rows as they come. Work items are groups of rows of one head.
    """
    C, V, S = a[F.C], a[F.V], a[F.S]
    source, target, group = address(a[F.query], x), address(a[F.output], x), address(a[F.scratch], x)
    classes = byte_address(a[F.query_class])
    groups = (S + PAD - 1) // PAD
    for item in range(a[F.first], a[F.last]):
        head, place = item // groups, item % groups * PAD
        first = head * S + place
        count = min(PAD, S - place)
        for row in range(count):
            powered = at(target, (first + row) * V) if a[F.direct] != 0 else at(group, row * V)
            classes[first + row] = powers(at(source, (first + row) * C), C, x[0], powered, V)
        if a[F.direct] == 0:
            for c in range(V):
                lanes = at(target, (head * V + c) * S + place)
                for row in range(count):
                    lanes[row] = group[row * V + c]


@njit(**FAST)
def normal2(s, k, q, row, w, scale, C, lanes):
    """Write ``Σ w tanh`` of two rows.

    Of two features, with A = e^{2a} e^{2b} of one and B of the other, the denominator is ``(1 + A) (1 + B)`` and the
    numerator ``(w + x) (A B − 1) + (w − x) (A − B)``.
    """
    one = number(1.0, s)
    s0, s1 = at(s, 0), at(s, ROW)
    fill(s0, lanes, number(0.0, s))
    fill(s1, lanes, number(0.0, s))
    for c in range(0, C, 4):
        e, f = at(q, c), at(q, c + row)
        e0, e1, e2, e3 = e[0], e[1], e[2], e[3]
        f0, f1, f2, f3 = f[0], f[1], f[2], f[3]
        wp, wm, xp, xm = w[c] + w[c + 1], w[c] - w[c + 1], w[c + 2] + w[c + 3], w[c + 2] - w[c + 3]
        e01, e23, f01, f23 = e0 * e1, e2 * e3, f0 * f1, f2 * f3
        g0, g1, g01, g2, g3, g23 = wm * e0, wm * e1, wp * e01, xm * e2, xm * e3, xp * e23
        h0, h1, h01, h2, h3, h23 = wm * f0, wm * f1, wp * f01, xm * f2, xm * f3, xp * f23
        k0, k1, k2, k3 = at(k, c * ROW), at(k, (c + 1) * ROW), at(k, (c + 2) * ROW), at(k, (c + 3) * ROW)
        for j in range(lanes):
            b0, b1, b2, b3 = k0[j], k1[j], k2[j], k3[j]
            u, v = (one + e1 * b1) + (e0 + e01 * b1) * b0, (one + e3 * b3) + (e2 + e23 * b3) * b2
            m, n = (g0 + g01 * b1) * b0 - (wp + g1 * b1), (g2 + g23 * b3) * b2 - (xp + g3 * b3)
            s0[j] += (m * v + n * u) / (u * v)
            u, v = (one + f1 * b1) + (f0 + f01 * b1) * b0, (one + f3 * b3) + (f2 + f23 * b3) * b2
            m, n = (h0 + h01 * b1) * b0 - (wp + h1 * b1), (h2 + h23 * b3) * b2 - (xp + h3 * b3)
            s1[j] += (m * v + n * u) / (u * v)
    for j in range(lanes):
        s0[j] *= scale
        s1[j] *= scale


@njit(**FAST)
def normal4(s, k, q, row, w, scale, C, lanes):
    """Write ``scale Σ w tanh`` of four rows, ``row`` features apart; one may stand in for all (row 0).

    No weight is larger than 1: what their sum multiplies must not overflow either.
    """
    for r in range(0, GROUP, 2):
        normal2(at(s, r * ROW), k, at(q, r * row), row, w, scale, C, lanes)


@njit(**FAST)
def small1(s, k, q, w, scale, C, lanes):
    """Write ``Σ w tanh`` of one row by the tangents of its features and those of the keys."""
    fill(s, lanes, number(0.0, s))
    one = number(1.0, s)
    for c in range(0, C, 4):
        q0, q1, q2, q3 = q[c], q[c + 1], q[c + 2], q[c + 3]
        w0, w1, w2, w3 = w[c], w[c + 1], w[c + 2], w[c + 3]
        k0, k1, k2, k3 = at(k, c * ROW), at(k, (c + 1) * ROW), at(k, (c + 2) * ROW), at(k, (c + 3) * ROW)
        for j in range(lanes):
            b0, b1, b2, b3 = k0[j], k1[j], k2[j], k3[j]
            d0, d1, d2, d3 = one + q0 * b0, one + q1 * b1, one + q2 * b2, one + q3 * b3
            n0, n1, n2, n3 = w0 * (q0 + b0), w1 * (q1 + b1), w2 * (q2 + b2), w3 * (q3 + b3)
            u, v = d0 * d1, d2 * d3
            s[j] += ((n0 * d1 + n1 * d0) * v + (n2 * d3 + n3 * d2) * u) / (u * v)
    for j in range(lanes):
        s[j] *= scale


@njit(**FAST)
def raw_pair(q, k, w, C):
    """Return ``Σ w tanh(a + b)`` of one pair."""
    total = number(0.0, q)
    for c in range(C):
        total += w[c] * tanh(q[c] + k[c])
    return total


@njit(**FAST)
def choose_small(s, other, classes, lanes):
    """Take the scores of ``other`` for SMALL keys."""
    small = number(float(SMALL), s)
    for j in range(lanes):
        s[j] = other[j] if classes[j] == small else s[j]


@njit(**FAST)
def weights_of(a, x, head):
    """Return where the weights of a head begin."""
    return at(address(a[F.weight], x), head % a[F.H] * a[F.weight_head])


@njit(**FAST)
def compare(a, x, head, row, last, t0, j0, lanes, k, s):
    """Write the scores of four rows."""
    C, L = a[F.C], a[F.L]
    w = weights_of(a, x, head)
    place = (head * L + row) * C
    step = C if row + GROUP - 1 <= last else 0
    normal4(at(s, j0), at(k, j0), at(address(a[F.query], x), place), step, w, x[0], C, lanes)
    count = min(GROUP, last - row + 1)
    if step == 0:
        for i in range(1, count):
            one_normal(at(s, i * ROW + j0), at(k, j0), at(address(a[F.query], x), place + i * C), w, x[0], C, lanes)
    if a[F.mixed] == 0:
        return True
    other, classes = at(s, GROUP * ROW), at(k, C * ROW + j0)
    raw = number(float(RAW), x)
    for i in range(count):
        own = byte_address(a[F.query_class])[head * L + row + i]
        si = at(s, i * ROW + j0)
        if own == SMALL and a[F.mixed] & WITH_SMALL != 0:
            small1(other, at(k, (C + 1) * ROW + j0), at(address(a[F.query_small], x), place + i * C), w, x[0], C, lanes)
            choose_small(si, other, classes, lanes)
        if a[F.mixed] & WITH_RAW != 0:
            q = at(address(a[F.query_raw], x), place + i * C)
            keys = at(address(a[F.key_raw], x), (kv_head(a, head) * a[F.S] + t0 + j0) * C)
            for j in range(min(lanes, a[F.S] - t0 - j0)):
                if own == RAW or classes[j] == raw:
                    si[j] = x[0] * raw_pair(q, at(keys, j * C), w, C)
    return True


@njit(**FAST)
def one_normal(s, k, q, w, scale, C, lanes):
    """Write ``Σ w tanh`` of one row."""
    fill(s, lanes, number(0.0, s))
    one = number(1.0, s)
    for c in range(0, C, 4):
        e0, e1, e2, e3 = q[c], q[c + 1], q[c + 2], q[c + 3]
        wp, wm, xp, xm = w[c] + w[c + 1], w[c] - w[c + 1], w[c + 2] + w[c + 3], w[c + 2] - w[c + 3]
        e01, e23 = e0 * e1, e2 * e3
        g0, g1, g01, g2, g3, g23 = wm * e0, wm * e1, wp * e01, xm * e2, xm * e3, xp * e23
        k0, k1, k2, k3 = at(k, c * ROW), at(k, (c + 1) * ROW), at(k, (c + 2) * ROW), at(k, (c + 3) * ROW)
        for j in range(lanes):
            b0, b1, b2, b3 = k0[j], k1[j], k2[j], k3[j]
            u, v = (one + e1 * b1) + (e0 + e01 * b1) * b0, (one + e3 * b3) + (e2 + e23 * b3) * b2
            m, n = (g0 + g01 * b1) * b0 - (wp + g1 * b1), (g2 + g23 * b3) * b2 - (xp + g3 * b3)
            s[j] += (m * v + n * u) / (u * v)
    for j in range(lanes):
        s[j] *= scale


@njit(**FAST)
def pull_normal(ds, k, q, C, lanes, dq, dk, dw):
    """Add ``Σ ds (1 − tanh²) / 4`` to dq and dk, and ``Σ ds (1 − tanh) / 2`` to dw, for one row.

    The reciprocals of four denominators come from one division; ``1 − r`` is ``p r``, which does not cancel.
    """
    one, zero = number(1.0, ds), number(0.0, ds)
    for c in range(0, C, 4):
        q0, q1, q2, q3 = q[c], q[c + 1], q[c + 2], q[c + 3]
        k0, k1, k2, k3 = at(k, c * ROW), at(k, (c + 1) * ROW), at(k, (c + 2) * ROW), at(k, (c + 3) * ROW)
        g0, g1, g2, g3 = at(dk, c * ROW), at(dk, (c + 1) * ROW), at(dk, (c + 2) * ROW), at(dk, (c + 3) * ROW)
        x0, x1, x2, x3 = zero, zero, zero, zero
        y0, y1, y2, y3 = zero, zero, zero, zero
        for j in range(lanes):
            p0, p1, p2, p3 = q0 * k0[j], q1 * k1[j], q2 * k2[j], q3 * k3[j]
            d0, d1, d2, d3 = one + p0, one + p1, one + p2, one + p3
            u, v = d0 * d1, d2 * d3
            r = one / (u * v)
            e, f = r * v, r * u
            r0, r1, r2, r3 = e * d1, e * d0, f * d3, f * d2
            t = ds[j]
            h0, h1, h2, h3 = t * r0, t * r1, t * r2, t * r3
            y0 += h0
            y1 += h1
            y2 += h2
            y3 += h3
            h0, h1, h2, h3 = h0 * (p0 * r0), h1 * (p1 * r1), h2 * (p2 * r2), h3 * (p3 * r3)
            x0 += h0
            x1 += h1
            x2 += h2
            x3 += h3
            g0[j] += h0
            g1[j] += h1
            g2[j] += h2
            g3[j] += h3
        dq[c] += x0
        dq[c + 1] += x1
        dq[c + 2] += x2
        dq[c + 3] += x3
        dw[c] += y0
        dw[c + 1] += y1
        dw[c + 2] += y2
        dw[c + 3] += y3


@njit(**FAST)
def pull_small(ds, k, q, C, lanes, dq, dk, dw):
    """Add ``Σ ds (1 − tanh²) / 4`` to dq and dk, and ``Σ ds tanh`` to dw, for one row of SMALL pairs."""
    one, quarter = number(1.0, ds), number(0.25, ds)
    for c in range(C):
        qc, kc, g = q[c], at(k, c * ROW), at(dk, c * ROW)
        x, y = number(0.0, ds), number(0.0, ds)
        for j in range(lanes):
            t = (qc + kc[j]) / (one + qc * kc[j])
            h = quarter * ds[j] * (one - t) * (one + t)
            g[j] += h
            x += h
            y += ds[j] * t
        dq[c] += x
        dw[c] += y


@njit(**FAST)
def pull_raw(ds, q, k, C, t, dq, dk, dw):
    """Add the same for one pair; dk goes on to the next feature in steps of ROW."""
    one, quarter = number(1.0, ds), number(0.25, ds)
    for c in range(C):
        t[c] = tanh(q[c] + k[c])
    for c in range(C):
        h = quarter * ds * (one - t[c]) * (one + t[c])
        dq[c] += h
        dw[c] += ds * t[c]
        dk[c * ROW] += h


@njit(**FAST)
def separate(ds, classes, wanted, lanes, target):
    """Copy the gradients of pairs with keys of a class, zeros elsewhere."""
    mark, zero = number(wanted + 0.0, ds), number(0.0, ds)
    for j in range(lanes):
        target[j] = ds[j] if classes[j] == mark else zero


@njit(**FAST)
def pull(a, x, head, row, last, t0, j0, lanes, k, s, ds, dq, dk, dw):
    """Take the gradient of four rows' scores to queries and keys (less a factor 4 w), and to the weights.

    ``dw`` holds C sums of ``ds tanh``, or of ``ds`` where C more hold those of ``ds (1 − tanh) / 2``.
    """
    C, L, mixed = a[F.C], a[F.L], a[F.mixed]
    place = (head * L + row) * C
    zero, raw = number(0.0, x), number(float(RAW), x)
    classes, other = at(k, C * ROW + j0), at(s, GROUP * ROW)
    for i in range(min(GROUP, last - row + 1)):
        dsi, dqi = at(ds, i * ROW + j0), at(dq, i * C)
        own = byte_address(a[F.query_class])[head * L + row + i] if mixed != 0 else NORMAL
        if mixed & WITH_RAW != 0:
            q = at(address(a[F.query_raw], x), place + i * C)
            keys = at(address(a[F.key_raw], x), (kv_head(a, head) * a[F.S] + t0 + j0) * C)
            t = at(address(a[F.scratch], x), a[F.at_query])
            for j in range(lanes):
                if dsi[j] != zero and (own == RAW or classes[j] == raw):
                    pull_raw(dsi[j], q, at(keys, j * C), C, t, dqi, at(dk, j0 + j), dw)
                    dsi[j] = zero
        if own == SMALL and mixed & WITH_SMALL != 0:
            separate(dsi, classes, SMALL, lanes, other)
            q = at(address(a[F.query_small], x), place + i * C)
            pull_small(other, at(k, (C + 1) * ROW + j0), q, C, lanes, dqi, at(dk, j0), dw)
            separate(dsi, classes, NORMAL, lanes, other)
            dsi = other
        if own != RAW:
            q = at(address(a[F.query], x), place + i * C)
            pull_normal(dsi, at(k, j0), q, C, lanes, dqi, at(dk, j0), at(dw, C))
            total = zero
            for j in range(lanes):
                total += dsi[j]
            for c in range(C):
                dw[c] += total


_scores = scores_of_tiles(compare)
forward = kernel("int*", "real*")(forward_pass(pack, _scores))
backward = kernel("int*", "real*")(backward_pass(pack, _scores, pull))
