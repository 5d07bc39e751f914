// The operations that kernels/portable/word_dots.h needs, for AVX-512 with VNNI. Scores and values are sums of four
// byte products per instruction. For values, a weight of 15 bits is two unsigned bytes, and levels are the signed
// operand.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/portable/always_inline.h"
#include "vec16.h"

namespace qtensor {
namespace {

using QueryLane = int8_t;
using Words = __m512i;
constexpr int kWordBytes = 64, kDotVectors = 4;
constexpr int64_t kBlockLanes = kDotVectors * kWordBytes / 4;
// Time of one group of a block of kBlockLanes lanes, for four queries, in the units of fetch_ahead.h.
constexpr uint32_t kScoreGroupTime = 14, kValueGroupTime = 26;

inline Words w_load(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline void w_store(void* p, Words a) { _mm512_storeu_si512(p, a); }
inline Words w_bytes(int x) { return _mm512_set1_epi8(char(x)); }
inline Words w_ints(int32_t x) { return _mm512_set1_epi32(x); }
inline Words w_and(Words a, Words b) { return _mm512_and_si512(a, b); }
template <int BITS>
inline Words w_right(Words a) {
  return _mm512_srli_epi16(a, BITS);
}
template <int BITS>
inline Words w_left(Words a) {
  return _mm512_slli_epi16(a, BITS);
}
inline Words w_xor(Words a, Words b) { return _mm512_xor_si512(a, b); }
// The lowest BITS bits of each byte of a, and the other bits of b.
template <int BITS>
inline Words w_lower_bits(Words a, Words b) {
  return _mm512_ternarylogic_epi32(a, b, w_bytes((1 << BITS) - 1), 0xe4);
}
// A table of sixteen levels plus 128, or of the levels themselves if SIGNED.
template <bool SIGNED>
inline Words w_table(const uint8_t* sixteen) {
  const Words all = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)sixteen));
  return SIGNED ? w_xor(all, w_bytes(128)) : all;
}
// Looks up the lowest BITS bits of each byte; the upper bits are ignored.
template <int BITS>
inline Words w_look_up(Words table, Words numbers) {
#ifdef __AVX512VBMI__  // uses six bits of a number; the table is repeated four times
  return _mm512_permutexvar_epi8(numbers, table);
#else
  return _mm512_shuffle_epi8(table, w_and(numbers, w_bytes((1 << BITS) - 1)));
#endif
}

inline int32_t four_bytes_at(const void* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  return four;
}
inline void lay_query(const int8_t* bytes, int64_t dim, QueryLane* out) { __builtin_memcpy(out, bytes, size_t(dim)); }
// Stores each four weights as their four lower bytes and then their four upper bytes.
inline void lay_weights(int16_t* out, V16 whole) {
  const __m256i order =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
  const __m256i words = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(whole));
  _mm256_storeu_si256((__m256i*)out, _mm256_shuffle_epi8(words, order));
}
constexpr bool kSignedValues = true;

// Registers of lanes that are processed together: as many as leave registers for all sums.
template <class Lane>
constexpr int dot_vectors() {
  return sizeof(Lane) == sizeof(QueryLane) ? kDotVectors : kDotVectors / 2;
}
template <class Lane, int QUERIES, int VECTORS>
struct DotSums;
template <int QUERIES, int VECTORS>
struct DotSums<int8_t, QUERIES, VECTORS> {
  static constexpr bool kSigned = false;
  Words sum[QUERIES][VECTORS];
  QTENSOR_INLINE explicit DotSums(const int32_t* start) {
    for (int i = 0; i < QUERIES; i++)
      for (int v = 0; v < VECTORS; v++) sum[i][v] = w_ints(start[i]);
  }
  QTENSOR_INLINE void add(const int8_t* const* a, int64_t group, const Words (&bytes)[VECTORS]) {
    for (int i = 0; i < QUERIES; i++) {
      const Words x = w_ints(four_bytes_at(a[i] + 4 * group));
      for (int v = 0; v < VECTORS; v++) sum[i][v] = _mm512_dpbusd_epi32(sum[i][v], bytes[v], x);
    }
  }
  QTENSOR_INLINE Words total(int i, int v) const { return sum[i][v]; }
};
template <int QUERIES, int VECTORS>
struct DotSums<int16_t, QUERIES, VECTORS> {
  static constexpr bool kSigned = true;
  Words low[QUERIES][VECTORS], high[QUERIES][VECTORS];
  QTENSOR_INLINE explicit DotSums(const int32_t*) {  // levels are signed: there is no excess to subtract
    for (int i = 0; i < QUERIES; i++)
      for (int v = 0; v < VECTORS; v++) low[i][v] = high[i][v] = _mm512_setzero_si512();
  }
  QTENSOR_INLINE void add(const int16_t* const* a, int64_t group, const Words (&bytes)[VECTORS]) {
    for (int i = 0; i < QUERIES; i++) {
      const int16_t* const four = a[i] + 4 * group;
      const Words x = w_ints(four_bytes_at(four)), y = w_ints(four_bytes_at(four + 2));
      for (int v = 0; v < VECTORS; v++) {
        low[i][v] = _mm512_dpbusd_epi32(low[i][v], x, bytes[v]);
        high[i][v] = _mm512_dpbusd_epi32(high[i][v], y, bytes[v]);
      }
    }
  }
  QTENSOR_INLINE Words total(int i, int v) const {
    return _mm512_add_epi32(low[i][v], _mm512_slli_epi32(high[i][v], 8));
  }
};

}  // namespace
}  // namespace qtensor
