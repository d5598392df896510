// Order 1: at each query a line through keys and values is fitted by weighted least squares, and read there.
//
// Queries are the lanes. With w the softmax of a row's scores, k̄ = Σ w k and M = Σ w (k − k̄)(k − k̄)ᵀ + λ I, where
// λ = ridge · Σ w |k − q|², the slope u solves M u = q − k̄, and the output is Σ p v with p = w (1 + k·u − Σ w k·u).
//
// Positions are relative to a center: the mean of all keys, the same for all rows, or where a row's mean k̄ is far from
// it, that k̄ itself, as far as it can be rounded. Dimensions: L queries, S keys, C features, V values.
#pragma once

#include "linear.h"
#include "records.h"

namespace {

constexpr int VECTORS = 2;                    // vectors of queries of a block
constexpr i64 NEAR = 32, SIDE = 4;            // keys whose differences are held, and the side of blocks of M
constexpr int HALF = VECTOR_BYTES == 64 ? 4 : 2;  // columns of it that registers hold
constexpr int KEYS = VECTOR_BYTES == 64 ? 8 : 4;  // keys that are compared together
constexpr int SUMS = VECTOR_BYTES == 64 ? 12 : 4, FEW_SUMS = 4;  // features that are summed together
// Means squared, relative to the spread around them, up to which sums of products are as good as those of differences.
constexpr int FAR = 8;

// Queries of a block.
template <class T>
constexpr i64 QUERIES = VECTORS * WIDTH<T>;

// The arrays and sizes of a call. `start` and `stop` hold the interval of keys of each row, `bias` what is added to
// scores; both may be null, and have strides. `place` (B, H, L, C) is where lines are read, `centred` the keys less their
// mean `origin` (B, G, C). What the forward pass keeps for the backward pass, block by block with queries as lanes:
// `slopes` u, `centers`, `means` k̄ relative to these, `factors` of M, and `state`: peak, total and Σ w k·u of each row,
// and whether the block's centers are its rows' own.
template <class T>
struct Lines {
#define ARRAY_MEMBER(name) const T* name;
#define INTEGERS_MEMBER(name) const i64* name;
#define RESULT_MEMBER(name) T* name;
  LINES_FIELDS(ARRAY_MEMBER, INTEGERS_MEMBER, RESULT_MEMBER, NUMBER_MEMBER)
#undef ARRAY_MEMBER
#undef INTEGERS_MEMBER
#undef RESULT_MEMBER
  T scale, ridge;

  INLINE i64 blocks() const { return parts(L, QUERIES<T>); }
  INLINE i64 sides() const { return parts(C, SIDE); }
  INLINE i64 kv_head(i64 head) const { return head / H * G + head % H / (H / G); }

  static Lines of(const i64* n, T scale, T ridge) {
    Lines a;
    constexpr i64 count = LINES_FIELDS(ONE, ONE, ONE, ONE);
    std::memcpy(static_cast<void*>(&a), n, count * sizeof(i64));
    a.scale = scale;
    a.ridge = ridge;
    return a;
  }
};

// Numbers of a triangle.
INLINE i64 triangle(i64 rows) { return rows * (rows + 1) / 2; }

// The place of M[a, b], b ≤ a, for all lanes.
template <class T>
INLINE i64 cell(i64 a, i64 b) {
  return (triangle(a) + b) * QUERIES<T>;
}

// Scratch memory of a thread, in numbers, for so many keys.
template <class T>
struct LineRoom {
  static constexpr i64 Q = QUERIES<T>, W = WIDTH<T>;
  T *query, *place, *center, *here, *mean, *slope, *grad, *adjoint, *out;  // (C or V, Q)
  T *scores, *along, *near, *moments;                      // (S, Q) twice, (sides, NEAR, SIDE, W), (triangle of C, Q)
  T *coefficients, *rows, *tile;                           // (PARTIAL, 4 Q), (4 Q, padded C + padded V), (PARTIAL, Q)
  T *squares, *columns, *products;                         // (tiles, PARTIAL), (tiles, C, PARTIAL), (SUMS, PARTIAL)

  static i64 numbers(i64 C, i64 V, i64 S) {
    const i64 sides = parts(C, SIDE);
    return (7 * C + V + most(V, C)) * Q + 2 * S * Q + sides * NEAR * SIDE * W + triangle(C) * Q + PARTIAL * 5 * Q +
           4 * Q * (padded(C) + padded(V)) + ((C + 1) * (parts(S, PARTIAL) + 1) + SUMS) * PARTIAL;
  }
  LineRoom(const Lines<T>& a, T* memory) {
    const auto take = [&](i64 count) {
      T* place = memory;
      memory += count;
      return place;
    };
    query = take(a.C * Q), place = take(a.C * Q), center = take(a.C * Q), here = take(a.C * Q);
    mean = take(a.C * Q), slope = take(a.C * Q);
    adjoint = take(a.C * Q), grad = take(a.V * Q), out = take(most(a.V, a.C) * Q);
    scores = take(a.S * Q), along = take(a.S * Q);
    near = take(a.sides() * NEAR * SIDE * W), moments = take(triangle(a.C) * Q);
    coefficients = take(PARTIAL * 4 * Q), rows = take(4 * Q * (padded(a.C) + padded(a.V))), tile = take(PARTIAL * Q);
    // One tile more, for vectors that begin behind the first key of the last.
    const i64 tiles = parts(a.S, PARTIAL) + 1;
    squares = take(tiles * PARTIAL), columns = take(tiles * a.C * PARTIAL), products = take(SUMS * PARTIAL);
  }
};

// Numbers of a block's rows, for each lane.
template <class T>
struct Lane {
  Vector<T> x[VECTORS];

  INLINE static Lane all(T value) {
    Lane made;
    UNROLLED
    for (int n = 0; n < VECTORS; ++n) made.x[n] = wide<Vector<T>>(value);
    return made;
  }
  INLINE static Lane from(const T* p) {
    Lane made;
    UNROLLED
    for (int n = 0; n < VECTORS; ++n) made.x[n] = load<Vector<T>>(p + n * WIDTH<T>);
    return made;
  }
  INLINE void to(T* p) const {
    UNROLLED
    for (int n = 0; n < VECTORS; ++n) store(p + n * WIDTH<T>, x[n]);
  }
};

#define EACH_VECTOR UNROLLED for (int n = 0; n < VECTORS; ++n)

// Copy rows to lanes: (count, width) to (width, QUERIES), zeros behind them.
template <class T>
void to_lanes(const T* rows, i64 count, i64 width, T* lanes) {
  for (i64 c = 0; c < width; ++c)
    for (i64 i = 0; i < QUERIES<T>; ++i) lanes[c * QUERIES<T> + i] = i < count ? rows[i * width + c] : T(0);
}

template <class T>
void from_lanes(const T* lanes, i64 count, i64 width, T* rows) {
  for (i64 i = 0; i < count; ++i)
    for (i64 c = 0; c < width; ++c) rows[i * width + c] = lanes[c * QUERIES<T> + i];
}

// How keys and lanes are compared: Σ_c k_c q_c, Σ_c (k_c − q_c)², or Σ_c (k_c − center_c) q_c.
enum class Compare { products, squares, shifted };

// Write a factor times that of M keys and all lanes.
template <Compare KIND, int M, class T>
INLINE void compare_keys(T* s, const T* k, const T* q, i64 C, T factor, const T* center) {
  using X = Vector<T>;
  X sums[M][VECTORS] = {};
  for (i64 c = 0; c < C; ++c) {
    const Lane<T> lanes = Lane<T>::from(q + c * QUERIES<T>);
    Lane<T> origin;
    if constexpr (KIND == Compare::shifted) origin = Lane<T>::from(center + c * QUERIES<T>);
    UNROLLED
    for (int m = 0; m < M; ++m) {
      const T x = k[m * C + c];
      EACH_VECTOR {
        if constexpr (KIND == Compare::squares) {
          const X d = lanes.x[n] - x;
          sums[m][n] += d * d;
        } else if constexpr (KIND == Compare::shifted) {
          sums[m][n] += (x - origin.x[n]) * lanes.x[n];
        } else {
          sums[m][n] += x * lanes.x[n];
        }
      }
    }
  }
  UNROLLED
  for (int m = 0; m < M; ++m) EACH_VECTOR store(s + m * QUERIES<T> + n * WIDTH<T>, factor * sums[m][n]);
}

template <Compare KIND, class T>
OUTLINE void compare_lanes(T* s, const T* k, const T* q, i64 C, i64 count, T factor, const T* center = nullptr) {
  i64 j = 0;
  for (; j + KEYS <= count; j += KEYS)
    compare_keys<KIND, KEYS>(s + j * QUERIES<T>, k + j * C, q, C, factor, center);
  for (; j < count; ++j) compare_keys<KIND, 1>(s + j * QUERIES<T>, k + j * C, q, C, factor, center);
}

// Add Σ_j p_j x[j·row + m·STEP] to M features of all lanes, of which lanes' centers may be subtracted first.
template <int M, i64 STEP, bool SHIFTS, class T>
OUTLINE void gather_features(T* o, const T* x, i64 row, const T* p, i64 count, const T* center) {
  Vector<T> sums[M][VECTORS] = {};
  for (i64 j = 0; j < count; ++j, x += row) {
    const Lane<T> weight = Lane<T>::from(p + j * QUERIES<T>);
    UNROLLED
    for (int m = 0; m < M; ++m) EACH_VECTOR {
      if constexpr (SHIFTS)
        sums[m][n] += (x[m * STEP] - load<Vector<T>>(center + m * QUERIES<T> + n * WIDTH<T>)) * weight.x[n];
      else
        sums[m][n] += x[m * STEP] * weight.x[n];
    }
  }
  UNROLLED
  for (int m = 0; m < M; ++m) EACH_VECTOR {
    T* place = o + m * QUERIES<T> + n * WIDTH<T>;
    store(place, load<Vector<T>>(place) + sums[m][n]);
  }
}

// The same of `width` features and up to PARTIAL keys.
template <i64 STEP = 1, bool SHIFTS = false, class T>
INLINE void gather(T* o, const T* x, i64 row, i64 width, const T* p, i64 count, const T* center = nullptr) {
  i64 c = 0;
  const auto add = [&](auto M) {
    for (; c + M <= width; c += M) {
      const i64 at = c * QUERIES<T>;
      gather_features<M, STEP, SHIFTS>(o + at, x + c * STEP, row, p, count, SHIFTS ? center + at : nullptr);
    }
  };
  add(std::integral_constant<int, SUMS>{});
  if constexpr (FEW_SUMS < SUMS) add(std::integral_constant<int, FEW_SUMS>{});
  add(std::integral_constant<int, 1>{});
}

// The keys that a block sees, relative to its centers: the origin, which is subtracted already, or centers of lanes. The
// difference of a key and a center near it is exact, however far both are from the origin.
template <class T>
struct LineKeys {
  const T *key, *centred, *center;
  i64 C;
  bool far;

  INLINE void compare(T* s, i64 j0, const T* x, i64 n) const {
    if (far)
      compare_lanes<Compare::shifted>(s, key + j0 * C, x, C, n, T(1), center);
    else
      compare_lanes<Compare::products>(s, centred + j0 * C, x, C, n, T(1));
  }
  INLINE void gather_into(T* o, i64 j0, const T* p, i64 n) const {
    if (far)
      gather<1, true>(o, key + j0 * C, C, C, p, n, center);
    else
      gather(o, centred + j0 * C, C, C, p, n);
  }
};

// The keys that any lane sees, and those that all see.
struct LineRange {
  i64 first, last, inner_first, inner_last;
};

template <class T>
LineRange line_range(const Lines<T>& a, i64 head, i64 r0, i64 count) {
  if (a.start == nullptr) return {0, a.S, 0, a.S};
  const i64 base = head / a.H * a.interval_b + head % a.H * a.interval_h;
  LineRange found{a.S, 0, 0, a.S};
  for (i64 i = 0; i < count; ++i) {
    const i64 at = base + (r0 + i) * a.interval_r, lo = most(a.start[at], 0), hi = least(a.stop[at], a.S);
    found.inner_first = most(found.inner_first, lo);
    found.inner_last = least(found.inner_last, hi);
    if (lo >= hi) continue;
    found.first = least(found.first, lo);
    found.last = most(found.last, hi);
  }
  found.last = most(found.first, found.last);
  return found;
}

// Write the scores of the keys in a range, −∞ where hidden.
template <class T>
void line_scores(const Lines<T>& a, i64 head, i64 r0, i64 count, const LineRange& seen, const LineRoom<T>& in, T* s) {
  constexpr i64 Q = QUERIES<T>;
  constexpr T minus = -std::numeric_limits<T>::infinity();
  const i64 at = (a.kv_head(head) * a.S + seen.first) * a.C, n = seen.last - seen.first;
  if (a.gaussian)
    compare_lanes<Compare::squares>(s, a.key + at, in.place, a.C, n, T(-0.5) * a.scale);
  else
    compare_lanes<Compare::products>(s, a.centred + at, in.query, a.C, n, a.scale);
  if (a.bias != nullptr) {
    const T* bias = a.bias + head / a.H * a.bias_b + head % a.H * a.bias_h;
    for (i64 i = 0; i < count; ++i) {
      const T* row = bias + (r0 + i) * a.bias_r + seen.first * a.bias_c;
      for (i64 j = 0; j < n; ++j) {
        const T added = row[j * a.bias_c];
        s[j * Q + i] = added == minus ? minus : s[j * Q + i] + added;
      }
    }
  }
  if (a.start != nullptr) {
    const i64 base = head / a.H * a.interval_b + head % a.H * a.interval_h;
    for (i64 j = seen.first; j < seen.last; ++j) {
      if (seen.inner_first <= j && j < seen.inner_last) continue;
      for (i64 i = 0; i < count; ++i) {
        const i64 at = base + (r0 + i) * a.interval_r;
        if (j < a.start[at] || j >= a.stop[at]) s[(j - seen.first) * Q + i] = minus;
      }
    }
  }
  for (i64 i = count; i < Q; ++i)
    for (i64 j = 0; j < n; ++j) s[j * Q + i] = minus;
}

// Replace the scores of up to PARTIAL keys by exponentials relative to each lane's peak, and add these, and their
// products with the keys' squares.
template <class T>
OUTLINE void line_exponentials(T* s, i64 count, const Lane<T>& peak, const T* squares, Lane<T>& total, Lane<T>& spread) {
  Lane<T> part = Lane<T>::all(T(0)), product = part;
  for (i64 j = 0; j < count; ++j) EACH_VECTOR {
    T* place = s + j * QUERIES<T> + n * WIDTH<T>;
    const Vector<T> e = exponential(load<Vector<T>>(place) - peak.x[n]);
    store(place, e);
    part.x[n] += e;
    product.x[n] += squares[j] * e;
  }
  EACH_VECTOR total.x[n] += part.x[n];
  EACH_VECTOR spread.x[n] += product.x[n];
}

// Add Σ_j x_j y_jᵀ to the block of M below row a and right of column b; keys j have SIDE vectors each.
template <class T>
OUTLINE void add_products(T* moments, i64 a, i64 b, i64 C, const T* x, const T* y, i64 count) {
  using X = Vector<T>;
  constexpr i64 W = WIDTH<T>;
  UNROLLED
  for (int half = 0; half < SIDE; half += HALF) {
    X sums[SIDE][HALF] = {};
    for (i64 j = 0; j < count; ++j) {
      X ys[HALF];
      UNROLLED
      for (int l = 0; l < HALF; ++l) ys[l] = load<X>(y + (j * SIDE + half + l) * W);
      UNROLLED
      for (int i = 0; i < SIDE; ++i) {
        const X one = load<X>(x + (j * SIDE + i) * W);
        UNROLLED
        for (int l = 0; l < HALF; ++l) sums[i][l] += one * ys[l];
      }
    }
    UNROLLED
    for (int i = 0; i < SIDE; ++i)
      UNROLLED
      for (int l = 0; l < HALF; ++l) {
        if (a + i >= C || b + half + l > a + i) continue;
        T* place = moments + cell<T>(a + i, b + half + l);
        store(place, load<X>(place) + sums[i][l]);
      }
  }
}

// Write √w (k − center − k̄) of up to NEAR keys for one vector of lanes; answer whether any weight is not 0.
template <class T>
OUTLINE bool differences(
    T* near, const T* key, const T* center, const T* mean, const T* weights, Vector<T> share, i64 C, i64 count) {
  using X = Vector<T>;
  constexpr i64 W = WIDTH<T>;
  X roots[NEAR], any{};
  for (i64 j = 0; j < count; ++j) {
    const X weight = load<X>(weights + j * QUERIES<T>) * share;
    any = larger(weight, any);
    roots[j] = square_root(weight);
  }
  if (over_lanes_combined<T>(any, [](auto x, auto y) { return larger(x, y); }) == T(0)) return false;
  for (i64 c = 0; c < parts(C, SIDE) * SIDE; ++c) {
    T* to = near + (c / SIDE * NEAR * SIDE + c % SIDE) * W;
    if (c >= C) {
      for (i64 j = 0; j < count; ++j) store(to + j * SIDE * W, X{});
      continue;
    }
    const X origin = load<X>(center + c * QUERIES<T>), rest = load<X>(mean + c * QUERIES<T>);
    for (i64 j = 0; j < count; ++j) store(to + j * SIDE * W, (key[j * C + c] - origin - rest) * roots[j]);
  }
  return true;
}

// Sum M of the vector of lanes `at` without its ridge, by differences from means.
template <class T>
void sum_differences(
    const Lines<T>& a, const LineKeys<T>& keys, i64 count, const T* weights, i64 at, Vector<T> share,
    const LineRoom<T>& in) {
  constexpr i64 W = WIDTH<T>;
  T *moments = in.moments + at, *near = in.near;
  for (i64 c = 0; c < triangle(a.C); ++c) store(moments + c * QUERIES<T>, Vector<T>{});
  for (i64 first = 0; first < count; first += NEAR) {
    const i64 n = least(NEAR, count - first);
    const T *key = keys.key + first * a.C, *weight = weights + first * QUERIES<T> + at;
    if (!differences(near, key, in.center + at, in.mean + at, weight, share, a.C, n)) continue;
    for (i64 i = 0; i < a.sides(); ++i)
      for (i64 j = 0; j <= i; ++j)
        add_products(moments, i * SIDE, j * SIDE, a.C, near + i * NEAR * SIDE * W, near + j * NEAR * SIDE * W, n);
  }
}

// Call `body(j, n)` for tiles of seen keys, j from the first of these on; they end where PARTIAL divides a key's number.
template <class Body>
INLINE void over_tiles(const LineRange& seen, Body body) {
  for (i64 j = seen.first, end; j < seen.last; j = end) {
    end = least((j / PARTIAL + 1) * PARTIAL, seen.last);
    body(j - seen.first, end - j);
  }
}

// Write products of column i of keys and columns j, j + 1, …, `many` of them.
template <class T>
OUTLINE void multiply_columns(const T* columns, i64 i, i64 j, i64 many, i64 lanes, T* products) {
  constexpr int held = 8;
  for (i64 at = 0; at < lanes; at += held * WIDTH<T>) {
    Vector<T> own[held];
    UNROLLED
    for (int n = 0; n < held; ++n) own[n] = load<Vector<T>>(columns + i * PARTIAL + at + n * WIDTH<T>);
    for (i64 k = 0; k < many; ++k)
      UNROLLED
      for (int n = 0; n < held; ++n) {
        const i64 to = at + n * WIDTH<T>;
        store(products + k * PARTIAL + to, own[n] * load<Vector<T>>(columns + (j + k) * PARTIAL + to));
      }
  }
}

// Sum M of all lanes without its ridge, by products of keys, which are the same for all lanes.
template <class T>
void sum_products(const Lines<T>& a, const LineRange& seen, const Lane<T>& share, const LineRoom<T>& in) {
  using X = Vector<T>;
  constexpr i64 Q = QUERIES<T>;
  const i64 C = a.C;
  fill(in.moments, triangle(C) * Q, T(0));
  over_tiles(seen, [&](i64 j0, i64 n) {
    const i64 key = seen.first + j0;
    const T* columns = in.columns + key / PARTIAL * PARTIAL * C + key % PARTIAL;
    T* to = in.moments;
    i64 held = 0;
    for (i64 i = 0; i < C; ++i)
      for (i64 j = 0, many; j <= i; j += many) {
        many = least(SUMS - held, i + 1 - j);
        multiply_columns(columns, i, j, many, n, in.products + held * PARTIAL);
        held += many;
        if (held < SUMS && i + j + many < 2 * C - 1) continue;
        gather<PARTIAL>(to, in.products, 1, held, in.scores + j0 * Q, n);
        to += held * Q;
        held = 0;
      }
  });
  for (i64 i = 0; i < C; ++i)
    for (i64 j = 0; j <= i; ++j) EACH_VECTOR {
      T* place = in.moments + cell<T>(i, j) + n * WIDTH<T>;
      const X mean = load<X>(in.mean + i * Q + n * WIDTH<T>), other = load<X>(in.mean + j * Q + n * WIDTH<T>);
      store(place, load<X>(place) * share.x[n] - mean * other);
    }
}

// Σ_c x_c y_c of all lanes.
template <class T>
INLINE Lane<T> inner(const T* x, const T* y, i64 width) {
  Lane<T> sum = Lane<T>::all(T(0));
  for (i64 c = 0; c < width; ++c)
    EACH_VECTOR sum.x[n] += load<Vector<T>>(x + c * QUERIES<T> + n * WIDTH<T>) * load<Vector<T>>(y + c * QUERIES<T> + n * WIDTH<T>);
  return sum;
}

// Whether a square of a mean is so large, relative to the spread around it, that their sum has lost digits of the spread.
template <class X>
INLINE X is_far(X square, X spread) {
  return square <= Real<X>(FAR) * spread ? X{} : wide<X>(1);
}

template <class T>
INLINE bool any_lane(const Lane<T>& marks) {
  Vector<T> any{};
  EACH_VECTOR any += marks.x[n];
  return sum_of_lanes<T>(any) > T(0);
}

// Write q and q − k̄, both relative to the centers.
template <class T>
OUTLINE void place_lanes(i64 C, const LineRoom<T>& in) {
  using X = Vector<T>;
  for (i64 c = 0; c < C; ++c) EACH_VECTOR {
    const i64 at = c * QUERIES<T> + n * WIDTH<T>;
    const X here = load<X>(in.place + at) - load<X>(in.center + at);
    store(in.here + at, here);
    store(in.slope + at, here - load<X>(in.mean + at));
  }
}

// Divide the sums in `mean` by the sum of weights.
template <class T>
OUTLINE void finish_mean(i64 C, const Lane<T>& share, T* mean) {
  const Lane<T> factor = share;
  for (i64 c = 0; c < C; ++c) EACH_VECTOR {
    T* place = mean + c * QUERIES<T> + n * WIDTH<T>;
    store(place, load<Vector<T>>(place) * factor.x[n]);
  }
}

// Make each row's mean its center, and compute the mean anew, relative to that.
template <class T>
OUTLINE void recenter(const LineRange& seen, const Lane<T>& share, LineKeys<T>& keys, const LineRoom<T>& in) {
  using X = Vector<T>;
  const i64 numbers = keys.C * QUERIES<T>;
  for (i64 c = 0; c < numbers; c += WIDTH<T>)
    store(in.center + c, load<X>(in.center + c) + load<X>(in.mean + c));
  keys.far = true;
  fill(in.mean, numbers, T(0));
  over_tiles(seen, [&](i64 j0, i64 n) { keys.gather_into(in.mean, j0, in.scores + j0 * QUERIES<T>, n); });
  finish_mean(keys.C, share, in.mean);
  place_lanes(keys.C, in);
}

// Write M without its ridge, and return Σ w |k − q|². `slope` holds q − k̄ so far, and `spread` the trace of M, which has
// lost digits where means are far from the origin: then rows get centers of their own.
template <class T>
Lane<T> line_moments(
    const Lines<T>& a, const LineRange& seen, const Lane<T>& share, const Lane<T>& spread, LineKeys<T>& keys,
    const LineRoom<T>& in) {
  using X = Vector<T>;
  constexpr i64 W = WIDTH<T>, Q = QUERIES<T>;
  const i64 C = a.C;
  Lane<T> apart, far, squares = inner(in.mean, in.mean, C);
  const auto measure = [&] {
    EACH_VECTOR {
      X sum{};
      for (i64 c = 0; c < C; ++c) {
        const X gap = load<X>(in.slope + c * Q + n * W);
        sum += gap * gap + load<X>(in.moments + cell<T>(c, c) + n * W);
      }
      apart.x[n] = sum;
    }
  };
  EACH_VECTOR far.x[n] = is_far(squares.x[n], spread.x[n]);
  if (!any_lane(far)) {
    sum_products(a, seen, share, in);
    measure();
    for (i64 c = 0; c < C; ++c) EACH_VECTOR {
      const X mean = load<X>(in.mean + c * Q + n * W), own = load<X>(in.moments + cell<T>(c, c) + n * W);
      far.x[n] += is_far(mean * mean, own + a.ridge * apart.x[n]);
    }
    if (!any_lane(far)) return apart;
  }
  recenter(seen, share, keys, in);
  EACH_VECTOR sum_differences(a, keys, seen.last - seen.first, in.scores, n * W, share.x[n], in);
  measure();
  return apart;
}

// Replace M + λ I by its Cholesky factor, with inverses on the diagonal.
template <class T>
OUTLINE void factor(T* m, i64 C, const Lane<T>& ridge) {
  using X = Vector<T>;
  for (i64 j = 0; j < C; ++j) {
    Lane<T> inverse;
    for (i64 i = j; i < C; ++i) {
      Lane<T> x = Lane<T>::from(m + cell<T>(i, j));
      if (i == j) EACH_VECTOR x.x[n] += ridge.x[n];
      for (i64 k = 0; k < j; ++k) EACH_VECTOR {
        const i64 at = k * QUERIES<T> + n * WIDTH<T>;
        x.x[n] -= load<X>(m + cell<T>(i, 0) + at) * load<X>(m + cell<T>(j, 0) + at);
      }
      if (i == j) EACH_VECTOR inverse.x[n] = T(1) / square_root(x.x[n]);
      EACH_VECTOR x.x[n] = i == j ? inverse.x[n] : x.x[n] * inverse.x[n];
      x.to(m + cell<T>(i, j));
    }
  }
}

// Solve for all lanes of x (C, QUERIES), in place.
template <class T>
OUTLINE void solve(const T* m, T* x, i64 C) {
  using X = Vector<T>;
  constexpr i64 Q = QUERIES<T>;
  const auto one = [&](i64 i, i64 first, i64 last, auto place) {
    Lane<T> sum = Lane<T>::from(x + i * Q);
    for (i64 k = first; k < last; ++k) EACH_VECTOR
      sum.x[n] -= load<X>(m + place(k) + n * WIDTH<T>) * load<X>(x + k * Q + n * WIDTH<T>);
    EACH_VECTOR sum.x[n] *= load<X>(m + cell<T>(i, i) + n * WIDTH<T>);
    sum.to(x + i * Q);
  };
  for (i64 i = 0; i < C; ++i) one(i, 0, i, [&](i64 k) { return cell<T>(i, k); });
  for (i64 i = C - 1; i >= 0; --i) one(i, i + 1, C, [&](i64 k) { return cell<T>(k, i); });
}

// Write the columns of each tile of keys, and the squares of the keys' lengths.
template <class T>
void write_columns(const T* key, i64 S, i64 C, T* columns, T* squares) {
  for (i64 first = 0; first < S; first += PARTIAL, columns += C * PARTIAL, squares += PARTIAL) {
    const i64 n = least(PARTIAL, S - first), lanes = padded(n);
    transpose(key + first * C, C, n, C, columns, PARTIAL, lanes);
    fill(squares, lanes, T(0));
    for (i64 c = 0; c < C; ++c) {
      const T* x = columns + c * PARTIAL;
      over_lanes<T>(lanes, [&](i64 j) {
        const Vector<T> one = load<Vector<T>>(x + j);
        store(squares + j, load<Vector<T>>(squares + j) + one * one);
      });
    }
  }
}

// Raise each lane's peak to the largest of the scores of some keys.
template <class T>
OUTLINE void raise_peaks(const T* s, i64 count, Lane<T>& peak) {
  Lane<T> found = peak;
  for (i64 j = 0; j < count; ++j)
    EACH_VECTOR found.x[n] = larger(load<Vector<T>>(s + j * QUERIES<T> + n * WIDTH<T>), found.x[n]);
  peak = found;
}

// Add Σ_j x_j y_j of all lanes to a sum.
template <class T>
OUTLINE void add_inner(const T* x, const T* y, i64 count, Lane<T>& sum) {
  const Lane<T> part = inner(x, y, count);
  EACH_VECTOR sum.x[n] += part.x[n];
}

// Write the weights of lines from those of means, before these are divided by their sum, and products with the slope.
template <class T>
OUTLINE void line_weights(const T* s, const T* along, i64 count, const Lane<T>& share, const Lane<T>& middle, T* p) {
  const Lane<T> factor = share, less = middle;
  for (i64 j = 0; j < count; ++j) EACH_VECTOR {
    const i64 at = j * QUERIES<T> + n * WIDTH<T>;
    const Vector<T> weight = load<Vector<T>>(s + at) * factor.x[n];
    store(p + at, weight * (T(1) + (load<Vector<T>>(along + at) - less.x[n])));
  }
}

// The reciprocal of a sum, 0 of 0.
template <class X>
INLINE X share_of_total(X total) {
  return total == Real<X>(0) ? X{} : Real<X>(1) / total;
}

template <class T>
void lines_forward(const i64* numbers, T scale, T ridge, i64 first, i64 last, T* memory) {
  using X = Vector<T>;
  constexpr i64 W = WIDTH<T>, Q = QUERIES<T>;
  const Lines<T> a = Lines<T>::of(numbers, scale, ridge);
  const LineRoom<T> in(a, memory);
  const i64 C = a.C, V = a.V;
  constexpr T minus = -std::numeric_limits<T>::infinity();
  i64 known = -1;  // the head of keys whose columns are in scratch memory
  for (i64 item = first; item < last; ++item) {
    const i64 head = item / a.blocks(), r0 = item % a.blocks() * Q, count = least(Q, a.L - r0), row = head * a.L + r0;
    if (!a.gaussian) to_lanes(a.query + row * C, count, C, in.query);
    to_lanes(a.place + row * C, count, C, in.place);
    const LineRange seen = line_range(a, head, r0, count);
    const i64 kv = a.kv_head(head);
    const i64 at = kv * a.S + seen.first;
    const T* value = a.value + at * V;
    LineKeys<T> keys{a.key + at * C, a.centred + at * C, in.center, C, false};
    if (known != kv) write_columns(a.centred + kv * a.S * C, a.S, C, in.columns, in.squares);
    known = kv;
    Lane<T> peak = Lane<T>::all(minus), total = Lane<T>::all(T(0)), spread = total, middle = total, share;
    over_tiles(seen, [&](i64 j0, i64 n) {
      LineRange tile = seen;
      tile.first += j0, tile.last = tile.first + n;
      line_scores(a, head, r0, count, tile, in, in.scores + j0 * Q);
      raise_peaks(in.scores + j0 * Q, n, peak);
    });
    EACH_VECTOR peak.x[n] = peak.x[n] == minus ? X{} : peak.x[n];
    fill(in.mean, C * Q, T(0));
    over_tiles(seen, [&](i64 j0, i64 n) {
      T* s = in.scores + j0 * Q;
      line_exponentials(s, n, peak, in.squares + seen.first + j0, total, spread);
      keys.gather_into(in.mean, j0, s, n);
    });
    EACH_VECTOR share.x[n] = share_of_total(total.x[n]);
    finish_mean(C, share, in.mean);
    for (i64 c = 0; c < C; ++c) EACH_VECTOR store(in.center + c * Q + n * W, wide<X>(a.origin[kv * C + c]));
    place_lanes(C, in);
    const Lane<T> off = inner(in.mean, in.mean, C);
    EACH_VECTOR spread.x[n] = spread.x[n] * share.x[n] - off.x[n];
    Lane<T> ridge = line_moments(a, seen, share, spread, keys, in);
    EACH_VECTOR ridge.x[n] = ridge.x[n] == T(0) ? wide<X>(1) : ridge.x[n] * a.ridge;
    factor(in.moments, C, ridge);
    solve(in.moments, in.slope, C);
    over_tiles(seen, [&](i64 j0, i64 n) {
      keys.compare(in.along + j0 * Q, j0, in.slope, n);
      add_inner(in.along + j0 * Q, in.scores + j0 * Q, n, middle);
    });
    EACH_VECTOR middle.x[n] *= share.x[n];
    fill(in.out, V * Q, T(0));
    over_tiles(seen, [&](i64 j0, i64 n) {
      line_weights(in.scores + j0 * Q, in.along + j0 * Q, n, share, middle, in.tile);
      gather(in.out, value + j0 * V, V, V, in.tile, n);
    });
    from_lanes(in.out, count, V, a.output + row * V);
    if (a.factors == nullptr) continue;
    copy(in.moments, a.factors + item * triangle(C) * Q, triangle(C) * Q);
    copy(in.slope, a.slopes + item * C * Q, C * Q);
    copy(in.center, a.centers + item * C * Q, C * Q);
    copy(in.mean, a.means + item * C * Q, C * Q);
    T* state = a.state + item * 4 * Q;
    peak.to(state), total.to(state + Q), middle.to(state + 2 * Q), Lane<T>::all(T(keys.far)).to(state + 3 * Q);
  }
}

// Copy lanes (width, QUERIES) to padded rows, times a factor.
template <class T>
void to_rows(const T* lanes, i64 width, T factor, T* rows, i64 row) {
  for (i64 i = 0; i < QUERIES<T>; ++i) {
    for (i64 c = 0; c < width; ++c) rows[i * row + c] = factor * lanes[c * QUERIES<T> + i];
    fill(rows + i * row + width, row - width, T(0));
  }
}

// Add Σ_i c[j, i] · rows_i to the rows of n keys, which are `width` long, a whole number of vectors.
template <class T>
void add_to_keys(T* y, i64 width, const T* rows, const T* coefficients, i64 row, i64 steps, i64 n) {
  i64 j = 0;
  for (; j + GROUP <= n; j += GROUP)
    product<GROUP>(y + j * width, width, rows, width, coefficients + j * row, row, 1, steps, width);
  for (; j < n; ++j) product<1>(y + j * width, width, rows, width, coefficients + j * row, row, 1, steps, width);
}

// Add Σ_i p_i (q_i − k) to the gradient of a key.
template <class T>
OUTLINE void add_pulls(const T* p, const T* place, const T* key, i64 C, T* dk) {
  using X = Vector<T>;
  const Lane<T> pulls = Lane<T>::from(p);
  X any{};
  EACH_VECTOR any = larger(absolute(pulls.x[n]), any);
  if (sum_of_lanes<T>(any) == T(0)) return;
  for (i64 c = 0; c < C; ++c) {
    X sum{};
    EACH_VECTOR sum += pulls.x[n] * (load<X>(place + c * QUERIES<T> + n * WIDTH<T>) - key[c]);
    dk[c] += sum_of_lanes<T>(sum);
  }
}

// The gradients of places (B, H, L, C), of queries (the same; with the Gaussian, of the logarithm of a width in each row,
// (B, H, L)), and of keys and values: sums of `shares` shares (shares, B·G, S, padded C) and (…, padded V). An item is a
// share of the blocks of a head of keys.
template <class T>
void lines_backward(
    const i64* numbers, T scale, T ridge, i64 first, i64 last, i64 shares, const T* grad, T* d_query, T* d_place,
    T* d_key, T* d_value, T* memory) {
  using X = Vector<T>;
  constexpr i64 W = WIDTH<T>, Q = QUERIES<T>;
  const Lines<T> a = Lines<T>::of(numbers, scale, ridge);
  const LineRoom<T> in(a, memory);
  const i64 C = a.C, V = a.V, wide_C = padded(C), wide_V = padded(V), R = a.H / a.G, per_head = R * a.blocks();
  for (i64 part = first; part < last; ++part) {
    const i64 kv = part / shares, turn = part % shares;
    T* dk = d_key + (turn * a.B * a.G + kv) * a.S * wide_C;
    T* dv = d_value + (turn * a.B * a.G + kv) * a.S * wide_V;
    for (i64 unit = per_head * turn / shares; unit < per_head * (turn + 1) / shares; ++unit) {
      const i64 head = kv / a.G * a.H + kv % a.G * R + unit / a.blocks(), block = unit % a.blocks();
      const i64 item = head * a.blocks() + block, r0 = block * Q, count = least(Q, a.L - r0), row = head * a.L + r0;
      if (!a.gaussian) to_lanes(a.query + row * C, count, C, in.query);
      to_lanes(a.place + row * C, count, C, in.place);
      to_lanes(grad + row * V, count, V, in.grad);
      copy(a.slopes + item * C * Q, in.slope, C * Q);
      copy(a.centers + item * C * Q, in.center, C * Q);
      copy(a.means + item * C * Q, in.mean, C * Q);
      for (i64 c = 0; c < C * Q; c += W) store(in.here + c, load<X>(in.place + c) - load<X>(in.center + c));
      const LineRange seen = line_range(a, head, r0, count);
      const i64 n_keys = seen.last - seen.first;
      const i64 at_key = kv * a.S + seen.first;
      const T *value = a.value + at_key * V, *state = a.state + item * 4 * Q;
      const LineKeys<T> keys{a.key + at_key * C, a.centred + at_key * C, in.center, C, state[3 * Q] != T(0)};
      const Lane<T> peak = Lane<T>::from(state), middle = Lane<T>::from(state + 2 * Q);
      Lane<T> share = Lane<T>::from(state + Q);
      EACH_VECTOR share.x[n] = share_of_total(share.x[n]);
      // Weights, and the gradients e of those of lines, less their mean. What its rounding leaves of that is subtracted
      // too: where one key has nearly all weight, the others' small sums are all that the gradient is made of.
      line_scores(a, head, r0, count, seen, in, in.scores);
      compare_lanes<Compare::products>(in.along, value, in.grad, V, n_keys, T(1));
      Lane<T> mean_e = Lane<T>::all(T(0)), rest = mean_e;
      for (i64 j0 = 0; j0 < n_keys; j0 += PARTIAL) {
        const i64 many = least(PARTIAL, n_keys - j0);
        Lane<T> sum = Lane<T>::all(T(0));
        for (i64 j = 0; j < many; ++j) EACH_VECTOR {
          T* place = in.scores + (j0 + j) * Q + n * W;
          const X weight = exponential(load<X>(place) - peak.x[n]) * share.x[n];
          store(place, weight);
          sum.x[n] += weight * load<X>(in.along + (j0 + j) * Q + n * W);
        }
        EACH_VECTOR mean_e.x[n] += sum.x[n];
      }
      fill(in.adjoint, C * Q, T(0));
      for (i64 j0 = 0; j0 < n_keys; j0 += PARTIAL) {
        const i64 many = least(PARTIAL, n_keys - j0);
        Lane<T> sum = Lane<T>::all(T(0));
        for (i64 j = 0; j < many; ++j) EACH_VECTOR {
          T* place = in.along + (j0 + j) * Q + n * W;
          const X e = load<X>(place) - mean_e.x[n], both = load<X>(in.scores + (j0 + j) * Q + n * W) * e;
          store(place, e);
          store(in.tile + j * Q + n * W, both);
          sum.x[n] += both;
        }
        EACH_VECTOR rest.x[n] += sum.x[n];
        keys.gather_into(in.adjoint, j0, in.tile, many);
      }
      for (i64 c = 0; c < C; ++c) EACH_VECTOR {
        T* place = in.adjoint + c * Q + n * W;
        store(place, load<X>(place) - rest.x[n] * load<X>(in.mean + c * Q + n * W));
      }
      solve(a.factors + item * triangle(C) * Q, in.adjoint, C);
      // y is in.adjoint.
      const Lane<T> y_mean = inner(in.adjoint, in.mean, C);
      Lane<T> bend = inner(in.adjoint, in.slope, C);
      EACH_VECTOR bend.x[n] *= a.ridge;
      T* rows = in.rows;
      // Rows' own centers are no common origin: there, differences of places and keys are summed one by one.
      const T shared = T(!keys.far);
      to_rows(a.gaussian ? in.here : in.query, C, a.gaussian ? shared : T(1), rows, wide_C);
      to_rows(in.slope, C, T(1), rows + Q * wide_C, wide_C);
      to_rows(in.adjoint, C, T(-1), rows + 2 * Q * wide_C, wide_C);
      to_rows(in.here, C, shared, rows + 3 * Q * wide_C, wide_C);
      T* grads = rows + 4 * Q * wide_C;
      to_rows(in.grad, V, T(1), grads, wide_V);
      fill(in.out, C * Q, T(0));  // from here on Σ ds k
      Lane<T> pushed = Lane<T>::all(T(0)), widened = pushed;
      T* coefficients = in.coefficients;
      T along_slope[PARTIAL * Q], along_adjoint[PARTIAL * Q], squares[PARTIAL * Q];
      for (i64 j0 = 0; j0 < n_keys; j0 += PARTIAL) {
        const i64 many = least(PARTIAL, n_keys - j0);
        keys.compare(along_slope, j0, in.slope, many);
        keys.compare(along_adjoint, j0, in.adjoint, many);
        compare_lanes<Compare::squares>(squares, keys.key + j0 * C, in.place, C, many, T(1));
        Lane<T> part = Lane<T>::all(T(0));
        for (i64 j = 0; j < many; ++j) {
          T* to = coefficients + j * 4 * Q;
          Vector<T> back{};
          T pulls[Q];
          EACH_VECTOR {
            const i64 at = j * Q + n * W;
            const X weight = load<X>(in.scores + j0 * Q + at), e = load<X>(in.along + j0 * Q + at);
            const X t = load<X>(along_slope + at) - middle.x[n], z = load<X>(along_adjoint + at) - y_mean.x[n];
            const X f = e - rest.x[n] - z, square = load<X>(squares + at);
            // The mean of these is 0: Σ w e is subtracted with f, and Σ w t f = λ u·y, which Σ w |k − q|² has as a factor.
            const X slope = a.scale * (weight * (f + t * f - bend.x[n] * square));
            const X pull = T(2) * bend.x[n] * weight;
            store(in.tile + at, slope);
            store(to + n * W, slope);
            store(to + Q + n * W, weight * f);
            store(to + 2 * Q + n * W, weight * (T(1) + t));
            store(to + 3 * Q + n * W, pull);
            pushed.x[n] += slope;
            part.x[n] += slope * square;
            const X both = pull + (a.gaussian ? slope : X{});
            back += both;
            store(pulls + n * W, both);
          }
          T* own = dk + (seen.first + j0 + j) * wide_C;
          if (keys.far)
            add_pulls(pulls, in.place, keys.key + (j0 + j) * C, C, own);
          else
            add_scaled(-sum_of_lanes<T>(back), keys.centred + (j0 + j) * C, own, C);
        }
        EACH_VECTOR widened.x[n] += part.x[n];
        keys.gather_into(in.out, j0, in.tile, many);
        add_to_keys(dk + (seen.first + j0) * wide_C, wide_C, rows, coefficients, 4 * Q, 4 * Q, many);
        add_to_keys(dv + (seen.first + j0) * wide_V, wide_V, grads, coefficients + 2 * Q, 4 * Q, Q, many);
      }
      for (i64 c = 0; c < C; ++c) EACH_VECTOR {
        const i64 at = c * Q + n * W;
        const X place = load<X>(in.here + at), own = load<X>(in.adjoint + at) - T(2) * bend.x[n] * (place - load<X>(in.mean + at));
        const X through = load<X>(in.out + at);
        store(in.adjoint + at, a.gaussian ? own + (through - pushed.x[n] * place) : own);
      }
      from_lanes(in.adjoint, count, C, d_place + row * C);
      if (a.gaussian) widened.to(in.out);
      from_lanes(in.out, count, a.gaussian ? 1 : C, d_query + row * (a.gaussian ? 1 : C));
    }
  }
}

// Write what a caller must know: the queries of a block, the numbers of a block's factors, and those of scratch memory.
template <class T>
void line_sizes(i64 C, i64 V, i64 S, i64* sizes) {
  sizes[0] = QUERIES<T>;
  sizes[1] = triangle(C) * QUERIES<T>;
  sizes[2] = LineRoom<T>::numbers(C, V, S);
}

}  // namespace
