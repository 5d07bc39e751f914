// Products of packed weights whose sums of 32 are scaled one by one: blocks of 32 as floats, IQ4_XS as integers. A step
// multiplies the first and the other sixteen values of 32.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "kernel_table.h"
#include "kernels/portable/always_inline.h"
#include "kernels/portable/unpacked_blocks.h"
#include "rows.h"
#include "slab_pass.h"

namespace qtensor {
namespace {

// One block of a batch row, with its sums as floats for mins.
struct alignas(64) SlabBatchBlock32 {
  int8_t q[256];
  float d[8], of_mins[8];
};
static_assert(sizeof(SlabBatchBlock32) == kBatchBytes);

void pack_slab_batch_row_32(const PackTask& t, int64_t row) {
  const BlockQ8x32* x = t.x_32 + row * t.blocks;
  for (int64_t b = 0; b < t.blocks; b++, x++) {
    auto& to = reinterpret_cast<SlabBatchBlock32*>(t.packed)[b * t.m + row];
    lay_bytes(t, row, x->q, to);
    for (int i = 0; i < 8; i++) {
      to.d[i] = x->d[i];
      to.of_mins[i] = float(x->sums[i]) * x->d[i];
    }
  }
}
template <>
constexpr SlabPacking kSlabPacking<SlabBatchBlock32>{sizeof(SlabBatchBlock32), pack_slab_batch_row_32};

struct StepsOf32 {
  static constexpr int apart = 16;
  static constexpr int a(int step) { return 32 * step; }
};
template <bool MINS, int FRACTION = 0>
struct SlabOf32 : SlabOfIntegers<32>, StepsOf32 {
  using Batch = SlabBatchBlock32;
  using Total = float32x4_t;
  static constexpr bool has_min = MINS;
  template <int M>
  struct Totals {
    float32x4_t f[2][M];
    QTENSOR_INLINE Totals() {
      for (auto& row : f)
        for (auto& of : row) of = zero();
    }
    QTENSOR_INLINE float32x4_t of(int j, int r) const { return f[r][j]; }
  };
  struct Header {
    const uint8_t *lines, *halves;
  };
  struct Scale {
    float32x4_t d, m;
  };
  QTENSOR_INLINE static Total zero() { return vdupq_n_f32(0.0f); }
  QTENSOR_INLINE static float32x4_t as_float(int32x4_t sum) { return as_floats<FRACTION>(sum); }
  template <int G>
  QTENSOR_INLINE static Scale scale(const Header& h) {
    if constexpr (!MINS) return {four_halves_at(h.halves + 2 * kGroupRows * G), zero()};
    const uint32x4_t both = vreinterpretq_u32_u8(line(h.lines, G));
    return {lower_halves(both), upper_halves(both)};
  }
  QTENSOR_INLINE static void add_scaled(Total& total, int32x4_t sum, const Scale& scale, const Batch& x, int g) {
    total = vfmaq_f32(total, as_float(sum), vmulq_n_f32(scale.d, x.d[g]));
    if constexpr (MINS) total = vfmaq_n_f32(total, scale.m, x.of_mins[g]);
  }
  template <int M>
  QTENSOR_INLINE static void add_kept(Totals<M>& total, const KeptSums<M>& sum, int r, const Scale& scale,
                                      const Batch* x, int g) {
#pragma GCC unroll 6
    for (int j = 0; j < M; j++) add_scaled(total.f[r][j], sum.of(j, r), scale, x[j], g);
  }
  QTENSOR_INLINE static float32x4_t finish(Total total, const Header&, const Batch&, float32x4_t acc) {
    return vaddq_f32(acc, total);
  }
};

// Nibbles of lines FIRST + 4 * step + i, as values or numbers of levels.
template <int FIRST, const int8_t* LEVELS = nullptr>
struct Nibbles {
  template <int STEP, class Lines>
  QTENSOR_INLINE static void values(Lines lines, int i, int8x16_t& a, int8x16_t& b) {
    Q4_KNeon::split(line(lines, FIRST + 4 * STEP + i), a, b);
    if constexpr (LEVELS == nullptr) return;
    const int8x16_t levels = vld1q_s8(LEVELS);
    a = vqtbl1q_s8(levels, vreinterpretq_u8_s8(a));
    b = vqtbl1q_s8(levels, vreinterpretq_u8_s8(b));
  }
};
// Where a register's values have their fifth bits, from value `first` on: in which byte of a line, and in which bit.
struct FifthBits {
  uint8x16_t byte, bit;
};
QTENSOR_INLINE FifthBits fifth_bits(const uint8_t*, int first) {
  alignas(16) static constexpr uint8_t dwords[16] = {0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12};
  return {vaddq_u8(vld1q_u8(dwords), vdupq_n_u8(uint8_t(first / 8))),
          vreinterpretq_u8_u32(vdupq_n_u32(first % 8 ? 0x80402010 : 0x08040201))};
}
template <class Block>
QTENSOR_INLINE FifthBits fifth_bits(RowLines<Block>, int first) {
  return {vcombine_u8(vdup_n_u8(uint8_t(first / 8)), vdup_n_u8(uint8_t(first / 8 + 1))),
          vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201))};
}
// The same with a line of fifth bits before each 32 values: bit l of a dword belongs to value l. MIDDLE: 16 is
// subtracted from values, by setting the bits above the nibble if the fifth bit is not set.
template <int FIRST, bool MIDDLE>
struct FiveBits {
  template <int STEP, class Lines>
  QTENSOR_INLINE static void values(Lines lines, int i, int8x16_t& a, int8x16_t& b) {
    const uint8x16_t fifth = line(lines, FIRST + 5 * STEP), bits = MIDDLE ? vmvnq_u8(fifth) : fifth;
    Q4_KNeon::split(line(lines, FIRST + 5 * STEP + 1 + i), a, b);
    const auto joined = [&](int8x16_t v, int first) __attribute__((always_inline)) {
      const FifthBits of = fifth_bits(lines, first);
      const int8x16_t set = vreinterpretq_s8_u8(vtstq_u8(vqtbl1q_u8(bits, of.byte), of.bit));
      return MIDDLE ? vsliq_n_s8(v, set, 4) : vbslq_s8(vdupq_n_u8(16), set, v);
    };
    a = joined(a, 4 * i);
    b = joined(b, 16 + 4 * i);
  }
};
template <>
struct SlabPairs<BlockQ8_0> : SlabOf32<false> {
  template <int STEP, class Lines>
  QTENSOR_INLINE static void values(Lines lines, int i, int8x16_t& a, int8x16_t& b) {
    a = vreinterpretq_s8_u8(line(lines, 8 * STEP + 2 * i));
    b = vreinterpretq_s8_u8(line(lines, 8 * STEP + 2 * i + 1));
  }
};
// Nibbles in the upper part of a byte. With its highest bit flipped, a value becomes a signed number, 8 smaller.
template <>
struct SlabPairs<BlockQ4_0> : SlabOf32<false, 4> {
  template <int STEP, class Lines>
  QTENSOR_INLINE static void values(Lines lines, int i, int8x16_t& a, int8x16_t& b) {
    const int8x16_t v = vreinterpretq_s8_u8(veorq_u8(line(lines, 4 * STEP + i), vdupq_n_u8(0x88)));
    a = vshlq_n_s8(v, 4);
    b = vandq_s8(v, vdupq_n_s8(-16));
  }
};
template <>
struct SlabPairs<BlockIQ4_NL> : SlabOf32<false>, Nibbles<0, kLevelsIQ4> {};
template <>
struct SlabPairs<BlockQ4_1> : SlabOf32<true>, Nibbles<8> {};
template <>
struct SlabPairs<BlockQ5_0> : SlabOf32<false>, FiveBits<0, true> {};
template <>
struct SlabPairs<BlockQ5_1> : SlabOf32<true>, FiveBits<8, false> {};
template <>
struct SlabPairs<BlockMXFP4> : SlabOf32<false>, Nibbles<0, kLevelsMXFP4> {};
template <>
struct SlabPairs<BlockIQ4_XS> : SlabOfIntegers<32>, StepsOf32, Nibbles<2, kLevelsIQ4> {
  using Header = SlabScales<2>;  // of even and of odd groups
  QTENSOR_INLINE static void unpack_header(const uint8x16_t (&v)[4], float32x4_t, Header& to) {
    const uint8x16_t high = v[0], low = v[1], four = vdupq_n_u8(15);
    to.d = lower_halves(vreinterpretq_u32_u8(high));
    // the byte with the upper bits of each group of one parity, which the shifts move to bits 4 and 5
    alignas(16) static constexpr uint8_t order[16] = {2, 2, 3, 3, 6, 6, 7, 7, 10, 10, 11, 11, 14, 14, 15, 15};
    const uint8x16_t spread = vqtbl1q_u8(high, vld1q_u8(order));
    const int8x16_t even = vreinterpretq_s8_u32(vdupq_n_u32(0x00040004));
    const auto joined = [&](uint8x16_t nibbles, int8x16_t shift) __attribute__((always_inline)) {
      const uint8x16_t six = vorrq_u8(nibbles, vandq_u8(vshlq_u8(spread, shift), vdupq_n_u8(48)));
      return vreinterpretq_s8_u8(vsubq_u8(six, vdupq_n_u8(32)));
    };
    to.bytes[0] = joined(vandq_u8(low, four), even);
    to.bytes[1] = joined(vshrq_n_u8(low, 4), vsubq_s8(even, vdupq_n_s8(2)));
  }
  template <int G>
  QTENSOR_INLINE static int32x4_t scale(const Header& h) {
    return h.scale<G % 2 * 4 + G / 2>();
  }
};

}  // namespace
}  // namespace qtensor
