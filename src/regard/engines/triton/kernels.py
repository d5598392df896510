"""The kernels in Triton: one template for three families of scores and all normalizers, forward and backward.

A program of :func:`statistics`, :func:`forward`, :func:`backward_query` and :func:`fields` owns queries of a head and
visits tiles of BN keys; one of :func:`backward_key` and :func:`received` owns BN keys of a head and visits tiles of
queries. No two programs write to one address. None of them ran on a device yet: Triton's interpreter did.

``lists`` name the tiles that a program visits: for each block, the number of full tiles, the number of all visible
tiles, then the tiles, full ones first. Full tiles need no mask. In the others nothing that is hidden may enter a
product, because 0 times NaN is NaN; what did so in a forward pass shows in the output, which a second kernel repairs.

Names: b sequence, h query head, g key head, r row, c column of a tensor in a stride; rows are queries, keys are keys.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources  # noqa: F401 (of launch.py)

# Values of the constants FAMILY, KIND and RULE; ``families.py`` has their meaning.
DOT = tl.constexpr(0)
ADDITIVE = tl.constexpr(1)
GAUSSIAN = tl.constexpr(0)
LAPLACIAN = tl.constexpr(1)
BOXCAR = tl.constexpr(2)
TRIANGULAR = tl.constexpr(3)
SOFTMAX = tl.constexpr(0)
SIGMOID = tl.constexpr(1)
SPARSEMAX = tl.constexpr(2)
ENTMAX15 = tl.constexpr(3)
ENTMAX = tl.constexpr(4)
ARGMAX = tl.constexpr(5)
# Newton steps on the largest scores of lanes, and sweeps over all keys; bisection alone would converge in as many.
LANE_STEPS = tl.constexpr(8)
SWEEPS = tl.constexpr(128)
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


@triton.jit
def sliced_products(
    a, a_rows, a_count, a_r, a_c, b, b_rows, b_count, b_r, b_c, width, BK: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Return the products of BM and BN rows from BK columns at a time: whole wide rows would not fit into registers."""
    total = tl.zeros((BM, BN), WIDE)
    for c in range(0, width, BK):
        left = load_rows(a + c * a_c, a_rows, a_count, a_r, width - c, a_c, BK, True)
        right = load_rows(b + c * b_c, b_rows, b_count, b_r, width - c, b_c, BK, True)
        total += tl.dot(left, tl.trans(right), input_precision=PRECISION, out_dtype=WIDE)
    return total


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
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return scores before their scale, which pairs the score itself shows, and what its derivative needs.

    That is the squared distance of a kernel. Dot products take tiles q and k, or slices of them if these are wider than
    BK; the others read feature after feature.
    """
    if FAMILY == DOT:
        if k.shape[1] > BK:
            scores = sliced_products(
                query, rows, nr, q_r, q_c, key, keys, nk, k_r, k_c, C, BK, PRECISION, WIDE, BM, BN
            )  # fmt: skip
        else:
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
    BK: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return the scores of a tile, −inf where hidden, what is visible, the squared distances, and the slope."""
    raw, seen, square = raw_scores(
        q, k, query, key, weight, rest, rows, keys, nr, nk, C, q_r, q_c, k_r, k_c, FAMILY, KIND, PRECISION, WIDE,
        BM, BN, BK,
    )  # fmt: skip
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
def average(sums, whole, LARGEST: tl.constexpr):
    """Return sums over their whole weight: an average of finite values is finite, but for its rounding."""
    found = sums / whole
    return tl.where(finite(sums), tl.minimum(tl.maximum(found, -LARGEST), LARGEST), found)


@triton.jit
def power(x, BASE2: tl.constexpr):
    """Return the exponential of a difference of scores, in units of log 2 if BASE2."""
    return tl.exp2(x) if BASE2 else tl.exp(x)


# Weights of a tile ----------------------------------------------------------------------------------------------------


@triton.jit
def real(x, WIDE: tl.constexpr):
    """Return a number that is given as the bits of a float64 where scores are float64: arguments have 32 bits."""
    return x.to(tl.int64).to(tl.float64, bitcast=True) if tl.float64 == WIDE else x


@triton.jit
def entmax_weights(base, alpha, RULE: tl.constexpr, WIDE: tl.constexpr):
    """Return entmax' weights of (α − 1) (s − τ), and their slopes: weight^{2−α}, 0 at weight 0. NaN stays NaN."""
    if RULE == SPARSEMAX:
        weights = tl.where(base <= 0, 0, base)
        slopes = tl.where(base <= 0, 0, base * 0 + 1)
    elif RULE == ENTMAX15:
        slopes = tl.where(base <= 0, 0, base)
        weights = slopes * slopes
    else:
        none = base <= (2.2250738585072014e-308 if tl.float64 == WIDE else 1.1754943508222875e-38)
        weights = tl.exp2(tl.log2(tl.where(none, 0, base)) * (1 / (alpha - 1)))
        slopes = tl.where(none, 0, weights / base)
    return weights, slopes


@triton.jit
def row_statistic(statistic, at, there, RULE: tl.constexpr, BASE2: tl.constexpr, WIDE: tl.constexpr):
    """Load what weights follow from: the log-sum-exp, or the threshold or argmax' key as a shift and an offset."""
    if RULE == SOFTMAX:
        shift = tl.load(statistic + at, mask=there, other=0.0)
        shift = tl.where(shift == float("-inf"), 0.0, shift) * (LOG2_E if BASE2 else 1.0)
        offset = shift
    elif RULE == SIGMOID:
        shift = (at * 0).to(WIDE)
        offset = shift
    else:
        shift = tl.load(statistic + 2 * at, mask=there, other=0.0)
        offset = tl.load(statistic + 2 * at + 1, mask=there, other=0.0)
    return shift, offset


@triton.jit
def row_weights(
    scores, shift, offset, k0, keys, alpha, RULE: tl.constexpr, BASE2: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Return the weights of a tile, and their derivatives for their own scores with the statistic held."""
    if RULE == SOFTMAX:
        weights = power(scores - shift[:, None], BASE2)
        slopes = weights
    elif RULE == SIGMOID:
        weights = 1 / (1 + tl.exp(-scores))
        slopes = weights * (1 - weights)
    elif RULE == ARGMAX:
        bad = shift != shift
        place = tl.where(bad, 0.0, shift).to(tl.int64) + offset.to(tl.int64) - k0
        hot = tl.where(keys[None, :] == place[:, None], 1.0, 0.0).to(WIDE)
        weights = tl.where(bad[:, None], shift[:, None], hot)
        slopes = hot * 0
    else:
        base = (scores - shift[:, None]) - offset[:, None]
        weights, slopes = entmax_weights(base * (alpha - 1), alpha, RULE, WIDE)
    return weights, slopes


@triton.jit
def matters(weights, read_all, RULE: tl.constexpr):
    """Return whether a tile may add something to sums: one without weight does not, unless ``read_all``."""
    if RULE < SPARSEMAX or RULE == ARGMAX:
        found = True
    else:
        found = tl.max((weights != 0).to(tl.int32)) + read_all > 0
    return found


@triton.jit
def must_read_all(checksum, RULE: tl.constexpr):
    """Return 1 if tiles without weight must be read, too: 0 times what is not finite is NaN."""
    if RULE < SPARSEMAX or RULE == ARGMAX:
        found = 0
    else:
        found = tl.where(finite(tl.load(checksum)), 0, 1)
    return found


# Forward --------------------------------------------------------------------------------------------------------------


@triton.jit
def next_threshold(t, low, high, total, slope, alpha, RULE: tl.constexpr):
    """Return the step from t, the Newton step for total^{α−1} = 1, a norm, and the bracket of the threshold.

    For α ≤ 2 the norm is convex, and steps rise to the threshold without overshooting. A step that leaves the bracket,
    or for α > 2 does not halve it, is replaced by bisection.
    """
    gap = high - low
    low, high = tl.where(total >= 1, t, low), tl.where(total >= 1, high, t)
    if RULE == SPARSEMAX:
        target = total * 0 + 1
    elif RULE == ENTMAX15:
        target = tl.sqrt(total)
    else:
        target = tl.exp2(tl.log2(total) * (2 - alpha))
    newton = (total - target) / ((alpha - 1) * slope)
    trusted = (t + newton >= low) & (t + newton <= high)
    if RULE == ENTMAX:
        trusted = trusted & (tl.where(alpha <= 2, 0.0, 2.0) * (high - low) <= gap)
    return tl.where(trusted, newton, 0.5 * (low + high) - t), newton, low, high


@triton.jit
def two_sum(a, b):
    """Return a + b as the rounded sum and its rounding error (Knuth)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


@triton.jit(do_not_specialize=["scale", "softcap", "alpha"])
def statistics(
    query, key, weight, rest, statistic,
    q_b, q_h, q_r, q_c, k_b, k_h, k_r, k_c, w_b, w_h,
    start, stop, s_b, s_h, s_r, lists, n_b, n_h, n_r, tiles, words, t_b, t_h, t_r, bias, b_b, b_h, b_r, b_c,
    H, R, L, S, C, blocks, scale, softcap, alpha,
    FAMILY: tl.constexpr, KIND: tl.constexpr, RULE: tl.constexpr, SOFTCAP: tl.constexpr,
    SPANS: tl.constexpr, BITS: tl.constexpr, BIAS: tl.constexpr, LISTS: tl.constexpr, HIDES: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr,
    BM: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Write what weights of BQ rows follow from, (B, H, L, 2): entmax' threshold or argmax' key, as shift and offset.

    A first sweep over keys finds the largest score, or key. The threshold of the largest scores of BN lanes, found
    without a sweep, is a lower bound of the row's; a few sweeps improve it by Newton's method. NaN marks a row of which
    a score is NaN or, for entmax, ∞.
    """
    scale, softcap, alpha = real(scale, WIDE), real(softcap, WIDE), real(alpha, WIDE)
    own = (blocks - 1 - tl.program_id(0) % blocks).to(tl.int64)
    block, part = own * BQ // BM, own * BQ % BM
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = bh // H, bh % H
    r0 = own * BQ
    nr, rows, keys = (L - r0).to(tl.int32), tl.arange(0, BQ), tl.arange(0, BN)
    query += b * q_b + h * q_h + r0 * q_r
    key += b * k_b + h // R * k_h
    weight += b * w_b + h * w_h
    rest += b * w_b + h * w_h
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
    lanes = tl.full((BQ, 1 if RULE == ARGMAX else BN), float("-inf"), WIDE)
    place, bad = tl.full((BQ,), -1, tl.int64), tl.zeros((BQ,), tl.int32)
    for visit in tl.static_range(HIDES, 2):
        for tile in range(full * visit, last * visit + full * (1 - visit)):
            col = bh * 0 + (tl.load(lists + 2 + tile) if LISTS else tile)
            k0 = col * BN
            nk, key_k = (S - k0).to(tl.int32), key + k0 * k_r
            k = load_rows(key_k, keys, nk, k_r, C, k_c, BC, visit == 1) if FAMILY == DOT else 0
            scores, _, _, _ = tile_scores(
                q, k, query, key_k, weight, rest, b, h, r0, k0, rows, keys, block, col, part, nr, nk, C,
                q_r, q_c, k_r, k_c, scale, softcap, start, stop, s_b, s_h, s_r, tiles, words, t_b, t_h, t_r,
                bias, b_b, b_h, b_r, b_c, FAMILY, KIND, SOFTCAP, SPANS, BITS, BIAS, PRECISION, WIDE,
                BQ, BN, BK, BM, W, visit == 1,
            )  # fmt: skip
            flaws = scores != scores
            bad = tl.maximum(bad, tl.max(flaws.to(tl.int32), 1))
            scores = tl.where(flaws, float("-inf"), scores)
            if RULE == ARGMAX:  # the first key of the largest score; tiles come in any order
                top, peak = tl.max(scores, 1), tl.max(lanes, 1)
                first = k0 + tl.min(tl.where(scores == top[:, None], keys[None, :], BN), 1)
                better = (top > peak) | ((top == peak) & (top > float("-inf")) & (first < place))
                place = tl.where(better, first, place)
                lanes = tl.maximum(lanes, top[:, None])
            else:
                lanes = tl.maximum(lanes, scores)
    peak = tl.max(lanes, 1)
    if RULE == ARGMAX:
        offset = tl.where(place < 0, 0, place % 4096)  # a shift that is a multiple of 4,096 is exact in float32
        shift, offset = (place - offset).to(WIDE), offset.to(WIDE)
        wrong = bad == 1
    else:
        wrong = (bad == 1) | (peak == float("inf"))
        done = wrong | (peak == float("-inf"))
        peak = tl.where(done, 0.0, peak)
        low, high = tl.zeros((BQ,), WIDE) - 1 / (alpha - 1), tl.zeros((BQ,), WIDE)
        t = low
        for attempt in range(LANE_STEPS):  # noqa: B007
            weights, slopes = entmax_weights((lanes - peak[:, None] - t[:, None]) * (alpha - 1), alpha, RULE, WIDE)
            step, _, low, high = next_threshold(t, low, high, tl.sum(weights, 1), tl.sum(slopes, 1), alpha, RULE)
            t += step
        low = tl.where(alpha <= 2, tl.minimum(t, 0.0), low)
        t, high = low, tl.zeros((BQ,), WIDE)
        EPS: tl.constexpr = 2.220446049250313e-16 if tl.float64 == WIDE else 1.1920928955078125e-07
        shift, offset = two_sum(peak, t)
        sweeps, active = 0, tl.max(tl.where(done, 0, 1), 0)
        while active * (SWEEPS - sweeps) > 0:
            total, slope = tl.zeros((BQ,), WIDE), tl.zeros((BQ,), WIDE)
            for visit in tl.static_range(HIDES, 2):
                for tile in range(full * visit, last * visit + full * (1 - visit)):
                    col = bh * 0 + (tl.load(lists + 2 + tile) if LISTS else tile)
                    k0 = col * BN
                    nk, key_k = (S - k0).to(tl.int32), key + k0 * k_r
                    k = load_rows(key_k, keys, nk, k_r, C, k_c, BC, visit == 1) if FAMILY == DOT else 0
                    scores, _, _, _ = tile_scores(
                        q, k, query, key_k, weight, rest, b, h, r0, k0, rows, keys, block, col, part, nr, nk, C,
                        q_r, q_c, k_r, k_c, scale, softcap, start, stop, s_b, s_h, s_r, tiles, words, t_b, t_h, t_r,
                        bias, b_b, b_h, b_r, b_c, FAMILY, KIND, SOFTCAP, SPANS, BITS, BIAS, PRECISION, WIDE,
                        BQ, BN, BK, BM, W, visit == 1,
                    )  # fmt: skip
                    weights, slopes = row_weights(scores, shift, offset, k0, keys, alpha, RULE, False, WIDE)
                    total += tl.sum(weights, 1)
                    slope += tl.sum(slopes, 1)
            step, newton, low, high = next_threshold(t, low, high, total, slope, alpha, RULE)
            # A threshold has more digits than t: the last step goes to its offset.
            near = tl.abs(total - 1) <= 2 * EPS
            ended = near | (tl.abs(step) <= 2 * EPS * tl.abs(t)) | done
            moved, rounding = two_sum(peak, t + step)
            offset = tl.where(done, offset, tl.where(ended, offset + tl.where(near, newton, step), rounding))
            shift = tl.where(ended, shift, moved)
            t = tl.where(ended, t, t + step)
            done = ended
            sweeps += 1
            active = tl.max(tl.where(done, 0, 1), 0)
        empty = (tl.max(lanes, 1) == float("-inf")) & (bad == 0)
        shift, offset = tl.where(empty, float("inf"), shift), tl.where(empty, 0.0, offset)
    shift = tl.where(wrong, float("nan"), shift)
    at = statistic + 2 * (bh * L + r0 + rows)
    tl.store(at, shift, mask=rows < nr)
    tl.store(at + 1, offset, mask=rows < nr)


@triton.jit(do_not_specialize=["seed", "threshold", "scale", "softcap", "alpha", "keeping"])
def forward(
    query, key, value, weight, rest, output, statistic, sink, checksum,
    q_b, q_h, q_r, q_c, k_b, k_h, k_r, k_c, v_b, v_h, v_r, v_c, w_b, w_h, z_b, z_h,
    start, stop, s_b, s_h, s_r, lists, n_b, n_h, n_r, tiles, words, t_b, t_h, t_r, bias, b_b, b_h, b_r, b_c,
    H, R, L, S, C, V, blocks, scale, softcap, alpha, seed, threshold, keeping,
    FAMILY: tl.constexpr, KIND: tl.constexpr, RULE: tl.constexpr, SOFTCAP: tl.constexpr, BASE2: tl.constexpr,
    SPANS: tl.constexpr, BITS: tl.constexpr, BIAS: tl.constexpr, LISTS: tl.constexpr, HIDES: tl.constexpr,
    SINK: tl.constexpr, DROPOUT: tl.constexpr, REPAIRS: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr, LARGEST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Write the output (B, H, L, V) and, for softmax, the log-sum-exp (B, H, L), without the sink, of some queries.

    Entmax and argmax read the :func:`statistics` of rows; entmax does not read the values of tiles without weight.
    Sums of large values may overflow, and 0 times a hidden NaN is NaN. The kernel that REPAIRS outputs computes those
    that are not finite again: with care, and of weights that are smaller by a factor of 2³².
    """
    scale, softcap, alpha, keeping = real(scale, WIDE), real(softcap, WIDE), real(alpha, WIDE), real(keeping, WIDE)
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
    held, offset = peak, peak
    if RULE != SOFTMAX:
        held, offset = row_statistic(statistic, bh * L + r0 + rows, rows < nr, RULE, BASE2, WIDE)
    read_all = must_read_all(checksum, RULE)
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
                BM, BN, BK, BM, W, visit == 1,
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
                weights, _ = row_weights(scores, held, offset, k0, keys, alpha, RULE, BASE2, WIDE)
                if REPAIRS and RULE != SIGMOID:
                    weights *= SMALL
            if matters(weights, read_all, RULE):
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
        out = average(tl.where(empty[:, None], 0.0, out), whole[:, None], LARGEST)
    elif RULE != SIGMOID:
        out = average(out, SMALL if REPAIRS else 1.0, LARGEST)
        out = tl.where((held != held)[:, None], float("nan"), out)
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
def weight_gradients(
    weights, d_out, v, outputs, values, nr, nk, V, v_r, v_c, seed, bh, r0, k0, rows, keys, threshold, keeping,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return the weights that values get, and the gradients of the weights before dropout.

    ``outputs`` and ``values`` are where d_out and v come from.
    """
    if v.shape[1] > BK:
        d_weights = sliced_products(
            outputs, rows, nr, V, 1, values, keys, nk, v_r, v_c, V, BK, PRECISION, WIDE, weights.shape[0],
            weights.shape[1],
        )  # fmt: skip
    else:
        d_weights = tl.dot(d_out, tl.trans(v), input_precision=PRECISION, out_dtype=WIDE)
    if DROPOUT:
        keep = kept(seed, bh, r0, k0, rows, keys, threshold)
        weights = tl.where(keep, weights * keeping, 0.0)
        d_weights = tl.where(keep, d_weights * keeping, 0.0)
    return weights, d_weights


@triton.jit
def tile_gradients(
    weights, slopes, seen, square, slope, delta, d_out, v, outputs, values, nr, nk, V, v_r, v_c,
    seed, bh, r0, k0, rows, keys, threshold, keeping,
    FAMILY: tl.constexpr, KIND: tl.constexpr, RULE: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return the weights that values get, and the gradients of the scores and of the raw scores, without the scale."""
    read_weights, d_weights = weight_gradients(
        weights, d_out, v, outputs, values, nr, nk, V, v_r, v_c, seed, bh, r0, k0, rows, keys, threshold, keeping,
        DROPOUT, PRECISION, WIDE, BK,
    )  # fmt: skip
    if RULE == SIGMOID:
        d_scores = slopes * d_weights
    elif RULE == ARGMAX:
        d_scores = slopes
    else:
        d_scores = slopes * (d_weights - delta[:, None])
    if MASKED:
        read_weights, d_scores = tl.where(seen, read_weights, 0.0), tl.where(seen, d_scores, 0.0)
    d_raw = d_scores * slope
    if FAMILY != DOT and FAMILY != ADDITIVE and KIND != LAPLACIAN:
        d_raw = d_raw * slope_of_square(tl.where(seen, square, 0.0), KIND)
    return read_weights, d_scores, d_raw


@triton.jit(do_not_specialize=["seed", "threshold", "scale", "factor", "softcap", "alpha", "keeping"])
def backward_query(
    query, key, value, weight, rest, output, statistic, checksum, d_output, d_query, d_weight, d_bias, deltas,
    q_b, q_h, q_r, q_c, k_b, k_h, k_r, k_c, v_b, v_h, v_r, v_c, w_b, w_h,
    start, stop, s_b, s_h, s_r, lists, n_b, n_h, n_r, tiles, words, t_b, t_h, t_r, bias, b_b, b_h, b_r, b_c,
    H, R, L, S, C, V, blocks, scale, factor, softcap, alpha, seed, threshold, keeping,
    FAMILY: tl.constexpr, KIND: tl.constexpr, RULE: tl.constexpr, SOFTCAP: tl.constexpr, BASE2: tl.constexpr,
    SPANS: tl.constexpr, BITS: tl.constexpr, BIAS: tl.constexpr, LISTS: tl.constexpr, HIDES: tl.constexpr,
    DROPOUT: tl.constexpr, TO_BIAS: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    BM: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    """Write the gradients of BQ queries of a tile, their part of the weight's, and δ = Σ slope · d weight / Σ slope.

    ``factor`` is the scale of the scores in natural units. Softmax finds δ in the output, entmax in a sweep of its own.
    """
    scale, factor, softcap = real(scale, WIDE), real(factor, WIDE), real(softcap, WIDE)
    alpha, keeping = real(alpha, WIDE), real(keeping, WIDE)
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
    d_output += (bh * L + r0) * V
    d_out = load_rows(d_output, rows, nr, V, V, 1, BV, True)
    shift, offset = row_statistic(statistic, bh * L + r0 + rows, there, RULE, BASE2, WIDE)
    read_all = must_read_all(checksum, RULE)
    delta, whole = tl.zeros((BQ,), WIDE), tl.zeros((BQ,), WIDE)
    if RULE == SOFTMAX:
        out = load_rows(output + (bh * L + r0) * V, rows, nr, V, V, 1, BV, True)
        delta = tl.sum(d_out.to(WIDE) * out.to(WIDE), 1)
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
    ALONE: tl.constexpr = RULE < SPARSEMAX or RULE == ARGMAX
    for sweep in tl.static_range(ALONE, 2):
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
                    BQ, BN, BK, BM, W, visit == 1,
                )  # fmt: skip
                weights, slopes = row_weights(scores, shift, offset, k0, keys, alpha, RULE, BASE2, WIDE)
                if matters(weights, read_all, RULE):
                    value_k = value + k0 * v_r
                    v = load_rows(value_k, keys, nk, v_r, V, v_c, BV, visit == 1)
                    if sweep == 0:
                        _, d_weights = weight_gradients(
                            weights, d_out, v, d_output, value_k, nr, nk, V, v_r, v_c, seed, bh, r0, k0, rows, keys,
                            threshold, keeping, DROPOUT, PRECISION, WIDE, BK,
                        )  # fmt: skip
                        part_of_delta = slopes * d_weights
                        if visit == 1:
                            part_of_delta = tl.where(seen, part_of_delta, 0.0)
                        delta += tl.sum(part_of_delta, 1)
                        whole += tl.sum(slopes, 1)
                    else:
                        _, d_scores, d_raw = tile_gradients(
                            weights, slopes, seen, square, slope, delta, d_out, v, d_output, value_k, nr, nk, V,
                            v_r, v_c, seed, bh, r0, k0, rows, keys, threshold, keeping,
                            FAMILY, KIND, RULE, DROPOUT, PRECISION, WIDE, BK, visit == 1,
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
        if sweep == 0:
            delta = delta / tl.where(whole == 0, 1.0, whole)
    tl.store(deltas + bh * L + r0 + rows, delta, mask=there)
    inside = there[:, None] & (cols[None, :] < C)
    at = d_query + (bh * L + r0) * C + (rows[:, None] * C + cols[None, :])
    tl.store(at, (d_rows * factor).to(d_query.dtype.element_ty), mask=inside)
    if FAMILY != DOT:
        tl.store(d_weight + (bh * blocks + own) * C + cols, d_sums * factor, mask=cols < C)


@triton.jit(do_not_specialize=["seed", "threshold", "scale", "factor", "softcap", "alpha", "keeping"])
def backward_key(
    query, key, value, weight, rest, statistic, checksum, d_output, deltas, d_key, d_value,
    q_b, q_h, q_r, q_c, k_b, k_h, k_r, k_c, v_b, v_h, v_r, v_c, w_b, w_h,
    start, stop, s_b, s_h, s_r, lists, n_b, n_h, n_r, tiles, words, t_b, t_h, t_r, bias, b_b, b_h, b_r, b_c,
    H, R, L, S, C, V, blocks, scale, factor, softcap, alpha, seed, threshold, keeping,
    FAMILY: tl.constexpr, KIND: tl.constexpr, RULE: tl.constexpr, SOFTCAP: tl.constexpr, BASE2: tl.constexpr,
    SPANS: tl.constexpr, BITS: tl.constexpr, BIAS: tl.constexpr, LISTS: tl.constexpr, HIDES: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, W: tl.constexpr,
    BM: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a block of keys and values: sums over the queries of all heads of their group.

    A tile is computed in parts of BQ queries.
    """
    scale, factor, softcap = real(scale, WIDE), real(factor, WIDE), real(softcap, WIDE)
    alpha, keeping = real(alpha, WIDE), real(keeping, WIDE)
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
    whole, read_all = nk >= BN, must_read_all(checksum, RULE)
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
                    BQ, BN, BK, BM, W, visit == 1,
                )  # fmt: skip
                shift, offset = row_statistic(statistic, bh * L + r0 + rows, there, RULE, BASE2, WIDE)
                weights, slopes = row_weights(scores, shift, offset, k0, keys, alpha, RULE, BASE2, WIDE)
                if matters(weights, read_all, RULE):
                    outputs = d_output + (bh * L + r0) * V
                    d_out = load_rows(outputs, rows, nr, V, V, 1, BV, True)
                    delta = tl.load(deltas + bh * L + r0 + rows, mask=there, other=0.0)
                    weights, _, d_raw = tile_gradients(
                        weights, slopes, seen, square, slope, delta, d_out, v, outputs, value, nr, nk, V, v_r, v_c,
                        seed, bh, r0, k0, rows, keys, threshold, keeping,
                        FAMILY, KIND, RULE, DROPOUT, PRECISION, WIDE, BK, visit == 1,
                    )  # fmt: skip
                    read_by_key = tl.trans(weights.to(d_out.dtype))
                    d_values += tl.dot(read_by_key, d_out, input_precision=PRECISION, out_dtype=WIDE)
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


# Auxiliary outputs ----------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["scale", "softcap", "alpha"])
def fields(
    query, key, weight, rest, statistic, peaks, sums, entropies, best, best_key,
    q_b, q_h, q_r, q_c, k_b, k_h, k_r, k_c, w_b, w_h,
    start, stop, s_b, s_h, s_r, lists, n_b, n_h, n_r, tiles, words, t_b, t_h, t_r, bias, b_b, b_h, b_r, b_c,
    H, R, L, S, C, blocks, scale, softcap, alpha,
    FAMILY: tl.constexpr, KIND: tl.constexpr, RULE: tl.constexpr, SOFTCAP: tl.constexpr,
    SPANS: tl.constexpr, BITS: tl.constexpr, BIAS: tl.constexpr, LISTS: tl.constexpr, HIDES: tl.constexpr,
    MAX: tl.constexpr, LSE: tl.constexpr, ENTROPY: tl.constexpr, TOPK: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr,
    BM: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Write the largest scores, log-sum-exps and entropies (B, H, L) of BQ queries, and TOPK best scores and keys.

    These are in no order, and −∞ with key −1 beyond the keys that a query sees. ``statistic`` is that of rows; softmax'
    counts the sink.
    """
    scale, softcap, alpha = real(scale, WIDE), real(softcap, WIDE), real(alpha, WIDE)
    own = (blocks - 1 - tl.program_id(0) % blocks).to(tl.int64)
    block, part = own * BQ // BM, own * BQ % BM
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = bh // H, bh % H
    r0 = own * BQ
    nr, rows, keys = (L - r0).to(tl.int32), tl.arange(0, BQ), tl.arange(0, BN)
    query += b * q_b + h * q_h + r0 * q_r
    key += b * k_b + h // R * k_h
    weight += b * w_b + h * w_h
    rest += b * w_b + h * w_h
    there, own_rows = rows < nr, bh * L + r0 + rows
    q = 0
    if FAMILY == DOT:
        q = load_rows(query, rows, nr, q_r, C, q_c, BC, True)
    shift, offset = row_statistic(statistic, own_rows, there, RULE, False, WIDE)
    if LISTS:
        lists += b * n_b + h * n_h + block * n_r
        full, last = tl.load(lists), tl.load(lists + 1)
    else:
        full, last = S // BN, (S + BN - 1) // BN
    if HIDES:
        full = full * 0
    bad, peak = tl.zeros((BQ,), tl.int32), tl.full((BQ,), float("-inf"), WIDE)
    total, entropy = tl.zeros((BQ,), WIDE), tl.zeros((BQ,), WIDE)
    slots: tl.constexpr = TOPK if TOPK else 1
    top, top_key = tl.full((BQ, slots), float("-inf"), WIDE), tl.full((BQ, slots), -1, tl.int32)
    for visit in tl.static_range(HIDES, 2):
        for tile in range(full * visit, last * visit + full * (1 - visit)):
            col = bh * 0 + (tl.load(lists + 2 + tile) if LISTS else tile)
            k0 = col * BN
            nk, key_k = (S - k0).to(tl.int32), key + k0 * k_r
            k = load_rows(key_k, keys, nk, k_r, C, k_c, BC, visit == 1) if FAMILY == DOT else 0
            scores, _, _, _ = tile_scores(
                q, k, query, key_k, weight, rest, b, h, r0, k0, rows, keys, block, col, part, nr, nk, C,
                q_r, q_c, k_r, k_c, scale, softcap, start, stop, s_b, s_h, s_r, tiles, words, t_b, t_h, t_r,
                bias, b_b, b_h, b_r, b_c, FAMILY, KIND, SOFTCAP, SPANS, BITS, BIAS, PRECISION, WIDE,
                BQ, BN, BK, BM, W, visit == 1,
            )  # fmt: skip
            if ENTROPY:
                weights, _ = row_weights(scores, shift, offset, k0, keys, alpha, RULE, False, WIDE)
                none = weights == 0
                if RULE == SOFTMAX:
                    logs = tl.where(none, 0.0, scores - shift[:, None])
                else:
                    logs = tl.log(tl.where(none, 1.0, weights))
                entropy += tl.sum(weights * logs, 1)
            flaws = scores != scores
            bad = tl.maximum(bad, tl.max(flaws.to(tl.int32), 1))
            scores = tl.where(flaws, float("-inf"), scores)
            largest = tl.max(scores, 1)
            if LSE:
                new = tl.maximum(peak, largest)
                safe = tl.where(new == float("-inf"), 0.0, new)
                total = total * tl.exp(peak - safe) + tl.sum(tl.exp(scores - safe[:, None]), 1)
            peak = tl.maximum(peak, largest)
            if TOPK:  # exchange the smallest of the best for the largest of the tile, while that is larger
                places, least = tl.arange(0, slots), tl.min(top, 1)
                while tl.max(tl.where(largest > least, 1, 0), 0) == 1:
                    taken = tl.min(tl.where(scores == largest[:, None], keys[None, :], BN), 1)
                    slot = tl.min(tl.where(top == least[:, None], places[None, :], slots), 1)
                    here = (largest > least)[:, None] & (places[None, :] == slot[:, None])
                    top = tl.where(here, largest[:, None], top)
                    top_key = tl.where(here, (k0 + taken).to(tl.int32)[:, None], top_key)
                    scores = tl.where(keys[None, :] == taken[:, None], float("-inf"), scores)
                    least, largest = tl.min(top, 1), tl.max(scores, 1)
    flawed = tl.where(bad == 1, float("nan"), 0.0)
    if MAX:
        tl.store(peaks + own_rows, peak + flawed, mask=there)
    if LSE:
        safe = tl.where(peak == float("-inf"), 0.0, peak)
        found = tl.where(peak == float("-inf"), peak, safe + tl.log(tl.where(total == 0, 1.0, total)))
        tl.store(sums + own_rows, found + flawed, mask=there)
    if ENTROPY:
        tl.store(entropies + own_rows, -entropy, mask=there)
    if TOPK:
        at = own_rows[:, None] * slots + tl.arange(0, slots)[None, :]
        tl.store(best + at, top, mask=there[:, None])
        tl.store(best_key + at, top_key, mask=there[:, None])


@triton.jit(do_not_specialize=["scale", "softcap", "alpha"])
def received(
    query, key, weight, rest, statistic, totals,
    q_b, q_h, q_r, q_c, k_b, k_h, k_r, k_c, w_b, w_h,
    start, stop, s_b, s_h, s_r, lists, n_b, n_h, n_r, tiles, words, t_b, t_h, t_r, bias, b_b, b_h, b_r, b_c,
    H, R, L, S, C, blocks, scale, softcap, alpha,
    FAMILY: tl.constexpr, KIND: tl.constexpr, RULE: tl.constexpr, SOFTCAP: tl.constexpr,
    SPANS: tl.constexpr, BITS: tl.constexpr, BIAS: tl.constexpr, LISTS: tl.constexpr, HIDES: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr,
    BM: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Write the sum of weights (B, H, S) of a block of keys over the queries of a head."""
    scale, softcap, alpha = real(scale, WIDE), real(softcap, WIDE), real(alpha, WIDE)
    col = (tl.program_id(0) % blocks).to(tl.int64)
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = bh // H, bh % H
    k0 = col * BN
    nk, rows, keys = (S - k0).to(tl.int32), tl.arange(0, BQ), tl.arange(0, BN)
    query += b * q_b + h * q_h
    key += b * k_b + h // R * k_h + k0 * k_r
    weight += b * w_b + h * w_h
    rest += b * w_b + h * w_h
    k = 0
    if FAMILY == DOT:
        k = load_rows(key, keys, nk, k_r, C, k_c, BC, True)
    if LISTS:
        lists += b * n_b + h * n_h + col * n_r
        full, last = tl.load(lists), tl.load(lists + 1)
    else:
        last = (L + BM - 1) // BM
        full = tl.where(nk >= BN, L // BM, 0)
    if HIDES:
        full = full * 0
    total = tl.zeros((BN,), WIDE)
    for visit in tl.static_range(HIDES, 2):
        for step in range(full * visit * (BM // BQ), (last * visit + full * (1 - visit)) * (BM // BQ)):
            place, part = step // (BM // BQ), step % (BM // BQ) * BQ
            block = bh * 0 + (tl.load(lists + 2 + place) if LISTS else place)
            r0 = block * BM + part
            nr = (L - r0).to(tl.int32)
            query_r = query + r0 * q_r
            q = load_rows(query_r, rows, nr, q_r, C, q_c, BC, True) if FAMILY == DOT else 0
            scores, seen, _, _ = tile_scores(
                q, k, query_r, key, weight, rest, b, h, r0, k0, rows, keys, block, col, part, nr, nk, C,
                q_r, q_c, k_r, k_c, scale, softcap, start, stop, s_b, s_h, s_r, tiles, words, t_b, t_h, t_r,
                bias, b_b, b_h, b_r, b_c, FAMILY, KIND, SOFTCAP, SPANS, BITS, BIAS, PRECISION, WIDE,
                BQ, BN, BK, BM, W, visit == 1,
            )  # fmt: skip
            shift, offset = row_statistic(statistic, bh * L + r0 + rows, rows < nr, RULE, False, WIDE)
            weights, _ = row_weights(scores, shift, offset, k0, keys, alpha, RULE, False, WIDE)
            if visit == 1:
                weights = tl.where(seen, weights, 0.0)
            total += tl.sum(weights, 0)
    tl.store(totals + bh * S + k0 + keys, total, mask=keys < nk)
