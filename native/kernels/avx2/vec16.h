// The virtual vector of 16 float lanes as two ymm registers. Same names and bits as generic/vec16.h.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "blocks.h"
#include "products.h"

namespace qtensor {
namespace {

struct V16 {
  __m256 low, high;
};

inline V16 v_set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline V16 v_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void v_store(float* p, V16 a) {
  _mm256_storeu_ps(p, a.low);
  _mm256_storeu_ps(p + 8, a.high);
}
inline V16 v_load_first(const float* p, int64_t n) {
  float padded[16] = {};
  __builtin_memcpy(padded, p, size_t(n) * sizeof(float));
  return v_load(padded);
}
inline void v_store_first(float* p, V16 a, int64_t n) {
  float whole[16];
  v_store(whole, a);
  __builtin_memcpy(p, whole, size_t(n) * sizeof(float));
}
inline V16 v_add(V16 a, V16 b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline V16 v_sub(V16 a, V16 b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline V16 v_mul(V16 a, V16 b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline V16 v_div(V16 a, V16 b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline V16 v_max(V16 a, V16 b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline V16 v_min(V16 a, V16 b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline V16 v_fma(V16 a, V16 b, V16 c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline V16 v_round(V16 a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.low, mode), _mm256_round_ps(a.high, mode)};
}
inline __m256 power_of_two(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline V16 v_scale(V16 a, V16 n) {
  return {_mm256_mul_ps(a.low, power_of_two(n.low)), _mm256_mul_ps(a.high, power_of_two(n.high))};
}
inline float v_reduce_add(V16 a) {
  const __m256 eight = _mm256_add_ps(a.low, a.high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
// v_reduce_add of four vectors, to y[0..3]: the same additions, with the last steps of all four in one register.
inline void v_store_sums(float* y, const V16 (&a)[4]) {
  __m128 four[4];
  for (int r = 0; r < 4; r++) {
    const __m256 eight = _mm256_add_ps(a[r].low, a[r].high);
    four[r] = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  }
  const __m128 ab = _mm_add_ps(_mm_unpacklo_ps(four[0], four[1]), _mm_unpackhi_ps(four[0], four[1]));
  const __m128 cd = _mm_add_ps(_mm_unpacklo_ps(four[2], four[3]), _mm_unpackhi_ps(four[2], four[3]));
  _mm_storeu_ps(y, _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab)));
}
inline float v_reduce_max(V16 a) {
  const __m256 eight = _mm256_max_ps(a.low, a.high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline float half_to_float(half h) { return _cvtsh_ss(h); }
inline V16 v_load_half(const half* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + 1))};
}
inline void v_store_half(half* p, V16 a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a.low, mode));
  _mm_storeu_si128((__m128i*)p + 1, _mm256_cvtps_ph(a.high, mode));
}
inline V16 v_load_bf16(const uint16_t* p) {
  const __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  const __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p + 1));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
}
template <int COUNT>
inline uint32_t v_top_magnitude(const V16 (&v)[COUNT]) {
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);  // magnitudes are also positive as signed integers
  __m256i eight = _mm256_setzero_si256();
  for (const V16& a : v) {
    eight = _mm256_max_epi32(eight, _mm256_and_si256(_mm256_castps_si256(a.low), mask));
    eight = _mm256_max_epi32(eight, _mm256_and_si256(_mm256_castps_si256(a.high), mask));
  }
  __m128i top = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  top = _mm_max_epi32(top, _mm_shuffle_epi32(top, 0x4e));
  top = _mm_max_epi32(top, _mm_shuffle_epi32(top, 0xb1));
  return (uint32_t)_mm_cvtsi128_si32(top);
}
inline void v_store_bytes(int8_t* p, V16 a, V16 scale) {
  const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(a.low, scale.low));
  const __m256i high = _mm256_cvtps_epi32(_mm256_mul_ps(a.high, scale.high));
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
inline V16 v_load_int(const int32_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_loadu_si256((const __m256i*)p)),
          _mm256_cvtepi32_ps(_mm256_loadu_si256((const __m256i*)p + 1))};
}
template <int WIDTH>
inline V16 v_swap(V16 a) {
  if constexpr (WIDTH == 8) return {a.high, a.low};
  if constexpr (WIDTH == 4) return {_mm256_permute2f128_ps(a.low, a.low, 1), _mm256_permute2f128_ps(a.high, a.high, 1)};
  constexpr int order = WIDTH == 2 ? 0x4e : 0xb1;
  return {_mm256_permute_ps(a.low, order), _mm256_permute_ps(a.high, order)};
}
inline V16 v_max_magnitude(V16 a, V16 b) {
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  const __m256i low = _mm256_and_si256(_mm256_castps_si256(b.low), mask);
  const __m256i high = _mm256_and_si256(_mm256_castps_si256(b.high), mask);
  return {_mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a.low), low)),
          _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a.high), high))};
}
inline V16 v_one_above(V16 a, V16 b) {
  const __m256 one = _mm256_set1_ps(1.0f);
  return {_mm256_and_ps(_mm256_cmp_ps(a.low, b.low, _CMP_GT_OQ), one),
          _mm256_and_ps(_mm256_cmp_ps(a.high, b.high, _CMP_GT_OQ), one)};
}
// Sums of 16 consecutive bytes, 128 bytes at a time: the sums of each 16 are four dwords of one lane, and two
// horizontal additions reduce eight such lanes.
inline __m128i sums_of_128(const int8_t* q) {
  const __m256i zero = _mm256_setzero_si256(), ones = _mm256_set1_epi8(1);
  __m256i sum[4];
  for (int i = 0; i < 4; i++) {
    const __m256i bytes = _mm256_loadu_si256((const __m256i*)(q + 32 * i));
    sum[i] = add_byte_products(zero, ones, bytes);
  }
  const __m256i all = _mm256_hadd_epi32(_mm256_hadd_epi32(sum[0], sum[1]), _mm256_hadd_epi32(sum[2], sum[3]));
  const __m128i even = _mm256_castsi256_si128(all), odd = _mm256_extracti128_si256(all, 1);
  return _mm_packs_epi32(_mm_unpacklo_epi32(even, odd), _mm_unpackhi_epi32(even, odd));
}
inline void v_store_block(BlockQ8K& block, const V16 (&v)[16], V16 scale) {
  for (int i = 0; i < 16; i++) v_store_bytes(block.q + 16 * i, v[i], scale);
  const __m128i low = sums_of_128(block.q), high = sums_of_128(block.q + 128), ones = _mm_set1_epi16(1);
  _mm_store_si128((__m128i*)block.sums16, low);
  _mm_store_si128((__m128i*)block.sums16 + 1, high);
  _mm_store_si128((__m128i*)block.sums32, _mm_packs_epi32(_mm_madd_epi16(low, ones), _mm_madd_epi16(high, ones)));
}

}  // namespace
}  // namespace qtensor
