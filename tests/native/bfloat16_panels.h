// The other way to multiply Q4_K by tiles, for comparison only: weights are dequantised to bfloat16, a panel at a time,
// and multiplied with bfloat16 activations, sums staying in float tiles. One rounding to 8 bits per weight and per
// activation, no exact integers, not the bits of the other kernels.
#pragma once

#include <cstdint>

namespace qtensor {

struct Bfloat16Panels {
  // k x columns floats, one column after another, to [k / 32][column tile][16 pairs][16 columns][2]; columns come in
  // multiples of 32, k in multiples of 256.
  void (*pack)(const float* x, int64_t k, int64_t columns, uint16_t* packed);
  // y[c][n], columns y_stride apart, for `rows` rows in multiples of 32. scratch: bfloat16_scratch(columns), aligned.
  void (*product)(const uint8_t* weight, int64_t rows, int64_t k, const uint16_t* packed, int64_t columns, float* y,
                  int64_t y_stride, uint8_t* scratch);
};
constexpr int64_t kBfloatPanelRows = 128, kBfloatDepth = 512;
constexpr int64_t bfloat16_scratch(int64_t columns) { return kBfloatPanelRows * (2 * kBfloatDepth + 4 * columns); }

extern const Bfloat16Panels kBfloat16Panels, kBfloat16PanelsEmulated, kBfloat16PanelsSkipped;

}  // namespace qtensor
