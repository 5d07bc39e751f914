// Four rows of Q2_K, Q3_K and IQ4_XS with one to four batch rows on AVX2.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "blocks.h"
#include "kernel_table.h"
#include "kernels/avx2/integer_kernels.h"
#include "kernels/avx2/unpacked_formats.h"
#include "kernels/x86/rows.h"

namespace qtensor {
namespace {

template <class Block>
constexpr bool kInFours = false;
template <>
constexpr bool kInFours<BlockQ2_K> = true;
template <>
constexpr bool kInFours<BlockQ3_K> = true;
template <>
constexpr bool kInFours<BlockIQ4_XS> = true;

template <class F, int M>
inline void unpacked_four_rows(const MatmulTask& t, FourRows rows, int64_t batch_row) {
  using Quant = Quant256<typename F::Block>;
  const int64_t blocks = t.blocks_per_row;
  const uint8_t* place[4];
  for (int r = 0; r < 4; r++) place[r] = t.weight + (rows.first + r * rows.stride) * t.row_bytes;
  Ahead<Quant::bytes> ahead(t, rows);
  __m128 acc[M];
  for (int j = 0; j < M; j++) acc[j] = _mm_setzero_ps();
  const BlockQ8K* x = t.blocks + batch_row * blocks;
  for (int64_t b = 0; b < blocks; b++, x++) {
    ahead.ask(place);
    const __m128 d = load_halves(place, Quant::d_at),
                 dmin = Quant::has_min ? load_halves(place, Quant::d_at + 2) : _mm_setzero_ps();
    __m256i sum[4][M], mins[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
      row_sums<Quant>(place[r], Quant::scales_of(place[r]), x, blocks, sum[r]);
      if constexpr (Quant::has_min) mins[r] = Quant::mins_of(place[r]);
      place[r] += Quant::bytes;
    }
#pragma GCC unroll 4
    for (int j = 0; j < M; j++) {
      const BlockQ8K& xb = x[j * blocks];
      __m128 f = _mm_mul_ps(_mm_cvtepi32_ps(reduce_four(sum[0][j], sum[1][j], sum[2][j], sum[3][j])), d);
      if constexpr (Quant::has_min) {
        const __m256i sums = _mm256_load_si256((const __m256i*)xb.sums16);
        const __m128i of_mins = reduce_four(_mm256_madd_epi16(mins[0], sums), _mm256_madd_epi16(mins[1], sums),
                                            _mm256_madd_epi16(mins[2], sums), _mm256_madd_epi16(mins[3], sums));
        f = _mm_fnmadd_ps(_mm_cvtepi32_ps(of_mins), dmin, f);
      }
      acc[j] = _mm_fmadd_ps(f, _mm_set1_ps(xb.d), acc[j]);
    }
  }
  for (int j = 0; j < M; j++) store_four_rows(t.y + (batch_row + j) * t.y_stride, rows, acc[j]);
}

}  // namespace
}  // namespace qtensor
