// The next tile of the cache, fetched while one is worked on: two lines at a time, from either half, as evenly as the
// time that a tile takes. A burst of requests would hold up everything else, and a phase without any would leave the
// memory idle. Figures: docs/kernels/attention.md.
#pragma once

#include <cstdint>

namespace qtensor {
namespace {

struct FetchAhead {
  const uint8_t* at = nullptr;
  int64_t half = 0, left = 0;              // bytes of a half, and turns until it is all asked for
  uint32_t turns = 0, turns_per_time = 0;  // of 65536: how many are due, and how many each unit of time brings
  bool seldom = false;                     // few lines: it is enough to ask at every second group
  FetchAhead() = default;
  FetchAhead(const uint8_t* tile, int64_t bytes) : at(tile), half((bytes + 127) / 128 * 64), left(half / 64) {}

  // One turn. Whoever asks by turns does not let time pass as well.
  inline __attribute__((always_inline)) void ask() {
    if (left == 0) return;
    request(at);
    at += 64;
    left--;
  }
  // All turns shall be over when `whole` units of time have passed.
  void spread_over(int64_t whole) {
    turns_per_time = uint32_t((left << 16) / whole);
    seldom = turns_per_time <= 65536 / 24;
  }
  // So many units have passed. Where no turn is due the same lines are asked for once more: that costs less than a
  // branch that nobody can foresee. Where several are (one query and a large cache), all but one are left out.
  inline __attribute__((always_inline)) void pass(uint32_t time) {  // else gcc keeps the sums around it in memory
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
// What passes in quarters of a nanosecond with four queries: sixteen lanes of each phase between scores and values.
// Those two have times of their own in byte_dots.h. Only their proportions count.
constexpr uint32_t kPeakTime = 8, kPowerTime = 11, kWeightTime = 7;

}  // namespace
}  // namespace qtensor
