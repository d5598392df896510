"""The kernels in Triton: one template for three families of scores, forward and backward.

A program of :func:`forward` and :func:`backward_query` owns BM queries of a head and visits tiles of BN keys; one of
:func:`backward_key` owns BN keys of a key head and visits tiles of queries. No two programs write to one address.

``lists`` name the tiles that a program visits: for each block, the number of full tiles, the number of all visible
tiles, then the tiles, full ones first. Full tiles need no mask. In the others nothing that is hidden may enter a
product, because 0 times NaN is NaN; what did so in a forward pass shows in the output, which a second kernel repairs.

Names: b sequence, h query head, g key head, r row, c column of a tensor in a stride; rows are queries, keys are keys.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources  # noqa: F401 (of launch.py)

# Values of the constants FAMILY, KIND and RULE; ``families.py`` and ``rules.py`` have their meaning.
DOT = tl.constexpr(0)
ADDITIVE = tl.constexpr(1)
GAUSSIAN = tl.constexpr(0)
LAPLACIAN = tl.constexpr(1)
BOXCAR = tl.constexpr(2)
TRIANGULAR = tl.constexpr(3)
SOFTMAX = tl.constexpr(0)
SIGMOID = tl.constexpr(1)
ENTMAX = tl.constexpr(2)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

# Elementary functions -------------------------------------------------------------------------------------------------


@triton.jit
def log1p(x):
    """Return log(1 + x) for x > −1 with a small relative error."""
    u = 1 + x
    return tl.where(u == 1, x, tl.log(u) * (x / tl.where(u == 1, 1, u - 1)))


@triton.jit
def tanh(x, WIDE: tl.constexpr):
    """Return tanh with a small relative error."""
    a = tl.abs(x)
    if tl.float64 == WIDE:  # by exp(−2a) − 1, whose rounding error cancels in the quotient with its logarithm
        u = tl.exp(-2 * a)
        same = (u == 1) | (u == 0)
        minus = tl.where(u == 1, -2 * a, (u - 1) * (-2 * a / tl.where(same, -1, tl.log(tl.where(same, 0.5, u)))))
        minus = tl.where(u == 0, -1, minus)
        s = x * x
        small = 0.00059002744094558595 * s - 0.0014558343870513183
        small = s * (s * (s * small + 0.0035921280365724810) - 0.0088632355299021966) + 0.021869488536155203
        small = a * (1 + s * (s * (s * (s * small - 0.053968253968253968) + 0.13333333333333333) - 0.33333333333333333))
        found = tl.where(a < 0.2, small, -minus / (2 + minus))
    else:
        u = tl.exp(-2 * a)
        s = x * x
        small = a * (1 + s * (-0.33333333 + s * (0.13333333 + s * (-0.053968254 + s * 0.021869489))))
        found = tl.where(a < 0.25, small, (1 - u) / (1 + u))
    return tl.where(x < 0, -found, tl.where(a == a, found, x))


@triton.jit
def finite(x):
    """Return which elements are neither NaN nor infinite."""
    return tl.abs(x) < float("inf")


@triton.jit
def kept(seed, bh, r0, k0, rows, keys, threshold):
    """Return which weights dropout keeps: random bits that follow from the seed, head, query and key alone."""
    r = (r0 + rows).to(tl.uint32)[:, None] + (keys * 0).to(tl.uint32)[None, :]
    k = (k0 + keys).to(tl.uint32)[None, :] + (rows * 0).to(tl.uint32)[:, None]
    bits, _, _, _ = tl.philox(seed, k, r, (r * 0 + bh).to(tl.uint32), r * 0)
    return bits >= threshold


@triton.jit
def load_rows(pointer, rows, count, row_stride, width, col_stride, W: tl.constexpr, BOUND: tl.constexpr):
    """Load W columns of rows; 0 beyond ``width`` and, if BOUND, in rows from ``count`` on."""
    cols = tl.arange(0, W)
    at = pointer + rows[:, None] * row_stride + cols[None, :] * col_stride
    there = cols[None, :] < width
    if BOUND:
        there = there & (rows[:, None] < count)
    return tl.load(at, mask=there, other=0.0)


# Scores of a tile -----------------------------------------------------------------------------------------------------


@triton.jit
def column(pointer, rows, count, row_stride, c, col_stride, WIDE: tl.constexpr):
    """Load feature c of rows, 0 from ``count`` on."""
    return tl.load(pointer + rows * row_stride + c * col_stride, mask=rows < count, other=0.0).to(WIDE)


@triton.jit
def apart(query, key, weight, rest, rows, keys, nr, nk, c, q_r, q_c, k_r, k_c, WIDE: tl.constexpr):
    """Return the difference of query and key in feature c, in units of the width, and the inverse width."""
    inverse = tl.load(weight + c).to(WIDE)
    q, k = column(query, rows, nr, q_r, c, q_c, WIDE), column(key, keys, nk, k_r, c, k_c, WIDE)
    difference = q[:, None] - k[None, :]
    return difference * inverse + difference * tl.load(rest + c).to(WIDE), inverse


@triton.jit
def raw_scores(
    q, k, query, key, weight, rest, rows, keys, nr, nk, C, q_r, q_c, k_r, k_c,
    FAMILY: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Return scores before their scale, which pairs the score itself shows, and what its derivative needs.

    That is the squared distance of a kernel. Dot products take tiles q and k; the others read feature after feature.
    """
    if FAMILY == DOT:
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=WIDE)
        shown, square = tl.full((BM, BN), True, tl.int1), scores
    else:
        square = tl.zeros((BM, BN), WIDE)
        shown = tl.full((BM, BN), True, tl.int1)
        if FAMILY == ADDITIVE:
            for c in range(0, C):
                w = tl.load(weight + c).to(WIDE)
                a = column(query, rows, nr, q_r, c, q_c, WIDE)[:, None]
                square += w * tanh(a + column(key, keys, nk, k_r, c, k_c, WIDE)[None, :], WIDE)
            scores = square
        else:
            for c in range(0, C):
                x, _ = apart(query, key, weight, rest, rows, keys, nr, nk, c, q_r, q_c, k_r, k_c, WIDE)
                if KIND == LAPLACIAN:
                    square += tl.abs(x)
                else:
                    square += x * x
            if KIND == GAUSSIAN:
                scores = square * -0.5
            elif KIND == LAPLACIAN:
                scores = -square
            elif KIND == BOXCAR:
                shown = square <= 1
                scores = square * 0
            else:
                shown = square < 1
                inside = tl.where(shown, square, 0)
                if KIND == TRIANGULAR:
                    inside = tl.sqrt(inside)
                scores = log1p(-inside)
    return scores, shown, square


@triton.jit
def scaled(scores, scale, softcap, SOFTCAP: tl.constexpr, WIDE: tl.constexpr):
    """Return scaled and capped scores, and their derivative for raw ones, without the factor ``scale``."""
    slope = 1.0
    scores = scores * scale
    if SOFTCAP:
        t = tanh(scores / softcap, WIDE)
        scores, slope = softcap * t, 1 - t * t
    return scores, slope


@triton.jit
def visible_pairs(
    b, h, r0, k0, rows, keys, block, col, part, nr, nk,
    start, stop, s_b, s_h, s_r, tiles, words, t_b, t_h, t_r,
    SPANS: tl.constexpr, BITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Return which pairs of a tile the mask shows, of those that exist."""
    seen = (keys[None, :] < nk) & (rows[:, None] < nr)
    if SPANS:
        at = b * s_b + h * s_h + r0 * s_r + rows * s_r
        first = (tl.load(start + at, mask=rows < nr, other=0) - k0).to(tl.int32)
        last = (tl.load(stop + at, mask=rows < nr, other=0) - k0).to(tl.int32)
        seen = seen & (keys[None, :] >= first[:, None]) & (keys[None, :] < last[:, None])
    if BITS:
        tile = tl.load(tiles + b * t_b + h * t_h + block * t_r + col).to(tl.int64)
        local, bit = tl.arange(0, BM), tl.arange(0, BN)
        at = words + (tile * ROWS + part) * W + (local[:, None] * W + bit[None, :] // 32)
        word = tl.load(at, mask=(tile >= 0) & (bit[None, :] >= 0), other=-1)
        seen = seen & (((word >> (bit[None, :] % 32)) & 1) == 1)
    return seen


@triton.jit
def tile_scores(
    q, k, query, key, weight, rest, b, h, r0, k0, rows, keys, block, col, part, nr, nk, C, q_r, q_c, k_r, k_c,
    scale, softcap, start, stop, s_b, s_h, s_r, tiles, words, t_b, t_h, t_r, bias, b_b, b_h, b_r, b_c,
    FAMILY: tl.constexpr, KIND: tl.constexpr, SOFTCAP: tl.constexpr, SPANS: tl.constexpr, BITS: tl.constexpr,
    BIAS: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    ROWS: tl.constexpr, W: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return the scores of a tile, −inf where hidden, what is visible, the squared distances, and the slope."""
    raw, seen, square = raw_scores(
        q, k, query, key, weight, rest, rows, keys, nr, nk, C, q_r, q_c, k_r, k_c, FAMILY, KIND, PRECISION, WIDE, BM, BN
    )
    scores, slope = scaled(raw, scale, softcap, SOFTCAP, WIDE)
    if MASKED:
        seen = seen & visible_pairs(
            b, h, r0, k0, rows, keys, block, col, part, nr, nk, start, stop, s_b, s_h, s_r, tiles, words,
            t_b, t_h, t_r, SPANS, BITS, BM, BN, ROWS, W,
        )  # fmt: skip
        if BIAS:
            at = bias + (b * b_b + h * b_h + r0 * b_r + k0 * b_c) + (rows[:, None] * b_r + keys[None, :] * b_c)
            added = tl.load(at, mask=(rows[:, None] < nr) & (keys[None, :] < nk), other=0.0).to(WIDE)
            seen = seen & (added != float("-inf"))
            scores += added
        scores = tl.where(seen, scores, float("-inf"))
    return scores, seen, square, slope


@triton.jit
def read(weights, v, seen, PRECISION: tl.constexpr, WIDE: tl.constexpr, CARE: tl.constexpr):
    """Return the product of weights and values; with CARE, bad values reach the rows that see them alone."""
    bad = 0
    if CARE:
        bad = tl.max(tl.max((~finite(v)).to(tl.int32), 1), 0)
    if bad == 0:
        out = tl.dot(weights.to(v.dtype), v, input_precision=PRECISION, out_dtype=WIDE)
    else:
        good = finite(v)
        out = tl.dot(weights.to(v.dtype), tl.where(good, v, 0.0), input_precision=PRECISION, out_dtype=WIDE)
        # Count what a row sees, in digits of one number: inf, −inf and NaN.
        code = tl.where(good, 0.0, tl.where(v == float("inf"), 1.0, tl.where(v == float("-inf"), 128.0, 16384.0)))
        count = tl.dot(seen.to(tl.float16), code.to(tl.float16), out_dtype=tl.float32)
        lost = count >= 16384
        low, high = count >= 128, count - tl.floor(count * 0.0078125) * 128 > 0
        added = tl.where(lost | (low & high), float("nan"), tl.where(low, float("-inf"), float("inf")))
        out = tl.where(count > 0, out + added, out)
    return out


@triton.jit
def sums(gradients, rows, PRECISION: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr):
    """Return the product of gradients, which are 0 where hidden, and rows that may not be finite."""
    if MASKED:
        rows = tl.where(finite(rows), rows, 0.0)
    return tl.dot(gradients.to(rows.dtype), rows, input_precision=PRECISION, out_dtype=WIDE)


@triton.jit
def power(x, BASE2: tl.constexpr):
    """Return the exponential of a difference of scores, in units of log 2 if BASE2."""
    return tl.exp2(x) if BASE2 else tl.exp(x)


# Forward --------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["seed", "threshold"])
def forward(
    query, key, value, weight, rest, output, statistic, sink,
    q_b, q_h, q_r, q_c, k_b, k_h, k_r, k_c, v_b, v_h, v_r, v_c, w_b, w_h, z_b, z_h,
    start, stop, s_b, s_h, s_r, lists, n_b, n_h, n_r, tiles, words, t_b, t_h, t_r, bias, b_b, b_h, b_r, b_c,
    H, R, L, S, C, V, blocks, scale, softcap, seed, threshold, keeping,
    FAMILY: tl.constexpr, KIND: tl.constexpr, RULE: tl.constexpr, SOFTCAP: tl.constexpr, BASE2: tl.constexpr,
    SPANS: tl.constexpr, BITS: tl.constexpr, BIAS: tl.constexpr, LISTS: tl.constexpr, HIDES: tl.constexpr,
    SINK: tl.constexpr, DROPOUT: tl.constexpr, REPAIRS: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr, LARGEST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Write the output (B, H, L, V) and the log-sum-exp (B, H, L), without the sink, of a block of queries.

    Sums of large values may overflow, and 0 times a hidden NaN is NaN. The kernel that REPAIRS outputs computes those
    that are not finite again: with care, and of weights that are smaller by a factor of 2³².
    """
    # The last blocks come first: with a causal mask they take longest.
    block = (blocks - 1 - tl.program_id(0) % blocks).to(tl.int64)
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = bh // H, bh % H
    r0 = block * BM
    nr, rows, keys = (L - r0).to(tl.int32), tl.arange(0, BM), tl.arange(0, BN)
    query += b * q_b + h * q_h + r0 * q_r
    key += b * k_b + h // R * k_h
    value += b * v_b + h // R * v_h
    weight += b * w_b + h * w_h
    rest += b * w_b + h * w_h
    cols = tl.arange(0, BV)
    at = output + (bh * L + r0) * V + (rows[:, None] * V + cols[None, :])
    there = (rows[:, None] < nr) & (cols[None, :] < V)
    if REPAIRS:
        before = tl.load(at, mask=there, other=0.0)
        if tl.min(tl.min(finite(before).to(tl.int32), 1), 0) == 1:
            return
    SMALL: tl.constexpr = 1.0 if value.dtype.element_ty == tl.float16 else 2.3283064365386963e-10
    q = 0
    if FAMILY == DOT:
        q = load_rows(query, rows, nr, q_r, C, q_c, BC, True)
    if LISTS:
        lists += b * n_b + h * n_h + block * n_r
        full, last = tl.load(lists), tl.load(lists + 1)
    else:
        full, last = S // BN, (S + BN - 1) // BN
    if HIDES:
        full = full * 0
    peak, total = tl.full((BM,), float("-inf"), WIDE), tl.zeros((BM,), WIDE)
    out = tl.zeros((BM, BV), WIDE)
    for visit in tl.static_range(HIDES, 2):
        for place in range(full * visit, last * visit + full * (1 - visit)):
            col = bh * 0 + (tl.load(lists + 2 + place) if LISTS else place)
            k0 = col * BN
            nk, key_k = (S - k0).to(tl.int32), key + k0 * k_r
            k = load_rows(key_k, keys, nk, k_r, C, k_c, BC, visit == 1) if FAMILY == DOT else 0
            scores, seen, _, _ = tile_scores(
                q, k, query, key_k, weight, rest, b, h, r0, k0, rows, keys, block, col, 0, nr, nk, C,
                q_r, q_c, k_r, k_c, scale, softcap, start, stop, s_b, s_h, s_r, tiles, words, t_b, t_h, t_r,
                bias, b_b, b_h, b_r, b_c, FAMILY, KIND, SOFTCAP, SPANS, BITS, BIAS, PRECISION, WIDE,
                BM, BN, BM, W, visit == 1,
            )  # fmt: skip
            if RULE == SOFTMAX:
                new = tl.maximum(peak, tl.max(scores, 1))
                shift = tl.where(new == float("-inf"), 0.0, new)
                weights, factor = power(scores - shift[:, None], BASE2), power(peak - shift, BASE2)
                if REPAIRS:
                    weights *= SMALL
                total = total * factor + tl.sum(weights, 1)
                out = out * factor[:, None]
                peak = new
            else:
                weights = 1 / (1 + tl.exp(-scores))
            if DROPOUT:
                weights = tl.where(kept(seed, bh, r0, k0, rows, keys, threshold), weights * keeping, 0.0)
            v = load_rows(value + k0 * v_r, keys, nk, v_r, V, v_c, BV, visit == 1)
            out += read(weights, v, seen, PRECISION, WIDE, REPAIRS and visit == 1)
    if RULE == SOFTMAX:
        empty = total == 0
        shift = tl.where(empty, 0.0, peak)
        log = tl.log2(tl.where(empty, 1.0, total)) * LN_2 if BASE2 else tl.log(tl.where(empty, 1.0, total))
        lse = tl.where(empty, float("-inf"), (shift * LN_2 if BASE2 else shift) + log)
        if not REPAIRS:
            tl.store(statistic + bh * L + r0 + rows, lse, mask=rows < nr)
        whole = tl.where(empty, 1.0, total)
        if SINK:
            z = tl.load(sink + b * z_b + h * z_h).to(WIDE) * (LOG2_E if BASE2 else 1.0)
            top = tl.maximum(shift, z)
            factor = power(shift - top, BASE2)
            out = out * factor[:, None]
            whole = whole * factor + power(z - top, BASE2) * (SMALL if REPAIRS else 1.0)
        held = finite(out)  # an average of finite values is finite, but for its rounding
        out = tl.where(empty[:, None], 0.0, out / whole[:, None])
        out = tl.where(held, tl.minimum(tl.maximum(out, -LARGEST), LARGEST), out)
    tl.store(at, out.to(output.dtype.element_ty), mask=there)


# Backward -------------------------------------------------------------------------------------------------------------


@triton.jit
def slope_of_square(square, KIND: tl.constexpr):
    """Return the derivative of a kernel's score for the squared distance, within the width."""
    if KIND == GAUSSIAN:
        found = square * 0 - 0.5
    elif KIND == BOXCAR:
        found = square * 0
    elif KIND == TRIANGULAR:
        moved = square > 0
        u = tl.sqrt(tl.where(moved, square, 0.25))
        found = tl.where(moved, -0.5 / (u * (1 - u)), 0.0)
    else:
        found = -1 / (1 - square)
    return found


@triton.jit
def pair_gradients(
    gradient, query, key, weight, rest, rows, keys, nr, nk, c, q_r, q_c, k_r, k_c, seen,
    FAMILY: tl.constexpr, KIND: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return the gradients of feature c of the query (its negative, for kernels, is the key's) and of the weight.

    ``gradient`` is that of the raw scores of a tile.
    """
    if FAMILY == ADDITIVE:
        w = tl.load(weight + c).to(WIDE)
        a = column(query, rows, nr, q_r, c, q_c, WIDE)[:, None]
        t = tanh(a + column(key, keys, nk, k_r, c, k_c, WIDE)[None, :], WIDE)
        to_row, to_weight = gradient * (w * (1 - t * t)), gradient * t
    else:
        x, inverse = apart(query, key, weight, rest, rows, keys, nr, nk, c, q_r, q_c, k_r, k_c, WIDE)
        if KIND == LAPLACIAN:
            sign = tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))
            to_row, to_weight = -gradient * sign * inverse, gradient * tl.abs(x) * inverse
        else:
            twice = 2 * gradient * x * inverse  # the gradient has the factor of the squared distance
            to_row, to_weight = twice, -twice * x
    if MASKED:
        to_row, to_weight = tl.where(seen, to_row, 0.0), tl.where(seen, to_weight, 0.0)
    return to_row, to_weight


@triton.jit
def tile_gradients(
    scores, seen, square, slope, lse, delta, d_out, v, seed, bh, r0, k0, rows, keys, threshold, keeping,
    FAMILY: tl.constexpr, KIND: tl.constexpr, RULE: tl.constexpr, BASE2: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return the weights that values get, and the gradients of the scores and of the raw scores, without the scale."""
    d_weights = tl.dot(d_out, tl.trans(v), input_precision=PRECISION, out_dtype=WIDE)
    if RULE == SOFTMAX:
        weights = power(scores - lse[:, None], BASE2)
    else:
        weights = 1 / (1 + tl.exp(-scores))
    read_weights = weights
    if DROPOUT:
        keep = kept(seed, bh, r0, k0, rows, keys, threshold)
        read_weights = tl.where(keep, weights * keeping, 0.0)
        d_weights = tl.where(keep, d_weights * keeping, 0.0)
    if RULE == SOFTMAX:
        d_scores = weights * (d_weights - delta[:, None])
    else:
        d_scores = weights * (1 - weights) * d_weights
    if MASKED:
        read_weights, d_scores = tl.where(seen, read_weights, 0.0), tl.where(seen, d_scores, 0.0)
    d_raw = d_scores * slope
    if FAMILY != DOT and FAMILY != ADDITIVE and KIND != LAPLACIAN:
        d_raw = d_raw * slope_of_square(tl.where(seen, square, 0.0), KIND)
    return read_weights, d_scores, d_raw


@triton.jit(do_not_specialize=["seed", "threshold"])
def backward_query(
    query, key, value, weight, rest, output, statistic, d_output, d_query, d_weight, d_bias, deltas,
    q_b, q_h, q_r, q_c, k_b, k_h, k_r, k_c, v_b, v_h, v_r, v_c, w_b, w_h,
    start, stop, s_b, s_h, s_r, lists, n_b, n_h, n_r, tiles, words, t_b, t_h, t_r, bias, b_b, b_h, b_r, b_c,
    H, R, L, S, C, V, blocks, scale, factor, softcap, seed, threshold, keeping,
    FAMILY: tl.constexpr, KIND: tl.constexpr, RULE: tl.constexpr, SOFTCAP: tl.constexpr, BASE2: tl.constexpr,
    SPANS: tl.constexpr, BITS: tl.constexpr, BIAS: tl.constexpr, LISTS: tl.constexpr, HIDES: tl.constexpr,
    DROPOUT: tl.constexpr, TO_BIAS: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    BM: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Write the gradients of BQ queries of a tile, their δ = Σ weight · d weight, and their part of the weight's.

    ``factor`` is the scale of the scores in natural units.
    """
    own = (blocks - 1 - tl.program_id(0) % blocks).to(tl.int64)
    block, part = own * BQ // BM, own * BQ % BM
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = bh // H, bh % H
    r0 = own * BQ
    nr, rows, keys = (L - r0).to(tl.int32), tl.arange(0, BQ), tl.arange(0, BN)
    query += b * q_b + h * q_h + r0 * q_r
    key += b * k_b + h // R * k_h
    value += b * v_b + h // R * v_h
    weight += b * w_b + h * w_h
    rest += b * w_b + h * w_h
    there = rows < nr
    q = 0
    if FAMILY == DOT:
        q = load_rows(query, rows, nr, q_r, C, q_c, BC, True)
    d_out = load_rows(d_output + (bh * L + r0) * V, rows, nr, V, V, 1, BV, True)
    out = load_rows(output + (bh * L + r0) * V, rows, nr, V, V, 1, BV, True)
    delta = tl.sum(d_out.to(WIDE) * out.to(WIDE), 1)
    tl.store(deltas + bh * L + r0 + rows, delta, mask=there)
    lse = tl.load(statistic + bh * L + r0 + rows, mask=there, other=0.0)
    lse = tl.where(lse == float("-inf"), 0.0, lse) * (LOG2_E if BASE2 else 1.0)
    cols = tl.arange(0, BC)
    d_rows = tl.zeros((BQ, BC), WIDE)
    d_sums = tl.zeros((BC,), WIDE)
    if LISTS:
        lists += b * n_b + h * n_h + block * n_r
        full, last = tl.load(lists), tl.load(lists + 1)
    else:
        full, last = S // BN, (S + BN - 1) // BN
    if HIDES:
        full = full * 0
    for visit in tl.static_range(HIDES, 2):
        for place in range(full * visit, last * visit + full * (1 - visit)):
            col = bh * 0 + (tl.load(lists + 2 + place) if LISTS else place)
            k0 = col * BN
            nk, key_k = (S - k0).to(tl.int32), key + k0 * k_r
            k = load_rows(key_k, keys, nk, k_r, C, k_c, BC, visit == 1) if FAMILY == DOT else 0
            scores, seen, square, slope = tile_scores(
                q, k, query, key_k, weight, rest, b, h, r0, k0, rows, keys, block, col, part, nr, nk, C,
                q_r, q_c, k_r, k_c, scale, softcap, start, stop, s_b, s_h, s_r, tiles, words, t_b, t_h, t_r,
                bias, b_b, b_h, b_r, b_c, FAMILY, KIND, SOFTCAP, SPANS, BITS, BIAS, PRECISION, WIDE,
                BQ, BN, BM, W, visit == 1,
            )  # fmt: skip
            v = load_rows(value + k0 * v_r, keys, nk, v_r, V, v_c, BV, visit == 1)
            _, d_scores, d_raw = tile_gradients(
                scores, seen, square, slope, lse, delta, d_out, v, seed, bh, r0, k0, rows, keys, threshold, keeping,
                FAMILY, KIND, RULE, BASE2, DROPOUT, PRECISION, WIDE, visit == 1,
            )  # fmt: skip
            if TO_BIAS:
                at = d_bias + ((bh * L + r0) * S + k0) + (rows[:, None] * S + keys[None, :])
                tl.store(at, d_scores, mask=there[:, None] & (keys[None, :] < nk))
            if FAMILY == DOT:
                d_rows += sums(d_raw, k, PRECISION, WIDE, visit == 1)
            else:
                for c in range(0, C):
                    to_row, to_weight = pair_gradients(
                        d_raw, query, key_k, weight, rest, rows, keys, nr, nk, c, q_r, q_c, k_r, k_c, seen,
                        FAMILY, KIND, WIDE, visit == 1,
                    )  # fmt: skip
                    d_rows += tl.where(cols[None, :] == c, tl.sum(to_row, 1)[:, None], 0.0)
                    d_sums += tl.where(cols == c, tl.sum(tl.sum(to_weight, 1), 0), 0.0)
    inside = there[:, None] & (cols[None, :] < C)
    at = d_query + (bh * L + r0) * C + (rows[:, None] * C + cols[None, :])
    tl.store(at, (d_rows * factor).to(d_query.dtype.element_ty), mask=inside)
    if FAMILY != DOT:
        tl.store(d_weight + (bh * blocks + own) * C + cols, d_sums * factor, mask=cols < C)


@triton.jit(do_not_specialize=["seed", "threshold"])
def backward_key(
    query, key, value, weight, rest, statistic, d_output, deltas, d_key, d_value,
    q_b, q_h, q_r, q_c, k_b, k_h, k_r, k_c, v_b, v_h, v_r, v_c, w_b, w_h,
    start, stop, s_b, s_h, s_r, lists, n_b, n_h, n_r, tiles, words, t_b, t_h, t_r, bias, b_b, b_h, b_r, b_c,
    H, R, L, S, C, V, blocks, scale, factor, softcap, seed, threshold, keeping,
    FAMILY: tl.constexpr, KIND: tl.constexpr, RULE: tl.constexpr, SOFTCAP: tl.constexpr, BASE2: tl.constexpr,
    SPANS: tl.constexpr, BITS: tl.constexpr, BIAS: tl.constexpr, LISTS: tl.constexpr, HIDES: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    BM: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a block of keys and values: sums over the queries of all heads of their group.

    A tile is computed in parts of BQ queries.
    """
    col = (tl.program_id(0) % blocks).to(tl.int64)
    bg = (tl.program_id(0) // blocks).to(tl.int64)
    G = H // R
    b, g = bg // G, bg % G
    k0 = col * BN
    nk, rows, keys = (S - k0).to(tl.int32), tl.arange(0, BQ), tl.arange(0, BN)
    key += b * k_b + g * k_h + k0 * k_r
    value += b * v_b + g * v_h + k0 * v_r
    k = 0
    if FAMILY == DOT:
        k = load_rows(key, keys, nk, k_r, C, k_c, BC, True)
    v = load_rows(value, keys, nk, v_r, V, v_c, BV, True)
    cols = tl.arange(0, BC)
    d_keys = tl.zeros((BN, BC), WIDE)
    d_values = tl.zeros((BN, BV), WIDE)
    whole = nk >= BN
    for r in range(0, R):
        h = g * R + r
        bh = b * H + h
        query_h = query + b * q_b + h * q_h
        weight_h = weight + b * w_b + h * w_h
        rest_h = rest + b * w_b + h * w_h
        lists_h = lists + b * n_b + h * n_h + col * n_r
        if LISTS:
            full, last = tl.load(lists_h), tl.load(lists_h + 1)
        else:
            last = (L + BM - 1) // BM
            full = tl.where(whole, L // BM, 0)
        if HIDES:
            full = full * 0
        for visit in tl.static_range(HIDES, 2):
            for step in range(full * visit * (BM // BQ), (last * visit + full * (1 - visit)) * (BM // BQ)):
                place, part = step // (BM // BQ), step % (BM // BQ) * BQ
                block = bh * 0 + (tl.load(lists_h + 2 + place) if LISTS else place)
                r0 = block * BM + part
                nr = (L - r0).to(tl.int32)
                there = rows < nr
                query_r = query_h + r0 * q_r
                q = load_rows(query_r, rows, nr, q_r, C, q_c, BC, True) if FAMILY == DOT else 0
                scores, seen, square, slope = tile_scores(
                    q, k, query_r, key, weight_h, rest_h, b, h, r0, k0, rows, keys, block, col, part, nr, nk, C,
                    q_r, q_c, k_r, k_c, scale, softcap, start, stop, s_b, s_h, s_r, tiles, words, t_b, t_h, t_r,
                    bias, b_b, b_h, b_r, b_c, FAMILY, KIND, SOFTCAP, SPANS, BITS, BIAS, PRECISION, WIDE,
                    BQ, BN, BM, W, visit == 1,
                )  # fmt: skip
                d_out = load_rows(d_output + (bh * L + r0) * V, rows, nr, V, V, 1, BV, True)
                delta = tl.load(deltas + bh * L + r0 + rows, mask=there, other=0.0)
                lse = tl.load(statistic + bh * L + r0 + rows, mask=there, other=0.0)
                lse = tl.where(lse == float("-inf"), 0.0, lse) * (LOG2_E if BASE2 else 1.0)
                weights, _, d_raw = tile_gradients(
                    scores, seen, square, slope, lse, delta, d_out, v, seed, bh, r0, k0, rows, keys, threshold, keeping,
                    FAMILY, KIND, RULE, BASE2, DROPOUT, PRECISION, WIDE, visit == 1,
                )  # fmt: skip
                d_values += tl.dot(tl.trans(weights.to(d_out.dtype)), d_out, input_precision=PRECISION, out_dtype=WIDE)
                if FAMILY == DOT:
                    d_keys += sums(tl.trans(d_raw), q, PRECISION, WIDE, visit == 1)
                else:
                    for c in range(0, C):
                        to_row, _ = pair_gradients(
                            d_raw, query_r, key, weight_h, rest_h, rows, keys, nr, nk, c, q_r, q_c, k_r, k_c,
                            seen, FAMILY, KIND, WIDE, visit == 1,
                        )  # fmt: skip
                        d_keys += tl.where(cols[None, :] == c, tl.sum(to_row, 0)[:, None], 0.0)
    if FAMILY != DOT and FAMILY != ADDITIVE:  # a kernel's score depends on the difference
        d_keys = -d_keys
    inside = (keys[:, None] < nk) & (cols[None, :] < C)
    at = d_key + (bg * S + k0) * C + (keys[:, None] * C + cols[None, :])
    tl.store(at, (d_keys * factor).to(d_key.dtype.element_ty), mask=inside)
    cols = tl.arange(0, BV)
    at = d_value + (bg * S + k0) * V + (keys[:, None] * V + cols[None, :])
    tl.store(at, d_values.to(d_value.dtype.element_ty), mask=(keys[:, None] < nk) & (cols[None, :] < V))
