// The peak rate of byte products (purpose: generic/byte_peak.h): vpmaddubsw, vpmaddwd and vpaddd, or vpdpbusd.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "products.h"

namespace qtensor {
namespace {

constexpr int kPeakOperands = kDwordSums ? 12 : 8, kPeakSums = kDwordSums ? 12 : 4;  // vpdpbusd takes 4 to 5 cycles
constexpr int64_t kPeakProducts = 32 * kPeakOperands;

inline int32_t byte_peak(const int8_t* random, int64_t rounds) {
  __m256i sums[kPeakSums] = {};
  __m256i b = _mm256_loadu_si256((const __m256i*)random);
  const __m256i step = b;
  for (int64_t r = 0; r < rounds; r++) {
#pragma GCC unroll 12
    for (int i = 0; i < kPeakOperands; i++) {
      const __m256i a = _mm256_loadu_si256((const __m256i*)(random + 32 * i));
      sums[i % kPeakSums] = add_byte_products(sums[i % kPeakSums], b, a);
      in_register(sums[i % kPeakSums]);
    }
    b = _mm256_add_epi8(b, step);  // otherwise, every round would compute the same products
  }
  __m256i all = _mm256_setzero_si256();
#pragma GCC unroll 12
  for (const __m256i& sum : sums) all = _mm256_add_epi32(all, sum);
  alignas(32) int32_t lanes[8];
  _mm256_store_si256((__m256i*)lanes, all);
  int32_t total = 0;
  for (const int32_t lane : lanes) total = int32_t(uint32_t(total) + uint32_t(lane));
  return total;
}

}  // namespace
}  // namespace qtensor
