// Attention to selected keys: each query has a list of the keys that it sees.
//
// The queries of a part are handled together and their keys bucket by bucket: the rows of a bucket stay in the nearest
// cache while many queries read them. Keys, values and gradients have their turns one after another, since the cache
// holds one of them. Lists become bits first: they need no order, and a key that is named twice counts once.
#pragma once

#include "decoding.h"
#include "records.h"

namespace {

constexpr i64 WORD = 64;    // bits of a word
constexpr i64 MARKED = 64;  // queries whose keys are marked together

// The arrays and sizes of a call. Heads of queries are H, of keys and values G. Lists have K keys; that of sequence b and
// head h is number b·list_b + h·list_h. A part has so many `rows` of queries, a bucket the keys of so many `words`.
template <class T>
struct Selection {
  const T *query, *key, *value;
  uint64_t* bits;  // (lists, parts, words, row_of_bits)
  SELECTION_FIELDS(NUMBER_MEMBER)
  T scale;

  static Selection of(const T* q, const T* k, const T* v, uint64_t* bits, const i64* n, T scale) {
    Selection a{};
    a.query = q, a.key = k, a.value = v, a.bits = bits;
    std::memcpy(&a.B, n, (SELECTION_FIELDS(ONE)) * sizeof(i64));
    a.scale = scale;
    return a;
  }

  INLINE i64 all_words() const { return parts(S, WORD); }
  INLINE i64 all_parts() const { return parts(L, rows); }
  // No power of two, or words would share cache sets.
  INLINE i64 row_of_bits() const { return parts(rows, 8) * 8 + 8; }
  // The bits of a part, word by word of keys.
  INLINE uint64_t* bits_of(i64 list, i64 part) const {
    return bits + (list * all_parts() + part) * all_words() * row_of_bits();
  }
  INLINE const uint64_t* bits_of(i64 b, i64 h, i64 part) const { return bits_of(b * list_b + h * list_h, part); }
};

// Mark the keys of lists; a work item is a few queries of a part of a list. Indices of no key mark nothing: they were
// checked, but another thread may have changed them since.
template <class T>
void mark(const Selection<T>& a, i64 first, i64 last, const int32_t* lists) {
  const i64 row = a.row_of_bits(), shares = parts(a.rows, MARKED);
  for (i64 item = first; item < last; ++item) {
    const i64 list = item / shares / a.all_parts(), part = item / shares % a.all_parts();
    const i64 l0 = part * a.rows, i0 = item % shares * MARKED;
    const i64 count = least(least(MARKED, a.rows - i0), a.L - l0 - i0);
    uint64_t* bits = a.bits_of(list, part) + i0;
    if (count <= 0) continue;
    for (i64 word = 0; word < a.all_words(); ++word) std::memset(bits + word * row, 0, size_t(count) * sizeof(*bits));
    for (i64 i = 0; i < count; ++i) {
      const int32_t* keys = lists + (list * a.L + l0 + i0 + i) * a.K;
      for (i64 t = 0; t < a.K; ++t) {
        const uint64_t key = uint32_t(keys[t]);
        if (key < uint64_t(a.S)) bits[key / WORD * row + i] |= uint64_t{1} << key % WORD;
      }
    }
  }
}

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

// Write the numbers of a word's keys, and others behind them; return how many there are.
INLINE i64 keys_of(uint64_t word, i64 first, int32_t* keys) {
#if defined(__AVX512F__)
  __m512i lanes = _mm512_add_epi32(
      _mm512_set1_epi32(int32_t(first)), _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
  i64 n = 0;
  for (int quarter = 0; quarter < 4; ++quarter, word >>= 16) {
    _mm512_storeu_si512(keys + n, _mm512_maskz_compress_epi32(__mmask16(word), lanes));
    n += __builtin_popcountll(word & 0xffff);
    lanes = _mm512_add_epi32(lanes, _mm512_set1_epi32(16));
  }
  return n;
#else
  i64 n = 0;
  for (; word != 0; word &= word - 1) keys[n++] = int32_t(first) + __builtin_ctzll(word);
  return n;
#endif
}

// The keys of some queries in a bucket, query after query.
template <class T>
struct Bucket {
  const Selection<T>& a;
  T *scores, *slopes;         // two numbers of each pair
  int32_t *keys, *first, *n;  // of query i from `first[i]` on, n[i] of them
  i64 size = 0;

  Bucket(const Selection<T>& call, void* memory) : a(call) {
    const i64 most_pairs = a.rows * padded(least(a.K, a.words * WORD)) + PAD;
    scores = static_cast<T*>(memory);
    slopes = scores + most_pairs;
    keys = reinterpret_cast<int32_t*>(slopes + most_pairs);
    first = keys + most_pairs;
    n = first + a.rows;
  }

  // Find the keys of `count` queries from a word on; none where `lse` is given and −inf.
  OUTLINE void find(const uint64_t* bits, i64 word, i64 count, const T* lse = nullptr) {
    const i64 end = least(word + a.words, a.all_words()), row = a.row_of_bits();
    i64 at = 0;
    for (i64 i = 0; i < count; ++i) {
      first[i] = int32_t(at);
      i64 next = at;
      if (!lse || lse[i] != -std::numeric_limits<T>::infinity())
        for (i64 w = word; w < end; ++w)
          if (bits[w * row + i] != 0) next += keys_of(bits[w * row + i], w * WORD, keys + next);
      n[i] = int32_t(next - at);
      at = parts(next, TOGETHER) * TOGETHER;
    }
    size = at;
  }

  // Call `body(i, n, keys, place)` for each of `count` queries that has any of the keys found.
  template <class Body>
  INLINE void over_queries(i64 count, Body body) const {
    for (i64 i = 0; i < count; ++i)
      if (n[i] > 0) body(i, i64(n[i]), keys + first[i], i64(first[i]));
  }
};

// Turn scores of a row into weights relative to its maximum so far, which changes what was summed before.
template <class T>
INLINE void weigh_online(const T* s, i64 n, T& peak, T& total, T* o, i64 V, T* p) {
  using X = Vector<T>;
  constexpr T lowest = -std::numeric_limits<T>::infinity();
  const i64 width = parts(n, WIDTH<T>) * WIDTH<T>;
  const X behind = lane_numbers<T>(0) - T(n);
  const auto at = [&](i64 j) { return behind + T(j) < T(0) ? load<X>(s + j) : wide<X>(lowest); };
  X top = wide<X>(lowest);
  over_lanes<T>(width, [&](i64 j) { top = larger(at(j), top); });
  const T found = over_lanes_combined<T>(top, [](auto x, auto y) { return larger(x, y); });
  if (found > peak) {
    if (peak != lowest) {
      const T factor = exponential(peak - found);
      total *= factor;
      over<T>(0, V, [&](i64 v, auto like) { store(o + v, factor * load<decltype(like)>(o + v)); });
    }
    peak = found;
  }
  // Where all scores are −inf, no weight is left; a difference of infinities would be NaN.
  const T base = peak == lowest ? T(0) : peak;
  X sum{};
  over_lanes<T>(width, [&](i64 j) {
    const X weight = exponential(at(j) - base);
    sum += weight;
    store(p + j, weight);
  });
  total += sum_of_lanes<T>(sum);
}

// Write the output and, per row, the largest score and the sum of exponentials relative to it.
//
// A work item is a part of the queries of a head; a row that sees nothing has `peak` −inf and
// `total` 0.
template <class T>
void select_forward(const Selection<T>& a, i64 first, i64 last, T* output, T* peaks, T* totals, void* memory) {
  Bucket<T> bucket(a, memory);
  const i64 R = a.H / a.G;
  for (i64 item = first; item < last; ++item) {
    const i64 part = item % a.all_parts(), h = item / a.all_parts() % a.H, b = item / a.all_parts() / a.H;
    const i64 l0 = part * a.rows, count = least(a.rows, a.L - l0);
    const uint64_t* bits = a.bits_of(b, h, part);
    const i64 row = (b * a.H + h) * a.L + l0, kv = b * a.G + h / R;
    const T *queries = a.query + row * a.C, *keys = a.key + kv * a.S * a.C, *values = a.value + kv * a.S * a.V;
    T *outputs = output + row * a.V, *peak = peaks + row, *total = totals + row;
    fill(outputs, count * a.V, T(0));
    fill(peak, count, -std::numeric_limits<T>::infinity());
    fill(total, count, T(0));
    for (i64 word = 0; word < a.all_words(); word += a.words) {
      bucket.find(bits, word, count);
      bucket.over_queries(count, [&](i64 i, i64 n, const int32_t* rows, i64 at) {
        table_scores<false>(queries + i * a.C, keys, a.C, rows, n, a.C, a.scale, T(0), bucket.scores + at);
      });
      bucket.over_queries(count, [&](i64 i, i64 n, const int32_t* rows, i64 at) {
        T* o = outputs + i * a.V;
        weigh_online(bucket.scores + at, n, peak[i], total[i], o, a.V, bucket.slopes);
        add_rows(o, values, a.V, rows, n, a.V, bucket.slopes);
      });
    }
    for (i64 i = 0; i < count; ++i) {
      const T inverse = T(1) / (total[i] == T(0) ? T(1) : total[i]);
      T* o = outputs + i * a.V;
      over<T>(0, a.V, [&](i64 v, auto like) { store(o + v, inverse * load<decltype(like)>(o + v)); });
    }
  }
}

// Add the gradients of queries, keys and values; a work item is a share of the parts of one head of keys.
//
// `lse` (B, H, L) is the log of a row's sum of exponentials, and `delta` the product of its output and gradient. Shares
// have their own gradients of keys and values, which the `fresh` call writes before it adds to them: they are in the
// cache then.
template <class T>
void select_backward(
    const Selection<T>& a, i64 first, i64 last, i64 shares, bool fresh, const T* grad, const T* lse, const T* delta,
    T* d_query, T* d_key, T* d_value, void* memory) {
  Bucket<T> bucket(a, memory);
  const i64 R = a.H / a.G;
  T *weights = bucket.scores, *slopes = bucket.slopes;
  for (i64 item = first; item < last; ++item) {
    const i64 kv = item / shares, share = item % shares, b = kv / a.G, h0 = kv % a.G * R;
    const i64 sums = share * a.B * a.G + kv;
    const T *keys = a.key + kv * a.S * a.C, *values = a.value + kv * a.S * a.V;
    T *d_keys = d_key + sums * a.S * a.C, *d_values = d_value + sums * a.S * a.V;
    if (fresh && share >= a.all_parts()) {
      fill(d_keys, a.S * a.C, T(0));
      fill(d_values, a.S * a.V, T(0));
    }
    for (i64 part = share; part < a.all_parts(); part += shares) {
      const i64 l0 = part * a.rows, count = least(a.rows, a.L - l0);
      for (i64 h = h0; h < h0 + R; ++h) {
        const uint64_t* bits = a.bits_of(b, h, part);
        const i64 row = (b * a.H + h) * a.L + l0;
        const T *queries = a.query + row * a.C, *grads = grad + row * a.V;
        for (i64 word = 0; word < a.all_words(); word += a.words) {
          if (fresh && part == share && h == h0) {
            const i64 key = word * WORD, n = least(a.words * WORD, a.S - key);
            fill(d_keys + key * a.C, n * a.C, T(0));
            fill(d_values + key * a.V, n * a.V, T(0));
          }
          bucket.find(bits, word, count, lse + row);
          bucket.over_queries(count, [&](i64 i, i64 n, const int32_t* rows, i64 at) {
            table_scores<false>(queries + i * a.C, keys, a.C, rows, n, a.C, a.scale, lse[row + i], weights + at);
          });
          bucket.over_queries(count, [&](i64 i, i64 n, const int32_t* rows, i64 at) {
            table_scores<false>(grads + i * a.V, values, a.V, rows, n, a.V, T(1), delta[row + i], slopes + at);
          });
          over_lanes<T>(padded(bucket.size), [&](i64 j) {
            using X = Vector<T>;
            const X weight = exponential(load<X>(weights + j));
            store(weights + j, weight);
            store(slopes + j, a.scale * weight * load<X>(slopes + j));
          });
          bucket.over_queries(count, [&](i64 i, i64 n, const int32_t* rows, i64 at) {
            add_to_rows(d_values, a.V, rows, n, a.V, weights + at, grads + i * a.V);
          });
          bucket.over_queries(count, [&](i64 i, i64 n, const int32_t* rows, i64 at) {
            add_to_rows(d_keys, a.C, rows, n, a.C, slopes + at, queries + i * a.C);
            add_rows(d_query + (row + i) * a.C, keys, a.C, rows, n, a.C, slopes + at);
          });
        }
      }
    }
  }
}

}  // namespace
