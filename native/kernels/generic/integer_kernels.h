// Dot products of quantized blocks in plain, readable C++: the reference for the other instruction sets.
#pragma once

#include <cstdint>

#include "kernel_table.h"
#include "packed_weights.h"
#include "vec16.h"

namespace qtensor {
namespace {

template <class Block>
inline Block block_at(const MatmulTask& t, int64_t row, int64_t index) {
  Block block;  // copied, because blocks in a file are not aligned
  if constexpr (Packing<Block>::exists)
    if (t.slab_stride > 0) {
      using P = Packing<Block>;
      const int64_t first = row / kSlabRows * kSlabRows;
      const uint8_t* const slab = t.weight + row / kSlabRows * t.slab_stride;
      uint8_t bytes[P::bytes];
      unpack_bytes<Block>(slab, groups_of(t.row_end - first), row - first, index / P::file_blocks, bytes);
      __builtin_memcpy(&block, bytes + index % P::file_blocks * int64_t(sizeof block), sizeof block);
      return block;
    }
  __builtin_memcpy(&block, t.weight + row * t.row_bytes + index * int64_t(sizeof(Block)), sizeof block);
  return block;
}

// Calls step(row, block index, activation block, acc) for every output and super-block, in order.
template <class Step>
inline void for_each_output(const MatmulTask& t, Step step) {
  for (int64_t row = t.row_begin; row < t.row_end; row++)
    for (int64_t j = 0; j < t.m; j++) {
      const BlockQ8K* x = t.blocks + j * t.blocks_per_row;
      float acc = 0.0f;
      for (int64_t b = 0; b < t.blocks_per_row; b++) acc = __builtin_fmaf(step(row, b, x[b]), x[b].d, acc);
      t.y[j * t.y_stride + row] = acc;
    }
}

// The eight 6-bit scales and mins of Q4_K and Q5_K.
inline void unpack_scales(const uint8_t* packed, uint8_t* scale, uint8_t* min) {
  for (int j = 0; j < 4; j++) {
    scale[j] = packed[j] & 63;
    min[j] = packed[j + 4] & 63;
    scale[j + 4] = uint8_t((packed[j + 8] & 15) | (packed[j] >> 6 << 4));
    min[j + 4] = uint8_t((packed[j + 8] >> 4) | (packed[j + 4] >> 6 << 4));
  }
}

// The 256 values of a K-quant block, without scales: 0..15, 0..31, 0..63.
inline void unpack(const BlockQ4_K& w, uint8_t* q) {
  for (int chunk = 0; chunk < 4; chunk++)
    for (int l = 0; l < 32; l++) {
      q[64 * chunk + l] = w.qs[32 * chunk + l] & 15;
      q[64 * chunk + 32 + l] = w.qs[32 * chunk + l] >> 4;
    }
}
inline void unpack(const BlockQ5_K& w, uint8_t* q) {
  for (int chunk = 0; chunk < 4; chunk++)
    for (int l = 0; l < 32; l++) {
      q[64 * chunk + l] = uint8_t((w.qs[32 * chunk + l] & 15) | ((w.qh[l] >> (2 * chunk) & 1) << 4));
      q[64 * chunk + 32 + l] = uint8_t((w.qs[32 * chunk + l] >> 4) | ((w.qh[l] >> (2 * chunk + 1) & 1) << 4));
    }
}
inline void unpack(const BlockQ6_K& w, uint8_t* q) {
  for (int half_block = 0; half_block < 2; half_block++)
    for (int l = 0; l < 64; l++) {
      const uint8_t low = w.ql[64 * half_block + l], high = w.qh[32 * half_block + l % 32];
      const int shift = l < 32 ? 0 : 2;
      q[128 * half_block + l] = uint8_t((low & 15) | ((high >> shift & 3) << 4));
      q[128 * half_block + 64 + l] = uint8_t((low >> 4) | ((high >> (shift + 4) & 3) << 4));
    }
}

template <class Block>
inline void matmul_with_mins(const MatmulTask& t) {
  for_each_output(t, [&](int64_t row, int64_t b, const BlockQ8K& x) {
    const Block w = block_at<Block>(t, row, b);
    uint8_t scale[8], min[8], q[256];
    unpack_scales(w.scales, scale, min);
    unpack(w, q);
    int32_t products = 0, mins = 0;
    for (int j = 0; j < 8; j++) {
      int32_t sum = 0;
      for (int l = 0; l < 32; l++) sum += q[32 * j + l] * x.q[32 * j + l];
      products += sum * scale[j];
      mins += min[j] * x.sums32[j];
    }
    return __builtin_fmaf(-float(mins), half_to_float(w.dmin), float(products) * half_to_float(w.d));
  });
}
void matmul_q4_k(const MatmulTask& t) { matmul_with_mins<BlockQ4_K>(t); }
void matmul_q5_k(const MatmulTask& t) { matmul_with_mins<BlockQ5_K>(t); }

void matmul_q6_k(const MatmulTask& t) {
  for_each_output(t, [&](int64_t row, int64_t b, const BlockQ8K& x) {
    const auto w = block_at<BlockQ6_K>(t, row, b);
    uint8_t q[256];
    unpack(w, q);
    int32_t products = 0;
    for (int group = 0; group < 16; group++) {
      int32_t sum = -32 * x.sums16[group];
      for (int l = 0; l < 16; l++) sum += q[16 * group + l] * x.q[16 * group + l];
      products += sum * w.scales[group];
    }
    return float(products) * half_to_float(w.d);
  });
}

}  // namespace
}  // namespace qtensor
