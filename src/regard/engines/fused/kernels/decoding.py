"""A step of decoding: what few queries read of rows that tables name, and sums over logits."""

from __future__ import annotations

import math

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from regard.engines.fused.kernels.arguments import kernel
from regard.engines.fused.kernels.basics import FAST, at, exp, log, number
from regard.engines.fused.kernels.forward import row_max
from regard.engines.fused.kernels.linear import VECTOR, splat

#: Keys that go through a loop together.
TOGETHER = 4


def _vector(kind, context):
    """Return the number of lanes, the type of a register, and the bytes of a number."""
    size = 4 if kind == types.float32 else 8
    lanes = VECTOR // size
    return lanes, ir.VectorType(context.get_value_type(kind), lanes), size


@intrinsic
def lanes_of(typingctx, x):
    """Return how many numbers a register has."""

    def codegen(context, builder, signature, args):
        return ir.IntType(64)(_vector(x.dtype, context)[0])

    return types.int64(x), codegen


def _loop(builder, count, step, sums):
    """Open a loop over multiples of ``step`` below ``count`` that carries sums; return the counter, sums and blocks."""
    whole, entry = ir.IntType(64), builder.block
    head, body, done = (builder.append_basic_block(f"rows.{name}") for name in ("head", "body", "done"))
    builder.branch(head)
    builder.position_at_end(head)
    d = builder.phi(whole)
    d.add_incoming(whole(0), entry)
    carried = []
    for value in sums:
        each = builder.phi(value.type)
        each.add_incoming(value, entry)
        carried.append(each)
    builder.cbranch(builder.icmp_signed("<", d, count), body, done)
    builder.position_at_end(body)

    def close(values):
        for each, value in zip(carried, values):
            each.add_incoming(value, builder.block)
        d.add_incoming(builder.add(d, whole(step)), builder.block)
        builder.branch(head)
        builder.position_at_end(done)

    return d, carried, close


@intrinsic
def products(typingctx, s, scale, q, k0, k1, k2, k3, count):
    """Write ``scale · q·k`` of four keys, whose width is a whole number of registers."""
    kind = q.dtype

    def codegen(context, builder, signature, args):
        s, scale, q, *keys, count = args
        lanes, vector, size = _vector(kind, context)

        def load(base, place):
            return builder.load(builder.bitcast(builder.gep(base, [place]), vector.as_pointer()), align=size)

        zero = ir.Constant(vector, [0.0] * lanes)
        d, sums, close = _loop(builder, count, lanes, [zero] * TOGETHER)
        query = load(q, d)
        terms = [builder.fmul(query, load(key, d), flags=("contract",)) for key in keys]
        close([builder.fadd(each, term, flags=("contract",)) for each, term in zip(sums, terms)])
        for n, each in enumerate(sums):
            total = _reduced(builder, "fadd", vector, each, ir.Constant(vector.element, 0.0))
            builder.store(builder.fmul(scale, total), builder.gep(s, [ir.IntType(64)(n)]), align=size)
        return context.get_dummy_value()

    return types.void(s, scale, q, k0, k1, k2, k3, types.int64), codegen


def _reduced(builder, name, vector, value, *begin):
    """Return what LLVM's reduction of a name makes of a register."""
    real = vector.element
    kind = f"v{vector.count}{'f32' if real == ir.FloatType() else 'f64'}"
    function = ir.FunctionType(real, [*(each.type for each in begin), vector])
    reduce = builder.module.declare_intrinsic(f"llvm.vector.reduce.{name}.{kind}", fnty=function)
    return builder.call(reduce, [*begin, value], fastmath=("reassoc",))


@intrinsic
def below_peak(typingctx, s, count):
    """Subtract from each of a whole number of registers of numbers the largest of all."""
    kind = s.dtype

    def codegen(context, builder, signature, args):
        s, count = args
        lanes, vector, size = _vector(kind, context)

        def place(d):
            return builder.bitcast(builder.gep(s, [d]), vector.as_pointer())

        pair = ir.FunctionType(vector, [vector, vector])
        maximum = builder.module.declare_intrinsic(f"llvm.maximum.v{lanes}f{8 * size}", fnty=pair)
        d, (peak,), close = _loop(builder, count, lanes, [ir.Constant(vector, [-math.inf] * lanes)])
        close([builder.call(maximum, [peak, builder.load(place(d), align=size)])])
        wide = splat(builder, vector, _reduced(builder, "fmaximum", vector, peak))
        d, _, close = _loop(builder, count, lanes, [])
        builder.store(builder.fsub(builder.load(place(d), align=size), wide), place(d), align=size)
        close([])
        return context.get_dummy_value()

    return types.void(s, types.int64), codegen


@intrinsic
def total_of(typingctx, s, count):
    """Return the sum of a whole number of registers of numbers."""
    kind = s.dtype

    def codegen(context, builder, signature, args):
        s, count = args
        lanes, vector, size = _vector(kind, context)
        d, (total,), close = _loop(builder, count, lanes, [ir.Constant(vector, [0.0] * lanes)])
        place = builder.bitcast(builder.gep(s, [d]), vector.as_pointer())
        close([builder.fadd(total, builder.load(place, align=size))])
        return _reduced(builder, "fadd", vector, total, ir.Constant(vector.element, 0.0))

    return kind(s, types.int64), codegen


@intrinsic
def add_values(typingctx, o, a0, a1, a2, a3, v0, v1, v2, v3, count):
    """Add ``Σ a v`` of four values, whose width is a whole number of registers."""
    kind = o.dtype

    def codegen(context, builder, signature, args):
        o, (weights, values), count = args[0], (args[1:5], args[5:9]), args[9]
        lanes, vector, size = _vector(kind, context)

        def place(base, d):
            return builder.bitcast(builder.gep(base, [d]), vector.as_pointer())

        wide = [splat(builder, vector, each) for each in weights]
        d, _, close = _loop(builder, count, lanes, [])
        total = builder.load(place(o, d), align=size)
        for weight, value in zip(wide, values):
            term = builder.fmul(weight, builder.load(place(value, d), align=size), flags=("contract",))
            total = builder.fadd(total, term, flags=("contract",))
        builder.store(total, place(o, d), align=size)
        close([])
        return context.get_dummy_value()

    return types.void(o, a0, a1, a2, a3, v0, v1, v2, v3, types.int64), codegen


@njit(**FAST)
def dot(a, b, count):
    """Return ``Σ a b``."""
    total = number(0.0, a)
    for d in range(count):
        total += a[d] * b[d]
    return total


@njit(**FAST)
def scores(q, k, kv_row, rows, n, D, scale, s):
    """Write ``scale · q·k`` for each of n keys, and others behind them."""
    if D % lanes_of(q) == 0:
        for t in range(0, n, TOGETHER):
            last = n - 1  # whose product stands behind it, too
            k0, k1 = at(k, rows[t] * kv_row), at(k, rows[min(t + 1, last)] * kv_row)
            k2, k3 = at(k, rows[min(t + 2, last)] * kv_row), at(k, rows[min(t + 3, last)] * kv_row)
            products(at(s, t), scale, q, k0, k1, k2, k3, D)
    else:
        for t in range(n):
            s[t] = scale * dot(q, at(k, rows[t] * kv_row), D)


@njit(**FAST)
def weighted_sum(o, v, kv_row, rows, n, D, s, scale):
    """Write ``Σ scale · s v`` over n values; s is 0 behind them."""
    for d in range(D):
        o[d] = number(0.0, o)
    if D % lanes_of(o) == 0:
        for t in range(0, n, TOGETHER):
            last = n - 1
            a0, a1, a2, a3 = scale * s[t], scale * s[t + 1], scale * s[t + 2], scale * s[t + 3]
            v0, v1 = at(v, rows[t] * kv_row), at(v, rows[min(t + 1, last)] * kv_row)
            v2, v3 = at(v, rows[min(t + 2, last)] * kv_row), at(v, rows[min(t + 3, last)] * kv_row)
            add_values(o, a0, a1, a2, a3, v0, v1, v2, v3, D)
    else:
        for t in range(n):
            weight, value = scale * s[t], at(v, rows[t] * kv_row)
            for d in range(D):
                o[d] += weight * value[d]


@njit(**FAST)
def sum_of_exponentials(x, count, peak):
    """Return ``Σ exp(x − peak)``."""
    total = number(0.0, x)
    for j in range(count):
        total += exp(x[j] - peak)
    return total


@kernel(
    *("real*", "int", "real*", "real*", "int", "int*", "int*", "int", "int*"),
    *("int", "int", "int", "int", "int", "real", "real*", "int", "real*"),
)
def read_rows(q, q_row, k, v, kv_row, which, table, table_row, counts, first, last, H, G, D, scale, out, out_row, s):
    """Write softmax(scale · q kᵀ) v for queries ``first`` to ``last``, each of H heads of width D.

    Query r reads the rows of keys and values that row ``which[r]`` of the table begins with, as many as its count
    says; heads of keys are G. ``s`` has room for the scores of all its heads, each of a whole number of registers.
    """
    for r in range(first, last):
        n = counts[which[r]]
        width = n + -n % lanes_of(q)
        rows = at(table, which[r] * table_row)
        for h in range(H):
            line = at(s, h * width)
            scores(at(q, r * q_row + h * D), at(k, h // (H // G) * D), kv_row, rows, n, D, scale, line)
            for t in range(n, width):
                line[t] = -number(math.inf, q)
            below_peak(line, width)
        for j in range(H * width):
            s[j] = exp(s[j])
        for h in range(H):
            line, o = at(s, h * width), at(out, r * out_row + h * D)
            weighted_sum(o, at(v, h // (H // G) * D), kv_row, rows, n, D, line, number(1.0, q) / total_of(line, width))


@kernel("real*", "int", "int", "int", "int", "int", "real*", "real*")
def log_sums(x, x_row, first, last, N, run, total, maxima):
    """Write log Σ exp of rows ``first`` to ``last`` of N numbers, and the maximum of each run of so many of them."""
    runs = (N + run - 1) // run
    infinity = number(math.inf, x)
    for r in range(first, last):
        row, peaks = at(x, r * x_row), at(maxima, r * runs)
        for j in range(runs):
            peaks[j] = row_max(row, j * run, min((j + 1) * run, N))
        peak = row_max(peaks, 0, runs)
        total[r] = peak if abs(peak) == infinity else peak + log(sum_of_exponentials(row, N, peak))
