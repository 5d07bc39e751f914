// How much this family takes together, and how it asks for memory.
#pragma once

#include <cstdint>

namespace qtensor {
namespace {

// Of attention over halves: vectors of scores and of values, and queries that share them.
constexpr int kScoreLanes = 2, kValueLanes = 2, kQueryGroup = 2;
// Of products of small M: batch rows that share an unpacked row.
constexpr int kBatchGroup = 4;
// From which M on tiles are faster than rows.
constexpr int64_t kTilesFromM = 6;
// The packed kernels also multiply weights in rows, packing one block of 32 rows at a time.
constexpr bool kPacksRows = true;
// See AheadInOrder.
inline bool touches_farther() { return __builtin_cpu_is("intel"); }

// As AVX-512's: so many batch rows take packed weights in the order of memory, and ask for nothing.
inline int64_t in_order_up_to_m() { return __builtin_cpu_is("amdfam19h") ? 2 : 0; }

}  // namespace
}  // namespace qtensor
