// Scores of the distance (q − k) / width, in few dimensions.
//
// The Gaussian, boxcar, triangular and Epanechnikov's kernel take the Euclidean distance, squared below; the Laplacian
// takes the Manhattan distance.
#pragma once

#include "linear.h"
#include "tiles.h"

namespace {

// Features that are summed before they are added to a partial sum, and those of a partial sum.
constexpr i64 TERMS = 4, FEATURES = 16;
// What `distances` sums besides the Laplacian's absolute values.
constexpr int SQUARES = -1;

// (q − k) / width: as exactly as by division where a key near the rim makes the last digit count.
template <bool RIM, class X>
INLINE X apart(X q, X k, X inverse, X rest) {
  const X d = q - k;
  if constexpr (RIM) return fused_multiply_add(d, inverse, d * rest);
  return d * inverse;
}

// A compact kernel's weight at a squared distance in units of the width.
template <int KIND, class X>
INLINE X kernel_weight(X square) {
  using T = Real<X>;
  if constexpr (KIND == BOXCAR)
    return square <= T(1) ? wide<X>(1) : X{};
  else if constexpr (KIND == TRIANGULAR)
    return square < T(1) ? T(1) - square_root(square) : X{};
  else
    return square < T(1) ? T(1) - square : X{};
}

// Write the distances of one row in up to three features, times a factor, or a compact kernel's weights.
template <int COUNT, int KIND, bool RIM, class T>
OUTLINE void few(T* s, const T* k, const T* q, const T* inverse, const T* rest, T factor, i64 lanes) {
  using X = Vector<T>;
  X qs[COUNT], inverses[COUNT], rests[COUNT];
  UNROLLED
  for (int c = 0; c < COUNT; ++c) {
    qs[c] = wide<X>(q[c]);
    inverses[c] = wide<X>(inverse[c]);
    rests[c] = wide<X>(rest[c]);
  }
  TWICE
  for (i64 j = 0; j < lanes; j += WIDTH<T>) {
    X total{};
    UNROLLED
    for (int c = 0; c < COUNT; ++c) {
      const X d = apart<RIM>(qs[c], load<X>(k + c * ROW + j), inverses[c], rests[c]);
      const X size = KIND == LAPLACIAN ? absolute(d) : d * d;
      total = c == 0 ? size : total + size;
    }
    if constexpr (KIND >= COMPACT)
      store(s + j, kernel_weight<KIND>(factor * total));
    else
      store(s + j, factor * total);
  }
}

template <int KIND, bool RIM, class T>
void few(T* s, const T* k, const T* q, const T* inverse, const T* rest, T factor, i64 C, i64 lanes) {
  if (C == 3)
    few<3, KIND, RIM>(s, k, q, inverse, rest, factor, lanes);
  else if (C == 2)
    few<2, KIND, RIM>(s, k, q, inverse, rest, factor, lanes);
  else
    few<1, KIND, RIM>(s, k, q, inverse, rest, factor, lanes);
}

// Whether one factor is the inverse width of all features, and may be applied after squares of differences are summed.
template <class T>
bool is_uniform(const T* inverse, i64 C) {
  constexpr T limit = T(1 << 30);
  bool same = inverse[0] <= limit && inverse[0] * limit >= T(1);
  for (i64 c = 1; c < C; ++c) same = same && inverse[c] == inverse[0];
  return same;
}

// Add up squares, or for the Laplacian absolute values, of four rows and VECTORS vectors of keys, in units of the width
// unless that is UNIFORM. Partial sums of a few features keep the error of a long sum small.
template <int KIND, bool RIM, bool UNIFORM, int VECTORS, class T>
INLINE void sum_features(
    Vector<T> (&totals)[GROUP][VECTORS], const T* k, const T* const (&q)[GROUP], const T* inverse, const T* rest,
    i64 C) {
  using X = Vector<T>;
  for (i64 first = 0; first < C; first += FEATURES) {
    X sums[GROUP][VECTORS] = {};
    for (i64 c0 = first; c0 < least(first + FEATURES, C); c0 += TERMS) {
      X terms[GROUP][VECTORS] = {};
      const auto add = [&](i64 c) {
        X keys[VECTORS];
        UNROLLED
        for (int n = 0; n < VECTORS; ++n) keys[n] = load<X>(k + c * ROW + n * WIDTH<T>);
        UNROLLED
        for (int i = 0; i < GROUP; ++i) {
          const X query = wide<X>(q[i][c]);
          UNROLLED
          for (int n = 0; n < VECTORS; ++n) {
            X d = query - keys[n];
            if constexpr (!UNIFORM) d = apart<RIM>(query, keys[n], wide<X>(inverse[c]), wide<X>(rest[c]));
            terms[i][n] += KIND == LAPLACIAN ? absolute(d) : d * d;
          }
        }
      };
      if (c0 + TERMS <= C)
        UNROLLED
        for (i64 c = 0; c < TERMS; ++c) add(c0 + c);
      else
        for (i64 c = c0; c < C; ++c) add(c);
      UNROLLED
      for (int i = 0; i < GROUP; ++i)
        UNROLLED
        for (int n = 0; n < VECTORS; ++n) sums[i][n] += terms[i][n];
    }
    UNROLLED
    for (int i = 0; i < GROUP; ++i)
      UNROLLED
      for (int n = 0; n < VECTORS; ++n) totals[i][n] += sums[i][n];
  }
}

// Write those sums times a unit and each row's factor for all keys of a tile.
template <int KIND, bool RIM, bool UNIFORM, class T>
OUTLINE void many(
    T* s, const T* k, const T* const (&q)[GROUP], const T* inverse, const T* rest, const T (&factors)[GROUP], T unit,
    i64 C, i64 lanes) {
  constexpr int VECTORS = PAD % (2 * WIDTH<T>) == 0 ? 2 : 1;
  for (i64 j = 0; j < lanes; j += VECTORS * WIDTH<T>) {
    Vector<T> totals[GROUP][VECTORS] = {};
    sum_features<KIND, RIM, UNIFORM>(totals, k + j, q, inverse, rest, C);
    UNROLLED
    for (int i = 0; i < GROUP; ++i)
      UNROLLED
      for (int n = 0; n < VECTORS; ++n) store(s + i * ROW + j + n * WIDTH<T>, factors[i] * unit * totals[i][n]);
  }
}

// Write sums of squares, or for the Laplacian of absolute values, of four rows and the keys of a tile, in units of the
// width and times each row's factor. LATE allows to apply the width after summation, which moves keys that are on the rim.
template <int KIND, bool RIM, bool LATE, class T>
void distances(
    T* s, const T* k, const T* const (&q)[GROUP], const T* inverse, const T* rest, const T (&factors)[GROUP], i64 C,
    i64 lanes) {
  if (0 < C && C <= 3) {
    for (i64 i = 0; i < GROUP; ++i) few<KIND, RIM>(s + i * ROW, k, q[i], inverse, rest, factors[i], C, lanes);
    return;
  }
  if constexpr (LATE)
    if (C > 0 && is_uniform(inverse, C)) {
      const T unit = KIND == LAPLACIAN ? inverse[0] : inverse[0] * inverse[0];
      many<KIND, RIM, true>(s, k, q, inverse, rest, factors, unit, C, lanes);
      T peak = 0;
      for (i64 i = 0; i < GROUP; ++i) peak = larger(peak, peak_of(s + i * ROW, lanes));
      if (peak <= std::numeric_limits<T>::max()) return;  // else squares overflow that may not in units of the width
    }
  many<KIND, RIM, false>(s, k, q, inverse, rest, factors, T(1), C, lanes);
}

// Replace each score by a function of it.
template <class T, class Function>
INLINE void replace(T* s, i64 lanes, Function function) {
  over_lanes<T>(lanes, [&](i64 j) { store(s + j, function(load<Vector<T>>(s + j))); });
}

// Replace squared distances by a compact kernel's weights, 0 beyond reach.
template <class T>
OUTLINE void weigh(T* s, i64 kind, i64 lanes) {
  using X = Vector<T>;
  if (kind == BOXCAR)
    replace(s, lanes, [](X d) { return kernel_weight<BOXCAR>(d); });
  else if (kind == TRIANGULAR)
    replace(s, lanes, [](X d) { return kernel_weight<TRIANGULAR>(d); });
  else
    replace(s, lanes, [](X d) { return kernel_weight<EPANECHNIKOV>(d); });
}

// Replace squared distances by the scores of a compact kernel, −inf beyond reach.
template <class T>
OUTLINE void log_weights(T* s, i64 kind, T scale, i64 lanes) {
  using X = Vector<T>;
  const X minus = wide<X>(-std::numeric_limits<T>::infinity());
  if (kind == BOXCAR) {
    replace(s, lanes, [&](X d) { return d <= T(1) ? X{} : minus; });
    return;
  }
  const bool root = kind == TRIANGULAR;
  replace(s, lanes, [&](X d) {
    const auto inside = d < T(1);
    const X share = inside ? (root ? square_root(d) : d) : X{};
    return inside ? scale * logarithm_of_rest(share) : minus;
  });
}

// Write the least and then the largest of each feature of some points; NaN counts for nothing.
template <class T>
void box_of(const T* points, i64 step, i64 feature_step, i64 count, i64 C, T* box) {
  for (i64 c = 0; c < C; ++c) {
    T least = std::numeric_limits<T>::infinity(), most = -least;
    for (i64 i = 0; i < count; ++i) {
      const T value = points[i * step + c * feature_step];
      least = value < least ? value : least;
      most = value > most ? value : most;
    }
    box[c] = least;
    box[C + c] = most;
  }
}

// Whether two boxes come within one width of each other, where squares count times a factor.
template <class T>
bool in_reach(i64 C, const T* one, const T* other, const T* inverse, T factor) {
  T square = 0;
  for (i64 c = 0; c < C; ++c) {
    const T gap = larger(larger(other[c] - one[C + c], one[c] - other[C + c]), T(0)) * inverse[c];
    square += gap * gap;
  }
  return factor * square <= T(1.001);  // a little more than one, so that rounding excludes nothing
}

// Replace the gradients of scores by those of squared distances; by half of those of Manhattan distances.
template <class T>
OUTLINE void slopes(i64 kind, T scale, const T* squares, T* ds, i64 lanes) {
  using X = Vector<T>;
  if (kind < COMPACT) {
    replace(ds, lanes, [&](X d) { return d * (T(-0.5) * scale); });
  } else if (kind == BOXCAR) {
    fill(ds, lanes, T(0));
  } else if (kind == TRIANGULAR) {
    over_lanes<T>(lanes, [&](i64 j) {
      const X square = load<X>(squares + j), d = load<X>(ds + j);
      const auto moved = (square < T(1)) & (square > T(0));
      const X distance = square_root(moved ? square : wide<X>(0.25));
      store(ds + j, moved ? -d * scale * T(0.5) / (distance * (T(1) - distance)) : X{});
    });
  } else {
    over_lanes<T>(lanes, [&](i64 j) {
      const X square = load<X>(squares + j), d = load<X>(ds + j);
      const auto inside = square < T(1);
      store(ds + j, inside ? -d * scale / (T(1) - (inside ? square : X{})) : X{});
    });
  }
}

// Take the gradients of some rows' distances to queries and keys, and to the width.
template <bool MANHATTAN, int ROWS, class T>
OUTLINE void pull_rows(
    const T* ds, const T* k, const T* q, const T* inverse, i64 C, i64 lanes, T* dq, T* dk, T* dw) {
  using X = Vector<T>;
  for (i64 c = 0; c < C; ++c) {
    const T *keys = k + c * ROW, factor = inverse[c];
    T* target = dk + c * ROW;
    X sums_q[ROWS] = {}, sums_w[ROWS] = {}, qs[ROWS];
    UNROLLED
    for (int i = 0; i < ROWS; ++i) qs[i] = wide<X>(q[i * C + c]);
    for (i64 j = 0; j < lanes; j += WIDTH<T>) {
      const X key = load<X>(keys + j);
      X pulled = load<X>(target + j);
      UNROLLED
      for (int i = 0; i < ROWS; ++i) {
        const X d = (qs[i] - key) * factor;
        X h = load<X>(ds + i * ROW + j);
        if constexpr (MANHATTAN)
          h *= d > T(0) ? wide<X>(1) : (d < T(0) ? wide<X>(-1) : X{});
        else
          h *= d;
        sums_w[i] += h * d;
        sums_q[i] += h;
        pulled -= h;
      }
      store(target + j, pulled);
    }
    for (int i = 0; i < ROWS; ++i) {
      dq[i * C + c] += sum_of_lanes<T>(sums_q[i]);
      dw[c] += sum_of_lanes<T>(sums_w[i]);
    }
  }
}

struct Radial {
  static constexpr bool linear = false;
  static constexpr bool in_place = false;

  // The factor of a row's squared distances, for the Laplacian of its distances.
  template <class T>
  static T factor(const Arguments<T>& a, i64 head, i64 row) {
    return a[F::factor] != 0 ? a.array(F::factor)[head * a[F::L] + row] : T(1);
  }

  // The least factor of some rows.
  template <class T>
  static T least_factor(const Arguments<T>& a, i64 head, i64 first, i64 last) {
    T found = factor(a, head, first);
    if (a[F::factor] != 0)
      for (i64 row = first + 1; row < last; ++row) found = smaller(found, factor(a, head, row));
    return found;
  }

  // Pack the features of a tile of keys, keys as lanes, and the box around them; not if it is out of reach.
  template <class T>
  static bool pack(const Arguments<T>& a, i64 head, i64 kv, i64 r0, i64 r1, i64 t0, i64 n, T* k) {
    const i64 C = a[F::C], S = a[F::S], tile = a[F::tile];
    const T* keys = a.array(F::key) + kv * C * S + t0;
    if (a[F::kind] >= COMPACT) {
      T *box = k + C * ROW, *least_of_block = box + (4 + 2 * BLOCK / GROUP) * C;
      if (a[F::boxes] != 0) {
        if (t0 == 0) {  // a block begins: the boxes around all of its rows, and around each group
          const T* rows = a.array(F::query) + (head * a[F::L] + r0) * C;
          box_of(rows, C, 1, r1 - r0, C, box + 2 * C);
          *least_of_block = least_factor(a, head, r0, r1);
          for (i64 g = 0; g < parts(r1 - r0, GROUP); ++g)
            box_of(rows + g * GROUP * C, C, 1, least(GROUP, r1 - r0 - g * GROUP), C, box + (4 + 2 * g) * C);
        }
        copy(a.array(F::boxes) + (kv * parts(S, tile) + t0 / tile) * 2 * C, box, 2 * C);
        const T* inverse = a.array(F::weight) + head % a[F::H] * a[F::weight_head];
        if (!in_reach(C, box + 2 * C, box, inverse, *least_of_block)) return false;
      } else {
        box_of(keys, 1, S, n, C, box);
      }
    }
    pack_rows(keys, S, C, n, k, ROW, padded(n));
    return true;
  }

  // Write the scores of four rows, or their kernel weights; answer whether a key is in reach.
  template <class T>
  static bool compare(const Arguments<T>& a, i64 head, i64 row, i64 last, i64, i64 j0, i64 lanes, T* k, T* s) {
    const i64 C = a[F::C], kind = a[F::kind], weights = head % a[F::H] * a[F::weight_head];
    const T *inverse = a.array(F::weight) + weights, *rest = a.array(F::weight_rest) + weights;
    const i64 count = least(GROUP, last - row + 1);
    const T* query = a.array(F::query) + (head * a[F::L] + row) * C;
    if (kind >= COMPACT) {
      T *box = k + C * ROW, *mine = box + (4 + 2 * (row % BLOCK / GROUP)) * C;
      if (a[F::boxes] == 0) box_of(query, C, 1, count, C, mine);
      if (!in_reach(C, mine, box, inverse, least_factor(a, head, row, row + count))) return false;
    }
    const T* q[GROUP];
    const T unit = kind == GAUSSIAN ? T(-0.5) * a.real : kind == LAPLACIAN ? -a.real : T(1);
    T factors[GROUP];
    for (i64 i = 0; i < GROUP; ++i) {
      q[i] = query + least(i, count - 1) * C;
      factors[i] = unit * factor(a, head, row + least(i, count - 1));
    }
    T* to = s + j0;
    k += j0;
    if (kind == GAUSSIAN) {
      distances<SQUARES, false, true>(to, k, q, inverse, rest, factors, C, lanes);
      return true;
    }
    if (kind == LAPLACIAN) {
      distances<LAPLACIAN, false, true>(to, k, q, inverse, rest, factors, C, lanes);
      return true;
    }
    if (a[F::direct] != 0 && a[F::d_query] == 0 && 0 < C && C <= 3) {
      for (i64 i = 0; i < GROUP; ++i, to += ROW)
        if (kind == BOXCAR)
          few<BOXCAR, false>(to, k, q[i], inverse, rest, factors[i], C, lanes);
        else if (kind == TRIANGULAR)
          few<TRIANGULAR, true>(to, k, q[i], inverse, rest, factors[i], C, lanes);
        else
          few<EPANECHNIKOV, true>(to, k, q[i], inverse, rest, factors[i], C, lanes);
      return true;
    }
    if (kind == BOXCAR)
      distances<SQUARES, false, false>(to, k, q, inverse, rest, factors, C, lanes);
    else
      distances<SQUARES, true, false>(to, k, q, inverse, rest, factors, C, lanes);
    for (i64 i = 0; i < GROUP; ++i, to += ROW) {
      if (a[F::d_query] != 0) copy(to, to + GROUP * ROW, lanes);  // for the backward pass
      if (a[F::direct] == 0)
        log_weights(to, kind, a.real, lanes);
      else
        weigh(to, kind, lanes);
    }
    return true;
  }

  // Take the gradient of four rows' scores to queries and keys, less a factor 2 / width, and to the width.
  template <class T>
  static void pull(
      const Arguments<T>& a, i64 head, i64 row, i64 last, i64, i64 j0, i64 lanes, T* k, T* s, T* ds, T* dq, T* dk,
      T* dw) {
    const i64 C = a[F::C];
    const T* inverse = a.array(F::weight) + head % a[F::H] * a[F::weight_head];
    const T* query = a.array(F::query) + (head * a[F::L] + row) * C;
    const i64 count = least(GROUP, last - row + 1);
    for (i64 i = 0; i < count; ++i)
      slopes(a[F::kind], a.real, s + (GROUP + i) * ROW + j0, ds + i * ROW + j0, lanes);
    if (a[F::kind] == LAPLACIAN) {
      if (count == GROUP)
        return pull_rows<true, GROUP>(ds + j0, k + j0, query, inverse, C, lanes, dq, dk + j0, dw);
      for (i64 i = 0; i < count; ++i)
        pull_rows<true, 1>(ds + i * ROW + j0, k + j0, query + i * C, inverse, C, lanes, dq + i * C, dk + j0, dw);
      return;
    }
    if (count == GROUP) return pull_rows<false, GROUP>(ds + j0, k + j0, query, inverse, C, lanes, dq, dk + j0, dw);
    for (i64 i = 0; i < count; ++i)
      pull_rows<false, 1>(ds + i * ROW + j0, k + j0, query + i * C, inverse, C, lanes, dq + i * C, dk + j0, dw);
  }
};

}  // namespace
