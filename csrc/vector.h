// Vectors of the compiler (GCC's and Clang's extension) and what is written in them: loads, selections, sums, and
// elementary functions. A function of `X` works on vectors and on single numbers alike.
//
// Each processor's code is compiled on its own, in a namespace without a name: no instruction of one can end up in
// another's.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if !defined(VECTOR_BYTES)
#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#endif

#define INLINE inline __attribute__((always_inline))
// For loops that need all registers: inlined into a large function, their sums would go through memory.
#define OUTLINE __attribute__((noinline))
#if defined(__clang__)
#define UNROLLED _Pragma("clang loop unroll(full)")
#define TWICE _Pragma("clang loop unroll_count(2)")
#else
#define UNROLLED _Pragma("GCC unroll 16")
#define TWICE _Pragma("GCC unroll 2")
#endif

namespace {

using i64 = int64_t;

// Types of a number T: a vector of it, one in memory that need not be aligned, and their bits.
template <class T>
struct Types;

template <>
struct Types<float> {
  typedef float Vector __attribute__((vector_size(VECTOR_BYTES)));
  typedef float Loose __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
  typedef uint32_t BitVector __attribute__((vector_size(VECTOR_BYTES)));
  using Bits = uint32_t;
};

template <>
struct Types<double> {
  typedef double Vector __attribute__((vector_size(VECTOR_BYTES)));
  typedef double Loose __attribute__((vector_size(VECTOR_BYTES), aligned(8), may_alias));
  typedef uint64_t BitVector __attribute__((vector_size(VECTOR_BYTES)));
  using Bits = uint64_t;
};

template <class T>
using Vector = typename Types<T>::Vector;

// The number of lanes of a vector.
template <class T>
constexpr i64 WIDTH = VECTOR_BYTES / sizeof(T);

// The number type of X, and the type of its bits.
template <class X>
struct Of;
template <>
struct Of<float> {
  using Real = float;
  using Bits = uint32_t;
};
template <>
struct Of<double> {
  using Real = double;
  using Bits = uint64_t;
};
template <>
struct Of<Vector<float>> {
  using Real = float;
  using Bits = Types<float>::BitVector;
};
template <>
struct Of<Vector<double>> {
  using Real = double;
  using Bits = Types<double>::BitVector;
};
template <class X>
using Real = typename Of<X>::Real;

template <class X>
INLINE X load(const Real<X>* p) {
  if constexpr (sizeof(X) == sizeof(Real<X>))
    return *p;
  else
    return *reinterpret_cast<const typename Types<Real<X>>::Loose*>(p);
}

template <class T>
INLINE void store(T* p, T x) {
  *p = x;
}
INLINE void store(float* p, Vector<float> x) { *reinterpret_cast<Types<float>::Loose*>(p) = x; }
INLINE void store(double* p, Vector<double> x) { *reinterpret_cast<Types<double>::Loose*>(p) = x; }

// A number in every lane.
template <class X>
INLINE X wide(Real<X> x) {
  return x - X{};
}

template <class To, class From>
INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

template <class X>
INLINE X absolute(X x) {
  using B = typename Of<X>::Bits;
  using Bits = typename Types<Real<X>>::Bits;
  constexpr Bits all = ~Bits{0} >> 1;
  return bits_as<X>(bits_as<B>(x) & all);
}

// A product that several sums share: the compiler would rather repeat it within each.
template <class X>
INLINE X product_alone(X x) {
#if defined(__x86_64__)
  asm("" : "+x"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
  return x;
}

template <class X>
INLINE X smaller(X x, X y) {
  return x < y ? x : y;
}
template <class X>
INLINE X larger(X x, X y) {
  return x > y ? x : y;
}

// x y + z, rounded once; and the larger of two: one instruction each, which the compiler does not find by itself.
#if defined(__AVX512F__) && VECTOR_BYTES == 64
INLINE Vector<float> fused_multiply_add(Vector<float> x, Vector<float> y, Vector<float> z) {
  return _mm512_fmadd_ps(x, y, z);
}
INLINE Vector<double> fused_multiply_add(Vector<double> x, Vector<double> y, Vector<double> z) {
  return _mm512_fmadd_pd(x, y, z);
}
INLINE Vector<float> larger(Vector<float> x, Vector<float> y) { return _mm512_max_ps(x, y); }
INLINE Vector<double> larger(Vector<double> x, Vector<double> y) { return _mm512_max_pd(x, y); }
#elif defined(__FMA__) && VECTOR_BYTES == 32
INLINE Vector<float> fused_multiply_add(Vector<float> x, Vector<float> y, Vector<float> z) {
  return _mm256_fmadd_ps(x, y, z);
}
INLINE Vector<double> fused_multiply_add(Vector<double> x, Vector<double> y, Vector<double> z) {
  return _mm256_fmadd_pd(x, y, z);
}
INLINE Vector<float> larger(Vector<float> x, Vector<float> y) { return _mm256_max_ps(x, y); }
INLINE Vector<double> larger(Vector<double> x, Vector<double> y) { return _mm256_max_pd(x, y); }
#elif defined(__aarch64__) && VECTOR_BYTES == 16
INLINE Vector<float> fused_multiply_add(Vector<float> x, Vector<float> y, Vector<float> z) { return vfmaq_f32(z, x, y); }
INLINE Vector<double> fused_multiply_add(Vector<double> x, Vector<double> y, Vector<double> z) {
  return vfmaq_f64(z, x, y);
}
#else
INLINE Vector<float> fused_multiply_add(Vector<float> x, Vector<float> y, Vector<float> z) {
  for (i64 i = 0; i < WIDTH<float>; ++i) x[i] = float(double(x[i]) * double(y[i]) + double(z[i]));
  return x;
}
INLINE Vector<double> fused_multiply_add(Vector<double> x, Vector<double> y, Vector<double> z) {
  for (i64 i = 0; i < WIDTH<double>; ++i) x[i] = __builtin_fma(x[i], y[i], z[i]);
  return x;
}
#endif

// first, first + 1, … in the lanes.
template <class T>
INLINE Vector<T> lane_numbers(i64 first) {
  Vector<T> x;
  for (i64 i = 0; i < WIDTH<T>; ++i) x[i] = T(first + i);
  return x;
}

#if defined(__AVX512F__) && VECTOR_BYTES == 64
#define LANES(x, y, scalar, test)                                                   \
  if constexpr (sizeof(T) == 4) return _mm512_cmp_ps_mask(x, wide<Vector<T>>(y), test); \
  else return _mm512_cmp_pd_mask(x, wide<Vector<T>>(y), test)
#elif defined(__AVX2__) && VECTOR_BYTES == 32
#define LANES(x, y, scalar, test)                                                                     \
  if constexpr (sizeof(T) == 4) return _mm256_movemask_ps(_mm256_cmp_ps(x, wide<Vector<T>>(y), test)); \
  else return _mm256_movemask_pd(_mm256_cmp_pd(x, wide<Vector<T>>(y), test))
#else
#define LANES(x, y, scalar, test)                                               \
  uint32_t found = 0;                                                           \
  for (i64 i = 0; i < WIDTH<T>; ++i) found |= uint32_t(x[i] scalar y) << i;     \
  return found
#endif

// Which lanes are larger than a number, as bits.
template <class T>
INLINE uint32_t lanes_above(Vector<T> x, T least) {
  LANES(x, least, >, _CMP_GT_OQ);
}

// Which lanes are another number, or NaN.
template <class T>
INLINE uint32_t lanes_other_than(Vector<T> x, T number) {
  LANES(x, number, !=, _CMP_NEQ_UQ);
}

#undef LANES

// Call `body(j, X{})` for all j0 ≤ j < j1, in vectors and then one by one.
template <class T, class Body>
INLINE void over(i64 j0, i64 j1, Body body) {
  i64 j = j0;
  TWICE
  for (; j + WIDTH<T> <= j1; j += WIDTH<T>) body(j, Vector<T>{});
  for (; j < j1; ++j) body(j, T{});
}

// Call `body(j)` for 0 ≤ j < lanes, a whole number of vectors.
template <class T, class Body>
INLINE void over_lanes(i64 lanes, Body body) {
  for (i64 j = 0; j < lanes; j += WIDTH<T>) body(j);
}

template <int N, class X, std::size_t... I>
INLINE X exchanged(X x, std::index_sequence<I...>) {
  return __builtin_shufflevector(x, x, (I ^ N)...);
}

// Combine all lanes, by halves.
template <class T, int N = WIDTH<T> / 2, class Combine>
INLINE T over_lanes_combined(Vector<T> x, Combine combine) {
  if constexpr (N == 0)
    return x[0];
  else
    return over_lanes_combined<T, N / 2>(combine(x, exchanged<N>(x, std::make_index_sequence<WIDTH<T>>())), combine);
}

template <class T>
INLINE T sum_of_lanes(Vector<T> x) {
  return over_lanes_combined<T>(x, [](auto y, auto z) { return y + z; });
}

// A sum over lanes, and over the numbers that are left.
template <class T>
struct Sum {
  Vector<T> lanes{};
  T rest{};

  INLINE void add(Vector<T> x) { lanes += x; }
  INLINE void add(T x) { rest += x; }
  INLINE T total() const { return sum_of_lanes<T>(lanes) + rest; }
};

// Combine numbers by `combine`, four vectors at a time, because each combination waits for the one before.
template <class T, class Combine>
INLINE T combined(const T* s, i64 j0, i64 j1, T neutral, Combine combine) {
  using X = Vector<T>;
  X first = wide<X>(neutral), second = first, third = first, fourth = first;
  i64 j = j0;
  for (; j + 4 * WIDTH<T> <= j1; j += 4 * WIDTH<T>) {
    first = combine(first, load<X>(s + j));
    second = combine(second, load<X>(s + j + WIDTH<T>));
    third = combine(third, load<X>(s + j + 2 * WIDTH<T>));
    fourth = combine(fourth, load<X>(s + j + 3 * WIDTH<T>));
  }
  for (; j + WIDTH<T> <= j1; j += WIDTH<T>) first = combine(first, load<X>(s + j));
  const X all = combine(combine(first, second), combine(third, fourth));
  T found = neutral;
  for (; j < j1; ++j) found = combine(found, s[j]);
  return combine(found, over_lanes_combined<T>(all, combine));
}

// The largest number; NaN counts for nothing.
template <class T>
INLINE T largest_of(const T* s, i64 j0, i64 j1) {
  return combined(s, j0, j1, -std::numeric_limits<T>::infinity(), [](auto x, auto y) { return larger(y, x); });
}

// The largest absolute value; NaN counts for nothing.
template <class T>
INLINE T peak_of(const T* s, i64 count) {
  return combined(s, 0, count, T(0), [](auto x, auto y) { return larger(absolute(y), x); });
}

template <class T>
INLINE T sum_of(const T* s, i64 j0, i64 j1) {
  return combined(s, j0, j1, T(0), [](auto x, auto y) { return x + y; });
}

template <class T>
INLINE void fill(T* target, i64 count, T value) {
  over<T>(0, count, [&](i64 j, auto x) { store(target + j, wide<decltype(x)>(value)); });
}

template <class T>
INLINE void copy(const T* source, T* target, i64 count) {
  over<T>(0, count, [&](i64 j, auto x) { store(target + j, load<decltype(x)>(source + j)); });
}

// Add factor · x to y.
template <class T>
INLINE void add_scaled(T factor, const T* x, T* y, i64 n) {
  over<T>(0, n, [&](i64 c, auto like) {
    store(y + c, load<decltype(like)>(y + c) + factor * load<decltype(like)>(x + c));
  });
}

// Elementary functions -------------------------------------------------------------------------------------------------

// `magic` is 1.5 · 2^m, where m is the number of digits: adding it rounds to whole numbers, which its last bits then
// hold. high + low is ln 2; whole numbers times high are exact.
template <class T>
struct Constants;

template <>
struct Constants<float> {
  static constexpr float magic = 12582912.0f, log2e = 1.4426950408889634f, high = 0.693359375f, low = -2.12194440e-4f;
  static constexpr float lowest = -87.0f, beyond = 20.0f;
  static constexpr int shift = 23;
  static constexpr uint32_t bias = 127;
  // (eˣ − 1 − x) / x² on ±½ ln 2: the polynomial that errs least, by 1e-8 of eˣ.
  static constexpr float exponential[] = {0.5f, 0.16666573f, 0.04166655f, 0.008363774f, 0.0013926927f};
  // (atanh f / f − 1) / f² for |f| < 0.172, in f², to one rounding: Taylor's terms.
  static constexpr float logarithm[] = {1.0f / 3, 1.0f / 5, 1.0f / 7, 1.0f / 9, 1.0f / 11};
};

template <>
struct Constants<double> {
  static constexpr double magic = 6755399441055744.0, log2e = 1.4426950408889634, high = 0.693145751953125;
  static constexpr double low = 1.42860682030941723212e-6, lowest = -708.0, beyond = 44.0;
  static constexpr int shift = 52;
  static constexpr uint64_t bias = 1023;
  static constexpr double exponential[] = {
      0.5,
      0.1666666666666667,
      0.04166666666666667,
      0.008333333333325544,
      0.0013888888888883327,
      0.00019841269876864356,
      2.4801587327007187e-05,
      2.755725283351691e-06,
      2.75572718102198e-07,
      2.5106274733573296e-08,
      2.0915442297780116e-09};
  static constexpr double logarithm[] = {1.0 / 3,  1.0 / 5,  1.0 / 7,  1.0 / 9,  1.0 / 11, 1.0 / 13,
                                         1.0 / 15, 1.0 / 17, 1.0 / 19, 1.0 / 21, 1.0 / 23};
};

// Σ c_k xᵏ, by pairs of terms: as many operations as Horner's rule has, and half as many wait for another.
template <class X, class T, std::size_t N>
INLINE X polynomial(X x, X square, const T (&coefficients)[N]) {
  constexpr int last = (int(N) - 1) / 2 * 2;
  X y = wide<X>(coefficients[last]);
  if constexpr (N % 2 == 0) y = x * coefficients[N - 1] + coefficients[last];
  UNROLLED
  for (int k = last - 2; k >= 0; k -= 2) y = y * square + (x * coefficients[k + 1] + coefficients[k]);
  return y;
}

// x = n ln 2 + f: eᶠ − 1, and 2ⁿ.
template <class X>
struct Reduced {
  X rest, power;
};

template <class X>
INLINE Reduced<X> reduced(X x) {
  using C = Constants<Real<X>>;
  using B = typename Of<X>::Bits;
  const X rounded = x * C::log2e + C::magic;
  const X n = rounded - C::magic;
  X f = x - n * C::high;
  f = f - n * C::low;
  const B power = (bits_as<B>(rounded) << C::shift) + (C::bias << C::shift);
  const X square = f * f;
  return {f + square * polynomial(f, square, C::exponential), bits_as<X>(power)};
}

// eˣ for x ≤ 88, to about one rounding; 0 where it would be subnormal.
template <class X>
INLINE X exponential(X x) {
  using C = Constants<Real<X>>;
  const Reduced<X> r = reduced(x);
  const X e = (Real<X>(1) + r.rest) * r.power;
  return x < C::lowest ? X{} : e;
}

// tanh x to a few roundings, relative also near 0.
template <class X>
INLINE X hyperbolic_tangent(X x) {
  using C = Constants<Real<X>>;
  X y = Real<X>(2) * absolute(x);
  y = y > C::beyond ? wide<X>(C::beyond) : y;
  const Reduced<X> r = reduced(y);
  const X m = r.power * r.rest + (r.power - Real<X>(1));  // e^y − 1
  const X t = m / (m + Real<X>(2));
  return x < Real<X>(0) ? -t : t;
}

// ln x for normal x > 0, to about one rounding.
template <class X>
INLINE X logarithm(X x) {
  using T = Real<X>;
  using C = Constants<T>;
  using B = typename Of<X>::Bits;
  using Bits = typename Types<T>::Bits;
  constexpr Bits fraction = (Bits{1} << C::shift) - 1, half = Bits{C::bias - 1} << C::shift;
  const Bits magic = bits_as<Bits>(C::magic);
  const B bits = bits_as<B>(x);
  // x = m 2ⁿ with m in [½, 1)
  X n = bits_as<X>((bits >> C::shift) - Bits{C::bias - 1} + magic) - C::magic;
  X m = bits_as<X>((bits & fraction) | half);
  const auto low = m < T(0.7071067811865476);
  n = low ? n - T(1) : n;
  m = low ? m + m : m;
  const X f = (m - T(1)) / (m + T(1));
  const X g = f * f, r = T(2) * f;
  return n * C::high + (r + (r * g * polynomial(g, g * g, C::logarithm) + n * C::low));
}

// ln(1 − r) for 0 ≤ r < 1 to about one rounding, relative also near 0.
template <class X>
INLINE X logarithm_of_rest(X r) {
  using T = Real<X>;
  const X f = -r / (T(2) - r);
  const X g = f * f;
  const X near = T(2) * (f + f * g * polynomial(g, g * g, Constants<T>::logarithm));
  const X far = logarithm(T(1) - r);
  return r < T(0.25) ? near : far;
}

template <class X>
INLINE X square_root(X x) {
  if constexpr (sizeof(X) == sizeof(Real<X>)) {
    return sizeof(X) == 4 ? X(__builtin_sqrtf(float(x))) : X(__builtin_sqrt(x));
  } else {
    X y;
    for (i64 i = 0; i < WIDTH<Real<X>>; ++i) y[i] = sizeof(Real<X>) == 4 ? __builtin_sqrtf(x[i]) : __builtin_sqrt(x[i]);
    return y;
  }
}

// Transpose a block of vectors: exchange its halves beside the diagonal, then those of each quarter, and so on.
template <i64 S, class T, std::size_t... I>
INLINE void exchange(Vector<T>& a, Vector<T>& b, std::index_sequence<I...>) {
  const Vector<T> x = a, y = b;
  a = __builtin_shufflevector(x, y, (I & S ? WIDTH<T> + I - S : I)...);
  b = __builtin_shufflevector(x, y, (I & S ? WIDTH<T> + I : I + S)...);
}

template <class T, i64 S = WIDTH<T> / 2>
INLINE void exchange_all(Vector<T> (&rows)[WIDTH<T>]) {
  if constexpr (S > 0) {
    UNROLLED
    for (i64 i = 0; i < WIDTH<T>; ++i)
      if (!(i & S)) exchange<S, T>(rows[i], rows[i + S], std::make_index_sequence<WIDTH<T>>());
    exchange_all<T, S / 2>(rows);
  }
}

// Write the columns of rows, each filled with zeros to `height`, a multiple of a vector's width.
template <class T>
OUTLINE void transpose(
    const T* source, i64 source_row, i64 rows, i64 width, T* target, i64 target_row, i64 height) {
  constexpr i64 W = WIDTH<T>;
  for (i64 j = 0; j < height; j += W)
    for (i64 c = 0; c < width; c += W) {
      // The last columns again with those before them, where there are as many as a vector has.
      const i64 first = c + W > width && width >= W ? width - W : c, count = width - first < W ? width - first : W;
      const T* from = source + j * source_row + first;
      Vector<T> block[W];
      if (j + W <= rows && count == W) {
        UNROLLED
        for (i64 k = 0; k < W; ++k) block[k] = load<Vector<T>>(from + k * source_row);
      } else {
        T numbers[W * W] = {};
        for (i64 k = 0; k < W && j + k < rows; ++k)
          for (i64 i = 0; i < count; ++i) numbers[k * W + i] = from[k * source_row + i];
        UNROLLED
        for (i64 k = 0; k < W; ++k) block[k] = load<Vector<T>>(numbers + k * W);
      }
      exchange_all<T>(block);
      T* to = target + first * target_row + j;
      if (count == W) {
        UNROLLED
        for (i64 k = 0; k < W; ++k) store(to + k * target_row, block[k]);
      } else {
        for (i64 k = 0; k < count; ++k) store(to + k * target_row, block[k]);
      }
    }
}

}  // namespace
