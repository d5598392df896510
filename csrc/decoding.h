// A step of decoding: what few queries read of rows that tables name, and sums over logits.
#pragma once

#include "vector.h"
#include "forward.h"

namespace {

// Keys that a loop handles together.
constexpr i64 TOGETHER = 4;
// How many keys ahead memory is asked for: rows that a table names have no order that the processor could guess.
constexpr i64 AHEAD = 8;

// Ask for the rows that a loop reads later.
template <class T>
INLINE void ask_for(const T* x, i64 row, const i64* rows, i64 t, i64 n, i64 D) {
  for (i64 i = t + AHEAD; i < least(t + AHEAD + TOGETHER, n); ++i)
    for (i64 d = 0; d < D; d += 64 / i64(sizeof(T))) __builtin_prefetch(x + rows[i] * row + d);
}

// Write scale · q·k for each of n keys, and others behind them up to a multiple of TOGETHER.
template <class T>
void table_scores(const T* q, const T* k, i64 kv_row, const i64* rows, i64 n, i64 D, T scale, T* s) {
  if (D % WIDTH<T> != 0) {
    for (i64 t = 0; t < n; ++t) {
      const T* key = k + rows[t] * kv_row;
      Sum<T> sum;
      over<T>(0, D, [&](i64 d, auto x) { sum.add(load<decltype(x)>(q + d) * load<decltype(x)>(key + d)); });
      s[t] = scale * sum.total();
    }
    return;
  }
  for (i64 t = 0; t < n; t += TOGETHER) {
    const T* keys[TOGETHER];
    for (i64 i = 0; i < TOGETHER; ++i) keys[i] = k + rows[least(t + i, n - 1)] * kv_row;
    ask_for(k, kv_row, rows, t, n, D);
    Vector<T> sums[TOGETHER] = {};
    for (i64 d = 0; d < D; d += WIDTH<T>) {
      const Vector<T> query = load<Vector<T>>(q + d);
      UNROLLED
      for (i64 i = 0; i < TOGETHER; ++i) sums[i] += query * load<Vector<T>>(keys[i] + d);
    }
    for (i64 i = 0; i < TOGETHER; ++i) s[t + i] = scale * sum_of_lanes<T>(sums[i]);
  }
}

// Write Σ scale · s v over n values; s is 0 behind them.
template <class T>
void table_values(T* o, const T* v, i64 kv_row, const i64* rows, i64 n, i64 D, const T* s, T scale) {
  fill(o, D, T(0));
  if (D % WIDTH<T> != 0) {
    for (i64 t = 0; t < n; ++t) {
      const T weight = scale * s[t], *value = v + rows[t] * kv_row;
      over<T>(0, D, [&](i64 d, auto x) {
        store(o + d, load<decltype(x)>(o + d) + weight * load<decltype(x)>(value + d));
      });
    }
    return;
  }
  for (i64 t = 0; t < n; t += TOGETHER) {
    const T* values[TOGETHER];
    for (i64 i = 0; i < TOGETHER; ++i) values[i] = v + rows[least(t + i, n - 1)] * kv_row;
    ask_for(v, kv_row, rows, t, n, D);
    for (i64 d = 0; d < D; d += WIDTH<T>) {
      Vector<T> total = load<Vector<T>>(o + d);
      UNROLLED
      for (i64 i = 0; i < TOGETHER; ++i) total += (scale * s[t + i]) * load<Vector<T>>(values[i] + d);
      store(o + d, total);
    }
  }
}

// Write softmax(scale · q kᵀ) v for queries `first` to `last`, each of H heads of width D.
//
// Query r reads the rows of keys and values that row `which[r]` of the table begins with, as many as its count says;
// heads of keys are G. `s` has room for the scores of all heads of a query, each filled up as vectors and loops need.
template <class T>
void read_rows(
    const T* q, i64 q_row, const T* k, const T* v, i64 kv_row, const i64* which, const i64* table, i64 table_row,
    const i64* counts, i64 first, i64 last, i64 H, i64 G, i64 D, T scale, T* out, i64 out_row, T* s) {
  for (i64 r = first; r < last; ++r) {
    constexpr i64 step = WIDTH<T> > TOGETHER ? WIDTH<T> : TOGETHER;
    const i64 n = counts[which[r]], width = parts(n, step) * step;
    const i64* rows = table + which[r] * table_row;
    for (i64 h = 0; h < H; ++h) {
      T* line = s + h * width;
      table_scores(q + r * q_row + h * D, k + h / (H / G) * D, kv_row, rows, n, D, scale, line);
      fill(line + n, width - n, -std::numeric_limits<T>::infinity());
      const T peak = largest_of(line, 0, width);
      over_lanes<T>(width, [&](i64 j) { store(line + j, exponential(load<Vector<T>>(line + j) - peak)); });
      const T total = sum_of(line, 0, width);
      table_values(out + r * out_row + h * D, v + h / (H / G) * D, kv_row, rows, n, D, line, T(1) / total);
    }
  }
}

// Write log Σ exp of rows `first` to `last` of N numbers, and the maximum of each run of so many of them.
template <class T>
void log_sums(const T* x, i64 x_row, i64 first, i64 last, i64 N, i64 run, T* total, T* maxima) {
  const i64 runs = parts(N, run);
  for (i64 r = first; r < last; ++r) {
    const T* row = x + r * x_row;
    T* peaks = maxima + r * runs;
    T peak = -std::numeric_limits<T>::infinity();
    for (i64 j = 0; j < runs; ++j) {
      const i64 first_of_run = j * run, end = least(first_of_run + run, N);
      peaks[j] = largest_of(row, first_of_run, end);
      for (i64 i = first_of_run; i < end; ++i) peaks[j] = row[i] == row[i] ? peaks[j] : row[i];
      peak = peak == peak && !(peaks[j] <= peak) ? peaks[j] : peak;
    }
    if (absolute(peak) == std::numeric_limits<T>::infinity()) {
      total[r] = peak;
      continue;
    }
    Sum<T> sum;
    over<T>(0, N, [&](i64 j, auto like) { sum.add(exponential(load<decltype(like)>(row + j) - peak)); });
    total[r] = peak + logarithm(sum.total());
  }
}

}  // namespace
