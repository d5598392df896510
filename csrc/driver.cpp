// Runs kernels in a process without Python: under an emulator, or watched by sanitizers.
//
//   driver LIBRARY PROCESSOR THREADS < batches > results
//
// A batch is blocks of memory and calls that work on them; its result is the same memory after the calls. Threads share
// the tasks that the calls belong to: those of one follow each other. A block ends where a page begins that nothing may touch. tests/helpers/driven_kernels.py writes batches and
// reads results, in 64-bit words:
//
//   batch     blocks, size in bytes of each; their contents, padded to words; addresses in them; calls
//   address   which block holds it, and at which byte; which block it lies in, and at which byte
//   call      name (48 bytes); task; integers, and for each which block it is an address in (or −1), and its value or at which
//             byte; reals (doubles)
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using i64 = int64_t;

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "driver: %s\n", what.c_str());
  std::exit(2);
}

void read(void* to, i64 size) {
  if (std::fread(to, 1, size, stdin) != static_cast<std::size_t>(size)) fail("a batch is cut off");
}

i64 word() {
  i64 found;
  read(&found, sizeof found);
  return found;
}

i64 padded(i64 size) { return (size + 7) / 8 * 8; }

// Memory between two pages that nothing may touch, the second right behind it.
class Block {
 public:
  explicit Block(i64 size) : size_(size) {
    const i64 page = sysconf(_SC_PAGESIZE);
    whole_ = (size + page - 1) / page * page + 2 * page;
    void* found = mmap(nullptr, whole_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) fail("out of memory");
    mapped_ = static_cast<char*>(found);
    if (mprotect(mapped_ + page, whole_ - 2 * page, PROT_READ | PROT_WRITE) != 0) fail("memory cannot be protected");
    begin_ = mapped_ + whole_ - page - size;
  }
  Block(Block&& other) noexcept { *this = std::move(other); }
  Block& operator=(Block&& other) noexcept {
    std::swap(size_, other.size_);
    std::swap(whole_, other.whole_);
    std::swap(mapped_, other.mapped_);
    std::swap(begin_, other.begin_);
    return *this;
  }
  ~Block() {
    if (mapped_ != nullptr) munmap(mapped_, whole_);
  }

  char* begin() const { return begin_; }

  void fill() const {
    read(begin_, size_);
    char rest[8];
    read(rest, padded(size_) - size_);
  }

  void write() const {
    const char rest[8] = {};
    std::fwrite(begin_, 1, size_, stdout);
    std::fwrite(rest, 1, padded(size_) - size_, stdout);
  }

 private:
  i64 size_ = 0, whole_ = 0;
  char *mapped_ = nullptr, *begin_ = nullptr;
};

// Calls pass integers and addresses in the same registers and stack slots, and reals in others: one type of function
// with the most of both serves all kernels.
constexpr std::size_t INTEGERS = 18, REALS = 2;

struct Call {
  std::string name;
  void* function;
  i64 task;
  i64 integers[INTEGERS] = {};
  double reals[REALS] = {};
};

template <class T>
void run(const Call& call) {
  using Function =
      void(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, T, T);
  const i64* i = call.integers;
  reinterpret_cast<Function*>(call.function)(
      i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7], i[8], i[9], i[10], i[11], i[12], i[13], i[14], i[15], i[16],
      i[17], static_cast<T>(call.reals[0]), static_cast<T>(call.reals[1]));
}

// A number, or the address of a byte in a block.
i64 read_integer(const std::vector<Block>& blocks) {
  const i64 block = word(), value = word();
  return block < 0 ? value : reinterpret_cast<i64>(blocks.at(block).begin() + value);
}

Call read_call(void* library, const std::string& processor, const std::vector<Block>& blocks) {
  char name[48];
  read(name, sizeof name);
  Call call;
  call.name = name;
  call.task = word();
  const std::size_t integers = word();
  if (integers > INTEGERS) fail(call.name + " takes more integers than a call has");
  for (std::size_t i = 0; i < integers; ++i) call.integers[i] = read_integer(blocks);
  const std::size_t reals = word();
  if (reals > REALS) fail(call.name + " takes more reals than a call has");
  read(call.reals, reals * sizeof(double));
  const std::string symbol = "regard_" + call.name + "_" + processor;
  call.function = dlsym(library, symbol.c_str());
  if (call.function == nullptr) fail("the library has no " + symbol);
  return call;
}

void run_all(const std::vector<Call>& calls, int threads) {
  std::atomic<std::size_t> next{0};
  std::vector<std::size_t> ends;  // of the calls of each task
  for (std::size_t i = 1; i <= calls.size(); ++i)
    if (i == calls.size() || calls[i].task != calls[i - 1].task) ends.push_back(i);
  const auto work = [&] {
    for (std::size_t task; (task = next.fetch_add(1)) < ends.size();)
      for (std::size_t i = task == 0 ? 0 : ends[task - 1]; i < ends[task]; ++i)
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
    std::vector<Block> blocks;
    for (const i64 size : sizes) {
      blocks.emplace_back(size);
      blocks.back().fill();
    }
    for (i64 left = word(); left > 0; --left) {
      const i64 holder = word(), at = word();
      const i64 address = read_integer(blocks);
      std::memcpy(blocks.at(holder).begin() + at, &address, sizeof address);
    }
    std::vector<Call> calls;
    for (i64 left = word(); left > 0; --left) calls.push_back(read_call(library, given[2], blocks));
    run_all(calls, std::atoi(given[3]));
    for (const Block& block : blocks) block.write();
    std::fflush(stdout);
  }
}
