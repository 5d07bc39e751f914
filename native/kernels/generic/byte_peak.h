// How many byte products a family's own instructions make when nothing has to come from memory: a ceiling to judge the
// matrix kernels by. Random bytes, for zeros run at a higher clock.
#pragma once

#include <cstdint>

namespace qtensor {
namespace {

constexpr int64_t kPeakProducts = 64 * 64;

inline int32_t byte_peak(const int8_t* random, int64_t rounds) {
  int32_t sum = 0;
  for (int64_t r = 0; r < rounds; r++)
    for (int i = 0; i < 64; i++)
      for (int j = 0; j < 64; j++) sum += int32_t(random[64 * i + j]) * int8_t(random[j] + r);
  return sum;
}

}  // namespace
}  // namespace qtensor
