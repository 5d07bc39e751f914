// Shared by the passes of packed weights (packed_weights.h): the positions of pairs of groups, and sources of values.
//
// A block of a K-quant is processed in pairs of groups of values, A and B, with one scale each. Their sums are the two
// words of a row's dword. With mins (Q4_K and Q5_K), A and B are consecutive sub-blocks of 32.
#pragma once

#include <cstdint>

#include "kernels/portable/always_inline.h"
#include "packed_weights.h"

namespace qtensor {
namespace {

struct PairsWithMins {
  static constexpr int pairs = 4, fours = 8;
  static constexpr bool has_min = true;
  static constexpr int a(int pair, int four) { return 64 * pair + 4 * four; }  // position in the activations
  static constexpr int b(int pair, int four) { return a(pair, four) + 32; }
};
// The part of a packed block's lines and half lines that belongs to one register of rows. IN_ORDER: lines are loaded in
// the order of the source code, which is the order in memory; the compiler must not reorder the loads.
template <bool IN_ORDER>
struct Lines {
  const uint8_t *at, *halves;
};

// Where a pass gets values from. The first of several passes over a block stores unpacked values for the others.
enum class Source { unpacked, unpacked_and_kept, kept };

// Up to this many passes, each pass unpacks values itself. A family can choose for each processor (avx512/tuning.h).
template <class Pairs>
  requires requires { Pairs::most_unpacking; }
constexpr int64_t most_unpacking() {
  return Pairs::most_unpacking;
}

// Prefetches a pair's share of a later block: `asked` lines of 64 bytes.
template <template <class, bool> class Pass, class Block, bool IN_ORDER>
QTENSOR_INLINE void ask(const Pass<Block, IN_ORDER>& t, int pair) {
  if constexpr (!IN_ORDER)
#pragma GCC unroll 1
    for (int64_t i = 0; i < t.asked; i++) __builtin_prefetch(t.later + 64 * (t.asked * pair + i), 0, 2);
}

}  // namespace
}  // namespace qtensor
