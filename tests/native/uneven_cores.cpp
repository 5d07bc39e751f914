// The thread pool with workers of different speed, simulated by sleeping tasks: how work is shared, and that each item
// is computed once.
//
//     uneven_cores
//
// The tests do not measure time. Any number of workers can run on any machine, because sleeping uses no core.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

#include "runtime/threads.h"

namespace {

using qtensor::ThreadPool;

void require(bool holds, const char* what, int64_t found) {
  if (holds) return;
  std::printf("failed: %s (%lld)\n", what, (long long)found);
  std::exit(1);
}

void sleep_us(int64_t us) { std::this_thread::sleep_for(std::chrono::microseconds(us)); }

// Return the number of items that each worker computed in `runs` runs; every index must be computed once per run.
std::vector<int64_t> shares(ThreadPool& pool, int runs, int64_t tasks, const std::function<void(int)>& item) {
  const std::vector<int64_t> before = pool.shares();
  std::vector<std::atomic<int>> done(static_cast<size_t>(tasks));
  for (int run = 1; run <= runs; run++) {
    auto task = [&](int64_t index, int worker) {
      item(worker);
      done[size_t(index)].fetch_add(1, std::memory_order_relaxed);
    };
    pool.run(tasks, task);
    for (auto& times : done) require(times.load() == run, "an index is computed once in each run", times.load() - run);
  }
  std::vector<int64_t> taken = pool.shares();
  int64_t all = 0;
  for (size_t w = 0; w < taken.size(); w++) all += taken[w] -= before[w];
  if (pool.size() > 1 && tasks > 1) require(all == runs * tasks, "shares add up", all);
  return taken;
}

void any_number_of_threads() {
  for (const int threads : {1, 2, 3, 4, 16, 64, 128}) {
    ThreadPool pool(threads);
    for (const int64_t tasks :
         {int64_t(1), int64_t(2), int64_t(threads - 1), int64_t(threads), int64_t(8 * threads + 3)})
      if (tasks > 0) shares(pool, 40, tasks, [](int) {});
  }
}

// A worker with a fortieth of the others' speed, like a different kind of core: it takes a fortieth of the work or
// less.
void a_slow_core() {
  ThreadPool pool(4);
  const auto item = [](int worker) { sleep_us(worker == 2 ? 8000 : 200); };
  shares(pool, 20, 32, item);
  const auto later = shares(pool, 60, 32, item);
  require(later[2] <= 60 * 8 / 4, "a slow core takes less than a quarter of an even share", later[2]);
  require(later[0] + later[1] + later[3] >= 60 * 26, "the others take the rest", later[0] + later[1] + later[3]);
}

// A worker whose item takes longer than all others together: it gets no work, and is tried again after it recovers.
void a_core_that_only_holds_up() {
  ThreadPool pool(4);
  const auto item = [](int worker) { sleep_us(worker == 1 ? 30000 : 100); };
  shares(pool, 10, 32, item);
  const auto later = shares(pool, 100, 32, item);
  require(later[1] <= 20, "it is hardly asked", later[1]);
  int64_t again = 0;
  for (int tries = 0; again == 0 && tries < 2000; tries++) again = shares(pool, 20, 32, [](int) { sleep_us(100); })[1];
  require(again > 0, "and asked again", again);
}

// A worker as fast as the others that occasionally pauses, like a thread with a CPU quota.
void a_throttled_core() {
  ThreadPool pool(4);
  std::atomic<int64_t> items{0}, stops{0};
  shares(pool, 400, 32, [&](int worker) {
    sleep_us(100);
    if (worker != 3 || ++items % 20 != 0) return;
    stops++;
    sleep_us(60000);
  });
  require(stops.load() <= 20, "it is left out after it stood still", stops.load());
}

// The calling thread is on the slow core: all work is still done.
void a_slow_caller() {
  ThreadPool pool(3);
  const auto taken = shares(pool, 60, 24, [](int worker) { sleep_us(worker == 0 ? 3000 : 100); });
  require(taken[0] < taken[1] + taken[2], "the others take most", taken[0]);
}

}  // namespace

int main() {
  any_number_of_threads();
  a_slow_core();
  a_core_that_only_holds_up();
  a_throttled_core();
  a_slow_caller();
  std::puts("ok");
}
