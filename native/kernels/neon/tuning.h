// Numbers of rows that this family processes together, and how it prefetches. None of them is based on timings yet.
#pragma once

#include <cstdint>

namespace qtensor {
namespace {

// For attention over halves: vectors of scores and of values, and queries that share them.
constexpr int kScoreLanes = 2, kValueLanes = 2, kQueryGroup = 2;
// The smallest M for which tiles are used.
constexpr int64_t kTilesFromM = 5;
// See AheadInOrder.
inline bool touches_farther() { return false; }

}  // namespace
}  // namespace qtensor
