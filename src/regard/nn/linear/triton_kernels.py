"""Chunks of a gated recurrence on GPUs: five kernels in Triton, two of which pass a state from chunk to chunk.

In a chunk of C steps that starts with S, with decays D from step j to step i and β the rates:

    M = (Q Kᵀ ⊙ D) on and below the diagonal        A = β (K Kᵀ ⊙ D) below it        T = (I + A)⁻¹
    U = β V, or T β (V − K↓ S) with the delta rule
    Y = Q↓ S + M U                                   S' = D_C S + K↑ᵀ U

where K↓ has the decays from the start of the chunk and K↑ those to its end. Decays are sums of logarithms that start at
the step they belong to, never differences of sums. All sums are float32.

Dimensions: B batch, H heads of values, G of keys, N chunks of C steps, K and V widths, BK and BV of blocks of them.
"""

# Triton reads the types of arguments from a call, and its decorator has none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from regard._utils.compilation import Compilation

#: The logarithm of a decay that is 0.
NOTHING = tl.constexpr(-1000.0)
#: Kinds of decays: none, one for a head, one for each channel of the keys.
PLAIN, SCALAR, CHANNELS = (tl.constexpr(kind) for kind in range(3))


@triton.jit
def _rows(base, b, h, stride_b, stride_h, stride_l, rows, columns, inside):
    """Return rows (C, width) of a tensor (B, H, L, width) in float32."""
    start = base + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    at = start + rows[:, None].to(tl.int64) * stride_l + columns[None, :]
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _numbers(base, b, h, stride_b, stride_h, stride_l, rows, inside):
    """Return a number for each row (C,) of a tensor (B, H, L, 1) in float32."""
    start = base + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    return tl.load(start + rows.to(tl.int64) * stride_l, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _row(base, b, h, stride_b, stride_h, stride_l, row, columns, inside):
    """Return one row (width,) of a tensor (B, H, L, width) in float32."""
    start = base + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h + row.to(tl.int64) * stride_l
    return tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _exclusive(sums, own):
    """Return sums without the last term, which each includes."""
    return sums - own


@triton.jit
def prepare(
    query, key, decay, rate, products, alike, inverse,
    q_b, q_h, q_l, k_b, k_h, k_l, g_b, g_h, g_l, r_b, r_h, r_l,
    H, G, HQ, L, K, N, scale,
    C: tl.constexpr, BQ: tl.constexpr, KIND: tl.constexpr, DELTA: tl.constexpr, RATE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Write M (B · H, N, C, C), and with the delta rule A without rates, and T: all chunks at once."""
    n, bh = tl.program_id(0), tl.program_id(1)
    b, h = bh // H, bh % H
    hk, hq = h // (H // G), h // (H // HQ)
    i = tl.arange(0, C)
    rows = n * C + i
    inside = rows < L
    m, a = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    for part in range(0, tl.cdiv(K, BQ)):
        columns = part * BQ + tl.arange(0, BQ)
        wide = columns < K
        both = inside[:, None] & wide[None, :]
        k = _rows(key, b, hk, k_b, k_h, k_l, rows, columns, both)
        if KIND == CHANNELS:
            sums = tl.zeros((C, BQ), tl.float32)
            for step in range(C):
                row = n * C + step
                valid = wide & (row < L)
                g = tl.maximum(_row(decay, b, h, g_b, g_h, g_l, row, columns, valid), NOTHING)
                sums = tl.where(i[:, None] < step, sums + g[None, :], 0.0)
                faded = tl.where(i[:, None] <= step, k * tl.exp(sums), 0.0)
                q_row = _row(query, b, hq, q_b, q_h, q_l, row, columns, valid) * scale
                m += tl.where(i[:, None] == step, tl.sum(faded * q_row[None, :], 1)[None, :], 0.0)
                if DELTA:
                    k_row = _row(key, b, hk, k_b, k_h, k_l, row, columns, valid)
                    a += tl.where(i[:, None] == step, tl.sum(faded * k_row[None, :], 1)[None, :], 0.0)
        else:
            q = _rows(query, b, hq, q_b, q_h, q_l, rows, columns, both) * scale
            m += tl.dot(q, tl.trans(k), input_precision=DOT)
            if DELTA:
                a += tl.dot(k, tl.trans(k), input_precision=DOT)
    if KIND == SCALAR:
        g = tl.maximum(_numbers(decay, b, h, g_b, g_h, g_l, rows, inside), NOTHING)
        fading = tl.exp(tl.cumsum(tl.where(i[:, None] > i[None, :], g[:, None], 0.0), 0))
        m, a = m * fading, a * fading
    square = (bh.to(tl.int64) * N + n) * C * C + i[:, None] * C + i[None, :]
    tl.store(products + square, tl.where(i[:, None] >= i[None, :], m, 0.0))
    if DELTA:
        a = tl.where(i[:, None] > i[None, :], a, 0.0)
        tl.store(alike + square, a)
        if RATE:
            a *= _numbers(rate, b, h, r_b, r_h, r_l, rows, inside)[:, None]
        t = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
        for step in range(1, C):
            own = tl.sum(tl.where(i[:, None] == step, a, 0.0), 0)
            t = tl.where(i[:, None] == step, t - tl.sum(own[:, None] * t, 0)[None, :], t)
        tl.store(inverse + square, t)


@triton.jit
def _fading(
    decay, b, h, g_b, g_h, g_l, rows, columns, inside, wide, C: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Return the decays from the start of a chunk (C, width or 1), and that of the whole chunk (width or 1,)."""
    if KIND == CHANNELS:
        g = tl.maximum(_rows(decay, b, h, g_b, g_h, g_l, rows, columns, inside[:, None] & wide[None, :]), NOTHING)
        return tl.exp(tl.cumsum(g, 0)), tl.exp(tl.sum(g, 0))
    elif KIND == SCALAR:
        g = tl.maximum(_numbers(decay, b, h, g_b, g_h, g_l, rows, inside), NOTHING)
        return tl.exp(tl.cumsum(g, 0))[:, None], tl.exp(tl.sum(g, 0)) + tl.zeros((1,), tl.float32)
    else:
        return tl.full((C, 1), 1.0, tl.float32), tl.full((1,), 1.0, tl.float32)


@triton.jit
def _to_end(
    decay, b, h, g_b, g_h, g_l, rows, i, columns, wide, L, C: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Return the decays from behind each step to the end of its chunk (C, width or 1)."""
    later = (i < C - 1) & (rows + 1 < L)
    if KIND == CHANNELS:
        after = _rows(decay, b, h, g_b, g_h, g_l, rows + 1, columns, later[:, None] & wide[None, :])
        return tl.exp(tl.cumsum(tl.maximum(after, NOTHING), 0, reverse=True))
    elif KIND == SCALAR:
        after = _numbers(decay, b, h, g_b, g_h, g_l, rows + 1, later)
        return tl.exp(tl.cumsum(tl.maximum(after, NOTHING), 0, reverse=True))[:, None]
    else:
        return tl.full((C, 1), 1.0, tl.float32)


@triton.jit
def forward(
    query, key, value, decay, rate, products, inverse, start, output, end, states, residual, written,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, g_b, g_h, g_l, r_b, r_h, r_l, o_b, o_h, o_l,
    H, G, HQ, L, K, V, N, scale,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, KIND: tl.constexpr, DELTA: tl.constexpr, RATE: tl.constexpr,
    START: tl.constexpr, SAVE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Pass the state through the chunks of one head and BV values; write outputs, and what the backward pass needs."""
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    hk, hq = h // (H // G), h // (H // HQ)
    i, columns = tl.arange(0, C), tl.arange(0, BK)
    values = tl.program_id(0) * BV + tl.arange(0, BV)
    wide, some = columns < K, values < V
    place, matrix = columns[:, None] * V + values[None, :], wide[:, None] & some[None, :]
    state = tl.zeros((BK, BV), tl.float32)
    if START:
        state += tl.load(start + bh.to(tl.int64) * K * V + place, mask=matrix, other=0.0).to(tl.float32)
    for n in range(N):
        rows = n * C + i
        inside = rows < L
        both, out = inside[:, None] & wide[None, :], inside[:, None] & some[None, :]
        block = bh.to(tl.int64) * N + n
        if SAVE:
            tl.store(states + block * K * V + place, state, mask=matrix)
        k = _rows(key, b, hk, k_b, k_h, k_l, rows, columns, both)
        u = _rows(value, b, h, v_b, v_h, v_l, rows, values, out)
        first, whole = _fading(decay, b, h, g_b, g_h, g_l, rows, columns, inside, wide, C, KIND)
        square = block * C * C + i[:, None] * C + i[None, :]
        if DELTA:
            u -= tl.dot(k * first, state, input_precision=DOT)
        at = (bh.to(tl.int64) * L + rows[:, None]) * V + values[None, :]
        if SAVE and RATE:
            tl.store(residual + at, u, mask=out)
        if RATE:
            u *= _numbers(rate, b, h, r_b, r_h, r_l, rows, inside)[:, None]
        if DELTA:
            u = tl.dot(tl.load(inverse + square), u, input_precision=DOT)
        if SAVE:
            tl.store(written + at, u, mask=out)
        q = _rows(query, b, hq, q_b, q_h, q_l, rows, columns, both) * scale
        y = tl.dot(q * first, state, input_precision=DOT) + tl.dot(tl.load(products + square), u, input_precision=DOT)
        at = output + b.to(tl.int64) * o_b + h.to(tl.int64) * o_h + rows[:, None].to(tl.int64) * o_l + values[None, :]
        tl.store(at, y.to(output.dtype.element_ty), mask=out)
        last = _to_end(decay, b, h, g_b, g_h, g_l, rows, i, columns, wide, L, C, KIND)
        state = state * whole[:, None] + tl.dot(tl.trans(k * last), u, input_precision=DOT)
    tl.store(end + bh.to(tl.int64) * K * V + place, state, mask=matrix)


@triton.jit
def backward(
    query, key, decay, rate, products, inverse, grad, d_end, d_start, d_states, d_written,
    q_b, q_h, q_l, k_b, k_h, k_l, g_b, g_h, g_l, r_b, r_h, r_l, o_b, o_h, o_l,
    H, G, HQ, L, K, V, N, scale,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, KIND: tl.constexpr, DELTA: tl.constexpr, RATE: tl.constexpr,
    END: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Pass the gradient of the state back through the chunks; write it behind each, and those of U or T⁻¹ U."""
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    hk, hq = h // (H // G), h // (H // HQ)
    i, columns = tl.arange(0, C), tl.arange(0, BK)
    values = tl.program_id(0) * BV + tl.arange(0, BV)
    wide, some = columns < K, values < V
    place, matrix = columns[:, None] * V + values[None, :], wide[:, None] & some[None, :]
    d_state = tl.zeros((BK, BV), tl.float32)
    if END:
        d_state += tl.load(d_end + bh.to(tl.int64) * K * V + place, mask=matrix, other=0.0).to(tl.float32)
    for back in range(N):
        n = N - 1 - back
        rows = n * C + i
        inside = rows < L
        both, out = inside[:, None] & wide[None, :], inside[:, None] & some[None, :]
        block = bh.to(tl.int64) * N + n
        tl.store(d_states + block * K * V + place, d_state, mask=matrix)
        k = _rows(key, b, hk, k_b, k_h, k_l, rows, columns, both)
        dy = _rows(grad, b, h, o_b, o_h, o_l, rows, values, out)
        square = block * C * C + i[:, None] * C + i[None, :]
        m = tl.load(products + square)
        last = _to_end(decay, b, h, g_b, g_h, g_l, rows, i, columns, wide, L, C, KIND)
        du = tl.dot(tl.trans(m), dy, input_precision=DOT) + tl.dot(k * last, d_state, input_precision=DOT)
        first, whole = _fading(decay, b, h, g_b, g_h, g_l, rows, columns, inside, wide, C, KIND)
        q = _rows(query, b, hq, q_b, q_h, q_l, rows, columns, both) * scale
        d_state = d_state * whole[:, None] + tl.dot(tl.trans(q * first), dy, input_precision=DOT)
        if DELTA:
            du = tl.dot(tl.trans(tl.load(inverse + square)), du, input_precision=DOT)
            scaled = du
            if RATE:
                scaled = du * _numbers(rate, b, h, r_b, r_h, r_l, rows, inside)[:, None]
            d_state -= tl.dot(tl.trans(k * first), scaled, input_precision=DOT)
        at = d_written + (bh.to(tl.int64) * L + rows[:, None]) * V + values[None, :]
        tl.store(at, du, mask=out)
    tl.store(d_start + bh.to(tl.int64) * K * V + place, d_state, mask=matrix)


@triton.jit
def sums_over_values(
    rate, grad, states, d_states, residual, written, d_written,
    from_state, to_end, into_state, d_products, d_inverse, kept_by, d_value, d_rate,
    r_b, r_h, r_l, o_b, o_h, o_l,
    H, L, K, V, N,
    C: tl.constexpr, BQ: tl.constexpr, BV: tl.constexpr, DELTA: tl.constexpr, RATE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Write the sums over values that gradients need, for BQ channels of a chunk, and the gradients of its values.

    ``from_state`` dY Sᵀ, ``to_end`` U dS'ᵀ and ``into_state`` (B · H, L, K); ``d_products`` and ``d_inverse`` (B · H,
    N, C, C) those of M and A, and ``kept_by`` (B · H, N, K) that of the decay of the whole chunk.
    """
    n, bh, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = bh // H, bh % H
    i, columns = tl.arange(0, C), part * BQ + tl.arange(0, BQ)
    rows = n * C + i
    inside, wide = rows < L, columns < K
    block, line = bh.to(tl.int64) * N + n, bh.to(tl.int64) * L + rows
    beta = tl.full((C,), 1.0, tl.float32)
    if RATE:
        beta = _numbers(rate, b, h, r_b, r_h, r_l, rows, inside)
    dm, da = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    dq_state, dk_end = tl.zeros((C, BQ), tl.float32), tl.zeros((C, BQ), tl.float32)
    dk_state, d_beta = tl.zeros((C, BQ), tl.float32), tl.zeros((C,), tl.float32)
    kept = tl.zeros((BQ,), tl.float32)
    for block_of_values in range(0, tl.cdiv(V, BV)):
        values = block_of_values * BV + tl.arange(0, BV)
        some = values < V
        place, matrix = columns[:, None] * V + values[None, :], wide[:, None] & some[None, :]
        out, at = inside[:, None] & some[None, :], line[:, None] * V + values[None, :]
        state = tl.load(states + block * K * V + place, mask=matrix, other=0.0)
        d_state = tl.load(d_states + block * K * V + place, mask=matrix, other=0.0)
        kept += tl.sum(state * d_state, 1)
        u = tl.load(written + at, mask=out, other=0.0)
        du = tl.load(d_written + at, mask=out, other=0.0)
        dy = _rows(grad, b, h, o_b, o_h, o_l, rows, values, out)
        dv = du * beta[:, None]
        dk_end += tl.dot(u, tl.trans(d_state), input_precision=DOT)
        dq_state += tl.dot(dy, tl.trans(state), input_precision=DOT)
        if DELTA:
            dk_state -= tl.dot(dv, tl.trans(state), input_precision=DOT)
        if part == 0:
            tl.store(d_value + at, dv, mask=out)
            dm += tl.dot(dy, tl.trans(u), input_precision=DOT)
            if DELTA:
                da -= tl.dot(du, tl.trans(u), input_precision=DOT)
            if RATE:
                d_beta += tl.sum(du * tl.load(residual + at, mask=out, other=0.0), 1)
    at = line[:, None] * K + columns[None, :]
    both = inside[:, None] & wide[None, :]
    tl.store(from_state + at, dq_state, mask=both)
    tl.store(to_end + at, dk_end, mask=both)
    tl.store(kept_by + block * K + columns, kept, mask=wide)
    if DELTA:
        tl.store(into_state + at, dk_state, mask=both)
    if part == 0:
        square = block * C * C + i[:, None] * C + i[None, :]
        tl.store(d_products + square, tl.where(i[:, None] >= i[None, :], dm, 0.0))
        if DELTA:
            tl.store(d_inverse + square, tl.where(i[:, None] > i[None, :], da, 0.0))
        if RATE:
            tl.store(d_rate + line, d_beta, mask=inside)


@triton.jit
def gradients(
    query, key, decay, rate, products, alike, from_state, to_end, into_state, d_products, d_inverse, kept_by,
    d_query, d_key, d_decay, d_rate,
    q_b, q_h, q_l, k_b, k_h, k_l, g_b, g_h, g_l, r_b, r_h, r_l,
    B, H, G, HQ, L, K, N, scale,
    C: tl.constexpr, BQ: tl.constexpr, KIND: tl.constexpr, DELTA: tl.constexpr, RATE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Write gradients (B · H, L, ...) of queries, keys and decays, for BQ channels of a chunk; add to those of rates.

    Decays of heads have one gradient for each block of channels, (K / BQ, B · H, L), to be summed.
    """
    n, bh, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = bh // H, bh % H
    hk, hq = h // (H // G), h // (H // HQ)
    i, columns = tl.arange(0, C), part * BQ + tl.arange(0, BQ)
    rows = n * C + i
    inside, wide = rows < L, columns < K
    both = inside[:, None] & wide[None, :]
    block, line = bh.to(tl.int64) * N + n, bh.to(tl.int64) * L + rows
    at, square = line[:, None] * K + columns[None, :], block * C * C + i[:, None] * C + i[None, :]
    first, whole = _fading(decay, b, h, g_b, g_h, g_l, rows, columns, inside, wide, C, KIND)
    last = _to_end(decay, b, h, g_b, g_h, g_l, rows, i, columns, wide, L, C, KIND)
    q = _rows(query, b, hq, q_b, q_h, q_l, rows, columns, both) * scale
    k = _rows(key, b, hk, k_b, k_h, k_l, rows, columns, both)
    dm = tl.load(d_products + square)
    beta = tl.full((C,), 1.0, tl.float32)
    if RATE:
        beta = _numbers(rate, b, h, r_b, r_h, r_l, rows, inside)
    dq = tl.load(from_state + at, mask=both, other=0.0) * first
    up = tl.load(to_end + at, mask=both, other=0.0) * last
    dk, down, up = up, dq * q, up * k
    if DELTA:
        da = tl.load(d_inverse + square)
        same = tl.load(alike + square)
        into_key = tl.load(into_state + at, mask=both, other=0.0) * first
        dk += into_key
        down += into_key * k
        if RATE and part == 0:
            d_beta = tl.load(d_rate + line, mask=inside, other=0.0)
            tl.store(d_rate + line, d_beta + tl.sum(da * same, 1), mask=inside)
    if KIND == CHANNELS:
        kept = tl.load(kept_by + block * K + columns, mask=wide, other=0.0) * whole
        dg = tl.cumsum(down, 0, reverse=True) + _exclusive(tl.cumsum(up, 0), up) + kept[None, :]
        sums = tl.zeros((C, BQ), tl.float32)
        for step in range(C):
            row = n * C + step
            valid = wide & (row < L)
            own = i[:, None] == step
            g = tl.maximum(_row(decay, b, h, g_b, g_h, g_l, row, columns, valid), NOTHING)
            sums = tl.where(i[:, None] < step, sums + g[None, :], 0.0)
            fading = tl.where(i[:, None] <= step, tl.exp(sums), 0.0)
            faded = k * fading
            q_row = _row(query, b, hq, q_b, q_h, q_l, row, columns, valid) * scale
            dm_row = tl.sum(tl.where(own, dm, 0.0), 0)
            into = dm_row[:, None] * q_row[None, :]
            dq += tl.where(own, tl.sum(dm_row[:, None] * faded, 0)[None, :], 0.0)
            if DELTA:
                k_row = _row(key, b, hk, k_b, k_h, k_l, row, columns, valid)
                da_row = tl.sum(tl.where(own, da * beta[:, None], 0.0), 0)
                into += da_row[:, None] * k_row[None, :]
                dk += tl.where(own, tl.sum(da_row[:, None] * faded, 0)[None, :], 0.0)
            dk += into * fading
            through = into * faded  # of the sums of logarithms from each step to this one
            before = _exclusive(tl.cumsum(through, 0), through)
            dg += tl.where(i[:, None] <= step, before, 0.0)
        g = _rows(decay, b, h, g_b, g_h, g_l, rows, columns, both)
        tl.store(d_decay + at, tl.where(g > NOTHING, dg, 0.0), mask=both)
    else:
        through = dm * tl.load(products + square)
        if DELTA:
            da = da * beta[:, None]
            through += da * same
        if KIND == SCALAR:
            g = tl.maximum(_numbers(decay, b, h, g_b, g_h, g_l, rows, inside), NOTHING)
            fading = tl.exp(tl.cumsum(tl.where(i[:, None] > i[None, :], g[:, None], 0.0), 0))
            dm = dm * fading
            if DELTA:
                da = da * fading
            kept = tl.load(kept_by + block * K + columns, mask=wide, other=0.0)
            before = _exclusive(tl.cumsum(through, 1), through)
            before = tl.where(part == 0, before, 0.0) + tl.sum(down, 1)[:, None]
            dg = tl.sum(tl.where(i[:, None] >= i[None, :], before, 0.0), 0)
            up = tl.sum(up, 1)
            dg += _exclusive(tl.cumsum(up, 0), up) + tl.sum(kept, 0) * whole
            g = _numbers(decay, b, h, g_b, g_h, g_l, rows, inside)
            to = d_decay + part.to(tl.int64) * B * H * L + line
            tl.store(to, tl.where(g > NOTHING, dg, 0.0), mask=inside)
        dq += tl.dot(dm, k, input_precision=DOT)
        dk += tl.dot(tl.trans(dm), q, input_precision=DOT)
        if DELTA:
            dk += tl.dot(da + tl.trans(da), k, input_precision=DOT)
    tl.store(d_query + at, dq * scale, mask=both)
    tl.store(d_key + at, dk, mask=both)


# Shapes of blocks, and the kernels to compile ahead of time -----------------------------------------------------------


#: The widest keys: a program holds all channels of a state.
WIDEST = 128
#: Of kernels that hold a part of the channels.
PART = 32


def blocks(K: int, kind: int, exact: bool) -> dict[str, int]:
    """Return the sizes of blocks for a width of keys; ``exact`` without TF32, which then uses no tensor cores."""
    width = max(triton.next_power_of_2(K), 16)
    size = 16 if kind == CHANNELS.value or exact else 32
    return {"C": size, "BK": width, "BQ": min(width, PART), "BV": 16}


#: Stages of loops: more would hold more values at a time.
STAGES = 1


def warps(exact: bool) -> int:
    """Return the warps of a program."""
    return 8 if exact else 4


KERNELS: dict[str, Any] = {each.__name__: each for each in (prepare, forward, backward, sums_over_values, gradients)}


def kernels_to_compile(chip: str) -> list[Compilation]:  # noqa: ARG001 (all chips have the same)
    """Return every kernel at the default shapes: heads of 128 with each kind of decay, and float32.

    Triton's interpreter must be off when Triton is imported.
    """
    cases = (("bf16", PLAIN, False), ("bf16", SCALAR, True), ("bf16", CHANNELS, True), ("fp32", SCALAR, True))
    return [_compilation(*case, name) for case in cases for name in KERNELS]


def _compilation(dtype: str, kind: tl.constexpr, delta: bool, name: str) -> Compilation:
    exact, kernel = dtype == "fp32", KERNELS[name]
    typed = dict.fromkeys(("query", "key", "value", "output", "grad"), f"*{dtype}")
    known = {**blocks(WIDEST, kind.value, exact), "KIND": kind.value, "DELTA": delta, "RATE": True, "START": True}
    known |= {"END": True, "SAVE": True, "DOT": "ieee" if exact else "tf32"}
    constants = {each: known[each] for each in kernel.arg_names if each in known}
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for place, each in enumerate(kernel.arg_names):
        stride = each.endswith(("_b", "_h", "_l"))
        if each in constants:
            signature[each] = "constexpr"
        elif each == "scale":
            signature[each] = "fp32"
        else:
            signature[each] = "i32" if stride or each in _SIZES else typed.get(each, "*fp32")
        if signature[each].startswith("*") or each in ("K", "V") or (stride and each[0] in "qkvo"):
            attributes[(place,)] = [["tt.divisibility", 16]]
    decays = ("no decay", "decays of heads", "decays of channels")[kind.value]
    about = f"{name}: {dtype} {WIDEST}×{WIDEST} {decays}, {'delta' if delta else 'sum'}"
    return Compilation(about, kernel, signature, constants, attributes, warps(exact), STAGES)


#: Arguments that are sizes.
_SIZES = ("B", "H", "G", "HQ", "L", "K", "V", "N")
