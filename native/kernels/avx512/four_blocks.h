// Formats in blocks of 32, four adjacent blocks of a row at a time: a block in each 128-bit lane, its weights 0..15 in
// one register and 16..31 in another, as unsigned bytes with `offset` added.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "blocks.h"
#include "kernels/portable/always_inline.h"
#include "kernels/portable/unpacked_blocks.h"

namespace qtensor {
namespace {

// Sixteen bytes of each of four blocks, beginning at byte `at`.
template <int64_t BYTES>
inline __m512i four_lanes(const uint8_t* at) {
  const auto load = [&](int i) { return _mm_loadu_si128((const __m128i*)(at + i * BYTES)); };
  __m512i all = _mm512_castsi128_si512(load(0));
  all = _mm512_inserti32x4(all, load(1), 1);
  all = _mm512_inserti32x4(all, load(2), 2);
  return _mm512_inserti32x4(all, load(3), 3);
}
inline void split_nibbles(__m512i bytes, __m512i (&q)[2]) {
  const __m512i four = _mm512_set1_epi8(15);
  q[0] = _mm512_and_si512(bytes, four);
  q[1] = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), four);
}
inline __m512i levels_above(const int8_t (&table)[16], int offset) {
  const __m128i levels = _mm_add_epi8(_mm_loadu_si128((const __m128i*)table), _mm_set1_epi8(char(offset)));
  return _mm512_broadcast_i32x4(levels);
}

// The first two words of four blocks: the first word of each, then the second word of each.
template <int64_t BYTES>
inline __m128i four_headers(const uint8_t* four) {
  constexpr int16_t next = BYTES / 2;
  if constexpr (BYTES + 4 <= 32) {
    const __m256i a = _mm256_loadu_si256((const __m256i*)four),
                  b = _mm256_loadu_si256((const __m256i*)(four + 2 * BYTES));
    const __m256i order = _mm256_setr_epi16(0, next, 16, 16 + next, 1, next + 1, 17, 17 + next, 0, 0, 0, 0, 0, 0, 0, 0);
    return _mm256_castsi256_si128(_mm256_permutex2var_epi16(a, order, b));
  } else {
    const __m512i a = _mm512_loadu_si512(four), b = _mm512_loadu_si512(four + 2 * BYTES);
    const __m512i order = _mm512_castsi128_si512(_mm_setr_epi16(0, next, 32, 32 + next, 1, next + 1, 33, 33 + next));
    return _mm512_castsi512_si128(_mm512_permutex2var_epi16(a, order, b));
  }
}

// Scales of four blocks of four rows, [block][row]. row[r] has four halves in its low or high part.
template <bool HIGH>
inline __m512 block_scales(const __m128i (&row)[4]) {
  const auto join = [](__m128i a, __m128i b) { return HIGH ? _mm_unpackhi_epi16(a, b) : _mm_unpacklo_epi16(a, b); };
  const __m128i a = join(row[0], row[1]), b = join(row[2], row[3]);
  return _mm512_cvtph_ps(_mm256_set_m128i(_mm_unpackhi_epi32(a, b), _mm_unpacklo_epi32(a, b)));
}

template <class Block>
struct Four32;
// The header of most of these formats: one half, or two.
template <class Block, bool HAS_MIN = false>
struct HalvesInFront {
  static constexpr int64_t bytes = sizeof(Block);
  static constexpr bool has_min = HAS_MIN;
  static QTENSOR_INLINE void scales(const uint8_t* const* place, __m512& d, __m512& m) {
    __m128i row[4];
    for (int r = 0; r < 4; r++) row[r] = four_headers<bytes>(place[r]);
    d = block_scales<false>(row);
    if (has_min) m = block_scales<true>(row);
  }
};

template <>
struct Four32<BlockQ8_0> : HalvesInFront<BlockQ8_0> {
  static constexpr int offset = 128;
  static QTENSOR_INLINE void values(const uint8_t* four, __m512i (&q)[2]) {
    const __m512i middle = _mm512_set1_epi8(char(128));
    for (int h = 0; h < 2; h++) q[h] = _mm512_xor_si512(four_lanes<bytes>(four + 2 + 16 * h), middle);
  }
};
template <>
struct Four32<BlockQ4_0> : HalvesInFront<BlockQ4_0> {
  static constexpr int offset = 8;
  static QTENSOR_INLINE void values(const uint8_t* four, __m512i (&q)[2]) {
    split_nibbles(four_lanes<bytes>(four + 2), q);
  }
};
template <>
struct Four32<BlockQ4_1> : HalvesInFront<BlockQ4_1, true> {
  static constexpr int offset = 0;
  static QTENSOR_INLINE void values(const uint8_t* four, __m512i (&q)[2]) {
    split_nibbles(four_lanes<bytes>(four + 4), q);
  }
};
template <>
struct Four32<BlockIQ4_NL> : HalvesInFront<BlockIQ4_NL> {
  static constexpr int offset = 128;
  static QTENSOR_INLINE void values(const uint8_t* four, __m512i (&q)[2]) {
    const __m512i levels = levels_above(kLevelsIQ4, offset);
    split_nibbles(four_lanes<bytes>(four + 2), q);
    for (__m512i& half : q) half = _mm512_shuffle_epi8(levels, half);
  }
};

// The fifth bits of Q5_0 and Q5_1 precede the sixteen bytes of nibbles.
template <class Block, bool HAS_MIN>
struct WithFifth : HalvesInFront<Block, HAS_MIN> {
  static constexpr int64_t bytes = sizeof(Block);
  static constexpr int offset = HAS_MIN ? 0 : 16;
  static QTENSOR_INLINE void values(const uint8_t* four, __m512i (&q)[2]) {
    constexpr int64_t bits_at = bytes - 20;
    split_nibbles(four_lanes<bytes>(four + bits_at + 4), q);
    for (int h = 0; h < 2; h++) {
      uint64_t bits = 0;
      for (int i = 0; i < 4; i++) {
        uint16_t sixteen;
        __builtin_memcpy(&sixteen, four + i * bytes + bits_at + 2 * h, 2);
        bits |= uint64_t(sixteen) << (16 * i);
      }
      q[h] = _mm512_mask_add_epi8(q[h], bits, q[h], _mm512_set1_epi8(16));
    }
  }
};
template <>
struct Four32<BlockQ5_0> : WithFifth<BlockQ5_0, false> {};
template <>
struct Four32<BlockQ5_1> : WithFifth<BlockQ5_1, true> {};

template <>
struct Four32<BlockMXFP4> {
  static constexpr int64_t bytes = sizeof(BlockMXFP4);
  static constexpr bool has_min = false;
  static constexpr int offset = 128;
  static QTENSOR_INLINE void values(const uint8_t* four, __m512i (&q)[2]) {
    const __m512i levels = levels_above(kLevelsMXFP4, offset);
    split_nibbles(four_lanes<bytes>(four + 1), q);
    for (__m512i& half : q) half = _mm512_shuffle_epi8(levels, half);
  }
  static QTENSOR_INLINE void scales(const uint8_t* const* place, __m512& d, __m512&) {
    alignas(64) float power[16];
    for (int i = 0; i < 4; i++)
      for (int r = 0; r < 4; r++) power[4 * i + r] = power_of_two(place[r][i * bytes]);
    d = _mm512_load_ps(power);
  }
};

}  // namespace
}  // namespace qtensor
