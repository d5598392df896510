"""What kernels are written in: addresses, numbers of the right type, and elementary functions that vectorize."""

from __future__ import annotations

import math

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

# LLVM turns a loop into vectors where it can prove that its arrays do not overlap. Rows at a constant distance from
# one base are one array to it: so tiles are packed into scratch memory with constant row distances.


#: Sums may be reordered, products contracted; NaN and infinity are what they are.
FAST = {"nogil": True, "error_model": "numpy", "fastmath": {"contract", "nsz", "reassoc"}, "_nrt": False}
#: Where the order of operations is the point.
EXACT = {"nogil": True, "error_model": "numpy", "fastmath": {"contract", "nsz"}, "_nrt": False}


@intrinsic
def at(typingctx, pointer, offset):
    """Return the pointer moved by ``offset`` elements."""

    def codegen(context, builder, signature, args):
        return builder.gep(args[0], [args[1]])

    return pointer(pointer, types.int64), codegen


@intrinsic
def address(typingctx, number, like):
    """Return the integer as a pointer of the type of ``like``."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(like))

    return like(types.int64, like), codegen


@intrinsic
def byte_address(typingctx, number):
    """Return the integer as a pointer to bytes."""
    pointer = types.CPointer(types.uint8)

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(pointer))

    return pointer(types.int64), codegen


@intrinsic
def number(typingctx, value, like):
    """Return a number in the type of ``like``, which is a number or a pointer to such."""
    kind = like.dtype if isinstance(like, types.CPointer) else like

    def codegen(context, builder, signature, args):
        return context.cast(builder, args[0], signature.args[0], kind)

    return kind(value, like), codegen


def _bits(kind):
    return (ir.IntType(32), 127, 23) if kind == types.float32 else (ir.IntType(64), 1023, 52)


@intrinsic
def power_of_two(typingctx, n):
    """Return 2ⁿ for a whole number n given as a real."""

    def codegen(context, builder, signature, args):
        whole, bias, shift = _bits(n)
        small = builder.fptosi(args[0], ir.IntType(32))  # AVX2 converts to 32 bits alone
        wide = small if n == types.float32 else builder.sext(small, whole)
        return builder.bitcast(builder.shl(builder.add(wide, whole(bias)), whole(shift)), context.get_value_type(n))

    return n(n), codegen


@intrinsic
def exponent(typingctx, x):
    """Return the n of ``x = m · 2ⁿ`` with m in [½, 1), as a real, for normal x > 0."""

    def codegen(context, builder, signature, args):
        whole, bias, shift = _bits(x)
        bits = builder.bitcast(args[0], whole)
        n = builder.sub(builder.lshr(bits, whole(shift)), whole(bias - 1))
        n = n if x == types.float32 else builder.trunc(n, ir.IntType(32))
        return builder.sitofp(n, context.get_value_type(x))

    return x(x), codegen


@intrinsic
def floor(typingctx, x):
    """Return the largest whole number ≤ x, as a real."""

    def codegen(context, builder, signature, args):
        return builder.call(builder.module.declare_intrinsic("llvm.floor", [args[0].type]), [args[0]])

    return x(x), codegen


@intrinsic
def fused_multiply_add(typingctx, x, y, z):
    """Return ``x y + z``, rounded once; unlike the sum of two products, it is not factored."""

    def codegen(context, builder, signature, args):
        return builder.fma(*args)

    return x(x, x, x), codegen


@intrinsic
def maximum(typingctx, x, y):
    """Return the larger number, NaN if either is; unlike a comparison, it vectorizes as a reduction over a loop."""

    def codegen(context, builder, signature, args):
        kind = args[0].type
        function = builder.module.declare_intrinsic("llvm.maximum", [kind], ir.FunctionType(kind, [kind, kind]))
        return builder.call(function, args)

    return x(x, x), codegen


def _polynomial(degree, coefficient, name):
    """Return a function Σ coefficient(k) xᵏ by Horner's rule, its terms written out."""
    body = repr(float(coefficient(degree)))
    for k in range(degree - 1, -1, -1):
        body = f"number({body}, x) * x + number({float(coefficient(k))!r}, x)"
    scope = {"number": number}
    exec(f"def {name}(x):\n    return {body}\n", scope)
    return njit(**EXACT)(scope[name])


# (eˣ − 1 − x) / x² on ±½ ln 2, to one rounding: Taylor's terms, as many as the type needs.
_exp_single = _polynomial(5, lambda k: 1 / math.factorial(k + 2), "exp_single")
_exp_double = _polynomial(11, lambda k: 1 / math.factorial(k + 2), "exp_double")
# (atanh f / f − 1) / f² for |f| < 0.172, in f².
_log_single = _polynomial(4, lambda k: 1 / (2 * k + 3), "log_single")
_log_double = _polynomial(10, lambda k: 1 / (2 * k + 3), "log_double")

_SPLIT = {types.float32: (0.693359375, -2.12194440e-4), types.float64: (0.693145751953125, 1.42860682030941723212e-6)}
_LOWEST = {types.float32: -87.0, types.float64: -708.0}
_BEYOND = {types.float32: 20.0, types.float64: 44.0}


def _exp_tail(x):
    """Return (eˣ − 1 − x) / x² near 0."""


def _log_tail(x):
    """Return (atanh f / f − 1) / f² at x = f²."""


def _constant(table):
    def constant(x):
        """Return the constant for the type of x."""

    @overload(constant, jit_options=EXACT, inline="always")
    def _(x):
        value = table[x]
        return lambda x: number(value, x)

    return constant


@overload(_exp_tail, jit_options=EXACT)
def _(x):
    function = _exp_single if x == types.float32 else _exp_double
    return lambda x: function(x)


@overload(_log_tail, jit_options=EXACT)
def _(x):
    function = _log_single if x == types.float32 else _log_double
    return lambda x: function(x)


_high = _constant({kind: split[0] for kind, split in _SPLIT.items()})
_low = _constant({kind: split[1] for kind, split in _SPLIT.items()})
_lowest = _constant(_LOWEST)
_beyond = _constant(_BEYOND)


@njit(**EXACT)
def exp(x):
    """Return eˣ for x ≤ 88, to about one rounding; 0 where it would be subnormal."""
    n = floor(x * number(1.4426950408889634, x) + number(0.5, x))
    f = x - n * _high(x)
    f = f - n * _low(x)
    e = number(1.0, x) + (f + f * f * _exp_tail(f))
    e = e * power_of_two(n)
    return number(0.0, x) if x < _lowest(x) else e


@njit(**EXACT)
def tanh(x):
    """Return tanh x to a few roundings, relative also near 0."""
    y = number(2.0, x) * abs(x)
    y = _beyond(x) if y > _beyond(x) else y
    n = floor(y * number(1.4426950408889634, x) + number(0.5, x))
    f = y - n * _high(x)
    f = f - n * _low(x)
    s = power_of_two(n)
    m = s * (f + f * f * _exp_tail(f)) + (s - number(1.0, x))  # e^y − 1
    t = m / (m + number(2.0, x))
    return -t if x < number(0.0, x) else t


@njit(**EXACT)
def log(x):
    """Return ln x for normal x > 0 to about one rounding."""
    n = exponent(x)
    m = x * power_of_two(-n)  # in [½, 1)
    low = m < number(0.7071067811865476, x)
    n = n - number(1.0, x) if low else n
    m = m + m if low else m
    f = (m - number(1.0, x)) / (m + number(1.0, x))
    g = f * f
    r = number(2.0, x) * f
    return n * _high(x) + (r + (r * g * _log_tail(g) + n * _low(x)))


@njit(**EXACT)
def log_of_rest(r):
    """Return ln(1 − r) for 0 ≤ r < 1 to about one rounding, relative also near 0."""
    f = -r / (number(2.0, r) - r)
    g = f * f
    near = number(2.0, r) * (f + f * g * _log_tail(g))
    return near if r < number(0.25, r) else log(number(1.0, r) - r)


@njit(**FAST)
def fill(target, count, value):
    """Set ``count`` numbers."""
    for i in range(count):
        target[i] = value


@njit(**FAST)
def pack_rows(source, source_row, rows, lanes, target, target_row, padded):
    """Copy rows into scratch memory, each filled up with zeros to ``padded`` lanes."""
    zero = number(0.0, source)
    for row in range(rows):
        s, t = at(source, row * source_row), at(target, row * target_row)
        for i in range(lanes):
            t[i] = s[i]
        for i in range(lanes, padded):
            t[i] = zero


@njit(**FAST)
def add_rows(source, source_row, rows, lanes, target, target_row):
    """Add rows of scratch memory to an array."""
    for row in range(rows):
        s, t = at(source, row * source_row), at(target, row * target_row)
        for i in range(lanes):
            t[i] += s[i]
