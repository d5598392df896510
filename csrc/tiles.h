// What both passes share: which tiles of keys a block of rows sees, their masks, and packing.
//
// A family of scores gives three functions: `pack` copies a tile of keys to scratch memory, and answers whether a block
// of rows can be in reach of it; `compare` writes the scores of four queries and these keys (or their weights, where
// `direct`), and answers whether any is in reach; `pull` takes the gradients of scores back to rows.
//
// Work items are blocks of queries of one head; for each, tiles of keys pass by.
#pragma once

#include "arguments.h"

namespace {

// The flat key head of a flat query head.
template <class T>
INLINE i64 kv_head(const Arguments<T>& a, i64 head) {
  const i64 H = a[F::H], G = a[F::G];
  return head / H * G + head % H / (H / G);
}

struct Range {
  i64 start, stop;
};

// Keys that any of the rows `first` to `last`, inclusive, may see.
template <class T>
Range bounds(const Arguments<T>& a, i64 head, i64 first, i64 last) {
  const i64 S = a[F::S];
  if (a[F::start] == 0) return {0, S};
  const i64 *lo = a.integers(F::start), *hi = a.integers(F::stop);
  const i64 base = head / a[F::H] * a[F::interval_b] + head % a[F::H] * a[F::interval_h], step = a[F::interval_r];
  i64 start = S, stop = 0;
  for (i64 row = first; row <= last; ++row) {
    const i64 from = lo[base + row * step], to = hi[base + row * step];
    if (from < to) {
      start = least(start, from);
      stop = most(stop, to);
    }
  }
  start = most(start, 0);  // whatever the intervals hold, no key is read that does not exist
  stop = least(stop, S);
  return {start, most(start, stop)};
}

struct Segment {
  i64 start, stop, column;  // column of what is added, −1 for nothing
};

// One range of keys of a block.
template <class T>
Segment segment(const Arguments<T>& a, i64 head, i64 r0, i64 r1, i64 index) {
  if (a[F::segment_count] == 0) {
    const Range seen = bounds(a, head, r0, r1 - 1);
    return {seen.start, seen.stop, -1};
  }
  const i64* segments = a.integers(F::segments) + 3 * index;
  return {most(segments[0], 0), least(segments[1], a[F::S]), segments[2]};
}

// Keys of a tile that a group of rows may see; the first is at the start of a vector.
template <class T>
INLINE Range group_range(const Arguments<T>& a, i64 head, i64 first, i64 last, i64 t0, i64 n) {
  const Range seen = bounds(a, head, first, last);
  return {most(seen.start - t0, 0) / PAD * PAD, least(seen.stop - t0, n)};
}

// The place of what is added to a row, at a column.
template <class T>
INLINE i64 place_of_added(const Arguments<T>& a, i64 head, i64 row, i64 column) {
  const i64 b = head / a[F::H], h = head % a[F::H];
  return a[F::added_at] + b * a[F::added_b] + h * a[F::added_h] + row * a[F::added_r] + column;
}

// Add numbers to scores, and replace scores by `hidden` where these are −inf.
template <class T>
void add_or_hide(const T* added, i64 j0, i64 j1, T* s, T hidden) {
  constexpr T masked = -std::numeric_limits<T>::infinity();
  over<T>(j0, j1, [&](i64 j, auto x) {
    using X = decltype(x);
    const X bias = load<X>(added + j);
    store(s + j, bias == masked ? wide<X>(hidden) : load<X>(s + j) + bias);
  });
}

// Add a bias tensor to the scores of a row; keys begin at t0.
template <class T>
void add_bias(const Arguments<T>& a, i64 head, i64 row, i64 t0, i64 j0, i64 j1, T* s, T hidden) {
  const i64 H = a[F::H], at = head / H * a[F::bias_b] + head % H * a[F::bias_h] + row * a[F::bias_r];
  const T* bias = a.array(F::bias) + at;
  if (a[F::bias_c] != 0) {
    add_or_hide(bias + t0, j0, j1, s, hidden);
    return;
  }
  const T same = bias[0];
  if (same == -std::numeric_limits<T>::infinity())
    fill(s + j0, j1 - j0, hidden);
  else
    over<T>(j0, j1, [&](i64 j, auto x) { store(s + j, load<decltype(x)>(s + j) + same); });
}

// Replace the scores of a row's hidden keys by `hidden`, and add biases to the others; keys begin at t0. A row may have
// a single hidden key of its own.
template <class T>
void hide(const Arguments<T>& a, i64 head, i64 row, i64 t0, i64 j0, i64 j1, T* s, i64 column, T hidden) {
  if (a[F::start] != 0) {
    const i64 at = head / a[F::H] * a[F::interval_b] + head % a[F::H] * a[F::interval_h] + row * a[F::interval_r];
    const i64 lo = a.integers(F::start)[at] - t0, hi = a.integers(F::stop)[at] - t0;
    for (i64 j = j0; j < least(j1, lo); ++j) s[j] = hidden;
    for (i64 j = most(j0, hi); j < j1; ++j) s[j] = hidden;
  }
  if (a[F::own] != 0) {
    const i64 own = a.integers(F::own)[head * a[F::L] + row] - t0;
    if (j0 <= own && own < j1) s[own] = hidden;
  }
  if (column >= 0) add_or_hide(a.array(F::added) + place_of_added(a, head, row, column), j0, j1, s, hidden);
  if (a[F::bias] != 0) add_bias(a, head, row, t0, j0, j1, s, hidden);
}

// Copy rows, each filled to `height` lanes.
template <class T>
void pack_rows(
    const T* source, i64 source_row, i64 rows, i64 lanes, T* target, i64 target_row, i64 height, T filling = T(0)) {
  for (i64 row = 0; row < rows; ++row) {
    copy(source + row * source_row, target + row * target_row, lanes);
    fill(target + row * target_row + lanes, height - lanes, filling);
  }
}

template <class T>
void add_rows(const T* source, i64 source_row, i64 rows, i64 lanes, T* target, i64 target_row) {
  for (i64 row = 0; row < rows; ++row) {
    const T* s = source + row * source_row;
    T* t = target + row * target_row;
    over<T>(0, lanes, [&](i64 j, auto x) { store(t + j, load<decltype(x)>(t + j) + load<decltype(x)>(s + j)); });
  }
}

// Pack rows as chunks of lanes: chunk by chunk, `height` rows each.
template <class T>
void pack_lanes(const T* source, i64 source_row, i64 rows, i64 width, T* target, i64 height) {
  for (i64 c = 0; c < width; c += CHUNK) {
    const i64 lanes = least(CHUNK, width - c);
    pack_rows(source + c, source_row, rows, lanes, target + c / CHUNK * height * CHUNK, CHUNK, padded(lanes));
  }
}

// Copy chunks of lanes to an array of whole rows.
template <class T>
void unpack_lanes(const T* source, i64 height, i64 rows, i64 width, T* target, i64 target_row) {
  for (i64 c = 0; c < width; c += CHUNK) {
    const i64 lanes = least(CHUNK, width - c);
    pack_rows(source + c / CHUNK * height * CHUNK, CHUNK, rows, lanes, target + c, target_row, lanes);
  }
}

// Add chunks of lanes to an array of whole rows.
template <class T>
void add_lanes(const T* source, i64 height, i64 rows, i64 width, T* target, i64 target_row) {
  for (i64 c = 0; c < width; c += CHUNK)
    add_rows(source + c / CHUNK * height * CHUNK, CHUNK, rows, least(CHUNK, width - c), target + c, target_row);
}

// Write the scores of a group of rows; return the keys that they are of, none if no key is in reach.
template <class Family, class T>
Range tile_scores(const Arguments<T>& a, i64 head, i64 r0, i64 r1, i64 g, i64 t0, i64 n, i64 column, T* k, T* s) {
  const i64 row = r0 + g * GROUP, last = r1 - 1;
  const Range keys = group_range(a, head, row, least(row + GROUP - 1, last), t0, n);
  const i64 j0 = keys.start, j1 = keys.stop;
  if (j1 <= j0 || !Family::compare(a, head, row, last, t0, j0, padded(j1 - j0), k, s)) return {0, 0};
  const T hidden = a[F::direct] != 0 ? T(0) : -std::numeric_limits<T>::infinity();
  if (a[F::start] != 0 || a[F::bias] != 0 || a[F::own] != 0 || column >= 0)
    for (i64 i = 0; i < GROUP; ++i) hide(a, head, least(row + i, last), t0, j0, j1, s + i * ROW, column, hidden);
  return {j0, j1};
}

}  // namespace
