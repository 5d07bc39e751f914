// Tiles of weights in blocks of 32: eight batch rows in the lanes of one ymm register, see
// kernels/portable/batch_lanes.h. A block's sum is scaled as soon as it is complete. Unsigned weights are summed in 16
// bits for as many steps as surely fit; signed ones give their sign to the activations. AVX-VNNI sums both in 32 bits.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernel_table.h"
#include "kernels/avx2/integer_kernels.h"
#include "kernels/avx2/row_blocks.h"
#include "kernels/portable/ahead_in_order.h"
#include "kernels/portable/always_inline.h"
#include "kernels/portable/batch_lanes.h"
#include "kernels/x86/sub_blocks.h"

namespace qtensor {
namespace {

struct alignas(64) RowBlocks32 {
  uint8_t q[kTileRows][256];     // of signed values see unsigned_of
  int8_t signs[kTileRows][256];  // numbers of that sign
  float d[8][kTileRows], m[8][kTileRows];
};
static_assert(sizeof(RowBlocks32) >= sizeof(RowBlocks) && kTileRows == 4);

template <class Block>
struct Rows32 : SubBlock<Block> {
  using Unpacked = RowBlocks32;
  using Sub = SubBlock<Block>;
  static constexpr int64_t bytes = 8 * Sub::bytes;
  static constexpr bool is_signed = Sub::largest == 0, has_signs = is_signed && !kDwordSums;
  static constexpr int offset = is_signed ? kAboveSigned : Sub::offset;
  static QTENSOR_INLINE void unpack(const uint8_t* const* place, RowBlocks32& to) {
    for (int j = 0; j < 8; j++) {
      const uint8_t* block[kTileRows];
      for (int r = 0; r < kTileRows; r++) block[r] = place[r] + j * Sub::bytes;
      _mm_store_ps(to.d[j], Sub::scales(block));
      if (Sub::has_min) _mm_store_ps(to.m[j], load_halves(block, Sub::min_at));
      for (int r = 0; r < kTileRows; r++) {
        const __m256i q = Sub::values(block[r]);
        _mm256_store_si256((__m256i*)(to.q[r] + 32 * j), is_signed ? unsigned_of(q) : q);
        if (has_signs) _mm256_store_si256((__m256i*)(to.signs[r] + 32 * j), q);
      }
    }
  }
};

struct BatchLanes32 {
  struct alignas(64) Packed {
    int8_t q[64][16][4];  // [k / 4][batch row][k % 4]
    float d[8][16];
    int32_t sums[8][16];
  };
  static constexpr int most_tiles = 2;
  template <class Rows>
  static constexpr int64_t tile_bytes = sizeof(Packed);

  static void pack(const BlockQ8x32* x, int64_t blocks, int64_t, int64_t count, Packed& out) {
    if (count < 16) __builtin_memset(&out, 0, sizeof out);
    for (int64_t j = 0; j < count; j++) {
      const BlockQ8x32& from = x[j * blocks];
      for (int k = 0; k < 64; k++) __builtin_memcpy(out.q[k][j], from.q + 4 * k, 4);
      for (int i = 0; i < 8; i++) {
        out.d[i][j] = from.d[i];
        out.sums[i][j] = from.sums[i];
      }
    }
  }

  template <class Rows, int GROUPS, int TILES>
  static void block(const RowBlocks32* rows, const Packed* x, float* acc) {
    for (int g = 0; g < GROUPS; g++)
      for (int t = 0; t < TILES; t++) four_rows<Rows, 2>(rows[g], x[t], acc + t * kTileFloats + g * kTileRows * 16);
  }
  template <class Rows>
  static QTENSOR_INLINE void small_m(const RowBlocks32* rows, const Packed* x, int64_t m, float* acc,
                                     AheadInOrder& ahead) {
    ahead.ask(2 * kTileRows * Rows::bytes);
    if (m > 8) return block<Rows, 2, 1>(rows, x, acc);
    for (int g = 0; g < 2; g++) four_rows<Rows, 1>(rows[g], *x, acc + g * kTileRows * 16);
  }

  // Four rows and the first eight batch rows of a tile, or all sixteen.
  template <class Rows, int HALVES>
  static __attribute__((noinline)) void four_rows(const RowBlocks32& rows, const Packed& x, float* acc) {
    __m256 f[kTileRows][HALVES];
    for (auto& halves : f)
      for (__m256& sum : halves) sum = _mm256_setzero_ps();
    for (int j = 0; j < 8; j++) {
      __m256i sum[kTileRows][HALVES];
      block_sums<Rows, HALVES>(rows, x, j, sum);
      for (int h = 0; h < HALVES; h++) {
        const __m256i of_x = _mm256_load_si256((const __m256i*)x.sums[j] + h);
        const __m256i offset = _mm256_mullo_epi32(of_x, _mm256_set1_epi32(Rows::offset));
        const __m256 dx = _mm256_load_ps(x.d[j] + 8 * h), of_mins = _mm256_mul_ps(_mm256_cvtepi32_ps(of_x), dx);
#pragma GCC unroll 4
        for (int r = 0; r < kTileRows; r++) {
          if (Rows::offset > 0) sum[r][h] = _mm256_sub_epi32(sum[r][h], offset);
          const __m256 scale = _mm256_mul_ps(dx, _mm256_set1_ps(rows.d[j][r]));
          f[r][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r][h]), scale, f[r][h]);
          if (Rows::has_min) f[r][h] = _mm256_fmadd_ps(of_mins, _mm256_set1_ps(rows.m[j][r]), f[r][h]);
        }
      }
    }
    for (int r = 0; r < kTileRows; r++)
      for (int h = 0; h < HALVES; h++) {
        float* const at = acc + r * 16 + 8 * h;
        _mm256_store_ps(at, _mm256_add_ps(_mm256_load_ps(at), f[r][h]));
      }
  }

  template <class Rows, int HALVES, class BLOCKS, class PACKED>
  static QTENSOR_INLINE void block_sums(const BLOCKS& rows, const PACKED& x, int j, __m256i (&sum)[kTileRows][HALVES]) {
    constexpr int fit = Rows::is_signed ? 1 : 32767 / (2 * Rows::largest * 127);  // results that 16 bits hold
    constexpr int steps = fit >= 8 || kDwordSums ? 8 : fit >= 4 ? 4 : 1;
#pragma GCC unroll 8
    for (int part = 0; part < 8; part += steps) {
      __m256i some[kTileRows][HALVES];
#pragma GCC unroll 8
      for (int i = 0; i < steps; i++) {
        const int k = part + i;
        __m256i xv[HALVES];
        for (int h = 0; h < HALVES; h++) {
          xv[h] = _mm256_load_si256((const __m256i*)x.q[8 * j + k] + h);
          in_register(xv[h]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < kTileRows; r++) {
          const __m256i w = _mm256_set1_epi32(dword_at(rows.q[r] + 32 * j, k));
          const __m256i sign = _mm256_set1_epi32(Rows::has_signs ? dword_at(rows.signs[r] + 32 * j, k) : 0);
#pragma GCC unroll 2
          for (int h = 0; h < HALVES; h++) {
            const __m256i factors = Rows::has_signs ? _mm256_sign_epi8(xv[h], sign) : xv[h];
            some[r][h] = add_to_sums(i == 0 ? _mm256_setzero_si256() : some[r][h], w, factors);
            in_register(some[r][h]);
          }
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < kTileRows; r++)
        for (int h = 0; h < HALVES; h++) {
          const __m256i more = as_dwords(some[r][h]);
          sum[r][h] = part == 0 ? more : _mm256_add_epi32(sum[r][h], more);
        }
    }
  }

  static void store_n_tile(const float* acc, float* y, int64_t y_stride, int64_t, int64_t count) {
    for (int64_t j = 0; j < count; j++)
      for (int r = 0; r < 16; r++) y[j * y_stride + r] = acc[r * 16 + j];
  }
};

int64_t tile_scratch_bytes(int64_t m) { return lanes_scratch_bytes<RowBlocks32>(m); }
Tiles tiles_32(Format format) {
  return with_format_32(
      format,
      []<class F>(F) -> Tiles {
        return {matmul_batch_lanes<BatchLanes32, Rows32<typename F::Block>>, &kPacked32<BatchLanes32>};
      },
      [] { return Tiles(); });
}
MatmulKernel kernel_32(Format format) {
  return with_format_32(
      format, []<class F>(F) -> MatmulKernel { return matmul_sub_blocks<typename F::Block>; },
      [] { return MatmulKernel(nullptr); });
}

}  // namespace
}  // namespace qtensor
