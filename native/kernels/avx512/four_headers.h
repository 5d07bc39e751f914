// Unpacks the headers of the blocks of four rows together: one row in each 128-bit lane of a zmm register.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "blocks.h"
#include "kernels/x86/rows.h"

namespace qtensor {
namespace {

// The headers of the blocks of four rows.
struct FourHeaders {
  __m512i scales[2];  // words, eight in each row's lane: of eight sub-blocks, or of groups 0..7 and 8..15
  __m512i mins;       // words, eight in each row's lane
  __m128 d, dmin;
};

inline __m512i rows_16(const uint8_t* const* place, int64_t at) {  // sixteen bytes of each row
  const auto load = [&](int r) { return _mm_loadu_si128((const __m128i*)(place[r] + at)); };
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(load(0)), load(1), 1);
  const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(load(2)), load(3), 1);
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
inline __m512i every_lane(int a, int b, int c, int d) { return _mm512_broadcast_i32x4(_mm_setr_epi32(a, b, c, d)); }

// The sum of each lane's dwords, in the dword of that row.
inline __m128i reduce_lanes(__m512i a) {
  a = _mm512_add_epi32(a, _mm512_shuffle_epi32(a, _MM_PERM_BADC));
  a = _mm512_add_epi32(a, _mm512_shuffle_epi32(a, _MM_PERM_CDAB));
  return _mm512_castsi512_si128(
      _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), a));
}
inline __m512i sums_of(const int16_t* eight) { return _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)eight)); }

// Words 0..7 of lane `row`, each four times, in the order of the sums of 64 weights after vpackssdw. `pattern`
// selects the word of each four.
inline __m512i spread_scales(__m512i words, int row, __m512i pattern) {
  return _mm512_permutexvar_epi16(_mm512_add_epi16(pattern, _mm512_set1_epi16(short(8 * row))), words);
}

// Each lane of the input holds the first 16 bytes of a block of Q4_K or Q5_K. Returns its eight scales as bytes, then
// its eight mins.
inline __m512i scale_and_min_bytes(__m512i raw) {
  const __m512i ab = _mm512_shuffle_epi32(raw, _MM_PERM_CCBB), c = _mm512_shuffle_epi32(raw, _MM_PERM_DDDD);
  const __m512i low = _mm512_and_si512(_mm512_srlv_epi32(ab, every_lane(0, 2, 0, 2)),
                                       every_lane(0x3f3f3f3f, 0x30303030, 0x3f3f3f3f, 0x30303030));
  const __m512i high =
      _mm512_and_si512(_mm512_srlv_epi32(c, every_lane(0, 0, 0, 4)), every_lane(0, 0x0f0f0f0f, 0, 0x0f0f0f0f));
  return _mm512_or_si512(low, high);
}
// d of each lane's row, then dmin of each lane's row.
inline __m256 d_and_dmin(__m512i raw) {
  const __m512i order = _mm512_zextsi128_si512(_mm_setr_epi32(0, 4, 8, 12));
  const __m128i pairs = _mm512_castsi512_si128(_mm512_permutexvar_epi32(order, raw));
  const __m128i stride = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  return _mm256_cvtph_ps(_mm_shuffle_epi8(pairs, stride));
}

inline FourHeaders headers_with_mins(const uint8_t* const* place) {
  const __m512i raw = rows_16(place, 0), bytes = scale_and_min_bytes(raw), zero = _mm512_setzero_si512();
  FourHeaders h;
  h.scales[0] = h.scales[1] = _mm512_unpacklo_epi8(bytes, zero);
  h.mins = _mm512_unpackhi_epi8(bytes, zero);
  const __m256 both = d_and_dmin(raw);
  h.d = _mm256_castps256_ps128(both);
  h.dmin = _mm256_extractf128_ps(both, 1);
  return h;
}

inline FourHeaders headers_with_offset(const uint8_t* const* place) {
  const __m512i bytes = rows_16(place, offsetof(BlockQ6_K, scales));
  FourHeaders h;
  h.scales[0] = _mm512_srai_epi16(_mm512_unpacklo_epi8(bytes, bytes), 8);
  h.scales[1] = _mm512_srai_epi16(_mm512_unpackhi_epi8(bytes, bytes), 8);
  h.d = load_halves(place, offsetof(BlockQ6_K, d));
  return h;
}

}  // namespace
}  // namespace qtensor
