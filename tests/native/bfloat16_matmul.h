// Another method to multiply Q4_K with tiles, for comparison only: weights are dequantized to bfloat16, one N tile at a
// time, and multiplied by bfloat16 activations, and sums stay in float tiles. Each weight and activation is rounded
// once to 8 significant bits. Sums are not exact integers, so the bits differ from those of the other kernels.
#pragma once

#include <cstdint>

namespace qtensor {

struct Bfloat16Matmul {
  // Convert k x m floats, one batch row after another, to [k / 32][M tile][16 pairs][16 batch rows][2]. m must be a
  // multiple of 32, and k of 256.
  void (*pack)(const float* x, int64_t k, int64_t m, uint16_t* packed);
  // Compute y[j][n], with y_stride between batch rows, for `rows` rows, a multiple of 32. scratch: bfloat16_scratch(m)
  // bytes, aligned.
  void (*product)(const uint8_t* weight, int64_t rows, int64_t k, const uint16_t* packed, int64_t m, float* y,
                  int64_t y_stride, uint8_t* scratch);
};
constexpr int64_t kBfloatTileRows = 128, kBfloatDepth = 512;
constexpr int64_t bfloat16_scratch(int64_t m) { return kBfloatTileRows * (2 * kBfloatDepth + 4 * m); }

extern const Bfloat16Matmul kBfloat16Matmul, kBfloat16MatmulEmulated, kBfloat16MatmulSkipped;

}  // namespace qtensor
