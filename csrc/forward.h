// The forward pass over tiles, for any family of scores: an online softmax, or the sigmoid of each score.
//
// The state of a block of rows is, for each row, its maximum so far, the sum of its weights relative to that, what its
// entropy needs, and its largest score.
#pragma once

#include "linear.h"
#include "tiles.h"

namespace {

// Put a score among the K best of a row, largest first, if it is one of them.
template <class T>
INLINE void insert(T score, i64 key, T* best, i64* keys, i64 K) {
  if (!(score > best[K - 1])) return;
  i64 i = K - 1;
  for (; i > 0 && best[i - 1] < score; --i) {
    best[i] = best[i - 1];
    keys[i] = keys[i - 1];
  }
  best[i] = score;
  keys[i] = key;
}

// Merge the scores of a row into its K best so far; few of a long row are among them.
template <class T>
OUTLINE void keep_best(const T* s, i64 j0, i64 j1, i64 t0, T* best, i64* keys, i64 K) {
  using X = Vector<T>;
  constexpr i64 together = 4 * WIDTH<T>;
  for (; j0 + together <= j1; j0 += together) {
    X peak = wide<X>(best[K - 1]);
    UNROLLED
    for (int i = 0; i < 4; ++i) peak = larger(load<X>(s + j0 + i * WIDTH<T>), peak);
    if (lanes_above<T>(peak, best[K - 1]) == 0) continue;
    for (i64 j = j0; j < j0 + together; j += WIDTH<T>)
      for (uint32_t above = lanes_above<T>(load<X>(s + j), best[K - 1]); above != 0; above &= above - 1) {
        const i64 at = j + __builtin_ctz(above);
        insert(s[at], t0 + at, best, keys, K);
      }
  }
  for (; j0 < j1; ++j0) insert(s[j0], t0 + j0, best, keys, K);
}

// Write p = exp(s − peak) and return the sum; where `logs`, add Σ p (s − peak) over visible keys to `weighted`.
template <bool logs, class T>
OUTLINE T exponentials(const T* s, T* p, i64 j0, i64 j1, T peak, T& weighted) {
  using X = Vector<T>;
  constexpr T lowest = Constants<T>::lowest;  // weights of smaller ones are 0
  X first{}, second{}, first_log{}, second_log{};
  i64 j = j0;
  for (; j + 2 * WIDTH<T> <= j1; j += 2 * WIDTH<T>) {
    const X x = load<X>(s + j) - peak, y = load<X>(s + j + WIDTH<T>) - peak;
    const X one = exponential(x), other = exponential(y);
    store(p + j, one);
    store(p + j + WIDTH<T>, other);
    first += one;
    second += other;
    if constexpr (logs) {
      first_log += one * larger(x, wide<X>(lowest));
      second_log += other * larger(y, wide<X>(lowest));
    }
  }
  for (; j + WIDTH<T> <= j1; j += WIDTH<T>) {
    const X x = load<X>(s + j) - peak, one = exponential(x);
    store(p + j, one);
    first += one;
    if constexpr (logs) first_log += one * larger(x, wide<X>(lowest));
  }
  T rest = 0, rest_log = 0;
  for (; j < j1; ++j) {
    const T x = s[j] - peak;
    p[j] = exponential(x);
    rest += p[j];
    if constexpr (logs) rest_log += p[j] * larger(x, lowest);
  }
  if constexpr (logs) weighted += sum_of_lanes<T>(first_log + second_log) + rest_log;
  return sum_of_lanes<T>(first + second) + rest;
}

// Return Σ p log p.
template <class T>
OUTLINE T direct_logs(const T* p, i64 j0, i64 j1) {
  Sum<T> sum;
  over<T>(j0, j1, [&](i64 j, auto x) {
    using X = decltype(x);
    const X weight = load<X>(p + j);
    const X positive = weight > T(0) ? weight : wide<X>(1);
    sum.add(positive * logarithm(positive));
  });
  return sum.total();
}

// Add the values of a tile, weighted, to four rows of output.
template <class T>
void read(const Arguments<T>& a, i64 rows4, i64 j0, i64 j1, const T* p, const T* v, T* o) {
  const i64 V = a[F::V];
  if (a[F::value_lanes] == 0) {  // few values: keys are the lanes
    for (i64 c = 0; c < V; ++c) contract(o + rows4 * CHUNK + c, CHUNK, p + j0, v + c * ROW + j0, padded(j1 - j0));
    return;
  }
  for (i64 c = 0; c < V; c += CHUNK) {
    T* y = o + (c / CHUNK * BLOCK + rows4) * CHUNK;
    const T* values = v + c / CHUNK * ROW * CHUNK;
    product<GROUP>(y, CHUNK, values + j0 * CHUNK, CHUNK, p + j0, ROW, 1, j1 - j0, padded(least(CHUNK, V - c)));
  }
}

// Pack the values of a tile: keys are the lanes where values are few, else values are.
template <class T>
void pack_values(const Arguments<T>& a, i64 kv, i64 t0, i64 n, T* v) {
  const i64 S = a[F::S], V = a[F::V];
  const T* source = a.array(F::value) + (kv * S + t0) * V;
  if (a[F::value_lanes] == 0) {
    transpose(source, V, n, V, v, ROW, padded(n));
  } else {
    pack_lanes(source, V, n, V, v, ROW);
  }
}

// Write 1 / (1 + e^−s).
template <class T>
OUTLINE void sigmoids(const T* s, T* p, i64 j0, i64 j1) {
  over<T>(j0, j1, [&](i64 j, auto x) {
    using X = decltype(x);
    const X score = load<X>(s + j), power = exponential(-absolute(score));
    store(p + j, (score < T(0) ? power : wide<X>(1)) / (T(1) + power));
  });
}

// Turn scores into weights relative to each row's maximum so far, and update the rows' state; answer whether any key is
// seen. Weights that are computed directly stay where they are.
template <class T>
bool tile_weights(
    const Arguments<T>& a, i64 r0, i64 r1, i64 g, i64 t0, i64 j0, i64 j1, i64 head, T* s, T* p, T* state, T* o) {
  constexpr T minus = -std::numeric_limits<T>::infinity();
  const i64 L = a[F::L], K = a[F::K], V = a[F::V], behind = padded(j1 - j0) - (j1 - j0);
  const bool direct = a[F::direct] != 0, entropy = a[F::entropy] != 0;
  T *m = state, *totals = state + BLOCK, *e = state + 2 * BLOCK, *top = state + 3 * BLOCK;
  bool seen = false;
  for (i64 i = 0; i < GROUP; ++i) {
    const i64 row = g * GROUP + i;
    T *si = s + i * ROW, *pi = p + i * ROW;
    if (r0 + row >= r1) {  // it does not exist
      fill((direct ? si : pi) + j0, j1 - j0 + behind, T(0));
      continue;
    }
    if (direct && a[F::top] == 0 && !entropy && K == 0) {
      const T total = sum_of(si, j0, j1);
      totals[row] += total;
      seen = seen || total > T(0);
      fill(si + j1, behind, T(0));
      continue;
    }
    if (a[F::normalizer] == SIGMOID) {
      sigmoids(si, pi, j0, j1);
      fill(pi + j1, behind, T(0));
      m[row] = T(0);
      totals[row] = T(1);
      seen = true;
      continue;
    }
    const T peak = largest_of(si, j0, j1);
    if (K > 0) {
      const i64 place = (head * L + r0 + row) * K;
      T* best = a.array(F::best) + place;
      if (peak > (direct ? T(0) : minus) && peak > best[K - 1])
        keep_best(si, j0, j1, t0, best, a.integers(F::best_key) + place, K);
    }
    top[row] = peak > top[row] ? peak : top[row];
    if (direct) {
      totals[row] += sum_of(si, j0, j1);
      seen = seen || peak > T(0);
      if (entropy) e[row] += direct_logs(si, j0, j1);
      fill(si + j1, behind, T(0));
      continue;
    }
    if (peak > m[row]) {
      const T factor = exponential(m[row] - peak);
      e[row] = totals[row] > T(0) ? factor * (e[row] + totals[row] * (m[row] - peak)) : T(0);
      totals[row] *= factor;
      if (m[row] > minus)
        for (i64 c = 0; c < V; c += CHUNK) {
          T* y = o + (c / CHUNK * BLOCK + row) * CHUNK;
          over_lanes<T>(CHUNK, [&](i64 v) { store(y + v, factor * load<Vector<T>>(y + v)); });
        }
      m[row] = peak;
    }
    if (m[row] > minus) {
      totals[row] += entropy ? exponentials<true>(si, pi, j0, j1, m[row], e[row])
                             : exponentials<false>(si, pi, j0, j1, m[row], e[row]);
      seen = true;
    } else {  // nothing is visible, or what is visible is NaN
      fill(pi + j0, j1 - j0, T(0));
      for (i64 j = j0; j < j1; ++j) totals[row] = si[j] != si[j] ? si[j] : totals[row];
    }
    fill(pi + j1, behind, T(0));
  }
  return seen;
}

// The factor by which a row's weights, relative to its maximum, become shares of their sum, and of the sink where the
// row has one. A row without keys has none.
template <class T>
INLINE T share_of(const Arguments<T>& a, i64 place, T peak, T total) {
  if (!(total > T(0) || total != total)) return T(0);
  if (a[F::sink] == 0) return T(1) / total;
  const T sink = a.array(F::sink)[place], top = larger(peak, sink), factor = exponential(peak - top);
  return factor / (total * factor + exponential(sink - top));
}

// Mark the output as flawed if a number of a block's is not finite: 0 times that is NaN.
template <class T>
void check(const Arguments<T>& a, const T* output, i64 count) {
  Sum<T> sum;
  over<T>(0, count, [&](i64 i, auto x) { sum.add(load<decltype(x)>(output + i) * T(0)); });
  if (sum.total() != T(0)) __atomic_store_n(a.integers(F::flawed), 1, __ATOMIC_RELAXED);
}

// Write the output and the statistics of a block.
template <class T>
void finish(const Arguments<T>& a, i64 head, i64 r0, i64 r1, const T* state, const T* o) {
  const i64 L = a[F::L], V = a[F::V];
  const T* totals = state + BLOCK;
  for (i64 row = 0; row < r1 - r0; ++row) {
    const i64 place = head * L + r0 + row;
    const T total = totals[row], share = share_of(a, place, state[row], total);
    T* out = a.array(F::output) + place * V;
    for (i64 c = 0; c < V; c += CHUNK) {
      const T* y = o + (c / CHUNK * BLOCK + row) * CHUNK;
      over<T>(0, least(CHUNK, V - c), [&](i64 v, auto x) { store(out + c + v, load<decltype(x)>(y + v) * share); });
    }
    a.array(F::peak)[place] = state[row];
    a.array(F::total)[place] = total;
    if (a[F::top] != 0) a.array(F::top)[place] = state[3 * BLOCK + row];
    if (a[F::entropy] != 0) a.array(F::entropy)[place] = state[2 * BLOCK + row];
  }
  check(a, a.array(F::output) + (head * L + r0) * V, (r1 - r0) * V);
}

// Add the finished weights of a block to what each key received, in a second sweep.
template <class Family, class T>
void add_received(const Arguments<T>& a, i64 head, i64 r0, i64 r1, T* k, T* s, const T* state) {
  const i64 S = a[F::S], tile = a[F::tile];
  const T *m = state, *totals = state + BLOCK;
  T* target = a.array(F::received) + (head - a[F::head_first]) * S;
  for (i64 index = 0; index < most(a[F::segment_count], 1); ++index) {
    const Segment keys = segment(a, head, r0, r1, index);
    for (i64 t0 = keys.start; t0 < keys.stop; t0 += tile) {
      const i64 n = least(tile, keys.stop - t0), column = keys.column >= 0 ? keys.column + t0 - keys.start : -1;
      if (!Family::pack(a, head, kv_head(a, head), r0, r1, t0, n, k)) continue;
      for (i64 g = 0; g < parts(r1 - r0, GROUP); ++g) {
        const Range seen = tile_scores<Family>(a, head, r0, r1, g, t0, n, column, k, s);
        for (i64 i = 0; i < least(GROUP, r1 - r0 - g * GROUP); ++i) {
          const i64 row = g * GROUP + i;
          if (seen.stop <= seen.start || !(totals[row] > T(0))) continue;
          const T *si = s + i * ROW, share = share_of(a, head * a[F::L] + r0 + row, m[row], totals[row]);
          over<T>(seen.start, seen.stop, [&](i64 j, auto x) {
            using X = decltype(x);
            const X score = load<X>(si + j), weight = a[F::direct] != 0 ? score : exponential(score - m[row]);
            store(target + t0 + j, load<X>(target + t0 + j) + weight * share);
          });
        }
      }
    }
  }
}

// Blocks that meet a packed tile of keys one after another. Where blocks see different keys, tiles are their own.
template <class Family, class T>
INLINE i64 blocks_together([[maybe_unused]] const Arguments<T>& a) {
  if constexpr (Family::in_place)
    return 1;
  else
    return Family::linear && a[F::segment_count] == 0 && a[F::start] == 0 ? BLOCKS : 1;
}

template <class Family, class T>
void online_forward(const Arguments<T>& a) {
  constexpr T minus = -std::numeric_limits<T>::infinity();
  [[maybe_unused]] T* v = a.scratch(F::at_value);
  T *k = a.scratch(F::at_key), *s = a.scratch(F::at_score), *p = a.scratch(F::at_weight);
  const i64 L = a[F::L], tile = a[F::tile], size = most(parts(a[F::V], CHUNK), 1) * BLOCK * CHUNK;
  const T lowest = a[F::direct] != 0 ? T(0) : minus;
  const i64 blocks = a[F::segment_count] != 0 ? 1 : parts(L, BLOCK), together = blocks_together<Family>(a);
  for (i64 item = a[F::first], end; item < a[F::last]; item = end) {
    const i64 head = item / blocks, kv = kv_head(a, head);
    end = least(least(a[F::last], (head + 1) * blocks), item + together);
    const i64 first = (a[F::block] + item % blocks) * BLOCK, stop = least(L, first + (end - item) * BLOCK);
    for (i64 i = 0; i < end - item; ++i) {
      T *state = a.scratch(F::at_state) + i * 4 * BLOCK, *o = a.scratch(F::at_output) + i * size;
      fill(state, BLOCK, lowest);
      fill(state + BLOCK, 2 * BLOCK, T(0));
      fill(state + 3 * BLOCK, BLOCK, lowest);
      fill(o, size, T(0));
    }
    for (i64 index = 0; index < most(a[F::segment_count], 1); ++index) {
      const Segment keys = segment(a, head, first, stop, index);
      for (i64 t0 = keys.start; t0 < keys.stop; t0 += tile) {
        const i64 n = least(tile, keys.stop - t0), column = keys.column >= 0 ? keys.column + t0 - keys.start : -1;
        if (!Family::pack(a, head, kv, first, stop, t0, n, k)) continue;
        [[maybe_unused]] bool is_packed = false;
        for (i64 i = 0; i < end - item; ++i) {
          const i64 r0 = first + i * BLOCK, r1 = least(stop, r0 + BLOCK);
          T *state = a.scratch(F::at_state) + i * 4 * BLOCK, *o = a.scratch(F::at_output) + i * size;
          for (i64 g = 0; g < parts(r1 - r0, GROUP); ++g) {
            const Range seen = tile_scores<Family>(a, head, r0, r1, g, t0, n, column, k, s);
            const i64 j0 = seen.start, j1 = seen.stop;
            if (j1 <= j0 || !tile_weights(a, r0, r1, g, t0, j0, j1, head, s, p, state, o)) continue;
            if constexpr (Family::in_place) {
              Family::read(a, head, g * GROUP, least(GROUP, r1 - r0 - g * GROUP), t0, j0, j1, p, o);
            } else {
              if (!is_packed) pack_values(a, kv, t0, n, v);
              is_packed = true;
              T* weights = a[F::direct] != 0 ? s : p;
              if (a[F::threshold] != 0) drop(a, head, r0 + g * GROUP, r1 - 1, t0 + j0, j0, padded(j1 - j0), weights);
              read(a, g * GROUP, j0, j1, weights, v, o);
            }
          }
        }
      }
    }
    for (i64 i = 0; i < end - item; ++i) {
      const i64 r0 = first + i * BLOCK, r1 = least(stop, r0 + BLOCK);
      const T* state = a.scratch(F::at_state) + i * 4 * BLOCK;
      finish(a, head, r0, r1, state, a.scratch(F::at_output) + i * size);
      if (a[F::received] != 0) add_received<Family>(a, head, r0, r1, k, s, state);
    }
  }
}

}  // namespace
