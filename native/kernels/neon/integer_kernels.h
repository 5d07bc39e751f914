// Small M: four rows of K-quants with one or two batch rows. One integer multiply-add multiplies the four partial sums
// of a sub-block by its scale. The offset of Q6_K is subtracted by means of the sums of the activations. All operations
// are exact.
#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "k_quants.h"
#include "kernel_table.h"
#include "kernels/portable/ahead_in_order.h"
#include "kernels/portable/always_inline.h"
#include "rows.h"

namespace qtensor {
namespace {

// The scales of four blocks, one of each row. step<C> adds the products of sub-blocks 2C and 2C + 1 to a row's sums,
// and finish computes one float for each row from them.
template <class Quant>
struct FourBlocks;

template <class Quant>
  requires(Quant::has_min)
struct FourBlocks<Quant> {
  int32x4_t scale[4][2];
  int16x4_t min[4][2];
  float32x4_t d, dmin;

  QTENSOR_INLINE explicit FourBlocks(const uint8_t* const* place) {
    const FourHeaders h = four_headers(place);
    d = h.d;
    dmin = h.dmin;
    for (int j = 0; j < 2; j++) {
      const uint16x8_t s01 = vmovl_u8(vget_low_u8(h.scale[j])), s23 = vmovl_high_u8(h.scale[j]);
      scale[0][j] = vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(s01)));
      scale[1][j] = vreinterpretq_s32_u32(vmovl_high_u16(s01));
      scale[2][j] = vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(s23)));
      scale[3][j] = vreinterpretq_s32_u32(vmovl_high_u16(s23));
      const int16x8_t m01 = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(h.min[j])));
      const int16x8_t m23 = vreinterpretq_s16_u16(vmovl_high_u8(h.min[j]));
      min[0][j] = vget_low_s16(m01);
      min[1][j] = vget_high_s16(m01);
      min[2][j] = vget_low_s16(m23);
      min[3][j] = vget_high_s16(m23);
    }
  }
  template <int C>
  QTENSOR_INLINE int32x4_t step(int r, const int8x16_t (&q)[4], const int8_t* x, int32x4_t sum) const {
    sum = vmlaq_laneq_s32(sum, dot_32(q[0], q[1], x), scale[r][C / 2], 2 * C % 4);
    return vmlaq_laneq_s32(sum, dot_32(q[2], q[3], x + 32), scale[r][C / 2], 2 * C % 4 + 1);
  }
  QTENSOR_INLINE float32x4_t finish(const int32x4_t (&sum)[4], const BlockQ8K& x) const {
    const int16x8_t sums = vld1q_s16(x.sums32);
    int32x4_t mins[4];
    for (int r = 0; r < 4; r++)
      mins[r] = vmlal_s16(vmull_s16(min[r][0], vget_low_s16(sums)), min[r][1], vget_high_s16(sums));
    const float32x4_t f = vmulq_f32(vcvtq_f32_s32(reduce_four(sum[0], sum[1], sum[2], sum[3])), d);
    return vfmsq_f32(f, vcvtq_f32_s32(reduce_four(mins[0], mins[1], mins[2], mins[3])), dmin);
  }
};

template <class Quant>
  requires(!Quant::has_min)
struct FourBlocks<Quant> {
  int16x8_t scale[4][2];
  float32x4_t d;

  QTENSOR_INLINE explicit FourBlocks(const uint8_t* const* place) {
    for (int r = 0; r < 4; r++) {
      const int8x16_t all = vld1q_s8(reinterpret_cast<const int8_t*>(place[r] + offsetof(BlockQ6_K, scales)));
      scale[r][0] = vmovl_s8(vget_low_s8(all));
      scale[r][1] = vmovl_high_s8(all);
    }
    d = load_halves(place, offsetof(BlockQ6_K, d));
  }
  template <int C>
  QTENSOR_INLINE int32x4_t step(int r, const int8x16_t (&q)[4], const int8_t* x, int32x4_t sum) const {
    const int16x8_t eight = scale[r][C / 2];
    return add_four_groups(sum, q, x, C % 2 == 0 ? vmovl_s16(vget_low_s16(eight)) : vmovl_high_s16(eight));
  }
  QTENSOR_INLINE float32x4_t finish(const int32x4_t (&sum)[4], const BlockQ8K& x) const {
    int32x4_t all[4];
    for (int r = 0; r < 4; r++) all[r] = vmlsq_n_s32(sum[r], dot_words(scale[r], x.sums16), Quant::offset);
    return vmulq_f32(vcvtq_f32_s32(reduce_four(all[0], all[1], all[2], all[3])), d);
  }
};

template <class Quant, int C, int M>
QTENSOR_INLINE void add_pair(const uint8_t* const* place, const FourBlocks<Quant>& blocks, const BlockQ8K* x,
                             int64_t stride, int32x4_t (&sum)[M][4]) {
#pragma GCC unroll 4
  for (int r = 0; r < 4; r++) {
    const uint8_t* const block = after(place[r], sum[M - 1][(r + 3) % 4]);
    int8x16_t q[4];
    Quant::template pair<C>(block, Quant::high_of(block), q);
#pragma GCC unroll 4
    for (int j = 0; j < M; j++) sum[j][r] = blocks.template step<C>(r, q, x[j * stride].q + 64 * C, sum[j][r]);
  }
}

template <class Quant>
struct KQuantRows {
  static constexpr int most_batch = 2;  // with four, sums and scales do not fit in the registers
  template <int M>
  static void rows(const MatmulTask& t, int64_t row, int rows, int64_t batch_row) {
    const int64_t blocks = t.blocks_per_row;
    const uint8_t* place[4];
    find_four_rows(t, row, rows, place);
    AheadInOrder ahead(place[0], 4, t.row_bytes);
    float32x4_t acc[M];
    for (auto& a : acc) a = vdupq_n_f32(0.0f);
    const BlockQ8K* x = t.blocks + batch_row * blocks;
    for (int64_t b = 0; b < blocks; b++, x++) {
      ahead.ask(4 * Quant::bytes);
      const FourBlocks<Quant> four(place);
      int32x4_t sum[M][4];
      for (auto& of_batch_row : sum)
        for (auto& s : of_batch_row) s = vdupq_n_s32(0);
      add_pair<Quant, 0>(place, four, x, blocks, sum);
      add_pair<Quant, 1>(place, four, x, blocks, sum);
      add_pair<Quant, 2>(place, four, x, blocks, sum);
      add_pair<Quant, 3>(place, four, x, blocks, sum);
      for (int r = 0; r < 4; r++) place[r] += Quant::bytes;
#pragma GCC unroll 4
      for (int j = 0; j < M; j++) acc[j] = vfmaq_n_f32(acc[j], four.finish(sum[j], x[j * blocks]), x[j * blocks].d);
    }
    for (int j = 0; j < M; j++) store_rows(t.y + (batch_row + j) * t.y_stride + row, acc[j], rows);
  }
};
void matmul_q4_k(const MatmulTask& t) { for_each_four_rows<KQuantRows<Q4_KNeon>>(t); }
void matmul_q5_k(const MatmulTask& t) { for_each_four_rows<KQuantRows<Q5_KNeon>>(t); }
void matmul_q6_k(const MatmulTask& t) { for_each_four_rows<KQuantRows<Q6_KNeon>>(t); }

}  // namespace
}  // namespace qtensor
