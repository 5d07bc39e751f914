// Numbers of rows that this family processes together, and how it prefetches.
#pragma once

#include <cstdint>

namespace qtensor {
namespace {

// For attention over halves: vectors of scores and of values, and queries that share them.
constexpr int kScoreLanes = 2, kValueLanes = 2, kQueryGroup = 2;
// For products of small M: batch rows that share an unpacked row.
constexpr int kBatchGroup = 4;
// The smallest M for which tiles are faster than rows.
constexpr int64_t kTilesFromM = 6;
// The packed kernels also multiply weights in rows, packing one block of 32 rows at a time.
constexpr bool kPacksRows = true, kKeepsRows = false;
// See AheadInOrder.
inline bool touches_farther() { return __builtin_cpu_is("intel"); }

// As in AVX-512: up to this M, Zen 4 reads packed weights in the order of memory, without prefetch. Zen 3, which is of
// the same processor family but has no AVX-512, is up to 1.2 times as fast with prefetch.
inline int64_t in_order_up_to_m() { return __builtin_cpu_is("amdfam19h") && __builtin_cpu_supports("avx512f") ? 2 : 0; }

}  // namespace
}  // namespace qtensor
