// Exactly sized arrays before an inaccessible page, or between the red zones of a sanitizer, so that any access out of
// bounds ends the program.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

// Small, fast and portable random generator (Vigna's splitmix64).
struct Random {
  uint64_t state;
  uint64_t bits() {
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  int64_t below(int64_t limit) { return int64_t(bits() % uint64_t(limit)); }
  int64_t from(int64_t low, int64_t high) { return low + below(high - low + 1); }
  bool often(int percent) { return below(100) < percent; }
  float real() { return float(int64_t(bits() >> 40)) / float(1 << 23) - 1.0f; }
};

template <class T>
class Guarded {
 public:
  // Allocate on the heap, with the sanitizer's layout, or adjacent to an inaccessible page, which also detects accesses
  // that sanitizers do not instrument (masked loads, tiles). For the latter, `alignment` must divide the array's size.
  Guarded(int64_t count, Random& random, size_t alignment = alignof(T)) : count_(count) {
    const size_t bytes = size_t(count) * sizeof(T);
    if (random.often(50) && bytes % alignment == 0) {
      const size_t page = size_t(sysconf(_SC_PAGESIZE));
      mapped_ = (bytes + page - 1) / page * page + page;
      map_ = static_cast<uint8_t*>(mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
      if (map_ == MAP_FAILED || mprotect(map_ + mapped_ - page, page, PROT_NONE) != 0) {
        std::perror("guard page");
        std::exit(2);
      }
      data_ = reinterpret_cast<T*>(map_ + mapped_ - page - bytes);
    } else if (alignment > alignof(std::max_align_t)) {
      heap_ = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
      data_ = static_cast<T*>(heap_);
    } else {
      heap_ = std::malloc(bytes == 0 ? 1 : bytes);
      data_ = static_cast<T*>(heap_);
    }
    if (bytes > 0) std::memset(static_cast<void*>(data_), 0x5a, bytes);
  }
  ~Guarded() {
    std::free(heap_);
    if (map_ != nullptr) munmap(map_, mapped_);
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  T* data() { return data_; }
  int64_t size() const { return count_; }
  T& operator[](int64_t i) { return data_[i]; }
  T* begin() { return data_; }
  T* end() { return data_ + count_; }

 private:
  int64_t count_;
  T* data_ = nullptr;
  void* heap_ = nullptr;
  uint8_t* map_ = nullptr;
  size_t mapped_ = 0;
};
