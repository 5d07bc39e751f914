// The eight tiles: their shapes, and what must be said to a compiler that does not know what tile instructions read.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace qtensor {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

#ifndef QTENSOR_LOAD_TILE_CONFIG  // the emulation of tests/native has its own
#define QTENSOR_LOAD_TILE_CONFIG(config) __asm__ volatile("ldtilecfg %0" ::"m"(config) : "memory")
#endif

// Tiles 0 to 3 are sums of `rows` x 16; 4 and 5 hold as many rows of `depth` bytes, 6 and 7 the same depth in groups of
// four with 16 columns. The tiles are zero afterwards. At a depth of 64 and with 16 rows all have one shape, and any
// may be anything.
inline void configure_tiles(int depth = 64, int rows = 16) {
  // volatile: gcc 12 believes ldtilecfg to read eight bytes and drops the other stores
  volatile TileConfig config;
  for (int i = 0; i < 8; i++) {
    const bool is_a = i == 4 || i == 5;
    config.row_bytes[i] = uint16_t(is_a ? depth : 64);
    config.rows[i] = uint8_t(i < 6 ? rows : depth / 4);
  }
  QTENSOR_LOAD_TILE_CONFIG(config);
}

// What was written before is in memory for the tile loads that follow: to gcc 12 those read nothing.
inline void before_tile_loads() { __asm__ volatile("" ::: "memory"); }

}  // namespace
}  // namespace qtensor
