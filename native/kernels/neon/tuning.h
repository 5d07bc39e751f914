// How much this family takes together, and how it asks for memory. Nothing of it has been timed yet.
#pragma once

#include <cstdint>

namespace qtensor {
namespace {

// Of attention over halves: vectors of scores and of values, and queries that share them.
constexpr int kScoreLanes = 2, kValueLanes = 2, kQueryGroup = 2;
// From which M on tiles are faster than rows.
constexpr int64_t kTilesFromM = 5;
// See AheadInOrder.
inline bool touches_farther() { return false; }

}  // namespace
}  // namespace qtensor
