#include "runtime/threads.h"

#include <pthread.h>
#if defined(__linux__)
#include <sched.h>
#elif defined(__APPLE__)
#include <pthread/qos.h>
#endif

#include <algorithm>
#include <chrono>

namespace qtensor {
namespace {

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// Longer than the gap between two operations of a step, but short enough that an idle process leaves its CPUs idle.
constexpr auto kSpin = std::chrono::microseconds(60);

WorkerRecords::Nanoseconds nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

int cpu_at_hand() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

// Moves to another CPU if the process may use one. Linux may wake a thread on the CPU of the thread that woke it, and
// leaves both there for a while: the first step after a pause took 3 to 25 ms longer than the next.
void leave_cpu(int cpu) {
#if defined(__linux__)
  cpu_set_t all;
  if (cpu < 0 || cpu >= CPU_SETSIZE || sched_getaffinity(0, sizeof(all), &all) != 0) return;
  cpu_set_t others = all;
  CPU_CLR(cpu, &others);
  if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof(others), &others) != 0) return;
  sched_setaffinity(0, sizeof(all), &all);  // it may run anywhere from now on
#else
  (void)cpu;
#endif
}

// macOS selects cores by a thread's quality of service, and a step is as slow as its slowest thread. Therefore all
// threads request performance cores, whatever the process was started with.
void ask_for_fast_core() {
#if defined(__APPLE__)
  thread_local const int asked = pthread_set_qos_class_self_np(QOS_CLASS_USER_INITIATED, 0);
  (void)asked;
#endif
}

// Threads do not survive a fork, so the child computes in the calling thread only.
std::atomic<bool> forked{false};

}  // namespace

ThreadPool::ThreadPool(int threads)
    : size_(std::max(threads, 1)), records_(size_), next_(std::make_unique<Counter[]>(size_t(size_))) {
  try {
    for (int worker = 1; worker < threads; worker++) workers_.emplace_back([this, worker] { work(worker); });
  } catch (...) {  // a thread could not be created: those that exist must not outlive the pool
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  if (forked.load()) {
    for (auto& thread : workers_) thread.detach();
    return;
  }
  stopping_.store(true);
  epoch_.value.fetch_add(1);
  epoch_.value.notify_all();
  for (auto& thread : workers_) thread.join();
}

bool ThreadPool::join() {
  uint64_t gate = gate_.value.load(std::memory_order_relaxed);
  do {
    if (gate & kClosed) return false;
  } while (!gate_.value.compare_exchange_weak(gate, gate + 1, std::memory_order_acquire, std::memory_order_relaxed));
  return true;
}

int64_t ThreadPool::left() const {
  int64_t left = 0;
  for (int owner = 0; owner < size_; owner++)
    left +=
        std::max<int64_t>(0, tasks_ * (owner + 1) / size_ - next_[size_t(owner)].value.load(std::memory_order_relaxed));
  return left;
}

void ThreadPool::drain(int worker, bool may_stand_back) {
  const bool careful = may_stand_back && records_.is_slow(worker);
  WorkerRecords::Part& part = records_.part(worker);
  for (int i = 0; i < size_; i++) {
    const int owner = (worker + i) % size_;
    const int64_t end = tasks_ * (owner + 1) / size_;
    while (next_[size_t(owner)].value.load(std::memory_order_relaxed) < end) {
      if (careful && records_.should_stand_back(worker, left())) {
        part.stood_back = true;
        return;
      }
      const int64_t index = next_[size_t(owner)].value.fetch_add(1, std::memory_order_relaxed);
      if (index >= end) break;
      call_(context_, index, worker);
      part.items++;
      part.items_in_all++;
    }
  }
}

void ThreadPool::take_part(int worker) {
  WorkerRecords::Part& part = records_.part(worker);
  part.run = run_;
  part.items = 0;
  part.stood_back = false;
  part.begun = nanoseconds();
  drain(worker, true);
  part.ended = nanoseconds();
}

void ThreadPool::run_erased(int64_t tasks, Call call, void* context) {
  if (tasks <= 0) return;
  ask_for_fast_core();
  if (workers_.empty() || tasks == 1 || forked.load(std::memory_order_relaxed)) {
    for (int64_t index = 0; index < tasks; index++) call(context, index, 0);
    return;
  }
  call_ = call;
  context_ = context;
  tasks_ = tasks;
  caller_cpu_.store(cpu_at_hand(), std::memory_order_relaxed);
  for (int worker = 0; worker < size_; worker++)
    next_[size_t(worker)].value.store(tasks * worker / size_, std::memory_order_relaxed);
  run_++;
  gate_.value.store(run_ << 32, std::memory_order_release);
  epoch_.value.fetch_add(1, std::memory_order_release);
  epoch_.value.notify_all();
  take_part(0);
  gate_.value.fetch_or(kClosed, std::memory_order_acq_rel);
  for (int spins = 0; (gate_.value.load(std::memory_order_acquire) & kActive) != 0; spins++) {
    if (spins < 20000)
      relax();
    else
      std::this_thread::yield();  // a worker has lost its CPU: let it use this one
  }
  drain(0, false);  // indices that a slow caller left to workers that had already finished
  records_.account(run_, nanoseconds());
}

std::vector<int64_t> ThreadPool::shares() {
  std::vector<int64_t> shares;
  for (int worker = 0; worker < size_; worker++) shares.push_back(records_.part(worker).items_in_all);
  return shares;
}

void ThreadPool::work(int worker) {
  uint32_t seen = 0;
  ask_for_fast_core();
  for (;;) {
    const auto until = std::chrono::steady_clock::now() + kSpin;
    bool slept = false;
    while (epoch_.value.load(std::memory_order_acquire) == seen) {
      for (int i = 0; i < 64 && epoch_.value.load(std::memory_order_relaxed) == seen; i++) relax();
      if (std::chrono::steady_clock::now() < until) continue;
      epoch_.value.wait(seen, std::memory_order_acquire);
      slept = true;
    }
    seen = epoch_.value.load(std::memory_order_acquire);
    if (stopping_.load()) return;
    const int crowded = slept ? caller_cpu_.load(std::memory_order_relaxed) : -1;
    if (crowded >= 0 && cpu_at_hand() == crowded) leave_cpu(crowded);
    if (!records_.takes_part(worker, nanoseconds()) || !join()) continue;
    take_part(worker);
    gate_.value.fetch_sub(1, std::memory_order_release);
  }
}

namespace {
std::atomic<int> threads_in_force{1};

std::unique_ptr<ThreadPool>& pool_slot() {
  static std::unique_ptr<ThreadPool> pool = [] {
    pthread_atfork(nullptr, nullptr, [] { forked.store(true); });
    return std::make_unique<ThreadPool>(1);
  }();
  return pool;
}
}  // namespace

ThreadPool& thread_pool() { return *pool_slot(); }

int thread_count() { return threads_in_force.load(); }

std::vector<int64_t> work_shares() {
  const std::lock_guard<std::mutex> lock(engine_mutex());
  return thread_pool().shares();
}

std::mutex& engine_mutex() {
  static std::mutex mutex;
  return mutex;
}

void set_thread_count(int threads) {
  const std::lock_guard<std::mutex> lock(engine_mutex());
  if (thread_pool().size() == threads) return;
  pool_slot() = std::make_unique<ThreadPool>(threads);
  threads_in_force.store(threads);
}

}  // namespace qtensor
