// The grids of the IQ formats, expanded at compile time.
#include "grids.h"

#include <cstddef>

#include "kernels/portable/grid_codes.h"

namespace qtensor {
namespace {

// Expands codes of `bits` bits per value to the bytes of a row.
template <class Row, size_t N, size_t LEVELS>
constexpr void spread(const uint16_t (&codes)[N], int bits, const int8_t (&levels)[LEVELS], Row (&rows)[N]) {
  for (size_t i = 0; i < N; i++) {
    rows[i] = 0;
    for (size_t k = 0; k < sizeof(Row); k++) {
      const size_t code = size_t(codes[i]) >> (size_t(bits) * k) & ((size_t(1) << bits) - 1);
      rows[i] |= Row(uint8_t(levels[code])) << (8 * k);
    }
  }
}

constexpr Grids spread_grids() {
  Grids grids{};
  spread(kCodesIQ2_XXS, 2, kLevelsIQ2, grids.iq2_xxs);
  spread(kCodesIQ2_XS, 2, kLevelsIQ2, grids.iq2_xs);
  spread(kCodesIQ2_S, 2, kLevelsIQ2, grids.iq2_s);
  spread(kCodesIQ1_S, 2, kLevelsIQ1, grids.iq1);
  spread(kCodesIQ3_XXS, 4, kLevelsIQ3_XXS, grids.iq3_xxs);
  spread(kCodesIQ3_S, 4, kLevelsIQ3_S, grids.iq3_s);
  for (size_t i = 0; i < 256; i++)
    for (size_t k = 0; k < 8; k++)
      if (i >> k & 1) grids.signs[i] |= uint64_t(255) << (8 * k);
  for (size_t i = 0; i < 128; i++) {
    size_t parity = 0;
    for (size_t k = 0; k < 7; k++) parity ^= i >> k & 1;
    grids.even_signs[i] = uint8_t(i | parity << 7);
  }
  return grids;
}

}  // namespace

constinit const Grids kGrids = spread_grids();

}  // namespace qtensor
