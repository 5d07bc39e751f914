// Products of packed weights (packed_weights.h): four rows of the weight are the lanes of a register, so no sum is
// reduced, and sdot takes four activations by element. One or two batch rows are multiplied with values that are
// unpacked to registers. More of them share values that are unpacked to memory, from which smmla takes them with i8mm;
// weights in rows are unpacked to the same place (keep_rows.h).
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "k_quants.h"
#include "kernel_table.h"
#include "kernels/portable/always_inline.h"
#include "kernels/portable/slab_source.h"
#include "rows.h"

namespace qtensor {
namespace {

// A pass takes a whole group, and unpacks the header of four rows when it multiplies them.
constexpr int64_t kSlabLanes = kGroupRows, kSlabParts = 1;
struct NoHeader {};
constexpr int kMostInRegisters = 2, kMostAsking = 512, kRegisters = kGroupRows / 4;

// One block of a batch row.
struct alignas(64) SlabBatchBlock {
  int8_t q[256];
  int8_t low[8], high[8];  // the sums of 32 are low + 256 * high: factors of sdot
  float d;
};

// Calls each.operator()<I>() for I from 0 to COUNT - 1.
template <int COUNT, int I = 0, class Each>
QTENSOR_INLINE void unrolled(const Each& each) {
  if constexpr (I < COUNT) {
    each.template operator()<I>();
    unrolled<COUNT, I + 1>(each);
  }
}
#define QTENSOR_UNROLLED(I) [&]<int I>() __attribute__((always_inline))

constexpr int64_t kBatchBytes = sizeof(SlabBatchBlock);
using KeptLine = int8_t[256 / 4][16];  // [k / 4]: four values of each of four rows

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int kMostAtOnce = 6, kBatchStep = 2;

// Stores the values of two fours, for smmla as eight values of each row.
QTENSOR_INLINE void keep_two(const int8x16_t (&two)[2], int8_t (*to)[16]) {
  const int32x4_t a = vreinterpretq_s32_s8(two[0]), b = vreinterpretq_s32_s8(two[1]);
  vst1q_s8(to[0], vreinterpretq_s8_s32(vzip1q_s32(a, b)));
  vst1q_s8(to[1], vreinterpretq_s8_s32(vzip2q_s32(a, b)));
}
// The sums of two registers of rows with M batch rows.
template <int M>
struct KeptSums {
  static constexpr int kPairs = (M + 1) / 2;
  int32x4_t sum[kPairs][2][2];  // [two batch rows][register][two rows]
  QTENSOR_INLINE KeptSums() {
    for (auto& pair : sum)
      for (auto& rows : pair) rows[0] = rows[1] = vdupq_n_s32(0);
  }
  // Adds the products of eight values. `x`: batch rows in pairs; `last`: not in pairs, for a last batch row without
  // a partner.
  template <int I>
  QTENSOR_INLINE void add(const int8_t*& w, const int8_t* x, const int8_t* last) {
    int8x16_t two[kPairs];
#pragma GCC unroll 3
    for (int p = 0; p < kPairs; p++) {
      const int64_t at = 2 * p * kBatchBytes + I;
      two[p] = 2 * p + 1 < M ? vld1q_s8(x + at + I) : vreinterpretq_s8_s64(vld1q_dup_s64((const int64_t*)(last + at)));
    }
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
      const int8x16_t rows = vld1q_s8(w + r / 2 * int(sizeof(KeptLine)) + 4 * I + r % 2 * 16);
#pragma GCC unroll 3
      for (int p = 0; p < kPairs; p++) sum[p][r / 2][r % 2] = vmmlaq_s32(sum[p][r / 2][r % 2], rows, two[p]);
#pragma GCC unroll 3
      for (int p = 0; p < kPairs; p++) w = after(w, sum[p][r / 2][r % 2]);
    }
  }
  QTENSOR_INLINE int32x4_t of(int j, int r) const {
    const auto& rows = sum[j / 2][r];
    return j % 2 == 0 ? vuzp1q_s32(rows[0], rows[1]) : vuzp2q_s32(rows[0], rows[1]);
  }
  QTENSOR_INLINE void add_scaled(const KeptSums& other, int r, int32x4_t scale) {
    const int32x4_t rows[2] = {vzip1q_s32(scale, scale), vzip2q_s32(scale, scale)};
#pragma GCC unroll 6
    for (int i = 0; i < 2 * kPairs; i++)
      sum[i / 2][r][i % 2] = vmlaq_s32(sum[i / 2][r][i % 2], other.sum[i / 2][r][i % 2], rows[i % 2]);
  }
};
#else
constexpr int kMostAtOnce = 4, kBatchStep = 1;

QTENSOR_INLINE void keep_two(const int8x16_t (&two)[2], int8_t (*to)[16]) {
  vst1q_s8(to[0], two[0]);
  vst1q_s8(to[1], two[1]);
}
template <int M>
struct KeptSums {
  int32x4_t sum[M][2];
  int8x16_t v[M];
  QTENSOR_INLINE KeptSums() {
    for (auto& rows : sum) rows[0] = rows[1] = vdupq_n_s32(0);
  }
  template <int I>
  QTENSOR_INLINE void add(const int8_t*& w, const int8_t*, const int8_t* x) {
    if constexpr (I % 16 == 0)
#pragma GCC unroll 4
      for (int j = 0; j < M; j++) v[j] = vld1q_s8(x + j * kBatchBytes + I);
    unrolled<4>(QTENSOR_UNROLLED(E) {
      constexpr int kFour = E / 2, r = E % 2;
      const int8x16_t rows = vld1q_s8(w + r * int(sizeof(KeptLine)) + 4 * I + 16 * kFour);
#pragma GCC unroll 4
      for (int j = 0; j < M; j++) sum[j][r] = vdotq_laneq_s32(sum[j][r], rows, v[j], I / 4 % 4 + kFour);
#pragma GCC unroll 4
      for (int j = 0; j < M; j++) w = after(w, sum[j][r]);
    });
  }
  QTENSOR_INLINE int32x4_t of(int j, int r) const { return sum[j][r]; }
  QTENSOR_INLINE void add_scaled(const KeptSums& other, int r, int32x4_t scale) {
#pragma GCC unroll 4
    for (int j = 0; j < M; j++) sum[j][r] = vmlaq_s32(sum[j][r], other.sum[j][r], scale);
  }
};
#endif

// Copies the bytes of a batch row. For smmla, those of two batch rows alternate every eight bytes.
template <class Batch>
QTENSOR_INLINE void lay_bytes(const PackTask& t, int64_t row, const int8_t* q, Batch& to) {
  if (kBatchStep == 1 || t.m <= kMostInRegisters || (row | 1) >= t.m) {
    __builtin_memcpy(to.q, q, sizeof to.q);
    return;
  }
  Batch* const pair = &to - row % 2;
  for (int half = 0; half < 2; half++)
#pragma GCC unroll 16
    for (int k = 0; k < 128; k += 8) __builtin_memcpy(pair[half].q + 8 * (row % 2) + 2 * k, q + 128 * half + k, 8);
}

void pack_slab_batch_row(const PackTask& t, int64_t row) {
  const BlockQ8K* x = t.x + row * t.blocks;
  for (int64_t b = 0; b < t.blocks; b++, x++) {
    auto& to = reinterpret_cast<SlabBatchBlock*>(t.packed)[b * t.m + row];
    lay_bytes(t, row, x->q, to);
    const int16x8_t sums = vld1q_s16(x->sums32);
    vst1_s8(to.low, vmovn_s16(sums));
    vst1_s8(to.high, vrshrn_n_s16(sums, 8));
    to.d = x->d;
  }
}
template <class Batch>
constexpr SlabPacking kSlabPacking{sizeof(SlabBatchBlock), pack_slab_batch_row};

QTENSOR_INLINE uint8x16_t line(const uint8_t* lines, int u) { return vld1q_u8(lines + kLineBytes * u); }
// A row in the order of the file, used in place of lines. A load of line u returns sixteen bytes of the row, beginning
// with the four that line u has. So a step takes sixteen values of one row instead of four values of each of four rows.
template <class Block>
struct RowLines {
  const uint8_t* at;
};
template <class Block>
QTENSOR_INLINE uint8x16_t line(RowLines<Block> row, int u) {
  return vld1q_u8(row.at + Packing<Block>::dword(u));
}
QTENSOR_INLINE float32x4_t four_halves_at(const uint8_t* halves) {
  return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(halves)));
}

// Signed scales, four to a dword, and d.
template <int DWORDS>
struct SlabScales {
  int8x16_t bytes[DWORDS];
  float32x4_t d;
  template <int I>
  QTENSOR_INLINE int32x4_t scale() const {
    const int32x4_t dwords = vreinterpretq_s32_s8(bytes[I / 4]);
    return vshrq_n_s32(I % 4 == 3 ? dwords : vshlq_n_s32(dwords, 24 - I % 4 * 8), 24);
  }
};
// FRACTION: by how many bits values are shifted up.
template <int FRACTION>
QTENSOR_INLINE float32x4_t as_floats(int32x4_t sum) {
  if constexpr (FRACTION > 0) return vcvtq_n_f32_s32(sum, FRACTION);
  return vcvtq_f32_s32(sum);
}
template <int GROUP, int FRACTION = 0>
struct SlabOfIntegers {
  using Batch = SlabBatchBlock;
  using Total = int32x4_t;
  using Scale = int32x4_t;
  static constexpr int64_t most_unpacking = 1;  // up to this many passes, each pass unpacks values itself
  static constexpr int pairs = kRegisters / 2;  // shares of prefetches
  static constexpr int group = GROUP;           // values with one scale
  template <int M>
  using Totals = KeptSums<M>;
  QTENSOR_INLINE static void header(Lines<false>, NoHeader&) {}
  QTENSOR_INLINE static Total zero() { return vdupq_n_s32(0); }
  template <int G, class Header>
  QTENSOR_INLINE static Scale scale(const Header& h) {
    return h.template scale<G>();
  }
  QTENSOR_INLINE static void add_scaled(Total& total, int32x4_t sum, Scale scale, const SlabBatchBlock&, int) {
    total = vmlaq_s32(total, sum, scale);
  }
  template <int M>
  QTENSOR_INLINE static void add_kept(KeptSums<M>& total, const KeptSums<M>& sum, int r, Scale scale,
                                      const SlabBatchBlock*, int) {
    total.add_scaled(sum, r, scale);
  }
  // The sum of a result after this block.
  template <class Header>
  QTENSOR_INLINE static float32x4_t finish(Total total, const Header& h, const SlabBatchBlock& x, float32x4_t acc) {
    return vfmaq_n_f32(acc, vmulq_f32(as_floats<FRACTION>(total), h.d), x.d);
  }
};
// A step multiplies the sixteen values that begin at a(step), and the sixteen values `apart` later.
struct SlabWithMins : SlabOfIntegers<32> {
  static constexpr int apart = 32;
  static constexpr int a(int step) { return 64 * (step / 2) + 16 * (step % 2); }
  struct Header : SlabScales<2> {
    int8x16_t min[2];
    float32x4_t dmin;
  };
  QTENSOR_INLINE static void unpack_header(const uint8x16_t (&v)[4], float32x4_t, Header& to) {
    const FourHeaders h = unpack_headers(v[0], v[1], v[2], v[3]);
    to.d = h.d;
    to.dmin = h.dmin;
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      to.bytes[i] = vreinterpretq_s8_u8(h.scale[i]);
      to.min[i] = vreinterpretq_s8_u8(h.min[i]);
    }
  }
  QTENSOR_INLINE static float32x4_t finish(Total total, const Header& h, const SlabBatchBlock& x, float32x4_t acc) {
    const int8x16_t sums = vld1q_s8(x.low);
    int32x4_t mins = vdotq_laneq_s32(vdotq_laneq_s32(zero(), h.min[0], sums, 2), h.min[1], sums, 3);
    mins = vdotq_laneq_s32(vdotq_laneq_s32(vshlq_n_s32(mins, 8), h.min[0], sums, 0), h.min[1], sums, 1);
    const float32x4_t f = vmulq_f32(vcvtq_f32_s32(total), h.d);
    return vfmaq_n_f32(acc, vfmsq_f32(f, vcvtq_f32_s32(mins), h.dmin), x.d);
  }
};

template <class Block>
struct SlabPairs;
template <>
struct SlabPairs<BlockQ4_K> : SlabWithMins {
  template <int STEP, class Lines>
  QTENSOR_INLINE static void values(Lines lines, int i, int8x16_t& a, int8x16_t& b) {
    Q4_KNeon::split(line(lines, Packing<BlockQ4_K>::values(STEP / 2, STEP % 2 * 4 + i)), a, b);
  }
};
template <>
struct SlabPairs<BlockQ5_K> : SlabWithMins {
  template <int STEP, class Lines>
  QTENSOR_INLINE static void values(Lines lines, int i, int8x16_t& a, int8x16_t& b) {
    using P = Packing<BlockQ5_K>;
    const int four = STEP % 2 * 4 + i;
    Q5_KNeon::split<STEP / 2>(line(lines, P::values(STEP / 2, four)), line(lines, P::fifth_bits(four)), a, b);
  }
};
template <>
struct SlabPairs<BlockQ6_K> : SlabOfIntegers<16, 2> {
  static constexpr int apart = 64;
  static constexpr int a(int step) { return 128 * (step / 4) + 16 * (step % 4); }
  using Header = SlabScales<4>;
  QTENSOR_INLINE static void unpack_header(const uint8x16_t (&v)[4], float32x4_t d, Header& to) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) to.bytes[i] = vreinterpretq_s8_u8(v[i]);
    to.d = d;
  }
  // Six bits in the upper part of a byte. With its highest bit flipped, a value becomes a signed number, 32 smaller.
  template <int STEP, class Lines>
  QTENSOR_INLINE static void values(Lines lines, int i, int8x16_t& a, int8x16_t& b) {
    using P = Packing<BlockQ6_K>;
    constexpr int n = STEP / 4, second = STEP / 2 % 2;
    const int at = 4 * (STEP % 2) + i;
    const uint8x16_t v = line(lines, P::values(n, second, at));
    const uint8x16_t upper = veorq_u8(line(lines, P::upper_bits(n, at)), vdupq_n_u8(0xaa));
    a = vreinterpretq_s8_u8(vsliq_n_u8(vshlq_n_u8(v, 2), second ? vshrq_n_u8(upper, 2) : upper, 6));
    const uint8x16_t last = vsriq_n_u8(second ? upper : vshlq_n_u8(upper, 2), v, 2);
    b = vreinterpretq_s8_u8(vandq_u8(last, vdupq_n_u8(0xfc)));
  }
};

template <class Block, bool IN_ORDER = false>
struct SlabPass {
  using P = SlabPairs<Block>;
  Lines<false> lines[1];
  NoHeader header[1];
  alignas(64) KeptLine kept[kRegisters];
  typename P::Scale scale[kRegisters][256 / P::group];
  typename P::Header unpacked[kRegisters];
  const uint8_t* later;
  int64_t asked;
};

// Keeps a value in memory, because no register is left for it.
template <class T>
QTENSOR_INLINE void in_memory(T& value) {
  __asm__("" : "+m"(value));
}
// Like ask, but one instruction shorter.
template <class Pass>
QTENSOR_INLINE void prefetch(const Pass& t, int share) {
  const uint8_t* at = t.later + 64 * t.asked * share;
#pragma GCC unroll 1
  for (const uint8_t* const end = at + 64 * t.asked; at != end; at += 64) __builtin_prefetch(at, 0, 2);
}

// Blocks of 32 have no header; their scales are taken from the lines.
template <class Block, class Header>
QTENSOR_INLINE void header_of_lines(const uint8_t* lines, const uint8_t* halves, Header& to) {
  if constexpr (requires { SlabPairs<Block>::unpack_header; }) {
    const uint8x16_t v[4] = {line(lines, 0), line(lines, 1), line(lines, 2), line(lines, 3)};
    SlabPairs<Block>::unpack_header(v, Packing<Block>::halves > 0 ? four_halves_at(halves) : vdupq_n_f32(0.0f), to);
  } else {
    to = {lines, halves};
  }
}

template <class Block, int M, bool IN_ORDER>
QTENSOR_INLINE void multiply_in_registers(SlabPass<Block, IN_ORDER>& t, const typename SlabPairs<Block>::Batch* x,
                                          float* acc) {
  using P = SlabPairs<Block>;
  constexpr int kParts = 4 / M, kSteps = P::apart < 32 ? 1 : P::group / 16;
  constexpr bool kApart = P::apart >= P::group;  // the two groups of sixteen values have different scales
#pragma GCC unroll 1
  for (int part = 0; part < kRegisters; part += kParts) {
    const uint8_t* lines = t.lines[0].at + 16 * part;
    typename P::Total total[kParts][M];
    typename P::Header h[kParts];
    int32x4_t sum[2][kParts][M];
#pragma GCC unroll 4
    for (int k = 0; k < kParts; k++) {
      if (k % 2 == 0) prefetch(t, (part + k) / 2);
      header_of_lines<Block>(lines + 16 * k, t.lines[0].halves + 8 * (part + k), h[k]);
      in_memory(h[k]);
#pragma GCC unroll 4
      for (int j = 0; j < M; j++) total[k][j] = P::zero();
    }
    unrolled<8>(QTENSOR_UNROLLED(S) {
      constexpr int kA = P::a(S) / P::group, kB = (P::a(S) + P::apart) / P::group;
      int8x16_t va[M], vb[M];
#pragma GCC unroll 4
      for (int j = 0; j < M; j++) {
        va[j] = vld1q_s8(x[j].q + P::a(S));
        vb[j] = vld1q_s8(x[j].q + P::a(S) + P::apart);
        if (S % kSteps == 0)
#pragma GCC unroll 4
          for (int k = 0; k < kParts; k++) sum[0][k][j] = sum[1][k][j] = vdupq_n_s32(0);
      }
      unrolled<4>(QTENSOR_UNROLLED(I) {
#pragma GCC unroll 4
        for (int k = 0; k < kParts; k++) {
          int8x16_t a, b;
          P::template values<S>(lines + 16 * k, I, a, b);
#pragma GCC unroll 4
          for (int j = 0; j < M; j++) {
            sum[0][k][j] = vdotq_laneq_s32(sum[0][k][j], a, va[j], I);
            sum[kApart][k][j] = vdotq_laneq_s32(sum[kApart][k][j], b, vb[j], I);
          }
#pragma GCC unroll 4
          for (int j = 0; j < M; j++) lines = after(after(lines, sum[0][k][j]), sum[kApart][k][j]);
        }
      });
      x = after(x, sum[kApart][kParts - 1][M - 1]);
      if constexpr (S % kSteps == kSteps - 1)
#pragma GCC unroll 4
        for (int k = 0; k < kParts; k++) {
          const auto a = P::template scale<kA>(h[k]), b = P::template scale<kB>(h[k]);
#pragma GCC unroll 4
          for (int j = 0; j < M; j++) {
            P::add_scaled(total[k][j], sum[0][k][j], a, x[j], kA);
            if (kApart) P::add_scaled(total[k][j], sum[1][k][j], b, x[j], kB);
          }
        }
    });
#pragma GCC unroll 4
    for (int k = 0; k < kParts; k++)
#pragma GCC unroll 4
      for (int j = 0; j < M; j++) {
        float* const to = acc + kSlabRows * j + 4 * (part + k);
        vst1q_f32(to, P::finish(total[k][j], h[k], x[j], vld1q_f32(to)));
      }
  }
}

// Unpacks a group to memory, its values in the order of the activations. Stores cannot change the lines (__restrict),
// so those of upper bits are loaded once.
template <class Block, bool IN_ORDER>
__attribute__((noinline)) void keep_values(SlabPass<Block, IN_ORDER>& __restrict t, const uint8_t* __restrict group) {
  using P = SlabPairs<Block>;
#pragma GCC unroll 1
  for (int part = 0; part < kRegisters; part++) {
    const uint8_t* const lines = group + 16 * part;
    header_of_lines<Block>(lines, t.lines[0].halves + 8 * part, t.unpacked[part]);
    unrolled<256 / P::group>(QTENSOR_UNROLLED(G) { t.scale[part][G] = P::template scale<G>(t.unpacked[part]); });
    unrolled<8>(QTENSOR_UNROLLED(S) {
#pragma GCC unroll 2
      for (int i = 0; i < 4; i += 2) {
        int8x16_t a[2], b[2];
#pragma GCC unroll 2
        for (int k = 0; k < 2; k++) P::template values<S>(lines, i + k, a[k], b[k]);
        keep_two(a, t.kept[part] + P::a(S) / 4 + i);
        keep_two(b, t.kept[part] + (P::a(S) + P::apart) / 4 + i);
      }
    });
  }
}

template <class Block, int M, bool IN_ORDER>
QTENSOR_INLINE void multiply_kept(SlabPass<Block, IN_ORDER>& t, const typename SlabPairs<Block>::Batch* x, float* acc) {
  using P = SlabPairs<Block>;
#pragma GCC unroll 1
  for (int part = 0; part < kRegisters; part += 2) {
    typename P::template Totals<M> total;
    prefetch(t, part / 2);
    const int8_t *w = t.kept[part][0], *plain = x->q;
    const typename P::Scale* scale = t.scale[part];
    int g = 0;
#pragma GCC unroll 1
    for (int half = 0; half < 2; half++) {
      const int8_t* pairs = x[half].q;  // batch rows in pairs: see lay_bytes
#pragma GCC unroll 1
      for (int k = 0; k < 128; k += P::group, g++, scale++) {
        KeptSums<M> sum;
        unrolled<P::group / 8>(QTENSOR_UNROLLED(I) { sum.template add<8 * I>(w, pairs, plain); });
#pragma GCC unroll 2
        for (int r = 0; r < 2; r++) P::add_kept(total, sum, r, scale[256 / P::group * r], x, g);
        w += 4 * P::group;
        pairs += 2 * P::group;
        plain += P::group;
      }
    }
#pragma GCC unroll 2
    for (int r = 0; r < 2; r++)
#pragma GCC unroll 6
      for (int j = 0; j < M; j++) {
        float* const to = acc + kSlabRows * j + 4 * (part + r);
        vst1q_f32(to, P::finish(total.of(j, r), t.unpacked[part + r], x[j], vld1q_f32(to)));
      }
  }
}

template <class Block, int M, Source SOURCE, bool IN_ORDER>
QTENSOR_INLINE void slab_batch_rows(SlabPass<Block, IN_ORDER>& t, const typename SlabPairs<Block>::Batch* x,
                                    float* acc) {
  if constexpr (SOURCE == Source::unpacked && M <= kMostInRegisters) {
    multiply_in_registers<Block, M>(t, x, acc);
  } else {
    if constexpr (SOURCE != Source::kept) keep_values(t, t.lines[0].at);
    multiply_kept<Block, M>(t, x, acc);
  }
}

}  // namespace
}  // namespace qtensor
