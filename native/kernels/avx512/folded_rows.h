// Four rows of the formats of folded_blocks.h and ternary_blocks.h with one to four batch rows, with VNNI.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernel_table.h"
#include "kernels/avx512/folded_blocks.h"
#include "kernels/avx512/four_headers.h"
#include "kernels/avx512/integer_kernels.h"
#include "kernels/x86/rows.h"

namespace qtensor {
namespace {

template <class Block, int M>
inline void folded_four_rows(const MatmulTask& t, FourRows rows, int64_t batch_row) {
  using Format = Folded<Block>;
  const int64_t blocks = t.blocks_per_row;
  const uint8_t* place[4];
  for (int r = 0; r < 4; r++) place[r] = t.weight + (rows.first + r * rows.stride) * t.row_bytes;
  Ahead<Format::bytes> ahead(t, rows);
  __m128 acc[M];
  for (int j = 0; j < M; j++) acc[j] = _mm_setzero_ps();
  const BlockQ8K* x = t.blocks + batch_row * blocks;
  for (int64_t b = 0; b < blocks; b++, x++) {
    ahead.ask(place);
    const typename Format::Headers h = Format::headers(place);
    __m512i start[M], sum[M][4];
    for (int j = 0; j < M; j++) {
      const __m128i sums = _mm_load_si128((const __m128i*)x[j * blocks].sums32);
      start[j] = _mm512_zextsi128_si512(_mm_madd_epi16(sums, _mm_set1_epi16(-Format::offset)));
    }
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
      __m512i q[4];
      Format::values(place[r], h, r, q);
      place[r] += Format::bytes;
#pragma GCC unroll 4
      for (int j = 0; j < M; j++) {
        sum[j][r] = start[j];
        for (int i = 0; i < 4; i++)
          sum[j][r] = _mm512_dpbusd_epi32(sum[j][r], q[i], _mm512_load_si512(x[j * blocks].q + 64 * i));
      }
    }
#pragma GCC unroll 4
    for (int j = 0; j < M; j++) {
      const BlockQ8K& xb = x[j * blocks];
      __m128 f = _mm_mul_ps(_mm_cvtepi32_ps(reduce_four(sum[j][0], sum[j][1], sum[j][2], sum[j][3])), h.d);
      if constexpr (Format::has_min) {
        const __m512i mins =
            _mm512_dpwssd_epi32(_mm512_madd_epi16(h.mins[0], sums_of(xb.sums16)), h.mins[1], sums_of(xb.sums16 + 8));
        f = _mm_fnmadd_ps(_mm_cvtepi32_ps(reduce_lanes(mins)), h.dmin, f);
      }
      acc[j] = _mm_fmadd_ps(f, _mm_set1_ps(xb.d), acc[j]);
    }
  }
  for (int j = 0; j < M; j++) store_four_rows(t.y + (batch_row + j) * t.y_stride, rows, acc[j]);
}

}  // namespace
}  // namespace qtensor
