// Transpositions between rows of weights, as in tiles, and batch rows, as everywhere else.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace qtensor {
namespace {

// Transposes four rows of 16 dwords from [row][lane][column] to [column][lane][row].
inline void transpose_fours(__m512i* r) {
  const __m512i ab = _mm512_unpacklo_epi32(r[0], r[1]), ab2 = _mm512_unpackhi_epi32(r[0], r[1]);
  const __m512i cd = _mm512_unpacklo_epi32(r[2], r[3]), cd2 = _mm512_unpackhi_epi32(r[2], r[3]);
  r[0] = _mm512_unpacklo_epi64(ab, cd);
  r[1] = _mm512_unpackhi_epi64(ab, cd);
  r[2] = _mm512_unpacklo_epi64(ab2, cd2);
  r[3] = _mm512_unpackhi_epi64(ab2, cd2);
}

// Transposes 16 rows of 16 dwords.
inline void transpose16(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 4) transpose_fours(r + i);
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// Stores results of sixteen rows of weights to y, whose batch rows are y_stride floats apart. row_at(i) is the address
// of the sixteen batch rows of row i.
template <class RowAt>
inline void store_transposed(RowAt row_at, float* y, int64_t y_stride, int64_t m, bool past_cache) {
  __m512i r[16];
  for (int i = 0; i < 16; i++) r[i] = _mm512_load_si512(row_at(i));
  transpose16(r);
  for (int64_t j = 0; j < m; j++) {
    if (past_cache)
      _mm512_stream_si512((__m512i*)(y + j * y_stride), r[j]);
    else
      _mm512_storeu_si512(y + j * y_stride, r[j]);
  }
}

}  // namespace
}  // namespace qtensor
