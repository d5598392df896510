// The arguments of a kernel: an array of 64-bit integers (addresses, sizes, strides) by the names below, and three real
// numbers. `regard/engines/fused/arguments.py` says what each array holds; the loader compares names and sizes.
#pragma once

#include "vector.h"

#define FIELDS(field)                                                                                           \
  /* What rows are compared by, up to three forms of it, and the class of each row. */                          \
  field(query) field(query_small) field(query_raw) field(query_class)                                           \
  field(key) field(key_small) field(key_raw) field(key_class)                                                   \
  field(weight) field(weight_rest) field(weight_head) field(mixed) field(kind) field(direct) field(boxes)       \
  field(factor)                                                                                                 \
  field(value) field(value_lanes) field(read_all)                                             \
  /* Distances of sequences, heads and rows that are read where they are. */                                    \
  field(key_b) field(key_g) field(key_s) field(value_b) field(value_g) field(value_s)                           \
  /* How scores become weights, and the bits of a double, entmax's α. */                                        \
  field(normalizer) field(alpha)                                                                                \
  /* Results. */                                                                                                \
  field(output) field(flawed) field(peak) field(total) field(top) field(entropy) field(received) field(best) field(best_key)  \
  /* The logit of each row's sink, and the dropout of weights. */                                               \
  field(sink) field(seed) field(threshold)                                                                      \
  /* Of the backward pass. */                                                                                   \
  field(grad) field(d_query) field(d_key) field(d_value) field(d_weight) field(d_added)                         \
  field(d_bias) field(d_bias_b) field(d_bias_h) field(d_bias_r) field(d_bias_c) field(d_bias_by_row)            \
  field(order) field(kv_b) field(kv_h) field(head_b) field(head_h)                                              \
  /* The mask: an interval of keys for each row, or segments of one block with what is added to their scores;   \
     the hidden key of a row. */                                                                                \
  field(own) field(start) field(stop) field(interval_b) field(interval_h) field(interval_r)                     \
  field(segments) field(segment_count) field(added) field(added_at) field(added_b) field(added_h)               \
  field(added_r)                                                                                                \
  /* A bias given as a tensor, with its strides, and which of its matrices a sequence has. */                   \
  field(bias) field(planes) field(bias_b) field(bias_h) field(bias_r) field(bias_c)                             \
  /* The rows of queries and keys that a sequence has, −1 for none, and how many there are of each head. */      \
  field(query_rows) field(key_rows) field(all_queries) field(all_keys)                                          \
  /* Sizes; a work item is a block of rows of one head. */                                                      \
  field(H) field(G) field(L) field(S) field(C) field(V) field(K) field(tile) field(first) field(last)           \
  field(block) field(head_first) field(kv_first) field(held) field(held_row)                                    \
  /* Where the parts of the scratch memory begin. */                                                            \
  field(scratch) field(at_query) field(at_key) field(at_value) field(at_score) field(at_weight)                 \
  field(at_state) field(at_output) field(at_rows) field(at_d_key) field(at_d_score) field(at_d_query)           \
  field(at_delta) field(at_held) field(at_found) field(at_place) field(at_line) field(at_gathered)

namespace {

namespace F {
enum Field {
#define DECLARED(name) name,
  FIELDS(DECLARED)
#undef DECLARED
};
}  // namespace F

#define COUNTED(name) +1
constexpr int FIELD_COUNT = FIELDS(COUNTED);
#undef COUNTED

constexpr i64 TILE = 512;        // keys that a tile has at most
constexpr i64 CHUNK = 64;        // values or features of a chunk: the distance of rows whose lanes are these
constexpr i64 BLOCK = 64;        // queries of a block at most
constexpr i64 BLOCKS = 4;        // blocks that meet a packed tile of keys at most, one after another
constexpr i64 GROUP = 4;         // queries that are compared together
constexpr i64 BAND = 16;         // queries whose weights the backward pass holds before it sums them for the keys
constexpr i64 PAD = 16;          // every row of lanes is a multiple of this long
constexpr i64 SPAN = 16;         // steps of a recurrence that are handled at once
constexpr i64 ROW = TILE + PAD;  // the distance of rows of keys; no power of two, or rows would share cache sets

// Scores of a distance; from BOXCAR on, weights are 0 beyond a distance.
enum Kind : i64 { GAUSSIAN, LAPLACIAN, BOXCAR, TRIANGULAR, EPANECHNIKOV, COMPACT = BOXCAR };

// How scores become weights.
enum Normalizer : i64 { SOFTMAX, SIGMOID, ENTMAX };

// The arguments of one call. `softcap` is 0 where scores are not capped; `kept` is the factor of weights that dropout
// keeps, those whose random bits reach `threshold`.
template <class T>
struct Arguments {
  const i64* numbers;
  T real, softcap, kept;

  INLINE i64 operator[](F::Field field) const { return numbers[field]; }
  INLINE T* array(F::Field field) const { return reinterpret_cast<T*>(numbers[field]); }
  INLINE i64* integers(F::Field field) const { return reinterpret_cast<i64*>(numbers[field]); }
  INLINE uint8_t* bytes(F::Field field) const { return reinterpret_cast<uint8_t*>(numbers[field]); }
  INLINE double alpha() const { return bits_as<double>(numbers[F::alpha]); }
  INLINE T* scratch(F::Field field) const { return array(F::scratch) + numbers[field]; }
};

INLINE i64 least(i64 x, i64 y) { return x < y ? x : y; }
INLINE i64 most(i64 x, i64 y) { return x > y ? x : y; }
INLINE i64 parts(i64 count, i64 size) { return (count + size - 1) / size; }
INLINE i64 padded(i64 count) { return parts(count, PAD) * PAD; }

}  // namespace
