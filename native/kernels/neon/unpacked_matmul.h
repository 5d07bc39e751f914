// Products of the formats in blocks of 256 that have no kernels of their own (kernels/portable/unpacked_blocks.h). A
// block of one weight row is unpacked once for up to kTogether batch rows.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "kernel_table.h"
#include "kernels/portable/always_inline.h"
#include "kernels/portable/unpacked_blocks.h"
#include "rows.h"
#include "slab_pass.h"
#include "slab_pass_32.h"
#include "vec16.h"

namespace qtensor {
namespace {

constexpr int kTogether = 16;

template <class Block>
QTENSOR_INLINE void unpack_block(const Block& block, Unpacked256& out) {
  unpack(block, out);
}
// Compilers do not turn a table lookup into tbl.
QTENSOR_INLINE void unpack_block(const BlockIQ4_XS& w, Unpacked256& out) {
  const RowLines<BlockIQ4_XS> row{reinterpret_cast<const uint8_t*>(&w)};
  unrolled<8>(QTENSOR_UNROLLED(S) {
    int8x16_t first, second;
    SlabPairs<BlockIQ4_XS>::values<S>(row, 0, first, second);
    vst1q_s8(out.q + 32 * S, first);
    vst1q_s8(out.q + 32 * S + 16, second);
  });
  unpack_scales(w, out);
  out.d = w.d;
}

template <class F>
inline void unpacked_rows(const MatmulTask& t, int64_t row, int64_t first, int count) {
  using Block = typename F::Block;
  float acc[kTogether] = {};
  const uint8_t* place = t.weight + row * t.row_bytes;
  for (int64_t b = 0; b < t.blocks_per_row; b++, place += sizeof(Block)) {
    Block block;
    __builtin_memcpy(&block, place, sizeof block);
    Unpacked256 w;
    unpack_block(block, w);
    const float d = half_to_float(w.d) * F::kStep, dmin = F::kHasMins ? half_to_float(w.dmin) : 0.0f;
    const BlockQ8K* x = t.blocks + first * t.blocks_per_row + b;
    for (int j = 0; j < count; j++, x += t.blocks_per_row) {
      int32x4_t sum = vdupq_n_s32(0);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        const int8_t* const at = w.q + 64 * i;
        const int8x16_t q[4] = {vld1q_s8(at), vld1q_s8(at + 16), vld1q_s8(at + 32), vld1q_s8(at + 48)};
        sum = add_four_groups(sum, q, x->q + 64 * i, vmovl_s16(vld1_s16(w.scales + 4 * i)));
      }
      float f = float(vaddvq_s32(sum)) * d;
      if constexpr (F::kHasMins) {
        const int16x8_t mins[2] = {vld1q_s16(w.mins), vld1q_s16(w.mins + 8)};
        f = __builtin_fmaf(-float(vaddvq_s32(dot_words(mins, x->sums16))), dmin, f);
      }
      acc[j] = __builtin_fmaf(f, x->d, acc[j]);
    }
  }
  for (int j = 0; j < count; j++) t.y[(first + j) * t.y_stride + row] = acc[j];
}

template <class F>
void matmul_unpacked(const MatmulTask& t) {
  for (int64_t row = t.row_begin; row < t.row_end; row++)
    for (int64_t j = 0; j < t.m; j += kTogether)
      unpacked_rows<F>(t, row, j, int(t.m - j < kTogether ? t.m - j : kTogether));
}

MatmulKernel unpacked_kernel(Format format) {
  return with_format_256(
      format, []<class F>(F) -> MatmulKernel { return matmul_unpacked<F>; }, [] { return MatmulKernel(nullptr); });
}

}  // namespace
}  // namespace qtensor
