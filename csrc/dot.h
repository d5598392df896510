// Dot products: what torch's kernels compute, under masks whose structure they do not know.
#pragma once

#include "linear.h"
#include "tiles.h"

namespace {

struct Dot {
  static constexpr bool linear = true;
  static constexpr bool in_place = false;

  // Pack the features of a tile of keys, keys as lanes.
  template <class T>
  static bool pack(const Arguments<T>& a, i64, i64 kv, i64, i64, i64 t0, i64 n, T* k) {
    const i64 C = a[F::C], S = a[F::S];
    transpose(a.array(F::key_raw) + (kv * S + t0) * C, C, n, C, k, ROW, padded(n));
    return true;
  }

  // Write the scaled dot products of four rows.
  template <class T>
  static bool compare(const Arguments<T>& a, i64 head, i64 row, i64 last, i64, i64 j0, i64 lanes, T* k, T* s) {
    const i64 C = a[F::C], count = least(GROUP, last - row + 1);
    const T* source = a.array(F::query) + (head * a[F::L] + row) * C;
    T* query = a.scratch(F::at_query);
    for (i64 i = 0; i < GROUP; ++i) fill(s + i * ROW + j0, lanes, T(0));
    over<T>(0, count * C, [&](i64 i, auto x) { store(query + i, a.real * load<decltype(x)>(source + i)); });
    if (count == GROUP) {
      product<GROUP>(s + j0, ROW, k + j0, ROW, query, C, 1, C, lanes);
      return true;
    }
    for (i64 i = 0; i < count; ++i) product<1>(s + i * ROW + j0, ROW, k + j0, ROW, query + i * C, C, 1, C, lanes);
    return true;
  }
};

}  // namespace
