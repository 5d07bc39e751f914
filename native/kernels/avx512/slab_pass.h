// Products of packed K-quants (packed_weights.h): sixteen rows of the weight are the lanes, and batch rows are
// broadcast, four bytes at a time. Nothing is permuted and no sum is reduced.
//
// B's values may be in upper bits of their bytes. Magnitudes of the activations show whether all sums fit in words. If
// they do, one vpdpwssd multiplies the sums of A and B with their scales; else they are multiplied as dwords. Both ways
// give the same integers.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernel_table.h"
#include "kernels/portable/always_inline.h"
#include "kernels/portable/slab_source.h"
#include "tuning.h"

namespace qtensor {
namespace {

constexpr int64_t kSlabLanes = 16, kSlabParts = kGroupRows / kSlabLanes;

// One block of a batch row, with the values at which its sums begin, and bounds of their size.
struct alignas(64) SlabBatchBlock {
  int8_t q[256];
  int32_t start[16];  // for Q6_K: -32 times the sums of sixteen
  int16_t sums32[8];
  float d;
  int32_t largest16, largest32;  // largest sums of magnitudes: of 16 values, and of values with equal signs among 32
};
static_assert(sizeof(SlabBatchBlock) == 384);

void pack_slab_batch_row(const PackTask& t, int64_t row) {
  const BlockQ8K* x = t.x + row * t.blocks;
  const __m512i ones = _mm512_set1_epi8(1), zero = _mm512_setzero_si512();
  for (int64_t b = 0; b < t.blocks; b++, x++) {
    auto& to = reinterpret_cast<SlabBatchBlock*>(t.packed)[b * t.m + row];
    __m512i most16 = zero, most32 = zero;
    for (int c = 0; c < 4; c++) {
      const __m512i v = _mm512_load_si512(x->q + 64 * c);
      _mm512_store_si512(to.q + 64 * c, v);
      const auto of_16 = [](__m512i fours) {
        fours = _mm512_add_epi32(fours, _mm512_shuffle_epi32(fours, _MM_PERM_BADC));
        return _mm512_add_epi32(fours, _mm512_shuffle_epi32(fours, _MM_PERM_CDAB));
      };
      const auto of_32 = [](__m512i sixteens) {
        return _mm512_add_epi32(sixteens, _mm512_shuffle_i32x4(sixteens, sixteens, 0xb1));
      };
      const __m512i size = of_16(_mm512_dpbusd_epi32(zero, _mm512_abs_epi8(v), ones));
      const __m512i sum = of_16(_mm512_dpbusd_epi32(zero, ones, v));
      most16 = _mm512_max_epi32(most16, size);
      most32 = _mm512_max_epi32(most32, _mm512_add_epi32(of_32(size), _mm512_abs_epi32(of_32(sum))));
    }
    const __m512i sums = _mm512_cvtepi16_epi32(_mm256_load_si256((const __m256i*)x->sums16));
    _mm512_store_si512(to.start, _mm512_mullo_epi32(sums, _mm512_set1_epi32(-32)));
    __builtin_memcpy(to.sums32, x->sums32, sizeof to.sums32);
    to.d = x->d;
    to.largest16 = _mm512_reduce_max_epi32(most16);
    to.largest32 = _mm512_reduce_max_epi32(most32) / 2;
  }
}

template <class Batch>
constexpr SlabPacking kSlabPacking{sizeof(SlabBatchBlock), pack_slab_batch_row};

QTENSOR_INLINE __m512i dword_to_all(const void* from) {
  int value;
  __builtin_memcpy(&value, from, 4);
  return _mm512_set1_epi32(value);
}

template <bool IN_ORDER>
QTENSOR_INLINE __m512i line(Lines<IN_ORDER> w, int u) {
  const auto* const from = reinterpret_cast<const __m512i*>(w.at + kLineBytes * u);
  if (!IN_ORDER) return _mm512_loadu_si512(from);
  __m512i v;
  asm volatile("vmovdqu64 %1, %0" : "=v"(v) : "m"(*from));
  return v;
}

struct SlabHeader {
  __m512i scale[8], min[4];  // [pair]: two words per row
  __m512 d, dmin;
};
struct SlabOfKQuant {
  static constexpr bool is_short = false;  // unpacking takes few instructions and registers
  using Batch = SlabBatchBlock;
  using Header = SlabHeader;
};
template <class Pairs>
inline int64_t most_unpacking() {
  return most_unpacking(Pairs::is_short);
}
struct SlabWithMins : SlabOfKQuant, PairsWithMins {
  static int32_t largest_sum(const SlabBatchBlock& x) { return x.largest32; }

  template <bool IN_ORDER>
  QTENSOR_INLINE static void header(Lines<IN_ORDER> w, SlabHeader& h) {
    const __m512i d = line(w, 0), scales = line(w, 1), mins = line(w, 2),
                  rest = line(w, 3);  // lower nibbles of the last four of each
    const __m512i six = _mm512_set1_epi8(63), four = _mm512_set1_epi8(15), up = _mm512_set1_epi8(48);
    const auto joined = [&](__m512i low, __m512i high) __attribute__((always_inline)) {
      return _mm512_ternarylogic_epi32(_mm512_and_si512(low, four), _mm512_srli_epi16(high, 2), up, 0xf8);
    };
    // The first two bytes of each dword as words, and the last two.
    const auto split = [](__m512i bytes, __m512i* to) __attribute__((always_inline)) {
      to[0] = _mm512_shuffle_epi8(
          bytes, _mm512_broadcast_i32x4(_mm_setr_epi8(0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1)));
      to[1] = _mm512_shuffle_epi8(
          bytes, _mm512_broadcast_i32x4(_mm_setr_epi8(2, -1, 3, -1, 6, -1, 7, -1, 10, -1, 11, -1, 14, -1, 15, -1)));
    };
    split(_mm512_and_si512(scales, six), h.scale);
    split(joined(rest, scales), h.scale + 2);
    split(_mm512_and_si512(mins, six), h.min);
    split(joined(_mm512_srli_epi16(rest, 4), mins), h.min + 2);
    h.d = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(d));
    h.dmin = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(d, 16)));
  }
};

template <class Block>
struct SlabPairs;  // `shift`: bits by which B's values are shifted up; `largest`: the largest magnitude of a value
template <>
struct SlabPairs<BlockQ4_K> : SlabWithMins {
  static constexpr bool is_short = true;
  static constexpr int shift = 4, largest = 15;
  template <bool IN_ORDER>
  QTENSOR_INLINE static void values(Lines<IN_ORDER> w, int pair, int four, __m512i& a, __m512i& b) {
    const __m512i v = line(w, Packing<BlockQ4_K>::values(pair, four));
    a = _mm512_and_si512(v, _mm512_set1_epi8(15));
    b = _mm512_and_si512(v, _mm512_set1_epi8(char(0xf0)));
  }
};
template <>
struct SlabPairs<BlockQ5_K> : SlabWithMins {
  static constexpr int shift = 3, largest = 31;
  QTENSOR_INLINE static __m512i moved(__m512i v, int from, int to) {
    return from < to ? _mm512_slli_epi16(v, to - from) : from > to ? _mm512_srli_epi16(v, from - to) : v;
  }
  template <bool IN_ORDER>
  QTENSOR_INLINE static void values(Lines<IN_ORDER> w, int pair, int four, __m512i& a, __m512i& b) {
    using P = Packing<BlockQ5_K>;
    const __m512i v = line(w, P::values(pair, four)), fifth = line(w, P::fifth_bits(four));
    a = _mm512_ternarylogic_epi32(_mm512_and_si512(v, _mm512_set1_epi8(15)), moved(fifth, 2 * pair, 4),
                                  _mm512_set1_epi8(16), 0xf8);
    b = _mm512_ternarylogic_epi32(_mm512_and_si512(_mm512_srli_epi16(v, 1), _mm512_set1_epi8(0x78)),
                                  moved(fifth, 2 * pair + 1, 7), _mm512_set1_epi8(char(0x80)), 0xf8);
  }
};
// A is sixteen values, and B the sixteen values 64 positions later. Sums begin at -32 times the sums of their
// activations.
template <>
struct SlabPairs<BlockQ6_K> : SlabOfKQuant {
  static constexpr int pairs = 8, fours = 4, shift = 0, largest = 32;
  static constexpr bool has_min = false;
  static constexpr int a(int pair, int four) { return 128 * (pair / 4) + 16 * (pair % 4) + 4 * four; }
  static constexpr int b(int pair, int four) { return a(pair, four) + 64; }
  static int32_t largest_sum(const SlabBatchBlock& x) { return x.largest16; }

  template <bool IN_ORDER>
  QTENSOR_INLINE static void header(Lines<IN_ORDER> w, SlabHeader& h) {
#pragma GCC unroll 2
    for (int n = 0; n < 2; n++) {  // A's scales are the bytes of one dword, B's those of the next
      const __m512i a = line(w, 2 * n), b = line(w, 2 * n + 1);
      const __m512i low = _mm512_mask_blend_epi16(0xaaaaaaaa, a, _mm512_slli_epi32(b, 16));
      const __m512i high = _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(a, 16), b);
      h.scale[4 * n] = _mm512_srai_epi16(_mm512_slli_epi16(low, 8), 8);
      h.scale[4 * n + 1] = _mm512_srai_epi16(low, 8);
      h.scale[4 * n + 2] = _mm512_srai_epi16(_mm512_slli_epi16(high, 8), 8);
      h.scale[4 * n + 3] = _mm512_srai_epi16(high, 8);
    }
    h.d = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)w.halves));
  }
  template <bool IN_ORDER>
  QTENSOR_INLINE static void values(Lines<IN_ORDER> w, int pair, int i, __m512i& a, __m512i& b) {
    using P = Packing<BlockQ6_K>;
    const int n = pair / 4, second = pair / 2 % 2, at = 4 * (pair % 2) + i;
    const __m512i v = line(w, P::values(n, second, at)), upper = line(w, P::upper_bits(n, at));
    const __m512i four = _mm512_set1_epi8(15), two = _mm512_set1_epi8(48);
    a = _mm512_ternarylogic_epi32(_mm512_and_si512(v, four), _mm512_slli_epi16(upper, second ? 2 : 4), two, 0xf8);
    b = _mm512_ternarylogic_epi32(_mm512_and_si512(_mm512_srli_epi16(v, 4), four),
                                  second ? _mm512_srli_epi16(upper, 2) : upper, two, 0xf8);
  }
};

// Both halves of a line share each broadcast. kMostAtOnce batch rows share the registers: sums of A and B in each half.
// With more than kMostAsking batch rows, nothing is prefetched.
constexpr int kMostAtOnce = 4, kMostAsking = 512, kBatchStep = 1;

struct alignas(64) KeptValues {
  uint8_t q[64][64];  // [A and B of each four][sixteen rows]
};
template <class Block, bool IN_ORDER = false>
struct SlabPass {
  Lines<IN_ORDER> lines[2];
  typename SlabPairs<Block>::Header header[2];
  KeptValues kept[2];
  const uint8_t* later;  // memory to prefetch: `asked` lines of 64 bytes with each pair
  int64_t asked;
};

// Adds the products of both halves' values with four bytes of a batch row. FROM_MEMORY: broadcasts take no register.
template <bool FROM_MEMORY>
QTENSOR_INLINE void add_products(__m512i& first, __m512i& second, const __m512i (&w)[2], const int8_t* x) {
  if constexpr (FROM_MEMORY) {
    const auto& four = *reinterpret_cast<const int8_t (*)[4]>(x);
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(first) : "v"(w[0]), "m"(four));
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(second) : "v"(w[1]), "m"(four));
  } else {
    const __m512i all = dword_to_all(x);
    first = _mm512_dpbusd_epi32(first, w[0], all);
    second = _mm512_dpbusd_epi32(second, w[1], all);
  }
}

// acc[g][j] = fma(f, d of batch row j, acc[g][j]) for M batch rows, where acc is [j][half][16 rows] of a slab.
// FITS: all sums fit in words.
template <class Block, int M, bool FITS, Source SOURCE, bool IN_ORDER>
QTENSOR_INLINE void slab_block(SlabPass<Block, IN_ORDER>& t, const SlabBatchBlock* x, float* acc) {
  using P = SlabPairs<Block>;
  constexpr bool kFromMemory = M > 2 && SOURCE != Source::kept && !P::is_short;  // otherwise, gcc 12 spills registers
  const __m512i zero = _mm512_setzero_si512();
  __m512i total[2][M];
#pragma GCC unroll 8
  for (int j = 0; j < M; j++) total[0][j] = total[1][j] = zero;
#pragma GCC unroll 8
  for (int pair = 0; pair < P::pairs; pair++) {
    ask(t, pair);
    __m512i sum_a[2][M], sum_b[2][M];
#pragma GCC unroll 8
    for (int j = 0; j < M; j++) {
      sum_a[0][j] = sum_a[1][j] = P::has_min ? zero : dword_to_all(x[j].start + P::a(pair, 0) / 16);
      sum_b[0][j] = sum_b[1][j] = P::has_min ? zero : dword_to_all(x[j].start + P::b(pair, 0) / 16);
    }
#pragma GCC unroll 8
    for (int four = 0; four < P::fours; four++) {
      __m512i a[2], b[2];
#pragma GCC unroll 2
      for (int g = 0; g < 2; g++) {
        uint8_t (*const two)[64] = t.kept[g].q + 2 * (pair * P::fours + four);
        if (SOURCE == Source::kept) {
          a[g] = _mm512_load_si512(two[0]);
          b[g] = _mm512_load_si512(two[1]);
        } else {
          P::values(t.lines[g], pair, four, a[g], b[g]);
        }
        if (SOURCE == Source::unpacked_and_kept) {
          _mm512_store_si512(two[0], a[g]);
          _mm512_store_si512(two[1], b[g]);
        }
      }
#pragma GCC unroll 8
      for (int j = 0; j < M; j++) {
        add_products<kFromMemory>(sum_a[0][j], sum_a[1][j], a, x[j].q + P::a(pair, four));
        add_products<kFromMemory>(sum_b[0][j], sum_b[1][j], b, x[j].q + P::b(pair, four));
      }
    }
#pragma GCC unroll 2
    for (int g = 0; g < 2; g++)
#pragma GCC unroll 8
      for (int j = 0; j < M; j++) {
        const __m512i scale = t.header[g].scale[pair], sa = sum_a[g][j], sb = sum_b[g][j];
        if (FITS) {
          const __m512i words = _mm512_mask_blend_epi16(0xaaaaaaaa, sa, _mm512_slli_epi32(sb, 16 - P::shift));
          total[g][j] = _mm512_dpwssd_epi32(total[g][j], words, scale);
        } else {
          const __m512i scale_a = _mm512_srai_epi32(_mm512_slli_epi32(scale, 16), 16);
          const __m512i scale_b = _mm512_srai_epi32(scale, 16);
          total[g][j] = _mm512_add_epi32(total[g][j], _mm512_mullo_epi32(sa, scale_a));
          total[g][j] = _mm512_add_epi32(total[g][j], _mm512_mullo_epi32(_mm512_srai_epi32(sb, P::shift), scale_b));
        }
      }
  }
#pragma GCC unroll 2
  for (int g = 0; g < 2; g++)
#pragma GCC unroll 8
    for (int j = 0; j < M; j++) {
      __m512 f = _mm512_mul_ps(_mm512_cvtepi32_ps(total[g][j]), t.header[g].d);
      if constexpr (P::has_min) {
        __m512i mins = zero;
#pragma GCC unroll 4
        for (int pair = 0; pair < 4; pair++)
          mins = _mm512_dpwssd_epi32(mins, t.header[g].min[pair], dword_to_all(x[j].sums32 + 2 * pair));
        f = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(mins), t.header[g].dmin, f);
      }
      float* const to = acc + kSlabRows * j + kSlabLanes * g;
      _mm512_store_ps(to, _mm512_fmadd_ps(f, _mm512_set1_ps(x[j].d), _mm512_load_ps(to)));
    }
}

// Multiplies M batch rows; the sums of magnitudes show whether all sums fit in words.
template <class Block, int M, Source SOURCE, bool IN_ORDER>
QTENSOR_INLINE void slab_batch_rows(SlabPass<Block, IN_ORDER>& t, const SlabBatchBlock* x, float* acc) {
  using P = SlabPairs<Block>;
  int32_t largest = 0;
#pragma GCC unroll 8
  for (int j = 0; j < M; j++) {
    const int32_t own = P::largest_sum(x[j]);
    largest = largest > own ? largest : own;
  }
  if (__builtin_expect(largest * P::largest <= 32767, 1))
    slab_block<Block, M, true, SOURCE>(t, x, acc);
  else
    slab_block<Block, M, false, SOURCE>(t, x, acc);
}

}  // namespace
}  // namespace qtensor
