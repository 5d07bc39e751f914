// Float functions that several kernels share, with the same bits as their counterparts in kernels/portable.
#pragma once

#include "cuda/lanes.h"

namespace qtensor {
namespace cuda {

constexpr uint32_t kNaN = 0x7fc00000;  // the NaN that is written; devices generate different ones

LANES_DEVICE uint16_t float_to_half(float f) {
  const uint32_t bits = __float_as_uint(f), magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return uint16_t(((bits >> 16) & 0x8000) | 0x7e00 | ((magnitude >> 13) & 0x3ff));
  return round_to_half(f);
}

// p * 2^n for integers n in [-126, 127]
LANES_DEVICE float times_power(float p, float n) {
  return __fmul_rn(p, __uint_as_float(uint32_t(__float2int_rn(n) + 127) << 23));
}
LANES_DEVICE float exp_of(float x) {  // v_exp of float_kernels.h
  x = -87.0f > x ? -87.0f : x;        // in this order, NaN is propagated
  x = 88.0f < x ? 88.0f : x;
  const float n = round_even(__fmul_rn(x, 1.44269504f));
  float r = __fmaf_rn(n, -0.693145751953125f, x);
  r = __fmaf_rn(n, -1.42860682e-6f, r);
  float p = 1.0f / 5040.0f;
  p = __fmaf_rn(p, r, 1.0f / 720.0f);
  p = __fmaf_rn(p, r, 1.0f / 120.0f);
  p = __fmaf_rn(p, r, 1.0f / 24.0f);
  p = __fmaf_rn(p, r, 1.0f / 6.0f);
  p = __fmaf_rn(p, r, 0.5f);
  p = __fmaf_rn(p, r, 1.0f);
  p = __fmaf_rn(p, r, 1.0f);
  return times_power(p, n);
}
LANES_DEVICE float exp2_of(float x) {  // v_exp2 of byte_attention.h
  x = -100.0f > x ? -100.0f : x;
  const float n = round_even(x), r = __fsub_rn(x, n);
  float p = 0.001326472731307149f;
  p = __fmaf_rn(p, r, 0.009671512991189957f);
  p = __fmaf_rn(p, r, 0.05550733581185341f);
  p = __fmaf_rn(p, r, 0.24022242426872253f);
  p = __fmaf_rn(p, r, 0.6931470036506653f);
  p = __fmaf_rn(p, r, 1.0f);
  return times_power(p, n);
}

// The virtual vector of 16 lanes is half a warp; the other half computes the same. Its horizontal reductions, in the
// specified order:
LANES_DEVICE float sum_of_lanes(float v) {
  for (int width = 8; width >= 1; width /= 2) v = __fadd_rn(v, __shfl_xor_sync(kWarp, v, width));
  return v;
}
LANES_DEVICE float max_of_lanes(float v) {
  for (int width = 8; width >= 1; width /= 2) {
    const float other = __shfl_xor_sync(kWarp, v, width);
    v = v > other ? v : other;
  }
  return v;
}

}  // namespace cuda
}  // namespace qtensor
