// Prefetches rows of weights in the order in which they are stored.
#pragma once

#include <cstdint>

#include "kernels/portable/always_inline.h"
#include "tuning.h"

namespace qtensor {
namespace {

// If touches_farther() is true, one line in eight is also prefetched 32 KiB farther ahead, into L3.
constexpr int64_t kFarther = 32768, kFartherStep = 512;

// Prefetches in order. The caller passes the number of bytes by which it has advanced, often enough that prefetches are
// spread over its products; a burst of them would delay its loads.
class AheadInOrder {
 public:
  AheadInOrder(const uint8_t* row, int64_t rows, int64_t row_bytes)
      : next_(row + rows * row_bytes + 8192), until_(next_), farther_(touches_farther()) {}
  QTENSOR_INLINE void ask(int64_t bytes) {
    for (until_ += bytes; next_ < until_; next_ += 64) {
      __builtin_prefetch(next_, 0, 2);
      if (farther_ && (uintptr_t(next_) & (kFartherStep - 64)) == 0) __builtin_prefetch(next_ + kFarther, 0, 1);
    }
  }

 private:
  const uint8_t *next_, *until_;
  bool farther_;
};

}  // namespace
}  // namespace qtensor
