// The virtual vector of 16 float lanes as one zmm register. Same names and bits as generic/vec16.h.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "blocks.h"

namespace qtensor {
namespace {

using V16 = __m512;

inline __mmask16 first_lanes(int64_t n) { return __mmask16((1u << n) - 1); }
inline V16 v_set(float x) { return _mm512_set1_ps(x); }
inline V16 v_load(const float* p) { return _mm512_loadu_ps(p); }
inline void v_store(float* p, V16 a) { _mm512_storeu_ps(p, a); }
inline V16 v_load_first(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
inline void v_store_first(float* p, V16 a, int64_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), a); }
inline V16 v_add(V16 a, V16 b) { return _mm512_add_ps(a, b); }
inline V16 v_sub(V16 a, V16 b) { return _mm512_sub_ps(a, b); }
inline V16 v_mul(V16 a, V16 b) { return _mm512_mul_ps(a, b); }
inline V16 v_div(V16 a, V16 b) { return _mm512_div_ps(a, b); }
inline V16 v_max(V16 a, V16 b) { return _mm512_max_ps(a, b); }
inline V16 v_min(V16 a, V16 b) { return _mm512_min_ps(a, b); }
inline V16 v_fma(V16 a, V16 b, V16 c) { return _mm512_fmadd_ps(a, b, c); }
inline V16 v_round(V16 a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline V16 v_scale(V16 a, V16 n) { return _mm512_scalef_ps(a, n); }
inline float v_reduce_add(V16 a) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
// v_reduce_add of four vectors, to y[0..3]: the same additions, with the last steps of all four in one register.
inline void v_store_sums(float* y, const V16 (&a)[4]) {
  __m128 four[4];
  for (int r = 0; r < 4; r++) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a[r]), _mm512_extractf32x8_ps(a[r], 1));
    four[r] = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  }
  const __m128 ab = _mm_add_ps(_mm_unpacklo_ps(four[0], four[1]), _mm_unpackhi_ps(four[0], four[1]));
  const __m128 cd = _mm_add_ps(_mm_unpacklo_ps(four[2], four[3]), _mm_unpackhi_ps(four[2], four[3]));
  _mm_storeu_ps(y, _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab)));
}
inline float v_reduce_max(V16 a) {
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline float half_to_float(half h) { return _cvtsh_ss(h); }
inline V16 v_load_half(const half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline void v_store_half(half* p, V16 a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline V16 v_load_bf16(const uint16_t* p) {
  const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}
template <int COUNT>
inline uint32_t v_top_magnitude(const V16 (&v)[COUNT]) {
  __m512i top = _mm512_setzero_si512();
  for (const V16& a : v)
    top = _mm512_max_epu32(top, _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fffffff)));
  return (uint32_t)_mm512_reduce_max_epu32(top);
}
inline void v_store_bytes(int8_t* p, V16 a, V16 scale) {
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(a, scale))));
}
inline V16 v_load_int(const int32_t* p) { return _mm512_cvtepi32_ps(_mm512_loadu_si512(p)); }
template <int WIDTH>
inline V16 v_swap(V16 a) {
  if constexpr (WIDTH == 8) return _mm512_shuffle_f32x4(a, a, 0x4e);
  if constexpr (WIDTH == 4) return _mm512_shuffle_f32x4(a, a, 0xb1);
  return _mm512_permute_ps(a, WIDTH == 2 ? 0x4e : 0xb1);
}
inline V16 v_max_magnitude(V16 a, V16 b) {
  const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(b), _mm512_set1_epi32(0x7fffffff));
  return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), magnitude));
}
inline V16 v_one_above(V16 a, V16 b) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), _mm512_set1_ps(1.0f));
}
// Converts four times sixteen numbers to 64 bytes in registers, because a wide load would wait for narrower stores.
inline __m512i v_bytes_of(const V16* v, V16 scale) {
  __m512i whole[4];
  for (int i = 0; i < 4; i++) whole[i] = _mm512_cvtps_epi32(_mm512_mul_ps(v[i], scale));
  const __m512i words = _mm512_packs_epi32(whole[0], whole[1]), more = _mm512_packs_epi32(whole[2], whole[3]);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, _mm512_packs_epi16(words, more));
}
inline void v_store_block(BlockQ8K& block, const V16 (&v)[16], V16 scale) {
  const __m512i ones = _mm512_set1_epi16(1);
  __m512i fours[4];  // sums of four bytes
  for (int i = 0; i < 4; i++) {
    const __m512i bytes = v_bytes_of(v + 4 * i, scale);
    _mm512_store_si512(block.q + 64 * i, bytes);
    fours[i] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), bytes);
  }
  const __m512i low = _mm512_madd_epi16(_mm512_packs_epi32(fours[0], fours[1]), ones);
  const __m512i high = _mm512_madd_epi16(_mm512_packs_epi32(fours[2], fours[3]), ones);
  const __m512i sums = _mm512_madd_epi16(_mm512_packs_epi32(low, high), ones);  // [lane][64 bytes]
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m256i sixteens = _mm512_cvtepi32_epi16(_mm512_permutexvar_epi32(order, sums));
  _mm256_store_si256((__m256i*)block.sums16, sixteens);
  const __m256i two = _mm256_madd_epi16(sixteens, _mm256_set1_epi16(1));
  _mm_store_si128((__m128i*)block.sums32, _mm256_cvtepi32_epi16(two));
}

}  // namespace
}  // namespace qtensor
