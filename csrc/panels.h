// Products of rows with a matrix that is stored in panels: its outputs side by side, input by input.
//
// Dimensions: R rows, N outputs, E inputs.
#pragma once

#include "arguments.h"

namespace {

// Outputs of a panel, and rows that are multiplied together.
constexpr i64 LANES = 32;
constexpr int TOGETHER_ROWS = 6;

// A matrix W (N, E) and a bias: of numbers, or in int8 with a scale for each output.
//
// Panel p has w[p·LANES + l, e] at [p, e, l]; in int8, with pairs of inputs, at [p, e / 2, l, e % 2]. Behind N and E
// there are zeros. `bias` may be null.
template <class T>
struct Panels {
  const void* weights;
  const T *scales, *bias;
  i64 N, E;

  INLINE i64 pairs() const { return parts(E, 2); }
};

// What becomes of a product y: it replaces the output (or its positive part does), or is added to it.
enum class Then { STORE, RELU, ADD };

// Write the first `count` lanes of a row of a panel.
template <Then then, class T>
INLINE void put(T* y, const T* made, const T* bias, i64 count) {
  over<T>(0, count, [&](i64 j, auto like) {
    using X = decltype(like);
    X x = load<X>(made + j);
    if (bias) x += load<X>(bias + j);
    if constexpr (then == Then::RELU) x = x < X{} ? X{} : x;  // NaN stays
    if constexpr (then == Then::ADD) x += load<X>(y + j);
    store(y + j, x);
  });
}

// Write Σ_e x[m, e] w[e] for M rows and V vectors of lanes.
template <class T, int M, int V>
INLINE void tile(T* made, const T* x, i64 x_row, const T* w, i64 E) {
  for (i64 first = 0; first < E; first += 128) {  // sums of sums have smaller errors
    const i64 last = least(first + 128, E);
    Vector<T> sums[M][V] = {};
    const T* weights = w + first * LANES;
    for (i64 e = first; e < last; ++e, weights += LANES) {
      Vector<T> values[V];
      UNROLLED
      for (int v = 0; v < V; ++v) values[v] = load<Vector<T>>(weights + v * WIDTH<T>);
      UNROLLED
      for (int m = 0; m < M; ++m) {
        const T factor = x[m * x_row + e];
        UNROLLED
        for (int v = 0; v < V; ++v) sums[m][v] += factor * values[v];
      }
    }
    UNROLLED
    for (int m = 0; m < M; ++m)
      UNROLLED
      for (int v = 0; v < V; ++v) {
        T* place = made + m * LANES + v * WIDTH<T>;
        store(place, first ? load<Vector<T>>(place) + sums[m][v] : sums[m][v]);
      }
  }
}

// Lanes of a vector of sums, and the vector itself.
constexpr i64 WHOLE = VECTOR_BYTES / 4;
typedef int32_t WholeVector __attribute__((vector_size(VECTOR_BYTES)));

// Σ over pairs of two inputs: WHOLE outputs' weights times the same two numbers of 16 bits.
INLINE WholeVector of_pair(const int8_t* w, int32_t pair) {
#if defined(__AVX512BW__) && VECTOR_BYTES == 64
  const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w)));
  return reinterpret_cast<WholeVector>(_mm512_madd_epi16(wide, _mm512_set1_epi32(pair)));
#elif defined(__AVX2__) && VECTOR_BYTES == 32
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w)));
  return reinterpret_cast<WholeVector>(_mm256_madd_epi16(wide, _mm256_set1_epi32(pair)));
#elif defined(__SSE4_1__) && VECTOR_BYTES == 16
  const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(w)));
  return reinterpret_cast<WholeVector>(_mm_madd_epi16(wide, _mm_set1_epi32(pair)));
#elif defined(__aarch64__) && VECTOR_BYTES == 16
  const int16x8_t wide = vmovl_s8(vld1_s8(w)), factors = vreinterpretq_s16_s32(vdupq_n_s32(pair));
  const int32x4_t low = vmull_s16(vget_low_s16(wide), vget_low_s16(factors));
  return reinterpret_cast<WholeVector>(vpaddq_s32(low, vmull_high_s16(wide, factors)));
#else
  const int32_t one = int16_t(pair), other = int16_t(uint32_t(pair) >> 16);
  WholeVector made;
  for (i64 i = 0; i < WHOLE; ++i) made[i] = w[2 * i] * one + w[2 * i + 1] * other;
  return made;
#endif
}

// The same with a matrix in int8 and rows of 16 bits, two numbers in each x: exact sums.
template <int M, int V>
INLINE void whole_tile(int32_t* made, const int32_t* x, i64 x_row, const int8_t* w, i64 pairs) {
  WholeVector sums[M][V] = {};
  for (i64 e = 0; e < pairs; ++e, w += 2 * LANES) {
    UNROLLED
    for (int v = 0; v < V; ++v)
      UNROLLED
      for (int m = 0; m < M; ++m) sums[m][v] += of_pair(w + v * 2 * WHOLE, x[m * x_row + e]);
  }
  UNROLLED
  for (int m = 0; m < M; ++m)
    UNROLLED
    for (int v = 0; v < V; ++v) std::memcpy(made + m * LANES + v * WHOLE, &sums[m][v], sizeof(WholeVector));
}

// Round rows to whole numbers of 16 bits, in pairs, and write what a step of each is worth. The sums of E products with
// 8 bits stay within 32 bits. A row that is not finite is worth NaN.
template <class T>
OUTLINE void round_rows(const T* x, i64 x_row, i64 R, i64 E, int16_t* rounded, T* steps) {
  const i64 width = 2 * parts(E, 2), most = least(32767, (i64(1) << 31) / (127 * (E + 1)) - 1);
  const T infinity = std::numeric_limits<T>::infinity(), magic = Constants<T>::magic;
  for (i64 r = 0; r < R; ++r) {
    const T* row = x + r * x_row;
    Sum<T> nothing;  // NaN if the row is not finite
    over<T>(0, E, [&](i64 e, auto like) { nothing.add(load<decltype(like)>(row + e) * T(0)); });
    const T peak = combined(row, 0, E, T(0), [](auto a, auto b) { return larger(absolute(b), absolute(a)); });
    const bool finite = nothing.total() == T(0) && peak < infinity;
    steps[r] = finite ? larger(peak / T(most), std::numeric_limits<T>::min()) : std::numeric_limits<T>::quiet_NaN();
    const T factor = finite ? T(1) / steps[r] : T(0);
    int16_t* to = rounded + r * width;
    to[width - 1] = 0;
    for (i64 e = 0; e < E; ++e) {
      const T whole = finite ? row[e] * factor + magic : magic;  // the last bits hold the whole number
      to[e] = int16_t(bits_as<typename Types<T>::Bits>(whole));
    }
  }
}

template <Then then, int M, class T>
OUTLINE void rows_of_panels(const Panels<T>& w, const T* x, i64 x_row, T* y, i64 y_row, i64 first, i64 last) {
  constexpr int all = int(LANES / WIDTH<T>), V = M == 1 ? (all < 4 ? all : 4) : 2;
  for (i64 p = first; p < last; ++p) {
    const T* panel = static_cast<const T*>(w.weights) + p * w.E * LANES;
    T made[M * LANES];
    for (i64 j = 0; j < LANES; j += V * WIDTH<T>) tile<T, M, V>(made + j, x, x_row, panel + j, w.E);
    const i64 at = p * LANES, count = least(LANES, w.N - at);
    for (int m = 0; m < M; ++m)
      put<then>(y + m * y_row + at, made + m * LANES, w.bias ? w.bias + at : nullptr, count);
  }
}

template <Then then, int M, class T>
OUTLINE void rows_of_whole_panels(
    const Panels<T>& w, const int32_t* x, const T* steps, T* y, i64 y_row, i64 first, i64 last) {
  constexpr int all = int(LANES / WHOLE), V = M == 1 ? (all < 4 ? all : 4) : 2;
  const i64 pairs = w.pairs();
  for (i64 p = first; p < last; ++p) {
    const int8_t* panel = static_cast<const int8_t*>(w.weights) + p * pairs * 2 * LANES;
    int32_t sums[M * LANES];
    for (i64 j = 0; j < LANES; j += V * WHOLE)
      whole_tile<M, V>(sums + j, x, pairs, panel + 2 * j, pairs);
    const i64 at = p * LANES, count = least(LANES, w.N - at);
    for (int m = 0; m < M; ++m) {
      T made[LANES];
      for (i64 j = 0; j < LANES; ++j) made[j] = T(sums[m * LANES + j]) * (w.scales[at + j] * steps[m]);
      put<then>(y + m * y_row + at, made, w.bias ? w.bias + at : nullptr, count);
    }
  }
}

// Call `body(r, M)` for groups of M rows, almost equal and at most TOGETHER_ROWS.
template <class Body>
INLINE void over_groups(i64 R, Body body) {
  const i64 groups = parts(R, TOGETHER_ROWS);
  for (i64 g = 0; g < groups; ++g) {
    const i64 r = R * g / groups;
    switch (R * (g + 1) / groups - r) {
      case 1: body(r, std::integral_constant<int, 1>{}); break;
      case 2: body(r, std::integral_constant<int, 2>{}); break;
      case 3: body(r, std::integral_constant<int, 3>{}); break;
      case 4: body(r, std::integral_constant<int, 4>{}); break;
      case 5: body(r, std::integral_constant<int, 5>{}); break;
      default: body(r, std::integral_constant<int, 6>{});
    }
  }
}

// Write x Wᵀ + b for R rows, of the panels `first` to `last`. If W is in int8, `room` has space
// for R + R ⌈E / 2⌉ numbers, in which rows are rounded.
template <Then then, class T>
void products(const Panels<T>& w, const T* x, i64 x_row, i64 R, T* y, i64 y_row, i64 first, i64 last, T* room) {
  // Each panel stays in the cache while all rows meet it.
  if (w.scales) {
    int16_t* rounded = reinterpret_cast<int16_t*>(room + R);
    round_rows(x, x_row, R, w.E, rounded, room);
    const int32_t* pairs = reinterpret_cast<const int32_t*>(rounded);
    for (i64 p = first; p < last; ++p)
      over_groups(R, [&](i64 r, auto M) {
        rows_of_whole_panels<then, M.value>(w, pairs + r * w.pairs(), room + r, y + r * y_row, y_row, p, p + 1);
      });
  } else {
    for (i64 p = first; p < last; ++p)
      over_groups(R, [&](i64 r, auto M) {
        rows_of_panels<then, M.value>(w, x + r * x_row, x_row, y + r * y_row, y_row, p, p + 1);
      });
  }
}

}  // namespace
