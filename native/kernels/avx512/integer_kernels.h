// K-quant dot products with AVX-512 VNNI. One vpdpbusd multiplies 64 weights with 64 activations. Two results, whose
// lanes fit in 16 bits, are packed and multiplied by their sub-block scales in one vpdpwssd. All operations are exact.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "blocks.h"
#include "kernels/avx512/four_headers.h"
#include "kernels/x86/rows.h"

namespace qtensor {
namespace {

// Forces the value into a register. Otherwise, if a value is used twice, gcc loads it from memory twice.
inline void in_register(__m512i& value) { __asm__("" : "+v"(value)); }

inline __m256i dot_u8_s8(__m256i u, __m256i s) { return _mm256_dpbusd_epi32(_mm256_setzero_si256(), u, s); }

inline __m128i reduce_four(__m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  const __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m256i two = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
  return _mm_add_epi32(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1));
}

// `low` in the words of the lower 256 bits, `high` in those of the upper 256
inline __m512i halves16(short low, short high) {
  return _mm512_inserti64x4(_mm512_set1_epi16(low), _mm256_set1_epi16(high), 1);
}
inline __m512i broadcast32(const uint8_t* p) { return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)p)); }

struct KQuant512 {
  using Sum = __m512i;
  static constexpr bool can_split = false;
  struct Unpacked {
    __m512i q[4];      // weights 64i .. 64i+63 as unsigned bytes
    __m512i scale[2];  // words in the order of the sums of q[0], q[1] and of q[2], q[3] after vpackssdw
    __m128i min;       // eight 16-bit mins
    __m512i start;     // the value at which the sum begins
  };
  static __m512i sum_of(const Unpacked& w, const BlockQ8K& x, __m512i start) {
    __m512i dot[4];
    for (int i = 0; i < 4; i++)
      dot[i] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), w.q[i], _mm512_load_si512(x.q + 64 * i));
    start = _mm512_dpwssd_epi32(start, _mm512_packs_epi32(dot[0], dot[1]), w.scale[0]);
    return _mm512_dpwssd_epi32(start, _mm512_packs_epi32(dot[2], dot[3]), w.scale[1]);
  }
};

// Unpacks values [64 c, 64 c + 64) to bytes in q[c], with the format's `part`.
template <class Quant>
inline void all_parts(const uint8_t* block, __m512i (&q)[4]) {
  q[0] = Quant::template part<0>(block);
  q[1] = Quant::template part<1>(block);
  q[2] = Quant::template part<2>(block);
  q[3] = Quant::template part<3>(block);
}

// q[c] holds sub-blocks 2c and 2c + 1 in two 128-bit lanes each.
struct WithMins512 : KQuant512 {
  static constexpr bool has_min = true;
  static void unpack_header(const uint8_t* packed, Unpacked& w) {
    const ScaleBytes bytes = unpack_scales(packed);
    const __m512i words = _mm512_castsi128_si512(_mm_cvtepu8_epi16(_mm_cvtsi64_si128((long long)bytes.scale)));
    const __m256i even = _mm256_setr_epi16(0, 0, 0, 0, 2, 2, 2, 2, 0, 0, 0, 0, 2, 2, 2, 2);
    const __m512i order =
        _mm512_inserti64x4(_mm512_castsi256_si512(even), _mm256_add_epi16(even, _mm256_set1_epi16(1)), 1);
    w.scale[0] = _mm512_permutexvar_epi16(order, words);
    w.scale[1] = _mm512_permutexvar_epi16(_mm512_add_epi16(order, _mm512_set1_epi16(4)), words);
    w.min = _mm_cvtepu8_epi16(_mm_cvtsi64_si128((long long)bytes.min));
  }
  static __m512i nibbles(const uint8_t* qs) {  // low nibbles of 32 bytes, then their high nibbles
    return _mm512_and_si512(_mm512_srlv_epi16(broadcast32(qs), halves16(0, 4)), _mm512_set1_epi8(15));
  }
  static RowScales row_scales(const uint8_t* block) { return {half_at(block), half_at(block + 2)}; }
  static __m512i dot(const Unpacked& w, const BlockQ8K& x) { return sum_of(w, x, _mm512_setzero_si512()); }
  static FourHeaders headers(const uint8_t* const* place) { return headers_with_mins(place); }
};

struct Q4_K512 : WithMins512 {
  static constexpr int64_t bytes = sizeof(BlockQ4_K);
  static constexpr bool can_split = true;
  static void split_values(const uint8_t* block, __m512i (&q)[4]) {
    const __m512i four = _mm512_set1_epi8(15);
    for (int n = 0; n < 2; n++) {
      __m512i raw = _mm512_loadu_si512(block + 16 + 64 * n);
      in_register(raw);
      q[2 * n] = _mm512_and_si512(raw, four);
      q[2 * n + 1] = _mm512_and_si512(_mm512_srli_epi16(raw, 4), four);
    }
  }
  template <int PART>
  static __m512i part(const uint8_t* block) {
    return nibbles(block + 16 + 32 * PART);
  }
  static void values(const uint8_t* block, __m512i (&q)[4]) { all_parts<Q4_K512>(block, q); }
  static Unpacked unpack(const uint8_t* block) {
    Unpacked w;
    unpack_header(block + 4, w);
    values(block, w.q);
    return w;
  }
};

struct Q5_K512 : WithMins512 {
  static constexpr int64_t bytes = sizeof(BlockQ5_K);
  template <int PART>
  static __m512i part(const uint8_t* block) {
    const __m512i high = broadcast32(block + 16);  // bits 2 PART and 2 PART + 1 move to bit 4
    const __m512i moved = PART < 2 ? _mm512_sllv_epi16(high, halves16(4 - 2 * PART, 3 - 2 * PART))
                                   : _mm512_srlv_epi16(high, halves16(2 * PART - 4, 2 * PART - 3));
    return _mm512_or_si512(nibbles(block + 48 + 32 * PART), _mm512_and_si512(moved, _mm512_set1_epi8(16)));
  }
  static void values(const uint8_t* block, __m512i (&q)[4]) { all_parts<Q5_K512>(block, q); }
  static Unpacked unpack(const uint8_t* block) {
    Unpacked w;
    unpack_header(block + 4, w);
    values(block, w.q);
    return w;
  }
};

// Sixteen scales, one for each 128-bit lane of q[0..3]. The offset of 32 is subtracted by the sums of activations.
struct Q6_K512 : KQuant512 {
  static FourHeaders headers(const uint8_t* const* place) { return headers_with_offset(place); }
  static constexpr int64_t bytes = sizeof(BlockQ6_K);
  static constexpr bool has_min = false;
  struct Unpacked : KQuant512::Unpacked {
    __m256i scale16;
  };
  template <int PART>
  static __m512i part(const uint8_t* block) {
    const __m512i low = _mm512_loadu_si512(block + 64 * (PART / 2)), high = broadcast32(block + 128 + 32 * (PART / 2));
    const __m512i nibble = PART % 2 == 0 ? low : _mm512_srli_epi16(low, 4);
    const __m512i two =
        PART % 2 == 0 ? _mm512_sllv_epi16(high, halves16(4, 2)) : _mm512_srlv_epi16(high, halves16(0, 2));
    return _mm512_or_si512(_mm512_and_si512(nibble, _mm512_set1_epi8(15)), _mm512_and_si512(two, _mm512_set1_epi8(48)));
  }
  static void values(const uint8_t* block, __m512i (&q)[4]) { all_parts<Q6_K512>(block, q); }
  static Unpacked unpack(const uint8_t* block) {
    Unpacked w;
    values(block, w.q);
    w.scale16 = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(block + 192)));
    const __m512i words = _mm512_castsi256_si512(w.scale16);
    const __m512i order =
        _mm512_setr_epi64(0x0000000000000000, 0x0004000400040004, 0x0001000100010001, 0x0005000500050005,
                          0x0002000200020002, 0x0006000600060006, 0x0003000300030003, 0x0007000700070007);
    w.scale[0] = _mm512_permutexvar_epi16(order, words);
    w.scale[1] = _mm512_permutexvar_epi16(_mm512_add_epi16(order, _mm512_set1_epi16(8)), words);
    return w;
  }
  static __m512i dot(const Unpacked& w, const BlockQ8K& x) {
    const __m256i sums = _mm256_load_si256((const __m256i*)x.sums16);
    const __m256i offset =
        _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_slli_epi32(_mm256_madd_epi16(w.scale16, sums), 5));
    return sum_of(w, x, _mm512_zextsi256_si512(offset));
  }
  static RowScales row_scales(const uint8_t* block) {
    return {half_at(block + offsetof(BlockQ6_K, d)), _mm_setzero_ps()};
  }
};

}  // namespace
}  // namespace qtensor
