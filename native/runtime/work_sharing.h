// Helpers of steps: errors, scratch memory, and distributing work to the pool.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>

#include "runtime/threads.h"

namespace qtensor {

[[noreturn]] inline void refuse(const std::string& message) { throw std::invalid_argument(message); }

// Memory that steps use while they run. It grows and never shrinks. Guarded by engine_mutex().
class Scratch {
 public:
  void* get(size_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = 0;
      const size_t page = bytes < kManyPages ? 4096 : kLargePage;
      const size_t whole = (bytes + page - 1) / page * page;
      data_ = std::aligned_alloc(page, whole);
      if (data_ == nullptr) throw std::bad_alloc();
      size_ = bytes;
#if defined(MADV_HUGEPAGE)
      if (page == kLargePage) madvise(data_, whole, MADV_HUGEPAGE);  // a product reads it repeatedly
#endif
    }
    return data_;
  }
  float* floats(int64_t count) { return static_cast<float*>(get(size_t(count) * sizeof(float))); }

 private:
  static constexpr size_t kLargePage = size_t(2) << 20, kManyPages = 16 * 4096;
  void* data_ = nullptr;
  size_t size_ = 0;
};
// Runs body(begin, end) over [0, n) in work items of up to `most` indices. If one item is not enough, the number of
// items is rounded up to a multiple of the number of workers where n allows it. All items except the last have the same
// size.
template <class Body>
void parallel_for(ThreadPool& pool, int64_t n, int64_t most, Body body) {
  int64_t items = (n + most - 1) / most;
  if (items > 1) items = (items + pool.size() - 1) / pool.size() * pool.size();
  const int64_t grain = std::max<int64_t>(1, (n + items - 1) / std::max<int64_t>(1, items));
  auto task = [&](int64_t index, int) { body(index * grain, std::min(n, (index + 1) * grain)); };
  pool.run((n + grain - 1) / grain, task);
}

inline constexpr int64_t kSmall = 16384;  // fewer floats than this are not worth waking another thread

// Fewer multiply-adds than this are not worth it either: one thread needs some 20 microseconds for them. Waiting for a
// thread takes little time if the thread has a core of its own, and milliseconds if it does not.
inline constexpr int64_t kSmallProduct = int64_t(1) << 20;

template <class Task>
void run_tasks(ThreadPool& pool, int64_t tasks, int64_t multiply_adds, Task& task) {
  if (multiply_adds >= kSmallProduct) return pool.run(tasks, task);
  for (int64_t index = 0; index < tasks; index++) task(index, 0);
}

}  // namespace qtensor
