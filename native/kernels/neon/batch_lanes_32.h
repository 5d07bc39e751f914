// Weights in blocks of 32 with large M: see kernels/portable/batch_lanes.h. A block's sums are scaled when they are
// complete.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "batch_lanes.h"
#include "kernel_table.h"
#include "kernels/portable/ahead_in_order.h"
#include "kernels/portable/always_inline.h"
#include "kernels/portable/batch_lanes.h"
#include "sub_blocks.h"
#include "tile_sums.h"

namespace qtensor {
namespace {

struct alignas(64) RowBlocks32 {
  int8_t q[kTileRows * 256];  // in the layout of TileSums, offset subtracted
  float d[8][kTileRows], m[8][kTileRows];
};

template <class Block>
struct Rows32 {
  using Unpacked = RowBlocks32;
  using Sub = SubBlock<Block>;
  static constexpr bool has_min = Sub::has_min;
  static constexpr int64_t bytes = 8 * Sub::bytes;
  static QTENSOR_INLINE void unpack(const uint8_t* const* place, RowBlocks32& to) {
    for (int j = 0; j < 8; j++) {
      const uint8_t* block[kTileRows];
      for (int r = 0; r < kTileRows; r++) block[r] = place[r] + j * Sub::bytes;
      vst1q_f32(to.d[j], Sub::scales(block));
      if (has_min) vst1q_f32(to.m[j], load_halves(block, Sub::min_at));
      int8x16_t q[2][kTileRows];
      for (int r = 0; r < kTileRows; r++) {
        const Values32 values = Sub::values(block[r]);
        for (int i = 0; i < 2; i++) q[i][r] = vsubq_s8(values.part[i], vdupq_n_s8(Sub::offset));
      }
      for (int i = 0; i < 2; i++) store_sixteen(q[i], to.q + kTileRows * (32 * j + 16 * i));
    }
  }
};

struct BatchLanes32 {
  struct alignas(64) Packed {
    int8_t q[2][256 * kTileBatch];
    float d[8][16], sums[8][16];  // [block][batch row]; the sums times d
  };
  static constexpr int most_tiles = 1;
  template <class Rows>
  static constexpr int64_t tile_bytes = sizeof(Packed);

  static void pack(const BlockQ8x32* x, int64_t blocks, int64_t, int64_t count, Packed& out) {
    if (count < 16) __builtin_memset(&out, 0, sizeof out);
    lay_batch(x, blocks, count, out.q);
    for (int64_t j = 0; j < count; j++) {
      const BlockQ8x32& from = x[j * blocks];
      for (int i = 0; i < 8; i++) {
        out.d[i][j] = from.d[i];
        out.sums[i][j] = float(from.sums[i]) * from.d[i];
      }
    }
  }

  template <class Rows, int GROUPS, int TILES>
  static void block(const RowBlocks32* rows, const Packed* x, float* acc) {
    for (int g = 0; g < GROUPS; g++)
      for (int t = 0; t < TILES; t++)
        for (int h = 0; h < 2; h++) eight<Rows>(rows[g], x[t], h, acc + t * kTileFloats + g * kTileRows * 16);
  }
  template <class Rows>
  static void small_m(const RowBlocks32* rows, const Packed* x, int64_t m, float* acc, AheadInOrder& ahead) {
    ahead.ask(2 * kTileRows * Rows::bytes);
    for (int g = 0; g < 2; g++)
      for (int h = 0; h < (m > kTileBatch ? 2 : 1); h++) eight<Rows>(rows[g], *x, h, acc + g * kTileRows * 16);
  }

  // Multiplies four rows with eight batch rows.
  template <class Rows>
  static QTENSOR_INLINE void eight(const RowBlocks32& rows, const Packed& x, int h, float* acc) {
    float32x4_t f[kTileRows][2];
    for (auto& row : f)
      for (auto& four : row) four = vdupq_n_f32(0.0f);
    for (int j = 0; j < 8; j++) {
      TileSums sum;
      sum.add<32>(rows.q + j * 32 * kTileRows, x.q[h] + j * 32 * kTileBatch);
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) {
        const int first = kTileBatch * h + 4 * v;
        const float32x4_t d = vld1q_f32(x.d[j] + first), sums = vld1q_f32(x.sums[j] + first);
#pragma GCC unroll 4
        for (int r = 0; r < kTileRows; r++) {
          f[r][v] = vfmaq_f32(f[r][v], vcvtq_f32_s32(sum.of(r, v)), vmulq_n_f32(d, rows.d[j][r]));
          if constexpr (Rows::has_min) f[r][v] = vfmaq_n_f32(f[r][v], sums, rows.m[j][r]);
        }
      }
    }
    for (int r = 0; r < kTileRows; r++)
      for (int v = 0; v < 2; v++) {
        float* const at = acc + 16 * r + kTileBatch * h + 4 * v;
        vst1q_f32(at, vaddq_f32(vld1q_f32(at), f[r][v]));
      }
  }

  static void store_n_tile(const float* acc, float* y, int64_t y_stride, int64_t, int64_t count) {
    store_transposed(acc, y, y_stride, count);
  }
};

int64_t tile_scratch_bytes(int64_t m) {
  return lanes_scratch_bytes<RowBlocks>(m) > lanes_scratch_bytes<RowBlocks32>(m) ? lanes_scratch_bytes<RowBlocks>(m)
                                                                                 : lanes_scratch_bytes<RowBlocks32>(m);
}
Tiles tiles_32(Format format) {
  return with_format_32(
      format,
      []<class F>(F) -> Tiles {
        return {matmul_batch_lanes<BatchLanes32, Rows32<typename F::Block>>, &kPacked32<BatchLanes32>};
      },
      [] { return Tiles(); });
}

}  // namespace
}  // namespace qtensor
