// The peak rate of byte products with NEON (purpose: generic/byte_peak.h): smmla if available, else sdot.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace qtensor {
namespace {

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int kPeakPerOperation = 32;
inline int32x4_t peak_operation(int32x4_t sum, int8x16_t a, int8x16_t b) { return vmmlaq_s32(sum, a, b); }
#else
constexpr int kPeakPerOperation = 16;
inline int32x4_t peak_operation(int32x4_t sum, int8x16_t a, int8x16_t b) { return vdotq_s32(sum, a, b); }
#endif
constexpr int kPeakOperands = 12;  // enough for the latency times four pipes
constexpr int64_t kPeakProducts = kPeakPerOperation * kPeakOperands;

inline int32_t byte_peak(const int8_t* random, int64_t rounds) {
  int8x16_t a[kPeakOperands];
  int32x4_t sums[kPeakOperands];
  for (int i = 0; i < kPeakOperands; i++) a[i] = vld1q_s8(random + 16 * i);
  for (auto& sum : sums) sum = vdupq_n_s32(0);
  int8x16_t b = a[0];
  for (int64_t r = 0; r < rounds; r++) {
    for (int i = 0; i < kPeakOperands; i++) sums[i] = peak_operation(sums[i], a[i], b);
    b = vaddq_s8(b, a[0]);  // otherwise, every round would compute the same products
  }
  int32_t total = 0;
  for (const int32x4_t sum : sums) total = int32_t(uint32_t(total) + uint32_t(vaddvq_s32(sum)));
  return total;
}

}  // namespace
}  // namespace qtensor
