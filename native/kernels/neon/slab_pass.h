// Products of packed weights (packed_weights.h): four rows of the weight are the lanes of a register, so no sum is
// reduced, and sdot takes four activations by element. Up to four batch rows are multiplied with values that are
// unpacked in registers. More of them share values that are unpacked to memory, from which smmla takes them with i8mm.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <utility>

#include "k_quants.h"
#include "kernel_table.h"
#include "kernels/portable/always_inline.h"
#include "kernels/portable/slab_source.h"
#include "rows.h"

namespace qtensor {
namespace {

// A pass takes a whole group, and unpacks the headers of four rows while it multiplies them.
constexpr int64_t kSlabLanes = kGroupRows, kSlabParts = 1;
constexpr int kMostAtOnce = 4, kMostAsking = 512, kRegisters = kGroupRows / 4;
struct NoHeader {};

// One block of a batch row.
struct alignas(64) SlabBatchBlock {
  int8_t q[256];
  int32_t start[16];       // for Q6_K: -32 times the sums of sixteen
  int8_t low[8], high[8];  // sums of 32: low + 256 * high
  float d;
};

// Calls each.operator()<I>() for I from 0 to COUNT - 1.
template <int COUNT, class Each>
QTENSOR_INLINE void unrolled(Each each) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
    (each.template operator()<I>(), ...);
  }(std::make_integer_sequence<int, COUNT>());
}
#define QTENSOR_UNROLLED(I) [&]<int I>() __attribute__((always_inline))

using KeptLine = int8_t[256 / 4][16];  // [k / 4]: four values of each of four rows

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int kBatchStep = 2;

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
  QTENSOR_INLINE explicit KeptSums(const int32x4_t (&start)[M]) {
    for (int p = 0; p < kPairs; p++)
      for (auto& rows : sum[p]) rows[0] = rows[1] = vzip1q_s32(start[2 * p], start[2 * p + 1 < M ? 2 * p + 1 : 2 * p]);
  }
  // Adds the products of sixteen values.
  template <class Batch>
  QTENSOR_INLINE void add(const KeptLine* w, const Batch* x, int k) {
#pragma GCC unroll 2
    for (int i = k; i < k + 16; i += 8) {
      int8x16_t two[kPairs];  // a batch row without another is twice in a register
      for (int p = 0; p < kPairs; p++)
        two[p] = 2 * p + 1 < M ? vld1q_s8(x[2 * p + i / 128].q + 2 * (i % 128))
                               : vreinterpretq_s8_s64(vld1q_dup_s64((const int64_t*)(x[2 * p].q + i)));
#pragma GCC unroll 2
      for (int r = 0; r < 2; r++)
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
          const int8x16_t rows = vld1q_s8(w[r][i / 4 + h]);
          for (int p = 0; p < kPairs; p++) sum[p][r][h] = vmmlaq_s32(sum[p][r][h], rows, two[p]);
        }
    }
  }
  QTENSOR_INLINE int32x4_t of(int j, int r) const {
    const auto& rows = sum[j / 2][r];
    return j % 2 == 0 ? vuzp1q_s32(rows[0], rows[1]) : vuzp2q_s32(rows[0], rows[1]);
  }
};
#else
constexpr int kBatchStep = 1;

QTENSOR_INLINE void keep_two(const int8x16_t (&two)[2], int8_t (*to)[16]) {
  vst1q_s8(to[0], two[0]);
  vst1q_s8(to[1], two[1]);
}
template <int M>
struct KeptSums {
  int32x4_t sum[M][2];
  QTENSOR_INLINE explicit KeptSums(const int32x4_t (&start)[M]) {
    for (int j = 0; j < M; j++) sum[j][0] = sum[j][1] = start[j];
  }
  template <class Batch>
  QTENSOR_INLINE void add(const KeptLine* w, const Batch* x, int k) {
    int8x16_t v[M];
    for (int j = 0; j < M; j++) v[j] = vld1q_s8(x[j].q + k);
    unrolled<4>(QTENSOR_UNROLLED(I) {
      for (int r = 0; r < 2; r++) {
        const int8x16_t rows = vld1q_s8(w[r][k / 4 + I]);
        for (int j = 0; j < M; j++) sum[j][r] = vdotq_laneq_s32(sum[j][r], rows, v[j], I);
      }
    });
  }
  QTENSOR_INLINE int32x4_t of(int j, int r) const { return sum[j][r]; }
};
#endif

// Copies the bytes of a batch row. For smmla, those of two batch rows alternate every eight bytes.
template <class Batch>
QTENSOR_INLINE void lay_bytes(const PackTask& t, int64_t row, const int8_t* q, Batch& to) {
  if (kBatchStep == 1 || t.m <= kMostAtOnce || (row | 1) >= t.m) {
    __builtin_memcpy(to.q, q, sizeof to.q);
    return;
  }
  Batch* const pair = &to - row % 2;
  for (int k = 0; k < 256; k += 8) __builtin_memcpy(pair[k / 128].q + 2 * (k % 128) + 8 * (row % 2), q + k, 8);
}

void pack_slab_batch_row(const PackTask& t, int64_t row) {
  const BlockQ8K* x = t.x + row * t.blocks;
  for (int64_t b = 0; b < t.blocks; b++, x++) {
    auto& to = reinterpret_cast<SlabBatchBlock*>(t.packed)[b * t.m + row];
    lay_bytes(t, row, x->q, to);
    for (int i = 0; i < 16; i += 4) vst1q_s32(to.start + i, vmull_n_s16(vld1_s16(x->sums16 + i), -32));
    const int16x8_t sums = vld1q_s16(x->sums32);
    vst1_s8(to.low, vmovn_s16(sums));
    vst1_s8(to.high, vrshrn_n_s16(sums, 8));
    to.d = x->d;
  }
}
template <class Batch>
constexpr SlabPacking kSlabPacking{sizeof(SlabBatchBlock), pack_slab_batch_row};

QTENSOR_INLINE uint8x16_t line(const uint8_t* lines, int u) { return vld1q_u8(lines + kLineBytes * u); }
QTENSOR_INLINE float32x4_t four_halves_at(const uint8_t* halves) {
  return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(halves)));
}

// Signed scales, four to a dword, and d.
template <int DWORDS>
struct SlabScales {
  int32x4_t bytes[DWORDS];
  float32x4_t d;
  template <int I>
  QTENSOR_INLINE int32x4_t scale() const {
    return vshrq_n_s32(I % 4 == 3 ? bytes[I / 4] : vshlq_n_s32(bytes[I / 4], 24 - I % 4 * 8), 24);
  }
};
template <int GROUP>
struct SlabOfIntegers {
  using Batch = SlabBatchBlock;
  using Total = int32x4_t;
  static constexpr int64_t most_unpacking = 1;  // up to this many passes, each pass unpacks values itself
  static constexpr int pairs = kRegisters;      // shares of prefetches
  static constexpr int group = GROUP;           // values with one scale
  QTENSOR_INLINE static void header(Lines<false>, NoHeader&) {}
  QTENSOR_INLINE static Total zero() { return vdupq_n_s32(0); }
  template <int G>
  QTENSOR_INLINE static int32x4_t start(const SlabBatchBlock&) {
    return zero();
  }
  template <int G, class Header>
  QTENSOR_INLINE static int32x4_t scale(const Header& h) {
    return h.template scale<G>();
  }
  template <int G>
  QTENSOR_INLINE static void add_scaled(Total& total, int32x4_t sum, int32x4_t scale, const SlabBatchBlock&) {
    total = vmlaq_s32(total, sum, scale);
  }
  template <class Header>
  QTENSOR_INLINE static float32x4_t finish(Total total, const Header& h, const SlabBatchBlock& x, float32x4_t acc) {
    return vfmaq_n_f32(acc, vmulq_f32(vcvtq_f32_s32(total), h.d), x.d);
  }
};

// A step multiplies sixteen values that begin at a(step), and those `apart` values farther.
struct SlabWithMins : SlabOfIntegers<32> {
  static constexpr int apart = 32;
  static constexpr int a(int step) { return 64 * (step / 2) + 16 * (step % 2); }
  struct Header : SlabScales<2> {
    int8x16_t min[2];
    float32x4_t dmin;
  };
  QTENSOR_INLINE static void unpack_header(const uint8_t* lines, const uint8_t*, Header& to) {
    const FourHeaders h = unpack_headers(line(lines, 0), line(lines, 1), line(lines, 2), line(lines, 3));
    to.d = h.d;
    to.dmin = h.dmin;
    for (int i = 0; i < 2; i++) {
      to.bytes[i] = vreinterpretq_s32_u8(h.scale[i]);
      to.min[i] = vreinterpretq_s8_u8(h.min[i]);
    }
  }
  QTENSOR_INLINE static float32x4_t finish(Total total, const Header& h, const SlabBatchBlock& x, float32x4_t acc) {
    const int8x16_t sums = vld1q_s8(x.low);
    const int32x4_t high = vdotq_laneq_s32(vdotq_laneq_s32(zero(), h.min[0], sums, 2), h.min[1], sums, 3);
    const int32x4_t mins =
        vdotq_laneq_s32(vdotq_laneq_s32(vshlq_n_s32(high, 8), h.min[0], sums, 0), h.min[1], sums, 1);
    const float32x4_t f = vfmsq_f32(vmulq_f32(vcvtq_f32_s32(total), h.d), vcvtq_f32_s32(mins), h.dmin);
    return vfmaq_n_f32(acc, f, x.d);
  }
};

template <class Block>
struct SlabPairs;
template <>
struct SlabPairs<BlockQ4_K> : SlabWithMins {
  template <int STEP>
  QTENSOR_INLINE static void values(const uint8_t* lines, int i, int8x16_t& a, int8x16_t& b) {
    Q4_KNeon::split(line(lines, Packing<BlockQ4_K>::values(STEP / 2, STEP % 2 * 4 + i)), a, b);
  }
};
template <>
struct SlabPairs<BlockQ5_K> : SlabWithMins {
  template <int STEP>
  QTENSOR_INLINE static void values(const uint8_t* lines, int i, int8x16_t& a, int8x16_t& b) {
    using P = Packing<BlockQ5_K>;
    const int four = STEP % 2 * 4 + i;
    Q5_KNeon::split<STEP / 2>(line(lines, P::values(STEP / 2, four)), line(lines, P::fifth_bits(four)), a, b);
  }
};
template <>
struct SlabPairs<BlockQ6_K> : SlabOfIntegers<16> {
  static constexpr int apart = 64;
  static constexpr int a(int step) { return 128 * (step / 4) + 16 * (step % 4); }
  using Header = SlabScales<4>;
  QTENSOR_INLINE static void unpack_header(const uint8_t* lines, const uint8_t* halves, Header& to) {
    for (int i = 0; i < 4; i++) to.bytes[i] = vreinterpretq_s32_u8(line(lines, i));
    to.d = four_halves_at(halves);
  }
  template <int G>
  QTENSOR_INLINE static int32x4_t start(const SlabBatchBlock& x) {
    return vdupq_n_s32(x.start[G]);
  }
  template <int STEP>
  QTENSOR_INLINE static void values(const uint8_t* lines, int i, int8x16_t& a, int8x16_t& b) {
    using P = Packing<BlockQ6_K>;
    constexpr int n = STEP / 4, second = STEP / 2 % 2;
    const int at = 4 * (STEP % 2) + i;
    Q6_KNeon::split<second>(line(lines, P::values(n, second, at)), line(lines, P::upper_bits(n, at)), a, b);
  }
};

template <class Block, bool IN_ORDER = false>
struct SlabPass {
  Lines<false> lines[1];
  NoHeader header[1];
  alignas(64) KeptLine kept[kRegisters];
  const uint8_t* later;
  int64_t asked;
};

template <class Block, int M, bool IN_ORDER>
QTENSOR_INLINE void multiply_unpacked(SlabPass<Block, IN_ORDER>& t, const typename SlabPairs<Block>::Batch* x, float* acc) {
  using P = SlabPairs<Block>;
  constexpr int kParts = M == 1 ? 4 : M == 2 ? 2 : 1, kSteps = P::apart < 32 ? 1 : P::group / 16;
  constexpr bool kJoined = P::apart < P::group;  // both sixteen values have one scale
#pragma GCC unroll 1
  for (int part = 0; part < kRegisters; part += kParts) {
    const uint8_t* lines = t.lines[0].at + 16 * part;
    const uint8_t* const halves = t.lines[0].halves + 8 * part;
    for (int k = 0; k < kParts; k++) ask(t, part + k);
    typename P::Total total[kParts][M];
    int32x4_t sum[2][kParts][M];
    typename P::Header h[kParts];
    for (int k = 0; k < kParts; k++) {
      P::unpack_header(lines + 16 * k, halves + 8 * k, h[k]);
      for (auto& of : total[k]) of = P::zero();
    }
    unrolled<8>(QTENSOR_UNROLLED(S) {
      constexpr int kA = P::a(S) / P::group, kB = (P::a(S) + P::apart) / P::group;
      int8x16_t va[M], vb[M];
      for (int j = 0; j < M; j++) {
        va[j] = vld1q_s8(x[j].q + P::a(S));
        vb[j] = vld1q_s8(x[j].q + P::a(S) + P::apart);
        if (S % kSteps == 0)
          for (int k = 0; k < kParts; k++) {
            sum[0][k][j] = P::template start<kA>(x[j]);
            if (!kJoined) sum[1][k][j] = P::template start<kB>(x[j]);
          }
      }
      unrolled<4>(QTENSOR_UNROLLED(I) {
        for (int k = 0; k < kParts; k++) {
          int8x16_t a, b;
          P::template values<S>(lines + 16 * k, I, a, b);
          for (int j = 0; j < M; j++) {
            sum[0][k][j] = vdotq_laneq_s32(sum[0][k][j], a, va[j], I);
            sum[!kJoined][k][j] = vdotq_laneq_s32(sum[!kJoined][k][j], b, vb[j], I);
          }
          lines = after(lines, sum[0][k][M - 1]);
        }
      });
      if constexpr (S % kSteps == kSteps - 1)
        for (int k = 0; k < kParts; k++) {
          const auto a = P::template scale<kA>(h[k]);
          for (int j = 0; j < M; j++) P::template add_scaled<kA>(total[k][j], sum[0][k][j], a, x[j]);
          if (kJoined) continue;
          const auto b = P::template scale<kB>(h[k]);
          for (int j = 0; j < M; j++) P::template add_scaled<kB>(total[k][j], sum[1][k][j], b, x[j]);
        }
    });
    for (int k = 0; k < kParts; k++)
      for (int j = 0; j < M; j++) {
        float* const to = acc + kSlabRows * j + 4 * (part + k);
        vst1q_f32(to, P::finish(total[k][j], h[k], x[j], vld1q_f32(to)));
      }
  }
}

// Unpacks all values of a group to memory, in the order of the activations.
template <class Block, bool IN_ORDER>
__attribute__((noinline)) void keep_values(SlabPass<Block, IN_ORDER>& t) {
  using P = SlabPairs<Block>;
#pragma GCC unroll 1
  for (int part = 0; part < kRegisters; part++) {
    const uint8_t* const lines = t.lines[0].at + 16 * part;
    unrolled<8>(QTENSOR_UNROLLED(S) {
      for (int i = 0; i < 4; i += 2) {
        int8x16_t a[2], b[2];
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
    typename P::Total total[2][M];
    typename P::Header h[2];
    for (int k = 0; k < 2; k++) {
      ask(t, part + k);
      P::unpack_header(t.lines[0].at + 16 * (part + k), t.lines[0].halves + 8 * (part + k), h[k]);
      for (auto& of : total[k]) of = P::zero();
    }
    unrolled<256 / P::group>(QTENSOR_UNROLLED(G) {
      int32x4_t start[M];
      for (int j = 0; j < M; j++) start[j] = P::template start<G>(x[j]);
      KeptSums<M> sum(start);
      for (int k = G * P::group; k < (G + 1) * P::group; k += 16) sum.add(t.kept + part, x, k);
      for (int k = 0; k < 2; k++) {
        const auto scale = P::template scale<G>(h[k]);
        for (int j = 0; j < M; j++) P::template add_scaled<G>(total[k][j], sum.of(j, k), scale, x[j]);
      }
    });
    for (int k = 0; k < 2; k++)
      for (int j = 0; j < M; j++) {
        float* const to = acc + kSlabRows * j + 4 * (part + k);
        vst1q_f32(to, P::finish(total[k][j], h[k], x[j], vld1q_f32(to)));
      }
  }
}

template <class Block, int M, Source SOURCE, bool IN_ORDER>
QTENSOR_INLINE void slab_batch_rows(SlabPass<Block, IN_ORDER>& t, const typename SlabPairs<Block>::Batch* x,
                                    float* acc) {
  if constexpr (SOURCE == Source::unpacked) {
    multiply_unpacked<Block, M>(t, x, acc);
  } else {
    if (SOURCE == Source::unpacked_and_kept) keep_values(t);
    multiply_kept<Block, M>(t, x, acc);
  }
}

}  // namespace
}  // namespace qtensor
