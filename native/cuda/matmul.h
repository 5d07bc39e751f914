// Products of weights and rows of floats. In the kernels, a batch row is a column.
#pragma once

#include "cuda/unpacked_blocks.h"

namespace qtensor {
namespace cuda {

// Adds the result f of a block of 256 to those of the previous blocks.
template <class Block>
LANES_DEVICE float with_block(float acc, float f, const uint8_t* x) {
  return Block::kScaled ? __fadd_rn(acc, f) : __fmaf_rn(f, scale_of(x), acc);
}

// Small M, up to 8 * TILES: a thread block computes 16 rows, and its eight warps take turns with their blocks of 256.
// The results of the blocks are stored in shared memory; then one thread for each output adds them in order. With K =
// 2048, each warp has one block, and all blocks are processed at the same time.
constexpr int kSmallMWarps = 8, kSmallMThreads = 32 * kSmallMWarps, kSmallMRows = 16;
static constexpr int small_m_shared_bytes(int tiles, int blocks) { return tiles * 8 * kSmallMRows * (blocks | 1) * 4; }

template <class Block, int TILES>
LANES_DEVICE void small_m(const Product& t, uint8_t* shared) {
  float* const f = reinterpret_cast<float*>(shared);  // [column][row][blocks | 1]
  const int thread = int(threadIdx.x), lane = thread % 32, g = lane / 4, q = lane % 4, pitch = t.blocks | 1;
  const int first_row = int(blockIdx.x) * kSmallMRows, left = t.rows - first_row,
            rows = left < kSmallMRows ? left : kSmallMRows;
  const uint8_t* row[2];
  for (int i = 0; i < 2; i++) row[i] = t.weight + int64_t(first_row + (g + 8 * i < rows ? g + 8 * i : 0)) * t.row_bytes;
  const uint8_t* column[TILES];
  for (int n = 0; n < TILES; n++)
    column[n] = t.x + int64_t(8 * n + g < t.m ? 8 * n + g : 0) * t.blocks * kActivationBytes;
  int b = thread / 32;
  Block next;
  if (b < t.blocks) next.load(t, row, b, q);
  await_previous();
  while (b < t.blocks) {
    const Block now = next;
    const int at = b;
    b += kSmallMWarps;
    if (b < t.blocks) next.load(t, row, b, q);
    float of[TILES][4];
    now.template steps<TILES>(t, at, q, [&](int n) { return column[n] + at * kActivationBytes; }, of);
    LANES_UNROLL
    for (int n = 0; n < TILES; n++)
      for (int i = 0; i < 4; i++) f[((8 * n + 2 * q + i % 2) * kSmallMRows + g + 8 * (i / 2)) * pitch + at] = of[n][i];
  }
  __syncthreads();
  for (int out = thread; out < kSmallMRows * t.m; out += kSmallMThreads) {
    const int r = out % kSmallMRows, c = out / kSmallMRows;
    const float* const of_row = f + out * pitch;
    const uint8_t* const x = t.x + int64_t(c) * t.blocks * kActivationBytes;
    float acc = 0.0f;
    for (int i = 0; i < t.blocks; i++) acc = with_block<Block>(acc, of_row[i], x + i * kActivationBytes);
    if (r < rows) t.y[c * t.y_stride + first_row + r] = acc;
  }
}

// Large M: a warp computes 16 rows x 32 columns, a thread block 64 x 32, with activations in shared memory.
constexpr int kLargeMThreads = 128, kLargeMRows = 64, kLargeMTiles = 4, kLargeMTile = 8 * kLargeMTiles;
constexpr int kLargeMPitch = 352;  // bytes between columns: 8 bytes of eight columns are in different banks
constexpr int kLargeMSharedBytes = kLargeMTile * kLargeMPitch;

template <class Block>
LANES_DEVICE void large_m(const Product& t, uint8_t* shared) {
  await_previous();
  const int thread = int(threadIdx.x), lane = thread % 32, g = lane / 4, q = lane % 4;
  const int first_row = int(blockIdx.x) * kLargeMRows + thread / 32 * 16, first_column = int(blockIdx.y) * kLargeMTile;
  const uint8_t* row[2];
  for (int i = 0; i < 2; i++) {
    const int r = first_row + g + 8 * i;
    row[i] = t.weight + int64_t(r < t.rows ? r : t.rows - 1) * t.row_bytes;
  }
  float acc[kLargeMTiles][4] = {};
  constexpr int kPieces = kActivationBytes / 16;
  for (int b = 0; b < t.blocks; b++) {
    __syncthreads();
    for (int i = thread; i < kLargeMTile * kPieces; i += kLargeMThreads) {
      const int c = first_column + i / kPieces, at = i % kPieces * 16;
      const uint8_t* const x = t.x + (int64_t(c < t.m ? c : t.m - 1) * t.blocks + b) * kActivationBytes;
      *reinterpret_cast<uint4*>(shared + i / kPieces * kLargeMPitch + at) = *reinterpret_cast<const uint4*>(x + at);
    }
    __syncthreads();
    Block w;
    w.load(t, row, b, q);
    float f[kLargeMTiles][4];
    w.template steps<kLargeMTiles>(t, b, q, [&](int n) { return shared + (8 * n + g) * kLargeMPitch; }, f);
    LANES_UNROLL
    for (int n = 0; n < kLargeMTiles; n++)
      for (int i = 0; i < 4; i++)
        acc[n][i] = with_block<Block>(acc[n][i], f[n][i], shared + (8 * n + 2 * q + i % 2) * kLargeMPitch);
  }
  LANES_UNROLL
  for (int n = 0; n < kLargeMTiles; n++)
    for (int i = 0; i < 4; i++) {
      const int r = first_row + g + 8 * (i / 2), c = first_column + 8 * n + 2 * q + i % 2;
      if (r < t.rows && c < t.m) t.y[c * t.y_stride + r] = acc[n][i];
    }
}

// small8, small16 and large: thread blocks per multiprocessor, as many as the registers allow without spills.
#define QTENSOR_PRODUCTS(name, Block, small8, small16, large)                  \
  LANES_KERNEL(kSmallMThreads, small8) small_m_##name##_8(const Product t) {   \
    LANES_SHARED(shared);                                                      \
    small_m<Block, 1>(t, shared);                                              \
  }                                                                            \
  LANES_KERNEL(kSmallMThreads, small16) small_m_##name##_16(const Product t) { \
    LANES_SHARED(shared);                                                      \
    small_m<Block, 2>(t, shared);                                              \
  }                                                                            \
  LANES_KERNEL(kLargeMThreads, large) large_m_##name(const Product t) {        \
    LANES_SHARED(shared);                                                      \
    large_m<Block>(t, shared);                                                 \
  }
QTENSOR_PRODUCTS(q4_k, Q4K, 2, 1, 2)
QTENSOR_PRODUCTS(q5_k, Q5K, 1, 1, 2)
QTENSOR_PRODUCTS(q6_k, Q6K, 1, 1, 3)
QTENSOR_PRODUCTS(q8_0, Q80, 1, 1, 2)
QTENSOR_PRODUCTS(q4_0, Q40, 1, 1, 2)
QTENSOR_PRODUCTS(q4_1, Q41, 1, 1, 2)
QTENSOR_PRODUCTS(unpacked_256, Unpacked256, 2, 2, 3)
QTENSOR_PRODUCTS(unpacked_32, Unpacked32, 2, 2, 3)
#undef QTENSOR_PRODUCTS

// Float weights: half a warp is the virtual vector of one output, so a warp computes two adjacent rows.
struct FloatProduct {
  const uint8_t* weight;
  int64_t row_bytes;
  const float* x;  // m x k
  int rows, m;
  int64_t k;
  float* y;
  int64_t y_stride;
};
constexpr int kFloatThreads = 128, kFloatRows = kFloatThreads / 16;

template <class Read>
LANES_DEVICE void float_product(const FloatProduct& t, Read read) {
  const int lane = int(threadIdx.x % 16), row = int(blockIdx.x) * kFloatRows + int(threadIdx.x / 16);
  const uint8_t* const w = t.weight + int64_t(row < t.rows ? row : t.rows - 1) * t.row_bytes;
  const float* const x = t.x + int64_t(blockIdx.y) * t.k;
  float acc = 0.0f;
  int64_t at = 0;
  for (; at + 16 <= t.k; at += 16) acc = __fmaf_rn(read(w, at + lane), x[at + lane], acc);
  // Lanes beyond the end of a row compute fma(0, 0, acc), which turns -0 into +0.
  if (at < t.k) {
    const bool within = at + lane < t.k;
    acc = __fmaf_rn(within ? read(w, at + lane) : 0.0f, within ? x[at + lane] : 0.0f, acc);
  }
  acc = sum_of_lanes(acc);
  if (lane == 0 && row < t.rows) t.y[int64_t(blockIdx.y) * t.y_stride + row] = acc;
}
LANES_DEVICE float read_f32(const uint8_t* w, int64_t i) { return reinterpret_cast<const float*>(w)[i]; }
LANES_DEVICE float read_f16(const uint8_t* w, int64_t i) {
  return half_to_float(reinterpret_cast<const uint16_t*>(w)[i]);
}
LANES_DEVICE float read_bf16(const uint8_t* w, int64_t i) {
  return __uint_as_float(uint32_t(reinterpret_cast<const uint16_t*>(w)[i]) << 16);
}
LANES_KERNEL(kFloatThreads, 8) product_f32(const FloatProduct t) {
  await_previous();
  float_product(t, [](const uint8_t* w, int64_t i) { return read_f32(w, i); });
}
LANES_KERNEL(kFloatThreads, 8) product_f16(const FloatProduct t) {
  await_previous();
  float_product(t, [](const uint8_t* w, int64_t i) { return read_f16(w, i); });
}
LANES_KERNEL(kFloatThreads, 8) product_bf16(const FloatProduct t) {
  await_previous();
  float_product(t, [](const uint8_t* w, int64_t i) { return read_bf16(w, i); });
}

}  // namespace cuda
}  // namespace qtensor
