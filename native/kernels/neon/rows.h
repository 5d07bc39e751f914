// Shared by the NEON kernels of quantized weights: headers of four rows at a time, products of bytes, reductions.
#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "kernel_table.h"
#include "kernels/portable/always_inline.h"

namespace qtensor {
namespace {

// Returns `place`, which the compiler cannot use before `sum` has been computed. Otherwise gcc loads and unpacks all
// rows at once and keeps on the stack what does not fit in the registers.
template <class T>
QTENSOR_INLINE const T* after(const T* place, int32x4_t sum) {
  __asm__("" : "+r"(place) : "w"(sum));
  return place;
}

// The sums of the lanes of four vectors, one sum per lane.
QTENSOR_INLINE int32x4_t reduce_four(int32x4_t a, int32x4_t b, int32x4_t c, int32x4_t d) {
  return vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d));
}

// 32 products of bytes, as four sums.
QTENSOR_INLINE int32x4_t dot_32(int8x16_t q0, int8x16_t q1, const int8_t* x) {
  return vdotq_s32(vdotq_s32(vdupq_n_s32(0), q0, vld1q_s8(x)), q1, vld1q_s8(x + 16));
}
// sum + scale * (q * x), for four groups of 16 values with a scale each.
QTENSOR_INLINE int32x4_t add_four_groups(int32x4_t sum, const int8x16_t (&q)[4], const int8_t* x, int32x4_t scale) {
  const int32x4_t zero = vdupq_n_s32(0);
  sum = vmlaq_laneq_s32(sum, vdotq_s32(zero, q[0], vld1q_s8(x)), scale, 0);
  sum = vmlaq_laneq_s32(sum, vdotq_s32(zero, q[1], vld1q_s8(x + 16)), scale, 1);
  sum = vmlaq_laneq_s32(sum, vdotq_s32(zero, q[2], vld1q_s8(x + 32)), scale, 2);
  return vmlaq_laneq_s32(sum, vdotq_s32(zero, q[3], vld1q_s8(x + 48)), scale, 3);
}
// Sixteen products of words, as four sums.
QTENSOR_INLINE int32x4_t dot_words(const int16x8_t (&words)[2], const int16_t* x) {
  const int16x8_t low = vld1q_s16(x), high = vld1q_s16(x + 8);
  int32x4_t sum = vmull_s16(vget_low_s16(words[0]), vget_low_s16(low));
  sum = vmlal_high_s16(sum, words[0], low);
  sum = vmlal_s16(sum, vget_low_s16(words[1]), vget_low_s16(high));
  return vmlal_high_s16(sum, words[1], high);
}

// Halves of four rows as floats.
QTENSOR_INLINE float32x4_t load_halves(const uint8_t* const* places, int64_t at = 0) {
  half d[4];
  for (int r = 0; r < 4; r++) __builtin_memcpy(&d[r], places[r] + at, 2);
  uint16x4_t bits = vdup_n_u16(d[0]);
  bits = vset_lane_u16(d[1], bits, 1);
  bits = vset_lane_u16(d[2], bits, 2);
  bits = vset_lane_u16(d[3], bits, 3);
  return vcvt_f32_f16(vreinterpret_f16_u16(bits));
}

// The halves in the lower and in the upper words of dwords.
QTENSOR_INLINE float32x4_t lower_halves(uint32x4_t v) { return vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(v))); }
QTENSOR_INLINE float32x4_t upper_halves(uint32x4_t v) { return vcvt_f32_f16(vreinterpret_f16_u16(vshrn_n_u32(v, 16))); }

// Transposes four dwords of four rows: v[i] becomes dword i of all rows.
QTENSOR_INLINE void transpose_dwords(uint8x16_t (&v)[4]) {
  uint32x4_t row[4];
  for (int r = 0; r < 4; r++) row[r] = vreinterpretq_u32_u8(v[r]);
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    const auto trn = [&](int r) { return i == 0 ? vtrn1q_u32(row[r], row[r + 1]) : vtrn2q_u32(row[r], row[r + 1]); };
    const uint64x2_t a = vreinterpretq_u64_u32(trn(0)), b = vreinterpretq_u64_u32(trn(2));
    v[i] = vreinterpretq_u8_u64(vtrn1q_u64(a, b));
    v[2 + i] = vreinterpretq_u8_u64(vtrn2q_u64(a, b));
  }
}
QTENSOR_INLINE void load_transposed(const uint8_t* const* places, int64_t at, uint8x16_t (&v)[4]) {
  for (int r = 0; r < 4; r++) v[r] = vld1q_u8(places[r] + at);
  transpose_dwords(v);
}

// The block headers {half d, dmin; uint8 packed[12]} of four rows of Q4_K or Q5_K. They are transposed to one dword of
// each row per register, so that the six-bit scales and mins of all four are unpacked together.
struct FourHeaders {
  float32x4_t d, dmin;
  uint8x16_t scale[2], min[2];  // of sub-blocks 0..3 and 4..7; four bytes per row
};
QTENSOR_INLINE FourHeaders unpack_headers(uint8x16_t halves, uint8x16_t a, uint8x16_t b, uint8x16_t c) {
  const uint32x4_t both = vreinterpretq_u32_u8(halves);
  const uint8x16_t six = vdupq_n_u8(63), upper = vdupq_n_u8(0x30);
  FourHeaders h;
  h.d = lower_halves(both);
  h.dmin = upper_halves(both);
  h.scale[0] = vandq_u8(a, six);
  h.min[0] = vandq_u8(b, six);
  h.scale[1] = vbslq_u8(vdupq_n_u8(15), c, vandq_u8(vshrq_n_u8(a, 2), upper));
  h.min[1] = vsriq_n_u8(vandq_u8(vshrq_n_u8(b, 2), upper), c, 4);
  return h;
}
QTENSOR_INLINE FourHeaders four_headers(const uint8_t* const* place) {
  uint8x16_t v[4];
  load_transposed(place, 0, v);
  return unpack_headers(v[0], v[1], v[2], v[3]);
}

// The addresses of four rows, beginning at `row`; missing rows are replaced by the first one.
QTENSOR_INLINE void find_four_rows(const MatmulTask& t, int64_t row, int rows, const uint8_t* (&place)[4]) {
  for (int r = 0; r < 4; r++) place[r] = t.weight + (row + (r < rows ? r : 0)) * t.row_bytes;
}
QTENSOR_INLINE void store_rows(float* y, float32x4_t value, int rows) {
  float all[4];
  vst1q_f32(all, value);
  __builtin_memcpy(y, all, size_t(rows) * sizeof(float));
}

// Calls Kernel::rows<M>(t, row, rows, first batch row) for four rows and up to Kernel::most_batch batch rows at a time.
template <class Kernel>
inline void for_each_four_rows(const MatmulTask& t) {
  for (int64_t row = t.row_begin; row < t.row_end; row += 4) {
    const int rows = t.row_end - row < 4 ? int(t.row_end - row) : 4;
    int64_t j = 0;
    for (; j + Kernel::most_batch <= t.m; j += Kernel::most_batch)
      Kernel::template rows<Kernel::most_batch>(t, row, rows, j);
    if constexpr (Kernel::most_batch > 2)
      for (; j + 2 <= t.m; j += 2) Kernel::template rows<2>(t, row, rows, j);
    for (; j < t.m; j++) Kernel::template rows<1>(t, row, rows, j);
  }
}

}  // namespace
}  // namespace qtensor
