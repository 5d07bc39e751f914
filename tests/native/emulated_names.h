// CUDA's names, and those of native/cuda/lanes.h, implemented with the machine of emulated_lanes.h.
#pragma once

#include <cmath>

#include "emulated_lanes.h"

#define LANES_KERNEL(threads, blocks) inline void
#define LANES_DEVICE inline
#define LANES_SHARED(name) uint8_t* const name = lanes::machine().shared()
#define LANES_UNROLL
#define LANES_LOOP

struct uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

#define threadIdx (Index3{lanes::machine().current, 0, 0})
#define blockIdx (lanes::machine().block_index)
#define gridDim (lanes::machine().grid)

inline void await_previous() { lanes::machine().fiber[lanes::machine().current].awaited = true; }
inline void fetch_ahead(const uint8_t*, uint32_t) {}
inline void __syncthreads() {
  if (lanes::fault_wanted("barrier")) return;
  lanes::machine().wait(lanes::machine().block, lanes::machine().threads, lanes::syncthreads);
}
inline void __syncwarp() { lanes::machine().wait(lanes::my_warp().barrier, 32, lanes::syncwarp); }
template <class T>
inline T __shfl_xor_sync(uint32_t mask, T value, int distance) {
  if (mask != ~0u) lanes::refuse("a shuffle of part of a warp");
  return lanes::exchange(value, lanes::lane() ^ unsigned(distance));
}
template <class T>
inline T __shfl_sync(uint32_t mask, T value, int from) {
  if (mask != ~0u) lanes::refuse("a shuffle of part of a warp");
  return lanes::exchange(value, unsigned(from));
}
inline uint32_t __reduce_max_sync(uint32_t, uint32_t v) {
  return lanes::reduce_all(v, [](uint32_t a, uint32_t b) { return a > b ? a : b; });
}
inline uint32_t __reduce_min_sync(uint32_t, uint32_t v) {
  return lanes::reduce_all(v, [](uint32_t a, uint32_t b) { return a < b ? a : b; });
}
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 32; i += 8) c += int(int8_t(a >> i)) * int(int8_t(b >> i));
  return c;
}
inline int lanes_dp2a(int a, int b, int c) {
  return c + int16_t(a) * int(int8_t(b)) + int16_t(a >> 16) * int(int8_t(b >> 8));
}
inline int __dp2a_lo(int a, int b, int c) { return lanes_dp2a(a, b, c); }
inline int __dp2a_hi(int a, int b, int c) { return lanes_dp2a(a, b >> 16, c); }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t which) {
  if (which & 0x8888) lanes::refuse("a byte's sign instead of a byte");
  const uint64_t all = uint64_t(b) << 32 | a;
  uint32_t r = 0;
  for (int i = 0; i < 4; i++) r |= uint32_t(all >> (8 * (which >> (4 * i) & 7)) & 255) << (8 * i);
  return r;
}
inline void mma_s8(int (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { lanes::multiply<2>(c, a, b); }
inline void mma_s8_short(int (&c)[4], const uint32_t (&a)[2], uint32_t b) {
  const uint32_t only[1] = {b};
  lanes::multiply<1>(c, a, only);
}

inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline float round_even(float a) { return __builtin_rintf(a); }
inline double round_even(double a) { return __builtin_rint(a); }
inline float __double2float_rn(double a) { return float(a); }
inline float __int2float_rn(int a) { return float(a); }
inline int __float2int_rn(float a) {  // like cvt.rni.s32.f32: 0 for NaN, and saturated if too large
  return a != a ? 0 : a >= 2147483648.0f ? INT32_MAX : a < -2147483648.0f ? INT32_MIN : int(__builtin_rintf(a));
}
inline uint32_t __float_as_uint(float a) {
  uint32_t u;
  std::memcpy(&u, &a, 4);
  return u;
}
inline float __uint_as_float(uint32_t a) {
  float f;
  std::memcpy(&f, &a, 4);
  return f;
}
inline float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
  if (exponent == 31) return __uint_as_float(sign | 0x7f800000 | (fraction << 13) | (fraction ? 0x400000 : 0));
  if (exponent != 0) return __uint_as_float(sign | ((exponent + 112) << 23) | (fraction << 13));
  return (sign ? -1.0f : 1.0f) * (float(fraction) * 5.9604644775390625e-8f);
}
inline uint16_t round_to_half(float f) {
  const uint32_t bits = __float_as_uint(f), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude >= 0x47800000) return uint16_t(sign | 0x7c00);
  if (magnitude < 0x38800000)
    return uint16_t(sign | uint32_t(__builtin_rintf(__uint_as_float(magnitude) * 16777216.0f)));
  return uint16_t(sign | ((magnitude + 0xfff + ((magnitude >> 13) & 1) - 0x38000000) >> 13));
}
template <class T>
inline T aligned_load(const void* p) {
  if (reinterpret_cast<uintptr_t>(p) % sizeof(T) != 0) lanes::refuse("a load that is not aligned");
  T v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline uint4 load16(const void* p) { return aligned_load<uint4>(p); }
inline uint32_t load4(const void* p) { return aligned_load<uint32_t>(p); }
inline uint2 stream8(const void* p) { return aligned_load<uint2>(p); }
inline uint32_t stream4(const void* p) { return aligned_load<uint32_t>(p); }
