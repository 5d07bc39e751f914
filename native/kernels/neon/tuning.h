// Numbers of rows that this family processes together, and how it prefetches. None of them is based on timings yet.
#pragma once

#include <cstdint>

namespace qtensor {
namespace {

// For attention over halves: vectors of scores and of values, and queries that share them.
constexpr int kScoreLanes = 2, kValueLanes = 2, kQueryGroup = 2;
// The smallest M for which the packed kernels also multiply weights in rows. Such weights are not packed first, but
// unpacked to where packed values are kept.
constexpr int64_t kKeepsRowsFromM = 3;
constexpr bool kPacksRows = true, kKeepsRows = true;
// See AheadInOrder.
inline bool touches_farther() { return false; }
// Up to this M, packed weights are read without prefetch (0: never).
constexpr int64_t in_order_up_to_m() { return 0; }

}  // namespace
}  // namespace qtensor
