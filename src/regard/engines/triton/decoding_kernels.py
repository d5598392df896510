"""The kernels of a step of decoding: few queries over many keys, split over keys, and merged in a second kernel.

A program of :func:`decode` owns some keys of a key head and the queries of all heads of its group, so keys are read
once. Each split holds an average, its largest score and its sum of weights; :func:`merge` sums them in the order of the
splits. Names are those of ``kernels.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.engines.triton.kernels import LN_2, LOG2_E, finite, power, read, real, scaled

#: Splits that :func:`merge` reads at once.
TOGETHER = tl.constexpr(16)


@triton.jit
def averages(
    q, key, value, table, b, first, last, heads, rows, there,
    k_r, k_c, v_r, v_c, k_b, v_b, bias, b_b, b_h, b_r, b_c, low, high, lower, upper, C, V, scale, softcap,
    SOFTCAP: tl.constexpr, BASE2: tl.constexpr, SPANS: tl.constexpr, BIAS: tl.constexpr, PAGE: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, CARE: tl.constexpr, SMALL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Return the weighted sum of the values of some tiles, the sum of weights, and the largest score.

    With CARE, bad values reach the rows that see them alone, and weights are smaller by the factor SMALL.
    """
    features, columns, keys = tl.arange(0, BC), tl.arange(0, BV), tl.arange(0, BN)
    peak, total = tl.full((BM,), float("-inf"), WIDE), tl.zeros((BM,), WIDE)
    out = tl.zeros((BM, BV), WIDE)
    for tile in range(first, last):
        place = tile * BN + keys
        inside = (place >= low) & (place < high)
        if PAGE:
            page = tl.load(table + place // PAGE, mask=inside, other=0).to(tl.int64)
            slot = place % PAGE
            key_rows, value_rows = page * k_b + slot * k_r, page * v_b + slot * v_r
        else:
            key_rows, value_rows = place.to(tl.int64) * k_r, place.to(tl.int64) * v_r
        k = tl.load(
            key + key_rows[:, None] + features[None, :] * k_c,
            mask=inside[:, None] & (features[None, :] < C), other=0.0,
        )  # fmt: skip
        v = tl.load(
            value + value_rows[:, None] + columns[None, :] * v_c,
            mask=inside[:, None] & (columns[None, :] < V), other=0.0,
        )  # fmt: skip
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=WIDE)
        scores, _ = scaled(scores, scale, softcap, SOFTCAP, WIDE)
        seen = there[:, None] & inside[None, :]
        if SPANS:
            seen = seen & (place[None, :] >= lower[:, None]) & (place[None, :] < upper[:, None])
        if BIAS:
            at = bias + (b * b_b + heads * b_h + rows * b_r)[:, None] + (place.to(tl.int64) * b_c)[None, :]
            added = tl.load(at, mask=there[:, None] & inside[None, :], other=0.0).to(WIDE)
            seen = seen & (added != float("-inf"))
            scores += added
        scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(peak, tl.max(scores, 1))
        shift = tl.where(new == float("-inf"), 0.0, new)
        weights, factor = power(scores - shift[:, None], BASE2), power(peak - shift, BASE2)
        if CARE:
            weights *= SMALL
        total = total * factor + tl.sum(weights, 1)
        out = out * factor[:, None] + read(weights, v, seen, PRECISION, WIDE, CARE)
        peak = new
    return out, total, peak


@triton.jit(do_not_specialize=["scale", "softcap"])
def decode(
    query, key, value, table, parts, statistics,
    q_b, q_h, q_r, q_c, k_b, k_h, k_r, k_c, v_b, v_h, v_r, v_c, p_b,
    start, stop, s_b, s_h, s_r, bias, b_b, b_h, b_r, b_c, H, R, L, S, C, V, blocks, splits, scale, softcap,
    SOFTCAP: tl.constexpr, BASE2: tl.constexpr, SPANS: tl.constexpr, BIAS: tl.constexpr, PAGE: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, LARGEST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Write the averages (B, H, L, splits, V) of splits of the keys, and their peak and total (B, H, L, splits, 2).

    The visible keys of a sequence are split evenly, so short sequences have short splits. With PAGE, the first stride
    of keys and values is that of pages of so many keys, which ``table`` names in their order.
    """
    scale, softcap = real(scale, WIDE), real(softcap, WIDE)
    split = tl.program_id(0) % splits
    block = tl.program_id(0) // splits % blocks
    bg = (tl.program_id(0) // splits // blocks).to(tl.int64)
    G = H // R
    b, g = bg // G, bg % G
    own, features, columns = block * BM + tl.arange(0, BM), tl.arange(0, BC), tl.arange(0, BV)
    there = own < R * L
    heads, rows = g * R + own // L, (own % L).to(tl.int64)
    q = tl.load(
        query + (b * q_b + heads * q_h + rows * q_r)[:, None] + features[None, :] * q_c,
        mask=there[:, None] & (features[None, :] < C), other=0.0,
    )  # fmt: skip
    low, high, lower, upper = 0, S, own, own
    if SPANS:
        at = b * s_b + heads * s_h + rows * s_r
        lower, upper = tl.load(start + at, mask=there, other=0), tl.load(stop + at, mask=there, other=0)
        low = tl.min(tl.where(lower < upper, lower, S), 0)
        high = tl.max(tl.where(lower < upper, upper, 0), 0)
    first, last = low // BN, (high + BN - 1) // BN
    count = (tl.maximum(last - first, 0) + splits - 1) // splits
    first += split * count
    last = tl.minimum(first + count, last)
    key += g * k_h
    value += g * v_h
    if PAGE:
        table += b * p_b
    else:
        key += b * k_b
        value += b * v_b
    SMALL: tl.constexpr = 1.0 if value.dtype.element_ty == tl.float16 else 2.3283064365386963e-10
    out, total, peak = averages(
        q, key, value, table, b, first, last, heads, rows, there, k_r, k_c, v_r, v_c, k_b, v_b,
        bias, b_b, b_h, b_r, b_c, low, high, lower, upper, C, V, scale, softcap,
        SOFTCAP, BASE2, SPANS, BIAS, PAGE, PRECISION, WIDE, False, SMALL, BM, BN, BC, BV,
    )  # fmt: skip
    if tl.min(tl.min(finite(out).to(tl.int32), 1), 0) == 0:
        out, total, peak = averages(
            q, key, value, table, b, first, last, heads, rows, there, k_r, k_c, v_r, v_c, k_b, v_b,
            bias, b_b, b_h, b_r, b_c, low, high, lower, upper, C, V, scale, softcap,
            SOFTCAP, BASE2, SPANS, BIAS, PAGE, PRECISION, WIDE, True, SMALL, BM, BN, BC, BV,
        )  # fmt: skip
        held = finite(out)
        out = out / tl.where(total == 0, 1.0, total)[:, None]
        out = tl.where(held, tl.minimum(tl.maximum(out, -LARGEST), LARGEST), out)
        total = total / SMALL
    else:
        out = out / tl.where(total == 0, 1.0, total)[:, None]
    at = ((b * H + heads) * L + rows) * splits + split
    tl.store(parts + at[:, None] * V + columns[None, :], out, mask=there[:, None] & (columns[None, :] < V))
    tl.store(statistics + at * 2, peak, mask=there)
    tl.store(statistics + at * 2 + 1, total, mask=there)


@triton.jit
def merge(
    parts, statistics, output, statistic, sink, z_b, z_h, H, L, V, splits,
    BASE2: tl.constexpr, SINK: tl.constexpr, WIDE: tl.constexpr, LARGEST: tl.constexpr,
    BS: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Write the output (B, H, L, V) and the log-sum-exp (B, H, L), without the sink, of a query."""
    own = tl.program_id(0).to(tl.int64)
    b, h = own // L // H, own // L % H
    each, columns = tl.arange(0, BS), tl.arange(0, BV)
    at = statistics + (own * splits + each) * 2
    peaks = tl.load(at, mask=each < splits, other=float("-inf"))
    totals = tl.load(at + 1, mask=each < splits, other=0.0)
    peak = tl.max(peaks, 0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    whole = tl.sum(totals * power(peaks - shift, BASE2), 0)
    empty = whole == 0
    whole = tl.where(empty, 1.0, whole)
    log = tl.log2(whole) * LN_2 if BASE2 else tl.log(whole)
    lse = tl.where(empty, float("-inf"), (shift * LN_2 if BASE2 else shift) + log)
    tl.store(statistic + own, lse)
    if SINK:
        z = tl.load(sink + b * z_b + h * z_h).to(WIDE) * (LOG2_E if BASE2 else 1.0)
        top = tl.maximum(shift, z)
        whole = whole * power(shift - top, BASE2) + power(z - top, BASE2)
        shift = top
    out = tl.zeros((BV,), WIDE)
    for first in range(0, splits, TOGETHER):
        some = first + tl.arange(0, TOGETHER)
        row = own * splits + some
        weights = tl.load(statistics + row * 2 + 1, mask=some < splits, other=0.0) / (2 * whole)
        weights *= power(tl.load(statistics + row * 2, mask=some < splits, other=float("-inf")) - shift, BASE2)
        inside = (some[:, None] < splits) & (columns[None, :] < V)
        part = tl.load(parts + row[:, None] * V + columns[None, :], mask=inside, other=0.0)
        out += tl.sum(weights[:, None] * part, 0)
    # Half an average, whose sum cannot overflow by rounding.
    out = tl.where(finite(out), 2 * tl.minimum(tl.maximum(out, -LARGEST / 2), LARGEST / 2), out)
    out = tl.where(empty, 0.0, out)
    tl.store(output + own * V + columns, out.to(output.dtype.element_ty), mask=columns < V)
