// A gated recurrence: a state of K × V numbers per head that decays, is written to and is read at every step.
//
//   S_t = diag(d_t) S_{t-1} + k_tᵀ u_t,  u_t = β_t (v_t − [delta] e_t diag(d_t) S_{t-1}),  y_t = scale · q_t S_t
//
// The readers e_t are the keys k_t unless others are given. All steps of a chunk are handled at once. In a chunk that starts with S, with b_i the product of the decays d_1 … d_i
// and b_ij that of d_{j+1} … d_i:
//
//   y_i = (q_i b_i) S + Σ_{j≤i} P_ij u_j                    P_ij = q_i b_ij k_j
//   u_i = β_i r_i,  r_i = v_i − (e_i b_i) S − Σ_{j<i} M_ij u_j    M_ij = e_i b_ij k_j
//   S'  = diag(b_C) S + Σ_j (k_j b_Cj)ᵀ u_j
//
// Decays are products of numbers up to 1, so that none overflows. A chunk is short: its products with the state cost the
// same for any length, and all others less.
#pragma once

#include <type_traits>

#include "linear.h"
#include "records.h"

namespace {

static_assert(SPAN == PAD, "the steps of a chunk are a row of lanes");

// Rows of an array: its address, and how far sequences, heads and steps lie apart. The numbers of a row are adjacent.
struct Rows4 {
  i64 at, b, h, l;

  template <class T>
  INLINE T* row(i64 i, i64 j, i64 k) const {
    return reinterpret_cast<T*>(at) + i * b + j * h + k * l;
  }
};

enum Decay : i64 { NO_DECAY, OF_HEAD, OF_CHANNEL };

// The numbers of a call; an address of 0 is none. Heads of queries are G or H; `parts` is into how many work items the
// heads of a group are divided in the backward pass, each with gradients of queries, keys and readers of its own, so far
// apart as `query_part` and `key_part` say.
struct Recurrence {
#define ROWS_MEMBER(name) Rows4 name;
  RECURRENCE_FIELDS(NUMBER_MEMBER, ROWS_MEMBER)
#undef ROWS_MEMBER

  INLINE i64 chunks() const { return parts_of(L); }
  INLINE static i64 parts_of(i64 length) { return (length + SPAN - 1) / SPAN; }
  template <class T>
  INLINE T* state(i64 address, i64 b, i64 h) const {
    return address ? reinterpret_cast<T*>(address) + (b * H + h) * K * V : nullptr;
  }
  template <class T>
  INLINE T* residuals(i64 b, i64 h, i64 l) const {
    return reinterpret_cast<T*>(residual) + ((b * H + h) * L + l) * V;
  }
  template <class T>
  INLINE T* saved_state(i64 b, i64 h, i64 chunk) const {
    return reinterpret_cast<T*>(saved) + ((b * H + h) * parts_of_saved() + chunk / saved_every) * K * V;
  }
  INLINE i64 parts_of_saved() const { return (chunks() + saved_every - 1) / saved_every; }
};

// Products ---------------------------------------------------------------------------------------------------------------

// What a product is written to: nothing, or a sum with rows, or with rows times factors.
enum class Into { SET, ADD, KEEP };

template <Into into, class T, int M, int N>
INLINE void strip(
    T* y, i64 y_row, const T* old, const T* keep, const T* x, i64 x_row, const T* c, i64 c_row, i64 c_col, i64 steps) {
  Vector<T> sums[M][N] = {};
  const T* factors[M];
  UNROLLED
  for (int m = 0; m < M; ++m) factors[m] = c + m * c_row;
  for (i64 t = 0; t < steps; ++t, x += x_row) {
    Vector<T> values[N];
    UNROLLED
    for (int n = 0; n < N; ++n) values[n] = load<Vector<T>>(x + n * WIDTH<T>);
    UNROLLED
    for (int m = 0; m < M; ++m) {
      const T factor = *factors[m];
      factors[m] += c_col;
      UNROLLED
      for (int n = 0; n < N; ++n) sums[m][n] += factor * values[n];
    }
  }
  UNROLLED
  for (int m = 0; m < M; ++m)
    UNROLLED
    for (int n = 0; n < N; ++n) {
      const i64 place = m * y_row + n * WIDTH<T>;
      if constexpr (into == Into::SET) store(y + place, sums[m][n]);
      if constexpr (into == Into::ADD) store(y + place, load<Vector<T>>(old + place) + sums[m][n]);
      if constexpr (into == Into::KEEP) store(y + place, keep[m] * load<Vector<T>>(old + place) + sums[m][n]);
    }
}

template <Into into, class T, int M, int N>
OUTLINE void strips(
    T* y, i64 y_row, const T* old, const T* keep, const T* x, i64 x_row, const T* c, i64 c_row, i64 c_col, i64 rows,
    i64 steps) {
  for (i64 m = 0; m < rows; m += M)
    strip<into, T, M, N>(
        y + m * y_row, y_row, old + m * y_row, into == Into::KEEP ? keep + m : keep, x, x_row, c + m * c_row, c_row,
        c_col, steps);
}

// Set rows y_m, m < `rows`, to Σ_n c[m, n] x_n over `steps` n; c[m, n] is c[m·c_row + n·c_col]. Or to that and old_m, or
// keep[m] · old_m, which are y_m unless others are given. Rows are a multiple of 8, and lanes a multiple of PAD.
template <Into into, class T>
void multiply(
    T* y, i64 y_row, const T* keep, const T* x, i64 x_row, const T* c, i64 c_row, i64 c_col, i64 rows, i64 steps,
    i64 lanes, const T* old = nullptr) {
  if (!old) old = y;
  if (steps > PARTIAL) {  // partial sums keep the error of a long sum small
    multiply<into>(y, y_row, keep, x, x_row, c, c_row, c_col, rows, PARTIAL, lanes, old);
    multiply<Into::ADD>(
        y, y_row, keep, x + PARTIAL * x_row, x_row, c + PARTIAL * c_col, c_row, c_col, rows, steps - PARTIAL, lanes);
    return;
  }
  for (i64 j = 0; j < lanes;) {
    const i64 left = (lanes - j) / WIDTH<T>;
    if (left >= WIDE) {
      strips<into, T, 4, WIDE>(y + j, y_row, old + j, keep, x + j, x_row, c, c_row, c_col, rows, steps);
      j += WIDE * WIDTH<T>;
    } else if (left >= 2) {
      strips<into, T, 4, 2>(y + j, y_row, old + j, keep, x + j, x_row, c, c_row, c_col, rows, steps);
      j += 2 * WIDTH<T>;
    } else {
      strips<into, T, 8, 1>(y + j, y_row, old + j, keep, x + j, x_row, c, c_row, c_col, rows, steps);
      j += WIDTH<T>;
    }
  }
}

// Multiply each of so many rows by its factor.
template <class T>
INLINE void multiply_rows(T* x, const T* factors, i64 rows, i64 lanes) {
  for (i64 i = 0; i < rows; ++i) {
    const T factor = factors[i];
    over_lanes<T>(lanes, [&](i64 j) { store(x + i * lanes + j, factor * load<Vector<T>>(x + i * lanes + j)); });
  }
}

// Write `count` rows of `width` numbers, times a factor; up to SPAN rows and `lanes` numbers, the rest is 0.
template <class T>
OUTLINE void gather(const T* source, i64 step, i64 count, i64 width, i64 lanes, T factor, T* target) {
  for (i64 i = 0; i < SPAN; ++i, source += step, target += lanes) {
    const i64 filled = i < count ? width : 0;
    over<T>(0, filled, [&](i64 j, auto like) { store(target + j, factor * load<decltype(like)>(source + j)); });
    fill(target + filled, lanes - filled, T(0));
  }
}

// Write `count` rows of `width` numbers of an array of rows of `lanes`, times a factor, or add them.
template <class T>
OUTLINE void scatter(const T* source, i64 lanes, i64 count, i64 width, T factor, bool add, T* target, i64 step) {
  for (i64 i = 0; i < count; ++i, source += lanes, target += step)
    over<T>(0, width, [&](i64 j, auto like) {
      using X = decltype(like);
      X x = factor * load<X>(source + j);
      if (add) x += load<X>(target + j);
      store(target + j, x);
    });
}

// Chunks -----------------------------------------------------------------------------------------------------------------

// Scratch memory, from which arrays are taken one after another.
template <class T>
struct Scratch {
  T* next;

  T* take(i64 count) {
    T* taken = next;
    next += count;
    return taken;
  }
};

// The arrays of a chunk: 2 · SPAN rows are those of queries and then those of readers.
//
// Heads with the same keys and queries are handled together, chunk by chunk: rows and their products are the same for
// all of them. Decays of a head multiply rows of V numbers, which are fewer; those of channels, rows of K numbers.
template <class T>
struct Chunk {
  const Recurrence& a;
  T scale;
  i64 k, v;       // lanes of rows of K and of V numbers
  T* rows;        // 2 · SPAN × k: scale · q_i, e_i
  T* keys;        // SPAN × k: k_j
  T* products;    // 2 · SPAN × SPAN: scale · q_i k_j, e_i k_j
  T* near;        // 2 · SPAN × k: q_i b_i, e_i b_i of channels
  T* far;         // SPAN × k: k_j b_Cj of channels
  T* ahead;       // SPAN × k: b_i of channels
  T* tail;        // SPAN × k: b_Cj of channels
  T* alpha;       // SPAN × k: d_i of channels
  T* end;         // the larger of k and v: b_C
  T* columns;     // k × SPAN: keys
  T* scores;      // 2 · SPAN × SPAN: P, M
  T* between;     // SPAN × SPAN: b_ij of a head, 0 for j > i
  T* beta;        // SPAN
  T* gates;       // SPAN: d_i of a head
  T* before;      // 2 · SPAN: b_i of a head, twice
  T* after;       // SPAN: b_Cj of a head
  T* first_rows;
  i64 count = 0;  // steps
  bool growing = false, out_of_range = false;

  // With memory for the rows of so many chunks.
  Chunk(const Recurrence& call, T factor, Scratch<T>& scratch, i64 chunks)
      : a(call), scale(factor), k(padded(call.K)), v(padded(call.V)) {
    first_rows = scratch.take(chunks * size_of_rows());
    move_to(0);
    near = scratch.take(2 * SPAN * k);
    far = scratch.take(SPAN * k);
    ahead = scratch.take(SPAN * k);
    tail = scratch.take(SPAN * k);
    alpha = scratch.take(SPAN * k);
    end = scratch.take(most(k, v));
    columns = scratch.take(k * SPAN);
    scores = scratch.take(2 * SPAN * SPAN);
    between = scratch.take(SPAN * SPAN);
    beta = scratch.take(SPAN);
    gates = scratch.take(SPAN);
    before = scratch.take(2 * SPAN);
    after = scratch.take(SPAN);
    fill(end, most(k, v), T(1));
    fill(gates, SPAN, T(1));
    fill(before, 2 * SPAN, T(1));
    fill(after, SPAN, T(1));
  }

  INLINE i64 size_of_rows() const { return (a.reader.at ? 3 : 2) * SPAN * k + (a.delta ? 2 : 1) * SPAN * SPAN; }
  INLINE i64 both() const { return a.delta ? 2 * SPAN : SPAN; }
  INLINE bool channels() const { return a.kind == OF_CHANNEL; }
  // Rows that read the state before the chunk, and keys that write to that after it.
  INLINE const T* reading() const { return channels() ? near : rows; }
  INLINE const T* writing() const { return channels() ? far : keys; }

  // Use the memory of another chunk's rows.
  void move_to(i64 place) {
    rows = first_rows + place * size_of_rows();
    keys = a.reader.at ? rows + 2 * SPAN * k : rows + SPAN * k;
    products = keys + SPAN * k;
  }

  // Read the rows of a chunk that begins with step l, unless they are there: those of an earlier head.
  void read(i64 b, i64 h, i64 l, bool are_there) {
    count = least(SPAN, a.L - l);
    const i64 g = h / (a.H / a.G), q = a.query_heads == a.H ? h : g;
    if (!are_there) {
      gather<T>(a.query.template row<T>(b, q, l), a.query.l, count, a.K, k, scale, rows);
      gather<T>(a.key.template row<T>(b, g, l), a.key.l, count, a.K, k, T(1), keys);
      if (a.reader.at) gather<T>(a.reader.template row<T>(b, g, l), a.reader.l, count, a.K, k, T(1), rows + SPAN * k);
    }
    fill(beta, SPAN, T(0));
    for (i64 i = 0; i < count; ++i) {
      beta[i] = a.rate.at ? *a.rate.template row<T>(b, h, l + i) : T(1);
      out_of_range |= beta[i] < T(0) || beta[i] > T(2);
    }
    if (a.kind == OF_HEAD) read_gates(b, h, l);
    if (!channels()) return;
    read_channel_gates(b, h, l);
    for (i64 i = 0; i < both(); ++i) {
      const T *x = rows + i * k, *factor = ahead + i % SPAN * k;
      T* y = near + i * k;
      over_lanes<T>(k, [&](i64 j) { store(y + j, load<Vector<T>>(x + j) * load<Vector<T>>(factor + j)); });
    }
    over_lanes<T>(SPAN * k, [&](i64 j) { store(far + j, load<Vector<T>>(keys + j) * load<Vector<T>>(tail + j)); });
  }

  void read_gates(i64 b, i64 h, i64 l) {
    fill(gates, SPAN, T(0));
    T sum = 0;
    for (i64 i = 0; i < count; ++i) {
      gates[i] = *a.decay.template row<T>(b, h, l + i);
      sum += gates[i];
      growing |= gates[i] > T(0);
    }
    over_lanes<T>(SPAN, [&](i64 j) { store(gates + j, exponential(load<Vector<T>>(gates + j))); });
    T ahead_of = 1, behind = 1;
    for (i64 i = 0; i < SPAN; ++i) {
      ahead_of *= gates[i];
      before[i] = before[SPAN + i] = ahead_of;
    }
    for (i64 i = SPAN - 1; i >= 0; --i) {
      after[i] = behind;
      behind *= gates[i];
    }
    fill(end, most(k, v), exponential(sum));
  }

  void read_channel_gates(i64 b, i64 h, i64 l) {
    using X = Vector<T>;
    gather<T>(a.decay.template row<T>(b, h, l), a.decay.l, count, a.K, k, T(1), alpha);
    over_lanes<T>(k, [&](i64 j) {
      X sum{}, peak{}, before = wide<X>(T(1)), after = before;
      for (i64 i = 0; i < SPAN; ++i) {
        T* place = alpha + i * k + j;
        const X gate = load<X>(place), factor = exponential(gate);
        sum += gate;
        peak = larger(gate, peak);
        store(place, factor);
        before *= factor;
        store(ahead + i * k + j, before);
      }
      for (i64 i = SPAN - 1; i >= 0; --i) {
        store(tail + i * k + j, after);
        after *= load<X>(alpha + i * k + j);
      }
      store(end + j, exponential(sum));
      growing |= over_lanes_combined<T>(peak, [](auto x, auto y) { return larger(x, y); }) > T(0);
    });
  }

  // Write P, and M for the delta rule; unless they are there, the products of rows too.
  void compare(bool are_there) {
    if (!are_there) transpose(keys, k, SPAN, k, columns, SPAN, SPAN);
    if (channels()) {
      if (a.delta)
        compare_channels<true>();
      else
        compare_channels<false>();
      return;
    }
    if (!are_there) multiply<Into::SET, T>(products, SPAN, nullptr, columns, SPAN, rows, k, 1, both(), a.K, SPAN);
    using X = Vector<T>;
    for (i64 j = 0; j < SPAN; j += WIDTH<T>) {
      const X lanes = lane_numbers<T>(j);
      X decay{};
      for (i64 i = 0; i < SPAN; ++i) {
        decay *= gates[i];
        decay = lanes == T(i) ? wide<X>(T(1)) : decay;
        store(between + i * SPAN + j, decay);
      }
    }
    for (i64 i = 0; i < both(); ++i)
      over_lanes<T>(SPAN, [&](i64 j) {
        const X factor = load<X>(between + i % SPAN * SPAN + j), x = load<X>(products + i * SPAN + j);
        store(scores + i * SPAN + j, factor == T(0) ? X{} : factor * x);
      });
    if (a.delta) clear_diagonal(scores);
  }

  void clear_diagonal(T* matrices) {
    for (i64 i = 0; i < SPAN; ++i) matrices[(SPAN + i) * SPAN + i] = T(0);
  }

  // The columns decay from row to row; those behind a row's own are left as they are.
  template <bool overlaps>
  OUTLINE void compare_channels() {
    using X = Vector<T>;
    constexpr int N = SPAN / WIDTH<T>, TOGETHER = N < 4 ? 4 / N : 1;  // rows whose sums fit in registers
    const i64 K = a.K, row = k;
    const T *queries = rows, *readers = rows + SPAN * k, *factors = alpha;
    X lanes[N];
    UNROLLED
    for (int n = 0; n < N; ++n) lanes[n] = lane_numbers<T>(n * WIDTH<T>);
    for (i64 i = 0; i < SPAN; i += TOGETHER, queries += TOGETHER * k, readers += TOGETHER * k, factors += TOGETHER * k) {
      X p[TOGETHER][N] = {}, m[TOGETHER][N] = {};
      T* column = columns;
      for (i64 c = 0; c < K; ++c, column += SPAN) {
        UNROLLED
        for (int n = 0; n < N; ++n) {
          X x = load<X>(column + n * WIDTH<T>);
          UNROLLED
          for (int t = 0; t < TOGETHER; ++t) {
            x = lanes[n] < T(i + t) ? x * factors[t * row + c] : x;
            p[t][n] += queries[t * row + c] * x;
            if constexpr (overlaps) m[t][n] += readers[t * row + c] * x;
          }
          store(column + n * WIDTH<T>, x);
        }
      }
      UNROLLED
      for (int t = 0; t < TOGETHER; ++t)
        UNROLLED
        for (int n = 0; n < N; ++n) {
          store(scores + (i + t) * SPAN + n * WIDTH<T>, lanes[n] <= T(i + t) ? p[t][n] : X{});
          if constexpr (overlaps)
            store(scores + (SPAN + i + t) * SPAN + n * WIDTH<T>, lanes[n] < T(i + t) ? m[t][n] : X{});
        }
    }
  }

  // Report decays and rates that are out of range.
  void report() const {
    int64_t* wrong = reinterpret_cast<int64_t*>(a.wrong);
    if (growing) __atomic_store_n(wrong, 1, __ATOMIC_RELAXED);
    if (out_of_range) __atomic_store_n(wrong + 1, 1, __ATOMIC_RELAXED);
  }
};

// The forward pass -------------------------------------------------------------------------------------------------------

// Subtract from each row r_i what the rows before it wrote, Σ_{j<i} M_ij u_j, and write u_i = β_i r_i.
template <class T>
OUTLINE void substitute(const T* m, const T* beta, i64 lanes, T* r, T* u) {
  using X = Vector<T>;
  const auto run = [&](i64 j, auto size) {
    constexpr int N = decltype(size)::value;
    for (i64 i = 0; i < SPAN; ++i) {
      X sums[N];
      UNROLLED
      for (int n = 0; n < N; ++n) sums[n] = load<X>(r + i * lanes + j + n * WIDTH<T>);
      for (i64 t = 0; t < i; ++t) {
        const T factor = m[i * SPAN + t];
        UNROLLED
        for (int n = 0; n < N; ++n) sums[n] -= factor * load<X>(u + t * lanes + j + n * WIDTH<T>);
      }
      const T rate = beta[i];
      UNROLLED
      for (int n = 0; n < N; ++n) {
        store(r + i * lanes + j + n * WIDTH<T>, sums[n]);
        store(u + i * lanes + j + n * WIDTH<T>, rate * sums[n]);
      }
    }
  };
  i64 j = 0;
  for (; j + 4 * WIDTH<T> <= lanes; j += 4 * WIDTH<T>) run(j, std::integral_constant<int, 4>());
  for (; j < lanes; j += WIDTH<T>) run(j, std::integral_constant<int, 1>());
}

// The same from the last row to the first, for −h_i = −β_i g_i, where g_i is what comes in plus Σ_{l>i} M_li (−h_l).
template <class T>
OUTLINE void substitute_back(const T* m, const T* beta, i64 lanes, T* g, T* h) {
  using X = Vector<T>;
  const auto run = [&](i64 j, auto size) {
    constexpr int N = decltype(size)::value;
    for (i64 i = SPAN - 1; i >= 0; --i) {
      X sums[N];
      UNROLLED
      for (int n = 0; n < N; ++n) sums[n] = load<X>(g + i * lanes + j + n * WIDTH<T>);
      for (i64 t = SPAN - 1; m && t > i; --t) {
        const T factor = m[t * SPAN + i];
        UNROLLED
        for (int n = 0; n < N; ++n) sums[n] += factor * load<X>(h + t * lanes + j + n * WIDTH<T>);
      }
      const T rate = -beta[i];
      UNROLLED
      for (int n = 0; n < N; ++n) {
        store(g + i * lanes + j + n * WIDTH<T>, sums[n]);
        store(h + i * lanes + j + n * WIDTH<T>, rate * sums[n]);
      }
    }
  };
  i64 j = 0;
  for (; j + 4 * WIDTH<T> <= lanes; j += 4 * WIDTH<T>) run(j, std::integral_constant<int, 4>());
  for (; j < lanes; j += WIDTH<T>) run(j, std::integral_constant<int, 1>());
}

// Copy a state (K, V) to rows of scratch memory, of k × v numbers, or zeros if there is none.
template <class T>
void load_state(const T* source, i64 K, i64 V, i64 k, i64 v, T* s) {
  fill(s, k * v, T(0));
  if (source) scatter(source, V, K, V, T(1), false, s, v);
}

// The end of the heads from h on that are handled together: at most `last` is.
INLINE i64 end_of_heads(const Recurrence& a, i64 h, i64 last) {
  const i64 R = a.H / a.G;
  return least(least(last, h + a.together), (h / R + 1) * R);
}

// Write the outputs and the states after the last step; a work item is a head of a sequence.
template <class T>
void recur(const Recurrence& a, T scale, i64 first, i64 last, T* memory) {
  Scratch<T> scratch{memory};
  Chunk<T> chunk(a, scale, scratch, 1);
  const i64 k = chunk.k, v = chunk.v, V = a.V, K = a.K;
  T *states = scratch.take(a.together * k * v), *turned = scratch.take(k * v);
  T *out = scratch.take(2 * SPAN * v), *r = scratch.take(SPAN * v), *u = scratch.take(SPAN * v);
  for (i64 item = first, end; item < last; item = end) {
    const i64 b = item / a.H, from = item % a.H, to = end_of_heads(a, from, from + last - item);
    end = item + to - from;
    for (i64 h = from; h < to; ++h)
      load_state(a.template state<const T>(a.start, b, h), K, V, k, v, states + (h - from) * k * v);
    for (i64 c = 0; c < a.chunks(); ++c)
      for (i64 h = from; h < to; ++h) {
        const i64 l = c * SPAN;
        T* s = states + (h - from) * k * v;
        if (a.saved && c % a.saved_every == 0) {
          transpose(s, v, k, v, turned, k, k);
          scatter(turned, k, V, K, T(1), false, a.template saved_state<T>(b, h, c), K);
        }
        chunk.read(b, h, l, h > from);
        chunk.compare(h > from);
        multiply<Into::SET, T>(out, v, nullptr, s, v, chunk.reading(), k, 1, chunk.both(), k, v);
        if (!chunk.channels()) multiply_rows(out, chunk.before, chunk.both(), v);
        gather<T>(a.value.template row<T>(b, h, l), a.value.l, chunk.count, V, v, T(1), r);
        if (a.delta) {
          const T* seen = out + SPAN * v;
          over_lanes<T>(SPAN * v, [&](i64 j) { store(r + j, load<Vector<T>>(r + j) - load<Vector<T>>(seen + j)); });
          substitute(chunk.scores + SPAN * SPAN, chunk.beta, v, r, u);
          if (a.residual) scatter(r, v, chunk.count, V, T(1), false, a.template residuals<T>(b, h, l), V);
        } else {
          copy(r, u, SPAN * v);
          multiply_rows(u, chunk.beta, SPAN, v);
        }
        multiply<Into::ADD, T>(out, v, nullptr, u, v, chunk.scores, SPAN, 1, SPAN, SPAN, v);
        if (!chunk.channels()) multiply_rows(u, chunk.after, SPAN, v);
        multiply<Into::KEEP, T>(s, v, chunk.end, u, v, chunk.writing(), 1, k, k, SPAN, v);
        scatter(out, v, chunk.count, V, T(1), false, a.output.template row<T>(b, h, l), a.output.l);
      }
    if (!a.end) continue;
    for (i64 h = from; h < to; ++h)
      scatter(states + (h - from) * k * v, v, K, V, T(1), false, a.template state<T>(a.end, b, h), V);
  }
  chunk.report();
}

// Write Σ_c x_c S_c for two rows x, over the rows of a state (K, V).
template <class T>
OUTLINE void read_twice(const T* s, const T* x, const T* y, i64 K, i64 V, T* x_read, T* y_read) {
  using X = Vector<T>;
  constexpr int N = 4;
  i64 j = 0;
  for (; j + N * WIDTH<T> <= V; j += N * WIDTH<T>) {
    X first[N] = {}, second[N] = {};
    const T* row = s + j;
    for (i64 c = 0; c < K; ++c, row += V)
      UNROLLED
      for (int n = 0; n < N; ++n) {
        const X value = load<X>(row + n * WIDTH<T>);
        first[n] += x[c] * value;
        second[n] += y[c] * value;
      }
    UNROLLED
    for (int n = 0; n < N; ++n) {
      store(x_read + j + n * WIDTH<T>, first[n]);
      store(y_read + j + n * WIDTH<T>, second[n]);
    }
  }
  over<T>(j, V, [&](i64 i, auto like) {
    using Y = decltype(like);
    Y first{}, second{};
    for (i64 c = 0; c < K; ++c) {
      const Y value = load<Y>(s + c * V + i);
      first += x[c] * value;
      second += y[c] * value;
    }
    store(x_read + i, first);
    store(y_read + i, second);
  });
}

// The same for few steps, one after another, from the state before to that after them, which are two arrays.
template <class T>
void step(const Recurrence& a, T scale, i64 first, i64 last, T* memory) {
  Scratch<T> scratch{memory};
  const i64 K = a.K, V = a.V;
  T *query = scratch.take(K), *reader = scratch.take(K), *decay = scratch.take(K);
  T *read = scratch.take(V), *u = scratch.take(V);
  fill(decay, K, T(1));
  bool growing = false, out_of_range = false;
  for (i64 item = first; item < last; ++item) {
    const i64 b = item / a.H, h = item % a.H, g = h / (a.H / a.G), head = a.query_heads == a.H ? h : g;
    const T* before = a.template state<const T>(a.start, b, h);
    T* after = a.template state<T>(a.end, b, h);
    if (!before) {
      fill(after, K * V, T(0));
      before = after;
    }
    for (i64 l = 0; l < a.L; ++l, before = after) {
      const T *q = a.query.template row<T>(b, head, l), *x = a.key.template row<T>(b, g, l);
      const T *v = a.value.template row<T>(b, h, l), *gate = a.decay.template row<T>(b, h, l);
      const T* e = a.reader.at ? a.reader.template row<T>(b, g, l) : x;
      if (a.kind == OF_HEAD) {
        growing |= *gate > T(0);
        fill(decay, K, exponential(*gate));
      }
      if (a.kind == OF_CHANNEL) over<T>(0, K, [&](i64 c, auto like) {
        store(decay + c, exponential(load<decltype(like)>(gate + c)));
      });
      if (a.kind == OF_CHANNEL) growing |= largest_of(gate, 0, K) > T(0);
      const T rate = a.rate.at ? *a.rate.template row<T>(b, h, l) : T(1);
      out_of_range |= rate < T(0) || rate > T(2);
      Sum<T> overlap;
      over<T>(0, K, [&](i64 c, auto like) {
        using X = decltype(like);
        const X factor = load<X>(decay + c), y = scale * load<X>(q + c);
        overlap.add(y * load<X>(x + c));
        store(query + c, y * factor);
        store(reader + c, load<X>(e + c) * factor);
      });
      read_twice(before, query, reader, K, V, read, u);
      T *output = a.output.template row<T>(b, h, l);
      const T own = overlap.total();
      const bool delta = a.delta;
      over<T>(0, V, [&](i64 j, auto like) {
        using X = decltype(like);
        const X written = rate * (delta ? load<X>(v + j) - load<X>(u + j) : load<X>(v + j));
        store(u + j, written);
        store(output + j, load<X>(read + j) + own * written);
      });
      for (i64 c = 0; c < K; ++c) {
        const T factor = decay[c], strength = x[c];
        const T* source = before + c * V;
        T* target = after + c * V;
        over<T>(0, V, [&](i64 j, auto like) {
          using X = decltype(like);
          store(target + j, factor * load<X>(source + j) + strength * load<X>(u + j));
        });
      }
    }
  }
  int64_t* wrong = reinterpret_cast<int64_t*>(a.wrong);
  if (growing) __atomic_store_n(wrong, 1, __ATOMIC_RELAXED);
  if (out_of_range) __atomic_store_n(wrong + 1, 1, __ATOMIC_RELAXED);
}

// The backward pass ------------------------------------------------------------------------------------------------------

// The gradients of a chunk's rows. With dy and −h the gradients of y and of r, and T, dT the state and the gradient of the
// one after the chunk, both transposed:
//
//   dP_ij = dy_i·u_j,  dM_ij = −h_i·u_j
//   dq_i = b_i (dy_i T) + Σ_{j≤i} dP_ij b_ij k_j
//   de_i = b_i (−h_i T) + Σ_{j<i} dM_ij b_ij k_j
//   dk_j = b_Cj (u_j dT) + Σ_{i≥j} dP_ij b_ij q_i + Σ_{i>j} dM_ij b_ij e_i
//
// Decays enter as q_i exp(c), e_i exp(c) and k_j exp(−c), c being the sum of their logarithms; so q_i dq_i + e_i de_i −
// k_j dk_j are the gradients of such sums. Where decays are of a head, dP b and dM b are summed over the heads that are
// handled together before they meet rows.
template <class T>
struct Gradients {
  Chunk<T>& chunk;
  T* near;        // 2 · SPAN × k: dq, de of a head
  T* column;      // SPAN × k: dk of a head
  T* scores;      // 2 · SPAN × SPAN: dP, dM of a head
  T* decays;      // SPAN × k
  T* steps;       // SPAN: Σ_j dP_ij P_ij − Σ_j dP_ji P_ji, and the same of M
  T* first_sums;
  T *near_sum, *column_sum, *scores_sum;  // of the heads together

  Gradients(Chunk<T>& of, Scratch<T>& scratch, i64 chunks) : chunk(of) {
    near = scratch.take(2 * SPAN * of.k);
    column = scratch.take(SPAN * of.k);
    scores = scratch.take(2 * SPAN * SPAN);
    decays = scratch.take(SPAN * of.k);
    steps = scratch.take(SPAN);
    first_sums = scratch.take(chunks * size_of_sums());
    move_to(0);
  }

  INLINE i64 size_of_sums() const { return 3 * SPAN * chunk.k + 2 * SPAN * SPAN; }

  // Use the memory of another chunk's sums.
  void move_to(i64 place) {
    near_sum = first_sums + place * size_of_sums();
    column_sum = near_sum + 2 * SPAN * chunk.k;
    scores_sum = column_sum + SPAN * chunk.k;
  }

  // Write all three of a head, and add them to the sums unless it is the first; `slopes` has dy and −h, `turned` is uᵀ,
  // and `slopes_before` and `u_after` are the former times the decays of a head.
  void pull(
      const T* slopes, const T* slopes_before, const T* u_after, const T* turned, const T* before, const T* d_after,
      bool is_first) {
    const i64 k = chunk.k, v = chunk.v, both = chunk.both();
    multiply<Into::SET, T>(scores, SPAN, nullptr, turned, SPAN, slopes, v, 1, both, v, SPAN);
    multiply<Into::SET, T>(near, k, nullptr, before, k, slopes_before, v, 1, both, v, k);
    multiply<Into::SET, T>(column, k, nullptr, d_after, k, u_after, v, 1, SPAN, v, k);
    if (chunk.channels()) {
      for (i64 i = 0; i < both; ++i) multiply_by(near + i * k, chunk.ahead + i % SPAN * k, k);
      multiply_by(column, chunk.tail, SPAN * k);
      if (chunk.a.delta)
        pull_channels<true>();
      else
        pull_channels<false>();
    } else {
      weigh();
    }
    sum(near, near_sum, both * k, is_first);
    sum(column, column_sum, SPAN * k, is_first);
    if (!chunk.channels()) sum(scores, scores_sum, both * SPAN, is_first);
  }

  INLINE static void multiply_by(T* x, const T* factor, i64 lanes) {
    over_lanes<T>(lanes, [&](i64 j) { store(x + j, load<Vector<T>>(x + j) * load<Vector<T>>(factor + j)); });
  }

  OUTLINE static void sum(const T* x, T* y, i64 lanes, bool is_first) {
    if (is_first) return copy(x, y, lanes);
    over_lanes<T>(lanes, [&](i64 j) { store(y + j, load<Vector<T>>(y + j) + load<Vector<T>>(x + j)); });
  }

  // Multiply dP and dM by the decays of a head, and write what these get from them.
  OUTLINE void weigh() {
    using X = Vector<T>;
    fill(steps, SPAN, T(0));
    T own[SPAN] = {};
    for (i64 i = 0; i < chunk.both(); ++i) {
      X row{};
      over_lanes<T>(SPAN, [&](i64 j) {
        const i64 place = i * SPAN + j;
        const X factor = load<X>(chunk.between + i % SPAN * SPAN + j), slope = load<X>(scores + place);
        const X share = factor == T(0) ? X{} : slope * load<X>(chunk.scores + place);
        row += share;
        store(steps + j, load<X>(steps + j) - share);
        store(scores + place, factor == T(0) ? X{} : factor * slope);
      });
      own[i % SPAN] += sum_of_lanes<T>(row);
    }
    over_lanes<T>(SPAN, [&](i64 j) { store(steps + j, load<X>(steps + j) + load<X>(own + j)); });
    if (chunk.a.delta) chunk.clear_diagonal(scores);
  }

  // Add to the sums what the heads have in common.
  void finish() {
    if (chunk.channels()) return;
    const i64 k = chunk.k, both = chunk.both();
    multiply<Into::ADD, T>(near_sum, k, nullptr, chunk.keys, k, scores_sum, SPAN, 1, both, SPAN, k);
    multiply<Into::ADD, T>(column_sum, k, nullptr, chunk.rows, k, scores_sum, 1, SPAN, SPAN, both, k);
  }

  // Pairs of steps with the decays between them, channels as lanes.
  template <bool overlaps>
  OUTLINE void pull_channels() {
    using X = Vector<T>;
    const i64 k = chunk.k;
    const T *queries = chunk.rows, *readers = queries + SPAN * k, *keys = chunk.keys;
    const T *d_p = scores, *d_m = scores + SPAN * SPAN;
    T *d_query = near, *d_reader = near + SPAN * k;
    const T* alpha = chunk.alpha;
    for (i64 j = 0; j < SPAN; ++j)
      over_lanes<T>(k, [&](i64 c) {
        const X key = load<X>(keys + j * k + c);
        X decay = wide<X>(T(1)), sum = load<X>(column + j * k + c);
        sum += d_p[j * SPAN + j] * load<X>(queries + j * k + c);
        store(d_query + j * k + c, load<X>(d_query + j * k + c) + d_p[j * SPAN + j] * key);
        for (i64 i = j + 1; i < SPAN; ++i) {
          decay *= load<X>(alpha + i * k + c);
          const T p = d_p[i * SPAN + j];
          const X decayed = decay * key;
          X slope = p * load<X>(queries + i * k + c);
          store(d_query + i * k + c, load<X>(d_query + i * k + c) + p * decayed);
          if constexpr (overlaps) {
            const T m = d_m[i * SPAN + j];
            slope += m * load<X>(readers + i * k + c);
            store(d_reader + i * k + c, load<X>(d_reader + i * k + c) + m * decayed);
          }
          sum += decay * slope;
        }
        store(column + j * k + c, sum);
      });
  }

  // Write the gradients of the logarithms of decays, from those of their sums; that of the whole chunk's is the sum of
  // the products of the state after it and of its gradient, both transposed.
  void pull_decays(const T* after, const T* d_after, i64 b, i64 h, i64 l) {
    using X = Vector<T>;
    const i64 k = chunk.k, K = chunk.a.K, numbers = chunk.v * k;
    const Rows4& target = chunk.a.d_decay;
    const bool delta = chunk.a.delta;
    const T* rows = chunk.rows;
    const auto slope = [&](i64 i, i64 c) {
      X x = load<X>(rows + i * k + c) * load<X>(near + i * k + c);
      x -= load<X>(chunk.keys + i * k + c) * load<X>(column + i * k + c);
      if (delta) x += load<X>(rows + (SPAN + i) * k + c) * load<X>(near + (SPAN + i) * k + c);
      return x;
    };
    if (!chunk.channels()) {
      X sums[4] = {};
      for (i64 j = 0; j < numbers; j += 4 * WIDTH<T>)  // of whole vectors, PAD · PAD at least
        UNROLLED
        for (int n = 0; n < 4; ++n) sums[n] += load<X>(after + j + n * WIDTH<T>) * load<X>(d_after + j + n * WIDTH<T>);
      T sum = sum_of_lanes<T>((sums[0] + sums[1]) + (sums[2] + sums[3]));
      for (i64 i = chunk.count - 1; i >= 0; --i) {
        X lanes{};
        over_lanes<T>(k, [&](i64 c) { lanes += slope(i, c); });
        sum += sum_of_lanes<T>(lanes) + steps[i];
        *target.template row<T>(b, h, l + i) = chunk.gates[i] == T(0) ? T(0) : sum;  // nothing passes a decay of 0
      }
      return;
    }
    over_lanes<T>(k, [&](i64 c) {
      X sum{};
      for (i64 j = c; j < numbers; j += k) sum += load<X>(after + j) * load<X>(d_after + j);
      for (i64 i = chunk.count - 1; i >= 0; --i) {
        sum += slope(i, c);
        store(decays + i * k + c, load<X>(chunk.alpha + i * k + c) == T(0) ? X{} : sum);
      }
    });
    scatter(decays, k, chunk.count, K, T(1), false, target.template row<T>(b, h, l), target.l);
  }
};

// Write the gradients; a work item is a part of the heads of a group.
template <class T>
void recur_back(const Recurrence& a, T scale, i64 first, i64 last, T* memory) {
  using X = Vector<T>;
  Scratch<T> scratch{memory};
  Chunk<T> chunk(a, scale, scratch, a.saved_every);
  Gradients<T> gradients(chunk, scratch, a.saved_every);
  const i64 k = chunk.k, v = chunk.v, V = a.V, K = a.K, R = a.H / a.G, both = chunk.both();
  const bool channels = chunk.channels(), own_query = a.query_heads == a.H;
  T *d_states = scratch.take(a.together * k * v), *d_turned = scratch.take(k * v);
  T* states = scratch.take((a.saved_every + 1) * k * v);
  T *slopes = scratch.take(2 * SPAN * v), *slopes_before = channels ? slopes : scratch.take(2 * SPAN * v);
  T *r = scratch.take(SPAN * v), *u = scratch.take(SPAN * v), *u_after = channels ? u : scratch.take(SPAN * v);
  T *g = scratch.take(SPAN * v), *turned = scratch.take(SPAN * v);
  const auto read_written = [&](i64 b, i64 h, i64 l) {  // r and u = β r
    if (a.delta)
      gather<T>(a.template residuals<const T>(b, h, l), V, chunk.count, V, v, T(1), r);
    else
      gather<T>(a.value.template row<const T>(b, h, l), a.value.l, chunk.count, V, v, T(1), r);
    copy(r, u, SPAN * v);
    multiply_rows(u, chunk.beta, SPAN, v);
    if (channels) return;
    copy(u, u_after, SPAN * v);
    multiply_rows(u_after, chunk.after, SPAN, v);
  };
  const auto pull = [&](i64 b, i64 h, i64 c, const T* before, T* ds, bool is_first) {
    const i64 l = c * SPAN;
    chunk.read(b, h, l, true);
    chunk.compare(!is_first);
    read_written(b, h, l);
    gather<T>(a.grad.template row<const T>(b, h, l), a.grad.l, chunk.count, V, v, T(1), slopes);
    multiply<Into::SET, T>(g, v, nullptr, ds, v, chunk.writing(), k, 1, SPAN, k, v);
    if (!channels) multiply_rows(g, chunk.after, SPAN, v);
    multiply<Into::ADD, T>(g, v, nullptr, slopes, v, chunk.scores, 1, SPAN, SPAN, SPAN, v);
    T* h_rows = slopes + SPAN * v;
    substitute_back(a.delta ? chunk.scores + SPAN * SPAN : static_cast<const T*>(nullptr), chunk.beta, v, g, h_rows);
    scatter(h_rows, v, chunk.count, V, T(-1), false, a.d_value.template row<T>(b, h, l), a.d_value.l);
    if (a.d_rate.at)
      for (i64 i = 0; i < chunk.count; ++i) {
        X sum{};
        over_lanes<T>(v, [&](i64 j) { sum += load<X>(g + i * v + j) * load<X>(r + i * v + j); });
        *a.d_rate.template row<T>(b, h, l + i) = sum_of_lanes<T>(sum);
      }
    if (!channels) {
      copy(slopes, slopes_before, both * v);
      multiply_rows(slopes_before, chunk.before, both, v);
    }
    transpose(ds, v, k, v, d_turned, k, k);
    transpose(u, v, SPAN, v, turned, SPAN, SPAN);
    gradients.pull(slopes, slopes_before, u_after, turned, before, d_turned, is_first);
    if (a.d_decay.at) gradients.pull_decays(before + k * v, d_turned, b, h, l);
    multiply<Into::KEEP, T>(ds, v, chunk.end, slopes_before, v, chunk.reading(), 1, k, k, both, v);
  };
  for (i64 item = first; item < last; ++item) {
    const i64 part = item % a.parts, b = item / a.parts / a.G, group = item / a.parts % a.G;
    const i64 start = group * R + R * part / a.parts, stop = group * R + R * (part + 1) / a.parts;
    for (i64 from = start, to; from < stop; from = to) {
      to = end_of_heads(a, from, stop);
      const bool more = from > start;
      for (i64 h = from; h < to; ++h)
        load_state(a.template state<const T>(a.d_end, b, h), K, V, k, v, d_states + (h - from) * k * v);
      for (i64 end = a.chunks(), begin; end > 0; end = begin) {
        begin = (end - 1) / a.saved_every * a.saved_every;
        for (i64 h = from; h < to; ++h) {
          // The states before the chunks up to the next saved one, transposed.
          load_state(a.template saved_state<const T>(b, h, begin), V, K, v, k, states);
          for (i64 c = begin; c < end; ++c) {
            T *now = states + (c - begin) * k * v, *next = now + k * v;
            chunk.move_to(c - begin);
            chunk.read(b, h, c * SPAN, h > from);
            read_written(b, h, c * SPAN);
            if (channels) {
              for (i64 i = 0; i < v; ++i)
                over_lanes<T>(k, [&](i64 j) {
                  store(next + i * k + j, load<X>(now + i * k + j) * load<X>(chunk.end + j));
                });
              multiply<Into::ADD, T>(next, k, nullptr, chunk.far, k, u, 1, v, v, SPAN, k);
            } else {
              multiply<Into::KEEP, T>(next, k, chunk.end, chunk.keys, k, u_after, 1, v, v, SPAN, k, now);
            }
          }
          for (i64 c = end - 1; c >= begin; --c) {
            chunk.move_to(c - begin);
            gradients.move_to(c - begin);
            pull(b, h, c, states + (c - begin) * k * v, d_states + (h - from) * k * v, h == from);
          }
        }
        for (i64 c = begin; c < end; ++c) {
          const i64 l = c * SPAN, count = least(SPAN, a.L - l);
          chunk.move_to(c - begin);
          gradients.move_to(c - begin);
          gradients.finish();
          T* d_query = a.d_query.template row<T>(b, own_query ? from : group, l) + (own_query ? 0 : part * a.query_part);
          scatter(gradients.near_sum, k, count, K, scale, more && !own_query, d_query, a.d_query.l);
          const T* rows = gradients.near_sum + SPAN * k;
          if (a.reader.at) {
            T* d_reader = a.d_reader.template row<T>(b, group, l) + part * a.key_part;
            scatter(rows, k, count, K, T(1), more, d_reader, a.d_reader.l);
          } else if (a.delta) {
            Gradients<T>::sum(rows, gradients.column_sum, SPAN * k, false);
          }
          T* d_key = a.d_key.template row<T>(b, group, l) + part * a.key_part;
          scatter(gradients.column_sum, k, count, K, T(1), more, d_key, a.d_key.l);
        }
      }
      if (!a.d_start) continue;
      for (i64 h = from; h < to; ++h)
        scatter(d_states + (h - from) * k * v, v, K, V, T(1), false, a.template state<T>(a.d_start, b, h), V);
    }
  }
}

}  // namespace
