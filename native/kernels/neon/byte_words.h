// The operations that kernels/portable/word_dots.h needs, for NEON with sdot and udot. Scores are products of signed
// bytes. For values, a weight of 15 bits is two unsigned bytes, and levels are unsigned as well (128 + level).
#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "kernels/portable/always_inline.h"
#include "vec16.h"

namespace qtensor {
namespace {

using QueryLane = int8_t;
using Words = uint8x16_t;
constexpr int kWordBytes = 16, kDotVectors = 4;
constexpr int64_t kBlockLanes = kDotVectors * kWordBytes / 4;
// Time of one group of a block of kBlockLanes lanes, for four queries, in the units of fetch_ahead.h. Not measured yet.
constexpr uint32_t kScoreGroupTime = 7, kValueGroupTime = 14;

inline Words w_load(const uint8_t* p) { return vld1q_u8(p); }
inline void w_store(void* p, Words a) { vst1q_u8(static_cast<uint8_t*>(p), a); }
inline Words w_bytes(int x) { return vdupq_n_u8(uint8_t(x)); }
inline Words w_and(Words a, Words b) { return vandq_u8(a, b); }
inline Words w_xor(Words a, Words b) { return veorq_u8(a, b); }
// The lowest BITS bits of each byte of a, and the other bits of b.
template <int BITS>
inline Words w_lower_bits(Words a, Words b) {
  return vbslq_u8(w_bytes((1 << BITS) - 1), a, b);
}
template <int BITS>
inline Words w_right(Words a) {
  if constexpr (BITS == 0)
    return a;
  else
    return vshrq_n_u8(a, BITS);
}
template <int BITS>
inline Words w_left(Words a) {
  return vshlq_n_u8(a, BITS);
}
template <bool SIGNED>
inline Words w_table(const uint8_t* sixteen) {
  return SIGNED ? w_xor(vld1q_u8(sixteen), w_bytes(128)) : vld1q_u8(sixteen);
}
template <int BITS>
inline Words w_look_up(Words table, Words numbers) {
  return vqtbl1q_u8(table, w_and(numbers, w_bytes((1 << BITS) - 1)));
}

inline void lay_query(const int8_t* bytes, int64_t dim, QueryLane* out) { __builtin_memcpy(out, bytes, size_t(dim)); }
// Stores each four weights as their four lower bytes and then their four upper bytes.
inline void lay_weights(int16_t* out, V16 whole) {
  uint16x8_t words[2];
  for (int i = 0; i < 2; i++)
    words[i] =
        vcombine_u16(vmovn_u32(vcvtq_u32_f32(whole.part[2 * i])), vmovn_u32(vcvtq_u32_f32(whole.part[2 * i + 1])));
  const uint8x16_t a = vreinterpretq_u8_u16(words[0]), b = vreinterpretq_u8_u16(words[1]);
  const uint32x4_t low = vreinterpretq_u32_u8(vuzp1q_u8(a, b)), high = vreinterpretq_u32_u8(vuzp2q_u8(a, b));
  uint8_t* const bytes = reinterpret_cast<uint8_t*>(out);
  vst1q_u8(bytes, vreinterpretq_u8_u32(vzip1q_u32(low, high)));
  vst1q_u8(bytes + 16, vreinterpretq_u8_u32(vzip2q_u32(low, high)));
}
constexpr bool kSignedValues = false;

template <class Lane>
constexpr int dot_vectors() {
  return sizeof(Lane) == sizeof(QueryLane) ? kDotVectors : kDotVectors / 2;
}
template <class Lane, int QUERIES, int VECTORS>
struct DotSums;
template <int QUERIES, int VECTORS>
struct DotSums<int8_t, QUERIES, VECTORS> {
  static constexpr bool kSigned = true;
  int32x4_t sum[QUERIES][VECTORS];
  QTENSOR_INLINE explicit DotSums(const int32_t*) {  // levels are signed: there is no excess to subtract
    for (int i = 0; i < QUERIES; i++)
      for (int v = 0; v < VECTORS; v++) sum[i][v] = vdupq_n_s32(0);
  }
  QTENSOR_INLINE void add(const int8_t* const* a, int64_t group, const Words (&bytes)[VECTORS]) {
    for (int i = 0; i < QUERIES; i++) {
      int32_t four;
      __builtin_memcpy(&four, a[i] + 4 * group, 4);
      const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(four));  // ld1r
      for (int v = 0; v < VECTORS; v++) sum[i][v] = vdotq_s32(sum[i][v], vreinterpretq_s8_u8(bytes[v]), x);
    }
  }
  QTENSOR_INLINE Words total(int i, int v) const { return vreinterpretq_u8_s32(sum[i][v]); }
};
template <int QUERIES, int VECTORS>
struct DotSums<int16_t, QUERIES, VECTORS> {
  static constexpr bool kSigned = false;
  uint32x4_t low[QUERIES][VECTORS], high[QUERIES][VECTORS];
  uint32_t begin[QUERIES];
  QTENSOR_INLINE explicit DotSums(const int32_t* start) {
    for (int i = 0; i < QUERIES; i++) {
      begin[i] = uint32_t(start[i]);
      for (int v = 0; v < VECTORS; v++) low[i][v] = high[i][v] = vdupq_n_u32(0);
    }
  }
  QTENSOR_INLINE void add(const int16_t* const* a, int64_t group, const Words (&bytes)[VECTORS]) {
    for (int i = 0; i < QUERIES; i++) {
      const uint8x8_t x = vld1_u8(reinterpret_cast<const uint8_t*>(a[i] + 4 * group));
      for (int v = 0; v < VECTORS; v++) {
        low[i][v] = vdotq_lane_u32(low[i][v], bytes[v], x, 0);
        high[i][v] = vdotq_lane_u32(high[i][v], bytes[v], x, 1);
      }
    }
  }
  QTENSOR_INLINE Words total(int i, int v) const {  // modulo 2^32; the exact sum fits
    const uint32x4_t all = vaddq_u32(low[i][v], vshlq_n_u32(high[i][v], 8));
    return vreinterpretq_u8_u32(vaddq_u32(all, vdupq_n_u32(begin[i])));
  }
};

}  // namespace
}  // namespace qtensor
