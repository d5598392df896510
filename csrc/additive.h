// The additive score: Σ_c w_c tanh(a_c + b_c), in a few operations and a share of one division for each feature.
//
// Three forms, each exact where it is used, chosen for a pair by the classes of its two rows alone, so that no pair's
// score depends on what else is in the tile:
//
// - SMALL: both rows' features are small. tanh(a + b) = (tanh a + tanh b) / (1 + tanh a · tanh b), with the hyperbolic
//   tangents made once for each row: nothing is lost near 0.
// - NORMAL and LARGE: tanh(a + b) = (B − A) / (A + B), with A = e^-2a / 2 and B = e^2b / 2 made once for each row. Four
//   features share a division, which the product of four denominators must survive. Numerators are summed, not
//   1 − 2A / (A + B): where little remains of a tanh, nothing as large as 1 is rounded. As tanh is odd, the sign of a
//   weight is given to its feature, in both rows: weights are ≥ 0.
// - RAW: the definition, where that product could overflow or an input is infinite.
#pragma once

#include "tiles.h"

namespace {

// Classes of rows, the larger of two deciding; SMALL only where both are.
enum Class : i64 { SMALL, NORMAL, LARGE, RAW };
// What `mixed` says: pairs of SMALL rows may occur, RAW rows may occur, LARGE rows may occur.
constexpr i64 WITH_SMALL = 1, WITH_RAW = 2, WITH_LARGE = 4;
// Features up to here lose precision to exponentials.
constexpr double SMALL_FEATURE = 0.5;

// Write e^2x / 2 of a row, x being its features times `sign` and the signs of the weights, filled up to `width` features
// with that of 0; return the row's class.
template <class T>
Class powers(const T* source, const T* w, T sign, i64 C, T limit, T* target, i64 width) {
  over<T>(0, C, [&](i64 c, auto x) {
    using X = decltype(x);
    X value = load<X>(source + c);
    value = value > limit ? wide<X>(limit) : value;
    value = value < -limit ? wide<X>(-limit) : value;
    const X factor = load<X>(w + c) < T(0) ? wide<X>(T(-2) * sign) : wide<X>(T(2) * sign);
    store(target + c, T(0.5) * exponential(factor * value));
  });
  fill(target + C, width - C, T(0.5));
  const T peak = peak_of(source, C);
  const T zero = combined(source, 0, C, T(0), [](auto x, auto y) { return x + (y - y); });
  if (zero != T(0) || peak > limit) return RAW;  // NaN shows in the former alone
  if (peak > T(0.5) * limit) return LARGE;
  return peak > T(SMALL_FEATURE) ? NORMAL : SMALL;
}

// Convert rows to the NORMAL form, transposed for keys, and write the class of each row.
//
// `query` are rows of C features, in heads of S rows, `weight` those of H heads, `output` is for rows of V features,
// `scratch` for a whole group of rows meanwhile; `direct` asks for queries' rows, as they come. Work items are groups of
// rows of one head.
template <class T>
void prepare(const Arguments<T>& a) {
  const i64 C = a[F::C], V = a[F::V], S = a[F::S], groups = parts(S, PAD);
  const T* source = a.array(F::query);
  T *target = a.array(F::output), *group = a.array(F::scratch);
  uint8_t* classes = a.bytes(F::query_class);
  const bool as_they_come = a[F::direct] != 0;
  const T sign = as_they_come ? T(-1) : T(1);
  for (i64 item = a[F::first]; item < a[F::last]; ++item) {
    const i64 head = item / groups, place = item % groups * PAD, first = head * S + place;
    const i64 count = least(PAD, S - place);
    const T* w = a.array(F::weight) + head % a[F::H] * V;
    for (i64 row = 0; row < count; ++row) {
      T* powered = as_they_come ? target + (first + row) * V : group + row * V;
      classes[first + row] = uint8_t(powers(source + (first + row) * C, w, sign, C, a.real, powered, V));
    }
    if (as_they_come) continue;
    for (i64 c = 0; c < V; ++c) {
      T* lanes = target + (head * V + c) * S + place;
      for (i64 row = 0; row < count; ++row) lanes[row] = group[row * V + c];
    }
  }
}

// What two features of a query and their weights w, x ≥ 0 contribute: the factors of a numerator and a denominator.
//
// With r = (w − x) / (w + x), the numerator is (w + x) ((B0 − r A0) (B1 + r A1) − (1 − r²) A0 A1) and the denominator
// (A0 + B0) (A1 + B1). As |r| ≤ 1, no term of the first is larger than w + x times the second.
template <class T>
struct Pair {
  T a0, a1, factor, shift0, shift1, rest;

  INLINE Pair(const T* q, const T* w) : a0(q[0]), a1(q[1]) {
    const T one = absolute(w[0]), other = absolute(w[1]), r = one + other > T(0) ? (one - other) / (one + other) : T(0);
    factor = one + other;
    shift0 = (one - other) * a0;
    shift1 = r * a1;
    rest = factor * (T(1) - r) * (T(1) + r) * (a0 * a1);
  }

  INLINE Vector<T> numerator(Vector<T> b0, Vector<T> b1) const {
    return (factor * b0 - shift0) * (b1 + shift1) - rest;
  }
  INLINE Vector<T> denominator(Vector<T> b0, Vector<T> b1) const { return (a0 + b0) * (a1 + b1); }
};

// Add Σ |w| tanh of four features to the sums of a row.
template <class T>
INLINE void add_features(T* s, const T* k, const T* q, const T* w, i64 lanes) {
  using X = Vector<T>;
  const Pair<T> one(q, w), other(q + 2, w + 2);
  over_lanes<T>(lanes, [&](i64 j) {
    const X b0 = load<X>(k + j), b1 = load<X>(k + ROW + j);
    const X b2 = load<X>(k + 2 * ROW + j), b3 = load<X>(k + 3 * ROW + j);
    const X u = one.denominator(b0, b1), v = other.denominator(b2, b3);
    store(s + j, load<X>(s + j) + (one.numerator(b0, b1) * v + other.numerator(b2, b3) * u) / (u * v));
  });
}

// Write scale Σ |w| tanh of `count` rows. No weight is larger than ¼: what their sum multiplies must not overflow.
template <class T>
OUTLINE void normal(T* s, const T* k, const T* q, const T* w, T scale, i64 count, i64 C, i64 lanes) {
  for (i64 i = 0; i < GROUP; ++i) fill(s + i * ROW, lanes, T(0));
  for (i64 c = 0; c < C; c += 4)  // while these features of the keys are in the nearest cache
    for (i64 i = 0; i < count; ++i) add_features(s + i * ROW, k + c * ROW, q + i * C + c, w + c, lanes);
  for (i64 i = 0; i < count; ++i)
    over_lanes<T>(lanes, [&](i64 j) { store(s + i * ROW + j, load<Vector<T>>(s + i * ROW + j) * scale); });
}

// Write scale Σ w tanh of one row by the tangents of its features and those of the keys.
template <class T>
OUTLINE void small(T* s, const T* k, const T* q, const T* w, T scale, i64 C, i64 lanes) {
  using X = Vector<T>;
  fill(s, lanes, T(0));
  for (i64 c = 0; c < C; c += 4) {
    const T q0 = q[c], q1 = q[c + 1], q2 = q[c + 2], q3 = q[c + 3];
    const T w0 = w[c], w1 = w[c + 1], w2 = w[c + 2], w3 = w[c + 3];
    const T *k0 = k + c * ROW, *k1 = k0 + ROW, *k2 = k1 + ROW, *k3 = k2 + ROW;
    over_lanes<T>(lanes, [&](i64 j) {
      const X b0 = load<X>(k0 + j), b1 = load<X>(k1 + j), b2 = load<X>(k2 + j), b3 = load<X>(k3 + j);
      const X d0 = T(1) + q0 * b0, d1 = T(1) + q1 * b1, d2 = T(1) + q2 * b2, d3 = T(1) + q3 * b3;
      const X n0 = w0 * (q0 + b0), n1 = w1 * (q1 + b1), n2 = w2 * (q2 + b2), n3 = w3 * (q3 + b3);
      const X u = d0 * d1, v = d2 * d3;
      store(s + j, load<X>(s + j) + ((n0 * d1 + n1 * d0) * v + (n2 * d3 + n3 * d2) * u) / (u * v));
    });
  }
  over_lanes<T>(lanes, [&](i64 j) { store(s + j, load<X>(s + j) * scale); });
}

// Return Σ w tanh(a + b) of one pair.
template <class T>
T raw_pair(const T* q, const T* k, const T* w, i64 C) {
  Sum<T> sum;
  over<T>(0, C, [&](i64 c, auto x) {
    using X = decltype(x);
    sum.add(load<X>(w + c) * hyperbolic_tangent(load<X>(q + c) + load<X>(k + c)));
  });
  return sum.total();
}

// Gradients of scores up to here, and down to its inverse, may be divided by the squares of two NORMAL features' sums.
constexpr double MODERATE = 1e12;

// ds A / (A + B)² of two features, up to two products each. The product of both squares is a normal number, but its
// quotient need not be: where features are LARGE or ds is not MODERATE, ds comes LAST, and is not part of them.
template <bool LAST, class X>
struct Quotients {
  X ds, square0, square1, share;

  INLINE Quotients(X ds, X d0, X d1) : ds(ds), square0(d0 * d0), square1(d1 * d1) {
    share = (LAST ? wide<X>(1) : ds) / (square0 * square1);
  }
  INLINE X first(X a) const { return a * (share * square1); }
  INLINE X second(X a) const { return a * (share * square0); }
};

// Add Σ ds (1 − tanh²) / 4 of two features, which is h = z B with z = ds A / (A + B)², to dq and dk of a row; and
// Σ ds (1 − tanh) / 2, which is z A + h, to dw. Nothing cancels.
template <bool LAST, class T>
INLINE void pull_pair(const T* ds, const T* k, const T* q, const T* w, i64 lanes, T* dq, T* dk, T* dw) {
  using X = Vector<T>;
  const X a0 = wide<X>(q[0]), a1 = wide<X>(q[1]);
  const auto quotients = [&](i64 j) {
    return Quotients<LAST, X>(load<X>(ds + j), a0 + load<X>(k + j), a1 + load<X>(k + ROW + j));
  };
  X x0{}, x1{}, y0{}, y1{};
  Quotients<LAST, X> next = quotients(0);
  over_lanes<T>(lanes, [&](i64 j) {
    const Quotients<LAST, X> now = next;
    next = quotients(j + WIDTH<T>);  // what follows a division waits long: divide early, in vain behind the last lane
    const X z0 = now.first(a0), z1 = now.second(a1);
    const T* again = k;
    asm("" : "+r"(again));  // load keys again, which kept in registers would drive sums out
    X h0 = product_alone(z0 * load<X>(again + j)), h1 = product_alone(z1 * load<X>(again + ROW + j));
    if constexpr (LAST) {
      h0 *= now.ds;
      h1 *= now.ds;
      y0 += now.ds * product_alone(z0 * a0);
      y1 += now.ds * product_alone(z1 * a1);
    } else {
      y0 += z0;
      y1 += z1;
    }
    x0 += h0;
    x1 += h1;
    store(dk + j, load<X>(dk + j) + h0);
    store(dk + ROW + j, load<X>(dk + ROW + j) + h1);
  });
  const T sums[2] = {sum_of_lanes<T>(x0), sum_of_lanes<T>(x1)};
  const T own[2] = {sum_of_lanes<T>(y0), sum_of_lanes<T>(y1)};
  for (int i = 0; i < 2; ++i) {
    const T share = (LAST ? own[i] : q[i] * own[i]) + sums[i];
    dq[i] += sums[i];
    dw[i] += w[i] < T(0) ? -share : share;
  }
}

// The same for all features of `count` rows; a row without ds has none.
template <bool LAST, class T>
OUTLINE void pull_normal(
    const T* const (&ds)[GROUP], const T* k, const T* q, const T* w, i64 count, i64 C, i64 lanes, T* dq, T* dk,
    T* dw) {
  for (i64 c = 0; c < C; c += 2)
    for (i64 i = 0; i < count; ++i)
      if (ds[i] != nullptr)
        pull_pair<LAST>(ds[i], k + c * ROW, q + i * C + c, w + c, lanes, dq + i * C + c, dk + c * ROW, dw + c);
}

// Add Σ ds (1 − tanh²) / 4 to dq and dk, and Σ ds tanh to dw, for one row of SMALL pairs.
template <class T>
OUTLINE void pull_small(const T* ds, const T* k, const T* q, i64 C, i64 lanes, T* dq, T* dk, T* dw) {
  using X = Vector<T>;
  for (i64 c = 0; c < C; ++c) {
    const T *keys = k + c * ROW, a = q[c];
    T* target = dk + c * ROW;
    X sum_q{}, sum_w{};
    over_lanes<T>(lanes, [&](i64 j) {
      const X b = load<X>(keys + j), d = load<X>(ds + j), t = (a + b) / (T(1) + a * b);
      const X h = T(0.25) * d * (T(1) - t) * (T(1) + t);
      store(target + j, load<X>(target + j) + h);
      sum_q += h;
      sum_w += d * t;
    });
    dq[c] += sum_of_lanes<T>(sum_q);
    dw[c] += sum_of_lanes<T>(sum_w);
  }
}

// The same for one pair; dk goes on to the next feature in steps of ROW.
template <class T>
void pull_raw(T ds, const T* q, const T* k, i64 C, T* dq, T* dk, T* dw) {
  for (i64 c = 0; c < C; ++c) {
    const T t = hyperbolic_tangent(q[c] + k[c]), h = T(0.25) * ds * (T(1) - t) * (T(1) + t);
    dq[c] += h;
    dw[c] += ds * t;
    dk[c * ROW] += h;
  }
}

// Copy the gradients of pairs with keys that are SMALL, or with those that are not; zeros elsewhere.
template <class T>
void separate(const T* ds, const T* classes, bool is_small, i64 lanes, T* target) {
  using X = Vector<T>;
  over_lanes<T>(lanes, [&](i64 j) {
    const X d = load<X>(ds + j);
    const auto small = load<X>(classes + j) == T(SMALL);
    store(target + j, small ? (is_small ? d : X{}) : (is_small ? X{} : d));
  });
}

struct Additive {
  static constexpr bool linear = false;
  static constexpr bool in_place = false;

  // Pack a tile of keys, in the SMALL form too where pairs of such may occur, and the keys' classes.
  template <class T>
  static bool pack(const Arguments<T>& a, i64, i64 kv, i64, i64, i64 t0, i64 n, T* k) {
    const i64 C = a[F::C], S = a[F::S], at = kv * C * S + t0;
    pack_rows(a.array(F::key) + at, S, C, n, k, ROW, padded(n), T(1));
    if (a[F::mixed] != 0) {
      T* classes = k + C * ROW;
      const uint8_t* source = a.bytes(F::key_class) + kv * S + t0;
      for (i64 j = 0; j < n; ++j) classes[j] = T(source[j]);
      fill(classes + n, padded(n) - n, T(NORMAL));
    }
    if (a[F::mixed] & WITH_SMALL) pack_rows(a.array(F::key_small) + at, S, C, n, k + (C + 1) * ROW, ROW, padded(n));
    return true;
  }

  // Write the scores of four rows.
  template <class T>
  static bool compare(const Arguments<T>& a, i64 head, i64 row, i64 last, i64 t0, i64 j0, i64 lanes, T* k, T* s) {
    using X = Vector<T>;
    const i64 C = a[F::C], place = (head * a[F::L] + row) * C, count = least(GROUP, last - row + 1);
    const T *w = a.array(F::weight) + head % a[F::H] * a[F::weight_head], *query = a.array(F::query) + place;
    normal(s + j0, k + j0, query, w, a.real, count, C, lanes);
    if ((a[F::mixed] & (WITH_SMALL | WITH_RAW)) == 0) return true;
    T *other = s + GROUP * ROW, *classes = k + C * ROW + j0;
    for (i64 i = 0; i < count; ++i) {
      const i64 own = a.bytes(F::query_class)[head * a[F::L] + row + i];
      T* si = s + i * ROW + j0;
      if (own == SMALL && a[F::mixed] & WITH_SMALL) {
        small(other, k + (C + 1) * ROW + j0, a.array(F::query_small) + place + i * C, w, a.real, C, lanes);
        over_lanes<T>(lanes, [&](i64 j) {
          store(si + j, load<X>(classes + j) == T(SMALL) ? load<X>(other + j) : load<X>(si + j));
        });
      }
      if (a[F::mixed] & WITH_RAW) {
        const T* q = a.array(F::query_raw) + place + i * C;
        const T* keys = a.array(F::key_raw) + (kv_head(a, head) * a[F::S] + t0 + j0) * C;
        for (i64 j = 0; j < least(lanes, a[F::S] - t0 - j0); ++j)
          if (own == RAW || classes[j] == T(RAW)) si[j] = a.real * raw_pair(q, keys + j * C, w, C);
      }
    }
    return true;
  }

  // Take the gradient of four rows' scores to queries and keys (less a factor 4 w), and to the weights: `dw` holds C
  // sums of ds tanh, or of ds where C more hold those of ds (1 − tanh) / 2; of features with the signs of the weights.
  template <class T>
  static void pull(
      const Arguments<T>& a, i64 head, i64 row, i64 last, i64 t0, i64 j0, i64 lanes, T* k, T* s, T* ds, T* dq, T* dk,
      T* dw) {
    const i64 C = a[F::C], mixed = a[F::mixed], place = (head * a[F::L] + row) * C;
    const i64 count = least(GROUP, last - row + 1);
    const T *classes = k + C * ROW + j0, *w = a.array(F::weight) + head % a[F::H] * a[F::weight_head];
    const T* normal_ds[GROUP] = {};
    bool is_last = (mixed & WITH_LARGE) != 0;
    for (i64 i = 0; i < count; ++i) {
      T *dsi = ds + i * ROW + j0, *other = s + (GROUP + i) * ROW, *dqi = dq + i * C;
      const i64 own = mixed != 0 ? a.bytes(F::query_class)[head * a[F::L] + row + i] : i64(NORMAL);
      if (mixed & WITH_RAW) {
        const T* q = a.array(F::query_raw) + place + i * C;
        const T* keys = a.array(F::key_raw) + (kv_head(a, head) * a[F::S] + t0 + j0) * C;
        for (i64 j = 0; j < lanes; ++j)
          if (dsi[j] != T(0) && (own == RAW || classes[j] == T(RAW))) {
            pull_raw(dsi[j], q, keys + j * C, C, dqi, dk + j0 + j, dw);
            dsi[j] = 0;
          }
      }
      if (own == RAW) continue;
      if (own == SMALL && mixed & WITH_SMALL) {
        separate(dsi, classes, true, lanes, other);
        pull_small(
            other, k + (C + 1) * ROW + j0, a.array(F::query_small) + place + i * C, C, lanes, dqi, dk + j0, dw);
        separate(dsi, classes, false, lanes, other);
        dsi = other;
      }
      normal_ds[i] = dsi;
      const T peak = peak_of(dsi, lanes);
      is_last = is_last || peak > T(MODERATE) || (peak < T(1 / MODERATE) && peak > T(0));
      const T total = sum_of(dsi, 0, lanes);
      for (i64 c = 0; c < C; ++c) dw[c] += w[c] < T(0) ? -total : total;
    }
    const T* query = a.array(F::query) + place;
    if (is_last)
      pull_normal<true>(normal_ds, k + j0, query, w, count, C, lanes, dq, dk + j0, dw + C);
    else
      pull_normal<false>(normal_ds, k + j0, query, w, count, C, lanes, dq, dk + j0, dw + C);
  }
};

}  // namespace
