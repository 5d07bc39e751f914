// Asking memory for rows of weights in the order in which they lie.
#pragma once

#include <cstdint>

#include "kernels/portable/always_inline.h"
#include "tuning.h"

namespace qtensor {
namespace {

// Where touches_farther() says so, memory is shown a line in eight of what is 32 KiB farther than what is asked for.
constexpr int64_t kFarther = 32768, kFartherStep = 512;

// Requests in order, as many bytes of them at a time as the caller has got on: while few products are made between two
// rows, a burst of requests would stand in the way of the loads.
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
