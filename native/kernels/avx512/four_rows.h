// Four rows of K-quants with one to four batch rows, with VNNI. See kernels/x86/matmul.h for the loops.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernel_table.h"
#include "kernels/avx512/four_headers.h"
#include "kernels/avx512/integer_kernels.h"
#include "kernels/x86/rows.h"

namespace qtensor {
namespace {

// The word of a row's scales for each four products of 64 weights, in the order of vpackssdw.
template <class Quant, bool SPLIT>
inline __m512i scale_order() {
  constexpr long long one = 0x0001000100010001;
  if (!Quant::has_min) return _mm512_setr_epi64(0, 4 * one, one, 5 * one, 2 * one, 6 * one, 3 * one, 7 * one);
  constexpr long long a = SPLIT ? 1 : 2, b = SPLIT ? 2 : 1;
  return _mm512_setr_epi64(0, a * one, 0, a * one, b * one, 3 * one, b * one, 3 * one);
}

template <bool SPLIT>
inline void load_activations(const BlockQ8K& x, __m512i (&to)[4]) {
  for (int i = 0; i < 4; i++) {
    if (!SPLIT) {
      to[i] = _mm512_load_si512(x.q + 64 * i);
    } else {  // sub-blocks 0 and 2, 1 and 3, 4 and 6, 5 and 7
      const __m256i* from = (const __m256i*)x.q + 4 * (i / 2) + i % 2;
      to[i] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_load_si256(from)), _mm256_load_si256(from + 2), 1);
    }
  }
}

// Batch rows share the unpacking of a row. With one or two batch rows, activations are ordered like the nibbles of 64
// bytes, which saves unpacking and costs nothing while they stay in registers.
template <class Quant, int M>
inline void k_quant_four_rows(const MatmulTask& t, FourRows rows, int64_t batch_row) {
  constexpr bool split = M <= 2 && Quant::can_split;
  const int64_t blocks = t.blocks_per_row;
  const __m512i zero = _mm512_setzero_si512(), pattern = scale_order<Quant, split>();
  const uint8_t* place[4];
  for (int r = 0; r < 4; r++) place[r] = t.weight + (rows.first + r * rows.stride) * t.row_bytes;
  Ahead<Quant::bytes> ahead(t, rows);
  __m128 acc[M];
  for (int j = 0; j < M; j++) acc[j] = _mm_setzero_ps();
  const BlockQ8K* x = t.blocks + batch_row * blocks;
  for (int64_t b = 0; b < blocks; b++, x++) {
    ahead.ask(place);
    const FourHeaders h = Quant::headers(place);
    const __m512i second = Quant::has_min ? _mm512_add_epi16(pattern, _mm512_set1_epi16(4)) : pattern;
    __m512i xv[M][4], sum[M][4];
    for (int j = 0; j < M; j++) load_activations<split>(x[j * blocks], xv[j]);
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
      __m512i q[4];
      if constexpr (split)
        Quant::split_values(place[r], q);
      else
        Quant::values(place[r], q);
      place[r] += Quant::bytes;
      const __m512i scale0 = spread_scales(h.scales[0], r, pattern), scale1 = spread_scales(h.scales[1], r, second);
#pragma GCC unroll 4
      for (int j = 0; j < M; j++) {
        __m512i dot[4];
        for (int i = 0; i < 4; i++) dot[i] = _mm512_dpbusd_epi32(zero, q[i], xv[j][i]);
        sum[j][r] = _mm512_dpwssd_epi32(zero, _mm512_packs_epi32(dot[0], dot[1]), scale0);
        sum[j][r] = _mm512_dpwssd_epi32(sum[j][r], _mm512_packs_epi32(dot[2], dot[3]), scale1);
      }
    }
#pragma GCC unroll 4
    for (int j = 0; j < M; j++) {
      const BlockQ8K& xb = x[j * blocks];
      __m128i products = reduce_four(sum[j][0], sum[j][1], sum[j][2], sum[j][3]);
      __m128 f;
      if (Quant::has_min) {
        const __m128i mins = reduce_lanes(_mm512_madd_epi16(h.mins, sums_of(xb.sums32)));
        f = _mm_fnmadd_ps(_mm_cvtepi32_ps(mins), h.dmin, _mm_mul_ps(_mm_cvtepi32_ps(products), h.d));
      } else {
        __m512i offset = _mm512_madd_epi16(h.scales[0], sums_of(xb.sums16));
        offset = _mm512_add_epi32(offset, _mm512_madd_epi16(h.scales[1], sums_of(xb.sums16 + 8)));
        products = _mm_sub_epi32(products, _mm_slli_epi32(reduce_lanes(offset), 5));
        f = _mm_mul_ps(_mm_cvtepi32_ps(products), h.d);
      }
      acc[j] = _mm_fmadd_ps(f, _mm_set1_ps(xb.d), acc[j]);
    }
  }
  for (int j = 0; j < M; j++) store_four_rows(t.y + (batch_row + j) * t.y_stride, rows, acc[j]);
}

}  // namespace
}  // namespace qtensor
