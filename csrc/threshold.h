// The forward pass of α-entmax, for any family of scores: weights [(α − 1) (s − τ)]₊^{1/(α−1)}, with a threshold τ for
// each row that makes them sum to 1. Sparsemax is α = 2.
//
// The scores of a few rows stay in scratch memory. A row first drops all keys below a lower bound of its threshold,
// finds the threshold among the others by Newton's method, and reads the values of the keys that have weight; if these
// are many, a matrix product reads the values of all keys.
#pragma once

#include "forward.h"

namespace {

// The scores of every so many vectors give a first bound of the threshold.
constexpr i64 SAMPLED = 8;
// Newton steps on these, and the keys above the first bound from which they are worth it.
constexpr int SAMPLE_STEPS = 3;
constexpr i64 MANY = 64;
// Newton steps at most; bisection alone would converge in as many.
constexpr int STEPS = 128;
// Newton steps that refine a threshold of float64 for α > 2, where weights are infinitely steep at the threshold.
constexpr int POLISH = 2;
// A row reads the values of all keys if more than one in this many has weight.
constexpr i64 SPARSE = 4;

// Keys of a row that may have weight: scores, and the places of the keys.
template <class T>
struct Candidates {
  T* scores;
  int32_t* keys;
  i64 count;
};

#if defined(__AVX512F__) && VECTOR_BYTES == 64
// Append the numbers of a vector that exceed the bound, and their places, the first being `key`.
INLINE void append(Candidates<float>& to, const float* s, float bound, i64 key) {
  const __m512 x = _mm512_loadu_ps(s);
  const __mmask16 above = _mm512_cmp_ps_mask(x, _mm512_set1_ps(bound), _CMP_GT_OQ);
  if (above == 0) return;
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i keys = _mm512_add_epi32(_mm512_set1_epi32(int32_t(key)), lanes);
  _mm512_storeu_ps(to.scores + to.count, _mm512_maskz_compress_ps(above, x));
  _mm512_storeu_si512(to.keys + to.count, _mm512_maskz_compress_epi32(above, keys));
  to.count += __builtin_popcount(above);
}
#elif defined(__AVX2__) && defined(__BMI2__) && VECTOR_BYTES == 32
INLINE void append(Candidates<float>& to, const float* s, float bound, i64 key) {
  const __m256 x = _mm256_loadu_ps(s);
  const int above = _mm256_movemask_ps(_mm256_cmp_ps(x, _mm256_set1_ps(bound), _CMP_GT_OQ));
  if (above == 0) return;
  const uint64_t bytes = _pdep_u64(uint64_t(above), 0x0101010101010101) * 0xff;
  const uint64_t lanes = _pext_u64(0x0706050403020100, bytes);
  const __m256i order = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(int64_t(lanes)));
  _mm256_storeu_ps(to.scores + to.count, _mm256_permutevar8x32_ps(x, order));
  _mm256_storeu_si256(
      reinterpret_cast<__m256i*>(to.keys + to.count), _mm256_add_epi32(_mm256_set1_epi32(int32_t(key)), order));
  to.count += __builtin_popcount(unsigned(above));
}
#endif
template <class T>
INLINE void append(Candidates<T>& to, const T* s, T bound, i64 key) {
  for (i64 j = 0; j < WIDTH<T>; ++j) {
    to.scores[to.count] = s[j];
    to.keys[to.count] = int32_t(key + j);
    to.count += s[j] > bound;
  }
}

// Append the numbers that exceed a bound, of every `step` vectors; places are counted from `key`. The arrays have room
// for a vector more than there are numbers.
template <class T>
OUTLINE void collect(Candidates<T>& into, const T* s, i64 n, T bound, i64 key, i64 step) {
  Candidates<T> to = into;
  i64 j = 0;
  for (; j + WIDTH<T> <= n; j += step * WIDTH<T>) append(to, s + j, bound, key + j);
  if (step == 1)
    for (; j < n; ++j) {
      to.scores[to.count] = s[j];
      to.keys[to.count] = int32_t(key + j);
      to.count += s[j] > bound;
    }
  into.count = to.count;
}

// A vector of doubles from as many numbers.
typedef float HalfLoose __attribute__((vector_size(VECTOR_BYTES / 2), aligned(4), may_alias));
INLINE Vector<double> widened(const float* p) {
  return __builtin_convertvector(*reinterpret_cast<const HalfLoose*>(p), Vector<double>);
}
INLINE Vector<double> widened(const double* p) { return load<Vector<double>>(p); }

// The kinds of α: those whose powers are products, and any other.
enum Power : int { LINEAR, SQUARE, ANY };

INLINE Power power_of(double alpha) { return alpha == 2 ? LINEAR : alpha == 1.5 ? SQUARE : ANY; }

// The weight of (α − 1) (s − τ), and 0 where it is not positive; p is 1 / (α − 1).
template <Power POWER, class X>
INLINE X entmax_weight(X base, Real<X> p) {
  using T = Real<X>;
  if constexpr (POWER == LINEAR) return base > T(0) ? base : X{};
  if constexpr (POWER == SQUARE) {
    const X positive = base > T(0) ? base : X{};
    return positive * positive;
  }
  const auto some = base >= std::numeric_limits<T>::min();
  const X weight = exponential(p * logarithm(some ? base : wide<X>(1)));
  return some ? weight : X{};
}

struct Totals {
  double weight, slope;
};

// Sum the weights and slopes of some scores, at the threshold shift + t.
template <Power POWER, class T>
OUTLINE Totals totals_at(const T* s, i64 n, double shift, double t, double alpha) {
  using X = Vector<double>;
  constexpr i64 N = WIDTH<double>;
  const double factor = alpha - 1, p = 1 / factor;
  X weights[2] = {}, slopes[2] = {};
  const auto add = [&](X x, X& total, X& slope) {
    const X base = factor * ((x - shift) - t);
    const X weight = entmax_weight<POWER>(base, p);
    total += weight;
    if constexpr (POWER == LINEAR) slope += base > 0 ? wide<X>(1) : X{};
    if constexpr (POWER == SQUARE) slope += base > 0 ? base : X{};
    if constexpr (POWER == ANY) slope += weight > 0 ? weight / base : X{};
  };
  i64 j = 0;
  for (; j + 2 * N <= n; j += 2 * N) {
    add(widened(s + j), weights[0], slopes[0]);
    add(widened(s + j + N), weights[1], slopes[1]);
  }
  for (; j < n; j += N) {
    T rest[N];
    for (i64 i = 0; i < N; ++i) rest[i] = j + i < n ? s[j + i] : -std::numeric_limits<T>::infinity();
    add(widened(rest), weights[0], slopes[0]);
  }
  return {sum_of_lanes<double>(weights[0] + weights[1]), sum_of_lanes<double>(slopes[0] + slopes[1])};
}

// The Newton step for total^{α−1} = 1, a norm that for α ≤ 2 is convex in the threshold.
template <Power POWER>
INLINE double newton_step(Totals at, double alpha) {
  const double power = POWER == LINEAR ? 1 : POWER == SQUARE ? square_root(at.weight) : __builtin_pow(at.weight, 2 - alpha);
  return (at.weight - power) / ((alpha - 1) * at.slope);
}

// Return the threshold of some scores relative to their largest; `low` is a lower bound. At most so many steps: for
// α ≤ 2 they rise to the threshold without overshooting; for α > 2 a step that leaves the bracket or does not halve it
// is replaced by bisection.
template <Power POWER, class T>
double threshold_of(const T* s, i64 n, double peak, double low, double alpha, int steps) {
  double high = 0, t = low;
  for (int step = 0; step < steps; ++step) {
    const Totals at = totals_at<POWER>(s, n, peak, t, alpha);
    const double gap = high - low;
    if (at.weight >= 1)
      low = t;
    else
      high = t;
    double next = t + newton_step<POWER>(at, alpha);
    const bool trusted = next >= low && next <= high && (alpha <= 2 || 2 * (high - low) <= gap);
    if (!trusted) next = (low + high) / 2;
    const double moved = next > t ? next - t : t - next;
    t = next;
    if (!(moved > 4 * std::numeric_limits<double>::epsilon() * -t)) break;
  }
  return t;
}

// The threshold of a row, as a sum: the shift is the rounded threshold, the offset its rounding error.
template <class T>
struct Row {
  T shift, offset;
};

// A bound below which scores have no weight, where `low` is a lower bound of the threshold relative to the peak.
template <class T>
INLINE T bound_of(T peak, double low) {
  const double size = peak < 0 ? -double(peak) : double(peak);
  return T(double(peak) + low * (1 + 1.0 / 128) - 4 * double(std::numeric_limits<T>::epsilon()) * size);
}

// Find the threshold of a row, and the keys that may have weight. `each(visit)` calls `visit(scores, count, first
// key)` for all runs of keys.
template <Power POWER, class T, class Each>
Row<T> row_threshold(T peak, double alpha, Candidates<T>& found, i64 n, Each each) {
  const double least_of_all = -1 / (alpha - 1);
  double low = least_of_all;
  if (alpha <= 2 && n >= SAMPLED * MANY) {
    found.count = 0;
    const T bound = bound_of(peak, low);
    each([&](const T* s, i64 count, i64 key) { collect(found, s, count, bound, key, SAMPLED); });
    if (found.count >= MANY) {
      const double higher = threshold_of<POWER>(found.scores, found.count, double(peak), low, alpha, SAMPLE_STEPS);
      low = higher > low ? higher : low;
    }
  }
  found.count = 0;
  const T bound = bound_of(peak, low);
  each([&](const T* s, i64 count, i64 key) { collect(found, s, count, bound, key, 1); });
  const double t = threshold_of<POWER>(found.scores, found.count, double(peak), low, alpha, STEPS);
  const T shift = T(double(peak) + t);
  double offset = (double(peak) - double(shift)) + t;
  if (sizeof(T) == sizeof(double) && alpha > 2)
    for (int i = 0; i < POLISH; ++i) {
      const double step = newton_step<POWER>(totals_at<POWER>(found.scores, found.count, shift, offset, alpha), alpha);
      // Steps larger than rounding errors are wrong: Newton's method can be far off where a weight reaches 0.
      if ((step < 0 ? -step : step) <= 4 * std::numeric_limits<double>::epsilon()) offset += step;
    }
  return {shift, T(offset)};
}

// Write weights for scores, zeros behind them up to a multiple of PAD.
template <Power POWER, class T>
OUTLINE void entmax_weights(const T* s, T* p, i64 n, Row<T> row, double alpha) {
  const T factor = T(alpha - 1), power = T(1 / (alpha - 1)), shift = row.shift, offset = row.offset;
  over<T>(0, n, [&](i64 j, auto x) {
    using X = decltype(x);
    store(p + j, entmax_weight<POWER>(factor * ((load<X>(s + j) - shift) - offset), power));
  });
  fill(p + n, padded(n) - n, T(0));
}

template <class T>
void entmax_weights(const T* s, T* p, i64 n, Row<T> row, double alpha) {
  if (row.shift != row.shift) return fill(p, padded(n), row.shift);
  if (alpha == 2) return entmax_weights<LINEAR>(s, p, n, row, alpha);
  if (alpha == 1.5) return entmax_weights<SQUARE>(s, p, n, row, alpha);
  entmax_weights<ANY>(s, p, n, row, alpha);
}

// Turn candidates into weights, and drop those without.
template <class T>
void keep_weighted(Candidates<T>& found, Row<T> row, double alpha, T* weights) {
  entmax_weights(found.scores, weights, found.count, row, alpha);
  i64 count = 0;
  for (i64 i = 0; i < found.count; ++i) {
    found.scores[count] = weights[i];
    found.keys[count] = found.keys[i];
    count += weights[i] > T(0);
  }
  found.count = count;
}

// Add the values of some keys, weighted, to a row of output.
template <class T>
OUTLINE void read_some(const Candidates<T>& from, const T* values, i64 V, T* o) {
  using X = Vector<T>;
  constexpr int N = CHUNK / WIDTH<T> < 8 ? CHUNK / WIDTH<T> : 8;
  i64 c = 0;
  for (; c + N * WIDTH<T> <= V; c += N * WIDTH<T>) {
    X sums[N] = {};
    for (i64 i = 0; i < from.count; ++i) {
      const T weight = from.scores[i], *value = values + from.keys[i] * V + c;
      UNROLLED
      for (int j = 0; j < N; ++j) sums[j] += weight * load<X>(value + j * WIDTH<T>);
    }
    T* y = o + c / CHUNK * BLOCK * CHUNK + c % CHUNK;
    UNROLLED
    for (int j = 0; j < N; ++j) store(y + j * WIDTH<T>, sums[j]);
  }
  while (c < V) {
    const i64 end = least(V, (c / CHUNK + 1) * CHUNK);
    T* y = o + c / CHUNK * BLOCK * CHUNK + c % CHUNK;
    for (i64 i = 0; i < from.count; ++i) {
      const T weight = from.scores[i], *value = values + from.keys[i] * V + c;
      over<T>(0, end - c, [&](i64 j, auto x) {
        store(y + j, load<decltype(x)>(y + j) + weight * load<decltype(x)>(value + j));
      });
    }
    c = end;
  }
}

// Copy scores and return the largest; NaN ends up in `flaw`.
template <class T>
OUTLINE T taken(const T* s, T* to, i64 n, T& flaw) {
  using X = Vector<T>;
  X peak = wide<X>(-std::numeric_limits<T>::infinity()), flaws{};
  T rest = -std::numeric_limits<T>::infinity();
  i64 j = 0;
  for (; j + WIDTH<T> <= n; j += WIDTH<T>) {
    const X x = load<X>(s + j);
    store(to + j, x);
    peak = larger(x, peak);
    flaws += x == x ? X{} : x;
  }
  T other = sum_of_lanes<T>(flaws);
  for (; j < n; ++j) {
    to[j] = s[j];
    rest = s[j] > rest ? s[j] : rest;
    other += s[j] == s[j] ? T(0) : s[j];
  }
  flaw += other;
  return larger(rest, over_lanes_combined<T>(peak, [](auto x, auto y) { return larger(y, x); }));
}

// The scores of a block's rows q0 to q1, side by side: `at` is where a tile's begin.
template <class T>
struct Held {
  T *scores, *peaks, *flaws;
  i64 row;  // the distance of rows
};

// Call `visit(t0, n, column, at)` for each tile of a block's keys.
template <class T, class Visit>
INLINE void over_tiles(const Arguments<T>& a, i64 head, i64 r0, i64 r1, Visit visit) {
  i64 at = 0;
  for (i64 index = 0; index < most(a[F::segment_count], 1); ++index) {
    const Segment keys = segment(a, head, r0, r1, index);
    for (i64 t0 = keys.start; t0 < keys.stop; t0 += a[F::tile]) {
      const i64 n = least(a[F::tile], keys.stop - t0);
      visit(t0, n, keys.column >= 0 ? keys.column + t0 - keys.start : -1, at);
      at += n;
    }
  }
}

// Write the scores of rows q0 to q1 of the block r0 to r1.
template <class Family, class T>
void hold(const Arguments<T>& a, i64 head, i64 r0, i64 r1, i64 q0, i64 q1, T* k, T* s, const Held<T>& to) {
  constexpr T minus = -std::numeric_limits<T>::infinity();
  fill(to.peaks, BLOCK, minus);
  fill(to.flaws, BLOCK, T(0));
  over_tiles(a, head, r0, r1, [&](i64 t0, i64 n, i64 column, i64 at) {
    if (!Family::pack(a, head, kv_head(a, head), r0, r1, t0, n, k)) {
      for (i64 row = 0; row < q1 - q0; ++row) fill(to.scores + row * to.row + at, n, minus);
      return;
    }
    for (i64 first = q0; first < q1; first += GROUP) {
      const Range seen = tile_scores<Family>(a, head, r0, r1, (first - r0) / GROUP, t0, n, column, k, s);
      for (i64 i = 0; i < least(GROUP, q1 - first); ++i) {
        const i64 row = first - q0 + i;
        T* target = to.scores + row * to.row + at;
        if (seen.stop <= seen.start) {
          fill(target, n, minus);
          continue;
        }
        fill(target, seen.start, minus);
        fill(target + seen.stop, n - seen.stop, minus);
        const T peak = taken(s + i * ROW + seen.start, target + seen.start, seen.stop - seen.start, to.flaws[row]);
        to.peaks[row] = peak > to.peaks[row] ? peak : to.peaks[row];
      }
    }
  });
}

// Call `visit(scores, count, first key)` for each run of a block's keys; `n` is the number of all of them.
template <class T, class Visit>
INLINE void over_runs(const Arguments<T>& a, i64 head, i64 r0, i64 r1, i64 n, const T* scores, Visit visit) {
  if (a[F::segment_count] == 0) return visit(scores, n, segment(a, head, r0, r1, 0).start);
  i64 at = 0;
  for (i64 index = 0; index < a[F::segment_count]; ++index) {
    const Segment keys = segment(a, head, r0, r1, index);
    if (keys.start < keys.stop) visit(scores + at, keys.stop - keys.start, keys.start);
    at += most(keys.stop - keys.start, 0);
  }
}

// The number of keys that a block sees.
template <class T>
i64 count_of_keys(const Arguments<T>& a, i64 head, i64 r0, i64 r1) {
  i64 n = 0;
  over_tiles(a, head, r0, r1, [&](i64, i64 count, i64, i64 at) { n = at + count; });
  return n;
}

// Find a row's threshold, and read the values of the keys with weight; answer whether all values are yet to be read.
template <class T>
bool finish_row(
    const Arguments<T>& a, i64 head, i64 r0, i64 r1, i64 n, const T* scores, T peak, T flaw, T* weights,
    Candidates<T> found, Row<T>& row, T* o) {
  constexpr T infinite = std::numeric_limits<T>::infinity();
  const double alpha = a.alpha();
  if (flaw != flaw || peak == infinite) {
    row = {std::numeric_limits<T>::quiet_NaN(), T(0)};
    for (i64 c = 0; c < a[F::V]; c += CHUNK) fill(o + c * BLOCK, CHUNK, row.shift);
    return false;
  }
  if (peak == -infinite) {  // nothing is visible
    row = {T(0), infinite};
    return false;
  }
  const auto each = [&](auto visit) { over_runs(a, head, r0, r1, n, scores, visit); };
  row = alpha == 2   ? row_threshold<LINEAR>(peak, alpha, found, n, each)
        : alpha == 1.5 ? row_threshold<SQUARE>(peak, alpha, found, n, each)
                       : row_threshold<ANY>(peak, alpha, found, n, each);
  if (a[F::read_all] != 0 || a[F::threshold] != 0) return true;
  keep_weighted(found, row, alpha, weights);
  if (n > MANY && SPARSE * found.count > n) return true;
  read_some(found, a.array(F::value) + kv_head(a, head) * a[F::S] * a[F::V], a[F::V], o);
  return false;
}

// Add the values of all keys, weighted, to the rows that are marked.
template <class T>
void read_all(
    const Arguments<T>& a, i64 head, i64 r0, i64 r1, i64 q0, i64 q1, const Held<T>& from, const Row<T>* found,
    const bool* marked, T* v, T* p, T* o) {
  over_tiles(a, head, r0, r1, [&](i64 t0, i64 n, i64, i64 at) {
    bool is_packed = false;
    for (i64 first = 0; first < q1 - q0; first += GROUP) {
      const i64 count = least(GROUP, q1 - q0 - first);
      bool some = false;
      for (i64 i = 0; i < count; ++i) some = some || marked[first + i];
      if (!some) continue;
      if (!is_packed) pack_values(a, kv_head(a, head), t0, n, v);
      is_packed = true;
      for (i64 i = 0; i < GROUP; ++i)
        if (i < count && marked[first + i])
          entmax_weights(from.scores + (first + i) * from.row + at, p + i * ROW, n, found[first + i], a.alpha());
        else
          fill(p + i * ROW, padded(n), T(0));
      if (a[F::threshold] != 0) drop(a, head, q0 + first, q1 - 1, t0, 0, padded(n), p);
      read(a, first, 0, n, p, v, o);
    }
  });
}

template <class Family, class T>
void threshold_forward(const Arguments<T>& a) {
  T *k = a.scratch(F::at_key), *v = a.scratch(F::at_value), *s = a.scratch(F::at_score), *p = a.scratch(F::at_weight);
  T *o = a.scratch(F::at_output), *state = a.scratch(F::at_state), *weights = a.scratch(F::at_line);
  const Held<T> held{a.scratch(F::at_held), state, state + BLOCK, a[F::held_row]};
  const Candidates<T> found{a.scratch(F::at_found), reinterpret_cast<int32_t*>(a.scratch(F::at_place)), 0};
  const i64 L = a[F::L], V = a[F::V], blocks = a[F::segment_count] != 0 ? 1 : parts(L, BLOCK);
  for (i64 item = a[F::first]; item < a[F::last]; ++item) {
    const i64 head = item / blocks, r0 = (a[F::block] + item % blocks) * BLOCK, r1 = least(L, r0 + BLOCK);
    const i64 n = count_of_keys(a, head, r0, r1);
    for (i64 q0 = r0; q0 < r1; q0 += a[F::held]) {
      const i64 q1 = least(q0 + a[F::held], r1);
      hold<Family>(a, head, r0, r1, q0, q1, k, s, held);
      fill(o, parts(V, CHUNK) * BLOCK * CHUNK, T(0));
      Row<T> rows[BLOCK];
      bool marked[BLOCK], some = false;
      for (i64 i = 0; i < q1 - q0; ++i) {
        marked[i] = finish_row(
            a, head, r0, r1, n, held.scores + i * held.row, held.peaks[i], held.flaws[i], weights, found, rows[i],
            o + i * CHUNK);
        some = some || marked[i];
      }
      if (some) read_all(a, head, r0, r1, q0, q1, held, rows, marked, v, p, o);
      const i64 place = head * L + q0;
      unpack_lanes(o, BLOCK, q1 - q0, V, a.array(F::output) + place * V, V);
      check(a, a.array(F::output) + place * V, (q1 - q0) * V);
      for (i64 i = 0; i < q1 - q0; ++i) {
        a.array(F::peak)[place + i] = rows[i].shift;
        a.array(F::total)[place + i] = rows[i].offset;
      }
    }
  }
}

template <class Family, class T>
void forward(const Arguments<T>& a) {
  if (a[F::normalizer] == ENTMAX)
    threshold_forward<Family>(a);
  else
    online_forward<Family>(a);
}

}  // namespace
