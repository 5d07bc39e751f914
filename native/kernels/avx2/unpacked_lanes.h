// Tiles of the formats in unpacked_rows.h: Q2_K and Q3_K by batch_lanes.h; levels as signed blocks of 32, scaled in 32
// bits.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernel_table.h"
#include "kernels/avx2/batch_lanes.h"
#include "kernels/avx2/batch_lanes_32.h"
#include "kernels/avx2/products.h"
#include "kernels/avx2/row_blocks.h"
#include "kernels/avx2/unpacked_formats.h"
#include "kernels/portable/ahead_in_order.h"
#include "kernels/portable/always_inline.h"
#include "kernels/portable/batch_lanes.h"
#include "kernels/x86/rows.h"

namespace qtensor {
namespace {

struct alignas(64) LevelBlocks {
  uint8_t q[kTileRows][256];     // see unsigned_of
  int8_t signs[kTileRows][256];  // numbers of that sign
  int32_t scale[kTileRows][8];
  float d[kTileRows];
};
static_assert(sizeof(LevelBlocks) <= sizeof(RowBlocks32));

struct LevelRows {
  using Unpacked = LevelBlocks;
  using Format = Quant256<BlockIQ4_XS>;
  static constexpr int64_t bytes = Format::bytes;
  static constexpr int largest = 0;  // of signed values: see SubBlock
  static constexpr bool is_signed = true, has_signs = !kDwordSums;
  static QTENSOR_INLINE void unpack(const uint8_t* const* place, LevelBlocks& to) {
    _mm_store_ps(to.d, load_halves(place));
    for (int r = 0; r < kTileRows; r++) {
      _mm256_store_si256((__m256i*)to.scale[r], Format::scale_dwords(place[r]));
      store<0>(place[r], to, r);
      store<1>(place[r], to, r);
      store<2>(place[r], to, r);
      store<3>(place[r], to, r);
    }
  }

 private:
  template <int C>
  static QTENSOR_INLINE void store(const uint8_t* block, LevelBlocks& to, int row) {
    __m256i q[2];
    Format::pair<C>(block, q[0], q[1]);
    for (int i = 0; i < 2; i++) {
      _mm256_store_si256((__m256i*)(to.q[row] + 64 * C + 32 * i), unsigned_of(q[i]));
      if (has_signs) _mm256_store_si256((__m256i*)(to.signs[row] + 64 * C + 32 * i), q[i]);
    }
  }
};

struct LevelLanes256 : BatchLanes256 {
  template <class Rows, int GROUPS, int TILES>
  static void block(const LevelBlocks* rows, const PackedBatch* x, float* acc) {
    for (int g = 0; g < GROUPS; g++)
      for (int t = 0; t < TILES; t++) four_rows<2>(rows[g], x[t], acc + t * kTileFloats + g * kTileRows * 16);
  }
  template <class Rows>
  static QTENSOR_INLINE void small_m(const LevelBlocks* rows, const PackedBatch* x, int64_t m, float* acc,
                                     AheadInOrder& ahead) {
    ahead.ask(2 * kTileRows * Rows::bytes);
    if (m > 8) return block<Rows, 2, 1>(rows, x, acc);
    for (int g = 0; g < 2; g++) four_rows<1>(rows[g], *x, acc + g * kTileRows * 16);
  }
  template <int HALVES>
  static __attribute__((noinline)) void four_rows(const LevelBlocks& rows, const PackedBatch& x, float* acc) {
    __m256i total[kTileRows][HALVES];
    for (auto& halves : total)
      for (__m256i& sum : halves) sum = _mm256_setzero_si256();
    for (int j = 0; j < 8; j++) {
      __m256i sum[kTileRows][HALVES];
      BatchLanes32::block_sums<LevelRows, HALVES>(rows, x, j, sum);
      const __m256i middle = _mm256_set1_epi32(kAboveSigned << (j % 2 * 16));
      for (int h = 0; h < HALVES; h++) {
        const __m256i offset = _mm256_madd_epi16(_mm256_load_si256((const __m256i*)x.sums32[j / 2] + h), middle);
#pragma GCC unroll 4
        for (int r = 0; r < kTileRows; r++) {
          if (kAboveSigned > 0) sum[r][h] = _mm256_sub_epi32(sum[r][h], offset);
          const __m256i scaled = _mm256_mullo_epi32(sum[r][h], _mm256_set1_epi32(rows.scale[r][j]));
          total[r][h] = _mm256_add_epi32(total[r][h], scaled);
        }
      }
    }
    for (int r = 0; r < kTileRows; r++)
      for (int h = 0; h < HALVES; h++) {
        float* const at = acc + r * 16 + 8 * h;
        const __m256 f = _mm256_mul_ps(_mm256_cvtepi32_ps(total[r][h]), _mm256_set1_ps(rows.d[r]));
        _mm256_store_ps(at, _mm256_fmadd_ps(f, _mm256_load_ps(x.d + 8 * h), _mm256_load_ps(at)));
      }
  }
};

template <class Block>
using GroupRows = RowsOfGroups<Quant256<Block>, Quant256<Block>::largest>;

}  // namespace
}  // namespace qtensor
