// Formats in blocks of 32, one block of four rows at a time, with up to four batch rows.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "kernel_table.h"
#include "kernels/portable/ahead_in_order.h"
#include "kernels/portable/always_inline.h"
#include "kernels/portable/unpacked_blocks.h"
#include "rows.h"

namespace qtensor {
namespace {

struct Values32 {
  int8x16_t part[2];
};
QTENSOR_INLINE Values32 nibbles_of_16(const uint8_t* qs) {
  const uint8x16_t raw = vld1q_u8(qs);
  return {{vreinterpretq_s8_u8(vandq_u8(raw, vdupq_n_u8(15))), vreinterpretq_s8_u8(vshrq_n_u8(raw, 4))}};
}
// The same with a fifth bit for each value, from four bytes.
QTENSOR_INLINE Values32 fives_of_16(const uint8_t* qs, const uint8_t* qh) {
  uint32_t bits;
  __builtin_memcpy(&bits, qh, 4);
  const uint8x16_t bytes = vreinterpretq_u8_u32(vdupq_n_u32(bits));
  const uint8x16_t each = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201)), sixteen = vdupq_n_u8(16);
  const uint8x16_t order = vcombine_u8(vdup_n_u8(0), vdup_n_u8(1));
  Values32 q = nibbles_of_16(qs);
  for (int i = 0; i < 2; i++) {
    const uint8x16_t spread = vqtbl1q_u8(bytes, vaddq_u8(order, vdupq_n_u8(uint8_t(2 * i))));
    const uint8x16_t fifth = vandq_u8(vtstq_u8(spread, each), sixteen);
    q.part[i] = vorrq_s8(q.part[i], vreinterpretq_s8_u8(fifth));
  }
  return q;
}
QTENSOR_INLINE Values32 levels_of(const int8_t (&table)[16], Values32 numbers) {
  const int8x16_t levels = vld1q_s8(table);
  return {{vqtbl1q_s8(levels, vreinterpretq_u8_s8(numbers.part[0])),
           vqtbl1q_s8(levels, vreinterpretq_u8_s8(numbers.part[1]))}};
}

// A format: its values, with `offset` added; the position of its min; and the scales of four blocks.
template <class Block>
struct SubBlock;

template <class Block, int OFFSET = 0, int64_t MIN_AT = 0>
struct HalfInFront {
  static constexpr int64_t bytes = sizeof(Block), min_at = MIN_AT;
  static constexpr int offset = OFFSET;
  static constexpr bool has_min = MIN_AT > 0;
  static QTENSOR_INLINE float32x4_t scales(const uint8_t* const* places) { return load_halves(places); }
};
template <>
struct SubBlock<BlockQ8_0> : HalfInFront<BlockQ8_0> {
  static QTENSOR_INLINE Values32 values(const uint8_t* block) {
    const auto* q = reinterpret_cast<const int8_t*>(block + 2);
    return {{vld1q_s8(q), vld1q_s8(q + 16)}};
  }
};
template <>
struct SubBlock<BlockQ4_0> : HalfInFront<BlockQ4_0, 8> {
  static QTENSOR_INLINE Values32 values(const uint8_t* block) { return nibbles_of_16(block + 2); }
};
template <>
struct SubBlock<BlockQ4_1> : HalfInFront<BlockQ4_1, 0, 2> {
  static QTENSOR_INLINE Values32 values(const uint8_t* block) { return nibbles_of_16(block + 4); }
};
template <>
struct SubBlock<BlockQ5_0> : HalfInFront<BlockQ5_0, 16> {
  static QTENSOR_INLINE Values32 values(const uint8_t* block) { return fives_of_16(block + 6, block + 2); }
};
template <>
struct SubBlock<BlockQ5_1> : HalfInFront<BlockQ5_1, 0, 2> {
  static QTENSOR_INLINE Values32 values(const uint8_t* block) { return fives_of_16(block + 8, block + 4); }
};
template <>
struct SubBlock<BlockIQ4_NL> : HalfInFront<BlockIQ4_NL> {
  static QTENSOR_INLINE Values32 values(const uint8_t* block) {
    return levels_of(kLevelsIQ4, nibbles_of_16(block + 2));
  }
};
template <>
struct SubBlock<BlockMXFP4> : HalfInFront<BlockMXFP4> {
  static QTENSOR_INLINE Values32 values(const uint8_t* block) {
    return levels_of(kLevelsMXFP4, nibbles_of_16(block + 1));
  }
  static QTENSOR_INLINE float32x4_t scales(const uint8_t* const* places) {
    float all[4];
    for (int r = 0; r < 4; r++) all[r] = power_of_two(*places[r]);
    return vld1q_f32(all);
  }
};

template <class Block>
struct SubBlockRows {
  static constexpr int most_batch = 4;
  using Sub = SubBlock<Block>;
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
      ahead.ask(4 * count * Sub::bytes);
      for (int64_t i = 0; i < count; i++) {
        one_block<M>(place, x, blocks, i, f);
        for (int r = 0; r < 4; r++) place[r] += Sub::bytes;
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
      const Values32 q = Sub::values(place[r]);
#pragma GCC unroll 4
      for (int j = 0; j < M; j++) sum[j][r] = dot_32(q.part[0], q.part[1], x[j * stride].q + 32 * i);
    }
    const float32x4_t d = Sub::scales(place);
#pragma GCC unroll 4
    for (int j = 0; j < M; j++) {
      const BlockQ8x32& of = x[j * stride];
      int32x4_t all = reduce_four(sum[j][0], sum[j][1], sum[j][2], sum[j][3]);
      if constexpr (Sub::offset > 0) all = vsubq_s32(all, vdupq_n_s32(Sub::offset * of.sums[i]));
      f[j] = vfmaq_f32(f[j], vcvtq_f32_s32(all), vmulq_n_f32(d, of.d[i]));
      if constexpr (Sub::has_min)
        f[j] = vfmaq_n_f32(f[j], load_halves(place, Sub::min_at), float(of.sums[i]) * of.d[i]);
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
