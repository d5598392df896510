// The backward pass over tiles, for any family of scores: weights are recomputed from what the forward pass kept.
#pragma once

#include "threshold.h"

namespace {

// Write the weights of one row; zeros if it does not exist.
template <class T>
OUTLINE void row_weights(const Arguments<T>& a, i64 head, i64 row, i64 j0, i64 j1, const T* s, T* p, bool exists) {
  const i64 place = head * a[F::L] + row, end = j0 + padded(j1 - j0);
  const T peak = a.array(F::peak)[place], total = a.array(F::total)[place];
  if (!exists || (total == T(0) && a[F::normalizer] == SOFTMAX)) {
    fill(p + j0, end - j0, T(0));
    return;
  }
  if (a[F::normalizer] == ENTMAX) return entmax_weights(s + j0, p + j0, j1 - j0, {peak, total}, a.alpha());
  if (a[F::normalizer] == SIGMOID) {
    sigmoids(s, p, j0, j1);
    return fill(p + j1, end - j1, T(0));
  }
  const T share = T(1) / total;
  const bool direct = a[F::direct] != 0;
  over<T>(j0, j1, [&](i64 j, auto x) {
    const auto score = load<decltype(x)>(s + j);
    store(p + j, (direct ? score : exponential(score - peak)) * share);
  });
  fill(p + j1, end - j1, T(0));
}

// Write the gradients of a group's weights, `grad · value`; the group has `count` rows.
template <class T>
void weight_gradients(const Arguments<T>& a, i64 place, i64 count, i64 j0, i64 lanes, const T* v, T* dp) {
  const i64 V = a[F::V];
  const T* grad = a.array(F::grad) + place * V;
  for (i64 i = 0; i < GROUP; ++i) fill(dp + i * ROW + j0, lanes, T(0));
  if (count == GROUP) {
    product<GROUP>(dp + j0, ROW, v + j0, ROW, grad, V, 1, V, lanes);
    return;
  }
  for (i64 i = 0; i < count; ++i) product<1>(dp + i * ROW + j0, ROW, v + j0, ROW, grad + i * V, V, 1, V, lanes);
}

// Add gradients of the scores of four rows to those of the bias tensor; keys begin at t0, and rows that do not exist
// are zeros. Where rows share a bias, each block has a sum of its own, to which no other thread adds.
template <class T>
void add_bias_gradients(const Arguments<T>& a, i64 head, i64 row, i64 last, i64 t0, i64 j0, i64 j1, const T* ds) {
  const i64 H = a[F::H], step = a[F::d_bias_r];
  const bool by_row = a[F::d_bias_by_row] != 0;
  T* target = a.array(F::d_bias) + head / H * a[F::d_bias_b] + head % H * a[F::d_bias_h];
  target += (by_row ? row : row / BLOCK) * step;
  if (a[F::d_bias_c] == 0) {
    for (i64 i = 0; i < least(GROUP, last - row + 1); ++i) target[by_row ? i * step : 0] += sum_of(ds + i * ROW, j0, j1);
    return;
  }
  target += t0;
  if (by_row) {
    for (i64 i = 0; i < least(GROUP, last - row + 1); ++i) {
      T* to = target + i * step;
      const T* from = ds + i * ROW;
      over<T>(j0, j1, [&](i64 j, auto x) { store(to + j, load<decltype(x)>(to + j) + load<decltype(x)>(from + j)); });
    }
    return;
  }
  over<T>(j0, j1, [&](i64 j, auto x) {
    using X = decltype(x);
    const X one = load<X>(ds + j) + load<X>(ds + ROW + j);
    const X other = load<X>(ds + 2 * ROW + j) + load<X>(ds + 3 * ROW + j);
    store(target + j, load<X>(target + j) + (one + other));
  });
}

// d weight / d score where the rest of the row stays, as a function of the weight. NaN stays NaN.
template <class X>
INLINE X slope_of(X weight, i64 normalizer, double alpha) {
  using T = Real<X>;
  if (normalizer == SOFTMAX) return weight;
  if (normalizer == SIGMOID) return weight * (T(1) - weight);
  const auto some = weight > T(0);
  if (alpha == 2) return some ? wide<X>(1) : weight;
  if (alpha == 1.5) return square_root(weight);
  return some ? exponential(T(2 - alpha) * logarithm(some ? weight : wide<X>(1))) : weight;
}

// Replace the gradients of weights by those of scores in four rows, and add them to those of biases if wanted.
template <class T>
OUTLINE void score_gradients(
    const Arguments<T>& a, i64 head, i64 row, i64 last, i64 t0, i64 j0, i64 j1, const T* p, T* dp, const T* delta,
    i64 column) {
  const i64 normalizer = a[F::normalizer];
  const double alpha = a.alpha();
  for (i64 i = 0; i < GROUP; ++i) {
    const T* pi = p + i * ROW;
    T* di = dp + i * ROW;
    const T mean = delta[i];
    over<T>(j0, j1, [&](i64 j, auto x) {
      using X = decltype(x);
      const X weight = load<X>(pi + j), slope = slope_of(weight, normalizer, alpha);
      store(di + j, weight != T(0) ? slope * (load<X>(di + j) - mean) : X{});
    });
    fill(di + j1, padded(j1 - j0) - (j1 - j0), T(0));
    if (a[F::d_added] != 0 && column >= 0 && row + i <= last) {
      T* target = a.array(F::d_added) + place_of_added(a, head, row + i, column);
      over<T>(j0, j1, [&](i64 j, auto x) {
        store(target + j, load<decltype(x)>(target + j) + load<decltype(x)>(di + j));
      });
    }
  }
  if (a[F::d_bias] != 0) add_bias_gradients(a, head, row, last, t0, j0, j1, dp);
}

// Add the slopes of a row's weights, and their products with the gradients of the weights.
template <class T>
OUTLINE void add_mean(const T* p, const T* dp, i64 j0, i64 j1, double alpha, T& sum, T& total) {
  Sum<T> products, slopes;
  over<T>(j0, j1, [&](i64 j, auto x) {
    using X = decltype(x);
    const X slope = slope_of(load<X>(p + j), ENTMAX, alpha);
    slopes.add(slope);
    products.add(slope != T(0) ? slope * load<X>(dp + j) : X{});
  });
  sum += products.total();
  total += slopes.total();
}

// Set four rows to zero in the part of a band that is not their own.
template <class T>
void clear_outside(T* rows, i64 b0, i64 b1, i64 j0, i64 j1) {
  for (i64 i = 0; i < GROUP; ++i) {
    fill(rows + i * ROW + b0, j0 - b0, T(0));
    fill(rows + i * ROW + j1, b1 - j1, T(0));
  }
}

// Add a band's factors (`count` rows, by key) times as many rows of a block to the keys' gradient.
template <class T>
void pull_band(i64 width, i64 row, i64 count, i64 b0, i64 b1, const T* factors, const T* rows, T* gradient) {
  for (i64 c = 0; c < width; c += CHUNK) {
    const T* x = rows + (c / CHUNK * BLOCK + row) * CHUNK;
    T* y = gradient + c / CHUNK * ROW * CHUNK;
    const i64 lanes = padded(least(CHUNK, width - c));
    for (i64 j = b0; j < b1; j += GROUP)
      product<GROUP>(y + j * CHUNK, CHUNK, x, CHUNK, factors + j, 1, ROW, count, lanes);
  }
}

// Add the gradient of four rows' dot products to queries.
template <class T>
void pull_queries(i64 width, i64 row, i64 j0, i64 j1, const T* ds, const T* keys, T* dq) {
  for (i64 c = 0; c < width; c += CHUNK) {
    T* y = dq + (c / CHUNK * BLOCK + row) * CHUNK;
    const T* x = keys + (c / CHUNK * ROW + j0) * CHUNK;
    product<GROUP>(y, CHUNK, x, CHUNK, ds + j0, ROW, 1, j1 - j0, padded(least(CHUNK, width - c)));
  }
}

// The scratch memory of a backward pass.
template <class T>
struct Parts {
  T *k, *keys, *v, *s, *p, *ds, *grads, *rows, *dq, *dk, *dv, *delta;

  explicit Parts(const Arguments<T>& a)
      : k(a.scratch(F::at_key)), keys(k + a[F::C] * ROW), v(a.scratch(F::at_value)), s(a.scratch(F::at_score)),
        p(a.scratch(F::at_weight)), ds(a.scratch(F::at_d_score)), grads(a.scratch(F::at_state)),
        rows(a.scratch(F::at_rows)), dq(a.scratch(F::at_d_query)), dk(a.scratch(F::at_d_key)),
        dv(a.scratch(F::at_output)), delta(a.scratch(F::at_delta)) {}
};

// Pack what the keys' gradients are sums of: the gradients of a block's output, and its queries. `delta` is each row's
// `grad · output`, which for softmax is the mean of the gradients of its weights.
template <class Family, class T>
void begin_block(const Arguments<T>& a, i64 head, i64 r0, i64 r1, const Parts<T>& to) {
  const i64 V = a[F::V], C = a[F::C], first = head * a[F::L] + r0;
  fill(to.delta, BLOCK, T(0));
  for (i64 i = 0; i < r1 - r0; ++i) {
    const T *grad = a.array(F::grad) + (first + i) * V, *output = a.array(F::output) + (first + i) * V;
    if (a[F::normalizer] != SOFTMAX) continue;
    Sum<T> sum;
    over<T>(0, V, [&](i64 c, auto x) { sum.add(load<decltype(x)>(grad + c) * load<decltype(x)>(output + c)); });
    to.delta[i] = sum.total();
  }
  fill(to.grads, parts(V, CHUNK) * BLOCK * CHUNK, T(0));
  pack_lanes(a.array(F::grad) + first * V, V, r1 - r0, V, to.grads, BLOCK);
  if constexpr (Family::linear) {
    fill(to.rows, parts(C, CHUNK) * BLOCK * CHUNK, T(0));
    fill(to.dq, parts(C, CHUNK) * BLOCK * CHUNK, T(0));
    pack_lanes(a.array(F::query) + first * C, C, r1 - r0, C, to.rows, BLOCK);
  }
}

// Pack a tile's values, keys as lanes, and clear the gradients of its keys and values.
template <class Family, class T>
void begin_tile(const Arguments<T>& a, i64 kv, i64 t0, i64 n, const Parts<T>& to) {
  const i64 V = a[F::V], S = a[F::S], C = a[F::C], height = padded(n);
  transpose(a.array(F::value) + (kv * S + t0) * V, V, n, V, to.v, ROW, height);
  for (i64 c = 0; c < V; c += CHUNK) fill(to.dv + c / CHUNK * ROW * CHUNK, height * CHUNK, T(0));
  if constexpr (Family::linear) {
    pack_lanes(a.array(F::key_raw) + (kv * S + t0) * C, C, n, C, to.keys, ROW);
    for (i64 c = 0; c < C; c += CHUNK) fill(to.dk + c / CHUNK * ROW * CHUNK, height * CHUNK, T(0));
  } else {
    for (i64 c = 0; c < C; ++c) fill(to.dk + c * ROW, height, T(0));
  }
}

// Add the gradients of a tile's keys and values to those of all.
template <class Family, class T>
void end_tile(const Arguments<T>& a, i64 mine, i64 t0, i64 n, const Parts<T>& from) {
  const i64 V = a[F::V], S = a[F::S], C = a[F::C];
  add_lanes(from.dv, ROW, n, V, a.array(F::d_value) + (mine * S + t0) * V, V);
  if constexpr (Family::linear)
    add_lanes(from.dk, ROW, n, C, a.array(F::d_key) + (mine * S + t0) * C, C);
  else
    add_rows(from.dk, ROW, C, n, a.array(F::d_key) + mine * C * S + t0, S);
}

// Write the weights of four rows and the gradients of their scores, and pull these back to queries.
template <class Family, class T>
void pull_group(
    const Arguments<T>& a, i64 head, i64 r0, i64 r1, i64 g, i64 t0, i64 n, i64 column, i64 b0, i64 b1, T* p, T* ds,
    const Parts<T>& in) {
  const Range seen = tile_scores<Family>(a, head, r0, r1, g, t0, n, column, in.k, in.s);
  const i64 j0 = seen.start, j1 = seen.stop;
  if (j1 <= j0) {
    clear_outside(p, b0, b1, b1, b1);
    clear_outside(ds, b0, b1, b1, b1);
    return;
  }
  const i64 row = r0 + g * GROUP, last = r1 - 1, lanes = padded(j1 - j0);
  for (i64 i = 0; i < GROUP; ++i)
    row_weights(a, head, least(row + i, last), j0, j1, in.s + i * ROW, p + i * ROW, row + i <= last);
  weight_gradients(a, head * a[F::L] + row, least(GROUP, r1 - row), j0, lanes, in.v, ds);
  if (a[F::threshold] != 0) drop(a, head, row, last, t0 + j0, j0, lanes, ds);
  score_gradients(a, head, row, last, t0, j0, j1, p, ds, in.delta + g * GROUP, column);
  if (a.softcap != T(0)) uncap(j0, lanes, in.s, ds);
  if (a[F::threshold] != 0) drop(a, head, row, last, t0 + j0, j0, lanes, p);
  clear_outside(p, b0, b1, j0, least(j0 + lanes, b1));
  if constexpr (Family::linear) {
    clear_outside(ds, b0, b1, j0, least(j0 + lanes, b1));
    pull_queries(a[F::C], g * GROUP, j0, j1, ds, in.keys, in.dq);
  } else {
    T* d_query = a.array(F::d_query) + (head * a[F::L] + row) * a[F::C];
    const i64 H = a[F::H], mine = head / H * a[F::head_b] + head % H * a[F::head_h] - a[F::head_first];
    T* d_weight = a.array(F::d_weight) + mine * 2 * a[F::C];
    Family::pull(a, head, row, last, t0, j0, lanes, in.k, in.s, ds, d_query, in.dk, d_weight);
  }
}

// Take the gradient of one row of dot products to its query, and to the keys with weight and their values.
template <class T>
OUTLINE void pull_some(
    const Arguments<T>& a, i64 head, i64 row, i64 mine, const Candidates<T>& found, T* gradients) {
  const i64 C = a[F::C], V = a[F::V], S = a[F::S], kv = kv_head(a, head);
  const i64 place = head * a[F::L] + row;
  const T *grad = a.array(F::grad) + place * V, *query = a.array(F::query) + place * C;
  const T *values = a.array(F::value) + kv * S * V, *keys = a.array(F::key_raw) + kv * S * C;
  T *d_query = a.array(F::d_query) + place * C, *d_keys = a.array(F::d_key) + mine * S * C;
  T* d_values = a.array(F::d_value) + mine * S * V;
  const double alpha = a.alpha();
  T total = 0, slopes = 0;
  for (i64 i = 0; i < found.count; ++i) {
    const T* value = values + found.keys[i] * V;
    const T slope = slope_of(found.scores[i], ENTMAX, alpha);
    Sum<T> sum;
    over<T>(0, V, [&](i64 c, auto x) { sum.add(load<decltype(x)>(grad + c) * load<decltype(x)>(value + c)); });
    gradients[i] = sum.total();
    total += slope * gradients[i];
    slopes += slope;
  }
  const T mean = slopes != T(0) ? total / slopes : T(0);
  fill(d_query, C, T(0));
  for (i64 i = 0; i < found.count; ++i) {
    const i64 key = found.keys[i];
    const T slope = slope_of(found.scores[i], ENTMAX, alpha), gradient = slope * (gradients[i] - mean);
    add_scaled(found.scores[i], grad, d_values + key * V, V);
    add_scaled(gradient, query, d_keys + key * C, C);
    add_scaled(gradient, keys + key * C, d_query, C);
  }
}

// Pull the gradients of a block back through the keys that have weight; answer whether these are few enough, and
// nothing is wanted that needs all scores of a tile: gradients of a bias, a softcap or dropout.
template <class Family, class T>
bool pull_sparsely(const Arguments<T>& a, i64 head, i64 r0, i64 r1, i64 mine, const Parts<T>& in) {
  const T *shifts = a.array(F::peak) + head * a[F::L], *offsets = a.array(F::total) + head * a[F::L];
  for (i64 row = r0; row < r1; ++row)
    if (shifts[row] != shifts[row]) return false;
  if (a[F::d_added] != 0 || a[F::d_bias] != 0 || a[F::threshold] != 0 || a.softcap != T(0)) return false;
  const i64 n = count_of_keys(a, head, r0, r1);
  T* line = a.scratch(F::at_line);
  const Held<T> held{a.scratch(F::at_held), in.delta, in.p, a[F::held_row]};
  for (i64 q0 = r0; q0 < r1; q0 += a[F::held]) {
    const i64 q1 = least(q0 + a[F::held], r1);
    hold<Family>(a, head, r0, r1, q0, q1, in.k, in.s, held);
    for (i64 pass = q0 == r0 ? 0 : 1; pass < 2; ++pass) {  // the first rows tell how many keys have weight
      i64 total = 0;
      for (i64 row = q0; row < (pass == 0 ? least(q0 + GROUP, q1) : q1); ++row) {
        Candidates<T> found{a.scratch(F::at_found), reinterpret_cast<int32_t*>(a.scratch(F::at_place)), 0};
        const T bound = bound_of(shifts[row] + offsets[row], 0);
        over_runs(a, head, r0, r1, n, held.scores + (row - q0) * held.row, [&](const T* s, i64 count, i64 key) {
          collect(found, s, count, bound, key, 1);
        });
        total += found.count;
        if (pass == 0) continue;
        keep_weighted(found, {shifts[row], offsets[row]}, a.alpha(), line);
        pull_some(a, head, row, mine, found, line);
      }
      if (pass == 0 && SPARSE * total > n * least(GROUP, q1 - q0)) return false;
    }
  }
  return true;
}

// Write the mean of the gradients of each row's weights, weighted by their slopes, in a sweep of its own.
template <class Family, class T>
void entmax_means(const Arguments<T>& a, i64 head, i64 r0, i64 r1, const Parts<T>& in) {
  const i64 V = a[F::V], S = a[F::S], kv = kv_head(a, head);
  const double alpha = a.alpha();
  T sums[BLOCK] = {}, slopes[BLOCK] = {};
  over_tiles(a, head, r0, r1, [&](i64 t0, i64 n, i64 column, i64) {
    if (!Family::pack(a, head, kv, r0, r1, t0, n, in.k)) return;
    transpose(a.array(F::value) + (kv * S + t0) * V, V, n, V, in.v, ROW, padded(n));
    for (i64 row = r0; row < r1; row += GROUP) {
      const Range seen = tile_scores<Family>(a, head, r0, r1, (row - r0) / GROUP, t0, n, column, in.k, in.s);
      const i64 j0 = seen.start, j1 = seen.stop, count = least(GROUP, r1 - row);
      if (j1 <= j0) continue;
      for (i64 i = 0; i < count; ++i) row_weights(a, head, row + i, j0, j1, in.s + i * ROW, in.p + i * ROW, true);
      weight_gradients(a, head * a[F::L] + row, count, j0, padded(j1 - j0), in.v, in.ds);
      if (a[F::threshold] != 0) drop(a, head, row, r1 - 1, t0 + j0, j0, padded(j1 - j0), in.ds);
      for (i64 i = 0; i < count; ++i)
        add_mean(in.p + i * ROW, in.ds + i * ROW, j0, j1, alpha, sums[row - r0 + i], slopes[row - r0 + i]);
    }
  });
  for (i64 row = 0; row < BLOCK; ++row) in.delta[row] = slopes[row] != T(0) ? sums[row] / slopes[row] : T(0);
}

template <class Family, class T>
void backward(const Arguments<T>& a) {
  const Parts<T> in(a);
  const i64 L = a[F::L], C = a[F::C], V = a[F::V], tile = a[F::tile];
  const i64 blocks = a[F::segment_count] != 0 ? 1 : parts(L, BLOCK);
  for (i64 turn = a[F::first]; turn < a[F::last]; ++turn) {
    const i64 item = a[F::order] != 0 ? a.integers(F::order)[turn] : turn;
    const i64 head = item / blocks, r0 = (a[F::block] + item % blocks) * BLOCK, r1 = least(L, r0 + BLOCK);
    const i64 kv = kv_head(a, head), G = a[F::G];
    const i64 mine = kv / G * a[F::kv_b] + kv % G * a[F::kv_h] - a[F::kv_first];  // the place of its gradients
    if constexpr (Family::linear)
      if (a[F::normalizer] == ENTMAX && pull_sparsely<Family>(a, head, r0, r1, mine, in)) continue;
    begin_block<Family>(a, head, r0, r1, in);
    if (a[F::normalizer] == ENTMAX) entmax_means<Family>(a, head, r0, r1, in);
    for (i64 index = 0; index < most(a[F::segment_count], 1); ++index) {
      const Segment keys = segment(a, head, r0, r1, index);
      for (i64 t0 = keys.start; t0 < keys.stop; t0 += tile) {
        const i64 n = least(tile, keys.stop - t0), column = keys.column >= 0 ? keys.column + t0 - keys.start : -1;
        if (!Family::pack(a, head, kv, r0, r1, t0, n, in.k)) continue;
        begin_tile<Family>(a, kv, t0, n, in);
        for (i64 first = 0; first < r1 - r0; first += BAND) {
          const i64 count = least(BAND, parts(r1 - r0 - first, GROUP) * GROUP);
          const Range band = group_range(a, head, r0 + first, least(r0 + first + count, r1) - 1, t0, n);
          if (band.stop <= band.start) continue;
          const i64 b0 = band.start, b1 = b0 + padded(band.stop - b0);
          for (i64 i = 0; i < count; i += GROUP)
            pull_group<Family>(
                a, head, r0, r1, (first + i) / GROUP, t0, n, column, b0, b1, in.p + i * ROW, in.ds + i * ROW, in);
          pull_band(V, first, count, b0, b1, in.p, in.grads, in.dv);
          if constexpr (Family::linear) pull_band(C, first, count, b0, b1, in.ds, in.rows, in.dk);
        }
        end_tile<Family>(a, mine, t0, n, in);
      }
    }
    if constexpr (Family::linear)
      unpack_lanes(in.dq, BLOCK, r1 - r0, C, a.array(F::d_query) + (head * L + r0) * C, C);
  }
}

}  // namespace
