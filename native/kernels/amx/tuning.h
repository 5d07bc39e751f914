// Numbers of rows that this family processes together, and how it prefetches.
#pragma once

#include <cstdint>

namespace qtensor {
namespace {

// For attention over halves: vectors of scores and of values, and queries that share them.
constexpr int kScoreLanes = 4, kValueLanes = 4, kQueryGroup = 4;
// For products of small M: batch rows that share an unpacked row.
constexpr int kBatchGroup = 4;
// The smallest M for which tiles are faster than rows.
constexpr int64_t kTilesFromM = 4;
// See AheadInOrder.
inline bool touches_farther() { return false; }

}  // namespace
}  // namespace qtensor
