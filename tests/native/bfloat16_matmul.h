// Another way to multiply Q4_K by tiles, for comparison only: weights are dequantized to bfloat16, an N tile at a time,
// and multiplied with bfloat16 activations, sums staying in float tiles. One rounding to 8 bits per weight and per
// activation, no exact integers, not the bits of the other kernels.
#pragma once

#include <cstdint>

namespace qtensor {

struct Bfloat16Matmul {
  // k x m floats, one batch row after another, to [k / 32][M tile][16 pairs][16 batch rows][2]; batch rows come in
  // multiples of 32, k in multiples of 256.
  void (*pack)(const float* x, int64_t k, int64_t m, uint16_t* packed);
  // y[j][n], with y_stride between batch rows, for `rows` rows in multiples of 32. scratch: bfloat16_scratch(m),
  // aligned.
  void (*product)(const uint8_t* weight, int64_t rows, int64_t k, const uint16_t* packed, int64_t m, float* y,
                  int64_t y_stride, uint8_t* scratch);
};
constexpr int64_t kBfloatTileRows = 128, kBfloatDepth = 512;
constexpr int64_t bfloat16_scratch(int64_t m) { return kBfloatTileRows * (2 * kBfloatDepth + 4 * m); }

extern const Bfloat16Matmul kBfloat16Matmul, kBfloat16MatmulEmulated, kBfloat16MatmulSkipped;

}  // namespace qtensor
