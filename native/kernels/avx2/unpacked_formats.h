// Q2_K, Q3_K and IQ4_XS in the form that integer_kernels.h requires of a format.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "blocks.h"
#include "kernels/avx2/integer_kernels.h"
#include "kernels/portable/always_inline.h"
#include "kernels/portable/unpacked_blocks.h"
#include "kernels/x86/sub_blocks.h"

namespace qtensor {
namespace {

template <class Block>
struct Quant256;  // not defined for formats without such a kernel

// Bits PLACE, PLACE + 1, ... of each byte, moved to bit TO.
template <int PLACE, int TO>
QTENSOR_INLINE __m256i moved(__m256i bytes) {
  if constexpr (PLACE >= TO)
    return _mm256_srli_epi16(bytes, PLACE - TO);
  else
    return _mm256_slli_epi16(bytes, TO - PLACE);
}
// Sub-blocks 2C and 2C + 1 of two-bit values.
template <int C>
QTENSOR_INLINE void two_bits(const uint8_t* qs, __m256i& even, __m256i& odd) {
  const __m256i raw = _mm256_loadu_si256((const __m256i*)(qs + C / 2 * 32)), two = _mm256_set1_epi8(3);
  even = _mm256_and_si256(moved<C % 2 * 4, 0>(raw), two);
  odd = _mm256_and_si256(moved<C % 2 * 4 + 2, 0>(raw), two);
}

template <>
struct Quant256<BlockQ2_K> : Groups256 {
  static constexpr int64_t bytes = sizeof(BlockQ2_K), d_at = offsetof(BlockQ2_K, d);
  static constexpr bool has_min = true;
  static constexpr int largest = 3, offset_bits = 0;
  template <int C>
  static QTENSOR_INLINE void pair(const uint8_t* block, __m256i& even, __m256i& odd) {
    two_bits<C>(block + offsetof(BlockQ2_K, qs), even, odd);
  }
  static QTENSOR_INLINE __m128i nibbles(const uint8_t* block, int shift) {
    const __m128i raw = _mm_loadu_si128((const __m128i*)block);
    return _mm_and_si128(_mm_srli_epi16(raw, shift), _mm_set1_epi8(15));
  }
  static QTENSOR_INLINE Scales scales_of(const uint8_t* block) { return spread(nibbles(block, 0)); }
  static QTENSOR_INLINE __m256i mins_of(const uint8_t* block) { return _mm256_cvtepu8_epi16(nibbles(block, 4)); }
  static __m256i start(const Scales&, const BlockQ8K&) { return _mm256_setzero_si256(); }
  static __m256i products(__m256i q, __m256i x) { return _mm256_maddubs_epi16(q, x); }
};

template <>
struct Quant256<BlockQ3_K> : Groups256 {
  static constexpr int64_t bytes = sizeof(BlockQ3_K), d_at = offsetof(BlockQ3_K, d);
  static constexpr bool has_min = false;
  static constexpr int largest = 7, offset_bits = 2;
  template <int C>
  static QTENSOR_INLINE void pair(const uint8_t* block, __m256i& even, __m256i& odd) {
    const __m256i high = _mm256_loadu_si256((const __m256i*)block), bit2 = _mm256_set1_epi8(4);
    two_bits<C>(block + offsetof(BlockQ3_K, qs), even, odd);
    even = _mm256_or_si256(even, _mm256_and_si256(moved<2 * C, 2>(high), bit2));
    odd = _mm256_or_si256(odd, _mm256_and_si256(moved<2 * C + 1, 2>(high), bit2));
  }
  static QTENSOR_INLINE Scales scales_of(const uint8_t* block) {
    static_assert(offsetof(BlockQ3_K, scales) == 96 && bytes == 110);
    const __m128i raw = _mm_loadu_si128((const __m128i*)(block + 94));  // reads no byte beyond the block
    const __m128i twice = _mm_shuffle_epi8(raw, _mm_setr_epi8(2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4, 5, 6, 7, 8, 9));
    const __m128i third =
        _mm_shuffle_epi8(raw, _mm_setr_epi8(10, 11, 12, 13, 10, 11, 12, 13, 10, 11, 12, 13, 10, 11, 12, 13));
    const __m128i four = _mm_and_si128(_mm_srlv_epi32(twice, _mm_setr_epi32(0, 0, 4, 4)), _mm_set1_epi8(15));
    const __m128i left = _mm_sllv_epi32(third, _mm_setr_epi32(4, 2, 0, 0));
    const __m128i two = _mm_and_si128(_mm_srlv_epi32(left, _mm_setr_epi32(0, 0, 0, 2)), _mm_set1_epi8(48));
    return spread(_mm_sub_epi8(_mm_or_si128(four, two), _mm_set1_epi8(32)));
  }
  static __m256i start(const Scales& scales, const BlockQ8K& x) { return Groups256::start(scales, x, offset_bits); }
  static __m256i products(__m256i q, __m256i x) { return _mm256_maddubs_epi16(q, x); }
};

// Levels are signed; their signs are transferred to the activations.
template <>
struct Quant256<BlockIQ4_XS> {
  static constexpr int64_t bytes = sizeof(BlockIQ4_XS), d_at = 0;
  static constexpr bool has_min = false;
  using Scales = __m256i;  // eight words, in both lanes
  template <int C>
  static QTENSOR_INLINE void pair(const uint8_t* block, __m256i& even, __m256i& odd) {
    even = levels_of(kLevelsIQ4, nibbles_of_16(block + offsetof(BlockIQ4_XS, qs) + 32 * C));
    odd = levels_of(kLevelsIQ4, nibbles_of_16(block + offsetof(BlockIQ4_XS, qs) + 32 * C + 16));
  }
  static QTENSOR_INLINE __m256i scale_dwords(const uint8_t* block) {
    uint16_t high;
    int low;
    __builtin_memcpy(&high, block + offsetof(BlockIQ4_XS, scales_h), 2);
    __builtin_memcpy(&low, block + offsetof(BlockIQ4_XS, scales_l), 4);
    const __m256i by_two = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14), by_four = _mm256_add_epi32(by_two, by_two);
    const __m256i four = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(low), by_four), _mm256_set1_epi32(15));
    const __m256i two =
        _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(high << 4), by_two), _mm256_set1_epi32(48));
    return _mm256_sub_epi32(_mm256_or_si256(four, two), _mm256_set1_epi32(32));
  }
  static QTENSOR_INLINE Scales scales_of(const uint8_t* block) {
    const __m256i dwords = scale_dwords(block);
    return _mm256_permute4x64_epi64(_mm256_packs_epi32(dwords, dwords), 0x88);
  }
  template <int J>
  static QTENSOR_INLINE __m256i scale(Scales scales) {
    return _mm256_shuffle_epi8(scales, _mm256_set1_epi16(short(2 * J | (2 * J + 1) << 8)));
  }
  static __m256i start(Scales, const BlockQ8K&) { return _mm256_setzero_si256(); }
  static QTENSOR_INLINE __m256i products(__m256i q, __m256i x) {
    return _mm256_maddubs_epi16(_mm256_abs_epi8(q), _mm256_sign_epi8(x, q));
  }
};

}  // namespace
}  // namespace qtensor
