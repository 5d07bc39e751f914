// Blocks of 256 whose values and scales are so small that their products fit in a byte: Q2_K (3 * 15) and Q3_K (-4..3
// times -32..31). A shuffle looks up each value's product in the table of its group, so that a whole block is one sum
// of bytes without scales.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "blocks.h"
#include "kernels/avx512/four_headers.h"
#include "kernels/avx512/integer_kernels.h"
#include "kernels/portable/always_inline.h"

namespace qtensor {
namespace {

// (a & b) | c; and bits of a where those of b are set, else bits of c
QTENSOR_INLINE __m512i and_or(__m512i a, __m512i b, __m512i c) { return _mm512_ternarylogic_epi32(a, b, c, 0xea); }
QTENSOR_INLINE __m512i choose(__m512i a, __m512i b, __m512i c) { return _mm512_ternarylogic_epi32(a, b, c, 0xe2); }

// A format. headers() unpacks the headers of four rows. values() computes the products of row r as unsigned bytes in
// order, with `offset` added. They are looked up by the lower four bits of an index whose highest bit is clear.
template <class Block>
struct Folded;

template <>
struct Folded<BlockQ2_K> {
  static constexpr int64_t bytes = sizeof(BlockQ2_K);
  static constexpr bool has_min = true;
  static constexpr int offset = 0;
  struct Headers {
    __m512i mins[2];  // of groups 0..7 and 8..15, as words in each row's lane
    __m128 d, dmin;
  };
  static QTENSOR_INLINE Headers headers(const uint8_t* const* place) {
    const __m512i zero = _mm512_setzero_si512();
    const __m512i mins = _mm512_and_si512(_mm512_srli_epi16(rows_16(place, 0), 4), _mm512_set1_epi8(15));
    Headers h;
    h.mins[0] = _mm512_unpacklo_epi8(mins, zero);
    h.mins[1] = _mm512_unpackhi_epi8(mins, zero);
    int both[4];
    for (int r = 0; r < 4; r++) __builtin_memcpy(&both[r], place[r] + offsetof(BlockQ2_K, d), 4);
    const RowScales scales = split_row_scales(_mm_setr_epi32(both[0], both[1], both[2], both[3]));
    h.d = scales.d;
    h.dmin = scales.dmin;
    return h;
  }
  static QTENSOR_INLINE void values(const uint8_t* block, const Headers&, int, __m512i (&q)[4]) {
    // dword c of lane l is the table 0, 1, 2 and 3 times the scale of group 4 c + l
    const __m512i header = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)block));
    const __m512i twice = _mm512_setr_epi32(int(0x80008000), int(0x80048004), int(0x80088008), int(0x800c800c),
                                            int(0x80018001), int(0x80058005), int(0x80098009), int(0x800d800d),
                                            int(0x80028002), int(0x80068006), int(0x800a800a), int(0x800e800e),
                                            int(0x80038003), int(0x80078007), int(0x800b800b), int(0x800f800f));
    const __m512i scale = _mm512_and_si512(_mm512_shuffle_epi8(header, twice), _mm512_set1_epi16(15));
    const __m512i table = _mm512_mullo_epi16(scale, _mm512_set1_epi32(0x03020100));
    const __m512i swapped = _mm512_shuffle_epi32(table, _MM_PERM_BADC);
    for (int n = 0; n < 2; n++) {  // the second value of two uses the second dword of its table
      const __m512i pairs = _mm512_srlv_epi16(broadcast32(block + offsetof(BlockQ2_K, qs) + 32 * n), halves16(0, 2));
      const __m512i index = and_or(pairs, _mm512_set1_epi8(0x33), _mm512_set1_epi8(0x40));
      q[2 * n] = _mm512_shuffle_epi8(n == 0 ? table : swapped, index);
      q[2 * n + 1] = _mm512_shuffle_epi8(n == 0 ? table : swapped, _mm512_srli_epi16(index, 4));
    }
  }
};

template <>
struct Folded<BlockQ3_K> {
  static constexpr int64_t bytes = sizeof(BlockQ3_K);
  static constexpr bool has_min = false;
  static constexpr int offset = 124;
  struct Headers {
    __m512i scales[2];  // of groups 0..3 and 8..11, and of the others, as words in each row's lane, 0..63
    __m128 d, dmin;
  };
  static QTENSOR_INLINE Headers headers(const uint8_t* const* place) {
    static_assert(offsetof(BlockQ3_K, scales) == 96 && offsetof(BlockQ3_K, d) == 108 && bytes == 110);
    const __m512i raw = rows_16(place, 94), zero = _mm512_setzero_si512();
    // Each dword has four scales: the nibbles of dwords 0, 0, 1, 1 and two-bit fields of dword 2.
    const __m512i twice = _mm512_shuffle_epi8(raw, every_lane(0x05040302, 0x05040302, 0x09080706, 0x09080706));
    const __m512i third = _mm512_shuffle_epi8(raw, every_lane(0x0d0c0b0a, 0x0d0c0b0a, 0x0d0c0b0a, 0x0d0c0b0a));
    const __m512i four = _mm512_srlv_epi32(twice, every_lane(0, 4, 0, 4));
    const __m512i two = _mm512_rolv_epi32(third, every_lane(4, 0, 2, 30));
    const __m512i scales = _mm512_and_si512(choose(four, _mm512_set1_epi8(15), two), _mm512_set1_epi8(63));
    Headers h;
    h.scales[0] = _mm512_unpacklo_epi8(scales, zero);
    h.scales[1] = _mm512_unpackhi_epi8(scales, zero);
    const __m512i last = _mm512_zextsi128_si512(_mm_setr_epi32(3, 7, 11, 15));
    const __m128i ends = _mm512_castsi512_si128(_mm512_permutexvar_epi32(last, raw));
    h.d = _mm_cvtph_ps(_mm_shuffle_epi8(ends, _mm_setr_epi8(2, 3, 6, 7, 10, 11, 14, 15, 0, 0, 0, 0, 0, 0, 0, 0)));
    return h;
  }
  // The table of a group, as words a = 0..3: the scale times byte a - 4 + 4 * b for b = 1, 0. Scales have 32 added.
  static QTENSOR_INLINE __m512i table(__m512i scales, int row) {
    constexpr long long one = 0x0001000100010001;
    const __m512i word =
        _mm512_add_epi16(_mm512_setr_epi64(0, 4 * one, one, 5 * one, 2 * one, 6 * one, 3 * one, 7 * one),
                         _mm512_set1_epi16(short(8 * row)));
    const __m512i products =
        _mm512_mullo_epi16(_mm512_permutexvar_epi16(word, scales), _mm512_set1_epi64(int64_t(0xff03fe02fd01fc00)));
    // offset - 32 * (a - 4 + 4 * b)
    return _mm512_add_epi8(products, _mm512_set1_epi64(int64_t(0x9c1cbc3cdc5cfc7c)));
  }
  static QTENSOR_INLINE void values(const uint8_t* block, const Headers& h, int row, __m512i (&q)[4]) {
    const __m512i first = table(h.scales[0], row), second = table(h.scales[1], row), four = _mm512_set1_epi8(15);
    // Bits 0 and 2 of four bits, or 4 and 6, are the third bits of two values. If clear, they set bits 0 and 4 of the
    // index.
    const __m512i high = _mm512_srlv_epi16(broadcast32(block), halves16(0, 1));
    const auto third = [&](__m512i bits, int more) {
      const __m512i clear = _mm512_broadcast_i32x4(
          _mm_setr_epi8(0x11, 0x10, 0x11, 0x10, 0x01, 0, 0x01, 0, 0x11, 0x10, 0x11, 0x10, 0x01, 0, 0x01, 0));
      return _mm512_shuffle_epi8(_mm512_or_si512(clear, _mm512_set1_epi8(char(more))), _mm512_and_si512(bits, four));
    };
    const auto index = [&](int n, __m512i thirds) {
      const __m512i turns = _mm512_inserti64x4(_mm512_set1_epi32(1), _mm256_set1_epi32(31), 1);
      const __m512i pairs = _mm512_rolv_epi32(broadcast32(block + offsetof(BlockQ3_K, qs) + 32 * n), turns);
      return and_or(pairs, _mm512_set1_epi8(0x66), thirds);
    };
    const __m512i low = index(0, third(high, 0)), upper = index(1, third(_mm512_srli_epi16(high, 4), 0x88));
    q[0] = _mm512_shuffle_epi8(first, low);
    q[1] = _mm512_shuffle_epi8(second, _mm512_srli_epi16(low, 4));
    q[2] = _mm512_shuffle_epi8(first, _mm512_and_si512(upper, four));
    q[3] = _mm512_shuffle_epi8(second, _mm512_and_si512(_mm512_srli_epi16(upper, 4), four));
  }
};

}  // namespace
}  // namespace qtensor
