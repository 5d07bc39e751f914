// The device for launches.h in tests: the machine of emulated_lanes.h, with exactly sized memory. Each launch runs its
// threads in a different order.
#pragma once

#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#define QTENSOR_KERNEL(name) name
#include "cuda/launches.h"

namespace qtensor {
namespace cuda {

struct Aligned {  // memory at a multiple of 64, with random initial contents
  explicit Aligned(int64_t bytes) : data(std::aligned_alloc(64, size_t(bytes + 63) / 64 * 64)) {
    std::memset(data, 0x5a, size_t(bytes));
  }
  ~Aligned() { std::free(data); }
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  void* const data;
};

class EmulatedDevice {
 public:
  template <class Kernel, class Arguments>
  void launch(Kernel kernel, Grid grid, unsigned threads, size_t shared_bytes, const Arguments& arguments) {
    launches_++;
    lanes::launch(0x9e3779b9u * launches_, {grid.x, grid.y, grid.z}, threads, shared_bytes, kernel, arguments);
  }
  void* scratch(Scratch use, int64_t bytes) {
    auto& room = scratch_[size_t(use)];
    room.reset(new Aligned(bytes));
    return room->data;
  }
  const Grids* grids() { return &kGrids; }
  uint64_t launches() const { return launches_; }

 private:
  uint64_t launches_ = 0;
  std::array<std::unique_ptr<Aligned>, size_t(Scratch::count)> scratch_;
};

inline EmulatedDevice& emulated_device() {
  static thread_local EmulatedDevice device;
  return device;
}

}  // namespace cuda
}  // namespace qtensor
