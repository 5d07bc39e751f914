// Four rows of one 256-block, unpacked for products with batch rows: see kernels/portable/batch_lanes.h.
#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "blocks.h"
#include "k_quants.h"
#include "kernels/portable/always_inline.h"
#include "rows.h"
#include "tile_sums.h"

namespace qtensor {
namespace {

struct alignas(64) RowBlocks {
  int8_t q[kTileRows * 256];     // in the layout of TileSums, offset subtracted
  int32_t scale[16][kTileRows];  // per sub-block or group of 16
  int16_t min[kTileRows][8];
  float d[kTileRows], dmin[kTileRows];
};

template <class Quant, int C>
QTENSOR_INLINE void store_pair(const uint8_t* const* place, int8_t* to) {
  int8x16_t q[kTileRows][4];
#pragma GCC unroll 4
  for (int r = 0; r < kTileRows; r++) Quant::template pair<C>(place[r], Quant::high_of(place[r]), q[r]);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    int8x16_t sixteen[kTileRows];
    for (int r = 0; r < kTileRows; r++)
      sixteen[r] = Quant::offset == 0 ? q[r][i] : vsubq_s8(q[r][i], vdupq_n_s8(Quant::offset));
    store_sixteen(sixteen, to + kTileRows * (64 * C + 16 * i));
  }
}
// The scales of four groups, as bytes [group][row].
QTENSOR_INLINE void store_scales(int8x16_t bytes, int32_t (*to)[kTileRows]) {
  const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
  vst1q_s32(to[0], vmovl_s16(vget_low_s16(low)));
  vst1q_s32(to[1], vmovl_high_s16(low));
  vst1q_s32(to[2], vmovl_s16(vget_low_s16(high)));
  vst1q_s32(to[3], vmovl_high_s16(high));
}

template <class Quant>
struct RowsOf {
  using Unpacked = RowBlocks;
  static constexpr bool has_min = Quant::has_min;
  static constexpr int group = has_min ? 32 : 16;
  static constexpr int64_t bytes = Quant::bytes;

  static QTENSOR_INLINE void unpack(const uint8_t* const* place, RowBlocks& to) {
    store_pair<Quant, 0>(place, to.q);
    store_pair<Quant, 1>(place, to.q);
    store_pair<Quant, 2>(place, to.q);
    store_pair<Quant, 3>(place, to.q);
    if constexpr (has_min)
      unpack_headers(place, to);
    else
      unpack_scales(place, to);
  }

 private:
  static QTENSOR_INLINE void unpack_headers(const uint8_t* const* place, RowBlocks& to) {
    const FourHeaders h = four_headers(place);
    alignas(16) static constexpr uint8_t by_groups[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    const uint8x16_t order = vld1q_u8(by_groups);
    for (int j = 0; j < 2; j++) {
      store_scales(vreinterpretq_s8_u8(vqtbl1q_u8(h.scale[j], order)), to.scale + 4 * j);
      const int16x8_t min01 = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(h.min[j])));
      const int16x8_t min23 = vreinterpretq_s16_u16(vmovl_high_u8(h.min[j]));
      vst1_s16(to.min[0] + 4 * j, vget_low_s16(min01));
      vst1_s16(to.min[1] + 4 * j, vget_high_s16(min01));
      vst1_s16(to.min[2] + 4 * j, vget_low_s16(min23));
      vst1_s16(to.min[3] + 4 * j, vget_high_s16(min23));
    }
    vst1q_f32(to.d, h.d);
    vst1q_f32(to.dmin, h.dmin);
  }
  static QTENSOR_INLINE void unpack_scales(const uint8_t* const* place, RowBlocks& to) {
    int8x16_t row[kTileRows];
    for (int r = 0; r < kTileRows; r++)
      row[r] = vld1q_s8(reinterpret_cast<const int8_t*>(place[r] + offsetof(BlockQ6_K, scales)));
    const int8x16_t low02 = vzip1q_s8(row[0], row[2]), low13 = vzip1q_s8(row[1], row[3]);
    const int8x16_t high02 = vzip2q_s8(row[0], row[2]), high13 = vzip2q_s8(row[1], row[3]);
    store_scales(vzip1q_s8(low02, low13), to.scale);
    store_scales(vzip2q_s8(low02, low13), to.scale + 4);
    store_scales(vzip1q_s8(high02, high13), to.scale + 8);
    store_scales(vzip2q_s8(high02, high13), to.scale + 12);
    vst1q_f32(to.d, load_halves(place, offsetof(BlockQ6_K, d)));
  }
};

}  // namespace
}  // namespace qtensor
