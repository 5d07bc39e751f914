// The peak rate of byte products with VNNI (purpose: generic/byte_peak.h): vpdpbusd.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace qtensor {
namespace {

constexpr int kPeakSums = 16;
constexpr int64_t kPeakProducts = 64 * kPeakSums;

inline int32_t byte_peak(const int8_t* random, int64_t rounds) {
  __m512i sums[kPeakSums], a[4];
  // different operands, or the compiler would compute only four of sixteen
  for (int i = 0; i < kPeakSums; i++) sums[i] = _mm512_loadu_si512(random + 64 * i);
  for (int i = 0; i < 4; i++) a[i] = _mm512_loadu_si512(random + 64 * i);
  const __m512i b = _mm512_loadu_si512(random + 256);
  for (int64_t r = 0; r < rounds; r++)
    for (int i = 0; i < kPeakSums; i++) sums[i] = _mm512_dpbusd_epi32(sums[i], a[i % 4], b);
  __m512i total = sums[0];
  for (int i = 1; i < kPeakSums; i++) total = _mm512_add_epi32(total, sums[i]);
  return _mm512_reduce_add_epi32(total);
}

}  // namespace
}  // namespace qtensor
