// The peak rate of byte products with tiles (purpose: generic/byte_peak.h), with four accumulators, as in the kernels.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/amx/tiles.h"

namespace qtensor {
namespace {

constexpr int64_t kPeakProducts = 4 * 16 * 16 * 64;

inline int32_t byte_peak(const int8_t* random, int64_t rounds) {
  alignas(64) int32_t out[16][16];
  configure_tiles();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, random, 64);
  _tile_loadd(5, random + 1024, 64);
  _tile_loadd(6, random + 2048, 64);
  _tile_loadd(7, random + 3072, 64);
  for (int64_t r = 0; r < rounds; r++) {
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(1, 4, 7);
    _tile_dpbusd(2, 5, 6);
    _tile_dpbusd(3, 5, 7);
  }
  int32_t total = 0;
  const auto add = [&] {
    for (const auto& row : out) total = int32_t(uint32_t(total) + uint32_t(row[0]));
  };
  _tile_stored(0, out, 64);
  add();
  _tile_stored(1, out, 64);
  add();
  _tile_stored(2, out, 64);
  add();
  _tile_stored(3, out, 64);
  add();
  _tile_release();
  return total;
}

}  // namespace
}  // namespace qtensor
