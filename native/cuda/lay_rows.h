// Converts rows of a file to the layout of layout.h.
#pragma once

#include <cstring>

#include "cuda/layout.h"

namespace qtensor {
namespace cuda {

inline void lay_rows(Format f, const uint8_t* from, int64_t rows, int64_t k, uint8_t* to) {
  const BlockLayout b = layout_of(f);
  const int64_t blocks = k / b.values, row_bytes = laid_row_bytes(f, k), block_bytes = b.levels + b.scales;
  if (b.scales == 0) {
    std::memcpy(to, from, size_t(rows * row_bytes));
    return;
  }
  for (int64_t row = 0; row < rows; row++) {
    const uint8_t* const file = from + row * blocks * block_bytes;
    uint8_t* const laid = to + row * row_bytes;
    for (int64_t i = 0; i < blocks; i++) {
      std::memcpy(laid + i * b.levels, file + i * block_bytes + b.levels_at, size_t(b.levels));
      std::memcpy(laid + blocks * b.levels + i * b.scales, file + i * block_bytes + b.scales_at, size_t(b.scales));
    }
    std::memset(laid + blocks * block_bytes, 0, size_t(row_bytes - blocks * block_bytes));
  }
}

}  // namespace cuda
}  // namespace qtensor
