// Numbers of rows that this family processes together, and how it prefetches.
#pragma once

#include <cstdint>

#include "blocks.h"

namespace qtensor {
namespace {

// For attention over halves: vectors of scores and of values, and queries that share them.
constexpr int kScoreLanes = 4, kValueLanes = 4, kQueryGroup = 4;
// For products of small M: batch rows that share an unpacked row.
constexpr int kBatchGroup = 4;
// Weights in rows are not packed while they are multiplied: the row kernels and tiles were faster.
constexpr bool kPacksRows = false, kKeepsRows = false;
// See AheadInOrder.
inline bool touches_farther() { return __builtin_cpu_is("intel"); }

// The smallest M for which tiles are faster than four rows together. The limit of 3 was measured on AMD. On Intel, four
// rows are read in four places (see reads_quarters), and the two were not compared.
inline int64_t tiles_from_m(Format f) { return f == Format::Q4_K && !__builtin_cpu_is("intel") ? 3 : 5; }

// Up to this M, Zen 4 reads packed weights faster without software prefetch, because its hardware prefetcher follows
// one stream and stops at software prefetches. Zen 5 was faster with them.
inline int64_t in_order_up_to_m() { return __builtin_cpu_is("amdfam19h") ? 2 : 0; }

// Up to this many passes over a block of packed weights, each pass unpacks the values itself; otherwise, the first one
// stores them for the others. On Zen 4, stores take longer than a short unpacking. Beyond 64 batch rows, both are
// equal.
inline int64_t most_unpacking(bool is_short) { return is_short && __builtin_cpu_is("amdfam19h") ? 16 : 2; }

}  // namespace
}  // namespace qtensor
