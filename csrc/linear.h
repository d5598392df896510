// Matrix products whose sums stay in registers.
#pragma once

#include "arguments.h"

namespace {

// Steps that are summed before they are added to the rest: partial sums keep the error of a long sum small.
constexpr i64 PARTIAL = 128;
// Vectors that the sums of four rows are wide: with 32 registers 16 of them, else 12.
constexpr int WIDE = VECTOR_BYTES == 64 ? 4 : 3;

template <class T, int M, int N>
INLINE void panel(T* y, i64 y_row, const T* x, i64 x_row, const T* c, i64 c_row, i64 c_col, i64 steps) {
  Vector<T> sums[M][N] = {};
  const T* factors[M];
  UNROLLED
  for (int m = 0; m < M; ++m) factors[m] = c + m * c_row;
  for (i64 t = 0; t < steps; ++t, x += x_row) {
    Vector<T> values[N];
    UNROLLED
    for (int n = 0; n < N; ++n) values[n] = load<Vector<T>>(x + n * WIDTH<T>);
    UNROLLED
    for (int m = 0; m < M; ++m) {
      const T factor = *factors[m];
      factors[m] += c_col;
      UNROLLED
      for (int n = 0; n < N; ++n) sums[m][n] += factor * values[n];
    }
  }
  UNROLLED
  for (int m = 0; m < M; ++m)
    UNROLLED
    for (int n = 0; n < N; ++n) {
      T* place = y + m * y_row + n * WIDTH<T>;
      store(place, load<Vector<T>>(place) + sums[m][n]);
    }
}

// Add Σ_n c[m, n] · x_n to M rows y_m, over `steps` n; c[m, n] is c[m·c_row + n·c_col]. Rows have `lanes` numbers, a
// whole number of vectors.
template <int M, class T>
OUTLINE void product(T* y, i64 y_row, const T* x, i64 x_row, const T* c, i64 c_row, i64 c_col, i64 steps, i64 lanes) {
  for (i64 first = 0; first < steps; first += PARTIAL) {
    const i64 count = least(PARTIAL, steps - first);
    const T *source = x + first * x_row, *factors = c + first * c_col;
    for (i64 j = 0; j < lanes;) {
      const i64 left = (lanes - j) / WIDTH<T>;
      if (left >= WIDE) {
        panel<T, M, WIDE>(y + j, y_row, source + j, x_row, factors, c_row, c_col, count);
        j += WIDE * WIDTH<T>;
      } else if (left >= 2) {
        panel<T, M, 2>(y + j, y_row, source + j, x_row, factors, c_row, c_col, count);
        j += 2 * WIDTH<T>;
      } else {
        panel<T, M, 1>(y + j, y_row, source + j, x_row, factors, c_row, c_col, count);
        j += WIDTH<T>;
      }
    }
  }
}

// Add Σ_j p_m[j] · x[j] to o[m·o_row], for four rows p_m of keys.
template <class T>
OUTLINE void contract(T* o, i64 o_row, const T* p, const T* x, i64 lanes) {
  using X = Vector<T>;
  X sums[2][GROUP] = {};
  const auto add = [&](X (&to)[GROUP], i64 j) {
    const X a = load<X>(x + j);
    UNROLLED
    for (int m = 0; m < GROUP; ++m) to[m] += load<X>(p + m * ROW + j) * a;
  };
  i64 j = 0;
  for (; j + 2 * WIDTH<T> <= lanes; j += 2 * WIDTH<T>) {
    add(sums[0], j);
    add(sums[1], j + WIDTH<T>);
  }
  if (j < lanes) add(sums[0], j);
  for (int m = 0; m < GROUP; ++m) o[m * o_row] += sum_of_lanes<T>(sums[0][m] + sums[1][m]);
}

}  // namespace
