// Prefetches the next tile of the cache while the current one is processed: two lines per turn, one from each half,
// spread evenly over the time of a tile. A burst of prefetches would delay everything else, and a phase without any
// would leave the memory idle. Measurements: docs/kernels/attention.md.
#pragma once

#include <cstdint>

namespace qtensor {
namespace {

struct FetchAhead {
  const uint8_t* at = nullptr;
  int64_t half = 0, left = 0;              // bytes of a half, and remaining turns
  uint32_t turns = 0, turns_per_time = 0;  // in 1/65536: turns that are due, and turns per unit of time
  bool seldom = false;                     // there are few lines, so every second group prefetches
  FetchAhead() = default;
  FetchAhead(const uint8_t* tile, int64_t bytes) : at(tile), half((bytes + 127) / 128 * 64), left(half / 64) {}

  // One turn. Callers use either this function or pass().
  inline __attribute__((always_inline)) void ask() {
    if (left == 0) return;
    request(at);
    at += 64;
    left--;
  }
  // Spreads the turns over `whole` units of time.
  void spread_over(int64_t whole) {
    turns_per_time = uint32_t((left << 16) / whole);
    seldom = turns_per_time <= 65536 / 24;
  }
  // Advances by `time` units. If no turn is due, the same lines are prefetched again, which costs less than an
  // unpredictable branch. If several are due (one query and a large cache), all but one are skipped.
  inline __attribute__((always_inline)) void pass(uint32_t time) {  // otherwise gcc keeps the caller's sums in memory
    if (turns_per_time == 0) return;
    request(at + int64_t(turns >> 16) * 64);
    turns += turns_per_time * time;
  }

 private:
  void request(const uint8_t* line) const {
    __builtin_prefetch(line, 0, 2);
    __builtin_prefetch(line + half, 0, 2);
  }
};
// Times of sixteen lanes in each phase between scores and values, for four queries, in quarters of a nanosecond. The
// times of scores and values are in the family's byte_words.h or byte_dots.h. Only the proportions matter.
constexpr uint32_t kPeakTime = 8, kPowerTime = 11, kWeightTime = 7;

}  // namespace
}  // namespace qtensor
