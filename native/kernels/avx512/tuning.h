// How much this family takes together, and how it asks for memory.
#pragma once

#include <cstdint>

#include "blocks.h"

namespace qtensor {
namespace {

// Of attention over halves: vectors of scores and of values, and queries that share them.
constexpr int kScoreLanes = 4, kValueLanes = 4, kQueryGroup = 4;
// Of products of small M: batch rows that share an unpacked row.
constexpr int kBatchGroup = 4;
// Weights in rows are not packed while they are multiplied: the row kernels and tiles were faster.
constexpr bool kPacksRows = false;
// See AheadInOrder.
inline bool touches_farther() { return __builtin_cpu_is("intel"); }

// From which M on tiles are faster than rows by four. Measured on AMD; on Intel's processors rows by four are read in
// four places (see reads_quarters), which was.
inline int64_t tiles_from_m(Format f) { return f == Format::Q4_K && !__builtin_cpu_is("intel") ? 3 : 5; }

// Up to so many batch rows Zen 4 reads packed weights faster if nothing is asked for: its own prefetcher follows one
// stream, and stops at requests. Zen 5 was faster with them.
inline int64_t in_order_up_to_m() { return __builtin_cpu_is("amdfam19h") ? 2 : 0; }

}  // namespace
}  // namespace qtensor
