// Tiles of weights in blocks of 32: sixteen batch rows in the lanes of one zmm register, see
// kernels/portable/batch_lanes.h. A block's sum is scaled when it is complete. In formats without mins, weights are
// unsigned bytes with 128 added, so sums begin at -128 times the sums of their activations.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernel_table.h"
#include "kernels/avx512/four_blocks.h"
#include "kernels/avx512/transpose.h"
#include "kernels/portable/ahead_in_order.h"
#include "kernels/portable/always_inline.h"
#include "kernels/portable/batch_lanes.h"

namespace qtensor {
namespace {

struct alignas(64) RowBlocks32 {
  uint8_t q[kTileRows][2][2][4][16];  // [row][four blocks][half of a block][block]
  float d[8][kTileRows], m[8][kTileRows];
};
static_assert(sizeof(RowBlocks32) <= sizeof(RowBlocks) && kTileRows == 4);

template <class Block>
struct Rows32 {
  using Four = Four32<Block>;
  using Unpacked = RowBlocks32;
  static constexpr bool has_min = Four::has_min;
  static constexpr int64_t bytes = 8 * Four::bytes;
  static QTENSOR_INLINE void unpack(const uint8_t* const* place, RowBlocks32& to) {
    constexpr int missing = has_min ? 0 : 128 - Four::offset;
    for (int h = 0; h < 2; h++) {
      const uint8_t* four[4];
      for (int r = 0; r < kTileRows; r++) four[r] = place[r] + 4 * h * Four::bytes;
      __m512 d, m;
      Four::scales(four, d, m);
      _mm512_store_ps(to.d[4 * h], d);
      if (has_min) _mm512_store_ps(to.m[4 * h], m);
#pragma GCC unroll 4
      for (int r = 0; r < kTileRows; r++) {
        __m512i q[2];
        Four::values(four[r], q);
        for (int i = 0; i < 2; i++)
          _mm512_store_si512(to.q[r][h][i], missing ? _mm512_add_epi8(q[i], _mm512_set1_epi8(char(missing))) : q[i]);
      }
    }
  }
};

struct BatchLanes32 {
  struct alignas(64) Packed {
    int8_t q[64][16][4];  // [k / 4][batch row][k % 4]
    float d[8][16];
    float sums[8][16];     // of activations, times d: for mins
    int32_t start[8][16];  // value at which sums of formats without mins begin
  };

  template <class Rows>  // bytes that a product reads per tile and block
  static constexpr int64_t tile_bytes = sizeof(Packed) - 512;

  static void pack(const BlockQ8x32* x, int64_t blocks, int64_t, int64_t count, Packed& out) {
    for (int line = 0; line < 5; line++) {  // the last: d and sums
      __m512i r[16];
      for (int j = 0; j < 16; j++)
        r[j] = j < count ? _mm512_load_si512((const uint8_t*)(x + j * blocks) + 64 * line) : _mm512_setzero_si512();
      transpose16(r);
      for (int i = 0; i < 16; i++) {
        if (line < 4 || i < 8) {
          _mm512_store_si512((uint8_t*)&out + 1024 * line + 64 * i, r[i]);
          continue;
        }
        const __m512i start = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(r[i], 7));
        _mm512_store_si512(out.start[i - 8], start);
        _mm512_store_ps(out.sums[i - 8], _mm512_mul_ps(_mm512_cvtepi32_ps(r[i]), _mm512_castsi512_ps(r[i - 8])));
      }
    }
  }

  static constexpr int most_tiles = 3;
  template <class Rows, int GROUPS, int TILES>
  static QTENSOR_INLINE void block(const RowBlocks32* rows, const Packed* x, float* acc) {
    some<Rows, GROUPS, TILES>(rows, x, acc, nullptr);
  }
  template <class Rows>
  static QTENSOR_INLINE void small_m(const RowBlocks32* rows, const Packed* x, int64_t, float* acc,
                                     AheadInOrder& ahead) {
    some<Rows, 2, 1>(rows, x, acc, &ahead);
  }

  template <class Rows, int GROUPS, int TILES>
  static __attribute__((noinline)) void some(const RowBlocks32* rows, const Packed* x, float* acc,
                                             AheadInOrder* ahead) {
    constexpr int count = GROUPS * kTileRows;
    const auto block = [&](int r) -> const RowBlocks32& { return rows[r / kTileRows]; };
    __m512 f[count][TILES];
#pragma GCC unroll 16
    for (int r = 0; r < count; r++)
      for (int t = 0; t < TILES; t++) f[r][t] = _mm512_setzero_ps();
    for (int j = 0; j < 8; j++) {
      if (GROUPS == 2 && ahead != nullptr) ahead->ask(count * Rows::bytes / 8);
      __m512i sum[count][TILES];
#pragma GCC unroll 3
      for (int t = 0; t < TILES; t++) {
        const __m512i start = Rows::has_min ? _mm512_setzero_si512() : _mm512_load_si512(x[t].start[j]);
#pragma GCC unroll 16
        for (int r = 0; r < count; r++) sum[r][t] = start;
      }
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) {
        __m512i xv[TILES];
#pragma GCC unroll 3
        for (int t = 0; t < TILES; t++) xv[t] = _mm512_load_si512(x[t].q[8 * j + i]);
#pragma GCC unroll 16
        for (int r = 0; r < count; r++) {
          const __m512i w = _mm512_set1_epi32(dword_at(block(r).q[r % kTileRows][j / 4][i / 4][j % 4], i % 4));
#pragma GCC unroll 3
          for (int t = 0; t < TILES; t++) sum[r][t] = _mm512_dpbusd_epi32(sum[r][t], w, xv[t]);
        }
      }
#pragma GCC unroll 3
      for (int t = 0; t < TILES; t++) {
        const __m512 dx = _mm512_load_ps(x[t].d[j]), of_mins = _mm512_load_ps(x[t].sums[j]);
#pragma GCC unroll 16
        for (int r = 0; r < count; r++) {
          const __m512 scale = _mm512_mul_ps(dx, _mm512_set1_ps(block(r).d[j][r % kTileRows]));
          f[r][t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][t]), scale, f[r][t]);
          if (Rows::has_min) f[r][t] = _mm512_fmadd_ps(of_mins, _mm512_set1_ps(block(r).m[j][r % kTileRows]), f[r][t]);
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < count; r++)
#pragma GCC unroll 3
      for (int t = 0; t < TILES; t++) {
        float* const at = acc + t * kTileFloats + r * 16;
        _mm512_store_ps(at, _mm512_add_ps(_mm512_load_ps(at), f[r][t]));
      }
  }

  static void store_n_tile(const float* acc, float* y, int64_t y_stride, int64_t, int64_t count) {
    store_transposed([&](int i) { return acc + 16 * i; }, y, y_stride, count, false);
  }
};

Tiles tiles_32(Format format) {
  return with_format_32(
      format,
      []<class F>(F) -> Tiles {
        return {matmul_batch_lanes<BatchLanes32, Rows32<typename F::Block>>, &kPacked32<BatchLanes32>};
      },
      [] { return Tiles(); });
}

}  // namespace
}  // namespace qtensor
