// The ceiling of byte products with AVX2 (generic/byte_peak.h tells what for): vpmaddubsw, vpmaddwd, vpaddd.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace qtensor {
namespace {

constexpr int kPeakOperands = 8;
constexpr int64_t kPeakProducts = 32 * kPeakOperands;

inline int32_t byte_peak(const int8_t* random, int64_t rounds) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i a[kPeakOperands], sums[4] = {};
  for (int i = 0; i < kPeakOperands; i++) a[i] = _mm256_loadu_si256((const __m256i*)(random + 32 * i));
  __m256i b = _mm256_loadu_si256((const __m256i*)random);
  for (int64_t r = 0; r < rounds; r++) {
    for (int i = 0; i < kPeakOperands; i++)
      sums[i % 4] = _mm256_add_epi32(sums[i % 4], _mm256_madd_epi16(_mm256_maddubs_epi16(a[i], b), ones));
    b = _mm256_add_epi8(b, a[0]);  // or every product of a round would be that of the round before
  }
  int32_t total = 0;
  for (const __m256i& sum : sums) {
    alignas(32) int32_t lanes[8];
    _mm256_store_si256((__m256i*)lanes, sum);
    for (const int32_t lane : lanes) total = int32_t(uint32_t(total) + uint32_t(lane));
  }
  return total;
}

}  // namespace
}  // namespace qtensor
