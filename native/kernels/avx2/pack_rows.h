// Packs one block of 32 rows into L1, so that the packed kernels can multiply weights in rows.
//
// The block is read four dwords at a time from its beginning. In formats whose size is not a multiple of four, a dword
// of a line overlaps two of these dwords and is combined from both.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernel_table.h"
#include "kernels/portable/always_inline.h"
#include "packed_weights.h"

namespace qtensor {
namespace {

constexpr int64_t kRowsAtATime = 8;  // a register holds a dword of each

// Transposes four dwords of eight rows: v[i] becomes dword i of all rows.
QTENSOR_INLINE void transpose_dwords(const uint8_t* rows, int64_t row_bytes, __m256i* v) {
#pragma GCC unroll 4
  for (int r = 0; r < 4; r++) {
    const uint8_t* const row = rows + r * row_bytes;
    const __m128i low = _mm_loadu_si128((const __m128i*)row);
    v[r] =
        _mm256_inserti128_si256(_mm256_castsi128_si256(low), _mm_loadu_si128((const __m128i*)(row + 4 * row_bytes)), 1);
  }
  const __m256i ab = _mm256_unpacklo_epi32(v[0], v[1]), ab2 = _mm256_unpackhi_epi32(v[0], v[1]);
  const __m256i cd = _mm256_unpacklo_epi32(v[2], v[3]), cd2 = _mm256_unpackhi_epi32(v[2], v[3]);
  v[0] = _mm256_unpacklo_epi64(ab, cd);
  v[1] = _mm256_unpackhi_epi64(ab, cd);
  v[2] = _mm256_unpacklo_epi64(ab2, cd2);
  v[3] = _mm256_unpackhi_epi64(ab2, cd2);
}
// The dwords that begin `BYTES` bytes before those of `v`; `before` holds the dwords preceding `v`.
template <int BYTES>
QTENSOR_INLINE __m256i dwords_before(__m256i before, __m256i v) {
  if constexpr (BYTES == 0) return v;
  return _mm256_or_si256(_mm256_srli_epi32(before, 32 - 8 * BYTES), _mm256_slli_epi32(v, 8 * BYTES));
}
QTENSOR_INLINE void store_lower_words(uint8_t* to, __m256i v) {
  const __m256i words = _mm256_packus_epi32(_mm256_and_si256(v, _mm256_set1_epi32(0xffff)), v);
  _mm_store_si128((__m128i*)to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(words, 0xd8)));
}

// The line, or half line, that begins at this byte of the file's block; -1 if there is none.
template <class P>
constexpr int line_from(int byte) {
  for (int u = 0; u < P::lines; u++)
    if (P::dword(u) == byte) return u;
  return -1;
}
template <class P>
constexpr int half_from(int byte) {
  if constexpr (P::halves > 0)
    for (int i = 0; i < P::halves; i++)
      if (P::half(i) == byte) return i;
  return -1;
}

// Stores the lines and half lines that begin 0 to `BEFORE` bytes before byte AT, at which `v` begins.
template <class P, int AT, int BEFORE = 3>
QTENSOR_INLINE void store_dwords(__m256i before, __m256i v, uint8_t* halves, uint8_t* lines) {
  constexpr int kLine = line_from<P>(AT - BEFORE), kHalf = half_from<P>(AT - BEFORE);
  if constexpr (kLine >= 0)
    _mm256_store_si256((__m256i*)(lines + kLineBytes * kLine), dwords_before<BEFORE>(before, v));
  if constexpr (kHalf >= 0) store_lower_words(halves + 2 * kGroupRows * kHalf, dwords_before<BEFORE>(before, v));
  if constexpr (BEFORE > 0) store_dwords<P, AT, BEFORE - 1>(before, v, halves, lines);
}
// Packs from byte DONE on. For each four dwords of eight rows, one line is prefetched: in all, half of a later group.
template <class P, int DONE = 0>
QTENSOR_INLINE void pack_from(const uint8_t* rows, int64_t row_bytes, const uint8_t* later, __m256i before,
                              uint8_t* halves, uint8_t* lines) {
  if constexpr (DONE + 4 <= P::bytes) {
    constexpr int kEnd = P::bytes / 4 * 4, kAt = DONE + 16 <= kEnd ? DONE : kEnd - 16;
    __builtin_prefetch(later, 0, 2);
    __m256i v[5] = {before};
    transpose_dwords(rows + kAt, row_bytes, v + 1);
    if constexpr (kAt >= DONE) store_dwords<P, kAt>(v[0], v[1], halves, lines);
    if constexpr (kAt + 4 >= DONE) store_dwords<P, kAt + 4>(v[1], v[2], halves, lines);
    if constexpr (kAt + 8 >= DONE) store_dwords<P, kAt + 8>(v[2], v[3], halves, lines);
    store_dwords<P, kAt + 12>(v[3], v[4], halves, lines);
    pack_from<P, kAt + 16>(rows, row_bytes, later + 64, v[4], halves, lines);
  } else if constexpr (DONE < P::bytes) {  // the block ends in a half
    __m256i v[4];
    transpose_dwords(rows + P::bytes - 16, row_bytes, v);
    store_lower_words(halves + 2 * kGroupRows * half_from<P>(DONE), _mm256_srli_epi32(v[3], 16));
  }
}
template <class P>
constexpr int64_t kPrefetchedByPacking = kGroupRows / kRowsAtATime * ((P::bytes / 4 + 3) / 4);  // in lines

// Packs one block of 32 rows and prefetches kPrefetchedByPacking lines, beginning at `later`.
template <class P>
__attribute__((noinline)) void pack_rows(const uint8_t* rows, int64_t row_bytes, const uint8_t* later, uint8_t* to) {
#pragma GCC unroll 1
  for (int64_t r = 0; r < kGroupRows; r += kRowsAtATime, rows += kRowsAtATime * row_bytes) {
    pack_from<P>(rows, row_bytes, later, _mm256_setzero_si256(), to + 2 * r, to + P::lines_at + 4 * r);
    later += 64 * (kPrefetchedByPacking<P> * kRowsAtATime / kGroupRows);
  }
}
// Packs the block at `from` of up to 32 rows; `rows` is the number of rows that exist.
template <class Block>
QTENSOR_INLINE void pack_group(const SlabTask& t, const uint8_t* from, int64_t rows, const uint8_t* later,
                               uint8_t* to) {
  using P = Packing<Block>;
  if (rows >= kGroupRows) return pack_rows<P>(from, t.row_bytes, later, to);
  uint8_t copy[kGroupRows * P::bytes] = {};  // memory after the last row must not be read
  for (int64_t r = 0; r < rows; r++) __builtin_memcpy(copy + r * P::bytes, from + r * t.row_bytes, P::bytes);
  pack_rows<P>(copy, P::bytes, later, to);
}

}  // namespace
}  // namespace qtensor
