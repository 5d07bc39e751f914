// Products of packed weights whose sums of 32 are scaled one by one: blocks of 32 as floats, IQ4_XS as integers. Values
// are unsigned bytes with an offset added. A is values 0 to 15 of 32, and B the others.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernel_table.h"
#include "kernels/portable/always_inline.h"
#include "kernels/portable/unpacked_blocks.h"
#include "slab_pass.h"

namespace qtensor {
namespace {

// BlockQ8x32 with its sums as floats, for mins.
struct alignas(64) SlabBatchBlock32 {
  int8_t q[256];
  float d[8];
  int32_t sums[8];
  float of_mins[8];
};
static_assert(sizeof(SlabBatchBlock32) == sizeof(SlabBatchBlock));

void pack_slab_batch_row_32(const PackTask& t, int64_t row) {
  const BlockQ8x32* x = t.x_32 + row * t.blocks;
  for (int64_t b = 0; b < t.blocks; b++, x++) {
    auto& to = reinterpret_cast<SlabBatchBlock32*>(t.packed)[b * t.m + row];
    __builtin_memcpy(to.q, x->q, sizeof to.q);
    const __m256 d = _mm256_load_ps(x->d);
    const __m256i sums = _mm256_load_si256((const __m256i*)x->sums);
    _mm256_store_ps(to.d, d);
    _mm256_store_si256((__m256i*)to.sums, sums);
    _mm256_store_ps(to.of_mins, _mm256_mul_ps(_mm256_cvtepi32_ps(sums), d));
  }
}

template <>
constexpr SlabPacking kSlabPacking<SlabBatchBlock32>{sizeof(SlabBatchBlock32), pack_slab_batch_row_32};

// The sixteen levels of a nibble, with 128 added.
inline __m512i levels_from(const int8_t (&table)[16]) {
  return _mm512_broadcast_i32x4(_mm_xor_si128(_mm_loadu_si128((const __m128i*)table), _mm_set1_epi8(char(128))));
}
QTENSOR_INLINE void nibbles(__m512i v, __m512i& a, __m512i& b) {
  const __m512i four = _mm512_set1_epi8(15);
  a = _mm512_and_si512(v, four);
  b = _mm512_and_si512(_mm512_srli_epi16(v, 4), four);
}
QTENSOR_INLINE __m512 halves_of(__m512i dwords) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(dwords)); }

struct SlabHeader32 {
  __m512 d[8], m[8];
};
template <int OFFSET_BITS>  // 0: no offset
struct SlabOf32 {
  using Batch = SlabBatchBlock32;
  using Header = SlabHeader32;
  static constexpr int pairs = 8, offset_bits = OFFSET_BITS;
  static constexpr int64_t most_unpacking = 2;
  static constexpr bool has_min = false;
  template <bool IN_ORDER>
  QTENSOR_INLINE static void header(Lines<IN_ORDER> w, SlabHeader32& h) {
#pragma GCC unroll 8
    for (int s = 0; s < 8; s++)
      h.d[s] = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(w.halves + 2 * kGroupRows * s)));
  }
};
struct SlabOf32WithMins : SlabOf32<0> {
  static constexpr bool has_min = true;
  template <bool IN_ORDER>
  QTENSOR_INLINE static void header(Lines<IN_ORDER> w, SlabHeader32& h) {
#pragma GCC unroll 8
    for (int s = 0; s < 8; s++) {
      const __m512i both = line(w, s);
      h.d[s] = halves_of(both);
      h.m[s] = halves_of(_mm512_srli_epi32(both, 16));
    }
  }
};
template <>
struct SlabPairs<BlockQ8_0> : SlabOf32<7> {
  template <bool IN_ORDER>
  QTENSOR_INLINE static void values(Lines<IN_ORDER> w, int s, int i, __m512i& a, __m512i& b) {
    const __m512i middle = _mm512_set1_epi8(char(128));
    a = _mm512_xor_si512(line(w, 8 * s + 2 * i), middle);
    b = _mm512_xor_si512(line(w, 8 * s + 2 * i + 1), middle);
  }
};
template <>
struct SlabPairs<BlockQ4_0> : SlabOf32<3> {
  template <bool IN_ORDER>
  QTENSOR_INLINE static void values(Lines<IN_ORDER> w, int s, int i, __m512i& a, __m512i& b) {
    nibbles(line(w, 4 * s + i), a, b);
  }
};
template <>
struct SlabPairs<BlockIQ4_NL> : SlabOf32<7> {
  template <bool IN_ORDER>
  QTENSOR_INLINE static void values(Lines<IN_ORDER> w, int s, int i, __m512i& a, __m512i& b) {
    const __m512i levels = levels_from(kLevelsIQ4);
    nibbles(line(w, 4 * s + i), a, b);
    a = _mm512_shuffle_epi8(levels, a);
    b = _mm512_shuffle_epi8(levels, b);
  }
};
template <>
struct SlabPairs<BlockQ4_1> : SlabOf32WithMins {
  template <bool IN_ORDER>
  QTENSOR_INLINE static void values(Lines<IN_ORDER> w, int s, int i, __m512i& a, __m512i& b) {
    nibbles(line(w, 8 + 4 * s + i), a, b);
  }
};
// Bit l of a dword of fifth bits belongs to value l.
QTENSOR_INLINE void add_fifth_bits(__m512i bits, int i, __m512i& a, __m512i& b) {
  const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12));
  const __m512i own = _mm512_set1_epi32(0x08040201), sixteen = _mm512_set1_epi8(16);
  const auto bytes = [&](int first) __attribute__((always_inline)) {  // each dword's byte with bits `first` on
    return _mm512_shuffle_epi8(_mm512_srli_epi32(bits, first), order);
  };
  a = _mm512_mask_add_epi8(a, _mm512_test_epi8_mask(bytes(4 * i), own), a, sixteen);
  b = _mm512_mask_add_epi8(b, _mm512_test_epi8_mask(bytes(16 + 4 * i), own), b, sixteen);
}
template <>
struct SlabPairs<BlockQ5_0> : SlabOf32<4> {
  template <bool IN_ORDER>
  QTENSOR_INLINE static void values(Lines<IN_ORDER> w, int s, int i, __m512i& a, __m512i& b) {
    nibbles(line(w, 5 * s + 1 + i), a, b);
    add_fifth_bits(line(w, 5 * s), i, a, b);
  }
};
template <>
struct SlabPairs<BlockQ5_1> : SlabOf32WithMins {
  template <bool IN_ORDER>
  QTENSOR_INLINE static void values(Lines<IN_ORDER> w, int s, int i, __m512i& a, __m512i& b) {
    nibbles(line(w, 8 + 5 * s + 1 + i), a, b);
    add_fifth_bits(line(w, 8 + 5 * s), i, a, b);
  }
};

struct SlabHeaderIQ4 {
  __m512i scale[8];     // of 32 values, as dwords
  __m512i in_words[4];  // the same, two to a dword
  __m512 d;
};
template <>
struct SlabPairs<BlockIQ4_XS> {
  using Batch = SlabBatchBlock;
  using Header = SlabHeaderIQ4;
  static constexpr int pairs = 8;
  static constexpr int64_t most_unpacking = 2;
  static constexpr bool scales_of_32 = true;
  template <bool IN_ORDER>
  QTENSOR_INLINE static void header(Lines<IN_ORDER> w, SlabHeaderIQ4& h) {
    const __m512i high = line(w, 0), low = line(w, 1);
#pragma GCC unroll 8
    for (int s = 0; s < 8; s++) {
      constexpr int kHighAt = 16;  // two bits of each scale, after d
      const int from = kHighAt + 2 * s - 4;
      const __m512i upper = _mm512_srli_epi32(high, from);
      const __m512i six = _mm512_ternarylogic_epi32(
          _mm512_and_si512(_mm512_srli_epi32(low, 4 * s), _mm512_set1_epi32(15)), upper, _mm512_set1_epi32(48), 0xf8);
      h.scale[s] = _mm512_sub_epi32(six, _mm512_set1_epi32(32));
    }
#pragma GCC unroll 4
    for (int p = 0; p < 4; p++)
      h.in_words[p] = _mm512_mask_blend_epi16(0xaaaaaaaa, h.scale[2 * p], _mm512_slli_epi32(h.scale[2 * p + 1], 16));
    h.d = halves_of(high);
  }
  template <bool IN_ORDER>
  QTENSOR_INLINE static void values(Lines<IN_ORDER> w, int s, int i, __m512i& a, __m512i& b) {
    const __m512i levels = levels_from(kLevelsIQ4);
    nibbles(line(w, 2 + 4 * s + i), a, b);
    a = _mm512_shuffle_epi8(levels, a);
    b = _mm512_shuffle_epi8(levels, b);
  }
};

template <class Block, int M, Source SOURCE, bool IN_ORDER, class Batch>
QTENSOR_INLINE void sums_of_32(SlabPass<Block, IN_ORDER>& t, const Batch* x, int s, __m512i (&sum)[2][M]) {
  ask(t, s);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    __m512i a[2], b[2];
#pragma GCC unroll 2
    for (int g = 0; g < 2; g++) {
      uint8_t (*const two)[64] = t.kept[g].q + 2 * (4 * s + i);
      if (SOURCE == Source::kept) {
        a[g] = _mm512_load_si512(two[0]);
        b[g] = _mm512_load_si512(two[1]);
      } else {
        SlabPairs<Block>::values(t.lines[g], s, i, a[g], b[g]);
      }
      if (SOURCE == Source::unpacked_and_kept) {
        _mm512_store_si512(two[0], a[g]);
        _mm512_store_si512(two[1], b[g]);
      }
    }
#pragma GCC unroll 8
    for (int j = 0; j < M; j++) {
      const __m512i x_a = dword_to_all(x[j].q + 32 * s + 4 * i), x_b = dword_to_all(x[j].q + 32 * s + 16 + 4 * i);
#pragma GCC unroll 2
      for (int g = 0; g < 2; g++) sum[g][j] = _mm512_dpbusd_epi32(sum[g][j], a[g], x_a);
#pragma GCC unroll 2
      for (int g = 0; g < 2; g++) sum[g][j] = _mm512_dpbusd_epi32(sum[g][j], b[g], x_b);
    }
  }
}

// Like slab_batch_rows of K-quants.
template <class Block, int M, Source SOURCE, bool IN_ORDER>
QTENSOR_INLINE void slab_batch_rows(SlabPass<Block, IN_ORDER>& t, const SlabBatchBlock32* x, float* acc) {
  using P = SlabPairs<Block>;
  __m512 f[2][M];
#pragma GCC unroll 8
  for (int j = 0; j < M; j++) f[0][j] = f[1][j] = _mm512_setzero_ps();
#pragma GCC unroll 8
  for (int s = 0; s < 8; s++) {
    __m512i sum[2][M];
#pragma GCC unroll 8
    for (int j = 0; j < M; j++) {
      const __m512i zero = _mm512_setzero_si512();
      sum[0][j] = sum[1][j] =
          P::offset_bits ? _mm512_sub_epi32(zero, _mm512_slli_epi32(dword_to_all(x[j].sums + s), P::offset_bits))
                         : zero;
    }
    sums_of_32<Block, M, SOURCE>(t, x, s, sum);
#pragma GCC unroll 2
    for (int g = 0; g < 2; g++)
#pragma GCC unroll 8
      for (int j = 0; j < M; j++) {
        const __m512 scale = _mm512_mul_ps(t.header[g].d[s], _mm512_set1_ps(x[j].d[s]));
        f[g][j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[g][j]), scale, f[g][j]);
        if (P::has_min) f[g][j] = _mm512_fmadd_ps(_mm512_set1_ps(x[j].of_mins[s]), t.header[g].m[s], f[g][j]);
      }
  }
#pragma GCC unroll 2
  for (int g = 0; g < 2; g++)
#pragma GCC unroll 8
    for (int j = 0; j < M; j++) {
      float* const to = acc + kSlabRows * j + kSlabLanes * g;
      _mm512_store_ps(to, _mm512_add_ps(_mm512_load_ps(to), f[g][j]));
    }
}

template <class Block, int M, Source SOURCE, bool IN_ORDER>
  requires(SlabPairs<Block>::scales_of_32)
QTENSOR_INLINE void slab_batch_rows(SlabPass<Block, IN_ORDER>& t, const SlabBatchBlock* x, float* acc) {
  __m512i total[2][M];
#pragma GCC unroll 8
  for (int j = 0; j < M; j++) {
    // begins at -128 times the sums of activations, each multiplied by its scale
#pragma GCC unroll 2
    for (int g = 0; g < 2; g++) {
      __m512i above = _mm512_setzero_si512();
#pragma GCC unroll 4
      for (int p = 0; p < 4; p++)
        above = _mm512_dpwssd_epi32(above, t.header[g].in_words[p], dword_to_all(x[j].sums32 + 2 * p));
      total[g][j] = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(above, 7));
    }
  }
#pragma GCC unroll 8
  for (int s = 0; s < 8; s++) {
    __m512i sum[2][M];
#pragma GCC unroll 8
    for (int j = 0; j < M; j++) sum[0][j] = sum[1][j] = _mm512_setzero_si512();
    sums_of_32<Block, M, SOURCE>(t, x, s, sum);
#pragma GCC unroll 2
    for (int g = 0; g < 2; g++)
#pragma GCC unroll 8
      for (int j = 0; j < M; j++)
        total[g][j] = _mm512_add_epi32(total[g][j], _mm512_mullo_epi32(sum[g][j], t.header[g].scale[s]));
  }
#pragma GCC unroll 2
  for (int g = 0; g < 2; g++)
#pragma GCC unroll 8
    for (int j = 0; j < M; j++) {
      const __m512 v = _mm512_mul_ps(_mm512_cvtepi32_ps(total[g][j]), t.header[g].d);
      float* const to = acc + kSlabRows * j + kSlabLanes * g;
      _mm512_store_ps(to, _mm512_fmadd_ps(v, _mm512_set1_ps(x[j].d), _mm512_load_ps(to)));
    }
}

}  // namespace
}  // namespace qtensor
