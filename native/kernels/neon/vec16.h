// The virtual vector of 16 float lanes in four NEON registers. Same names and bits as in generic/vec16.h.
// v_max and v_min select by a comparison, because fmax propagates every NaN and fmaxnm none. Products and sums are
// separate intrinsics, so the file must be compiled with -ffp-contract=off.
#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "blocks.h"

namespace qtensor {
namespace {

struct V16 {
  float32x4_t part[4];
};

#define QTENSOR_LANEWISE1(name, expression) \
  inline V16 name(V16 a) {                  \
    V16 r;                                  \
    for (int i = 0; i < 4; i++) {           \
      const float32x4_t x = a.part[i];      \
      r.part[i] = expression;               \
    }                                       \
    return r;                               \
  }
#define QTENSOR_LANEWISE2(name, expression)           \
  inline V16 name(V16 a, V16 b) {                     \
    V16 r;                                            \
    for (int i = 0; i < 4; i++) {                     \
      const float32x4_t x = a.part[i], y = b.part[i]; \
      r.part[i] = expression;                         \
    }                                                 \
    return r;                                         \
  }

inline V16 v_set(float x) {
  const float32x4_t all = vdupq_n_f32(x);
  return {{all, all, all, all}};
}
inline V16 v_load(const float* p) { return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}}; }
inline void v_store(float* p, V16 a) {
  for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, a.part[i]);
}
inline V16 v_load_first(const float* p, int64_t n) {
  float padded[16] = {};
  __builtin_memcpy(padded, p, size_t(n) * sizeof(float));
  return v_load(padded);
}
inline void v_store_first(float* p, V16 a, int64_t n) {
  float whole[16];
  v_store(whole, a);
  __builtin_memcpy(p, whole, size_t(n) * sizeof(float));
}
inline float32x4_t larger(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
inline float32x4_t smaller(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
inline uint32x4_t magnitude(float32x4_t x) { return vreinterpretq_u32_f32(vabsq_f32(x)); }
QTENSOR_LANEWISE2(v_add, vaddq_f32(x, y))
QTENSOR_LANEWISE2(v_sub, vsubq_f32(x, y))
QTENSOR_LANEWISE2(v_mul, vmulq_f32(x, y))
QTENSOR_LANEWISE2(v_div, vdivq_f32(x, y))
QTENSOR_LANEWISE2(v_max, larger(x, y))
QTENSOR_LANEWISE2(v_min, smaller(x, y))
QTENSOR_LANEWISE1(v_round, vrndnq_f32(x))
// a * 2^n; if n is NaN, so is a
QTENSOR_LANEWISE2(v_scale,
                  vmulq_f32(x, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(y), vdupq_n_s32(127)), 23))))
QTENSOR_LANEWISE2(v_max_magnitude, vreinterpretq_f32_u32(vmaxq_u32(vreinterpretq_u32_f32(x), magnitude(y))))
QTENSOR_LANEWISE2(v_one_above,
                  vreinterpretq_f32_u32(vandq_u32(vcgtq_f32(x, y), vreinterpretq_u32_f32(vdupq_n_f32(1.0f)))))
#undef QTENSOR_LANEWISE1
#undef QTENSOR_LANEWISE2

inline V16 v_fma(V16 a, V16 b, V16 c) {
  V16 r;
  for (int i = 0; i < 4; i++) r.part[i] = vfmaq_f32(c.part[i], a.part[i], b.part[i]);
  return r;
}
inline float v_reduce_add(V16 a) {
  const float32x4_t four = vaddq_f32(vaddq_f32(a.part[0], a.part[2]), vaddq_f32(a.part[1], a.part[3]));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
// v_reduce_add of four vectors, to y[0..3].
inline void v_store_sums(float* y, const V16 (&a)[4]) {
  for (int r = 0; r < 4; r++) y[r] = v_reduce_add(a[r]);
}
inline float v_reduce_max(V16 a) {
  const float32x4_t four = larger(larger(a.part[0], a.part[2]), larger(a.part[1], a.part[3]));
  const float32x2_t x = vget_low_f32(four), y = vget_high_f32(four), two = vbsl_f32(vcgt_f32(x, y), x, y);
  const float first = vget_lane_f32(two, 0), second = vget_lane_f32(two, 1);
  return first > second ? first : second;
}
inline float half_to_float(half h) {
  __fp16 value;
  __builtin_memcpy(&value, &h, 2);
  return float(value);
}
inline float32x4_t four_halves(const half* p) {  // p need not be aligned
  uint16x4_t bits;
  __builtin_memcpy(&bits, p, 8);
  return vcvt_f32_f16(vreinterpret_f16_u16(bits));
}
inline V16 v_load_half(const half* p) {
  return {{four_halves(p), four_halves(p + 4), four_halves(p + 8), four_halves(p + 12)}};
}
inline void v_store_half(half* p, V16 a) {
  for (int i = 0; i < 4; i++) {
    const uint16x4_t bits = vreinterpret_u16_f16(vcvt_f16_f32(a.part[i]));
    __builtin_memcpy(p + 4 * i, &bits, 8);
  }
}
inline V16 v_load_bf16(const uint16_t* p) {
  V16 r;
  for (int i = 0; i < 4; i++) {
    uint16x4_t bits;
    __builtin_memcpy(&bits, p + 4 * i, 8);
    r.part[i] = vreinterpretq_f32_u32(vshll_n_u16(bits, 16));
  }
  return r;
}
template <int COUNT>
inline uint32_t v_top_magnitude(const V16 (&v)[COUNT]) {
  uint32x4_t top = vdupq_n_u32(0);
  for (const V16& a : v)
    for (int i = 0; i < 4; i++) top = vmaxq_u32(top, magnitude(a.part[i]));
  return vmaxvq_u32(top);
}
inline int8x16_t as_bytes(V16 a) {  // rounded to even
  const int16x8_t low = vcombine_s16(vmovn_s32(vcvtnq_s32_f32(a.part[0])), vmovn_s32(vcvtnq_s32_f32(a.part[1])));
  const int16x8_t high = vcombine_s16(vmovn_s32(vcvtnq_s32_f32(a.part[2])), vmovn_s32(vcvtnq_s32_f32(a.part[3])));
  return vcombine_s8(vmovn_s16(low), vmovn_s16(high));
}
inline void v_store_bytes(int8_t* p, V16 a, V16 scale) { vst1q_s8(p, as_bytes(v_mul(a, scale))); }
inline void v_store_block(BlockQ8K& block, const V16 (&v)[16], V16 scale) {
  int16x8_t pairs[16];
  for (int i = 0; i < 16; i++) {
    const int8x16_t bytes = as_bytes(v_mul(v[i], scale));
    vst1q_s8(block.q + 16 * i, bytes);
    pairs[i] = vpaddlq_s8(bytes);
  }
  int16x8_t sums[2];
  for (int i = 0; i < 2; i++) {
    const int16x8_t* const p = pairs + 8 * i;
    sums[i] = vpaddq_s16(vpaddq_s16(vpaddq_s16(p[0], p[1]), vpaddq_s16(p[2], p[3])),
                         vpaddq_s16(vpaddq_s16(p[4], p[5]), vpaddq_s16(p[6], p[7])));
    vst1q_s16(block.sums16 + 8 * i, sums[i]);
  }
  vst1q_s16(block.sums32, vpaddq_s16(sums[0], sums[1]));
}
inline V16 v_load_int(const int32_t* p) {
  V16 r;
  for (int i = 0; i < 4; i++) r.part[i] = vcvtq_f32_s32(vld1q_s32(p + 4 * i));
  return r;
}
template <int WIDTH>
inline V16 v_swap(V16 a) {
  const float32x4_t* const p = a.part;
  if constexpr (WIDTH == 8) return {{p[2], p[3], p[0], p[1]}};
  if constexpr (WIDTH == 4) return {{p[1], p[0], p[3], p[2]}};
  V16 r;
  for (int i = 0; i < 4; i++) r.part[i] = WIDTH == 2 ? vextq_f32(p[i], p[i], 2) : vrev64q_f32(p[i]);
  return r;
}

}  // namespace
}  // namespace qtensor
