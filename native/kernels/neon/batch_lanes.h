// K-quants with large M: see kernels/portable/batch_lanes.h. An integer multiply-add applies the scales of a sub-block
// to its sums.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "kernel_table.h"
#include "kernels/portable/ahead_in_order.h"
#include "kernels/portable/always_inline.h"
#include "kernels/portable/batch_lanes.h"
#include "row_blocks.h"
#include "tile_sums.h"

namespace qtensor {
namespace {

// Packs the bytes of up to sixteen batch rows of a block in the layout of TileSums: the first eight, then the others.
template <class Block>
inline void lay_batch(const Block* x, int64_t stride, int64_t count, int8_t (&to)[2][256 * kTileBatch]) {
  for (int64_t j = 0; j < count; j++) {
    int8_t* const at = to[j / kTileBatch] + j % kTileBatch * kAdjacent;
    for (int k = 0; k < 256; k += kAdjacent) __builtin_memcpy(at + k * kTileBatch, x[j * stride].q + k, kAdjacent);
  }
}
inline void store_transposed(const float* acc, float* y, int64_t y_stride, int64_t count) {
  for (int64_t j = 0; j < count; j++)
    for (int r = 0; r < 16; r++) y[j * y_stride + r] = acc[r * 16 + j];
}

struct BatchLanes {
  struct alignas(64) Packed {
    int8_t q[2][256 * kTileBatch];
    int16_t sums32[8][16];  // [sub-block][batch row]
    float d[16];
  };
  static constexpr int most_tiles = 1;
  template <class Rows>
  static constexpr int64_t tile_bytes = sizeof(Packed);

  static void pack(const BlockQ8K* x, int64_t blocks, int64_t, int64_t count, Packed& out) {
    if (count < 16) __builtin_memset(&out, 0, sizeof out);
    lay_batch(x, blocks, count, out.q);
    for (int64_t j = 0; j < count; j++) {
      const BlockQ8K& from = x[j * blocks];
      for (int i = 0; i < 8; i++) out.sums32[i][j] = from.sums32[i];
      out.d[j] = from.d;
    }
  }

  template <class Rows, int GROUPS, int TILES>
  static void block(const RowBlocks* rows, const Packed* x, float* acc) {
    for (int g = 0; g < GROUPS; g++)
      for (int t = 0; t < TILES; t++)
        for (int h = 0; h < 2; h++) eight<Rows>(rows[g], x[t], h, acc + t * kTileFloats + g * kTileRows * 16);
  }
  template <class Rows>
  static void small_m(const RowBlocks* rows, const Packed* x, int64_t m, float* acc, AheadInOrder& ahead) {
    ahead.ask(2 * kTileRows * Rows::bytes);
    for (int g = 0; g < 2; g++)
      for (int h = 0; h < (m > kTileBatch ? 2 : 1); h++) eight<Rows>(rows[g], *x, h, acc + g * kTileRows * 16);
  }

  // Multiplies four rows with eight batch rows.
  template <class Rows>
  static QTENSOR_INLINE void eight(const RowBlocks& rows, const Packed& x, int h, float* acc) {
    TileSums total;
    for (int g = 0; g < 256 / Rows::group; g++) {
      TileSums sum;
      sum.add<Rows::group>(rows.q + g * Rows::group * kTileRows, x.q[h] + g * Rows::group * kTileBatch);
      total.add_scaled(sum, rows.scale[g]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kTileRows; r++)
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) {
        const int first = kTileBatch * h + 4 * v;
        float32x4_t f = vmulq_n_f32(vcvtq_f32_s32(total.of(r, v)), rows.d[r]);
        if constexpr (Rows::has_min)
          f = vfmsq_n_f32(f, vcvtq_f32_s32(min_products(vld1q_s16(rows.min[r]), x, first)), rows.dmin[r]);
        float* const at = acc + 16 * r + first;
        vst1q_f32(at, vfmaq_f32(vld1q_f32(at), f, vld1q_f32(x.d + first)));
      }
  }
  // The products of a row's mins with the sums of four batch rows.
  static QTENSOR_INLINE int32x4_t min_products(int16x8_t min, const Packed& x, int first) {
    int32x4_t sum = vmull_laneq_s16(vld1_s16(x.sums32[0] + first), min, 0);
    sum = vmlal_laneq_s16(sum, vld1_s16(x.sums32[1] + first), min, 1);
    sum = vmlal_laneq_s16(sum, vld1_s16(x.sums32[2] + first), min, 2);
    sum = vmlal_laneq_s16(sum, vld1_s16(x.sums32[3] + first), min, 3);
    sum = vmlal_laneq_s16(sum, vld1_s16(x.sums32[4] + first), min, 4);
    sum = vmlal_laneq_s16(sum, vld1_s16(x.sums32[5] + first), min, 5);
    sum = vmlal_laneq_s16(sum, vld1_s16(x.sums32[6] + first), min, 6);
    return vmlal_laneq_s16(sum, vld1_s16(x.sums32[7] + first), min, 7);
  }

  static void store_n_tile(const float* acc, float* y, int64_t y_stride, int64_t, int64_t count) {
    store_transposed(acc, y, y_stride, count);
  }
};

}  // namespace
}  // namespace qtensor
