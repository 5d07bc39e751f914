// Formats in blocks of 32, one block of four rows at a time, with up to four batch rows.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "kernel_table.h"
#include "kernels/portable/ahead_in_order.h"
#include "kernels/portable/always_inline.h"
#include "kernels/portable/unpacked_blocks.h"
#include "packed_weights.h"
#include "rows.h"
#include "slab_pass.h"
#include "slab_pass_32.h"

namespace qtensor {
namespace {

// The scales of blocks of four rows.
template <class Block>
QTENSOR_INLINE float32x4_t load_scales(const uint8_t* const* places) {
  if constexpr (Packing<Block>::exists) return load_halves(places);
  float all[4];  // MXFP4
  for (int r = 0; r < 4; r++) all[r] = power_of_two(*places[r]);
  return vld1q_f32(all);
}

template <class Block>
struct SubBlockRows {
  static constexpr int most_batch = 4;
  using P = SlabPairs<Block>;
  static constexpr int64_t bytes = sizeof(Block);
  template <int M>
  static void rows(const MatmulTask& t, int64_t row, int rows, int64_t batch_row) {
    const int64_t blocks = t.blocks_per_row, total = t.k / kSubBlock;
    const BlockQ8x32* x = t.blocks_32 + batch_row * blocks;
    const uint8_t* place[4];
    find_four_rows(t, row, rows, place);
    AheadInOrder ahead(place[0], 4, t.row_bytes);
    float32x4_t acc[M];
    for (auto& a : acc) a = vdupq_n_f32(0.0f);
    for (int64_t b = 0; b < blocks; b++, x++) {
      float32x4_t f[M];
      for (auto& one : f) one = vdupq_n_f32(0.0f);
      const int64_t count = total - 8 * b < 8 ? total - 8 * b : 8;
      ahead.ask(4 * count * bytes);
      for (int64_t i = 0; i < count; i++) {
        one_block<M>(place, x, blocks, i, f);
        for (int r = 0; r < 4; r++) place[r] += bytes;
      }
      for (int j = 0; j < M; j++) acc[j] = vaddq_f32(acc[j], f[j]);
    }
    for (int j = 0; j < M; j++) store_rows(t.y + (batch_row + j) * t.y_stride + row, acc[j], rows);
  }

  // f = fma(sum of products, d * dx, f), then the mins, for block i of eight blocks.
  template <int M>
  static QTENSOR_INLINE void one_block(const uint8_t* const* place, const BlockQ8x32* x, int64_t stride, int64_t i,
                                       float32x4_t (&f)[M]) {
    int32x4_t sum[M][4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
      int8x16_t first, second;
      P::template values<0>(RowLines<Block>{place[r]}, 0, first, second);
#pragma GCC unroll 4
      for (int j = 0; j < M; j++) sum[j][r] = dot_32(first, second, x[j * stride].q + 32 * i);
    }
    const float32x4_t d = load_scales<Block>(place);
#pragma GCC unroll 4
    for (int j = 0; j < M; j++) {
      const BlockQ8x32& of = x[j * stride];
      const int32x4_t all = reduce_four(sum[j][0], sum[j][1], sum[j][2], sum[j][3]);
      f[j] = vfmaq_f32(f[j], P::as_float(all), vmulq_n_f32(d, of.d[i]));
      if constexpr (P::has_min) f[j] = vfmaq_n_f32(f[j], load_halves(place, 2), float(of.sums[i]) * of.d[i]);
    }
  }
};

MatmulKernel kernel_32(Format format) {
  return with_format_32(
      format, []<class F>(F) -> MatmulKernel { return for_each_four_rows<SubBlockRows<typename F::Block>>; },
      [] { return MatmulKernel(nullptr); });
}

}  // namespace
}  // namespace qtensor
