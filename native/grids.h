// The grids of the IQ formats, expanded once for all families.
#pragma once

#include <cstdint>

namespace qtensor {

struct Grids {
  uint64_t iq2_xxs[256], iq2_xs[512], iq2_s[1024];  // rows of eight bytes
  uint64_t iq1[2048];                               // eight times the values: -8, 0 or 8
  uint32_t iq3_xxs[256], iq3_s[512];                // rows of four bytes
  uint64_t signs[256];                              // each bit of a byte of signs as a byte, 0 or 255, lowest bit first
  uint8_t even_signs[128];  // seven sign bits and their parity, because an even number of values is negative
};
extern const Grids kGrids;

}  // namespace qtensor
