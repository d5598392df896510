// Dot products of few queries with many keys, as in decoding: keys and values are read once, where they are.
#pragma once

#include "forward.h"
#include "stored.h"

namespace {

// Keys whose values are added to a row of output together.
constexpr int VALUES = 8;

template <class Stored>
struct Rows {
  static constexpr bool in_place = true;

  template <class T>
  static bool pack(const Arguments<T>&, i64, i64, i64, i64, i64, i64, T*) {
    return true;
  }

  // Write the scaled dot products of four rows.
  template <class T>
  static bool compare(const Arguments<T>& a, i64 head, i64 row, i64 last, i64 t0, i64 j0, i64 lanes, T*, T* s) {
    const i64 C = a[F::C], width = parts(C, PAIR<T>) * PAIR<T>, count = least(GROUP, last - row + 1);
    const T* source = a.array(F::query) + (head * a[F::L] + row) * C;
    T* query = a.scratch(F::at_query);
    for (i64 i = 0; i < count; ++i) {
      T* target = query + i * width;
      copy(source + i * C, target, C);
      fill(target + C, width - C, T(0));
      for (i64 c = 0; c < width; c += PAIR<T>) {
        const Two<Vector<T>> q = as_stored<Stored>(target + c);
        store(target + c, a.real * q.x);
        store(target + c + WIDTH<T>, a.real * q.y);
      }
    }
    const Stored* keys = first(a, head, F::key, F::key_b, F::key_g) + (t0 + j0) * a[F::key_s];
    const i64 n = least(lanes, a[F::S] - t0 - j0), step = a[F::key_s];
    if (count == 1) dots<T, 1, 8>(query, width, keys, step, n, C, s + j0);
    if (count == 2) dots<T, 2, 4>(query, width, keys, step, n, C, s + j0);
    if (count == 3) dots<T, 3, 2>(query, width, keys, step, n, C, s + j0);
    if (count == 4) dots<T, 4, 2>(query, width, keys, step, n, C, s + j0);
    return true;
  }

  // Add the values of a tile, weighted, to as many rows of output as there are.
  template <class T>
  static void read(const Arguments<T>& a, i64 head, i64 rows4, i64 count, i64 t0, i64 j0, i64 j1, const T* p, T* o) {
    const Stored* values = first(a, head, F::value, F::value_b, F::value_g) + t0 * a[F::value_s];
    for (; j0 < j1; j0 += PARTIAL) {
      const i64 n = least(PARTIAL, j1 - j0), step = a[F::value_s];
      if (count == 1) add_values<T, 1>(a, p + j0, values + j0 * step, n, o + rows4 * CHUNK);
      if (count == 2) add_values<T, 2>(a, p + j0, values + j0 * step, n, o + rows4 * CHUNK);
      if (count == 3) add_values<T, 3>(a, p + j0, values + j0 * step, n, o + rows4 * CHUNK);
      if (count == 4) add_values<T, 4>(a, p + j0, values + j0 * step, n, o + rows4 * CHUNK);
    }
  }

 private:
  // Where the rows of a head begin.
  template <class T>
  static const Stored* first(const Arguments<T>& a, i64 head, F::Field field, F::Field by_sequence, F::Field by_head) {
    const i64 G = a[F::H];  // the queries of a key head are rows of one head
    return reinterpret_cast<const Stored*>(a[field]) + head / G * a[by_sequence] + head % G * a[by_head];
  }

  template <class T, int M, int N>
  INLINE static void add_products(
      Vector<T> (&sums)[M][N], const T* q, i64 q_row, const Stored* const (&keys)[N], i64 c) {
    UNROLLED
    for (int n = 0; n < N; ++n) {
      const Two<Vector<T>> k = pair_of(keys[n] + c);
      UNROLLED
      for (int m = 0; m < M; ++m) sums[m][n] += load<Vector<T>>(q + m * q_row + c) * k.x;
      UNROLLED
      for (int m = 0; m < M; ++m) sums[m][n] += load<Vector<T>>(q + m * q_row + c + WIDTH<T>) * k.y;
    }
  }

  // Write the products of M queries with n keys, N at a time.
  template <class T, int M, int N>
  OUTLINE static void dots(const T* q, i64 q_row, const Stored* k, i64 step, i64 n, i64 C, T* s) {
    const i64 whole = C / PAIR<T> * PAIR<T>;
    for (i64 t = 0; t < n; t += N) {
      Vector<T> sums[M][N] = {};
      const Stored* keys[N];
      UNROLLED
      for (int i = 0; i < N; ++i) keys[i] = k + least(t + i, n - 1) * step;
      for (i64 c = 0; c < whole; c += PAIR<T>) add_products<T, M, N>(sums, q, q_row, keys, c);
      if (whole < C) {
        for (int i = 0; i < N; ++i) {
          const Few<T, Stored> rest(keys[i] + whole, C - whole);
          const Two<Vector<T>> key = pair_of(rest.numbers);
          for (int m = 0; m < M; ++m) {
            const Two<Vector<T>> query = pair_of(q + m * q_row + whole);
            sums[m][i] += query.x * key.x;
            sums[m][i] += query.y * key.y;
          }
        }
      }
      UNROLLED
      for (int m = 0; m < M; ++m)
        UNROLLED
        for (int i = 0; i < N; ++i) s[m * ROW + t + i] = sum_of_lanes<T>(sums[m][i]);
    }
  }

  template <class T, int M>
  INLINE static void add_weighted(
      T* y, i64 y_row, const T* p, const Stored* const (&values)[VALUES], i64 c) {
    Vector<T> sums[M][2];
    UNROLLED
    for (int m = 0; m < M; ++m) {
      sums[m][0] = load<Vector<T>>(y + m * y_row);
      sums[m][1] = load<Vector<T>>(y + m * y_row + WIDTH<T>);
    }
    UNROLLED
    for (int i = 0; i < VALUES; ++i) {
      const Two<Vector<T>> v = pair_of(values[i] + c);
      UNROLLED
      for (int m = 0; m < M; ++m) {
        sums[m][0] += p[m * ROW + i] * v.x;
        sums[m][1] += p[m * ROW + i] * v.y;
      }
    }
    UNROLLED
    for (int m = 0; m < M; ++m) {
      store(y + m * y_row, sums[m][0]);
      store(y + m * y_row + WIDTH<T>, sums[m][1]);
    }
  }

  // Add n values, weighted, to M rows of output. They are summed on their own first: that keeps the error of a long sum
  // small. Weights are 0 behind them.
  template <class T, int M>
  OUTLINE static void add_values(const Arguments<T>& a, const T* p, const Stored* v, i64 n, T* o) {
    const i64 V = a[F::V], step = a[F::value_s], whole = V / PAIR<T> * PAIR<T>;
    const i64 width = parts(V, PAIR<T>) * PAIR<T>;
    T* y = a.scratch(F::at_value);
    fill(y, M * width, T(0));
    for (i64 t = 0; t < n; t += VALUES) {
      const Stored* values[VALUES];
      UNROLLED
      for (int i = 0; i < VALUES; ++i) values[i] = v + least(t + i, n - 1) * step;
      for (i64 c = 0; c < whole; c += PAIR<T>) add_weighted<T, M>(y + c, width, p + t, values, c);
      if (whole < V) {
        for (int i = 0; i < VALUES; ++i) {
          const Few<T, Stored> rest(values[i] + whole, V - whole);
          const Two<Vector<T>> value = pair_of(rest.numbers);
          for (int m = 0; m < M; ++m) {
            T* place = y + m * width + whole;
            const Two<Vector<T>> sum = pair_of(place);
            store(place, sum.x + p[m * ROW + t + i] * value.x);
            store(place + WIDTH<T>, sum.y + p[m * ROW + t + i] * value.y);
          }
        }
      }
    }
    for (int m = 0; m < M; ++m)
      for (i64 c = 0; c < width; c += PAIR<T>) {
        T* place = o + (c / CHUNK * BLOCK + m) * CHUNK + c % CHUNK;
        const Two<Vector<T>> sum = in_order<Stored>(y + m * width + c), old = pair_of(place);
        store(place, old.x + sum.x);
        store(place + WIDTH<T>, old.y + sum.y);
      }
  }
};

}  // namespace
