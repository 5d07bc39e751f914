// K-quant dot products with AVX2: vpmaddubsw computes sums of two products, which fit in 16 bits for all formats here,
// and vpmaddwd or vpdpwssd multiplies them by the scale of their sub-block. All operations are exact.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "blocks.h"
#include "kernels/avx2/products.h"
#include "kernels/portable/always_inline.h"
#include "kernels/x86/rows.h"

namespace qtensor {
namespace {

inline __m256i dot_u8_s8(__m256i u, __m256i s) { return add_byte_products(_mm256_setzero_si256(), u, s); }

// A format provides pair<C>, which unpacks two sub-blocks, and scale<J>, the 16-bit scales of sub-block J in the lanes
// of its products. Sub-blocks are multiplied as they are unpacked, because a block does not fit in sixteen registers.
template <class Quant, int C, int M>
QTENSOR_INLINE void add_pair(const uint8_t* block, const typename Quant::Scales& scales, const BlockQ8K* x,
                             int64_t stride, __m256i (&sum)[M]) {
  __m256i even, odd;
  Quant::template pair<C>(block, even, odd);
  const __m256i scale0 = Quant::template scale<2 * C>(scales), scale1 = Quant::template scale<2 * C + 1>(scales);
  for (int j = 0; j < M; j++) {
    const auto* q = (const __m256i*)x[j * stride].q + 2 * C;
    sum[j] = add_word_products(sum[j], Quant::products(even, _mm256_load_si256(q)), scale0);
    sum[j] = add_word_products(sum[j], Quant::products(odd, _mm256_load_si256(q + 1)), scale1);
    in_register(sum[j]);
  }
}
// Multiplies one block of a row with M batch rows, which are `stride` blocks apart.
template <class Quant, int M>
QTENSOR_INLINE void row_sums(const uint8_t* block, const typename Quant::Scales& scales, const BlockQ8K* x,
                             int64_t stride, __m256i (&sum)[M]) {
  for (int j = 0; j < M; j++) sum[j] = Quant::start(scales, x[j * stride]);
  add_pair<Quant, 0>(block, scales, x, stride, sum);
  add_pair<Quant, 1>(block, scales, x, stride, sum);
  add_pair<Quant, 2>(block, scales, x, stride, sum);
  add_pair<Quant, 3>(block, scales, x, stride, sum);
}

// The members of a format that k_quant_row needs.
template <class Quant>
struct OneRow256 {
  using Sum = __m256i;
  struct Unpacked {
    const uint8_t* block;
    typename Quant::Scales scales;
    __m128i min;
  };
  static __m256i products(__m256i q, __m256i x) { return _mm256_maddubs_epi16(q, x); }
  static __m256i dot(const Unpacked& w, const BlockQ8K& x) {
    __m256i sum[1];
    row_sums<Quant>(w.block, w.scales, &x, 0, sum);
    return sum[0];
  }
};

template <class Quant>
struct WithMins256 {
  static constexpr bool has_min = true;
  using Scales = __m256i;  // eight words, in both lanes
  static typename OneRow256<Quant>::Unpacked unpack(const uint8_t* block) {
    const ScaleBytes bytes = unpack_scales(block + 4);
    const __m128i scales = _mm_cvtepu8_epi16(_mm_cvtsi64_si128((long long)bytes.scale));
    const __m128i mins = _mm_cvtepu8_epi16(_mm_cvtsi64_si128((long long)bytes.min));
    return {block, _mm256_broadcastsi128_si256(scales), mins};
  }
  static RowScales row_scales(const uint8_t* block) { return {half_at(block), half_at(block + 2)}; }
  static __m256i start(Scales, const BlockQ8K&) { return _mm256_setzero_si256(); }
  template <int J>
  static __m256i scale(Scales scales) {
    return _mm256_shuffle_epi8(scales, _mm256_set1_epi16(short(2 * J | (2 * J + 1) << 8)));
  }
};

struct Q4_K256 : WithMins256<Q4_K256>, OneRow256<Q4_K256> {
  static constexpr int64_t bytes = sizeof(BlockQ4_K);
  template <int C>  // sub-blocks 2C and 2C + 1
  static QTENSOR_INLINE void pair(const uint8_t* block, __m256i& even, __m256i& odd) {
    const __m256i four = _mm256_set1_epi8(15);
    const __m256i raw = _mm256_loadu_si256((const __m256i*)(block + 16 + 32 * C));
    even = _mm256_and_si256(raw, four);
    odd = _mm256_and_si256(_mm256_srli_epi16(raw, 4), four);
  }
};

struct Q5_K256 : WithMins256<Q5_K256>, OneRow256<Q5_K256> {
  static constexpr int64_t bytes = sizeof(BlockQ5_K);
  template <int C>
  static QTENSOR_INLINE void pair(const uint8_t* block, __m256i& even, __m256i& odd) {
    const __m256i four = _mm256_set1_epi8(15), bit4 = _mm256_set1_epi8(16);
    const __m256i raw = _mm256_loadu_si256((const __m256i*)(block + 48 + 32 * C));
    const __m256i high = _mm256_loadu_si256((const __m256i*)(block + 16));  // bits 2C and 2C + 1 move to bit 4
    const __m256i low_bit = C < 2 ? _mm256_slli_epi16(high, C < 2 ? 4 - 2 * C : 0) : _mm256_srli_epi16(high, 2 * C - 4);
    const __m256i high_bit =
        C < 2 ? _mm256_slli_epi16(high, C < 2 ? 3 - 2 * C : 0) : _mm256_srli_epi16(high, 2 * C - 3);
    even = _mm256_or_si256(_mm256_and_si256(raw, four), _mm256_and_si256(low_bit, bit4));
    odd = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(raw, 4), four), _mm256_and_si256(high_bit, bit4));
  }
};

// Sixteen scales, of groups of 16.
struct Groups256 {
  struct Scales {
    __m256i all, low, high;  // all sixteen words; the first eight in both lanes; the last eight in both
  };
  static Scales spread(__m128i bytes) {
    const __m256i all = _mm256_cvtepi8_epi16(bytes);
    return {all, _mm256_permute4x64_epi64(all, 0x44), _mm256_permute4x64_epi64(all, 0xee)};
  }
  template <int J>  // two groups of 16: words 2J and 2J + 1 of all
  static __m256i scale(const Scales& scales) {
    constexpr int word = 2 * J % 8, first = 2 * word | (2 * word + 1) << 8;
    const __m256i order = _mm256_set_m128i(_mm_set1_epi16(short(first + 0x0202)), _mm_set1_epi16(short(first)));
    return _mm256_shuffle_epi8(J < 4 ? scales.low : scales.high, order);
  }
  static __m256i start(const Scales& scales, const BlockQ8K& x, int offset_bits) {
    const __m256i sums = _mm256_madd_epi16(scales.all, _mm256_load_si256((const __m256i*)x.sums16));
    return _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_slli_epi32(sums, offset_bits));
  }
};

struct Q6_K256 : Groups256, OneRow256<Q6_K256> {
  static constexpr int64_t bytes = sizeof(BlockQ6_K), d_at = offsetof(BlockQ6_K, d);
  static constexpr bool has_min = false;
  static constexpr int offset_bits = 5;
  template <int C>  // sub-blocks 2C and 2C + 1: low nibbles of 64 bytes, or their high nibbles
  static QTENSOR_INLINE void pair(const uint8_t* block, __m256i& even, __m256i& odd) {
    constexpr int n = C / 2;
    const __m256i four = _mm256_set1_epi8(15), two = _mm256_set1_epi8(48);
    __m256i low0 = _mm256_loadu_si256((const __m256i*)(block + 64 * n));
    __m256i low1 = _mm256_loadu_si256((const __m256i*)(block + 64 * n + 32));
    const __m256i high = _mm256_loadu_si256((const __m256i*)(block + 128 + 32 * n));
    const __m256i bits0 = C % 2 == 0 ? _mm256_slli_epi16(high, 4) : high;
    const __m256i bits1 = C % 2 == 0 ? _mm256_slli_epi16(high, 2) : _mm256_srli_epi16(high, 2);
    if (C % 2 == 1) {
      low0 = _mm256_srli_epi16(low0, 4);
      low1 = _mm256_srli_epi16(low1, 4);
    }
    even = _mm256_or_si256(_mm256_and_si256(low0, four), _mm256_and_si256(bits0, two));
    odd = _mm256_or_si256(_mm256_and_si256(low1, four), _mm256_and_si256(bits1, two));
  }
  static Scales scales_of(const uint8_t* block) {
    return spread(_mm_loadu_si128((const __m128i*)(block + offsetof(BlockQ6_K, scales))));
  }
  static Unpacked unpack(const uint8_t* block) { return {block, scales_of(block), _mm_setzero_si128()}; }
  static __m256i start(const Scales& scales, const BlockQ8K& x) { return Groups256::start(scales, x, offset_bits); }
  static RowScales row_scales(const uint8_t* block) {
    return {half_at(block + offsetof(BlockQ6_K, d)), _mm_setzero_ps()};
  }
};

}  // namespace
}  // namespace qtensor
