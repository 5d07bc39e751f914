// Weights in rows with three or more batch rows: a block of 32 rows is unpacked to the values and scales from which
// multiply_kept (slab_pass.h) takes those of packed weights. Packing it first would take more instructions.
#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "blocks.h"
#include "kernels/portable/always_inline.h"
#include "packed_weights.h"
#include "rows.h"
#include "slab_pass.h"
#include "slab_pass_32.h"
#include "sub_blocks.h"

namespace qtensor {
namespace {

// Stores sixteen values of each of four rows.
QTENSOR_INLINE void keep_sixteen(const int8x16_t (&q)[4], int8_t (*to)[16]) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  for (int i = 0; i < 2; i++) {
    const int64x2_t a = vreinterpretq_s64_s8(q[2 * i]), b = vreinterpretq_s64_s8(q[2 * i + 1]);
    vst1q_s8(to[i], vreinterpretq_s8_s64(vzip1q_s64(a, b)));
    vst1q_s8(to[2 + i], vreinterpretq_s8_s64(vzip2q_s64(a, b)));
  }
#else
  uint8x16_t v[4];
  for (int r = 0; r < 4; r++) v[r] = vreinterpretq_u8_s8(q[r]);
  transpose_dwords(v);
  for (int i = 0; i < 4; i++) vst1q_s8(to[i], vreinterpretq_s8_u8(v[i]));
#endif
}

// Stores the scales of four rows and what SlabPairs<Block>::finish needs.
template <class Block>
QTENSOR_INLINE void keep_scales(SlabPass<Block>& t, int part, const uint8_t* const* place) {
  using P = SlabPairs<Block>;
  using File = Packing<Block>;
  if constexpr (requires { P::unpack_header; }) {
    uint8x16_t v[4];
    load_transposed(place, File::dword(0), v);
    float32x4_t d = vdupq_n_f32(0.0f);
    if constexpr (File::halves > 0) d = load_halves(place, File::half(0));
    P::unpack_header(v, d, t.unpacked[part]);
    unrolled<256 / P::group>(QTENSOR_UNROLLED(G) { t.scale[part][G] = P::template scale<G>(t.unpacked[part]); });
  } else {
    for (int j = 0; j < 8; j++) {
      const uint8_t* block[4];
      for (int r = 0; r < 4; r++) block[r] = place[r] + j * int64_t(sizeof(Block));
      t.scale[part][j].d = load_scales<Block>(block);
      if (P::has_min) t.scale[part][j].m = load_halves(block, 2);
    }
  }
}

// Unpacks the block at `from` of 32 rows and prefetches half of a later group. If there are only `rows` rows, the
// others are replaced by the first one.
template <class Block>
__attribute__((noinline)) void keep_rows(SlabPass<Block>& __restrict t, const uint8_t* __restrict from, int64_t rows,
                                         int64_t row_bytes, const uint8_t* later) {
  using P = SlabPairs<Block>;
  const uint8_t* until = later;
#pragma GCC unroll 1
  for (int part = 0; part < kRegisters; part++) {
    for (until += 2 * Packing<Block>::bytes; later < until; later += 64) __builtin_prefetch(later, 0, 2);
    const uint8_t* place[4];
    for (int r = 0; r < 4; r++) place[r] = from + (4 * part + r < rows ? 4 * part + r : 0) * row_bytes;
    keep_scales(t, part, place);
    unrolled<8>(QTENSOR_UNROLLED(S) {
      int8x16_t a[4], b[4];
      for (int r = 0; r < 4; r++) P::template values<S>(RowLines<Block>{place[r]}, 0, a[r], b[r]);
      keep_sixteen(a, t.kept[part] + P::a(S) / 4);
      keep_sixteen(b, t.kept[part] + (P::a(S) + P::apart) / 4);
    });
  }
}

}  // namespace
}  // namespace qtensor
