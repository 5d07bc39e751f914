// The grids of the IQ formats, spread out when this is compiled.
#include "grids.h"

#include <cstddef>

#include "kernels/portable/grid_codes.h"

namespace qtensor {
namespace {

struct Levels {
  int value[8];
};

// Codes of `bits` bits each become the bytes of a row.
template <class Row, size_t N>
constexpr void spread(const uint16_t (&codes)[N], int bits, const Levels& levels, Row (&rows)[N]) {
  for (size_t i = 0; i < N; i++) {
    rows[i] = 0;
    for (size_t k = 0; k < sizeof(Row); k++) {
      const size_t code = size_t(codes[i]) >> (size_t(bits) * k) & ((size_t(1) << bits) - 1);
      rows[i] |= Row(uint8_t(levels.value[code])) << (8 * k);
    }
  }
}

constexpr Grids spread_grids() {
  constexpr Levels two = {{8, 25, 43}}, one = {{-8, 0, 8}};
  Grids grids{};
  spread(kCodesIQ2_XXS, 2, two, grids.iq2_xxs);
  spread(kCodesIQ2_XS, 2, two, grids.iq2_xs);
  spread(kCodesIQ2_S, 2, two, grids.iq2_s);
  spread(kCodesIQ1_S, 2, one, grids.iq1);
  spread(kCodesIQ3_XXS, 4, {{4, 12, 20, 28, 36, 44, 52, 62}}, grids.iq3_xxs);
  spread(kCodesIQ3_S, 4, {{1, 3, 5, 7, 9, 11, 13, 15}}, grids.iq3_s);
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
