// Products of sixteen rows of weights and tiles of eight columns, 256 values deep, for each block format: the work of
// one warp for one super-block. An mma processes a sub-block of 32 weights. Its sums are exact and are scaled as
// integers (K-quants) or in the float steps specified in kernel_table.h.
//
// Lane (g, q) = (lane / 4, lane % 4) holds weights of rows g and g + 8, loads activations of column g of each tile, and
// receives outputs (g, 2q), (g, 2q + 1), (g + 8, 2q), (g + 8, 2q + 1). Within a sub-block, weights may have any order
// if activations have the same: for most formats, a lane has eight adjacent values, 8q .. 8q + 7.
#pragma once

#include "blocks.h"
#include "cuda/float_steps.h"
#include "cuda/layout.h"
#include "grids.h"

namespace qtensor {
namespace cuda {

struct Product {
  const uint8_t* weight;  // first row of the matrix, in the layout of layout.h
  int64_t row_bytes;
  const uint8_t* x;  // m x blocks of BlockQ8K, or of BlockQ8x32
  int blocks, rows, m;
  int sub_blocks;  // sub-blocks of 32 values per row
  float* y;
  int64_t y_stride;  // floats from column to column
  Format format;     // for kernels of several formats
  const Grids* grids;
};

// Parts of a column's quantized activations, in global or shared memory.
constexpr int kActivationBytes = sizeof(BlockQ8K), kSums16At = 256, kSums32At = 288, kScaleAt = 304;
constexpr int kScalesOf32At = 256, kSumsOf32At = 288;
static_assert(sizeof(BlockQ8x32) == sizeof(BlockQ8K));
LANES_DEVICE uint2 two_words(const uint8_t* x, int at) { return *reinterpret_cast<const uint2*>(x + at); }
LANES_DEVICE uint32_t word(const uint8_t* x, int at) { return *reinterpret_cast<const uint32_t*>(x + at); }
LANES_DEVICE float scale_of(const uint8_t* x) { return *reinterpret_cast<const float*>(x + kScaleAt); }
LANES_DEVICE float scale_of_32(const uint8_t* x, int j) { return reinterpret_cast<const float*>(x + kScalesOf32At)[j]; }
LANES_DEVICE float sum_of_32(const uint8_t* x, int j) {
  return __int2float_rn(reinterpret_cast<const int32_t*>(x + kSumsOf32At)[j]);
}
LANES_DEVICE uint32_t byte_of(uint32_t low, uint32_t high, int j) {
  return (j < 4 ? low : high) >> (8 * (j % 4)) & 255;
}
LANES_DEVICE uint32_t word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
// q - offset of four bytes q below 128
LANES_DEVICE uint32_t minus_each(uint32_t q, uint32_t offset) { return ((q | 0x80808080) - offset) ^ 0x80808080; }

// Scales and mins of Q4_K and Q5_K, whose blocks have the same header.
struct SixBits {
  uint32_t scale[2], min[2];
  float d, dmin;
  LANES_DEVICE explicit SixBits(const uint4& head) {
    scale[0] = head.y & 0x3f3f3f3f;
    scale[1] = (head.w & 0x0f0f0f0f) | ((head.y >> 2) & 0x30303030);
    min[0] = head.z & 0x3f3f3f3f;
    min[1] = ((head.w >> 4) & 0x0f0f0f0f) | ((head.z >> 2) & 0x30303030);
    d = half_to_float(uint16_t(head.x)), dmin = half_to_float(uint16_t(head.x >> 16));
  }
};
LANES_DEVICE uint2 digits_of(const uint8_t* sums) {  // digits of four sums of 32 activations in base 128
  const uint2 s = *reinterpret_cast<const uint2*>(sums);
  return {__byte_perm(s.x & 0x007f007f, s.y & 0x007f007f, 0x6420), __byte_perm(s.x >> 7, s.y >> 7, 0x6420)};
}

template <bool FIVE_BITS>
struct WithMins {
  static constexpr bool kScaled = false;
  static constexpr int kBytes = FIVE_BITS ? 176 : 144, kLevelsAt = FIVE_BITS ? 48 : 16;
  uint4 head[2];
  uint2 bytes[2][4], upper[2];
  LANES_DEVICE void load(const Product&, const uint8_t* const (&row)[2], int b, int q) {
    for (int i = 0; i < 2; i++) {
      const uint8_t* const block = row[i] + b * kBytes;
      head[i] = load16(block);
      if (FIVE_BITS) upper[i] = stream8(block + 16 + 8 * q);
      for (int chunk = 0; chunk < 4; chunk++) bytes[i][chunk] = stream8(block + kLevelsAt + 32 * chunk + 8 * q);
    }
  }
  LANES_DEVICE uint32_t levels(uint32_t four, uint32_t fifth, int j) const {
    const uint32_t low = four >> (4 * (j % 2)) & 0x0f0f0f0f;
    return FIVE_BITS ? low | (fifth >> j & 0x01010101) << 4 : low;
  }
  template <int TILES, class Column>
  LANES_DEVICE void steps(const Product&, int, int q, Column x, float (&f)[TILES][4]) const {
    const SixBits of[2] = {SixBits(head[0]), SixBits(head[1])};
    int products[TILES][4] = {};
    LANES_UNROLL
    for (int j = 0; j < 8; j++) {
      const uint32_t a[4] = {levels(bytes[0][j / 2].x, upper[0].x, j), levels(bytes[1][j / 2].x, upper[1].x, j),
                             levels(bytes[0][j / 2].y, upper[0].y, j), levels(bytes[1][j / 2].y, upper[1].y, j)};
      const int scale[2] = {int(byte_of(of[0].scale[0], of[0].scale[1], j)),
                            int(byte_of(of[1].scale[0], of[1].scale[1], j))};
      LANES_UNROLL
      for (int n = 0; n < TILES; n++) {
        const uint2 of_x = two_words(x(n), 32 * j + 8 * q);
        int sum[4] = {0, 0, 0, 0};
        mma_s8(sum, a, {of_x.x, of_x.y});
        for (int i = 0; i < 4; i++) products[n][i] += sum[i] * scale[i / 2];
      }
    }
    // Two more mma: lanes q = 0 and 1 have four mins of each row and four sums; the rest of the depth is zero.
    const auto mins = [&](const uint32_t (&m)[2]) { return q == 0 ? m[0] : q == 1 ? m[1] : 0; };
    const uint32_t a[4] = {mins(of[0].min), mins(of[1].min), 0, 0};
    LANES_UNROLL
    for (int n = 0; n < TILES; n++) {
      const uint2 digit = digits_of(x(n) + kSums32At + 8 * (q % 2));
      int low[4] = {0, 0, 0, 0}, high[4] = {0, 0, 0, 0};
      mma_s8(low, a, {digit.x, 0});
      mma_s8(high, a, {digit.y, 0});
      for (int i = 0; i < 4; i++)
        f[n][i] = __fmaf_rn(-__int2float_rn(low[i] + 128 * high[i]), of[i / 2].dmin,
                            __fmul_rn(__int2float_rn(products[n][i]), of[i / 2].d));
    }
  }
};
using Q4K = WithMins<false>;
using Q5K = WithMins<true>;

// There is a scale for each 16 weights, so an mma is half as deep: lane q has weights 4q .. 4q + 3 of a group.
struct Q6K {
  static constexpr bool kScaled = false;
  uint32_t low[2][8], high[2][4];  // words q and q + 4 of each 32 bytes
  uint4 scales[2];
  uint16_t d[2];
  LANES_DEVICE void load(const Product& t, const uint8_t* const (&row)[2], int b, int q) {
    for (int i = 0; i < 2; i++) {
      const uint8_t* const block = row[i] + b * 208;
      for (int w = 0; w < 8; w++) low[i][w] = stream4(block + 16 * w + 4 * q);
      for (int w = 0; w < 4; w++) high[i][w] = stream4(block + 128 + 16 * w + 4 * q);
      scales[i] = load16(block + 192);
      d[i] = reinterpret_cast<const uint16_t*>(row[i] + int64_t(t.blocks) * 208)[b];
    }
  }
  template <int TILES, class Column>
  LANES_DEVICE void steps(const Product&, int, int q, Column x, float (&f)[TILES][4]) const {
    int products[TILES][4] = {};
    LANES_UNROLL
    for (int group = 0; group < 16; group++) {
      const int part = group / 2 % 4, at = group / 8 * 4 + part % 2 * 2 + group % 2;
      uint32_t a[2];
      int scale[2];
      for (int i = 0; i < 2; i++) {
        const uint32_t upper = high[i][group / 8 * 2 + group % 2] >> (2 * part) & 0x03030303;
        a[i] = minus_each((low[i][at] >> (part / 2 * 4) & 0x0f0f0f0f) | upper << 4, 0x20202020);
        scale[i] = int8_t(word_of(scales[i], group / 4) >> (8 * (group % 4)));
      }
      LANES_UNROLL
      for (int n = 0; n < TILES; n++) {
        int sum[4] = {0, 0, 0, 0};
        mma_s8_short(sum, a, word(x(n), 16 * group + 4 * q));
        for (int i = 0; i < 4; i++) products[n][i] += sum[i] * scale[i / 2];
      }
    }
    LANES_UNROLL
    for (int n = 0; n < TILES; n++)
      for (int i = 0; i < 4; i++) f[n][i] = __fmul_rn(__int2float_rn(products[n][i]), half_to_float(d[i / 2]));
  }
};

// Formats with kScaled have a float step for each 32 weights, which includes the scale of the activations. The last
// super-block of a row may have fewer than eight sub-blocks.
LANES_DEVICE int sub_blocks_of(const Product& t, int b) { return t.sub_blocks - 8 * b < 8 ? t.sub_blocks - 8 * b : 8; }
LANES_DEVICE float half_of(const uint4& v, int i) {
  return half_to_float(uint16_t(word_of(v, i / 2) >> (16 * (i % 2))));
}

// Each lane has a value of column g. It gets the values of the columns of its outputs, 2q and 2q + 1, from lanes 8q and
// 8q + 4.
struct OfOutputs {
  float of[2];
  LANES_DEVICE OfOutputs(float mine, int q) {
    of[0] = __shfl_sync(kWarp, mine, 8 * q);
    of[1] = __shfl_sync(kWarp, mine, 8 * q + 4);
  }
};

struct Q80 {
  static constexpr bool kScaled = true;
  uint2 bytes[2][8];
  uint4 d[2];
  LANES_DEVICE void load(const Product& t, const uint8_t* const (&row)[2], int b, int q) {
    const int count = sub_blocks_of(t, b);
    for (int i = 0; i < 2; i++) {
      LANES_UNROLL
      for (int j = 0; j < 8; j++) bytes[i][j] = j < count ? stream8(row[i] + (8 * b + j) * 32 + 8 * q) : uint2{0, 0};
      d[i] = load16(row[i] + int64_t(t.sub_blocks) * 32 + 16 * b);
    }
  }
  template <int TILES, class Column>
  LANES_DEVICE void steps(const Product& t, int b, int q, Column x, float (&f)[TILES][4]) const {
    const int count = sub_blocks_of(t, b);
    LANES_UNROLL
    for (int n = 0; n < TILES; n++)
      for (int i = 0; i < 4; i++) f[n][i] = 0.0f;
    LANES_UNROLL
    for (int j = 0; j < 8; j++) {
      if (j >= count) continue;  // the same for the whole warp
      const uint32_t a[4] = {bytes[0][j].x, bytes[1][j].x, bytes[0][j].y, bytes[1][j].y};
      const float scale[2] = {half_of(d[0], j), half_of(d[1], j)};
      LANES_UNROLL
      for (int n = 0; n < TILES; n++) {
        const uint2 of_x = two_words(x(n), 32 * j + 8 * q);
        int sum[4] = {0, 0, 0, 0};
        mma_s8(sum, a, {of_x.x, of_x.y});
        const OfOutputs dx(scale_of_32(x(n), j), q);
        for (int i = 0; i < 4; i++)
          f[n][i] = __fmaf_rn(__int2float_rn(sum[i]), __fmul_rn(scale[i / 2], dx.of[i % 2]), f[n][i]);
      }
    }
  }
};

// Q4_0, whose levels are q - 8, and Q4_1, which adds m times the sum of the activations. The nibbles of a block's
// sixteen bytes are weights 0 .. 15 and 16 .. 31, so lane q has weights 4q .. 4q + 3 of each half.
template <bool WITH_MIN>
struct Halves {
  static constexpr bool kScaled = true;
  uint32_t bytes[2][8];
  uint4 scales[2][WITH_MIN ? 2 : 1];
  LANES_DEVICE void load(const Product& t, const uint8_t* const (&row)[2], int b, int q) {
    const int count = sub_blocks_of(t, b);
    for (int i = 0; i < 2; i++) {
      LANES_UNROLL
      for (int j = 0; j < 8; j++) bytes[i][j] = j < count ? stream4(row[i] + (8 * b + j) * 16 + 4 * q) : 0;
      const uint8_t* const from = row[i] + int64_t(t.sub_blocks) * 16 + (WITH_MIN ? 32 : 16) * b;
      for (int w = 0; w < (WITH_MIN ? 2 : 1); w++) scales[i][w] = load16(from + 16 * w);
    }
  }
  LANES_DEVICE float scale(int i, int j) const {
    return WITH_MIN ? half_of(scales[i][WITH_MIN ? j / 4 : 0], j % 4 * 2) : half_of(scales[i][0], j);
  }
  LANES_DEVICE uint32_t levels(uint32_t nibbles) const {
    const uint32_t q = nibbles & 0x0f0f0f0f;
    return WITH_MIN ? q : minus_each(q, 0x08080808);
  }
  template <int TILES, class Column>
  LANES_DEVICE void steps(const Product& t, int b, int q, Column x, float (&f)[TILES][4]) const {
    const int count = sub_blocks_of(t, b);
    LANES_UNROLL
    for (int n = 0; n < TILES; n++)
      for (int i = 0; i < 4; i++) f[n][i] = 0.0f;
    LANES_UNROLL
    for (int j = 0; j < 8; j++) {
      if (j >= count) continue;
      const uint32_t a[4] = {levels(bytes[0][j]), levels(bytes[1][j]), levels(bytes[0][j] >> 4),
                             levels(bytes[1][j] >> 4)};
      const float d[2] = {scale(0, j), scale(1, j)};
      float m[2] = {0.0f, 0.0f};
      if (WITH_MIN)
        for (int i = 0; i < 2; i++) m[i] = half_of(scales[i][WITH_MIN ? j / 4 : 0], j % 4 * 2 + 1);
      LANES_UNROLL
      for (int n = 0; n < TILES; n++) {
        int sum[4] = {0, 0, 0, 0};
        mma_s8(sum, a, {word(x(n), 32 * j + 4 * q), word(x(n), 32 * j + 16 + 4 * q)});
        const float mine = scale_of_32(x(n), j);
        const OfOutputs dx(mine, q), sums(WITH_MIN ? __fmul_rn(sum_of_32(x(n), j), mine) : 0.0f, q);
        for (int i = 0; i < 4; i++) {
          f[n][i] = __fmaf_rn(__int2float_rn(sum[i]), __fmul_rn(d[i / 2], dx.of[i % 2]), f[n][i]);
          if (WITH_MIN) f[n][i] = __fmaf_rn(sums.of[i % 2], m[i / 2], f[n][i]);
        }
      }
    }
  }
};
using Q40 = Halves<false>;
using Q41 = Halves<true>;

}  // namespace cuda
}  // namespace qtensor
