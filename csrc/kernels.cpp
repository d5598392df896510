// The kernels of engine `fused` for one kind of processor, which REGARD_PROCESSOR names. Compiled once for each.

#include "additive.h"
#include "backward.h"
#include "decoding.h"
#include "dot.h"
#include "gathered.h"
#include "layers.h"
#include "lines.h"
#include "panels.h"
#include "radial.h"
#include "recurrence.h"
#include "rows.h"
#include "selected.h"
#include "threshold.h"

#define JOINED_(name, type, processor) regard_##name##_##type##_##processor
#define JOINED(name, type, processor) JOINED_(name, type, processor)
#define SYMBOL(name, type) JOINED(name, type, REGARD_PROCESSOR)
#define EXPORTED extern "C" __attribute__((visibility("default"))) void

// A kernel takes the numbers of its arguments, and three reals.
#define KERNEL(name, type, real, function)                                                      \
  EXPORTED SYMBOL(name, type)(const int64_t* numbers, const real* x) {                          \
    function(Arguments<real>{numbers, x[0], x[1], x[2]});                                       \
  }

#define KERNELS(type, real)                                              \
  KERNEL(dot_forward, type, real, gathered_forward<Dot>)                 \
  KERNEL(dot_backward, type, real, gathered_backward<Dot>)               \
  KERNEL(radial_forward, type, real, gathered_forward<Radial>)           \
  KERNEL(radial_backward, type, real, gathered_backward<Radial>)         \
  KERNEL(additive_prepare, type, real, prepare)                          \
  KERNEL(additive_forward, type, real, gathered_forward<Additive>)       \
  KERNEL(additive_backward, type, real, gathered_backward<Additive>)     \
  EXPORTED SYMBOL(decoding_read_rows, type)(                             \
      const real* q, int64_t q_row, const real* k, const real* v, int64_t kv_row, const int64_t* which,          \
      const int64_t* table, int64_t table_row, const int64_t* counts, int64_t first, int64_t last, int64_t H,    \
      int64_t G, int64_t D, real scale, real* out, int64_t out_row, real* s) {                                   \
    read_rows(                                                                                                   \
        q, q_row, k, v, kv_row, which, table, table_row, counts, table_row, first, last, H, G, D, scale, out,     \
        out_row, s);                                                                                             \
  }                                                                                                              \
  EXPORTED SYMBOL(decoding_log_sums, type)(                                                                      \
      real* x, int64_t x_row, int64_t first, int64_t last, int64_t N, int64_t run, const int64_t* hidden,        \
      int64_t hidden_count, real* total, real* maxima) {                                                         \
    log_sums(x, x_row, first, last, N, run, hidden, hidden_count, total, maxima);                                \
  }                                                                                                              \
  EXPORTED SYMBOL(decoding_largest_sums, type)(                                                                  \
      const real* x, const real* offset, const real* maxima, int64_t first, int64_t last, int64_t K, int64_t N,  \
      int64_t run, int64_t count, real* found, int64_t* parents, int64_t* symbols, int64_t mark,                 \
      int64_t* marked) {                                                                                         \
    largest_sums(x, offset, maxima, first, last, K, N, run, count, found, parents, symbols, mark, marked);       \
  }                                                                                                              \
  EXPORTED SYMBOL(panels_product, type)(                                                                         \
      const void* weights, const real* scales, const real* bias, int64_t N, int64_t E, const real* x,            \
      int64_t x_row, int64_t R, real* y, int64_t first, int64_t last, real* room) {                              \
    products<Then::STORE>(Panels<real>{weights, scales, bias, N, E}, x, x_row, R, y, N, first, last, room);      \
  }                                                                                                              \
  EXPORTED SYMBOL(layers_forward, type)(                                                                         \
      const int64_t* numbers, real epsilon, real* x, int64_t first, int64_t last, int64_t seen, real* scratch) { \
    layers(numbers, epsilon, x, first, last, seen, scratch);                                                     \
  }                                                                                                              \
  EXPORTED SYMBOL(recurrence_forward, type)(                                                                     \
      const int64_t* numbers, real scale, int64_t first, int64_t last, real* memory) {                           \
    recur(*reinterpret_cast<const Recurrence*>(numbers), scale, first, last, memory);                            \
  }                                                                                                              \
  EXPORTED SYMBOL(recurrence_step, type)(                                                                        \
      const int64_t* numbers, real scale, int64_t first, int64_t last, real* memory) {                           \
    step(*reinterpret_cast<const Recurrence*>(numbers), scale, first, last, memory);                             \
  }                                                                                                              \
  EXPORTED SYMBOL(recurrence_backward, type)(                                                                    \
      const int64_t* numbers, real scale, int64_t first, int64_t last, real* memory) {                           \
    recur_back(*reinterpret_cast<const Recurrence*>(numbers), scale, first, last, memory);                       \
  }                                                                                                              \
  EXPORTED SYMBOL(lines_sizes, type)(int64_t C, int64_t V, int64_t S, int64_t* sizes) {                          \
    line_sizes<real>(C, V, S, sizes);                                                                            \
  }                                                                                                              \
  EXPORTED SYMBOL(lines_forward, type)(                                                                          \
      const int64_t* numbers, real scale, real ridge, int64_t first, int64_t last, real* memory) {               \
    lines_forward(numbers, scale, ridge, first, last, memory);                                                   \
  }                                                                                                              \
  EXPORTED SYMBOL(lines_backward, type)(                                                                         \
      const int64_t* numbers, real scale, real ridge, int64_t first, int64_t last, int64_t shares,               \
      const real* grad, real* d_query, real* d_place, real* d_key, real* d_value, real* memory) {                \
    lines_backward(                                                                                              \
        numbers, scale, ridge, first, last, shares, grad, d_query, d_place, d_key, d_value, memory);             \
  }                                                                                                              \
  EXPORTED SYMBOL(selected_mark, type)(                                                                          \
      uint64_t* bits, const int64_t* sizes, int64_t first, int64_t last, const int32_t* lists) {                 \
    mark(Selection<real>::of(nullptr, nullptr, nullptr, bits, sizes, 0), first, last, lists);                    \
  }                                                                                                              \
  EXPORTED SYMBOL(selected_forward, type)(                                                                       \
      const real* q, const real* k, const real* v, uint64_t* bits, const int64_t* sizes, real scale,             \
      int64_t first, int64_t last, real* output, real* peaks, real* totals, void* memory) {                      \
    select_forward(Selection<real>::of(q, k, v, bits, sizes, scale), first, last, output, peaks, totals, memory);\
  }                                                                                                              \
  EXPORTED SYMBOL(selected_backward, type)(                                                                      \
      const real* q, const real* k, const real* v, uint64_t* bits, const int64_t* sizes, real scale,             \
      int64_t first, int64_t last, int64_t shares, int64_t fresh, const real* grad, const real* lse,             \
      const real* delta, real* d_query, real* d_key, real* d_value, void* memory) {                              \
    select_backward(                                                                                             \
        Selection<real>::of(q, k, v, bits, sizes, scale), first, last, shares, fresh != 0, grad, lse, delta,     \
        d_query, d_key, d_value, memory);                                                                        \
  }

KERNELS(float32, float)
KERNELS(float64, double)

// Keys and values of 16 bits; everything else is of float32.
KERNEL(rows_forward, float32, float, online_forward<Rows<float>>)
KERNEL(rows_forward, float64, double, online_forward<Rows<double>>)
KERNEL(rows_forward, bfloat16, float, online_forward<Rows<Bfloat16>>)
KERNEL(rows_forward, float16, float, online_forward<Rows<Float16>>)
