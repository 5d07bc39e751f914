// The one thread pool of the process. The thread that calls `run` is worker 0; N threads means N - 1 created.
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

  // How many indices each worker has computed since there is the pool. While nothing runs.
  std::vector<int64_t> shares();

  // Calls task(index, worker) for every index in [0, tasks), each exactly once, and returns when all are done. An index
  // is computed whole by one worker, so which worker takes it cannot change a result. `task` must not throw.
  //
  // Every worker has a range of neighboring indices, so that what it asks of memory ahead of time is its own; one that
  // is done with its range takes from the others'. Nobody is waited for but those who have begun: a worker whose CPU is
  // taken away before it does is missed by nobody, and one that is much slower than the others leaves the last indices
  // to them (runtime/worker_record.h).
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
  // A run's number, whether it is closed to who has not joined, and how many workers are at it.
  struct alignas(64) Gate {
    std::atomic<uint64_t> value{kClosed};
  };
  static constexpr uint64_t kClosed = uint64_t(1) << 31, kActive = kClosed - 1;

  const int size_;
  Gate gate_;
  WorkerRecords records_;
  uint64_t run_ = 0;
  std::unique_ptr<Counter[]> next_;  // of each worker's range
  Epoch epoch_;
  Call call_ = nullptr;
  void* context_ = nullptr;
  int64_t tasks_ = 0;
  std::atomic<int> caller_cpu_{-1};  // where the thread that shares the work out is at work
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> workers_;
};

// The pool in force, and the lock that whoever runs work on it holds. Before the first set_thread_count it has 1
// thread.
ThreadPool& thread_pool();
int thread_count();                  // of that pool, without the lock
std::vector<int64_t> work_shares();  // with it
void set_thread_count(int threads);
std::mutex& engine_mutex();

}  // namespace qtensor
