// How much this family takes together, and how it asks for memory.
#pragma once

#include <cstdint>

namespace qtensor {
namespace {

// Of attention over halves: vectors of scores and of values, and queries that share them.
constexpr int kScoreLanes = 4, kValueLanes = 4, kQueryGroup = 4;
// Of products of small M: batch rows that share an unpacked row.
constexpr int kBatchGroup = 4;
// From which M on tiles are faster than rows.
constexpr int64_t kTilesFromM = 4;
// See AheadInOrder.
inline bool touches_farther() { return false; }

}  // namespace
}  // namespace qtensor
