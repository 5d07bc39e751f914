// How much this family takes together.
#pragma once

namespace qtensor {
namespace {

// Of attention over halves: vectors of scores and of values, and queries that share them.
constexpr int kScoreLanes = 2, kValueLanes = 2, kQueryGroup = 4;

}  // namespace
}  // namespace qtensor
