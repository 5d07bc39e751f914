// The operations that kernels/portable/word_dots.h needs, for AVX2. A group of four bytes is expanded to two pairs of
// words, 0 with 2 and 1 with 3, by a mask and a shift; the other operand is stored in the same order. Byte products
// (vpmaddubsw) would saturate.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/portable/always_inline.h"
#include "products.h"
#include "vec16.h"

namespace qtensor {
namespace {

using QueryLane = int16_t;
using Words = __m256i;
constexpr int kWordBytes = 32, kDotVectors = 2;
constexpr int64_t kBlockLanes = kDotVectors * kWordBytes / 4;
// Time of one group of a block of kBlockLanes lanes, for four queries, in the units of fetch_ahead.h.
constexpr uint32_t kScoreGroupTime = 7, kValueGroupTime = kScoreGroupTime;  // equal, because all lanes are words

inline Words w_load(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline void w_store(void* p, Words a) { _mm256_storeu_si256((__m256i*)p, a); }
inline Words w_bytes(int x) { return _mm256_set1_epi8(char(x)); }
inline Words w_ints(int32_t x) { return _mm256_set1_epi32(x); }
inline Words w_and(Words a, Words b) { return _mm256_and_si256(a, b); }
inline Words w_xor(Words a, Words b) { return _mm256_xor_si256(a, b); }
// The lowest BITS bits of each byte of a, and the other bits of b.
template <int BITS>
inline Words w_lower_bits(Words a, Words b) {
  const Words lower = w_bytes((1 << BITS) - 1);
  return _mm256_or_si256(w_and(a, lower), _mm256_andnot_si256(lower, b));
}
template <int BITS>
inline Words w_right(Words a) {
  return _mm256_srli_epi16(a, BITS);
}
template <int BITS>
inline Words w_left(Words a) {
  return _mm256_slli_epi16(a, BITS);
}
// A table of sixteen levels plus 128, or of the levels themselves if SIGNED.
template <bool SIGNED>
inline Words w_table(const uint8_t* sixteen) {
  const Words all = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)sixteen));
  return SIGNED ? w_xor(all, w_bytes(128)) : all;
}
// Looks up the lowest BITS bits of each byte; the upper bits are ignored.
template <int BITS>
inline Words w_look_up(Words table, Words numbers) {
  return _mm256_shuffle_epi8(table, w_and(numbers, w_bytes((1 << BITS) - 1)));
}

inline int32_t four_bytes_at(const void* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  return four;
}
inline void lay_query(const int8_t* bytes, int64_t dim, QueryLane* out) {
  for (int64_t i = 0; i < dim; i += 4) {
    out[i] = bytes[i];
    out[i + 1] = bytes[i + 2];
    out[i + 2] = bytes[i + 1];
    out[i + 3] = bytes[i + 3];
  }
}
inline void lay_weights(int16_t* out, V16 whole) {
  const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15, 0, 1, 4, 5, 2, 3, 6, 7,
                                         8, 9, 12, 13, 10, 11, 14, 15);
  const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(whole.low), _mm256_cvtps_epi32(whole.high));
  _mm256_storeu_si256((__m256i*)out, _mm256_shuffle_epi8(_mm256_permute4x64_epi64(words, 0xd8), order));
}

constexpr bool kSignedValues = false;

template <class Lane>
constexpr int dot_vectors() {
  return kDotVectors;
}
template <class Lane, int QUERIES, int VECTORS>
struct DotSums {
  static constexpr bool kSigned = false;
  Words sum[QUERIES][VECTORS];
  QTENSOR_INLINE explicit DotSums(const int32_t* start) {
    for (int i = 0; i < QUERIES; i++)
      for (int v = 0; v < VECTORS; v++) sum[i][v] = w_ints(start[i]);
  }
  QTENSOR_INLINE void add(const Lane* const* a, int64_t group, const Words (&bytes)[VECTORS]) {
    const __m256i low = _mm256_set1_epi16(255);
    __m256i even[VECTORS], odd[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
      even[v] = _mm256_and_si256(bytes[v], low);
      odd[v] = _mm256_srli_epi16(bytes[v], 8);
    }
    for (int i = 0; i < QUERIES; i++) {
      const __m256i x = w_ints(four_bytes_at(a[i] + 4 * group)), y = w_ints(four_bytes_at(a[i] + 4 * group + 2));
      for (int v = 0; v < VECTORS; v++) {
        sum[i][v] = add_word_products(sum[i][v], even[v], x);
        sum[i][v] = add_word_products(sum[i][v], odd[v], y);
      }
    }
  }
  QTENSOR_INLINE Words total(int i, int v) const { return sum[i][v]; }
};

}  // namespace
}  // namespace qtensor
