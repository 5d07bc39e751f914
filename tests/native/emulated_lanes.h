// The machine that runs the CUDA kernels without a GPU. Every thread of a block is a fiber with its own stack. At a
// barrier, a shuffle or an mma, a fiber waits until the other fibers of its warp or block arrive.
//
// It is stricter than the hardware, which would give no error. Collectives require whole warps. The program aborts with
// a message if a barrier is not reached by all threads, or if lanes of a warp meet in different collectives. Shared
// memory has random initial contents, and ends at canary bytes that are checked. Loads must be aligned. Threads run in
// a different order in each launch, so that a missing barrier changes the bits. Not covered: memory order between
// blocks, and real data races.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>

struct Index3 {
  unsigned x = 0, y = 0, z = 0;
};

namespace lanes {

[[noreturn]] inline void refuse(const char* why) {
  std::fprintf(stderr, "emulated lanes: %s\n", why);
  std::abort();
}

// A deliberate fault that tests must detect: EMULATED_LANES_FAULT=barrier omits the barriers of a block.
inline bool fault_wanted(const char* name) {
  static const char* const wanted = std::getenv("EMULATED_LANES_FAULT");
  return wanted != nullptr && std::strcmp(wanted, name) == 0;
}

enum Collective : int { none, syncthreads, syncwarp, shuffle, reduce, mma };

struct Barrier {
  unsigned arrived = 0, turn = 0;
  Collective kind = none;
};
struct Warp {  // values of each lane, in alternating slots, so that none is overwritten before it is read
  Barrier barrier;
  uint32_t slot[2][32];
  int8_t a[2][16][32], b[2][8][32];  // operands of an mma
};

constexpr unsigned kMostThreads = 1024, kStackBytes = 64 << 10, kMostShared = 227 << 10, kCanaryBytes = 64;

struct Machine {
  struct Fiber {
    jmp_buf here;
    std::unique_ptr<char[]> stack;
    ucontext_t context;
    bool done = true, awaited = false;
  };
  Fiber fiber[kMostThreads];
  Warp warp[kMostThreads / 32];
  Barrier block;
  std::unique_ptr<max_align_t[]> shared_store{new max_align_t[(kMostShared + kCanaryBytes) / sizeof(max_align_t)]};
  std::function<void()> body;
  unsigned threads = 0, current = 0, stride = 1, left = 0, idle = 0;
  jmp_buf outside;
  Index3 block_index, grid;

  uint8_t* shared() { return reinterpret_cast<uint8_t*>(shared_store.get()); }
  // Switch to the next unfinished thread, or return to the launch if there is none.
  void leave() {
    if (left == 0) _longjmp(outside, 1);
    do current = (current + stride) % threads;
    while (fiber[current].done);
    _longjmp(fiber[current].here, 1);
  }
  void yield() {
    if (_setjmp(fiber[current].here) == 0) leave();
  }
  void wait(Barrier& b, unsigned expected, Collective kind) {
    if (b.arrived == 0) b.kind = kind;
    if (b.kind != kind) refuse("lanes of a warp meet in different collectives");
    const unsigned turn = b.turn;
    if (++b.arrived == expected) {
      b.arrived = 0;
      b.turn++;
      idle = 0;
      return;
    }
    while (b.turn == turn) {
      if (++idle > 4 * threads) refuse("a barrier that not all threads reach");
      yield();
    }
  }
  void run_block() {
    for (unsigned i = 0; i < threads; i++) {
      if (fiber[i].stack == nullptr) begin(i);
      fiber[i].done = fiber[i].awaited = false;
    }
    left = threads, idle = 0, current = threads - 1;
    if (_setjmp(outside) == 0) leave();
    if (block.arrived != 0) refuse("threads ended before a barrier that others wait at");
  }

 private:
  static void loop();  // a fiber runs one thread after another and never returns
  void begin(unsigned i) {
    Fiber& f = fiber[i];
    f.stack.reset(new char[kStackBytes]);
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.get();
    f.context.uc_stack.ss_size = kStackBytes;
    f.context.uc_link = nullptr;
    makecontext(&f.context, loop, 0);
    current = i;
    if (_setjmp(outside) == 0) setcontext(&f.context);
  }
};
inline Machine& machine() {
  static thread_local std::unique_ptr<Machine> m(new Machine);
  return *m;
}
inline void Machine::loop() {
  Machine& m = machine();
  if (_setjmp(m.fiber[m.current].here) == 0) _longjmp(m.outside, 1);
  for (;;) {
    m.body();
    if (!m.fiber[m.current].awaited) refuse("a thread that does not await the kernel before");
    m.fiber[m.current].done = true;
    m.left--;
    if (_setjmp(m.fiber[m.current].here) == 0) m.leave();
  }
}

// Run a launch like cuLaunchKernel, block after block. `seed` determines the order of the threads.
template <class Kernel, class Arguments>
inline void launch(uint64_t seed, Index3 grid, unsigned threads, size_t shared_bytes, Kernel kernel,
                   const Arguments& arguments) {
  Machine& m = machine();
  if (threads % 32 != 0 || threads > kMostThreads) refuse("a block has whole warps, 1024 threads at the most");
  if (shared_bytes > kMostShared) refuse("more shared memory than a block can have");
  m.threads = threads, m.grid = grid;
  m.stride = unsigned(seed % threads) | 1;
  while (std::gcd(m.stride, threads) != 1) m.stride += 2;
  m.body = [&] { kernel(arguments); };
  for (unsigned z = 0; z < grid.z; z++)
    for (unsigned y = 0; y < grid.y; y++)
      for (unsigned x = 0; x < grid.x; x++) {
        std::memset(m.shared(), 0xa5, shared_bytes + kCanaryBytes);
        m.block_index = {x, y, z};
        m.run_block();
        for (size_t i = 0; i < kCanaryBytes; i++)
          if (m.shared()[shared_bytes + i] != 0xa5) refuse("written behind the shared memory");
      }
}

inline unsigned lane() { return machine().current % 32; }
inline Warp& my_warp() { return machine().warp[machine().current / 32]; }
template <class T>
inline T exchange(T value, unsigned from) {
  static_assert(sizeof(T) == 4);
  Warp& w = my_warp();
  auto& slot = w.slot[w.barrier.turn & 1];
  std::memcpy(&slot[lane()], &value, 4);
  machine().wait(w.barrier, 32, shuffle);
  std::memcpy(&value, &slot[from % 32], 4);
  return value;
}
template <class Join>
inline uint32_t reduce_all(uint32_t value, Join join) {
  Warp& w = my_warp();
  auto& slot = w.slot[w.barrier.turn & 1];
  slot[lane()] = value;
  machine().wait(w.barrier, 32, reduce);
  uint32_t all = slot[0];
  for (int i = 1; i < 32; i++) all = join(all, slot[i]);
  return all;
}
// Lane (g, q) provides words of rows g and g + 8 and of column g, and receives columns 2q and 2q + 1 of both rows.
template <int WORDS>
inline void multiply(int (&c)[4], const uint32_t (&a)[2 * WORDS], const uint32_t (&b)[WORDS]) {
  Warp& w = my_warp();
  const unsigned turn = w.barrier.turn & 1, g = lane() / 4, q = lane() % 4;
  for (unsigned i = 0; i < 2 * WORDS; i++) std::memcpy(&w.a[turn][g + 8 * (i % 2)][16 * (i / 2) + 4 * q], &a[i], 4);
  for (unsigned i = 0; i < WORDS; i++) std::memcpy(&w.b[turn][g][16 * i + 4 * q], &b[i], 4);
  machine().wait(w.barrier, 32, mma);
  for (unsigned i = 0; i < 4; i++) {
    const int8_t *x = w.a[turn][g + 8 * (i / 2)], *y = w.b[turn][2 * q + i % 2];
    int sum = 0;
    for (int k = 0; k < 16 * WORDS; k++) sum += x[k] * y[k];
    c[i] = int(uint32_t(c[i]) + uint32_t(sum));
  }
}

}  // namespace lanes

#include "emulated_names.h"
