// Kernels on sequences whose rows are gathered from those of a whole problem, and whose results go back there.
//
// The arrays of queries and keys hold rows of heads alone. Every sequence lists its rows of queries and of keys, −1 for
// none; sequences may share keys, not queries. A kernel sees the rows of one work item, copied next to each other.
#pragma once

#include "backward.h"

namespace {

template <class T>
class Gathered {
 public:
  explicit Gathered(const Arguments<T>& call) : a(call), own{numbers, call.real, call.softcap, call.kept} {
    std::memcpy(numbers, a.numbers, sizeof(numbers));
    numbers[F::order] = 0;
  }

  // Run a kernel of this family on all work items.
  template <class Family, class Kernel>
  void run(Kernel kernel) {
    const i64 blocks = parts(a[F::L], BLOCK), H = a[F::H], G = a[F::G];
    const i64* order = a.integers(F::order);
    kv = -1;
    for (i64 turn = a[F::first]; turn < a[F::last]; ++turn) {
      const i64 item = order ? order[turn] : turn;
      head = item / blocks, row = item % blocks * BLOCK;
      if (kv_head(a, head) != kv) {
        put_keys<Family>();
        kv = kv_head(a, head);
        sequence = kv / G;
        next = a.scratch(F::at_gathered);
        take_keys();
        behind_keys = next;
      }
      next = behind_keys;
      take_queries();
      begin_sums(F::received, 1, 0);
      numbers[F::first] = item, numbers[F::last] = item + 1;
      if (!is_backward()) numbers[F::head_first] = head;  // of what keys receive
      numbers[F::kv_first] = kv % G * a[F::kv_h];
      kernel(own);
      put_queries(head % H);
      add_sums(F::received, 1, 0, head % H * a[F::head_h] - a[F::head_first], false);
    }
    put_keys<Family>();
  }

 private:
  struct Array {
    F::Field field;
    i64 width;
    bool is_read, is_written;
  };

  const Arguments<T>& a;
  i64 numbers[FIELD_COUNT];
  Arguments<T> own;
  i64 head = 0, row = 0, kv = -1, sequence = 0;
  T *next = nullptr, *behind_keys = nullptr;

  INLINE bool is_backward() const { return a[F::grad] != 0; }
  INLINE const i64* query_rows() const { return a.integers(F::query_rows) + sequence * a[F::L] + row; }
  INLINE const i64* key_rows() const { return a.integers(F::key_rows) + sequence * a[F::S]; }
  INLINE i64 queries() const { return least(BLOCK, a[F::L] - row); }

  // Memory for so many numbers, which the kernel takes for those of an array from a place on.
  template <class N>
  N* memory(F::Field field, i64 count, i64 place) {
    N* found = reinterpret_cast<N*>(next);
    next += parts(count * i64(sizeof(N)), PAD * i64(sizeof(T))) * PAD;
    numbers[field] = i64(reinterpret_cast<uintptr_t>(found)) - place * i64(sizeof(N));
    return found;
  }

  // The rows of an array that the kernel sees, from its own place on.
  template <class N>
  N* seen(F::Field field, i64 place) const {
    return reinterpret_cast<N*>(numbers[field] + place * i64(sizeof(N)));
  }

  // Copy rows of a head, whose own begin at `source`; those that do not exist are 0.
  template <class N>
  void take(F::Field field, const i64* rows, i64 count, i64 width, i64 source, i64 place, bool is_read) {
    if (a[field] == 0) return;
    N* to = memory<N>(field, count * width, place * width);
    if (!is_read) return;
    const N* from = reinterpret_cast<const N*>(a[field]) + source * width;
    for (i64 i = 0; i < count; ++i) {
      if (rows[i] < 0)
        std::memset(to + i * width, 0, size_t(width) * sizeof(N));
      else
        std::memcpy(to + i * width, from + rows[i] * width, size_t(width) * sizeof(N));
    }
  }

  // Copy rows back to those of a head, which begin at `target`.
  template <class N>
  void put(F::Field field, const i64* rows, i64 count, i64 width, i64 target, i64 place) const {
    if (a[field] == 0) return;
    const N* from = seen<N>(field, place * width);
    N* to = reinterpret_cast<N*>(a[field]) + target * width;
    for (i64 i = 0; i < count; ++i)
      if (rows[i] >= 0) std::memcpy(to + rows[i] * width, from + i * width, size_t(width) * sizeof(N));
  }

  // Call `body` with every array that has rows of queries and holds numbers of this type.
  template <class Body>
  void over_queries(Body body) const {
    const i64 C = a[F::C], V = a[F::V];
    const bool back = is_backward();
    const Array arrays[] = {
        {F::query, C, true, false}, {F::query_small, C, true, false}, {F::query_raw, C, true, false},
        {F::factor, 1, true, false}, {F::sink, 1, true, false}, {F::output, V, back, !back}, {F::peak, 1, back, !back},
        {F::total, 1, back, !back}, {F::top, 1, false, true}, {F::entropy, 1, false, true},
        {F::best, a[F::K], true, true}, {F::grad, V, true, false}, {F::d_query, C, true, true}};
    for (const Array& each : arrays) body(each);
  }

  void take_queries() {
    const i64 place = head * a[F::L] + row, source = head % a[F::H] * a[F::all_queries];
    over_queries([&](const Array& each) {
      take<T>(each.field, query_rows(), queries(), each.width, source, place, each.is_read);
    });
    take<uint8_t>(F::query_class, query_rows(), queries(), 1, source, place, true);
    take<i64>(F::best_key, query_rows(), queries(), a[F::K], source, place, true);
  }

  void put_queries(i64 h) {
    const i64 place = head * a[F::L] + row, target = h * a[F::all_queries], K = a[F::K];
    over_queries([&](const Array& each) {
      if (each.is_written) put<T>(each.field, query_rows(), queries(), each.width, target, place);
    });
    if (a[F::best_key] == 0) return;
    i64* keys = seen<i64>(F::best_key, place * K);
    for (i64 i = 0; i < queries() * K; ++i) keys[i] = keys[i] < 0 ? -1 : key_rows()[keys[i]];
    put<i64>(F::best_key, query_rows(), queries(), K, target, place);
  }

  // Of arrays (C, S) the columns of the keys; those of no key are 0.
  void take_lanes(F::Field field) {
    if (a[field] == 0) return;
    const i64 C = a[F::C], S = a[F::S], all = a[F::all_keys], *rows = key_rows();
    T* to = memory<T>(field, C * S, kv * C * S);
    const T* from = a.array(field) + kv % a[F::G] * C * all;
    for (i64 c = 0; c < C; ++c)
      for (i64 j = 0; j < S; ++j) to[c * S + j] = rows[j] < 0 ? T(0) : from[c * all + rows[j]];
  }

  // Memory for sums of a sequence's keys, which begin at 0.
  void begin_sums(F::Field field, i64 width, i64 place) {
    if (a[field] != 0) fill(memory<T>(field, a[F::S] * width, place), a[F::S] * width, T(0));
  }

  // Add sums (S, width), or (width, S) as `lanes`, to those of one head.
  void add_sums(F::Field field, i64 width, i64 place, i64 target, bool lanes) const {
    if (a[field] == 0) return;
    const i64 S = a[F::S], all = a[F::all_keys], *rows = key_rows();
    const T* from = seen<T>(field, place);
    T* to = a.array(field) + target * all * width;
    if (lanes) {
      for (i64 c = 0; c < width; ++c)
        for (i64 j = 0; j < S; ++j)
          if (rows[j] >= 0) to[c * all + rows[j]] += from[c * S + j];
      return;
    }
    for (i64 j = 0; j < S; ++j)
      if (rows[j] >= 0) {
        T* sum = to + rows[j] * width;
        over<T>(0, width, [&](i64 c, auto x) {
          using X = decltype(x);
          store(sum + c, load<X>(sum + c) + load<X>(from + j * width + c));
        });
      }
  }

  void take_keys() {
    const i64 S = a[F::S], source = kv % a[F::G] * a[F::all_keys], place = kv * S;
    take_lanes(F::key);
    take_lanes(F::key_small);
    take<uint8_t>(F::key_class, key_rows(), S, 1, source, place, true);
    take<T>(F::key_raw, key_rows(), S, a[F::C], source, place, true);
    take<T>(F::value, key_rows(), S, a[F::V], source, place, true);
    begin_sums(F::d_key, a[F::C], 0);
    begin_sums(F::d_value, a[F::V], 0);
  }

  // Add the gradients of the sequence's keys and values to those of its head.
  template <class Family>
  void put_keys() const {
    if (kv < 0) return;
    const i64 target = kv % a[F::G] * a[F::kv_h] - a[F::kv_first];
    add_sums(F::d_key, a[F::C], 0, target, !Family::linear);
    add_sums(F::d_value, a[F::V], 0, target, false);
  }
};

template <class Family, class T>
void gathered_forward(const Arguments<T>& a) {
  if (a[F::query_rows] == 0) return forward<Family>(a);
  Gathered<T>(a).template run<Family>([](const Arguments<T>& own) { forward<Family>(own); });
}

template <class Family, class T>
void gathered_backward(const Arguments<T>& a) {
  if (a[F::query_rows] == 0) return backward<Family>(a);
  Gathered<T>(a).template run<Family>([](const Arguments<T>& own) { backward<Family>(own); });
}

}  // namespace
