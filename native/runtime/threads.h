// The thread pool of the process. The thread that calls `run` is worker 0, so N threads means that N - 1 are created.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime/worker_record.h"

namespace qtensor {

class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_; }

  // The number of indices that each worker has computed since the pool was created. Call only while nothing runs.
  std::vector<int64_t> shares();

  // Calls task(index, worker) exactly once for each index in [0, tasks), and returns when all calls have returned. One
  // worker computes an index completely, so the choice of the worker cannot change a result. `task` must not throw.
  //
  // Each worker has a range of adjacent indices, so that the memory that it prefetches is its own. A worker that has
  // finished its range takes indices of the others. The run waits only for workers that have begun: a worker that does
  // not get a CPU does not delay it, and one that is much slower than the others leaves the last indices to them
  // (runtime/worker_record.h).
  template <class Task>
  void run(int64_t tasks, Task& task) {
    run_erased(
        tasks, [](void* context, int64_t index, int worker) { (*static_cast<Task*>(context))(index, worker); }, &task);
  }

 private:
  using Call = void (*)(void*, int64_t, int);
  void run_erased(int64_t tasks, Call call, void* context);
  void work(int worker);
  void stop();
  bool join();
  void take_part(int worker);
  void drain(int worker, bool may_stand_back);
  int64_t left() const;

  struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
  };
  struct alignas(64) Epoch {
    std::atomic<uint32_t> value{0};
  };
  // The number of a run (upper 32 bits), whether it is closed to new workers, and how many workers are active in it.
  struct alignas(64) Gate {
    std::atomic<uint64_t> value{kClosed};
  };
  static constexpr uint64_t kClosed = uint64_t(1) << 31, kActive = kClosed - 1;

  const int size_;
  Gate gate_;
  WorkerRecords records_;
  uint64_t run_ = 0;
  std::unique_ptr<Counter[]> next_;  // next index of each worker's range
  Epoch epoch_;
  Call call_ = nullptr;
  void* context_ = nullptr;
  int64_t tasks_ = 0;
  std::atomic<int> caller_cpu_{-1};  // CPU of the thread that called run
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> workers_;
};

// The current pool, and the lock that must be held to run work on it. Before the first set_thread_count, the pool has
// one thread.
ThreadPool& thread_pool();
int thread_count();                  // of the current pool; does not take the lock
std::vector<int64_t> work_shares();  // takes the lock
void set_thread_count(int threads);
std::mutex& engine_mutex();

}  // namespace qtensor
