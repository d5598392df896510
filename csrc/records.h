// The records that Python writes for kernels: 64-bit numbers (addresses, sizes, strides) in this order. Structs are made
// from these lists; the loader compares them with `RECORDS` in `regard/engines/fused/arguments.py`.
#pragma once

// Rows of an array are four numbers: an address, and how far sequences, heads and steps lie apart.
#define RECURRENCE_FIELDS(number, rows)                                                                     \
  number(H) number(G) number(L) number(K) number(V) number(query_heads) number(delta) number(kind)          \
  number(parts) number(saved_every) number(together)                                                                         \
  rows(query) rows(key) rows(reader) rows(value) rows(decay) rows(rate) rows(output)                        \
  /* The states (B, H, K, V) before the first and after the last step. */                                   \
  number(start) number(end)                                                                                 \
  /* r (B, H, L, V) of the delta rule; the state (B, H, ·, V, K) before every chunk that is saved. */       \
  number(residual) number(saved)                                                                            \
  /* Two numbers that become 1 if a decay is above 1, or a rate out of [0, 2]. */                           \
  number(wrong)                                                                                             \
  rows(grad) rows(d_query) rows(d_key) rows(d_reader) rows(d_value) rows(d_decay) rows(d_rate)              \
  number(query_part) number(key_part) number(d_end) number(d_start)

// Arrays that are read, arrays of integers, and arrays that are written too.
#define LINES_FIELDS(array, integers, result, number)                                                       \
  array(query) array(place) array(key) array(centred) array(origin) array(value) array(bias)                \
  integers(start) integers(stop)                                                                            \
  result(output) result(slopes) result(centers) result(means) result(factors) result(state)                 \
  number(B) number(H) number(G) number(L) number(S) number(C) number(V) number(gaussian)                    \
  number(interval_b) number(interval_h) number(interval_r)                                                  \
  number(bias_b) number(bias_h) number(bias_r) number(bias_c)

#define SELECTION_FIELDS(number)                                                                            \
  number(B) number(H) number(G) number(L) number(S) number(C) number(V) number(K) number(list_b)            \
  number(list_h) number(rows) number(words)

// A norm is two addresses, weight and bias; a matrix is three: panels, scales and bias. An address of 0 is none.
#define LAYER_FIELDS(norm, linear, number)                                                                  \
  norm(norm_own) norm(norm_other) norm(norm_forward)                                                        \
  linear(query_key_value) linear(own_output) linear(other_query) linear(other_output) linear(up) linear(down) \
  /* Rows that the layer's own keys and values are added to, and rows of the memory. */                     \
  number(key) number(value) number(other_key) number(other_value)

#define TABLE_FIELDS(number) number(which) number(rows) number(row) number(counts) number(all)

#define STACK_FIELDS(number, table, norm)                                                                   \
  number(layers) number(count) number(norm_first) number(E) number(H) number(F) number(kv_row)              \
  number(other_kv_row) number(place) table(own) table(other) norm(last_norm)

// Members of a struct.
#define NUMBER_MEMBER(name) i64 name;
#define ONE(name) +1
