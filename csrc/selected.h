// Attention to selected keys: each query has a list of the keys that it sees.
//
// The queries of a part are handled together and their keys bucket by bucket, so that the rows of a bucket's keys and
// values stay in a cache while many queries read them. A set of bits for each query and bucket says which keys it sees;
// so lists need no order, and a key that is named twice counts once.
#pragma once

#include "decoding.h"

namespace {

constexpr i64 BUCKET = 128;         // keys of a bucket
constexpr i64 WORDS = BUCKET / 64;  // words of its bits

// The arrays and sizes of a call. Heads of lists are 1, or as many as there are heads of queries; `list_b` and `list_h`
// are the strides of lists, 0 where they are shared. Heads of queries are H, of keys and values G.
template <class T>
struct Selection {
  const T *query, *key, *value;
  const int32_t* lists;
  i64 B, H, G, L, S, C, V, K, list_b, list_h, rows;
  T scale;

  static Selection of(const T* q, const T* k, const T* v, const int32_t* lists, const i64* n, T scale) {
    return {q, k, v, lists, n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], scale};
  }

  INLINE i64 heads_per_key() const { return H / G; }
  INLINE i64 buckets() const { return parts(S, BUCKET); }
  // Query heads that share a list and a head of keys.
  INLINE i64 together() const { return list_h == 0 ? heads_per_key() : 1; }
};

// Σ weight · row over listed rows, added to `keep` times the target.
template <class T>
OUTLINE void add_rows(T* o, T keep, const T* base, i64 row, const i64* at, i64 n, i64 D, const T* w) {
  using X = Vector<T>;
  constexpr i64 MANY = 8;
  i64 d = 0;
  for (; d + MANY * WIDTH<T> <= D; d += MANY * WIDTH<T>) {
    X sums[MANY];
    UNROLLED
    for (i64 i = 0; i < MANY; ++i) sums[i] = keep * load<X>(o + d + i * WIDTH<T>);
    for (i64 t = 0; t < n; ++t) {
      const T weight = w[t];
      const T* x = base + at[t] * row + d;
      UNROLLED
      for (i64 i = 0; i < MANY; ++i) sums[i] += weight * load<X>(x + i * WIDTH<T>);
    }
    UNROLLED
    for (i64 i = 0; i < MANY; ++i) store(o + d + i * WIDTH<T>, sums[i]);
  }
  for (; d + WIDTH<T> <= D; d += WIDTH<T>) {
    X sum = keep * load<X>(o + d);
    for (i64 t = 0; t < n; ++t) sum += w[t] * load<X>(base + at[t] * row + d);
    store(o + d, sum);
  }
  for (; d < D; ++d) {
    T sum = keep * o[d];
    for (i64 t = 0; t < n; ++t) sum += w[t] * base[at[t] * row + d];
    o[d] = sum;
  }
}

// Add weight · source to each listed row.
template <class T>
OUTLINE void add_to_rows(T* base, i64 row, const i64* at, i64 n, i64 D, const T* w, const T* source) {
  for (i64 t = 0; t < n; ++t) add_scaled(w[t], source, base + at[t] * row, D);
}

// Write the bits of the lists of `count` queries: (buckets, rows, WORDS).
template <class T>
void mark(const Selection<T>& a, const int32_t* lists, i64 count, uint64_t* bits) {
  std::memset(bits, 0, size_t(a.buckets() * a.rows * WORDS) * sizeof(uint64_t));
  for (i64 i = 0; i < count; ++i)
    for (i64 t = 0; t < a.K; ++t) {
      const i64 j = lists[i * a.K + t];
      if (j >= 0) bits[(j / BUCKET * a.rows + i) * WORDS + j % BUCKET / 64] |= uint64_t{1} << (j % 64);
    }
}

// Write the places in a bucket of the keys that a query sees, and return how many they are.
INLINE i64 listed(const uint64_t* bits, i64* at) {
  i64 n = 0;
  for (i64 w = 0; w < WORDS; ++w)
    for (uint64_t word = bits[w]; word != 0; word &= word - 1) at[n++] = w * 64 + __builtin_ctzll(word);
  return n;
}

// Scratch memory: the bits, then room for the scores of a bucket, thrice.
template <class T>
struct Room {
  uint64_t* bits;
  T *scores, *slopes;

  Room(const Selection<T>& a, void* memory) {
    bits = static_cast<uint64_t*>(memory);
    scores = reinterpret_cast<T*>(bits + a.buckets() * a.rows * WORDS);
    slopes = scores + BUCKET + PAD;
  }
};

// Write the output and, per row, the largest score and the sum of exponentials relative to it.
//
// A work item is a part of the queries of one head of keys; each of its rows has `peak` −inf and `total` 0 if it sees
// nothing.
template <class T>
void select_forward(const Selection<T>& a, i64 first, i64 last, T* output, T* peaks, T* totals, void* memory) {
  const Room<T> room(a, memory);
  const i64 count_of_parts = parts(a.L, a.rows), R = a.heads_per_key(), together = a.together();
  constexpr T lowest = -std::numeric_limits<T>::infinity();
  i64 at[BUCKET];
  for (i64 item = first; item < last; ++item) {
    const i64 kv = item / count_of_parts, b = kv / a.G, g = kv % a.G, l0 = item % count_of_parts * a.rows;
    const i64 count = least(a.rows, a.L - l0);
    const T *keys = a.key + kv * a.S * a.C, *values = a.value + kv * a.S * a.V;
    for (i64 r0 = 0; r0 < R; r0 += together) {
      const i64 h0 = g * R + r0;
      for (i64 h = h0; h < h0 + together; ++h) {
        const i64 row = (b * a.H + h) * a.L + l0;
        fill(output + row * a.V, count * a.V, T(0));
        fill(peaks + row, count, lowest);
        fill(totals + row, count, T(0));
      }
      mark(a, a.lists + b * a.list_b + h0 * a.list_h + l0 * a.K, count, room.bits);
      for (i64 c = 0; c < a.buckets(); ++c)
        for (i64 i = 0; i < count; ++i) {
          const i64 n = listed(room.bits + (c * a.rows + i) * WORDS, at);
          if (n == 0) continue;
          const i64 width = padded(n);
          for (i64 h = h0; h < h0 + together; ++h) {
            const i64 row = (b * a.H + h) * a.L + l0 + i;
            T* s = room.scores;
            table_scores(a.query + row * a.C, keys + c * BUCKET * a.C, a.C, at, n, a.C, a.scale, s);
            fill(s + n, width - n, lowest);
            const T peak = larger(largest_of(s, 0, width), peaks[row]);
            // Where all scores are −inf, no weight is left; a difference of infinities would be NaN.
            const T base = peak == lowest ? T(0) : peak;
            const T keep = peaks[row] == lowest ? T(0) : exponential(peaks[row] - base);
            over_lanes<T>(width, [&](i64 j) { store(s + j, exponential(load<Vector<T>>(s + j) - base)); });
            totals[row] = keep * totals[row] + sum_of(s, 0, width);
            peaks[row] = peak;
            add_rows(output + row * a.V, keep, values + c * BUCKET * a.V, a.V, at, n, a.V, s);
          }
        }
      for (i64 h = h0; h < h0 + together; ++h)
        for (i64 i = 0; i < count; ++i) {
          const i64 row = (b * a.H + h) * a.L + l0 + i;
          if (totals[row] == T(0)) continue;
          const T inverse = T(1) / totals[row];
          T* o = output + row * a.V;
          over<T>(0, a.V, [&](i64 d, auto x) { store(o + d, inverse * load<decltype(x)>(o + d)); });
        }
    }
  }
}

// Add the gradients of queries, keys and values; a work item is a share of the parts of one head of keys.
//
// `lse` (B, H, L) is the log of a row's sum of exponentials, and `delta` the product of its output and gradient. Shares
// have their own gradients of keys and values.
template <class T>
void select_backward(
    const Selection<T>& a, i64 first, i64 last, i64 shares, const T* grad, const T* lse, const T* delta, T* d_query,
    T* d_key, T* d_value, void* memory) {
  const Room<T> room(a, memory);
  const i64 count_of_parts = parts(a.L, a.rows), R = a.heads_per_key(), together = a.together();
  constexpr T lowest = -std::numeric_limits<T>::infinity();
  i64 at[BUCKET];
  for (i64 item = first; item < last; ++item) {
    const i64 kv = item / shares, share = item % shares, b = kv / a.G, g = kv % a.G;
    const T *keys = a.key + kv * a.S * a.C, *values = a.value + kv * a.S * a.V;
    T *d_keys = d_key + (share * a.B * a.G + kv) * a.S * a.C, *d_values = d_value + (share * a.B * a.G + kv) * a.S * a.V;
    for (i64 part = share; part < count_of_parts; part += shares) {
      const i64 l0 = part * a.rows, count = least(a.rows, a.L - l0);
      for (i64 r0 = 0; r0 < R; r0 += together) {
        const i64 h0 = g * R + r0;
        mark(a, a.lists + b * a.list_b + h0 * a.list_h + l0 * a.K, count, room.bits);
        for (i64 c = 0; c < a.buckets(); ++c) {
          const i64 j0 = c * BUCKET;
          for (i64 i = 0; i < count; ++i) {
            const i64 n = listed(room.bits + (c * a.rows + i) * WORDS, at);
            if (n == 0) continue;
            const i64 width = padded(n);
            for (i64 h = h0; h < h0 + together; ++h) {
              const i64 row = (b * a.H + h) * a.L + l0 + i;
              if (lse[row] == lowest) continue;
              const T *q = a.query + row * a.C, *e = grad + row * a.V;
              T *p = room.scores, *slope = room.slopes;
              table_scores(q, keys + j0 * a.C, a.C, at, n, a.C, a.scale, p);
              table_scores(e, values + j0 * a.V, a.V, at, n, a.V, T(1), slope);
              fill(p + n, width - n, lowest);
              fill(slope + n, width - n, T(0));
              const T level = lse[row], mean = delta[row], scale = a.scale;
              over_lanes<T>(width, [&](i64 j) {
                using X = Vector<T>;
                const X weight = exponential(load<X>(p + j) - level);
                store(p + j, weight);
                store(slope + j, scale * weight * (load<X>(slope + j) - mean));
              });
              add_to_rows(d_values + j0 * a.V, a.V, at, n, a.V, p, e);
              add_to_rows(d_keys + j0 * a.C, a.C, at, n, a.C, slope, q);
              add_rows(d_query + row * a.C, T(1), keys + j0 * a.C, a.C, at, n, a.C, slope);
            }
          }
        }
      }
    }
  }
}

}  // namespace
