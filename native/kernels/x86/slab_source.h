// What the passes of packed weights (packed_weights.h) share: where pairs of groups lie, and where values come from.
//
// A block of a K-quant is taken in pairs of groups A and B of values that have a scale each, the two words of a row's
// dword. With mins (Q4_K and Q5_K) they are sub-blocks of 32 that follow one another.
#pragma once

#include <cstdint>

#include "packed_weights.h"

namespace qtensor {
namespace {

struct PairsWithMins {
  static constexpr int pairs = 4, fours = 8;
  static constexpr bool has_min = true;
  static constexpr int a(int pair, int four) { return 64 * pair + 4 * four; }  // of the activations
  static constexpr int b(int pair, int four) { return a(pair, four) + 32; }
};
// Of a register of rows of a packed block: parts of its lines, and of its half line. IN_ORDER: lines are loaded in the
// order in which the code names them, which is that of memory, whatever the compiler would rather do.
template <bool IN_ORDER>
struct Lines {
  const uint8_t *at, *halves;
};

// The first of several passes over a block keeps what it unpacks.
enum class Source { unpacked, unpacked_and_kept, kept };

}  // namespace
}  // namespace qtensor
