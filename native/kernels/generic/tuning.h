// Numbers of vectors and queries that this family processes together.
#pragma once

namespace qtensor {
namespace {

// For attention over halves: vectors of scores and of values, and queries that share them.
constexpr int kScoreLanes = 2, kValueLanes = 2, kQueryGroup = 4;

}  // namespace
}  // namespace qtensor
