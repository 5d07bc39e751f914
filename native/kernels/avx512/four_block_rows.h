// Four rows of weights in blocks of 32 with one to four batch rows, with VNNI: four blocks of each row at a time. Sums
// are reduced while they are transposed to [block][row], so one vector holds the sums of four blocks of four rows.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernel_table.h"
#include "kernels/avx512/four_blocks.h"
#include "kernels/portable/always_inline.h"
#include "kernels/x86/rows.h"
#include "kernels/x86/sub_blocks.h"

namespace qtensor {
namespace {

// The sums of each lane's dwords: [lane][row].
inline __m512i lane_sums(const __m512i (&row)[4]) {
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(row[0], row[1]), _mm512_unpackhi_epi32(row[0], row[1]));
  const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(row[2], row[3]), _mm512_unpackhi_epi32(row[2], row[3]));
  return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}
// Broadcasts dword i of four to all dwords of lane i.
inline __m512i each_in_its_lane(const void* four) {
  const __m512i order = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  return _mm512_permutexvar_epi32(order, _mm512_castsi128_si512(_mm_load_si128((const __m128i*)four)));
}
// f = fma(a, b, f) for each lane, in order.
QTENSOR_INLINE __m128 fma_of_lanes(__m512 a, __m512 b, __m128 f) {
  f = _mm_fmadd_ps(_mm512_castps512_ps128(a), _mm512_castps512_ps128(b), f);
  f = _mm_fmadd_ps(_mm512_extractf32x4_ps(a, 1), _mm512_extractf32x4_ps(b, 1), f);
  f = _mm_fmadd_ps(_mm512_extractf32x4_ps(a, 2), _mm512_extractf32x4_ps(b, 2), f);
  return _mm_fmadd_ps(_mm512_extractf32x4_ps(a, 3), _mm512_extractf32x4_ps(b, 3), f);
}
// The same, each lane followed by f = fma(c, d, f).
QTENSOR_INLINE __m128 fma_of_lanes(__m512 a, __m512 b, __m512 c, __m512 d, __m128 f) {
  f = _mm_fmadd_ps(_mm512_castps512_ps128(a), _mm512_castps512_ps128(b), f);
  f = _mm_fmadd_ps(_mm512_castps512_ps128(c), _mm512_castps512_ps128(d), f);
  f = _mm_fmadd_ps(_mm512_extractf32x4_ps(a, 1), _mm512_extractf32x4_ps(b, 1), f);
  f = _mm_fmadd_ps(_mm512_extractf32x4_ps(c, 1), _mm512_extractf32x4_ps(d, 1), f);
  f = _mm_fmadd_ps(_mm512_extractf32x4_ps(a, 2), _mm512_extractf32x4_ps(b, 2), f);
  f = _mm_fmadd_ps(_mm512_extractf32x4_ps(c, 2), _mm512_extractf32x4_ps(d, 2), f);
  f = _mm_fmadd_ps(_mm512_extractf32x4_ps(a, 3), _mm512_extractf32x4_ps(b, 3), f);
  return _mm_fmadd_ps(_mm512_extractf32x4_ps(c, 3), _mm512_extractf32x4_ps(d, 3), f);
}

constexpr int kFourBlocksM = 4;  // batch rows that share an unpacked row

template <class Block, int M>
inline void four_block_rows(const MatmulTask& t, FourRows rows, int64_t batch_row) {
  using Four = Four32<Block>;
  const __m512i zero = _mm512_setzero_si512();
  const int64_t blocks = t.blocks_per_row;
  const uint8_t* place[4];
  for (int r = 0; r < 4; r++) place[r] = t.weight + (rows.first + r * rows.stride) * t.row_bytes;
  Ahead<8 * Four::bytes> ahead(t, rows);
  __m128 acc[M];
  for (int j = 0; j < M; j++) acc[j] = _mm_setzero_ps();
  const BlockQ8x32* x = t.blocks_32 + batch_row * blocks;
  for (int64_t b = 0; b < blocks; b++, x++) {
    ahead.ask(place);
    __m128 f[M];
    for (int j = 0; j < M; j++) f[j] = _mm_setzero_ps();
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
      __m512i xv[M][2], sum[M][4];
      for (int j = 0; j < M; j++) {
        const __m512i first = _mm512_load_si512(x[j * blocks].q + 128 * h),
                      second = _mm512_load_si512(x[j * blocks].q + 128 * h + 64);
        xv[j][0] = _mm512_shuffle_i32x4(first, second, 0x88);
        xv[j][1] = _mm512_shuffle_i32x4(first, second, 0xdd);
      }
      __m512 d, m;
      Four::scales(place, d, m);
#pragma GCC unroll 4
      for (int r = 0; r < 4; r++) {
        __m512i q[2];
        Four::values(place[r], q);
        place[r] += 4 * Four::bytes;
        for (int j = 0; j < M; j++)
          sum[j][r] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(zero, q[0], xv[j][0]), q[1], xv[j][1]);
      }
#pragma GCC unroll 4
      for (int j = 0; j < M; j++) {
        const BlockQ8x32& xb = x[j * blocks];
        __m512i sums = lane_sums(sum[j]);
        if (Four::offset) {
          constexpr unsigned bits = unsigned(__builtin_ctz(unsigned(Four::offset | 256)));
          sums = _mm512_sub_epi32(sums, _mm512_slli_epi32(each_in_its_lane(xb.sums + 4 * h), bits));
        }
        const __m512 dx = _mm512_castsi512_ps(each_in_its_lane(xb.d + 4 * h));
        const __m512 products = _mm512_cvtepi32_ps(sums), scale = _mm512_mul_ps(d, dx);
        if constexpr (Four::has_min) {
          const __m512 of_mins = _mm512_mul_ps(_mm512_cvtepi32_ps(each_in_its_lane(xb.sums + 4 * h)), dx);
          f[j] = fma_of_lanes(products, scale, of_mins, m, f[j]);
        } else {
          f[j] = fma_of_lanes(products, scale, f[j]);
        }
      }
    }
    for (int j = 0; j < M; j++) acc[j] = _mm_add_ps(acc[j], f[j]);
  }
  for (int j = 0; j < M; j++) store_four_rows(t.y + (batch_row + j) * t.y_stride, rows, acc[j]);
}

// Rows whose length is a multiple of 256, four at a time; other rows block by block.
template <class Block>
inline void matmul_four_blocks(const MatmulTask& t) {
  if (t.k % kSuperBlock != 0) return matmul_sub_blocks<Block>(t);
  matmul_sub_blocks<Block>(by_four_rows<kFourBlocksM>(
      t, [&]<int M>(Together<M>, FourRows rows, int64_t j) { four_block_rows<Block, M>(t, rows, j); }));
}

MatmulKernel kernel_32(Format format) {
  return with_format_32(
      format, []<class F>(F) -> MatmulKernel { return matmul_four_blocks<typename F::Block>; },
      [] { return MatmulKernel(nullptr); });
}

}  // namespace
}  // namespace qtensor
