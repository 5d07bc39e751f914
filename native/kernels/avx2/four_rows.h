// Four rows of K-quants with one to four batch rows on AVX2. The headers of two rows are unpacked together, one row in
// each 128-bit lane. See kernels/x86/matmul.h for the loops.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "integer_kernels.h"
#include "kernel_table.h"
#include "kernels/x86/rows.h"

namespace qtensor {
namespace {

// The six-bit scales and mins of two rows, from the first sixteen bytes of their blocks: see unpack_scales.
struct TwoHeaders {
  __m256i raw, scales, mins;  // scales and mins as eight words in each row's lane
};
inline TwoHeaders two_headers(const uint8_t* first, const uint8_t* second) {
  const __m256i raw = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)first)),
                                              _mm_loadu_si128((const __m128i*)second), 1);
  const __m256i ab = _mm256_shuffle_epi32(raw, 0xa5), c = _mm256_shuffle_epi32(raw, 0xff);
  const __m256i low = _mm256_and_si256(_mm256_srlv_epi32(ab, _mm256_setr_epi32(0, 2, 0, 2, 0, 2, 0, 2)),
                                       _mm256_setr_epi32(0x3f3f3f3f, 0x30303030, 0x3f3f3f3f, 0x30303030, 0x3f3f3f3f,
                                                         0x30303030, 0x3f3f3f3f, 0x30303030));
  const __m256i high = _mm256_and_si256(_mm256_srlv_epi32(c, _mm256_setr_epi32(0, 0, 0, 4, 0, 0, 0, 4)),
                                        _mm256_setr_epi32(0, 0x0f0f0f0f, 0, 0x0f0f0f0f, 0, 0x0f0f0f0f, 0, 0x0f0f0f0f));
  const __m256i bytes = _mm256_or_si256(low, high), zero = _mm256_setzero_si256();
  return {raw, _mm256_unpacklo_epi8(bytes, zero), _mm256_unpackhi_epi8(bytes, zero)};
}

// The first dword of each lane of rows 0 and 1, 2 and 3, in the order of the rows.
inline __m128i first_dwords(__m256i rows01, __m256i rows23) {
  const __m256i even_odd = _mm256_unpacklo_epi32(rows01, rows23);  // rows 0, 2 and 1, 3
  return _mm_unpacklo_epi32(_mm256_castsi256_si128(even_odd), _mm256_extracti128_si256(even_odd, 1));
}
// The sum of the dwords of each lane, in the order of the rows.
inline __m128i reduce_lanes(__m256i rows01, __m256i rows23) {
  const __m256i pairs = _mm256_hadd_epi32(rows01, rows23), sums = _mm256_hadd_epi32(pairs, pairs);
  return _mm_unpacklo_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
}

template <class Quant, int M>
inline void k_quant_four_rows(const MatmulTask& t, FourRows rows, int64_t batch_row) {
  const int64_t blocks = t.blocks_per_row;
  const uint8_t* place[4];
  for (int r = 0; r < 4; r++) place[r] = t.weight + (rows.first + r * rows.stride) * t.row_bytes;
  Ahead<Quant::bytes> ahead(t, rows);
  __m128 acc[M];
  for (int j = 0; j < M; j++) acc[j] = _mm_setzero_ps();
  const BlockQ8K* x = t.blocks + batch_row * blocks;
  for (int64_t b = 0; b < blocks; b++, x++) {
    ahead.ask(place);
    TwoHeaders headers[2];
    RowScales scale;
    if constexpr (Quant::has_min) {
      headers[0] = two_headers(place[0], place[1]);
      headers[1] = two_headers(place[2], place[3]);
      scale = split_row_scales(first_dwords(headers[0].raw, headers[1].raw));
    } else {
      scale.d = load_halves(place, offsetof(BlockQ6_K, d));
    }
    __m256i sum[4][M];
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
      if constexpr (Quant::has_min) {
        const __m256i both = headers[r / 2].scales;
        const __m256i own =
            r % 2 ? _mm256_permute2x128_si256(both, both, 0x11) : _mm256_permute2x128_si256(both, both, 0);
        row_sums<Quant>(place[r], own, x, blocks, sum[r]);
      } else {
        row_sums<Quant>(place[r], Quant::scales_of(place[r]), x, blocks, sum[r]);
      }
      place[r] += Quant::bytes;
    }
#pragma GCC unroll 2
    for (int j = 0; j < M; j++) {
      const BlockQ8K& xb = x[j * blocks];
      __m128 f = _mm_mul_ps(_mm_cvtepi32_ps(reduce_four(sum[0][j], sum[1][j], sum[2][j], sum[3][j])), scale.d);
      if constexpr (Quant::has_min) {
        const __m256i sums = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)xb.sums32));
        const __m128i mins =
            reduce_lanes(_mm256_madd_epi16(headers[0].mins, sums), _mm256_madd_epi16(headers[1].mins, sums));
        f = _mm_fnmadd_ps(_mm_cvtepi32_ps(mins), scale.dmin, f);
      }
      acc[j] = _mm_fmadd_ps(f, _mm_set1_ps(xb.d), acc[j]);
    }
  }
  for (int j = 0; j < M; j++) store_four_rows(t.y + (batch_row + j) * t.y_stride, rows, acc[j]);
}

}  // namespace
}  // namespace qtensor
