// How weights lie on the device. Blocks whose bytes begin at multiples of 16 lie as in the file; the others are laid
// apart: first the levels of all blocks of a row, then their scales, so that every load is aligned.
#pragma once

#include <cstdint>
#include <cstring>

#include "blocks.h"

namespace qtensor {
namespace cuda {

struct BlockLayout {
  int values, levels, levels_at, scales, scales_at;  // of a block: values; bytes and where they begin in the file
};
static constexpr BlockLayout layout_of(Format f) {
  switch (f) {
    case Format::Q4_K:
      return {256, 144, 0, 0, 0};
    case Format::Q5_K:
      return {256, 176, 0, 0, 0};
    case Format::Q6_K:
      return {256, 208, 0, 2, 208};
    case Format::Q8_0:
      return {32, 32, 2, 2, 0};
    case Format::Q4_0:
      return {32, 16, 2, 2, 0};
    case Format::Q4_1:
      return {32, 16, 4, 4, 0};
    case Format::F32:
      return {1, 4, 0, 0, 0};
    default:  // F16, BF16
      return {1, 2, 0, 0, 0};
  }
}
// Bytes from row to row. A super-block's scales, up to 32 bytes, may be read beyond the last block.
static constexpr int64_t laid_row_bytes(Format f, int64_t k) {
  const BlockLayout b = layout_of(f);
  const int64_t bytes = k / b.values * (b.levels + b.scales);
  return b.scales == 0 ? bytes : (bytes + 31) / 32 * 32;
}

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
