// Products of four weight rows with eight batch rows, for large M. With sdot, a register holds four values of each of
// four batch rows, and a dword of the weight is selected by element for all of them. With smmla (i8mm), a register
// holds eight values of each of two batch rows, and another those of two weight rows: twice as many products per
// instruction. Neither needs a reduction, because every sum has a lane of its own.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "kernels/portable/always_inline.h"

namespace qtensor {
namespace {

constexpr int kTileRows = 4, kTileBatch = 8;

#if defined(__ARM_FEATURE_MATMUL_INT8)

// Weights: [k / 8][row][k % 8]. Batch rows: [k / 8][batch row][k % 8].
constexpr int kAdjacent = 8;

// Stores sixteen values of each weight row in this layout.
QTENSOR_INLINE void store_sixteen(const int8x16_t (&q)[kTileRows], int8_t* to) {
  int64x2_t row[kTileRows];
  for (int r = 0; r < kTileRows; r++) row[r] = vreinterpretq_s64_s8(q[r]);
  vst1q_s8(to, vreinterpretq_s8_s64(vzip1q_s64(row[0], row[1])));
  vst1q_s8(to + 16, vreinterpretq_s8_s64(vzip1q_s64(row[2], row[3])));
  vst1q_s8(to + 32, vreinterpretq_s8_s64(vzip2q_s64(row[0], row[1])));
  vst1q_s8(to + 48, vreinterpretq_s8_s64(vzip2q_s64(row[2], row[3])));
}

struct TileSums {
  int32x4_t part[2][4];  // [two rows][two batch rows], four sums each

  QTENSOR_INLINE TileSums() {
    for (auto& pair : part)
      for (auto& sums : pair) sums = vdupq_n_s32(0);
  }
  // Adds the products of COUNT values of k.
  template <int COUNT>
  QTENSOR_INLINE void add(const int8_t* w, const int8_t* x) {
#pragma GCC unroll 4
    for (int k = 0; k < COUNT; k += kAdjacent) {
      const int8x16_t rows01 = vld1q_s8(w + kTileRows * k), rows23 = vld1q_s8(w + kTileRows * k + 16);
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        const int8x16_t two = vld1q_s8(x + kTileBatch * k + 16 * j);
        part[0][j] = vmmlaq_s32(part[0][j], rows01, two);
        part[1][j] = vmmlaq_s32(part[1][j], rows23, two);
      }
    }
  }
  // Adds other sums, multiplied by an integer for each row.
  QTENSOR_INLINE void add_scaled(const TileSums& other, const int32_t* scale) {
    const int32x4_t rows = vld1q_s32(scale), rows01 = vzip1q_s32(rows, rows), rows23 = vzip2q_s32(rows, rows);
    for (int j = 0; j < 4; j++) {
      part[0][j] = vmlaq_s32(part[0][j], other.part[0][j], rows01);
      part[1][j] = vmlaq_s32(part[1][j], other.part[1][j], rows23);
    }
  }
  // The sums of a row with batch rows 4v to 4v + 3.
  QTENSOR_INLINE int32x4_t of(int row, int v) const {
    const int64x2_t a = vreinterpretq_s64_s32(part[row / 2][2 * v]),
                    b = vreinterpretq_s64_s32(part[row / 2][2 * v + 1]);
    return vreinterpretq_s32_s64(row % 2 == 0 ? vzip1q_s64(a, b) : vzip2q_s64(a, b));
  }
};

#else

// Weights: [k / 16][row][k % 16]. Batch rows: [k / 4][batch row][k % 4].
constexpr int kAdjacent = 4;

QTENSOR_INLINE void store_sixteen(const int8x16_t (&q)[kTileRows], int8_t* to) {
  for (int r = 0; r < kTileRows; r++) vst1q_s8(to + 16 * r, q[r]);
}

struct TileSums {
  int32x4_t part[kTileRows][2];  // [row][four batch rows]

  QTENSOR_INLINE TileSums() {
    for (auto& row : part)
      for (auto& sums : row) sums = vdupq_n_s32(0);
  }
  template <int COUNT>
  QTENSOR_INLINE void add(const int8_t* w, const int8_t* x) {
#pragma GCC unroll 2
    for (int k = 0; k < COUNT; k += 16) {
      int8x16_t rows[kTileRows];
      for (int r = 0; r < kTileRows; r++) rows[r] = vld1q_s8(w + kTileRows * k + 16 * r);
      add_four<0>(rows, x + kTileBatch * k);
      add_four<1>(rows, x + kTileBatch * (k + 4));
      add_four<2>(rows, x + kTileBatch * (k + 8));
      add_four<3>(rows, x + kTileBatch * (k + 12));
    }
  }
  QTENSOR_INLINE void add_scaled(const TileSums& other, const int32_t* scale) {
    for (int r = 0; r < kTileRows; r++)
      for (int v = 0; v < 2; v++) part[r][v] = vmlaq_n_s32(part[r][v], other.part[r][v], scale[r]);
  }
  QTENSOR_INLINE int32x4_t of(int row, int v) const { return part[row][v]; }

 private:
  template <int LANE>  // the four values of k in this lane of the rows
  QTENSOR_INLINE void add_four(const int8x16_t (&rows)[kTileRows], const int8_t* x) {
    const int8x16_t first = vld1q_s8(x), second = vld1q_s8(x + 16);
#pragma GCC unroll 4
    for (int r = 0; r < kTileRows; r++) {
      part[r][0] = vdotq_laneq_s32(part[r][0], first, rows[r], LANE);
      part[r][1] = vdotq_laneq_s32(part[r][1], second, rows[r], LANE);
    }
  }
};

#endif

}  // namespace
}  // namespace qtensor
