// Runs kernels in a process without Python: under an emulator, or on threads that ThreadSanitizer watches.
//
//   driver LIBRARY PROCESSOR THREADS < batches > results
//
// A batch is memory and calls that work on it, which the threads share; its result is the same memory after the calls.
// tests/helpers/driven_kernels.py writes batches and reads results, in 64-bit words:
//
//   batch   blocks, size in bytes of each; their contents, padded to words; calls
//   call    name (48 bytes), three reals (doubles), scratch (bytes, and which argument or −1), arguments; for each of these
//           which block it is the address of (or −1), and its value
#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace {

using i64 = int64_t;

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "driver: %s\n", what.c_str());
  std::exit(2);
}

struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Memory = std::unique_ptr<char, Free>;

i64 padded(i64 size) { return (size + 7) / 8 * 8; }

Memory memory(i64 size, int content) {
  const i64 whole = (size + 64) / 64 * 64;
  Memory made(static_cast<char*>(std::aligned_alloc(64, whole)));
  if (!made) fail("out of memory");
  std::memset(made.get(), content, whole);
  return made;
}

void read(void* to, i64 size) {
  if (std::fread(to, 1, size, stdin) != static_cast<std::size_t>(size)) fail("a batch is cut off");
}

i64 word() {
  i64 found;
  read(&found, sizeof found);
  return found;
}

struct Call {
  std::string name;
  double reals[3];
  void* function;
  std::vector<i64> arguments;
  Memory scratch;
};

template <class T>
void run(const Call& call) {
  const T reals[] = {T(call.reals[0]), T(call.reals[1]), T(call.reals[2])};
  const i64* a = call.arguments.data();
  const auto address = [&](int i) { return reinterpret_cast<void*>(a[i]); };
  if (call.name.rfind("decoding_read_rows", 0) == 0) {
    using Function = void(
        void*, i64, void*, void*, i64, void*, void*, i64, void*, i64, i64, i64, i64, i64, T, void*, i64, void*);
    reinterpret_cast<Function*>(call.function)(
        address(0), a[1], address(2), address(3), a[4], address(5), address(6), a[7], address(8), a[9], a[10], a[11],
        a[12], a[13], reals[0], address(15), a[16], address(17));
  } else if (call.name.rfind("decoding_log_sums", 0) == 0) {
    using Function = void(void*, i64, i64, i64, i64, i64, void*, i64, void*, void*);
    reinterpret_cast<Function*>(call.function)(
        address(0), a[1], a[2], a[3], a[4], a[5], address(6), a[7], address(8), address(9));
  } else {
    using Function = void(const i64*, const T*);
    reinterpret_cast<Function*>(call.function)(a, reals);
  }
}

Call read_call(void* library, const std::string& processor, const std::vector<Memory>& blocks) {
  char name[48];
  read(name, sizeof name);
  Call call{name, {}, nullptr, {}, nullptr};
  read(call.reals, sizeof call.reals);
  const i64 size = word(), place = word();
  call.arguments.resize(word());
  for (i64& argument : call.arguments) {
    const i64 block = word();
    argument = word();
    if (block >= 0) argument = reinterpret_cast<i64>(blocks.at(block).get());
  }
  call.scratch = memory(size, 0xFF);  // NaN, and −1
  if (place >= 0) call.arguments.at(place) = reinterpret_cast<i64>(call.scratch.get());
  const std::string symbol = "regard_" + call.name + "_" + processor;
  call.function = dlsym(library, symbol.c_str());
  if (call.function == nullptr) fail("the library has no " + symbol);
  return call;
}

void run_all(const std::vector<Call>& calls, int threads) {
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t i; (i = next.fetch_add(1)) < calls.size();)
      if (calls[i].name.find("float64") != std::string::npos)
        run<double>(calls[i]);
      else
        run<float>(calls[i]);
  };
  std::vector<std::thread> team;
  for (int i = 1; i < threads; ++i) team.emplace_back(work);
  work();
  for (std::thread& each : team) each.join();
}

}  // namespace

int main(int count, char** given) {
  if (count != 4) fail("expected LIBRARY PROCESSOR THREADS");
  void* library = dlopen(given[1], RTLD_NOW);
  if (library == nullptr) fail(dlerror());
  i64 number;
  while (std::fread(&number, sizeof number, 1, stdin) == 1) {
    std::vector<i64> sizes(number);
    for (i64& size : sizes) size = word();
    std::vector<Memory> blocks;
    for (const i64 size : sizes) {
      blocks.push_back(memory(padded(size), 0));
      read(blocks.back().get(), padded(size));
    }
    std::vector<Call> calls;
    for (i64 left = word(); left > 0; --left) calls.push_back(read_call(library, given[2], blocks));
    run_all(calls, std::atoi(given[3]));
    for (std::size_t i = 0; i < sizes.size(); ++i) std::fwrite(blocks[i].get(), 1, padded(sizes[i]), stdout);
    std::fflush(stdout);
  }
}
