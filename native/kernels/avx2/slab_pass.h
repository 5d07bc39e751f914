// Products of packed K-quants (packed_weights.h): eight rows of the weight are the lanes, and batch rows are broadcast,
// four bytes at a time. A line of 32 rows is four registers, which share each broadcast. Sums of two adjacent products
// are accumulated in words for as many steps as always fit, then multiplied by their scale in vpmaddwd; AVX-VNNI
// accumulates in dwords.
//
// Sixteen registers hold eight or twelve sums: with one batch row, those of A and B of a whole line; with two batch
// rows, those of A first, then those of B; with three to six batch rows, those of half a line.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "integer_kernels.h"
#include "kernel_table.h"
#include "kernels/portable/always_inline.h"
#include "kernels/portable/slab_source.h"
#include "products.h"

namespace qtensor {
namespace {

constexpr int64_t kSlabLanes = 8, kSlabParts = kGroupRows / kSlabLanes;

// One block of a batch row, and the values at which its sums begin.
struct alignas(64) SlabBatchBlock {
  int8_t q[256];
  int16_t start[16][2];  // for Q6_K: -32 times the sums of sixteen, in the form of add_to_sums
  int16_t sums32[8];
  float d;
};
static_assert(sizeof(SlabBatchBlock) == 384);

// The sums of each sixteen bytes, in the form of add_to_sums: a dword, or two words, one for the first two bytes of
// each four and one for the others.
QTENSOR_INLINE __m256i sums_of_16(__m256i q) {
  const auto both = [](__m256i a, __m256i b) { return kDwordSums ? _mm256_add_epi32(a, b) : _mm256_add_epi16(a, b); };
  const __m256i fours = add_to_sums(_mm256_setzero_si256(), _mm256_set1_epi8(1), q);
  const __m256i eights = both(fours, _mm256_shuffle_epi32(fours, 0x4e));
  return both(eights, _mm256_shuffle_epi32(eights, 0xb1));
}

void pack_slab_batch_row(const PackTask& t, int64_t row) {
  const BlockQ8K* x = t.x + row * t.blocks;
  for (int64_t b = 0; b < t.blocks; b++, x++) {
    auto& to = reinterpret_cast<SlabBatchBlock*>(t.packed)[b * t.m + row];
    for (int c = 0; c < 8; c++) {
      const __m256i v = _mm256_load_si256((const __m256i*)(x->q + 32 * c));
      _mm256_store_si256((__m256i*)(to.q + 32 * c), v);
      const __m256i sums = sums_of_16(v), zero = _mm256_setzero_si256();
      const __m256i start = kDwordSums ? _mm256_sub_epi32(zero, _mm256_slli_epi32(sums, 5))
                                       : _mm256_sub_epi16(zero, _mm256_slli_epi16(sums, 5));
      const __m128i two = _mm_unpacklo_epi32(_mm256_castsi256_si128(start), _mm256_extracti128_si256(start, 1));
      _mm_storel_epi64((__m128i*)to.start[2 * c], two);
    }
    __builtin_memcpy(to.sums32, x->sums32, sizeof to.sums32);
    to.d = x->d;
  }
}

template <class Batch>
constexpr SlabPacking kSlabPacking{sizeof(SlabBatchBlock), pack_slab_batch_row};

QTENSOR_INLINE __m256i dword_to_all(const void* from) {
  int value;
  __builtin_memcpy(&value, from, 4);
  return _mm256_set1_epi32(value);
}
template <bool IN_ORDER>
QTENSOR_INLINE __m256i line(Lines<IN_ORDER> w, int u) {
  const auto* const from = reinterpret_cast<const __m256i*>(w.at + kLineBytes * u);
  if (!IN_ORDER) return _mm256_loadu_si256(from);
  __m256i v;
  asm volatile("vmovdqu %1, %0" : "=x"(v) : "m"(*from));
  return v;
}
// Converts the halves in the lower words of dwords.
QTENSOR_INLINE __m256 halves_of(__m256i dwords) {
  const __m256i words = _mm256_packus_epi32(_mm256_and_si256(dwords, _mm256_set1_epi32(0xffff)), dwords);
  return _mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permute4x64_epi64(words, 0xd8)));
}
QTENSOR_INLINE __m256i bits_of(__m256i v, int mask) { return _mm256_and_si256(v, _mm256_set1_epi8(char(mask))); }
QTENSOR_INLINE __m256i moved(__m256i v, int from, int to) {
  return from < to ? _mm256_slli_epi16(v, to - from) : from > to ? _mm256_srli_epi16(v, from - to) : v;
}
// Byte `at` of each dword as a scale for add_scaled: expanded to the dword, or to both of its words.
QTENSOR_INLINE __m256i scale_of_byte(__m256i dwords, int at, bool is_signed) {
  if (kDwordSums && is_signed) return _mm256_srai_epi32(_mm256_slli_epi32(dwords, 24 - 8 * at), 24);
  if (kDwordSums) return _mm256_and_si256(_mm256_srli_epi32(dwords, 8 * at), _mm256_set1_epi32(255));
  const char b = char(at), none = -1;
  const char c = char(at + 4), d = char(at + 8), e = char(at + 12);
  const __m128i upper = _mm_setr_epi8(none, b, none, b, none, c, none, c, none, d, none, d, none, e, none, e);
  const __m128i lower = _mm_setr_epi8(b, none, b, none, c, none, c, none, d, none, d, none, e, none, e, none);
  const __m256i words = _mm256_shuffle_epi8(dwords, _mm256_broadcastsi128_si256(is_signed ? upper : lower));
  return is_signed ? _mm256_srai_epi16(words, 8) : words;
}

struct SlabHeader {
  __m256i scale[16], min[4];  // [group of values], for add_scaled; [pair of sub-blocks]: two mins per row
  __m256 d, dmin;
};
// The dwords of a line, or of two lines, that contain the values of A and B.
struct RawValues {
  __m256i low, high;
};
struct SlabOfKQuant {
  using Batch = SlabBatchBlock;
  using Header = SlabHeader;
  static constexpr int64_t most_unpacking = 1;  // up to this many passes, each pass unpacks values itself
};
struct SlabWithMins : SlabOfKQuant, PairsWithMins {
  static constexpr bool has_start = false;
  template <bool IN_ORDER>
  QTENSOR_INLINE static void header(Lines<IN_ORDER> w, SlabHeader& h) {
    const __m256i d = line(w, 0), scales = line(w, 1), mins = line(w, 2),
                  rest = line(w, 3);  // see SlabWithMins of AVX-512
    const auto joined = [](__m256i low, __m256i high) __attribute__((always_inline)) {
      return _mm256_or_si256(bits_of(low, 15), bits_of(_mm256_srli_epi16(high, 2), 48));
    };
    const __m256i low = bits_of(scales, 63), high = joined(rest, scales);
#pragma GCC unroll 6
    for (int i = 0; i < 4; i++) {
      h.scale[i] = scale_of_byte(low, i, false);
      h.scale[4 + i] = scale_of_byte(high, i, false);
    }
    // The first two bytes of each dword as words, and the last two.
    const auto split = [](__m256i bytes, __m256i* to) __attribute__((always_inline)) {
      to[0] = _mm256_shuffle_epi8(
          bytes, _mm256_broadcastsi128_si256(_mm_setr_epi8(0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1)));
      to[1] = _mm256_shuffle_epi8(bytes, _mm256_broadcastsi128_si256(_mm_setr_epi8(2, -1, 3, -1, 6, -1, 7, -1, 10, -1,
                                                                                   11, -1, 14, -1, 15, -1)));
    };
    split(bits_of(mins, 63), h.min);
    split(joined(_mm256_srli_epi16(rest, 4), mins), h.min + 2);
    h.d = halves_of(d);
    h.dmin = halves_of(_mm256_srli_epi32(d, 16));
  }
  static constexpr int scale_a(int pair) { return 2 * pair; }
  static constexpr int scale_b(int pair) { return 2 * pair + 1; }
};

template <class Block>
struct SlabPairs;  // `steps`: how many fours fit in a sum of words; `alike`: all pairs are unpacked by the same code
template <>
struct SlabPairs<BlockQ4_K> : SlabWithMins {
  static constexpr bool alike = true, keeps_apart = false;
  static constexpr int steps = 8;  // 15 * 127 * 16 = 30,480
  template <bool IN_ORDER>
  QTENSOR_INLINE static RawValues raw(Lines<IN_ORDER> w, int pair, int four) {
    return {line(w, Packing<BlockQ4_K>::values(pair, four)), _mm256_setzero_si256()};
  }
  QTENSOR_INLINE static __m256i values_a(RawValues v, int, int) { return bits_of(v.low, 15); }
  QTENSOR_INLINE static __m256i values_b(RawValues v, int, int) { return bits_of(_mm256_srli_epi16(v.low, 4), 15); }
};
template <>
struct SlabPairs<BlockQ5_K> : SlabWithMins {
  static constexpr bool alike = false, keeps_apart = true;
  static constexpr int steps = 4;  // 31 * 127 * 8 = 31,496
  template <bool IN_ORDER>
  QTENSOR_INLINE static RawValues raw(Lines<IN_ORDER> w, int pair, int four) {
    using P = Packing<BlockQ5_K>;
    const __m256i fifth = line(w, P::fifth_bits(four));
    return {line(w, P::values(pair, four)), fifth};
  }
  QTENSOR_INLINE static __m256i values_a(RawValues v, int pair, int) {
    return _mm256_or_si256(bits_of(v.low, 15), bits_of(moved(v.high, 2 * pair, 4), 16));
  }
  QTENSOR_INLINE static __m256i values_b(RawValues v, int pair, int) {
    return _mm256_or_si256(bits_of(_mm256_srli_epi16(v.low, 4), 15), bits_of(moved(v.high, 2 * pair + 1, 4), 16));
  }
};
// A is sixteen values, and B the sixteen values 64 positions later. Sums begin at -32 times the sums of their
// activations, so that they fit in a word: 32 * 127 * 8 = 32,512.
template <>
struct SlabPairs<BlockQ6_K> : SlabOfKQuant {
  static constexpr int pairs = 8, fours = 4, steps = 4;
  static constexpr bool has_min = false, has_start = true, alike = false, keeps_apart = true;
  static constexpr int a(int pair, int four) { return 128 * (pair / 4) + 16 * (pair % 4) + 4 * four; }
  static constexpr int b(int pair, int four) { return a(pair, four) + 64; }
  static constexpr int scale_a(int pair) { return a(pair, 0) / 16; }
  static constexpr int scale_b(int pair) { return b(pair, 0) / 16; }

  template <bool IN_ORDER>
  QTENSOR_INLINE static void header(Lines<IN_ORDER> w, SlabHeader& h) {
#pragma GCC unroll 6
    for (int i = 0; i < 4; i++) {
      const __m256i four = line(w, i);
#pragma GCC unroll 6
      for (int k = 0; k < 4; k++) h.scale[4 * i + k] = scale_of_byte(four, k, true);
    }
    h.d = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)w.halves));
  }
  template <bool IN_ORDER>
  QTENSOR_INLINE static RawValues raw(Lines<IN_ORDER> w, int pair, int i) {
    using P = Packing<BlockQ6_K>;
    const int n = pair / 4, second = pair / 2 % 2, at = 4 * (pair % 2) + i;
    const __m256i upper = line(w, P::upper_bits(n, at));
    return {line(w, P::values(n, second, at)), upper};
  }
  QTENSOR_INLINE static __m256i values_a(RawValues v, int pair, int) {
    return _mm256_or_si256(bits_of(v.low, 15), bits_of(_mm256_slli_epi16(v.high, pair / 2 % 2 ? 2 : 4), 48));
  }
  QTENSOR_INLINE static __m256i values_b(RawValues v, int pair, int) {
    const __m256i upper = pair / 2 % 2 ? _mm256_srli_epi16(v.high, 2) : v.high;
    return _mm256_or_si256(bits_of(_mm256_srli_epi16(v.low, 4), 15), bits_of(upper, 48));
  }
};

constexpr int kMostAtOnce = 6, kMostAsking = 512, kBatchStep = 1;

template <class Block, bool IN_ORDER = false>
struct SlabPass {
  Lines<IN_ORDER> lines[kSlabParts];
  typename SlabPairs<Block>::Header header[kSlabParts];
  alignas(64) uint8_t kept[2][32][kSlabParts][32];  // [A, B][four][part]
  const uint8_t* later;                             // memory to prefetch: `asked` lines of 64 bytes with each pair
  int64_t asked;
};

struct UnsignedProducts {
  static constexpr bool in_words = !kDwordSums;
  QTENSOR_INLINE static void add(__m256i& sum, __m256i w, __m256i x) {
    sum = add_to_sums(sum, w, x);
    in_register(sum);
  }
};

// Registers of rows that are multiplied together with M batch rows, for at most twelve sums.
constexpr int parts_with(int m) { return m <= 2 ? 4 : 2; }
template <int M>
using SlabSums = __m256i[parts_with(M)][M];

// A loop if the code of pairs differs only in addresses. Unrolled for many batch rows, it would exceed the L1
// instruction cache.
template <class P, bool LOOP, class Each>
QTENSOR_INLINE void each_pair(Each each) {
  if constexpr (LOOP) {
#pragma GCC unroll 1
    for (int pair = 0; pair < P::pairs; pair++) each(pair);
  } else {
#pragma GCC unroll 8
    for (int pair = 0; pair < P::pairs; pair++) each(pair);
  }
}

template <class Block, Source SOURCE, bool IN_ORDER>
QTENSOR_INLINE __m256i values_of(SlabPass<Block, IN_ORDER>& t, int part, int pair, int four, bool second) {
  using P = SlabPairs<Block>;
  auto* const place = reinterpret_cast<__m256i*>(t.kept[second][pair * P::fours + four][part]);
  if (SOURCE == Source::kept) return _mm256_load_si256(place);
  // B comes from lines that A has just read, so their order does not matter.
  const Lines<false> read{t.lines[part].at, t.lines[part].halves};
  const __m256i v = second ? P::values_b(P::raw(read, pair, four), pair, four)
                           : P::values_a(P::raw(t.lines[part], pair, four), pair, four);
  if (SOURCE == Source::unpacked_and_kept) _mm256_store_si256(place, v);
  return v;
}
// Unpacks all values of a group to memory before the first product, because unpacking five and six bits needs registers
// that sums occupy.
template <class Block>
__attribute__((noinline)) void keep_values(SlabPass<Block>& t) {
  using P = SlabPairs<Block>;
  each_pair<P, P::alike>([&](int pair) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int four = 0; four < P::fours; four++)
#pragma GCC unroll 6
      for (int part = 0; part < kSlabParts; part++) {
        const RawValues raw = P::raw(t.lines[part], pair, four);
        const int at = pair * P::fours + four;
        _mm256_store_si256((__m256i*)t.kept[0][at][part], P::values_a(raw, pair, four));
        _mm256_store_si256((__m256i*)t.kept[1][at][part], P::values_b(raw, pair, four));
      }
  });
}
// Adds the products of four values of A, or of B, for the registers of rows from `first` on.
template <class Block, class Products, int M, Source SOURCE, bool IN_ORDER, class Batch>
QTENSOR_INLINE void add_products(SlabPass<Block, IN_ORDER>& t, int first, const Batch* x, int pair, int four,
                                 bool second, SlabSums<M>& sum) {
  using P = SlabPairs<Block>;
  constexpr int kParts = parts_with(M);
  const auto of_batch = [&](int j) __attribute__((always_inline)) {
    __m256i v = dword_to_all(x[j].q + (second ? P::b(pair, four) : P::a(pair, four)));
    in_register(v);
    return v;
  };
  const auto of_weight = [&](int k) __attribute__((always_inline)) {
    __m256i v = values_of<Block, SOURCE>(t, first + k, pair, four, second);
    in_register(v);
    return v;
  };
  // Two operands of one kind stay in registers while those of the other kind are loaded one by one.
  if constexpr (M <= 2) {
    __m256i v[M];
#pragma GCC unroll 2
    for (int j = 0; j < M; j++) v[j] = of_batch(j);
#pragma GCC unroll 6
    for (int k = 0; k < kParts; k++) {
      const __m256i w = of_weight(k);
#pragma GCC unroll 2
      for (int j = 0; j < M; j++) Products::add(sum[k][j], w, v[j]);
    }
  } else {
    const __m256i w[2] = {of_weight(0), of_weight(1)};
#pragma GCC unroll 6
    for (int j = 0; j < M; j++) {
      const __m256i v = of_batch(j);
#pragma GCC unroll 2
      for (int k = 0; k < kParts; k++) Products::add(sum[k][j], w[k], v);
    }
  }
}
// Adds the products of four values of both A and B with one batch row.
template <class Block, class Products, bool IN_ORDER, class Batch>
QTENSOR_INLINE void add_both_products(SlabPass<Block, IN_ORDER>& t, const Batch& x, int pair, int four,
                                      SlabSums<1>& sum_a, SlabSums<1>& sum_b) {
  using P = SlabPairs<Block>;
  const __m256i x_a = dword_to_all(x.q + P::a(pair, four)), x_b = dword_to_all(x.q + P::b(pair, four));
#pragma GCC unroll 6
  for (int part = 0; part < kSlabParts; part++) {
    const RawValues raw = P::raw(t.lines[part], pair, four);
    Products::add(sum_a[part][0], P::values_a(raw, pair, four), x_a);
    Products::add(sum_b[part][0], P::values_b(raw, pair, four), x_b);
  }
}

// Keeps a sum in memory, because no register is left for it.
template <class Vector>
QTENSOR_INLINE void in_memory(Vector& value) {
  __asm__("" : "+m"(value));
}

// acc[part][j] = fma(f, d of batch row j, acc[part][j]) of M batch rows, where acc is [j][part][8 rows] of a slab.
template <class Block, int M, Source SOURCE, bool IN_ORDER>
QTENSOR_INLINE void some_parts(SlabPass<Block, IN_ORDER>& t, int first, const SlabBatchBlock* x, float* acc) {
  using P = SlabPairs<Block>;
  using Products = UnsignedProducts;
  constexpr int kParts = parts_with(M), kSteps = kDwordSums ? P::fours : P::steps;
  const __m256i zero = _mm256_setzero_si256();
  SlabSums<M> total;
#pragma GCC unroll 6
  for (int k = 0; k < kParts; k++)
#pragma GCC unroll 6
    for (int j = 0; j < M; j++) total[k][j] = zero;
  const auto begin = [&](SlabSums<M>& sum, int scale) __attribute__((always_inline)) {
#pragma GCC unroll 6
    for (int j = 0; j < M; j++) {
      const __m256i start = P::has_start ? dword_to_all(x[j].start[scale]) : zero;
#pragma GCC unroll 6
      for (int k = 0; k < kParts; k++) sum[k][j] = start;
    }
  };
  each_pair<P, (M > 2 && (P::alike || SOURCE == Source::kept))>([&](int pair) __attribute__((always_inline)) {
    if (first == 0) ask(t, pair);
    if constexpr (M == 1 && SOURCE == Source::unpacked) {
#pragma GCC unroll 2
      for (int run = 0; run < P::fours; run += kSteps) {
        SlabSums<1> sum_a, sum_b;
        begin(sum_a, P::scale_a(pair));
        begin(sum_b, P::scale_b(pair));
#pragma GCC unroll 8
        for (int four = run; four < run + kSteps; four++)
          add_both_products<Block, Products>(t, *x, pair, four, sum_a, sum_b);
#pragma GCC unroll 6
        for (int k = 0; k < kParts; k++) {
          const SlabHeader& h = t.header[k];
          total[k][0] = add_scaled(total[k][0], sum_a[k][0], h.scale[P::scale_a(pair)]);
          total[k][0] = add_scaled(total[k][0], sum_b[k][0], h.scale[P::scale_b(pair)]);
          in_memory(total[k][0]);
        }
      }
    } else {
#pragma GCC unroll 2
      for (int second = 0; second < 2; second++)
#pragma GCC unroll 2
        for (int run = 0; run < P::fours; run += kSteps) {
          const int scale = second ? P::scale_b(pair) : P::scale_a(pair);
          SlabSums<M> sum;
          begin(sum, scale);
#pragma GCC unroll 8
          for (int four = run; four < run + kSteps; four++)
            add_products<Block, Products, M, SOURCE>(t, first, x, pair, four, second, sum);
#pragma GCC unroll 6
          for (int k = 0; k < kParts; k++)
#pragma GCC unroll 6
            for (int j = 0; j < M; j++) {
              total[k][j] = add_scaled(total[k][j], sum[k][j], t.header[first + k].scale[scale]);
              in_memory(total[k][j]);
            }
        }
    }
  });
#pragma GCC unroll 6
  for (int k = 0; k < kParts; k++)
#pragma GCC unroll 6
    for (int j = 0; j < M; j++) {
      const SlabHeader& h = t.header[first + k];
      __m256 f = _mm256_mul_ps(_mm256_cvtepi32_ps(total[k][j]), h.d);
      if constexpr (P::has_min) {
        __m256i mins = zero;
#pragma GCC unroll 6
        for (int two = 0; two < 4; two++)
          mins = add_word_products(mins, h.min[two], dword_to_all(x[j].sums32 + 2 * two));
        f = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(mins), h.dmin, f);
      }
      float* const to = acc + kSlabRows * j + kSlabLanes * (first + k);
      _mm256_store_ps(to, _mm256_fmadd_ps(f, _mm256_set1_ps(x[j].d), _mm256_load_ps(to)));
    }
}

// Neither inlined nor cloned, because it is called twice: gcc 12 would duplicate the code, which then exceeds the L1
// instruction cache.
template <class Block, int M, Source SOURCE, class Batch>
__attribute__((noinline, noclone)) void half_a_line(SlabPass<Block>& t, int first, const Batch* x, float* acc) {
  some_parts<Block, M, SOURCE>(t, first, x, acc);
}
template <class Block, int M, Source SOURCE, bool IN_ORDER, class Batch>
QTENSOR_INLINE void slab_batch_rows(SlabPass<Block, IN_ORDER>& t, const Batch* x, float* acc) {
  using P = SlabPairs<Block>;
  if constexpr (P::keeps_apart && (SOURCE == Source::unpacked_and_kept || (SOURCE == Source::unpacked && M > 2))) {
    keep_values(t);
    slab_batch_rows<Block, M, Source::kept>(t, x, acc);
  } else if constexpr (M <= 2) {
    some_parts<Block, M, SOURCE>(t, 0, x, acc);
  } else {
    half_a_line<Block, M, SOURCE>(t, 0, x, acc);
    half_a_line<Block, M, SOURCE>(t, 2, x, acc);
  }
}

}  // namespace
}  // namespace qtensor
