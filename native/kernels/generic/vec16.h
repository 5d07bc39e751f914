// The virtual vector of 16 float lanes, in plain C++. The versions in avx2/, avx512/ and neon/ have the same names and
// give the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "blocks.h"

namespace qtensor {
namespace {

struct V16 {
  float lane[16];
};

inline V16 v_set(float x) {
  V16 r;
  for (float& l : r.lane) l = x;
  return r;
}
inline V16 v_load(const float* p) {
  V16 r;
  __builtin_memcpy(r.lane, p, sizeof r.lane);
  return r;
}
inline void v_store(float* p, V16 a) { __builtin_memcpy(p, a.lane, sizeof a.lane); }
// Loads the first n < 16 lanes; the others are zero.
inline V16 v_load_first(const float* p, int64_t n) {
  V16 r = v_set(0.0f);
  __builtin_memcpy(r.lane, p, size_t(n) * sizeof(float));
  return r;
}
inline void v_store_first(float* p, V16 a, int64_t n) { __builtin_memcpy(p, a.lane, size_t(n) * sizeof(float)); }

#define QTENSOR_LANEWISE(name, expression)      \
  inline V16 name(V16 a, V16 b) {               \
    V16 r;                                      \
    for (int i = 0; i < 16; i++) {              \
      const float x = a.lane[i], y = b.lane[i]; \
      r.lane[i] = expression;                   \
    }                                           \
    return r;                                   \
  }
QTENSOR_LANEWISE(v_add, x + y)
QTENSOR_LANEWISE(v_sub, x - y)
QTENSOR_LANEWISE(v_mul, x* y)
QTENSOR_LANEWISE(v_div, x / y)
// Like the x86 instructions: the result is the second operand if the comparison is false, so also if one is NaN.
QTENSOR_LANEWISE(v_max, x > y ? x : y)
QTENSOR_LANEWISE(v_min, x < y ? x : y)
#undef QTENSOR_LANEWISE

// a * b + c, rounded once
inline V16 v_fma(V16 a, V16 b, V16 c) {
  V16 r;
  for (int i = 0; i < 16; i++) r.lane[i] = __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]);
  return r;
}
inline V16 v_round(V16 a) {
  V16 r;
  for (int i = 0; i < 16; i++) r.lane[i] = __builtin_rintf(a.lane[i]);
  return r;
}
// a * 2^n for integers n in [-126, 127]
inline V16 v_scale(V16 a, V16 n) {
  V16 r;
  for (int i = 0; i < 16; i++) {
    const uint32_t bits = uint32_t(int32_t(n.lane[i]) + 127) << 23;
    float power;
    __builtin_memcpy(&power, &bits, 4);
    r.lane[i] = a.lane[i] * power;
  }
  return r;
}
inline float v_reduce_add(V16 a) {
  for (int width = 8; width >= 1; width /= 2)
    for (int i = 0; i < width; i++) a.lane[i] = a.lane[i] + a.lane[i + width];
  return a.lane[0];
}
// v_reduce_add of four vectors, to y[0..3].
inline void v_store_sums(float* y, const V16 (&a)[4]) {
  for (int r = 0; r < 4; r++) y[r] = v_reduce_add(a[r]);
}
inline float v_reduce_max(V16 a) {
  for (int width = 8; width >= 1; width /= 2)
    for (int i = 0; i < width; i++) a.lane[i] = a.lane[i] > a.lane[i + width] ? a.lane[i] : a.lane[i + width];
  return a.lane[0];
}

inline float half_to_float(half h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
  uint32_t bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000 | (fraction << 13) | (fraction ? 0x400000 : 0);  // like vcvtph2ps: NaN becomes quiet
  } else if (exponent != 0) {
    bits = sign | ((exponent + 112) << 23) | (fraction << 13);
  } else {
    const float small = float(fraction) * 5.9604644775390625e-8f;  // 2^-24
    __builtin_memcpy(&bits, &small, 4);
    bits |= sign;
  }
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}
inline half float_to_half(float f) {
  uint32_t bits;
  __builtin_memcpy(&bits, &f, 4);
  const half sign = half((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return half(sign | 0x7e00 | ((magnitude >> 13) & 0x3ff));
  if (magnitude >= 0x47800000) return half(sign | 0x7c00);
  if (magnitude < 0x38800000) {  // below 2^-14: a subnormal half, in steps of 2^-24
    float positive;
    __builtin_memcpy(&positive, &magnitude, 4);
    return half(sign | uint32_t(__builtin_rintf(positive * 16777216.0f)));
  }
  const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
  return half(sign | ((rounded - 0x38000000) >> 13));
}
inline V16 v_load_half(const half* p) {
  V16 r;
  half bits[16];  // copied, because weights in a file are not aligned
  __builtin_memcpy(bits, p, sizeof bits);
  for (int i = 0; i < 16; i++) r.lane[i] = half_to_float(bits[i]);
  return r;
}
inline void v_store_half(half* p, V16 a) {
  for (int i = 0; i < 16; i++) p[i] = float_to_half(a.lane[i]);
}
inline V16 v_load_bf16(const uint16_t* p) {
  V16 r;
  for (int i = 0; i < 16; i++) {
    uint16_t top;
    __builtin_memcpy(&top, p + i, 2);
    const uint32_t bits = uint32_t(top) << 16;
    __builtin_memcpy(&r.lane[i], &bits, 4);
  }
  return r;
}
// The bit pattern of the largest |x|. For magnitudes, bit patterns have the order of the floats, and infinity and NaN
// are the largest on every machine.
template <int COUNT>
inline uint32_t v_top_magnitude(const V16 (&v)[COUNT]) {
  uint32_t top = 0;
  for (const V16& a : v)
    for (float x : a.lane) {
      uint32_t bits;
      __builtin_memcpy(&bits, &x, 4);
      bits &= 0x7fffffff;
      top = bits > top ? bits : top;
    }
  return top;
}
// round_to_even(a * scale) as 16 signed bytes. |a * scale| must not exceed 127.
inline void v_store_bytes(int8_t* p, V16 a, V16 scale) {
  for (int i = 0; i < 16; i++) p[i] = int8_t(__builtin_rintf(a.lane[i] * scale.lane[i]));
}
// The same for a whole block, with the sums of its bytes.
inline void v_store_block(BlockQ8K& block, const V16 (&v)[16], V16 scale) {
  for (int i = 0; i < 16; i++) {
    v_store_bytes(block.q + 16 * i, v[i], scale);
    int sum = 0;
    for (int j = 0; j < 16; j++) sum += block.q[16 * i + j];
    block.sums16[i] = int16_t(sum);
  }
  for (int i = 0; i < 8; i++) block.sums32[i] = int16_t(block.sums16[2 * i] + block.sums16[2 * i + 1]);
}
inline V16 v_load_int(const int32_t* p) {
  V16 r;
  for (int i = 0; i < 16; i++) r.lane[i] = float(p[i]);
  return r;
}
// Lane i becomes lane i ^ WIDTH; WIDTH is 1, 2, 4 or 8.
template <int WIDTH>
inline V16 v_swap(V16 a) {
  V16 r;
  for (int i = 0; i < 16; i++) r.lane[i] = a.lane[i ^ WIDTH];
  return r;
}
// The larger magnitude of each lane, compared by bits, so that NaN is the largest. a has no negative lanes.
inline V16 v_max_magnitude(V16 a, V16 b) {
  V16 r;
  for (int i = 0; i < 16; i++) {
    uint32_t x, y;
    __builtin_memcpy(&x, &a.lane[i], 4);
    __builtin_memcpy(&y, &b.lane[i], 4);
    y &= 0x7fffffff;
    x = x > y ? x : y;
    __builtin_memcpy(&r.lane[i], &x, 4);
  }
  return r;
}
// 1 in lanes where a > b, else 0.
inline V16 v_one_above(V16 a, V16 b) {
  V16 r;
  for (int i = 0; i < 16; i++) r.lane[i] = a.lane[i] > b.lane[i] ? 1.0f : 0.0f;
  return r;
}

}  // namespace
}  // namespace qtensor
