// Attention to selected keys: each query has a list of the keys that it sees.
//
// The queries of a part are handled together and their keys bucket by bucket, so that the rows of a bucket stay in a cache
// while many queries read them. Keys, values and gradients have their turns one after another, since a cache holds one of
// them; scores wait for theirs in scratch memory. Lists are ordered by key first: they need no order, and a key that is
// named twice counts once.
#pragma once

#include "decoding.h"
#include "records.h"

namespace {

constexpr i64 WORDS = BUCKET / 64;  // words of its bits

// The arrays and sizes of a call. Heads of lists are 1, or as many as there are heads of queries; `list_b` and `list_h`
// are the strides of lists, 0 where they are shared. Heads of queries are H, of keys and values G. The forward pass
// handles so many heads `together`, which share a list.
template <class T>
struct Selection {
  const T *query, *key, *value;
  const int32_t* lists;
  SELECTION_FIELDS(NUMBER_MEMBER)
  T scale;

  static Selection of(const T* q, const T* k, const T* v, const int32_t* lists, const i64* n, T scale) {
    Selection a{};
    a.query = q, a.key = k, a.value = v, a.lists = lists;
    std::memcpy(&a.B, n, (SELECTION_FIELDS(ONE)) * sizeof(i64));
    a.scale = scale;
    return a;
  }

  INLINE i64 buckets() const { return parts(S, BUCKET); }
};

// Add Σ weight · row over listed rows.
template <class T>
OUTLINE void add_rows(T* o, const T* base, i64 row, const int32_t* at, i64 n, i64 D, const T* w) {
  using X = Vector<T>;
  with_vectors<T>(D, [&](auto count) {
    constexpr int N = count;
    if constexpr (N > 0) {
      X sums[N], others[N] = {};  // two sums each, as an addition waits for the one before
      UNROLLED
      for (int j = 0; j < N; ++j) sums[j] = load<X>(o + j * WIDTH<T>);
      i64 t = 0;
      for (; t + 2 <= n; t += 2) {
        const T *x = base + i64(at[t]) * row, *y = base + i64(at[t + 1]) * row, first = w[t], second = w[t + 1];
        UNROLLED
        for (int j = 0; j < N; ++j) sums[j] += first * load<X>(x + j * WIDTH<T>);
        UNROLLED
        for (int j = 0; j < N; ++j) others[j] += second * load<X>(y + j * WIDTH<T>);
      }
      if (t < n) {
        const T* x = base + i64(at[t]) * row;
        UNROLLED
        for (int j = 0; j < N; ++j) sums[j] += w[t] * load<X>(x + j * WIDTH<T>);
      }
      UNROLLED
      for (int j = 0; j < N; ++j) store(o + j * WIDTH<T>, sums[j] + others[j]);
    } else {
      over<T>(0, D, [&](i64 d, auto like) {
        auto sum = load<decltype(like)>(o + d);
        for (i64 t = 0; t < n; ++t) sum += w[t] * load<decltype(like)>(base + i64(at[t]) * row + d);
        store(o + d, sum);
      });
    }
  });
}

// Add weight · source to each listed row.
template <class T>
OUTLINE void add_to_rows(T* base, i64 row, const int32_t* at, i64 n, i64 D, const T* w, const T* source) {
  using X = Vector<T>;
  with_vectors<T>(D, [&](auto count) {
    constexpr int N = count;
    if constexpr (N > 0) {
      X added[N];
      UNROLLED
      for (int j = 0; j < N; ++j) added[j] = load<X>(source + j * WIDTH<T>);
      for (i64 t = 0; t < n; ++t) {
        T* x = base + i64(at[t]) * row;
        UNROLLED
        for (int j = 0; j < N; ++j) store(x + j * WIDTH<T>, load<X>(x + j * WIDTH<T>) + w[t] * added[j]);
      }
    } else {
      for (i64 t = 0; t < n; ++t) add_scaled(w[t], source, base + i64(at[t]) * row, D);
    }
  });
}

// The lists of some queries in the order of their keys: bucket by bucket, each key once.
//
// Those of query i begin at `keys + i * row`; `ends` (buckets, rows) says where each bucket's end.
struct Ordered {
  int32_t* keys;
  i64 row;
  int32_t* ends;
  i64 rows;

  INLINE i64 begin(i64 c, i64 i) const { return c == 0 ? 0 : ends[(c - 1) * rows + i]; }
  INLINE i64 end(i64 c, i64 i) const { return ends[c * rows + i]; }
  INLINE const int32_t* of(i64 i) const { return keys + i * row; }
};

// Scratch memory: the bits of a list, then the ordered lists, then room for two numbers of each pair.
template <class T>
struct Room {
  uint64_t* bits;
  Ordered lists;
  T *scores, *slopes;

  Room(const Selection<T>& a, void* memory) {
    const i64 row = padded(a.K) + PAD;
    bits = static_cast<uint64_t*>(memory);
    scores = reinterpret_cast<T*>(bits + padded(parts(a.S, 64)));
    slopes = scores + a.rows * row;
    int32_t* keys = reinterpret_cast<int32_t*>(slopes + a.rows * row);
    lists = {keys, row, keys + a.rows * row, a.rows};
  }
};

// Order the lists of `count` queries.
template <class T>
OUTLINE void order(const Selection<T>& a, const int32_t* given, i64 count, const Room<T>& room) {
  const i64 words = parts(a.S, 64);
  std::memset(room.bits, 0, size_t(words) * sizeof(uint64_t));
  for (i64 i = 0; i < count; ++i) {
    for (i64 t = 0; t < a.K; ++t) {
      const i64 j = given[i * a.K + t];
      if (j >= 0) room.bits[j / 64] |= uint64_t{1} << (j % 64);
    }
    int32_t* keys = room.lists.keys + i * room.lists.row;
    i64 n = 0;
    for (i64 c = 0; c < a.buckets(); ++c) {
      for (i64 w = c * WORDS; w < least((c + 1) * WORDS, words); ++w) {
        for (uint64_t word = room.bits[w]; word != 0; word &= word - 1)
          keys[n++] = int32_t(w * 64 + __builtin_ctzll(word));
        room.bits[w] = 0;
      }
      room.lists.ends[c * a.rows + i] = int32_t(n);
    }
  }
}

// Call `body(i, first, n, keys)` for the keys of each query in each bucket, of which there are n from the `first` on.
template <class T, class Body>
INLINE void by_bucket(const Selection<T>& a, const Ordered& lists, i64 count, Body body) {
  for (i64 c = 0; c < a.buckets(); ++c)
    for (i64 i = 0; i < count; ++i) {
      const i64 first = lists.begin(c, i), n = lists.end(c, i) - first;
      if (n > 0) body(i, first, n, lists.of(i) + first);
    }
}

// Write the output and, per row, the largest score and the sum of exponentials relative to it.
//
// A work item is a part of the queries of heads that are handled together; a row that sees nothing has `peak` −inf and
// `total` 0.
template <class T>
void select_forward(const Selection<T>& a, i64 first, i64 last, T* output, T* peaks, T* totals, void* memory) {
  const Room<T> room(a, memory);
  const Ordered& lists = room.lists;
  const i64 count_of_parts = parts(a.L, a.rows), R = a.H / a.G;
  constexpr T lowest = -std::numeric_limits<T>::infinity();
  for (i64 item = first; item < last; ++item) {
    const i64 head = item / count_of_parts * a.together, h0 = head % a.H, b = head / a.H;
    const i64 l0 = item % count_of_parts * a.rows, count = least(a.rows, a.L - l0);
    order(a, a.lists + b * a.list_b + h0 * a.list_h + l0 * a.K, count, room);
    for (i64 h = h0; h < h0 + a.together; ++h) {
      const i64 row = (b * a.H + h) * a.L + l0, kv = b * a.G + h / R;
      const T *keys = a.key + kv * a.S * a.C, *values = a.value + kv * a.S * a.V;
      by_bucket(a, lists, count, [&](i64 i, i64 at, i64 n, const int32_t* rows) {
        table_scores<false>(
            a.query + (row + i) * a.C, keys, a.C, rows, n, a.C, a.scale, room.scores + i * lists.row + at);
      });
      for (i64 i = 0; i < count; ++i) {
        T* s = room.scores + i * lists.row;
        const i64 n = lists.end(a.buckets() - 1, i), width = padded(n);
        fill(s + n, width - n, lowest);
        const T peak = largest_of(s, 0, width);
        // Where all scores are −inf, no weight is left; a difference of infinities would be NaN.
        const T base = peak == lowest ? T(0) : peak;
        over_lanes<T>(width, [&](i64 j) { store(s + j, exponential(load<Vector<T>>(s + j) - base)); });
        const T total = sum_of(s, 0, width), inverse = T(1) / (total == T(0) ? T(1) : total);
        over_lanes<T>(width, [&](i64 j) { store(s + j, inverse * load<Vector<T>>(s + j)); });
        peaks[row + i] = peak;
        totals[row + i] = total;
      }
      fill(output + row * a.V, count * a.V, T(0));
      by_bucket(a, lists, count, [&](i64 i, i64 at, i64 n, const int32_t* rows) {
        add_rows(output + (row + i) * a.V, values, a.V, rows, n, a.V, room.scores + i * lists.row + at);
      });
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
  const Ordered& lists = room.lists;
  const i64 count_of_parts = parts(a.L, a.rows), R = a.H / a.G;
  constexpr T lowest = -std::numeric_limits<T>::infinity();
  for (i64 item = first; item < last; ++item) {
    const i64 kv = item / shares, share = item % shares, b = kv / a.G, h0 = kv % a.G * R;
    for (i64 part = share; part < count_of_parts; part += shares) {
      const i64 l0 = part * a.rows, count = least(a.rows, a.L - l0);
      for (i64 h = h0; h < h0 + R; ++h) {
        if (h == h0 || a.list_h != 0) order(a, a.lists + b * a.list_b + h * a.list_h + l0 * a.K, count, room);
        const i64 row = (b * a.H + h) * a.L + l0, sums = share * a.B * a.G + kv;
        const T *keys = a.key + kv * a.S * a.C, *values = a.value + kv * a.S * a.V;
        T *d_keys = d_key + sums * a.S * a.C, *d_values = d_value + sums * a.S * a.V;
        by_bucket(a, lists, count, [&](i64 i, i64 at, i64 n, const int32_t* rows) {
          table_scores<false>(
              a.query + (row + i) * a.C, keys, a.C, rows, n, a.C, a.scale, room.scores + i * lists.row + at);
        });
        by_bucket(a, lists, count, [&](i64 i, i64 at, i64 n, const int32_t* rows) {
          table_scores<false>(
              grad + (row + i) * a.V, values, a.V, rows, n, a.V, T(1), room.slopes + i * lists.row + at);
        });
        for (i64 i = 0; i < count; ++i) {
          T *p = room.scores + i * lists.row, *slope = room.slopes + i * lists.row;
          const i64 n = lists.end(a.buckets() - 1, i), width = padded(n);
          fill(p + n, width - n, lowest);
          fill(slope + n, width - n, T(0));
          if (lse[row + i] == lowest) {
            fill(p, width, T(0));
            fill(slope, width, T(0));
            continue;
          }
          const T level = lse[row + i], mean = delta[row + i], scale = a.scale;
          over_lanes<T>(width, [&](i64 j) {
            using X = Vector<T>;
            const X weight = exponential(load<X>(p + j) - level);
            store(p + j, weight);
            store(slope + j, scale * weight * (load<X>(slope + j) - mean));
          });
        }
        by_bucket(a, lists, count, [&](i64 i, i64 at, i64 n, const int32_t* rows) {
          add_to_rows(d_values, a.V, rows, n, a.V, room.scores + i * lists.row + at, grad + (row + i) * a.V);
        });
        by_bucket(a, lists, count, [&](i64 i, i64 at, i64 n, const int32_t* rows) {
          const T* slope = room.slopes + i * lists.row + at;
          add_to_rows(d_keys, a.C, rows, n, a.C, slope, a.query + (row + i) * a.C);
          add_rows(d_query + (row + i) * a.C, keys, a.C, rows, n, a.C, slope);
        });
      }
    }
  }
}

}  // namespace
