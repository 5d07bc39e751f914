// The layout of keys and values in the cache. A block holds 128 positions of every head. A head of a block is its keys,
// its values and, except for f16, a half-precision scale for each position's key and then for each position's value.
// Several blocks form a run: the first head of each block, then the second head of each, and so on. So attention, which
// reads one head of neighboring blocks, reads memory in order.
//
//   f16     keys [dim][128] and values [128][dim] as halves
//   8 bits  128 + q as a byte: keys [dim/4][128][4], values [128/4][dim][4]. The four values of a group are adjacent,
//           so that the lanes of a score are positions, the lanes of an output are dimensions, and no sum needs a
//           horizontal reduction
//   4 bits  the number of a level in a table of 16. Groups of four as above, two groups per byte: group 2i is the low
//           half of row i, group 2i+1 the high half
//   3 bits  a table of 8: the two lower bits first, four groups per byte (group 4i+j in bits 2j of row i), then the
//           upper bit, eight groups per byte (group 8i+j in bit j of row i)
//
// All formats except f16 are rotated before rounding (kernels/portable/head_vectors.h). A scale is never negative.
#pragma once

#include <cstdint>

namespace qtensor {

constexpr int64_t kTilePositions = 128;  // adjacent positions of the cache, which share one softmax step

enum class CacheFormat : int { f16, k8v8, k8v4, k4v4, k4v3 };
constexpr int kCacheFormats = 5;

// Functions are static, so that a copy compiled for one instruction set cannot be linked into the code of another.
static constexpr int key_bits(CacheFormat f) { return f == CacheFormat::f16 ? 16 : f <= CacheFormat::k8v4 ? 8 : 4; }
static constexpr int value_bits(CacheFormat f) {
  return f == CacheFormat::f16 ? 16 : f == CacheFormat::k8v8 ? 8 : f == CacheFormat::k4v3 ? 3 : 4;
}
static constexpr int64_t key_bytes(CacheFormat f, int64_t dim) { return kTilePositions * dim * key_bits(f) / 8; }
static constexpr int64_t value_bytes(CacheFormat f, int64_t dim) { return kTilePositions * dim * value_bits(f) / 8; }
static constexpr int64_t scales_at(CacheFormat f, int64_t dim) { return key_bytes(f, dim) + value_bytes(f, dim); }
static constexpr int64_t head_bytes(CacheFormat f, int64_t dim) {
  return scales_at(f, dim) + (f == CacheFormat::f16 ? 0 : 2 * 2 * kTilePositions);
}

}  // namespace qtensor
