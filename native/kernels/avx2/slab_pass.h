// Products of packed Q4_K (packed_weights.h): eight rows of the weight are the lanes; sixteen, or 32 for one batch row,
// share each broadcast of four activations. vpmaddubsw makes words of two products, and all of a group is added up as
// words: 15 * 127 * 16 = 30,480 is the largest magnitude.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "integer_kernels.h"
#include "kernel_table.h"
#include "kernels/portable/always_inline.h"
#include "kernels/x86/slab_source.h"

namespace qtensor {
namespace {

using SlabBatchBlock = BlockQ8K;

void pack_slab_batch_row(const BlockQ8K* x, int64_t blocks, int64_t m, uint8_t* packed) {
  for (int64_t b = 0; b < blocks; b++) reinterpret_cast<SlabBatchBlock*>(packed)[b * m] = x[b];
}

QTENSOR_INLINE __m256i dword_to_all(const void* from) {
  int value;
  __builtin_memcpy(&value, from, 4);
  return _mm256_set1_epi32(value);
}
QTENSOR_INLINE __m256i bits(__m256i v, int mask) { return _mm256_and_si256(v, _mm256_set1_epi8(char(mask))); }
QTENSOR_INLINE __m256i line(Lines w, int u, int quarter) {  // eight of sixteen rows
  return _mm256_loadu_si256((const __m256i*)(w.at + kLineBytes * u + 32 * quarter));
}
QTENSOR_INLINE __m256 halves_of(__m256i dwords) {  // of their lower words
  const __m256i words =
      _mm256_packus_epi32(_mm256_and_si256(dwords, _mm256_set1_epi32(0xffff)), _mm256_setzero_si256());
  return _mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permute4x64_epi64(words, 0xd8)));
}

struct SlabHeader {  // [pair][quarter]: two words for each row
  __m256i scale[4][2], min[4][2];
  __m256 d[2], dmin[2];
};
template <class Block>
struct SlabPairs;
template <>
struct SlabPairs<BlockQ4_K> : PairsWithMins {
  static void header(Lines w, SlabHeader& h) {
    const auto split = [](__m256i bytes, __m256i(*to)[2], int q) {
      to[0][q] = _mm256_shuffle_epi8(
          bytes, _mm256_broadcastsi128_si256(_mm_setr_epi8(0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1)));
      to[1][q] = _mm256_shuffle_epi8(bytes, _mm256_broadcastsi128_si256(_mm_setr_epi8(2, -1, 3, -1, 6, -1, 7, -1, 10,
                                                                                      -1, 11, -1, 14, -1, 15, -1)));
    };
    for (int q = 0; q < 2; q++) {
      const __m256i d = line(w, 0, q), scales = line(w, 1, q), mins = line(w, 2, q), rest = line(w, 3, q);
      split(bits(scales, 63), h.scale, q);
      split(_mm256_or_si256(bits(rest, 15), bits(_mm256_srli_epi16(scales, 2), 48)), h.scale + 2, q);
      split(bits(mins, 63), h.min, q);
      split(_mm256_or_si256(bits(_mm256_srli_epi16(rest, 4), 15), bits(_mm256_srli_epi16(mins, 2), 48)), h.min + 2, q);
      h.d[q] = halves_of(d);
      h.dmin[q] = halves_of(_mm256_srli_epi32(d, 16));
    }
  }
  QTENSOR_INLINE static __m256i values(Lines w, int quarter, int pair, int four, bool b) {
    const __m256i v = line(w, Packing<BlockQ4_K>::values(pair, four), quarter);
    return bits(b ? _mm256_srli_epi16(v, 4) : v, 15);
  }
};

// Sixteen registers hold two batch rows' sums of A and B and totals in two quarters.
constexpr int kMostAtOnce = 2;
// From here on products take so long that the processor's own prefetching is enough.
constexpr int kMostAsking = 8;

struct SlabPass {
  Lines lines[2];
  SlabHeader header[2];
  KeptValues kept[2];
  const uint8_t* later;  // memory to ask for, so many lines of 64 bytes with each pair
  int64_t asked;
  int64_t m;
};

// acc[half][j] = fma(f, d of batch row j, acc[half][j]) of M batch rows and Q quarters of a group's rows, where acc is
// [half][m][two quarters].
template <class Block, Source SOURCE, int M, int Q>
__attribute__((noinline)) void quarters_pass(SlabPass& t, int first, const SlabBatchBlock* x, float* acc) {
  using P = SlabPairs<Block>;
  __m256i total[M][Q];
#pragma GCC unroll 2
  for (int j = 0; j < M; j++)
#pragma GCC unroll 4
    for (int q = 0; q < Q; q++) total[j][q] = _mm256_setzero_si256();
#pragma GCC unroll 8
  for (int pair = 0; pair < P::pairs; pair++) {
#pragma GCC unroll 1
    for (int64_t i = first / 2; i < t.asked; i += 4 / Q) __builtin_prefetch(t.later + 64 * (t.asked * pair + i), 0, 2);
    __m256i sum[2][M][Q];  // [A, B][batch row][quarter]
#pragma GCC unroll 8
    for (int four = 0; four < P::fours; four++)
#pragma GCC unroll 2
      for (int b = 0; b < 2; b++) {
        const int at = b ? P::b(pair, four) : P::a(pair, four);
        __m256i v[M], w;
#pragma GCC unroll 2
        for (int j = 0; j < M; j++) {
          v[j] = dword_to_all(x[j].q + at);
          in_register(v[j]);
        }
#pragma GCC unroll 4
        for (int q = 0; q < Q; q++) {
          const int half = (first + q) / 2, of_half = q % 2;
          auto* const place = (__m256i*)(t.kept[half].q[2 * (pair * P::fours + four) + b] + 32 * of_half);
          w = SOURCE == Source::kept ? _mm256_load_si256(place) : P::values(t.lines[half], of_half, pair, four, b);
          if (SOURCE == Source::unpacked_and_kept) _mm256_store_si256(place, w);
          in_register(w);
#pragma GCC unroll 2
          for (int j = 0; j < M; j++) {
            __m256i& s = sum[b][j][q];
            const __m256i products = _mm256_maddubs_epi16(w, v[j]);
            s = four > 0 ? _mm256_add_epi16(s, products) : products;
            in_register(s);
          }
        }
      }
#pragma GCC unroll 4
    for (int q = 0; q < Q; q++) {
      const __m256i scale = t.header[(first + q) / 2].scale[pair][q % 2];  // of A and B, to both words
      const __m256i scale_a = _mm256_blend_epi16(scale, _mm256_slli_epi32(scale, 16), 0xaa);
      const __m256i scale_b = _mm256_blend_epi16(_mm256_srli_epi32(scale, 16), scale, 0xaa);
#pragma GCC unroll 2
      for (int j = 0; j < M; j++) {
        const __m256i a = _mm256_madd_epi16(sum[0][j][q], scale_a), b = _mm256_madd_epi16(sum[1][j][q], scale_b);
        total[j][q] = _mm256_add_epi32(total[j][q], _mm256_add_epi32(a, b));
        in_register(total[j][q]);
      }
    }
  }
#pragma GCC unroll 4
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 2
    for (int j = 0; j < M; j++) {
      const int half = (first + q) / 2;
      const SlabHeader& h = t.header[half];
      __m256 f = _mm256_mul_ps(_mm256_cvtepi32_ps(total[j][q]), h.d[q % 2]);
      __m256i mins = _mm256_setzero_si256();
#pragma GCC unroll 4
      for (int pair = 0; pair < 4; pair++)
        mins = _mm256_add_epi32(mins, _mm256_madd_epi16(h.min[pair][q % 2], dword_to_all(x[j].sums32 + 2 * pair)));
      f = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(mins), h.dmin[q % 2], f);
      float* const to = acc + 16 * (t.m * half + j) + 8 * (q % 2);
      _mm256_store_ps(to, _mm256_fmadd_ps(f, _mm256_set1_ps(x[j].d), _mm256_load_ps(to)));
    }
}
template <class Block, Source SOURCE, int M>
QTENSOR_INLINE void slab_pass(SlabPass& t, const SlabBatchBlock* x, float* acc) {
  if constexpr (M == 1) return quarters_pass<Block, SOURCE, 1, 4>(t, 0, x, acc);
  quarters_pass<Block, SOURCE, M, 2>(t, 0, x, acc);
  quarters_pass<Block, SOURCE, M, 2>(t, 2, x, acc);
}

}  // namespace
}  // namespace qtensor
