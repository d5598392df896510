// The layers of a Transformer, for rows whose keys and values tables name: a step of decoding, or sequences to read.
//
// Dimensions: R rows, E width, H heads of D features, F hidden features; N outputs.
#pragma once

#include "decoding.h"
#include "panels.h"
#include "records.h"

namespace {

// The numbers of a matrix: addresses of the panels, of the scales or 0, and of the bias.
struct Linear {
  i64 weights, scales, bias;

  template <class T>
  INLINE Panels<T> panels(i64 N, i64 E) const {
    return {reinterpret_cast<const void*>(weights), reinterpret_cast<const T*>(scales),
            reinterpret_cast<const T*>(bias), N, E};
  }
};

struct Norm {
  i64 weight, bias;
};

// The numbers of a layer. Without cross-attention, `other_key` is 0.
struct Layer {
#define NORM_MEMBER(name) Norm name;
#define LINEAR_MEMBER(name) Linear name;
  LAYER_FIELDS(NORM_MEMBER, LINEAR_MEMBER, NUMBER_MEMBER)
#undef LINEAR_MEMBER
};

// A table of rows: row `which[r]` of the table begins with those that r attends to; see `read_rows`.
struct Table {
  TABLE_FIELDS(NUMBER_MEMBER)

  INLINE const i64* at(i64 address) const { return reinterpret_cast<const i64*>(address); }
};

// The numbers of a call: sizes, the distances of rows of keys, the table of each attention, and the place in the
// first one's rows at which row 0 writes. The last norm's addresses are 0 if there is none.
struct Stack {
#define TABLE_MEMBER(name) Table name;
  STACK_FIELDS(NUMBER_MEMBER, TABLE_MEMBER, NORM_MEMBER)
#undef TABLE_MEMBER
#undef NORM_MEMBER
};

// Normalize R rows: (x − mean) / √(variance + ε) · weight + bias.
template <class T>
OUTLINE void normalize(const Norm& norm, const T* x, T* y, i64 R, i64 E, T epsilon) {
  const T *weight = reinterpret_cast<const T*>(norm.weight), *bias = reinterpret_cast<const T*>(norm.bias);
  for (i64 r = 0; r < R; ++r, x += E, y += E) {
    const T mean = sum_of(x, 0, E) / T(E);
    Sum<T> squares;
    over<T>(0, E, [&](i64 j, auto like) {
      const auto d = load<decltype(like)>(x + j) - mean;
      squares.add(d * d);
    });
    const T factor = T(1) / square_root(squares.total() / T(E) + epsilon);
    over<T>(0, E, [&](i64 j, auto like) {
      using X = decltype(like);
      X made = (load<X>(x + j) - mean) * factor;
      if (weight) made *= load<X>(weight + j);
      if (bias) made += load<X>(bias + j);
      store(y + j, made);
    });
  }
}

// Add to x, or with norms behind blocks: add and normalize.
template <class T>
struct Block {
  const Stack& stack;
  T *x, *normal, *made, *room;
  i64 R;
  T epsilon;

  // The rows that a block begins with.
  const T* enter(const Norm& norm) const {
    if (!stack.norm_first) return x;
    normalize(norm, x, normal, R, stack.E, epsilon);
    return normal;
  }
  void leave(const Norm& norm, const Linear& linear, const T* rows, i64 width) const {
    apply<Then::ADD>(linear, rows, width, width, x, stack.E, stack.E);
    if (!stack.norm_first) normalize(norm, x, x, R, stack.E, epsilon);
  }
  template <Then then>
  void apply(const Linear& linear, const T* rows, i64 row, i64 width, T* y, i64 y_row, i64 N) const {
    products<then>(linear.panels<T>(N, width), rows, row, R, y, y_row, 0, parts(N, LANES), room);
  }
};

// Replace the rows `first` to `last` of x (R, E) by what the layers make of them, and add their keys and values to the
// caches. Rows must not see others of the same call, unless all of them lie between `first` and `last`. They see `seen`
// rows at most; `_room` in `layers.py` states how much scratch memory that takes.
template <class T>
void layers(const i64* numbers, T epsilon, T* x, i64 first, i64 last, i64 seen, T* scratch) {
  const Stack& stack = *reinterpret_cast<const Stack*>(numbers);
  const Layer* layer = reinterpret_cast<const Layer*>(stack.layers);
  const i64 R = last - first, E = stack.E, H = stack.H, F = stack.F, D = E / H;
  const T scale = T(1) / square_root(T(D));
  T *normal = scratch, *read = normal + R * E, *made = read + R * E, *scores = made + R * most(3 * E, F);
  const Block<T> block{stack, x + first * E, normal, made, scores + H * (padded(seen) + PAD), R, epsilon};
  const auto attend = [&](const Table& table, i64 key, i64 value, i64 kv_row, i64 q_row) {
    read_rows(
        made - first * q_row, q_row, reinterpret_cast<const T*>(key), reinterpret_cast<const T*>(value), kv_row,
        table.at(table.which), table.at(table.rows), table.row, table.at(table.counts), table.all, first, last, H, H, D,
        scale, read - first * E, E, scores);
  };
  for (i64 i = 0; i < stack.count; ++i, ++layer) {
    block.template apply<Then::STORE>(layer->query_key_value, block.enter(layer->norm_own), E, E, made, 3 * E, 3 * E);
    T *keys = reinterpret_cast<T*>(layer->key), *values = reinterpret_cast<T*>(layer->value);
    for (i64 r = 0; r < R; ++r) {
      const i64 at = (stack.place + first + r) * stack.kv_row;
      copy(made + r * 3 * E + E, keys + at, E);
      copy(made + r * 3 * E + 2 * E, values + at, E);
    }
    attend(stack.own, layer->key, layer->value, stack.kv_row, 3 * E);
    block.leave(layer->norm_own, layer->own_output, read, E);
    if (layer->other_key) {
      block.template apply<Then::STORE>(layer->other_query, block.enter(layer->norm_other), E, E, made, E, E);
      attend(stack.other, layer->other_key, layer->other_value, stack.other_kv_row, E);
      block.leave(layer->norm_other, layer->other_output, read, E);
    }
    block.template apply<Then::RELU>(layer->up, block.enter(layer->norm_forward), E, E, made, F, F);
    block.leave(layer->norm_forward, layer->down, made, F);
  }
  if (stack.last_norm.weight) normalize(stack.last_norm, block.x, block.x, R, E, epsilon);
}

}  // namespace
