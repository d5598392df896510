"""The additive score: Σ_c w_c tanh(a_c + b_c), in a few operations and a share of one division for each feature.

Three forms, each right where it is used, chosen for a pair by the classes of its two rows alone, so that no pair's
score depends on what else is in the tile:

- SMALL: both rows' features are small. ``tanh(a + b) = (tanh a + tanh b) / (1 + tanh a · tanh b)``, with the
  hyperbolic tangents made once for each row: nothing is lost near 0.
- NORMAL: ``tanh(a + b) = 1 − 2 / (1 + e^{2a} e^{2b})``, with the exponentials made once for each row. Four features
  share a division, which the product of four denominators must survive.
- RAW: the definition, where that product could overflow or an input is infinite.
"""

from __future__ import annotations

from numba import njit

from regard.engines.fused.kernels._kernel import kernel
from regard.engines.fused.kernels.basics import FAST, address, at, byte_address, fill, number, pack_rows, tanh
from regard.engines.fused.kernels.fields import GROUP, TILE, F
from regard.engines.fused.kernels.passes import backward_pass, forward_pass, padded

#: Classes of rows, the larger of two deciding; SMALL only where both are.
SMALL, NORMAL, RAW = 0, 1, 2


@njit(**FAST)
def pack(a, x, kv, t0, n, k):
    """Pack a tile of keys in each form that is needed, and the keys' classes; features are a multiple of four."""
    C, S = a[F.C], a[F.S]
    plane = C * TILE
    pack_rows(at(address(a[F.key], x), kv * C * S + t0), S, C, n, k, TILE, padded(n))
    if a[F.mixed] != 0:
        pack_rows(at(address(a[F.key_small], x), kv * C * S + t0), S, C, n, at(k, plane), TILE, padded(n))
        pack_rows(at(address(a[F.key_raw], x), kv * C * S + t0), S, C, n, at(k, 2 * plane), TILE, padded(n))
        classes, source = at(k, 3 * plane), at(byte_address(a[F.key_class]), kv * S + t0)
        for j in range(n):
            classes[j] = number(source[j], x)
        fill(at(classes, n), padded(n) - n, number(float(NORMAL), x))


@njit(**FAST)
def normal4(s, k, q, row, w, C, lanes):
    """Write ``Σ w tanh`` of four rows, ``row`` features apart; the last may stand in for missing ones (row 0)."""
    for i in range(GROUP):
        fill(at(s, i * TILE), lanes, number(0.0, s))
    s0, s1, s2, s3 = at(s, 0), at(s, TILE), at(s, 2 * TILE), at(s, 3 * TILE)
    one = number(1.0, s)
    total = number(0.0, s)
    for c in range(0, C, 4):
        e, f, g, h = at(q, c), at(q, c + row), at(q, c + 2 * row), at(q, c + 3 * row)
        e0, e1, e2, e3 = e[0], e[1], e[2], e[3]
        f0, f1, f2, f3 = f[0], f[1], f[2], f[3]
        g0, g1, g2, g3 = g[0], g[1], g[2], g[3]
        h0, h1, h2, h3 = h[0], h[1], h[2], h[3]
        w0, w1, w2, w3 = w[c], w[c + 1], w[c + 2], w[c + 3]
        total += (w0 + w1) + (w2 + w3)
        k0, k1, k2, k3 = at(k, c * TILE), at(k, (c + 1) * TILE), at(k, (c + 2) * TILE), at(k, (c + 3) * TILE)
        for j in range(lanes):
            b0, b1, b2, b3 = k0[j], k1[j], k2[j], k3[j]
            d0, d1, d2, d3 = one + e0 * b0, one + e1 * b1, one + e2 * b2, one + e3 * b3
            u, v = d0 * d1, d2 * d3
            s0[j] += ((w0 * d1 + w1 * d0) * v + (w2 * d3 + w3 * d2) * u) / (u * v)
            d0, d1, d2, d3 = one + f0 * b0, one + f1 * b1, one + f2 * b2, one + f3 * b3
            u, v = d0 * d1, d2 * d3
            s1[j] += ((w0 * d1 + w1 * d0) * v + (w2 * d3 + w3 * d2) * u) / (u * v)
            d0, d1, d2, d3 = one + g0 * b0, one + g1 * b1, one + g2 * b2, one + g3 * b3
            u, v = d0 * d1, d2 * d3
            s2[j] += ((w0 * d1 + w1 * d0) * v + (w2 * d3 + w3 * d2) * u) / (u * v)
            d0, d1, d2, d3 = one + h0 * b0, one + h1 * b1, one + h2 * b2, one + h3 * b3
            u, v = d0 * d1, d2 * d3
            s3[j] += ((w0 * d1 + w1 * d0) * v + (w2 * d3 + w3 * d2) * u) / (u * v)
    two = number(2.0, s)
    for i in range(GROUP):
        si = at(s, i * TILE)
        for j in range(lanes):
            si[j] = total - two * si[j]


@njit(**FAST)
def small1(s, k, q, w, C, lanes):
    """Write ``Σ w tanh`` of one row by the tangents of its features and those of the keys."""
    fill(s, lanes, number(0.0, s))
    one = number(1.0, s)
    for c in range(0, C, 4):
        q0, q1, q2, q3 = q[c], q[c + 1], q[c + 2], q[c + 3]
        w0, w1, w2, w3 = w[c], w[c + 1], w[c + 2], w[c + 3]
        k0, k1, k2, k3 = at(k, c * TILE), at(k, (c + 1) * TILE), at(k, (c + 2) * TILE), at(k, (c + 3) * TILE)
        for j in range(lanes):
            b0, b1, b2, b3 = k0[j], k1[j], k2[j], k3[j]
            d0, d1, d2, d3 = one + q0 * b0, one + q1 * b1, one + q2 * b2, one + q3 * b3
            n0, n1, n2, n3 = w0 * (q0 + b0), w1 * (q1 + b1), w2 * (q2 + b2), w3 * (q3 + b3)
            u, v = d0 * d1, d2 * d3
            s[j] += ((n0 * d1 + n1 * d0) * v + (n2 * d3 + n3 * d2) * u) / (u * v)


@njit(**FAST)
def raw1(s, k, q, w, C, lanes):
    """Write ``Σ w tanh(a + b)`` of one row."""
    fill(s, lanes, number(0.0, s))
    for c in range(C):
        qc, wc, kc = q[c], w[c], at(k, c * TILE)
        for j in range(lanes):
            s[j] += wc * tanh(qc + kc[j])


@njit(**FAST)
def choose(s, other, classes, own, wanted, lanes):
    """Take the scores of ``other`` where the class of the pair is ``wanted``."""
    mark = number(wanted + 0.0, s)
    mine = number(own + 0.0, s)
    for j in range(lanes):
        larger = classes[j] if classes[j] > mine else mine
        s[j] = other[j] if larger == mark else s[j]


@njit(**FAST)
def holds(classes, wanted, lanes):
    """Whether any key is of a class."""
    mark = number(wanted + 0.0, classes)
    found = number(0.0, classes)
    for j in range(lanes):
        found += number(1.0, classes) if classes[j] == mark else number(0.0, classes)
    return found > number(0.0, classes)


@njit(**FAST)
def weights_of(a, x, head):
    """Return where the weights of a head begin."""
    return at(address(a[F.weight], x), head % a[F.H] * a[F.weight_head])


@njit(**FAST)
def compare(a, x, head, row, last, j0, lanes, k, s):
    """Write the scores of four rows."""
    C, L = a[F.C], a[F.L]
    w = weights_of(a, x, head)
    place = (head * L + row) * C
    step = C if row + GROUP - 1 <= last else 0
    normal4(at(s, j0), at(k, j0), at(address(a[F.query], x), place), step, w, C, lanes)
    count = min(GROUP, last - row + 1)
    if step == 0:
        for i in range(1, count):
            one_normal(at(s, i * TILE + j0), at(k, j0), at(address(a[F.query], x), place + i * C), w, C, lanes)
    if a[F.mixed] == 0:
        return True
    other, classes = at(s, GROUP * TILE), at(k, 3 * C * TILE + j0)
    any_raw, any_small = holds(classes, RAW, lanes), holds(classes, SMALL, lanes)
    for i in range(count):
        own = byte_address(a[F.query_class])[head * L + row + i]
        si = at(s, i * TILE + j0)
        if own == SMALL and any_small:
            q = at(address(a[F.query_small], x), place + i * C)
            small1(other, at(k, C * TILE + j0), q, w, C, lanes)
            choose(si, other, classes, own, SMALL, lanes)
        if own == RAW or any_raw:
            q = at(address(a[F.query_raw], x), place + i * C)
            raw1(other, at(k, 2 * C * TILE + j0), q, w, C, lanes)
            choose(si, other, classes, own, RAW, lanes)
    return True


@njit(**FAST)
def one_normal(s, k, q, w, C, lanes):
    """Write ``Σ w tanh`` of one row."""
    fill(s, lanes, number(0.0, s))
    one, two, total = number(1.0, s), number(2.0, s), number(0.0, s)
    for c in range(0, C, 4):
        e0, e1, e2, e3 = q[c], q[c + 1], q[c + 2], q[c + 3]
        w0, w1, w2, w3 = w[c], w[c + 1], w[c + 2], w[c + 3]
        total += (w0 + w1) + (w2 + w3)
        k0, k1, k2, k3 = at(k, c * TILE), at(k, (c + 1) * TILE), at(k, (c + 2) * TILE), at(k, (c + 3) * TILE)
        for j in range(lanes):
            d0, d1, d2, d3 = one + e0 * k0[j], one + e1 * k1[j], one + e2 * k2[j], one + e3 * k3[j]
            u, v = d0 * d1, d2 * d3
            s[j] += ((w0 * d1 + w1 * d0) * v + (w2 * d3 + w3 * d2) * u) / (u * v)
    for j in range(lanes):
        s[j] = total - two * s[j]


@njit(**FAST)
def pull_normal(ds, k, q, C, lanes, dq, dk, dw):
    """Add ``Σ ds (1 − tanh²) / 4`` to dq and dk, and ``Σ ds (1 − tanh) / 2`` to dw, for one row.

    The reciprocals of four denominators come from one division; ``1 − r`` is ``p r``, which does not cancel.
    """
    one, zero = number(1.0, ds), number(0.0, ds)
    for c in range(0, C, 4):
        q0, q1, q2, q3 = q[c], q[c + 1], q[c + 2], q[c + 3]
        k0, k1, k2, k3 = at(k, c * TILE), at(k, (c + 1) * TILE), at(k, (c + 2) * TILE), at(k, (c + 3) * TILE)
        g0, g1, g2, g3 = at(dk, c * TILE), at(dk, (c + 1) * TILE), at(dk, (c + 2) * TILE), at(dk, (c + 3) * TILE)
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
def tangents(t, c, normal, small, raw, k, classes, own, C, lanes):
    """Write tanh(a + b) of one feature of one row, in the form that each pair asks for."""
    one, two = number(1.0, t), number(2.0, t)
    kn, ks, kr = at(k, c * TILE), at(k, (C + c) * TILE), at(k, (2 * C + c) * TILE)
    qn, qs, qr = normal[c], small[c], raw[c]
    mine, is_small, is_raw = number(own + 0.0, t), number(float(SMALL), t), number(float(RAW), t)
    for j in range(lanes):
        larger = classes[j] if classes[j] > mine else mine
        plain = one - two / (one + qn * kn[j])
        near = (qs + ks[j]) / (one + qs * ks[j])
        value = near if larger == is_small else plain
        t[j] = tanh(qr + kr[j]) if larger == is_raw else value


@njit(**FAST)
def pull_mixed(ds, t, g, lanes):
    """Add ``Σ ds (1 − t²) / 4`` to g; return the sums of that and of ``ds t``."""
    zero, one, quarter = number(0.0, ds), number(1.0, ds), number(0.25, ds)
    x, y = zero, zero
    for j in range(lanes):
        h = quarter * ds[j] * (one - t[j]) * (one + t[j])
        g[j] += h
        x += h
        y += ds[j] * t[j]
    return x, y


@njit(**FAST)
def pull(a, x, head, row, last, j0, lanes, k, s, ds, dq, dk, dw):
    """Take the gradient of four rows' scores to queries and keys (less a factor 4 w), and to the weights.

    ``dw`` holds C sums of ``ds tanh`` and, where rows are not mixed, C more of ``ds (1 − tanh) / 2``.
    """
    C, L = a[F.C], a[F.L]
    place = (head * L + row) * C
    for i in range(min(GROUP, last - row + 1)):
        dsi, dqi = at(ds, i * TILE + j0), at(dq, i * C)
        normal = at(address(a[F.query], x), place + i * C)
        if a[F.mixed] == 0:
            pull_normal(dsi, at(k, j0), normal, C, lanes, dqi, at(dk, j0), at(dw, C))
            total = number(0.0, x)
            for j in range(lanes):
                total += dsi[j]
            for c in range(C):
                dw[c] += total
            continue
        own = byte_address(a[F.query_class])[head * L + row + i]
        small, raw = at(address(a[F.query_small], x), place + i * C), at(address(a[F.query_raw], x), place + i * C)
        t = at(s, GROUP * TILE)
        for c in range(C):
            tangents(t, c, normal, small, raw, at(k, j0), at(k, 3 * C * TILE + j0), own, C, lanes)
            dq_c, dw_c = pull_mixed(dsi, t, at(dk, c * TILE + j0), lanes)
            dqi[c] += dq_c
            dw[c] += dw_c


_forward, _scores = forward_pass(pack, compare)
forward = kernel("int*", "real*")(_forward)
backward = kernel("int*", "real*")(backward_pass(pack, _scores, pull, False))
