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

// Sums of neighbouring lanes of two vectors: those of x, then those of y, in each 16 bytes.
template <class T, std::size_t... I>
INLINE Vector<T> neighbours(Vector<T> x, Vector<T> y, std::index_sequence<I...>) {
  constexpr i64 B = 16 / sizeof(T), half = B / 2;
  constexpr auto place = [](i64 i) { return i % B < half ? i / B * B + i % B * 2 : WIDTH<T> + i / B * B + (i % B - half) * 2; };
  return __builtin_shufflevector(x, y, place(I)...) + __builtin_shufflevector(x, y, place(I) + 1 ...);
}

// The sum of all 16 bytes of a vector, in each of them.
template <class T, int N = WIDTH<T> / 2>
INLINE Vector<T> sum_of_blocks(Vector<T> x) {
  if constexpr (N * sizeof(T) < 16)
    return x;
  else
    return sum_of_blocks<T, N / 2>(x + exchanged<N>(x, std::make_index_sequence<WIDTH<T>>()));
}

// Call `body` with the number of vectors of a row, as a constant where few registers hold them all; 0 is any other.
template <class T, class Body>
INLINE void with_vectors(i64 D, Body body) {
  if (D == 2 * WIDTH<T>)
    body(std::integral_constant<int, 2>{});
  else if (D == 4 * WIDTH<T>)
    body(std::integral_constant<int, 4>{});
  else if (D == 8 * WIDTH<T>)
    body(std::integral_constant<int, 8>{});
  else
    body(std::integral_constant<int, 0>{});
}

// Write scale · the sums of the lanes of four vectors, less a number.
template <class T>
INLINE void store_sums(T* s, T scale, T less, Vector<T> a, Vector<T> b, Vector<T> c, Vector<T> d) {
  constexpr auto lanes = std::make_index_sequence<WIDTH<T>>();
  constexpr i64 block = 16 / sizeof(T);
  Vector<T> x = neighbours<T>(a, b, lanes), y = neighbours<T>(c, d, lanes);
  if constexpr (block == 4) x = neighbours<T>(x, y, lanes);
  x = scale * sum_of_blocks<T>(x) - less;
  for (i64 i = 0; i < block; ++i) s[i] = x[i];
  if constexpr (block == 2) {
    y = scale * sum_of_blocks<T>(y) - less;
    for (i64 i = 0; i < block; ++i) s[i + 2] = y[i];
  }
}

// Write scale · q·k − less for each of n keys, and others behind them up to a multiple of TOGETHER. Rows that are in no
// cache are asked for `ahead`.
template <bool ahead, class T, class Index>
OUTLINE void table_scores(const T* q, const T* k, i64 kv_row, const Index* rows, i64 n, i64 D, T scale, T less, T* s) {
  if (D % WIDTH<T> != 0) {
    for (i64 t = 0; t < n; ++t) {
      const T* key = k + i64(rows[t]) * kv_row;
      Sum<T> sum;
      over<T>(0, D, [&](i64 d, auto x) { sum.add(load<decltype(x)>(q + d) * load<decltype(x)>(key + d)); });
      s[t] = scale * sum.total() - less;
    }
    return;
  }
  with_vectors<T>(D, [&](auto count) {
    constexpr int N = count;
    Vector<T> query[N > 0 ? N : 1];
    UNROLLED
    for (int j = 0; j < N; ++j) query[j] = load<Vector<T>>(q + j * WIDTH<T>);
    for (i64 t = 0; t < n; t += TOGETHER) {
      const T* keys[TOGETHER];
      for (i64 i = 0; i < TOGETHER; ++i) keys[i] = k + i64(rows[least(t + i, n - 1)]) * kv_row;
      if constexpr (ahead) ask_for(k, kv_row, rows, t, n, D);
      Vector<T> sums[TOGETHER] = {};
      if constexpr (N > 0) {
        UNROLLED
        for (int j = 0; j < N; ++j) {
          UNROLLED
          for (i64 i = 0; i < TOGETHER; ++i) sums[i] += query[j] * load<Vector<T>>(keys[i] + j * WIDTH<T>);
        }
      } else {
        for (i64 d = 0; d < D; d += WIDTH<T>) {
          const Vector<T> some = load<Vector<T>>(q + d);
          UNROLLED
          for (i64 i = 0; i < TOGETHER; ++i) sums[i] += some * load<Vector<T>>(keys[i] + d);
        }
      }
      store_sums<T>(s + t, scale, less, sums[0], sums[1], sums[2], sums[3]);
    }
  });
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
// without `which`, it has row r of the table, and without `counts`, it reads all of it. Heads of keys are G. `s` has room
// for the scores of all heads of a query, each filled up as vectors and loops need.
template <class T>
void read_rows(
    const T* q, i64 q_row, const T* k, const T* v, i64 kv_row, const i64* which, const i64* table, i64 table_row,
    const i64* counts, i64 all, i64 first, i64 last, i64 H, i64 G, i64 D, T scale, T* out, i64 out_row, T* s) {
  for (i64 r = first; r < last; ++r) {
    constexpr i64 step = WIDTH<T> > TOGETHER ? WIDTH<T> : TOGETHER;
    const i64 place = which ? which[r] : r;
    const i64 n = counts ? counts[place] : all, width = parts(n, step) * step;
    const i64* rows = table + place * table_row;
    for (i64 h = 0; h < H; ++h) {
      T* line = s + h * width;
      table_scores<true>(q + r * q_row + h * D, k + h / (H / G) * D, kv_row, rows, n, D, scale, T(0), line);
      fill(line + n, width - n, -std::numeric_limits<T>::infinity());
      const T peak = largest_of(line, 0, width);
      over_lanes<T>(width, [&](i64 j) { store(line + j, exponential(load<Vector<T>>(line + j) - peak)); });
      const T total = sum_of(line, 0, width);
      table_values(out + r * out_row + h * D, v + h / (H / G) * D, kv_row, rows, n, D, line, T(1) / total);
    }
  }
}

// The largest of some numbers; NaN if one is.
template <class T>
T peak_of_run(const T* row, i64 first, i64 end) {
  const T lost = combined(row, first, end, T(0), [](auto x, auto y) { return y == y ? x : y; });
  return lost == lost ? largest_of(row, first, end) : lost;
}

// Write log Σ exp of rows `first` to `last` of N numbers, then hide some of them by −inf, and write the maximum of each
// run of so many of what is left.
template <class T>
void log_sums(
    T* x, i64 x_row, i64 first, i64 last, i64 N, i64 run, const i64* hidden, i64 hidden_count, T* total, T* maxima) {
  const i64 runs = parts(N, run);
  const T infinity = std::numeric_limits<T>::infinity();
  for (i64 r = first; r < last; ++r) {
    T *row = x + r * x_row, *peaks = maxima + r * runs;
    T peak = -infinity;
    for (i64 j = 0; j < runs; ++j) {
      peaks[j] = peak_of_run(row, j * run, least(j * run + run, N));
      peak = peak == peak && !(peaks[j] <= peak) ? peaks[j] : peak;
    }
    if (absolute(peak) == infinity) {
      total[r] = peak;
    } else {
      Sum<T> sum;
      over<T>(0, N, [&](i64 j, auto like) { sum.add(exponential(load<decltype(like)>(row + j) - peak)); });
      total[r] = peak + logarithm(sum.total());
    }
    for (i64 i = 0; i < hidden_count; ++i) row[hidden[i]] = -infinity;
    for (i64 i = 0; i < hidden_count; ++i) {
      const i64 j = hidden[i] / run;
      peaks[j] = peak_of_run(row, j * run, least(j * run + run, N));
    }
  }
}

// Write the `count` largest sums of an offset and one of its N numbers, over K rows, and which row and number they are
// of; largest first, and of equal ones the first. `maxima` has those of runs of so many numbers. An offset that is NaN is found. Where one of
// the sums is not finite, or of the number `mark`, `marked` becomes 1.
template <class T>
void largest_sums(
    const T* x, const T* offset, const T* maxima, i64 first, i64 last, i64 K, i64 N, i64 run, i64 count, T* found,
    i64* parents, i64* symbols, i64 mark, i64* marked) {
  const i64 runs = parts(N, run);
  for (i64 b = first; b < last; ++b) {
    T* best = found + b * count;
    i64 *parent = parents + b * count, *symbol = symbols + b * count, size = 0;
    bool finite = true;
    for (i64 k = 0; k < K; ++k) {
      const T *row = x + (b * K + k) * N, *peaks = maxima + (b * K + k) * runs, more = offset[b * K + k];
      finite &= more == more;
      for (i64 j = 0; j < runs; ++j) {
        if (size == count && !(peaks[j] + more > best[count - 1])) continue;
        for (i64 i = j * run; i < least(j * run + run, N); ++i) {
          const T sum = row[i] + more;
          if (size == count && !(sum > best[count - 1])) continue;
          i64 place = size < count ? size++ : count - 1;
          for (; place > 0 && sum > best[place - 1]; --place) {
            best[place] = best[place - 1];
            parent[place] = parent[place - 1];
            symbol[place] = symbol[place - 1];
          }
          best[place] = sum;
          parent[place] = k;
          symbol[place] = i;
        }
      }
    }
    if (!finite) best[0] = std::numeric_limits<T>::quiet_NaN();
    for (i64 i = 0; i < count; ++i)
      if (!(absolute(best[i]) <= std::numeric_limits<T>::max()) || symbol[i] == mark)
        __atomic_store_n(marked, 1, __ATOMIC_RELAXED);
  }
}

}  // namespace
