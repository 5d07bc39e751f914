// Products of packed weights whose sums of 32 are scaled one by one: blocks of 32 as floats, IQ4_XS as integers. A is
// values 0 to 15 of 32, and B the others. Sums of unsigned values are words; with five bits, they are kept small by
// beginning at a negative value. Signed values transfer their signs to the activations, and their sums fit in words for
// one step only. AVX-VNNI sums all of them as dwords.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernel_table.h"
#include "kernels/portable/always_inline.h"
#include "kernels/portable/unpacked_blocks.h"
#include "pack_rows.h"
#include "slab_pass.h"

namespace qtensor {
namespace {

// BlockQ8x32 with its sums as floats, for mins, and the values at which sums of words begin.
struct alignas(64) SlabBatchBlock32 {
  int8_t q[256];
  float d[8];
  int32_t sums[8];
  float of_mins[8];
  int16_t start[8][2];  // -16 times the sums of the first two and of the last two of each four
};
static_assert(sizeof(SlabBatchBlock32) == sizeof(SlabBatchBlock));

void pack_slab_batch_row_32(const PackTask& t, int64_t row) {
  const BlockQ8x32* x = t.x_32 + row * t.blocks;
  for (int64_t b = 0; b < t.blocks; b++, x++) {
    auto& to = reinterpret_cast<SlabBatchBlock32*>(t.packed)[b * t.m + row];
    for (int c = 0; c < 8; c++) {
      const __m256i v = _mm256_load_si256((const __m256i*)(x->q + 32 * c));
      _mm256_store_si256((__m256i*)(to.q + 32 * c), v);
      const __m256i words = sums_of_16(v);
      const __m128i both = _mm_add_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
      const int start = _mm_cvtsi128_si32(_mm_sub_epi16(_mm_setzero_si128(), _mm_slli_epi16(both, 4)));
      __builtin_memcpy(to.start[c], &start, 4);
    }
    const __m256 d = _mm256_load_ps(x->d);
    const __m256i sums = _mm256_load_si256((const __m256i*)x->sums);
    _mm256_store_ps(to.d, d);
    _mm256_store_si256((__m256i*)to.sums, sums);
    _mm256_store_ps(to.of_mins, _mm256_mul_ps(_mm256_cvtepi32_ps(sums), d));
  }
}
template <>
constexpr SlabPacking kSlabPacking<SlabBatchBlock32>{sizeof(SlabBatchBlock32), pack_slab_batch_row_32};

// Products of signed values, which have 128 added with AVX-VNNI. Sums are dwords.
struct SignedProducts {
  static constexpr bool in_words = false;
  QTENSOR_INLINE static void add(__m256i& sum, __m256i w, __m256i x) {
    sum =
        kDwordSums ? add_byte_products(sum, w, x) : add_byte_products(sum, _mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    in_register(sum);
  }
};
QTENSOR_INLINE __m256i signed_value(__m256i v) { return kDwordSums ? unsigned_of(v) : v; }

struct SlabHeader32 {
  __m256 d[8], m[8];
};
struct PairsOf32 {
  static constexpr int pairs = 8, fours = 4;
  static constexpr bool alike = true;
  static constexpr int a(int s, int i) { return 32 * s + 4 * i; }
  static constexpr int b(int s, int i) { return 32 * s + 16 + 4 * i; }
};
struct SlabOf32 : PairsOf32 {
  using Batch = SlabBatchBlock32;
  using Header = SlabHeader32;
  static constexpr bool has_min = false;
  template <bool IN_ORDER>
  QTENSOR_INLINE static void header(Lines<IN_ORDER> w, SlabHeader32& h) {
#pragma GCC unroll 8
    for (int s = 0; s < 8; s++)
      h.d[s] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(w.halves + 2 * kGroupRows * s)));
  }
};
struct SlabOf32WithMins : PairsOf32 {
  using Batch = SlabBatchBlock32;
  using Header = SlabHeader32;
  static constexpr bool has_min = true;
  template <bool IN_ORDER>
  QTENSOR_INLINE static void header(Lines<IN_ORDER> w, SlabHeader32& h) {
#pragma GCC unroll 8
    for (int s = 0; s < 8; s++) {
      const __m256i both = line(w, s);
      h.d[s] = halves_of(both);
      h.m[s] = halves_of(_mm256_srli_epi32(both, 16));
    }
  }
};
// Nibbles of lines FIRST + STEP * s + i.
template <int FIRST, int STEP>
struct Nibbles {
  using Products = UnsignedProducts;
  static constexpr bool keeps_apart = false;
  static constexpr int64_t most_unpacking = 2;
  template <bool IN_ORDER>
  QTENSOR_INLINE static RawValues raw(Lines<IN_ORDER> w, int s, int i) {
    return {line(w, FIRST + STEP * s + i), _mm256_setzero_si256()};
  }
  QTENSOR_INLINE static __m256i values_a(RawValues v, int, int) { return bits_of(v.low, 15); }
  QTENSOR_INLINE static __m256i values_b(RawValues v, int, int) { return bits_of(_mm256_srli_epi16(v.low, 4), 15); }
};
// The same with a line of fifth bits before each 32 values: bit l of a dword belongs to value l.
template <int FIRST>
struct FiveBits {
  using Products = UnsignedProducts;
  static constexpr bool keeps_apart = true;
  static constexpr int64_t most_unpacking = 1;  // unpacking is slow
  template <bool IN_ORDER>
  QTENSOR_INLINE static RawValues raw(Lines<IN_ORDER> w, int s, int i) {
    __m256i fifth = line(w, FIRST + 5 * s);
    __asm__ volatile("" : "+x"(fifth));  // otherwise gcc unpacks the bits of all steps at once, to the stack
    return {line(w, FIRST + 5 * s + 1 + i), fifth};
  }
  QTENSOR_INLINE static __m256i with_fifth_bits(__m256i v, __m256i bits, int first) {
    const char b = char(first / 8), c = char(b + 4), d = char(b + 8), e = char(b + 12);
    const __m128i order = _mm_setr_epi8(b, b, b, b, c, c, c, c, d, d, d, d, e, e, e, e);
    const __m256i own = _mm256_set1_epi32(first % 8 ? int(0x80402010) : 0x08040201);
    const __m256i set = _mm256_and_si256(_mm256_shuffle_epi8(bits, _mm256_broadcastsi128_si256(order)), own);
    return _mm256_or_si256(v, bits_of(_mm256_cmpeq_epi8(set, own), 16));
  }
  QTENSOR_INLINE static __m256i values_a(RawValues v, int, int i) {
    return with_fifth_bits(bits_of(v.low, 15), v.high, 4 * i);
  }
  QTENSOR_INLINE static __m256i values_b(RawValues v, int, int i) {
    return with_fifth_bits(bits_of(_mm256_srli_epi16(v.low, 4), 15), v.high, 16 + 4 * i);
  }
};
template <int FIRST, const int8_t (&TABLE)[16] = kLevelsIQ4>
struct NibblesOfLevels : Nibbles<FIRST, 4> {
  using Products = SignedProducts;
  QTENSOR_INLINE static __m256i level(__m256i nibble) {
    const __m128i table = _mm_loadu_si128((const __m128i*)TABLE);
    return _mm256_shuffle_epi8(signed_value(_mm256_broadcastsi128_si256(table)), nibble);
  }
  QTENSOR_INLINE static __m256i values_a(RawValues v, int, int) { return level(bits_of(v.low, 15)); }
  QTENSOR_INLINE static __m256i values_b(RawValues v, int, int) {
    return level(bits_of(_mm256_srli_epi16(v.low, 4), 15));
  }
};

// `middle` must be subtracted from the stored values. Sums of words begin at -`from` times the sums of the activations,
// and sums of dwords at -`middle` times the sums of the activations.
template <>
struct SlabPairs<BlockQ8_0> : SlabOf32 {
  using Products = SignedProducts;
  static constexpr int middle = kAboveSigned, from = 0;
  static constexpr bool keeps_apart = false;
  static constexpr int64_t most_unpacking = 1000;  // values need no unpacking
  template <bool IN_ORDER>
  QTENSOR_INLINE static RawValues raw(Lines<IN_ORDER> w, int s, int i) {
    const __m256i a = line(w, 8 * s + 2 * i);
    return {a, line(w, 8 * s + 2 * i + 1)};
  }
  QTENSOR_INLINE static __m256i values_a(RawValues v, int, int) { return signed_value(v.low); }
  QTENSOR_INLINE static __m256i values_b(RawValues v, int, int) { return signed_value(v.high); }
};
template <>
struct SlabPairs<BlockQ4_0> : SlabOf32, Nibbles<0, 4> {
  static constexpr int middle = 8, from = 8;
};
template <>
struct SlabPairs<BlockIQ4_NL> : SlabOf32, NibblesOfLevels<0> {
  static constexpr int middle = kAboveSigned, from = 0;
};
template <>
struct SlabPairs<BlockMXFP4> : SlabOf32, NibblesOfLevels<0, kLevelsMXFP4> {
  static constexpr int middle = kAboveSigned, from = 0;
  template <bool IN_ORDER>
  QTENSOR_INLINE static void header(Lines<IN_ORDER> w, SlabHeader32& h) {  // see power_of_two
#pragma GCC unroll 8
    for (int s = 0; s < 8; s++) {
      const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(w.halves + 2 * kGroupRows * s)));
      const __m256i e = _mm256_and_si256(words, _mm256_set1_epi32(255)), one = _mm256_set1_epi32(1);
      const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, one), 23);
      const __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), _mm256_min_epi32(e, one));
      h.d[s] = _mm256_castsi256_ps(_mm256_max_epi32(normal, small));
    }
  }
};
template <>
struct SlabPairs<BlockQ4_1> : SlabOf32WithMins, Nibbles<8, 4> {
  static constexpr int middle = 0, from = 0;
};
template <>
struct SlabPairs<BlockQ5_0> : SlabOf32, FiveBits<0> {
  static constexpr int middle = 16, from = 16;
};
template <>
struct SlabPairs<BlockQ5_1> : SlabOf32WithMins, FiveBits<8> {
  static constexpr int middle = 0, from = 16;
};

struct SlabHeaderIQ4 {
  __m256i scale[8];  // of 32 values, as dwords
  __m256 d;
};
template <>
struct SlabPairs<BlockIQ4_XS> : PairsOf32, NibblesOfLevels<2> {
  using Batch = SlabBatchBlock;
  using Header = SlabHeaderIQ4;
  static constexpr bool scales_of_32 = true;
  template <bool IN_ORDER>
  QTENSOR_INLINE static void header(Lines<IN_ORDER> w, SlabHeaderIQ4& h) {
    const __m256i high = line(w, 0), low = line(w, 1);
#pragma GCC unroll 8
    for (int s = 0; s < 8; s++) {
      constexpr int kHighAt = 16;  // two bits of each scale, after d
      const __m256i upper = _mm256_and_si256(_mm256_srli_epi32(high, kHighAt + 2 * s - 4), _mm256_set1_epi32(48));
      const __m256i lower = _mm256_and_si256(_mm256_srli_epi32(low, 4 * s), _mm256_set1_epi32(15));
      h.scale[s] = _mm256_sub_epi32(_mm256_or_si256(lower, upper), _mm256_set1_epi32(32));
    }
    h.d = halves_of(high);
  }
};

// Computes the sums of 32 values.
template <class Block, int M, Source SOURCE, bool IN_ORDER, class Batch>
QTENSOR_INLINE void sums_of_32(SlabPass<Block, IN_ORDER>& t, int first, const Batch* x, int s, SlabSums<M>& sum) {
  using Products = typename SlabPairs<Block>::Products;
  if (first == 0) ask(t, s);
  if constexpr (M == 1 && SOURCE == Source::unpacked) {
#pragma GCC unroll 6
    for (int i = 0; i < 4; i++) add_both_products<Block, Products>(t, *x, s, i, sum, sum);
  } else {
#pragma GCC unroll 2
    for (int second = 0; second < 2; second++)
#pragma GCC unroll 6
      for (int i = 0; i < 4; i++) add_products<Block, Products, M, SOURCE>(t, first, x, s, i, second, sum);
  }
}

// Like some_parts of K-quants.
template <class Block, int M, Source SOURCE, bool IN_ORDER>
QTENSOR_INLINE void some_parts(SlabPass<Block, IN_ORDER>& t, int first, const SlabBatchBlock32* x, float* acc) {
  using P = SlabPairs<Block>;
  constexpr int kParts = parts_with(M), kFrom = kDwordSums ? P::middle : P::from;
  __m256 f[kParts][M];
#pragma GCC unroll 6
  for (int k = 0; k < kParts; k++)
#pragma GCC unroll 6
    for (int j = 0; j < M; j++) f[k][j] = _mm256_setzero_ps();
  each_pair<P, (M > 2)>([&](int s) __attribute__((always_inline)) {
    SlabSums<M> sum;
#pragma GCC unroll 6
    for (int j = 0; j < M; j++) {
      __m256i start = _mm256_setzero_si256();
      if (kFrom > 0) start = dword_to_all(kDwordSums ? (const void*)(x[j].sums + s) : x[j].start[s]);
      if (kDwordSums) start = _mm256_madd_epi16(start, _mm256_set1_epi32(uint16_t(-kFrom)));
      if (!kDwordSums && kFrom == 8) start = _mm256_srai_epi16(start, 1);
#pragma GCC unroll 6
      for (int k = 0; k < kParts; k++) sum[k][j] = start;
    }
    sums_of_32<Block, M, SOURCE>(t, first, x, s, sum);
#pragma GCC unroll 6
    for (int j = 0; j < M; j++) {
      const __m256 d = _mm256_set1_ps(x[j].d[s]);
#pragma GCC unroll 6
      for (int k = 0; k < kParts; k++) {
        const SlabHeader32& h = t.header[first + k];
        __m256i dwords = P::Products::in_words ? as_dwords(sum[k][j]) : sum[k][j];
        if (kFrom > P::middle) dwords = _mm256_add_epi32(dwords, _mm256_slli_epi32(dword_to_all(x[j].sums + s), 4));
        f[k][j] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dwords), _mm256_mul_ps(h.d[s], d), f[k][j]);
        if (P::has_min) f[k][j] = _mm256_fmadd_ps(_mm256_set1_ps(x[j].of_mins[s]), h.m[s], f[k][j]);
        in_memory(f[k][j]);
      }
    }
  });
#pragma GCC unroll 6
  for (int k = 0; k < kParts; k++)
#pragma GCC unroll 6
    for (int j = 0; j < M; j++) {
      float* const to = acc + kSlabRows * j + kSlabLanes * (first + k);
      _mm256_store_ps(to, _mm256_add_ps(_mm256_load_ps(to), f[k][j]));
    }
}

template <class Block, int M, Source SOURCE, bool IN_ORDER>
  requires(SlabPairs<Block>::scales_of_32)
QTENSOR_INLINE void some_parts(SlabPass<Block, IN_ORDER>& t, int first, const SlabBatchBlock* x, float* acc) {
  constexpr int kParts = parts_with(M);
  const __m256i zero = _mm256_setzero_si256();
  SlabSums<M> total;
#pragma GCC unroll 6
  for (int k = 0; k < kParts; k++)
#pragma GCC unroll 6
    for (int j = 0; j < M; j++) total[k][j] = zero;
  each_pair<SlabPairs<Block>, (M > 2)>([&](int s) __attribute__((always_inline)) {
    SlabSums<M> sum;
#pragma GCC unroll 6
    for (int j = 0; j < M; j++) {
      // The second word of the dword is another sum, or a part of d; its factor is zero.
      const __m256i start =
          _mm256_madd_epi16(dword_to_all(x[j].sums32 + s), _mm256_set1_epi32(uint16_t(-kAboveSigned)));
#pragma GCC unroll 6
      for (int k = 0; k < kParts; k++) sum[k][j] = kAboveSigned > 0 ? start : zero;
    }
    sums_of_32<Block, M, SOURCE>(t, first, x, s, sum);
#pragma GCC unroll 6
    for (int k = 0; k < kParts; k++)
#pragma GCC unroll 6
      for (int j = 0; j < M; j++) {
        total[k][j] = _mm256_add_epi32(total[k][j], _mm256_mullo_epi32(sum[k][j], t.header[first + k].scale[s]));
        in_memory(total[k][j]);
      }
  });
#pragma GCC unroll 6
  for (int k = 0; k < kParts; k++)
#pragma GCC unroll 6
    for (int j = 0; j < M; j++) {
      const __m256 f = _mm256_mul_ps(_mm256_cvtepi32_ps(total[k][j]), t.header[first + k].d);
      float* const to = acc + kSlabRows * j + kSlabLanes * (first + k);
      _mm256_store_ps(to, _mm256_fmadd_ps(f, _mm256_set1_ps(x[j].d), _mm256_load_ps(to)));
    }
}

}  // namespace
}  // namespace qtensor
