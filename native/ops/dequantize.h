// Quantized weights, and dequantization of their rows.
#pragma once

#include <cstdint>

#include "blocks.h"

namespace qtensor {

struct Weight {
  Format format;
  const uint8_t* data;
  int64_t rows, k;
  int64_t slab_stride = 0;  // bytes from slab to slab of a packed weight (packed_weights.h); 0: rows as in the file
};
int64_t bytes_per_row(Format format, int64_t k);

// Dequantizes the `k` values of a row.
void dequantize_row(Format format, const uint8_t* row, int64_t k, float* out);

}  // namespace qtensor
