// Sixteen batch rows in the lanes of one zmm register: see kernels/portable/batch_lanes.h. Packs them for the formats
// of unscaled_lanes.h; K-quants have rows of the weight in the lanes instead (row_lanes.h).
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernel_table.h"
#include "kernels/avx512/row_blocks.h"
#include "kernels/avx512/transpose.h"
#include "kernels/portable/batch_lanes.h"

namespace qtensor {
namespace {

struct Vector512 {
  using Int = __m512i;
  using Float = __m512;
  static Int zero() { return _mm512_setzero_si512(); }
  static Int all(int32_t x) { return _mm512_set1_epi32(x); }
  static Float all_floats(float x) { return _mm512_set1_ps(x); }
  static Int load(const void* p) { return _mm512_load_si512(p); }
  static Float load_floats(const float* p) { return _mm512_load_ps(p); }
  static void store_floats(float* p, Float a) { _mm512_store_ps(p, a); }
  static Int words(Int sum, Int a, Int b) { return _mm512_dpwssd_epi32(sum, a, b); }
  static Int left(Int a, int bits) { return _mm512_slli_epi32(a, unsigned(bits)); }
  static Float floats(Int a) { return _mm512_cvtepi32_ps(a); }
  static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static Float fma(Float a, Float b, Float j) { return _mm512_fmadd_ps(a, b, j); }
  static Float fnma(Float a, Float b, Float j) { return _mm512_fnmadd_ps(a, b, j); }
};
struct BatchLanes512 {
  using Packed = PackedBatch;

  // If there are up to sixteen batch rows, they are stored in pairs of fours (see `pair`); up to eight, in the first
  // half.
  static int batch_row_at(int lane, int64_t m) { return m > 8 ? lane : lane % 4 < 2 ? lane / 4 * 2 + lane % 4 : 16; }

  static void pack(const BlockQ8K* x, int64_t blocks, int64_t m, int64_t count, Packed& out) {
    static_assert(offsetof(BlockQ8K, sums32) == 288 && offsetof(BlockQ8K, d) == 304);
    for (int line = 0; line < 5; line++) {  // the last: sums16, sums32 and d, as dwords in the order of PackedBatch
      __m512i r[16];
      for (int lane = 0; lane < 16; lane++) {
        const int j = batch_row_at(lane, m);
        r[lane] = j < count ? _mm512_load_si512((const uint8_t*)(x + j * blocks) + 64 * line) : _mm512_setzero_si512();
      }
      transpose16(r);
      for (int i = 0; i < (line < 4 ? 16 : 13); i++) _mm512_store_si512((uint8_t*)&out + 1024 * line + 64 * i, r[i]);
    }
    if (m <= 16) pair(out);
  }

  // Changes the layout to [k / 8][half of the batch rows][8 batch rows][8 bytes]. The first half is batch rows 0, 1, 4,
  // 5, 8, 9, 12 and 13.
  static void pair(Packed& x) {
    for (int i = 0; i < 32; i++) {
      const __m512i a = _mm512_load_si512(x.q[2 * i]), b = _mm512_load_si512(x.q[2 * i + 1]);
      _mm512_store_si512(x.q[2 * i], _mm512_unpacklo_epi32(a, b));
      _mm512_store_si512(x.q[2 * i + 1], _mm512_unpackhi_epi32(a, b));
    }
  }

  static constexpr int most_tiles = 3;

  static void store_n_tile(const float* acc, float* y, int64_t y_stride, int64_t m, int64_t count) {
    __m512i r[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_load_si512(acc + 16 * i);
    transpose16(r);
#pragma GCC unroll 16
    for (int lane = 0; lane < 16; lane++) {
      const int j = batch_row_at(lane, m);
      if (j < count) _mm512_storeu_si512(y + j * y_stride, r[lane]);
    }
  }
};

}  // namespace
}  // namespace qtensor
