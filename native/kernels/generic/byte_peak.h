// The rate of byte products of a family's instructions without memory accesses: an upper limit for its matrix kernels.
// The bytes are random, because processors run at a higher clock frequency with zeros.
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
