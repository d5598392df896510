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

// The bias tensor of a row.
template <class T>
INLINE const T* bias_of(const Arguments<T>& a, i64 head, i64 row) {
  const i64 H = a[F::H], b = a[F::planes] != 0 ? a.integers(F::planes)[head / H] : head / H;
  return a.array(F::bias) + b * a[F::bias_b] + head % H * a[F::bias_h] + row * a[F::bias_r];
}

// Whether a bias hides all of some keys.
template <class T>
INLINE bool hides_all(const T* bias, i64 count) {
  constexpr T masked = -std::numeric_limits<T>::infinity();
  if (bias[0] != masked) return false;
  i64 j = 0;
  for (; j + WIDTH<T> <= count; j += WIDTH<T>)
    if (lanes_other_than<T>(load<Vector<T>>(bias + j), masked) != 0) return false;
  for (; j < count; ++j)
    if (bias[j] != masked) return false;
  return true;
}

// Keys of a tile, at least one, without those at either end that the bias hides from rows `first` to `last`, inclusive.
template <class T>
Range unhidden(const Arguments<T>& a, i64 head, i64 first, i64 last, i64 t0, Range keys) {
  Range seen{keys.stop, keys.start};
  if (a[F::bias_r] == 0) last = first;
  for (i64 row = last; row >= first; --row) {
    const T* bias = bias_of(a, head, row) + t0;
    i64 j = keys.start;
    while (j < seen.start && hides_all(bias + j, least(PAD, keys.stop - j))) j += PAD;
    seen.start = least(seen.start, j);
    j = keys.start + padded(keys.stop - keys.start);
    while (j > seen.stop && hides_all(bias + j - PAD, least(PAD, keys.stop - j + PAD))) j -= PAD;
    seen.stop = most(seen.stop, least(j, keys.stop));
  }
  return seen;
}

// Add a bias tensor to the scores of a row; keys begin at t0.
template <class T>
void add_bias(const Arguments<T>& a, i64 head, i64 row, i64 t0, i64 j0, i64 j1, T* s, T hidden) {
  const T* bias = bias_of(a, head, row);
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

// Replace the scores of four rows by softcap · tanh(score / softcap). The tangents stay behind the scores, for the
// backward pass.
template <class T>
OUTLINE void cap(const Arguments<T>& a, i64 j0, i64 lanes, T* s) {
  using X = Vector<T>;
  constexpr T minus = -std::numeric_limits<T>::infinity();
  const T softcap = a.softcap;
  const bool compact = a[F::kind] >= COMPACT, kept = a[F::d_query] != 0;
  for (i64 i = 0; i < GROUP; ++i) {
    T *scores = s + i * ROW + j0, *tangents = s + (2 * GROUP + i) * ROW + j0;
    over_lanes<T>(lanes, [&](i64 j) {
      const X score = load<X>(scores + j), tangent = hyperbolic_tangent(score / softcap);
      if (kept) store(tangents + j, tangent);
      X capped = softcap * tangent;
      if (compact) capped = score == minus ? score : capped;  // keys out of reach
      store(scores + j, capped);
    });
  }
}

// Replace the gradients of four rows' capped scores by those of the scores.
template <class T>
OUTLINE void uncap(i64 j0, i64 lanes, const T* s, T* ds) {
  using X = Vector<T>;
  for (i64 i = 0; i < GROUP; ++i) {
    const T* tangents = s + (2 * GROUP + i) * ROW + j0;
    T* slopes = ds + i * ROW + j0;
    over_lanes<T>(lanes, [&](i64 j) {
      const X t = load<X>(tangents + j);
      store(slopes + j, load<X>(slopes + j) * ((T(1) - t) * (T(1) + t)));
    });
  }
}

// 32 random bits for each key of a row, of which `row` are 64. As many steps of multiplication and shift as make every
// bit depend on every other; the numbers are known to leave little bias.
template <class B>
INLINE B random_bits(B key, uint64_t row) {
  constexpr auto all = uint32_t(-1);  // numbers of 32 bits, whatever the lanes have
  B x = key ^ uint32_t(row);
  x ^= x >> 17;
  x = x * 0xed5ad4bbu & all;
  x ^= x >> 11;
  x = (x + uint32_t(row >> 32)) * 0xac4c1b51u & all;
  x ^= x >> 15;
  x = x * 0x31848babu & all;
  return x ^ x >> 14;
}

// 64 random bits for each row of each head.
INLINE uint64_t row_bits(i64 seed, i64 place) {
  uint64_t x = uint64_t(seed) + (uint64_t(place) + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

// Drop numbers of up to four rows, and multiply the others by `kept`: which ones depends on the seed, the head, the row
// and the key alone. The first key is that of lane j0.
template <class T>
OUTLINE void drop(const Arguments<T>& a, i64 head, i64 row, i64 last, i64 key, i64 j0, i64 lanes, T* p) {
  using X = Vector<T>;
  using B = typename Of<X>::Bits;
  using Bits = typename Types<T>::Bits;
  const T kept = a.kept;
  const Bits threshold = Bits(a[F::threshold]);
  B own{};
  for (i64 i = 0; i < WIDTH<T>; ++i) own[i] = Bits(uint32_t(key + i));
  for (i64 i = 0; i < least(GROUP, last - row + 1); ++i) {
    const uint64_t bits = row_bits(a[F::seed], head * a[F::L] + row + i);
    T* numbers = p + i * ROW + j0;
    over_lanes<T>(lanes, [&](i64 j) {
      const B found = random_bits(own + Bits(j), bits);
      store(numbers + j, found >= threshold ? load<X>(numbers + j) * kept : X{});
    });
  }
}

// Write the scores of a group of rows; return the keys that they are of, none if no key is in reach.
template <class Family, class T>
Range tile_scores(const Arguments<T>& a, i64 head, i64 r0, i64 r1, i64 g, i64 t0, i64 n, i64 column, T* k, T* s) {
  const i64 row = r0 + g * GROUP, last = r1 - 1;
  Range keys = group_range(a, head, row, least(row + GROUP - 1, last), t0, n);
  if (keys.start < keys.stop && a[F::bias] != 0 && a[F::bias_c] != 0)
    keys = unhidden(a, head, row, least(row + GROUP - 1, last), t0, keys);
  const i64 j0 = keys.start, j1 = keys.stop;
  if (j1 <= j0 || !Family::compare(a, head, row, last, t0, j0, padded(j1 - j0), k, s)) return {0, 0};
  if (a.softcap != T(0)) cap(a, j0, padded(j1 - j0), s);
  const T hidden = a[F::direct] != 0 ? T(0) : -std::numeric_limits<T>::infinity();
  if (a[F::start] != 0 || a[F::bias] != 0 || a[F::own] != 0 || column >= 0)
    for (i64 i = 0; i < GROUP; ++i) hide(a, head, least(row + i, last), t0, j0, j1, s + i * ROW, column, hidden);
  return {j0, j1};
}

}  // namespace
