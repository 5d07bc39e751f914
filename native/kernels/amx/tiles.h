// Configuration of the eight tiles, and barriers for a compiler that does not know which memory tile instructions read.
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

// Tiles 0 to 3 are sums of `rows` x 16. Tiles 4 and 5 have `rows` rows of `depth` bytes. Tiles 6 and 7 have the same
// depth, in groups of four with 16 columns. All tiles are zero afterwards. With a depth of 64 and 16 rows, all tiles
// have one shape and can be used for any purpose.
inline void configure_tiles(int depth = 64, int rows = 16) {
  // volatile, because gcc 12 assumes that ldtilecfg reads eight bytes and drops the other stores
  volatile TileConfig config;
  for (int i = 0; i < 8; i++) {
    const bool is_a = i == 4 || i == 5;
    config.row_bytes[i] = uint16_t(is_a ? depth : 64);
    config.rows[i] = uint8_t(i < 6 ? rows : depth / 4);
  }
  QTENSOR_LOAD_TILE_CONFIG(config);
}

// Ensures that earlier writes are in memory for the following tile loads, which read nothing according to gcc 12.
inline void before_tile_loads() { __asm__ volatile("" ::: "memory"); }

}  // namespace
}  // namespace qtensor
