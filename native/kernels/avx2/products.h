// Sums of products of bytes and of words, which are single instructions in AVX-VNNI. This folder is compiled once
// without it, as the family "avx2", and once with it, as "avxvnni".
#pragma once

#include <immintrin.h>

#include "kernels/portable/always_inline.h"

namespace qtensor {
namespace {

// Forces the value into a register. Otherwise gcc adds products as a tree and keeps its leaves on the stack.
QTENSOR_INLINE void in_register(__m256i& value) { __asm__("" : "+x"(value)); }

#if defined(__AVXVNNI__)
// Whether sums of byte products are dwords from the start. With AVX2 they are words for as many steps as fit.
constexpr bool kDwordSums = true;

// Adds to each dword of `sum` the products of four unsigned bytes of u with four signed bytes of s.
QTENSOR_INLINE __m256i add_byte_products(__m256i sum, __m256i u, __m256i s) {
  return _mm256_dpbusd_avx_epi32(sum, u, s);
}
// Adds to each dword of `sum` the products of its two words of a and b.
QTENSOR_INLINE __m256i add_word_products(__m256i sum, __m256i a, __m256i b) {
  return _mm256_dpwssd_avx_epi32(sum, a, b);
}
#else
constexpr bool kDwordSums = false;

// As above, but the sum of two products must fit in a word.
QTENSOR_INLINE __m256i add_byte_products(__m256i sum, __m256i u, __m256i s) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1)));
}
QTENSOR_INLINE __m256i add_word_products(__m256i sum, __m256i a, __m256i b) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
}
#endif

// Sums of products of unsigned bytes, as dwords or words. The scale of a sum is a dword, or is in both words of a
// dword.
QTENSOR_INLINE __m256i add_to_sums(__m256i sum, __m256i u, __m256i s) {
  return kDwordSums ? add_byte_products(sum, u, s) : _mm256_add_epi16(sum, _mm256_maddubs_epi16(u, s));
}
QTENSOR_INLINE __m256i add_scaled(__m256i total, __m256i sums, __m256i scale) {
  return kDwordSums ? _mm256_add_epi32(total, _mm256_mullo_epi32(sums, scale)) : add_word_products(total, sums, scale);
}
// Converts signed bytes to unsigned factors of such products: with 128 added for dword sums, else as magnitudes, whose
// signs the caller transfers to the other factors.
constexpr int kAboveSigned = kDwordSums ? 128 : 0;
QTENSOR_INLINE __m256i unsigned_of(__m256i v) {
  return kDwordSums ? _mm256_xor_si256(v, _mm256_set1_epi8(char(128))) : _mm256_abs_epi8(v);
}
QTENSOR_INLINE __m256i as_dwords(__m256i sums) {
  return kDwordSums ? sums : _mm256_madd_epi16(sums, _mm256_set1_epi16(1));
}

}  // namespace
}  // namespace qtensor
