"""The product that everything linear is made of: its sums stay in registers, which LLVM does not find by itself."""

from __future__ import annotations

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from regard.engines.fused.kernels.arguments import ROW
from regard.engines.fused.kernels.basics import FAST, at, number

#: Steps that are summed up before they are added to the rest: partial sums keep the error of a long sum small.
PARTIAL = 128


def _vector_bytes():
    from llvmlite import binding

    try:
        features = binding.get_host_cpu_features()
    except RuntimeError:  # not available on every system
        return 16
    return 64 if features.get("avx512f") else 32 if features.get("avx2") else 16


#: Bytes of a vector register, and how many vectors wide the sums of four rows are: with 32 registers 16, else 8.
VECTOR = _vector_bytes()
WIDE = 4 if VECTOR == 64 else 2


def splat(builder, vector, value):
    """Return a register of a number alone."""
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.IntType(32)(0))
    mask = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), [0] * vector.count)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), mask)


def _panel(rows, vectors):
    """Return the product for a number of rows and of vectors of lanes."""

    @intrinsic
    def panel(typingctx, y, y_row, x, x_row, c, c_row, c_col, steps):
        kind = y.dtype
        lanes = VECTOR // (4 if kind == types.float32 else 8)

        def codegen(context, builder, signature, args):
            y, y_row, x, x_row, c, c_row, c_col, steps = args
            real, whole = context.get_value_type(kind), ir.IntType(64)
            vector = ir.VectorType(real, lanes)
            size = 4 if kind == types.float32 else 8

            def place(base, row, n):
                return builder.bitcast(builder.gep(base, [builder.add(row, whole(n * lanes))]), vector.as_pointer())

            entry = builder.block
            head = builder.append_basic_block("panel.head")
            body = builder.append_basic_block("panel.body")
            done = builder.append_basic_block("panel.done")
            builder.branch(head)
            builder.position_at_end(head)
            t = builder.phi(whole)
            sums = [[builder.phi(vector) for _ in range(vectors)] for _ in range(rows)]
            t.add_incoming(whole(0), entry)
            for line in sums:
                for each in line:
                    each.add_incoming(ir.Constant(vector, [0.0] * lanes), entry)
            builder.cbranch(builder.icmp_signed("<", t, steps), body, done)
            builder.position_at_end(body)
            row = builder.mul(t, x_row)
            values = [builder.load(place(x, row, n), align=size) for n in range(vectors)]
            column = builder.mul(t, c_col)
            for m in range(rows):
                coefficient = builder.load(builder.gep(c, [builder.add(builder.mul(c_row, whole(m)), column)]))
                wide = splat(builder, vector, coefficient)
                for n in range(vectors):
                    term = builder.fmul(wide, values[n], flags=("contract",))
                    sums[m][n].add_incoming(builder.fadd(sums[m][n], term, flags=("contract",)), body)
            t.add_incoming(builder.add(t, whole(1)), body)
            builder.branch(head)
            builder.position_at_end(done)
            for m in range(rows):
                for n in range(vectors):
                    target = place(y, builder.mul(y_row, whole(m)), n)
                    builder.store(builder.fadd(builder.load(target, align=size), sums[m][n]), target, align=size)
            return context.get_dummy_value()

        step = types.int64
        return types.void(y, step, x, step, c, step, step, step), codegen

    return panel


def _width(y):
    """Return how many lanes a vector has."""


@overload(_width, inline="always")
def _(y):
    lanes = VECTOR // (4 if y.dtype == types.float32 else 8)
    return lambda y: lanes  # noqa: ARG005


def _product(rows):
    wide, narrow = _panel(rows, WIDE), _panel(rows, 1)

    @njit(**FAST)
    def product(y, y_row, x, x_row, c, c_row, c_col, steps, lanes):
        """Add ``Σ_n c[m, n] · x_n`` to rows y_m for all ``steps`` n; c[m, n] is c[m·c_row + n·c_col].

        ``lanes``, the length of the rows x_n and y_m, is a whole number of vectors.
        """
        width = _width(y)
        for first in range(0, steps, PARTIAL):
            count = min(PARTIAL, steps - first)
            source, factors = at(x, first * x_row), at(c, first * c_col)
            j = 0
            for _ in range(lanes // (WIDE * width)):
                wide(at(y, j), y_row, at(source, j), x_row, factors, c_row, c_col, count)
                j += WIDE * width
            for _ in range((lanes - j) // width):
                narrow(at(y, j), y_row, at(source, j), x_row, factors, c_row, c_col, count)
                j += width

    return product


#: For the four rows of a group, and for one that is left.
product, product_of_one = _product(4), _product(1)


@njit(**FAST)
def contract(o, o_row, p, x, lanes):
    """Add ``Σ_j p_m[j] · x[j]`` to o[m], for four rows p_m of keys."""
    p0, p1, p2, p3 = at(p, 0), at(p, ROW), at(p, 2 * ROW), at(p, 3 * ROW)
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
