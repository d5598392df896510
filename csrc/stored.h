// Numbers as they are stored, in memory that the caller owns: of the type that kernels compute in, or of 16 bits, which
// are converted in registers.
#pragma once

#include "arguments.h"

namespace {

struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// Numbers of a pair of vectors.
template <class T>
constexpr i64 PAIR = 2 * WIDTH<T>;

// Vectors X and Y of a pair of stored numbers. Where they are `alternating`, X holds those at even places and Y those
// at odd places, since 16-bit numbers are cheapest to take apart like that; else each holds one half of them.
template <class X>
struct Two {
  X x, y;
};

INLINE Two<Vector<float>> pair_of(const float* p) {
  return {load<Vector<float>>(p), load<Vector<float>>(p + WIDTH<float>)};
}
INLINE Two<Vector<double>> pair_of(const double* p) {
  return {load<Vector<double>>(p), load<Vector<double>>(p + WIDTH<double>)};
}

using Words = Types<float>::BitVector;

INLINE Words words_of(const void* p) {
  Words words;
  std::memcpy(&words, p, sizeof(Words));
  return words;
}

INLINE Two<Vector<float>> pair_of(const Bfloat16* p) {
  const Words words = words_of(p);
  return {bits_as<Vector<float>>(words << 16), bits_as<Vector<float>>(words & 0xffff0000u)};
}

#if defined(__AVX512F__) && VECTOR_BYTES == 64
#define CONVERTS_HALVES 1
INLINE Vector<float> halves(const Float16* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
#elif defined(__F16C__) && VECTOR_BYTES == 32
#define CONVERTS_HALVES 1
INLINE Vector<float> halves(const Float16* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
#elif defined(__aarch64__) && VECTOR_BYTES == 16
#define CONVERTS_HALVES 1
INLINE Vector<float> halves(const Float16* p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p))));
}
#else
#define CONVERTS_HALVES 0
// float16 in the low half of each word. A power of two moves the exponent, of subnormal numbers too.
INLINE Vector<float> halves(Words words) {
  const Words rest = (words & 0x7fffu) << 13, sign = (words & 0x8000u) << 16;
  const Words moved = bits_as<Words>(bits_as<Vector<float>>(rest) * 0x1p112f);
  return bits_as<Vector<float>>((rest >= (0x7c00u << 13) ? rest | 0x7f800000u : moved) | sign);
}
#endif

INLINE Two<Vector<float>> pair_of(const Float16* p) {
#if CONVERTS_HALVES
  return {halves(p), halves(p + WIDTH<float>)};
#else
  const Words words = words_of(p);
  return {halves(words & 0xffffu), halves(words >> 16)};
#endif
}

template <class Stored>
constexpr bool alternating = false;
template <>
constexpr bool alternating<Bfloat16> = true;
template <>
constexpr bool alternating<Float16> = !CONVERTS_HALVES;

template <class X, std::size_t... I>
INLINE Two<X> parted(Two<X> p, std::index_sequence<I...>) {
  return {__builtin_shufflevector(p.x, p.y, (2 * I)...), __builtin_shufflevector(p.x, p.y, (2 * I + 1)...)};
}

template <class X, std::size_t... I>
INLINE Two<X> merged(Two<X> p, std::index_sequence<I...>) {
  constexpr std::size_t n = sizeof...(I);
  return {
      __builtin_shufflevector(p.x, p.y, (I / 2 + I % 2 * n)...),
      __builtin_shufflevector(p.x, p.y, ((n + I) / 2 + I % 2 * n)...)};
}

// A pair of numbers in the lanes that those of type Stored have, and back.
template <class Stored, class T>
INLINE Two<Vector<T>> as_stored(const T* p) {
  if constexpr (alternating<Stored>) return parted(pair_of(p), std::make_index_sequence<WIDTH<T>>());
  return pair_of(p);
}
template <class Stored, class T>
INLINE Two<Vector<T>> in_order(const T* p) {
  if constexpr (alternating<Stored>) return merged(pair_of(p), std::make_index_sequence<WIDTH<T>>());
  return pair_of(p);
}

// The first `count` numbers at p as a whole pair, with zeros behind.
template <class T, class Stored>
struct Few {
  Stored numbers[PAIR<T>] = {};

  INLINE Few(const Stored* p, i64 count) { std::memcpy(numbers, p, count * sizeof(Stored)); }
};

}  // namespace
