// One call of a kernel by several threads, whichever team they are of: each takes the next share of the work until none
// is left.

#include <cstring>

#include "arguments.h"

#define EXPORTED extern "C" __attribute__((visibility("default"))) void

namespace {

#define COUNTED(name) +1
constexpr i64 COUNT = FIELDS(COUNTED);
#undef COUNTED

// The kernel with its arguments and reals, the number of shares, and how far the scratch memories of threads lie apart;
// then the next share and the next thread, both 0 at first. A share begins where the one before it ends.
// `regard/engines/fused/prepared.py` writes it.
struct Job {
  void (*kernel)(const i64*, const void*);
  const i64* numbers;
  const void* reals;
  i64 shares, apart, share, thread, begins[];
};

void work(Job& job) {
  i64 own[COUNT];
  std::memcpy(own, job.numbers, sizeof own);
  own[F::scratch] += job.apart * __atomic_fetch_add(&job.thread, 1, __ATOMIC_RELAXED);
  for (i64 i; (i = __atomic_fetch_add(&job.share, 1, __ATOMIC_RELAXED)) < job.shares;) {
    own[F::first] = job.begins[i];
    own[F::last] = job.begins[i + 1];
    job.kernel(own, job.reals);
  }
}

}  // namespace

// What a thread runs, as the two kinds of teams want it: torch's gives every thread a range besides.
EXPORTED regard_work(void* job) { work(*static_cast<Job*>(job)); }
EXPORTED regard_work_range(i64, i64, void* job) { work(*static_cast<Job*>(job)); }
