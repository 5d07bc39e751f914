// Dequantization of rows of weights, for embeddings: a thread block per row. Each thread computes some of its values.
#pragma once

#include "cuda/unpacked_blocks.h"

namespace qtensor {
namespace cuda {

struct Embed {
  const uint8_t* weight;  // in the layout of layout.h
  int64_t row_bytes;
  Format format;
  int width;
  const int* ids;
  float* out;
  const Grids* grids;
};
constexpr int kEmbedThreads = 256;

LANES_DEVICE float half_at(const uint8_t* p) { return half_to_float(*reinterpret_cast<const uint16_t*>(p)); }

LANES_DEVICE float value_of_k_quant(const uint8_t* block, bool five, int i) {
  const int j = i / 32, l = i % 32;
  const uint8_t* const packed = block + 4;
  const int scale = j < 4 ? packed[j] & 63 : (packed[j + 4] & 15) | (packed[j - 4] >> 6 << 4);
  const int min = j < 4 ? packed[j + 4] & 63 : (packed[j + 4] >> 4) | (packed[j] >> 6 << 4);
  int q = block[(five ? 48 : 16) + 32 * (j / 2) + l] >> (4 * (j % 2)) & 15;
  if (five) q |= (block[16 + l] >> j & 1) << 4;
  const float step = __fmul_rn(half_at(block), __int2float_rn(scale));
  return __fsub_rn(__fmul_rn(step, __int2float_rn(q)), __fmul_rn(half_at(block + 2), __int2float_rn(min)));
}
LANES_DEVICE float value_of_q6_k(const uint8_t* row, int blocks, int b, int i) {
  const uint8_t* const block = row + 208 * b;
  const int n = i / 128, part = i % 128 / 32, l = i % 32;
  const int low = block[64 * n + 32 * (part % 2) + l] >> (part < 2 ? 0 : 4) & 15;
  const int q = low | (block[128 + 32 * n + l] >> (2 * part) & 3) << 4;
  const float d = half_at(row + 208 * blocks + 2 * b);
  return __fmul_rn(__fmul_rn(d, __int2float_rn(int8_t(block[192 + i / 16]))), __int2float_rn(q - 32));
}

LANES_KERNEL(kEmbedThreads, 4) embed_rows(const Embed t) {
  await_previous();
  const uint8_t* const row = t.weight + t.ids[blockIdx.x] * t.row_bytes;
  float* const out = t.out + int64_t(blockIdx.x) * t.width;
  const int small = t.width / 32;  // blocks of 32 values per row
  for (int i = int(threadIdx.x); i < t.width; i += kEmbedThreads) {
    const int b = i / 32, l = i % 32;
    float v;
    if (t.format == Format::F32) {
      v = reinterpret_cast<const float*>(row)[i];
    } else if (t.format == Format::F16) {
      v = half_at(row + 2 * i);
    } else if (t.format == Format::BF16) {
      v = __uint_as_float(uint32_t(reinterpret_cast<const uint16_t*>(row)[i]) << 16);
    } else if (t.format == Format::Q8_0) {
      v = __fmul_rn(half_at(row + 32 * small + 2 * b), __int2float_rn(int8_t(row[i])));
    } else if (t.format == Format::Q4_0) {
      const int q = (row[16 * b + l % 16] >> (l < 16 ? 0 : 4) & 15) - 8;
      v = __fmul_rn(half_at(row + 16 * small + 2 * b), __int2float_rn(q));
    } else if (t.format == Format::Q4_1) {
      const int q = row[16 * b + l % 16] >> (l < 16 ? 0 : 4) & 15;
      const uint8_t* const scales = row + 16 * small + 4 * b;
      v = __fadd_rn(__fmul_rn(half_at(scales), __int2float_rn(q)), half_at(scales + 2));
    } else if (t.format == Format::Q6_K) {
      v = value_of_q6_k(row, t.width / 256, i / 256, i % 256);
    } else if (t.format == Format::Q4_K || t.format == Format::Q5_K) {
      const bool five = t.format == Format::Q5_K;
      v = value_of_k_quant(row + i / 256 * (five ? 176 : 144), five, i % 256);
    } else if (has_blocks_of_32(t.format)) {
      v = value_of_32(t.format, row, small, i);
    } else {
      v = value_of_256(t.format, t.grids, row, t.width / 256, i);
    }
    out[i] = v;
  }
}

}  // namespace cuda
}  // namespace qtensor
