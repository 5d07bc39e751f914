// Four rows of one 256-block, unpacked for broadcasting to batch rows: see kernels/portable/batch_lanes.h.
#pragma once

#include <cstdint>

namespace qtensor {
namespace {

constexpr int kTileRows = 4;
struct alignas(64) RowBlocks {
  uint8_t q[kTileRows][256];
  int16_t pairs[2][kTileRows][8];  // mins of groups 0..7 and 8..15, or scales of sub-blocks
  int32_t scale[16][kTileRows];    // of sub-blocks or groups
  float d[kTileRows], dmin[kTileRows];
};

}  // namespace
}  // namespace qtensor
