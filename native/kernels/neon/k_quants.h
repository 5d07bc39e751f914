// The values of K-quants for sdot, which adds four products of signed bytes in each lane. The values fit in signed
// bytes, 0..15, 0..31 and 0..63, so no operand must be converted.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "blocks.h"
#include "kernels/portable/always_inline.h"

namespace qtensor {
namespace {

// A format unpacks a pair of sub-blocks (64 values) of one row at a time. `split` unpacks sixteen bytes to the values
// in their lower nibbles, a, and in their upper nibbles, b.
struct Q4_KNeon {
  static constexpr int64_t bytes = sizeof(BlockQ4_K);
  static constexpr bool has_min = true;
  static constexpr int offset = 0;
  struct High {};
  static QTENSOR_INLINE High high_of(const uint8_t*) { return {}; }
  static QTENSOR_INLINE void split(uint8x16_t v, int8x16_t& a, int8x16_t& b) {
    a = vreinterpretq_s8_u8(vandq_u8(v, vdupq_n_u8(15)));
    b = vreinterpretq_s8_u8(vshrq_n_u8(v, 4));
  }
  template <int C>
  static QTENSOR_INLINE void pair(const uint8_t* block, const High&, int8x16_t (&q)[4]) {
    for (int i = 0; i < 2; i++) split(vld1q_u8(block + 16 + 32 * C + 16 * i), q[i], q[2 + i]);
  }
};

struct Q5_KNeon {
  static constexpr int64_t bytes = sizeof(BlockQ5_K);
  static constexpr bool has_min = true;
  static constexpr int offset = 0;
  struct High {
    uint8x16_t bits[2];
  };
  static QTENSOR_INLINE High high_of(const uint8_t* block) { return {{vld1q_u8(block + 16), vld1q_u8(block + 32)}}; }
  template <int BIT>  // moved to bit 4
  static QTENSOR_INLINE uint8x16_t fifth(uint8x16_t bits) {
    if constexpr (BIT < 4) bits = vshlq_n_u8(bits, 4 - BIT);
    if constexpr (BIT > 4) bits = vshrq_n_u8(bits, BIT - 4);
    return vandq_u8(bits, vdupq_n_u8(16));
  }
  template <int C>
  static QTENSOR_INLINE void split(uint8x16_t v, uint8x16_t bits, int8x16_t& a, int8x16_t& b) {
    a = vreinterpretq_s8_u8(vbslq_u8(vdupq_n_u8(15), v, fifth<2 * C>(bits)));
    b = vreinterpretq_s8_u8(vsriq_n_u8(fifth<2 * C + 1>(bits), v, 4));
  }
  template <int C>
  static QTENSOR_INLINE void pair(const uint8_t* block, const High& high, int8x16_t (&q)[4]) {
    for (int i = 0; i < 2; i++) split<C>(vld1q_u8(block + 48 + 32 * C + 16 * i), high.bits[i], q[i], q[2 + i]);
  }
};

struct Q6_KNeon {
  static constexpr int64_t bytes = sizeof(BlockQ6_K);
  static constexpr bool has_min = false;
  static constexpr int offset = 32;
  struct High {};
  static QTENSOR_INLINE High high_of(const uint8_t*) { return {}; }
  template <int C>
  static QTENSOR_INLINE void pair(const uint8_t* block, const High&, int8x16_t (&q)[4]) {
    constexpr int n = C / 2;
    const uint8x16_t two = vdupq_n_u8(0x30);
    for (int i = 0; i < 4; i++) {
      const uint8x16_t low = vld1q_u8(block + 64 * n + 16 * i);
      const uint8x16_t high = vld1q_u8(block + 128 + 32 * n + 16 * (i % 2));
      if constexpr (C % 2 == 0) {
        const uint8x16_t upper = vandq_u8(i < 2 ? vshlq_n_u8(high, 4) : vshlq_n_u8(high, 2), two);
        q[i] = vreinterpretq_s8_u8(vbslq_u8(vdupq_n_u8(15), low, upper));
      } else {
        const uint8x16_t upper = vandq_u8(i < 2 ? high : vshrq_n_u8(high, 2), two);
        q[i] = vreinterpretq_s8_u8(vsriq_n_u8(upper, low, 4));
      }
    }
  }
};

}  // namespace
}  // namespace qtensor
