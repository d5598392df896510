// The additive score: Σ_c w_c tanh(a_c + b_c), in a few operations and a share of one division for each feature.
//
// Three forms, each exact where it is used, chosen for a pair by the classes of its two rows alone, so that no pair's
// score depends on what else is in the tile:
//
// - SMALL: both rows' features are small. tanh(a + b) = (tanh a + tanh b) / (1 + tanh a · tanh b), with the hyperbolic
//   tangents made once for each row: nothing is lost near 0.
// - NORMAL: tanh(a + b) = (e^2a e^2b − 1) / (e^2a e^2b + 1), with the exponentials made once for each row. Four features
//   share a division, which the product of four denominators must survive. Numerators are summed, not 1 − 2 / (…): where
//   little remains of a tanh, nothing as large as 1 is rounded.
// - RAW: the definition, where that product could overflow or an input is infinite.
#pragma once

#include "tiles.h"

namespace {

// Classes of rows, the larger of two deciding; SMALL only where both are.
enum Class : i64 { SMALL, NORMAL, RAW };
// What `mixed` says: pairs of SMALL rows may occur, RAW rows may occur.
constexpr i64 WITH_SMALL = 1, WITH_RAW = 2;
// Features up to here lose precision to exponentials.
constexpr double SMALL_FEATURE = 0.5;

// Write e^2x of a row, filled up to `width` features with that of 0; return its class.
template <class T>
Class powers(const T* source, i64 C, T limit, T* target, i64 width) {
  T peak = 0;
  bool is_number = true;
  over<T>(0, C, [&](i64 c, auto x) {
    using X = decltype(x);
    X value = load<X>(source + c);
    value = value > limit ? wide<X>(limit) : value;
    value = value < -limit ? wide<X>(-limit) : value;
    store(target + c, exponential(T(2) * value));
  });
  for (i64 c = 0; c < C; ++c) {
    peak = larger(peak, absolute(source[c]));
    is_number = is_number && source[c] == source[c];
  }
  fill(target + C, width - C, T(1));
  if (!is_number || peak > limit) return RAW;
  return peak > T(SMALL_FEATURE) ? NORMAL : SMALL;
}

// Convert rows to the NORMAL form, transposed for keys, and write the class of each row.
//
// `query` are rows of C features, in heads of S rows, `output` is for rows of V features, `scratch` for a whole group of
// rows meanwhile; `direct` asks for rows as they come. Work items are groups of rows of one head.
template <class T>
void prepare(const Arguments<T>& a) {
  const i64 C = a[F::C], V = a[F::V], S = a[F::S], groups = parts(S, PAD);
  const T* source = a.array(F::query);
  T *target = a.array(F::output), *group = a.array(F::scratch);
  uint8_t* classes = a.bytes(F::query_class);
  const bool as_they_come = a[F::direct] != 0;
  for (i64 item = a[F::first]; item < a[F::last]; ++item) {
    const i64 head = item / groups, place = item % groups * PAD, first = head * S + place;
    const i64 count = least(PAD, S - place);
    for (i64 row = 0; row < count; ++row) {
      T* powered = as_they_come ? target + (first + row) * V : group + row * V;
      classes[first + row] = uint8_t(powers(source + (first + row) * C, C, a.real, powered, V));
    }
    if (as_they_come) continue;
    for (i64 c = 0; c < V; ++c) {
      T* lanes = target + (head * V + c) * S + place;
      for (i64 row = 0; row < count; ++row) lanes[row] = group[row * V + c];
    }
  }
}

// What four features of a query and their weights contribute: the factors of numerators and denominators.
//
// Of two features, with A = e^2a e^2b of one and B of the other, the denominator is (1 + A) (1 + B) and the numerator
// (w + x) (A B − 1) + (w − x) (A − B).
template <class T>
struct Features {
  T e0, e1, e2, e3, e01, e23, wp, wm, xp, xm, g0, g1, g01, g2, g3, g23;

  INLINE Features(const T* q, const T* w)
      : e0(q[0]), e1(q[1]), e2(q[2]), e3(q[3]), e01(e0 * e1), e23(e2 * e3), wp(w[0] + w[1]), wm(w[0] - w[1]),
        xp(w[2] + w[3]), xm(w[2] - w[3]), g0(wm * e0), g1(wm * e1), g01(wp * e01), g2(xm * e2), g3(xm * e3),
        g23(xp * e23) {}

  // Σ w tanh of the four features, for keys' e^2b.
  INLINE Vector<T> sum(Vector<T> b0, Vector<T> b1, Vector<T> b2, Vector<T> b3) const {
    const Vector<T> u = (T(1) + e1 * b1) + (e0 + e01 * b1) * b0, v = (T(1) + e3 * b3) + (e2 + e23 * b3) * b2;
    const Vector<T> m = (g0 + g01 * b1) * b0 - (wp + g1 * b1), n = (g2 + g23 * b3) * b2 - (xp + g3 * b3);
    return (m * v + n * u) / (u * v);
  }
};

// Write scale Σ w tanh of ROWS rows, `row` features apart. No weight is larger than 1: what their sum multiplies must
// not overflow either.
template <int ROWS, class T>
OUTLINE void normal(T* s, const T* k, const T* q, i64 row, const T* w, T scale, i64 C, i64 lanes) {
  using X = Vector<T>;
  for (int r = 0; r < ROWS; ++r) fill(s + r * ROW, lanes, T(0));
  for (i64 c = 0; c < C; c += 4) {
    const T *k0 = k + c * ROW, *k1 = k0 + ROW, *k2 = k1 + ROW, *k3 = k2 + ROW;
    if constexpr (ROWS == 2) {
      const Features<T> one(q + c, w + c), two(q + c + row, w + c);
      over_lanes<T>(lanes, [&](i64 j) {
        const X b0 = load<X>(k0 + j), b1 = load<X>(k1 + j), b2 = load<X>(k2 + j), b3 = load<X>(k3 + j);
        store(s + j, load<X>(s + j) + one.sum(b0, b1, b2, b3));
        store(s + ROW + j, load<X>(s + ROW + j) + two.sum(b0, b1, b2, b3));
      });
    } else {
      const Features<T> one(q + c, w + c);
      over_lanes<T>(lanes, [&](i64 j) {
        const X b0 = load<X>(k0 + j), b1 = load<X>(k1 + j), b2 = load<X>(k2 + j), b3 = load<X>(k3 + j);
        store(s + j, load<X>(s + j) + one.sum(b0, b1, b2, b3));
      });
    }
  }
  for (int r = 0; r < ROWS; ++r)
    over_lanes<T>(lanes, [&](i64 j) { store(s + r * ROW + j, load<X>(s + r * ROW + j) * scale); });
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

// Add Σ ds (1 − tanh²) / 4 to dq and dk, and Σ ds (1 − tanh) / 2 to dw, for one row. The reciprocals of four
// denominators come from one division; 1 − r is p r, which does not cancel.
template <class T>
OUTLINE void pull_normal(const T* ds, const T* k, const T* q, i64 C, i64 lanes, T* dq, T* dk, T* dw) {
  using X = Vector<T>;
  for (i64 c = 0; c < C; c += 4) {
    const T q0 = q[c], q1 = q[c + 1], q2 = q[c + 2], q3 = q[c + 3];
    const T *k0 = k + c * ROW, *k1 = k0 + ROW, *k2 = k1 + ROW, *k3 = k2 + ROW;
    T *g0 = dk + c * ROW, *g1 = g0 + ROW, *g2 = g1 + ROW, *g3 = g2 + ROW;
    X x0{}, x1{}, x2{}, x3{}, y0{}, y1{}, y2{}, y3{};
    over_lanes<T>(lanes, [&](i64 j) {
      const X p0 = q0 * load<X>(k0 + j), p1 = q1 * load<X>(k1 + j);
      const X p2 = q2 * load<X>(k2 + j), p3 = q3 * load<X>(k3 + j);
      const X d0 = T(1) + p0, d1 = T(1) + p1, d2 = T(1) + p2, d3 = T(1) + p3, u = d0 * d1, v = d2 * d3;
      const X r = T(1) / (u * v), e = r * v, f = r * u, r0 = e * d1, r1 = e * d0, r2 = f * d3, r3 = f * d2;
      const X t = load<X>(ds + j);
      X h0 = t * r0, h1 = t * r1, h2 = t * r2, h3 = t * r3;
      y0 += h0;
      y1 += h1;
      y2 += h2;
      y3 += h3;
      h0 = h0 * (p0 * r0);
      h1 = h1 * (p1 * r1);
      h2 = h2 * (p2 * r2);
      h3 = h3 * (p3 * r3);
      x0 += h0;
      x1 += h1;
      x2 += h2;
      x3 += h3;
      store(g0 + j, load<X>(g0 + j) + h0);
      store(g1 + j, load<X>(g1 + j) + h1);
      store(g2 + j, load<X>(g2 + j) + h2);
      store(g3 + j, load<X>(g3 + j) + h3);
    });
    const X sums_q[4] = {x0, x1, x2, x3}, sums_w[4] = {y0, y1, y2, y3};
    for (int i = 0; i < 4; ++i) {
      dq[c + i] += sum_of_lanes<T>(sums_q[i]);
      dw[c + i] += sum_of_lanes<T>(sums_w[i]);
    }
  }
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

// Copy the gradients of pairs with keys of a class, zeros elsewhere.
template <class T>
void separate(const T* ds, const T* classes, Class wanted, i64 lanes, T* target) {
  using X = Vector<T>;
  over_lanes<T>(lanes, [&](i64 j) {
    store(target + j, load<X>(classes + j) == T(wanted) ? load<X>(ds + j) : X{});
  });
}

struct Additive {
  static constexpr bool linear = false;
  static constexpr bool in_place = false;

  // Pack a tile of keys, in the SMALL form too where pairs of such may occur, and the keys' classes.
  template <class T>
  static bool pack(const Arguments<T>& a, i64, i64 kv, i64, i64, i64 t0, i64 n, T* k) {
    const i64 C = a[F::C], S = a[F::S], at = kv * C * S + t0;
    pack_rows(a.array(F::key) + at, S, C, n, k, ROW, padded(n));
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
    if (count == GROUP)
      for (i64 i = 0; i < GROUP; i += 2)
        normal<2>(s + i * ROW + j0, k + j0, query + i * C, C, w, a.real, C, lanes);
    else
      for (i64 i = 0; i < GROUP; ++i)
        if (i < count)
          normal<1>(s + i * ROW + j0, k + j0, query + i * C, 0, w, a.real, C, lanes);
        else
          fill(s + i * ROW + j0, lanes, T(0));
    if (a[F::mixed] == 0) return true;
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
  // sums of ds tanh, or of ds where C more hold those of ds (1 − tanh) / 2.
  template <class T>
  static void pull(
      const Arguments<T>& a, i64 head, i64 row, i64 last, i64 t0, i64 j0, i64 lanes, T* k, T* s, T* ds, T* dq, T* dk,
      T* dw) {
    const i64 C = a[F::C], mixed = a[F::mixed], place = (head * a[F::L] + row) * C;
    const T* classes = k + C * ROW + j0;
    T* other = s + GROUP * ROW;
    for (i64 i = 0; i < least(GROUP, last - row + 1); ++i) {
      T *dsi = ds + i * ROW + j0, *dqi = dq + i * C;
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
      if (own == SMALL && mixed & WITH_SMALL) {
        separate(dsi, classes, SMALL, lanes, other);
        pull_small(
            other, k + (C + 1) * ROW + j0, a.array(F::query_small) + place + i * C, C, lanes, dqi, dk + j0, dw);
        separate(dsi, classes, NORMAL, lanes, other);
        dsi = other;
      }
      if (own != RAW) {
        pull_normal(dsi, k + j0, a.array(F::query) + place + i * C, C, lanes, dqi, dk + j0, dw + C);
        const T total = sum_of(dsi, 0, lanes);
        for (i64 c = 0; c < C; ++c) dw[c] += total;
      }
    }
  }
};

}  // namespace
