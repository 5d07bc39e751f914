// The layout of weights on the device. Blocks whose loads are aligned keep the layout of the file. Others are split:
// first all blocks of a row without d and m, then d and m of all blocks, so that all loads are aligned.
#pragma once

#include <cstdint>

#include "blocks.h"

namespace qtensor {
namespace cuda {

struct BlockLayout {
  int values, levels, levels_at, scales, scales_at;  // of a block: values; bytes, and their offsets in the file
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
    case Format::Q5_0:
      return {32, 20, 2, 2, 0};
    case Format::Q5_1:
      return {32, 20, 4, 4, 0};
    case Format::IQ4_NL:
      return {32, 16, 2, 2, 0};
    case Format::MXFP4:
      return {32, 16, 1, 1, 0};
    case Format::Q2_K:
      return {256, 84, 0, 0, 0};
    case Format::Q3_K:
      return {256, 108, 0, 2, 108};
    case Format::IQ4_XS:
      return {256, 136, 0, 0, 0};
    case Format::IQ2_XXS:
      return {256, 64, 2, 2, 0};
    case Format::IQ2_XS:
      return {256, 72, 2, 2, 0};
    case Format::IQ2_S:
      return {256, 80, 2, 2, 0};
    case Format::IQ3_XXS:
      return {256, 96, 2, 2, 0};
    case Format::IQ3_S:
      return {256, 108, 2, 2, 0};
    case Format::IQ1_S:
      return {256, 48, 2, 2, 0};
    case Format::IQ1_M:
      return {256, 56, 0, 0, 0};
    case Format::TQ1_0:
      return {256, 52, 0, 2, 52};
    case Format::TQ2_0:
      return {256, 64, 0, 2, 64};
    case Format::F32:
      return {1, 4, 0, 0, 0};
    default:  // F16, BF16
      return {1, 2, 0, 0, 0};
  }
}
// Bytes per row. Loads of a super-block's scales, up to 32 bytes, may extend beyond the last block.
static constexpr int64_t laid_row_bytes(Format f, int64_t k) {
  const BlockLayout b = layout_of(f);
  const int64_t bytes = k / b.values * (b.levels + b.scales);
  return b.scales == 0 ? bytes : (bytes + 31) / 32 * 32;
}

}  // namespace cuda
}  // namespace qtensor
