// Four rows of IQ4_XS with one to four batch rows, with VNNI. Levels times scales do not fit in a byte. Therefore each
// 128-bit lane holds a sub-block of 32, with values 0..15 in one register and 16..31 in another, and one multiplication
// scales the sums of four sub-blocks of four rows.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "blocks.h"
#include "kernel_table.h"
#include "kernels/avx512/folded_blocks.h"
#include "kernels/avx512/four_block_rows.h"
#include "kernels/avx512/four_blocks.h"
#include "kernels/portable/always_inline.h"
#include "kernels/x86/rows.h"

namespace qtensor {
namespace {

struct LevelHeaders {
  __m512i scales[2];  // of sub-blocks 0..3 and 4..7: [sub-block][row]
  __m128 d;
};
constexpr int kLevelsOffset = 128;

QTENSOR_INLINE LevelHeaders level_headers(const uint8_t* const* place) {
  static_assert(offsetof(BlockIQ4_XS, scales_h) == 2 && offsetof(BlockIQ4_XS, scales_l) == 4);
  const auto load = [&](int r) { return _mm_loadl_epi64((const __m128i*)place[r]); };
  const __m128 rows01 = _mm_castsi128_ps(_mm_unpacklo_epi64(load(0), load(1))),
               rows23 = _mm_castsi128_ps(_mm_unpacklo_epi64(load(2), load(3)));
  const __m128i first = _mm_castps_si128(_mm_shuffle_ps(rows01, rows23, 0x88)),
                second = _mm_castps_si128(_mm_shuffle_ps(rows01, rows23, 0xdd));
  const __m512i high = _mm512_broadcast_i32x4(first), low = _mm512_broadcast_i32x4(second);
  const __m512i by_two = _mm512_setr_epi32(12, 12, 12, 12, 14, 14, 14, 14, 16, 16, 16, 16, 18, 18, 18, 18),
                by_four = _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
  LevelHeaders h;
  for (int n = 0; n < 2; n++) {
    const __m512i four = _mm512_srlv_epi32(low, _mm512_add_epi32(by_four, _mm512_set1_epi32(16 * n)));
    const __m512i two = _mm512_srlv_epi32(high, _mm512_add_epi32(by_two, _mm512_set1_epi32(8 * n)));
    const __m512i six = _mm512_and_si512(choose(four, _mm512_set1_epi32(15), two), _mm512_set1_epi32(63));
    h.scales[n] = _mm512_sub_epi32(six, _mm512_set1_epi32(32));
  }
  h.d = _mm_cvtph_ps(_mm_shuffle_epi8(first, _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 0, 0, 0, 0, 0, 0, 0, 0)));
  return h;
}

// Sub-blocks 4 n .. 4 n + 3 of a row, with kLevelsOffset added.
QTENSOR_INLINE void level_values(const uint8_t* block, int n, __m512i (&q)[2]) {
  const __m512i levels = levels_above(kLevelsIQ4, kLevelsOffset);
  split_nibbles(_mm512_loadu_si512(block + offsetof(BlockIQ4_XS, qs) + 64 * n), q);
  for (__m512i& half : q) half = _mm512_shuffle_epi8(levels, half);
}

template <int M>
inline void level_four_rows(const MatmulTask& t, FourRows rows, int64_t batch_row) {
  constexpr int64_t bytes = sizeof(BlockIQ4_XS);
  const int64_t blocks = t.blocks_per_row;
  const uint8_t* place[4];
  for (int r = 0; r < 4; r++) place[r] = t.weight + (rows.first + r * rows.stride) * t.row_bytes;
  Ahead<bytes> ahead(t, rows);
  __m128 acc[M];
  for (int j = 0; j < M; j++) acc[j] = _mm_setzero_ps();
  const BlockQ8K* x = t.blocks + batch_row * blocks;
  for (int64_t b = 0; b < blocks; b++, x++) {
    ahead.ask(place);
    const LevelHeaders h = level_headers(place);
    __m512i total[M];
#pragma GCC unroll 2
    for (int n = 0; n < 2; n++) {
      __m512i xv[M][2], start[M], sum[M][4];
      for (int j = 0; j < M; j++) {
        const BlockQ8K& xb = x[j * blocks];
        const __m512i first = _mm512_load_si512(xb.q + 128 * n), second = _mm512_load_si512(xb.q + 128 * n + 64);
        xv[j][0] = _mm512_shuffle_i32x4(first, second, 0x88);
        xv[j][1] = _mm512_shuffle_i32x4(first, second, 0xdd);
        // the value at which a lane's first dword begins: -kLevelsOffset times the sum of its activations
        const __m128i sums = _mm_cvtepi16_epi32(_mm_loadl_epi64((const __m128i*)(xb.sums32 + 4 * n)));
        const __m128i offset = _mm_sub_epi32(_mm_setzero_si128(), _mm_slli_epi32(sums, 7));
        start[j] = _mm512_maskz_permutexvar_epi32(
            0x1111, _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), _mm512_castsi128_si512(offset));
      }
#pragma GCC unroll 4
      for (int r = 0; r < 4; r++) {
        __m512i q[2];
        level_values(place[r], n, q);
        for (int j = 0; j < M; j++)
          sum[j][r] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(start[j], q[0], xv[j][0]), q[1], xv[j][1]);
      }
#pragma GCC unroll 4
      for (int j = 0; j < M; j++) {
        const __m512i scaled = _mm512_mullo_epi32(lane_sums(sum[j]), h.scales[n]);
        total[j] = n == 0 ? scaled : _mm512_add_epi32(total[j], scaled);
      }
    }
    for (const uint8_t*& at : place) at += bytes;
#pragma GCC unroll 4
    for (int j = 0; j < M; j++) {
      const __m256i two = _mm256_add_epi32(_mm512_castsi512_si256(total[j]), _mm512_extracti64x4_epi64(total[j], 1));
      const __m128i sums = _mm_add_epi32(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1));
      acc[j] = _mm_fmadd_ps(_mm_mul_ps(_mm_cvtepi32_ps(sums), h.d), _mm_set1_ps(x[j * blocks].d), acc[j]);
    }
  }
  for (int j = 0; j < M; j++) store_four_rows(t.y + (batch_row + j) * t.y_stride, rows, acc[j]);
}

}  // namespace
}  // namespace qtensor
