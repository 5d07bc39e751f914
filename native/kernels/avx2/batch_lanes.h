// Eight batch rows in the lanes of one ymm register: see kernels/portable/batch_lanes.h. Sums of two adjacent products
// are accumulated in 16 bits for as many steps as always fit, then multiplied by their scale in vpmaddwd. AVX-VNNI
// accumulates in 32 bits.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "integer_kernels.h"
#include "kernel_table.h"
#include "kernels/portable/always_inline.h"
#include "kernels/portable/batch_lanes.h"
#include "products.h"
#include "row_blocks.h"

namespace qtensor {
namespace {

struct BatchLanes256 {
  using Packed = PackedBatch;
  static void pack(const BlockQ8K* x, int64_t blocks, int64_t, int64_t count, Packed& out) {
    if (count < 16) __builtin_memset(&out, 0, sizeof out);
    for (int64_t j = 0; j < count; j++) {
      const BlockQ8K& from = x[j * blocks];
      for (int k = 0; k < 64; k++) __builtin_memcpy(out.q[k][j], from.q + 4 * k, 4);
      for (int i = 0; i < 8; i++) __builtin_memcpy(out.sums16[i][j], from.sums16 + 2 * i, 4);
      for (int i = 0; i < 4; i++) __builtin_memcpy(out.sums32[i][j], from.sums32 + 2 * i, 4);
      out.d[j] = from.d;
    }
  }
  static constexpr int most_tiles = 2;
  template <class Rows>
  static constexpr int64_t tile_bytes = sizeof(PackedBatch);

  // Four rows share the loaded activations if there are few scales. With many, only two rows' totals fit in registers.
  template <class Rows, int GROUPS, int TILES>
  static void block(const RowBlocks* rows, const PackedBatch* x, float* acc) {
    constexpr int together = Rows::group == 32 ? 4 : 2;
    for (int g = 0; g < GROUPS; g++)
      for (int t = 0; t < TILES; t++)
        for (int r = 0; r < kTileRows; r += together)
          some_rows<Rows, together, 2>(rows[g], r, x[t], acc + t * kTileFloats + (g * kTileRows + r) * 16);
  }

  template <class Rows>
  static void small_m(const RowBlocks* rows, const PackedBatch* x, int64_t m, float* acc, AheadInOrder& ahead) {
    ahead.ask(2 * kTileRows * Rows::bytes);
    if (m > 8) return block<Rows, 2, 1>(rows, x, acc);
    for (int g = 0; g < 2; g++) some_rows<Rows, kTileRows, 1>(rows[g], 0, *x, acc + g * kTileRows * 16);
  }

  // ROWS rows with the first eight batch rows of a tile (HALVES = 1), or with all sixteen.
  template <class Rows, int ROWS, int HALVES>
  static QTENSOR_INLINE void some_rows(const RowBlocks& rows, int row, const PackedBatch& x, float* acc) {
    constexpr int fit = 32767 / (2 * Rows::largest * 127);  // how many vpmaddubsw results fit in 16 bits
    constexpr int steps = kDwordSums ? Rows::group / 4 : fit >= 8 && Rows::group == 32 ? 8 : fit >= 4 ? 4 : 2;
    static_assert(fit >= 2 && Rows::group / 4 % steps == 0);
    __m256i total[ROWS][HALVES];
    for (auto& halves : total)
      for (auto& sum : halves) sum = _mm256_setzero_si256();
    for (int g = 0; g < 256 / Rows::group; g++) {
      __m256i scale[ROWS];
      for (int r = 0; r < ROWS; r++) scale[r] = _mm256_set1_epi32(rows.scale[row + r][g]);
#pragma GCC unroll 2
      for (int part = 0; part < Rows::group / 4; part += steps) {
        const int k = g * Rows::group / 4 + part;
        __m256i sum[ROWS][HALVES];
#pragma GCC unroll 8
        for (int i = 0; i < steps; i++) {
          __m256i xv[HALVES];
          for (int h = 0; h < HALVES; h++) {
            xv[h] = _mm256_load_si256((const __m256i*)x.q[k + i] + h);
            in_register(xv[h]);
          }
#pragma GCC unroll 4
          for (int r = 0; r < ROWS; r++) {
            const __m256i w = _mm256_set1_epi32(dword_at(rows.q[row + r], k + i));
#pragma GCC unroll 2
            for (int h = 0; h < HALVES; h++) {
              sum[r][h] = add_to_sums(i == 0 ? _mm256_setzero_si256() : sum[r][h], w, xv[h]);
              in_register(sum[r][h]);
            }
          }
        }
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++)
          for (int h = 0; h < HALVES; h++) total[r][h] = add_scaled(total[r][h], sum[r][h], scale[r]);
      }
    }
    for (int r = 0; r < ROWS; r++)
      for (int h = 0; h < HALVES; h++) finish<Rows>(rows, row + r, x, h, total[r][h], acc + r * 16 + 8 * h);
  }

  template <class Rows>
  static QTENSOR_INLINE void finish(const RowBlocks& rows, int row, const PackedBatch& x, int h, __m256i total,
                                    float* acc) {
    __m256i side = _mm256_setzero_si256();
    for (int i = 0; i < (Rows::group == 32 ? 4 : 8); i++) {
      const int16_t* pairs = Rows::group == 32 ? rows.min_pairs[row] : rows.scale_pairs[row];
      const auto* sums = Rows::group == 32 ? (const __m256i*)x.sums32[i] : (const __m256i*)x.sums16[i];
      side = add_word_products(side, _mm256_load_si256(sums + h), _mm256_set1_epi32(dword_at(pairs, i)));
    }
    const __m256 d = _mm256_set1_ps(rows.d[row]);
    __m256 f;
    if (Rows::has_min) {
      f = _mm256_mul_ps(_mm256_cvtepi32_ps(total), d);
      f = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(side), _mm256_set1_ps(rows.dmin[row]), f);
    } else {
      f = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(total, _mm256_slli_epi32(side, Rows::offset_bits))), d);
    }
    _mm256_store_ps(acc, _mm256_fmadd_ps(f, _mm256_load_ps(x.d + 8 * h), _mm256_load_ps(acc)));
  }

  static void store_n_tile(const float* acc, float* y, int64_t y_stride, int64_t, int64_t count) {
    for (int64_t j = 0; j < count; j++)
      for (int r = 0; r < 16; r++) y[j * y_stride + r] = acc[r * 16 + j];
  }
};

}  // namespace
}  // namespace qtensor
