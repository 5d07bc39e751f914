// TQ1_0 and TQ2_0 in the form of folded_blocks.h: digits 0, 1, 2 for -1, 0, 1, and no scales, so that a block is one
// sum of bytes.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "blocks.h"
#include "kernels/avx512/folded_blocks.h"
#include "kernels/avx512/integer_kernels.h"
#include "kernels/portable/always_inline.h"
#include "kernels/x86/rows.h"

namespace qtensor {
namespace {

template <class Block>
struct FoldedTernary {
  static constexpr int64_t bytes = sizeof(Block);
  static constexpr bool has_min = false;
  static constexpr int offset = 1;
  struct Headers {
    __m128 d;
  };
  static QTENSOR_INLINE Headers headers(const uint8_t* const* place) {
    return {load_halves(place, offsetof(Block, d))};
  }
};

template <>
struct Folded<BlockTQ2_0> : FoldedTernary<BlockTQ2_0> {
  static QTENSOR_INLINE void values(const uint8_t* block, const Headers&, int, __m512i (&q)[4]) {
    for (int n = 0; n < 2; n++) {
      const __m512i pairs = _mm512_srlv_epi16(broadcast32(block + 32 * n), halves16(0, 2));
      q[2 * n] = _mm512_and_si512(pairs, _mm512_set1_epi8(3));
      q[2 * n + 1] = _mm512_and_si512(_mm512_srli_epi16(pairs, 4), _mm512_set1_epi8(3));
    }
  }
};

template <>
struct Folded<BlockTQ1_0> : FoldedTernary<BlockTQ1_0> {
  // After multiplication by a power of three, a byte's highest base-three digit is 3 * byte / 256.
  static QTENSOR_INLINE __m512i digits(__m512i bytes) {
    const __m512i one = _mm512_set1_epi8(1);
    const __m512i first = _mm512_maskz_mov_epi8(_mm512_cmpge_epu8_mask(bytes, _mm512_set1_epi8(86)), one);
    return _mm512_mask_add_epi8(first, _mm512_cmpge_epu8_mask(bytes, _mm512_set1_epi8(char(171))), first, one);
  }
  static QTENSOR_INLINE __m512i times(__m512i bytes, __m512i powers) {  // the lower byte of each product
    const __m512i even = _mm512_mullo_epi16(bytes, _mm512_and_si512(powers, _mm512_set1_epi16(255)));
    const __m512i odd = _mm512_mullo_epi16(_mm512_srli_epi16(bytes, 8), _mm512_srli_epi16(powers, 8));
    return choose(even, _mm512_set1_epi16(255), _mm512_slli_epi16(odd, 8));
  }
  static QTENSOR_INLINE __m512i three_times(__m512i bytes) {
    return _mm512_add_epi8(_mm512_add_epi8(bytes, bytes), bytes);
  }
  static QTENSOR_INLINE void values(const uint8_t* block, const Headers&, int, __m512i (&q)[4]) {
    static_assert(offsetof(BlockTQ1_0, qh) == 48);
    constexpr __mmask64 upper = 0xffffffff00000000;
    const __m512i first = broadcast32(block);  // each byte has five values, 32 apart
    const __m512i twice = _mm512_mask_add_epi8(first, upper, first, first);
    const __m512i pair = _mm512_mask_add_epi8(twice, upper, twice, first);  // times 1 and 3
    q[0] = digits(pair);
    q[1] = digits(three_times(three_times(pair)));
    const __m128i more = _mm_loadu_si128((const __m128i*)(block + 32));  // each byte has five values, 16 apart
    int last;
    __builtin_memcpy(&last, block + 48, 4);  // each byte has four values, 4 apart
    const __m512i then = _mm512_inserti64x4(first, _mm256_broadcastsi128_si256(more), 1);
    q[2] = digits(times(then, _mm512_inserti64x4(_mm512_set1_epi8(81),
                                                 _mm256_setr_epi64x(0x0101010101010101, 0x0101010101010101,
                                                                    0x0303030303030303, 0x0303030303030303),
                                                 1)));
    const __m512i end = _mm512_inserti32x4(_mm512_broadcast_i32x4(more), _mm_set1_epi32(last), 3);
    q[3] = digits(
        times(end, _mm512_setr_epi64(0x0909090909090909, 0x0909090909090909, 0x1b1b1b1b1b1b1b1b, 0x1b1b1b1b1b1b1b1b,
                                     0x5151515151515151, 0x5151515151515151, 0x0303030301010101, 0x1b1b1b1b09090909)));
  }
};

}  // namespace
}  // namespace qtensor
