// Products of packed weights: the loops over slabs, blocks, and passes of batch rows. Measurements:
// docs/kernels/packed.md. The instruction set's slab_pass.h defines
// - kSlabLanes, the number of rows whose header is loaded at a time;
// - kBatchStep: every pass except the last has a multiple of this number of batch rows;
// - SlabPairs<Block>, with the type of a batch row's block;
// - slab_batch_rows<Block, M, Source>, which multiplies M batch rows with one group of 32 rows of a block.
#pragma once

#include <cstdint>

#include "kernel_table.h"
#include "kernels/portable/always_inline.h"
#include "slab_pass.h"
#include "slab_pass_32.h"
#include "tuning.h"

namespace qtensor {
namespace {

constexpr int kBlocksAhead = 2;

template <class Block>
using BatchBlock = typename SlabPairs<Block>::Batch;

// Not inlined, because gcc 12 would otherwise keep sums in memory.
template <class Block, Source SOURCE, int M>
__attribute__((noinline)) void slab_pass(SlabPass<Block>& t, const BatchBlock<Block>* x, float* acc) {
  slab_batch_rows<Block, M, SOURCE>(t, x, acc);
}
template <class Block, Source SOURCE, int M>
QTENSOR_INLINE void pass_of(int64_t count, SlabPass<Block>& t, const BatchBlock<Block>* x, float* acc) {
  if constexpr (M > 1)
    if (count < M) return pass_of<Block, SOURCE, M - 1>(count, t, x, acc);
  slab_pass<Block, SOURCE, M>(t, x, acc);
}

// Loads a group's header. Called immediately before the group's values are loaded, so that memory is read in order.
template <class Block, bool IN_ORDER>
QTENSOR_INLINE void begin_group(SlabPass<Block, IN_ORDER>& pass, const uint8_t* group) {
  for (int part = 0; part < kSlabParts; part++) {
    const int64_t first = kSlabLanes * part;
    pass.lines[part] = {group + Packing<Block>::lines_at + 4 * first, group + 2 * first};
    SlabPairs<Block>::header(pass.lines[part], pass.header[part]);
  }
}

// For processors whose hardware prefetcher is faster alone: no software prefetch, and all lines are read in order.
// There is only one loop, because gcc 12 would duplicate an inner loop, and the code would exceed the L1 instruction
// cache.
template <class Block, int M>
__attribute__((noinline)) void one_slab_in_order(const SlabTask& t, const uint8_t* slab, int64_t groups) {
  const auto* x = reinterpret_cast<const BatchBlock<Block>*>(t.x);
  SlabPass<Block, true> pass;
  int64_t g = 0;
#pragma GCC unroll 1
  for (int64_t left = t.blocks * groups; left > 0; left--, slab += Packing<Block>::packed_bytes) {
    begin_group(pass, slab);
    slab_batch_rows<Block, M, Source::unpacked>(pass, x, t.sums + kGroupRows * g);
    if (++g < groups) continue;
    g = 0;
    x += M;
  }
}

// Rows that are multiplied together. With weights in rows and few batch rows, 64 rows would be too many places to read.
inline int64_t rows_at_once(const SlabTask& t) { return t.row_bytes > 0 && t.m <= 16 ? kGroupRows : kSlabRows; }

// Batch rows are distributed evenly over passes, and each pass prefetches its share of a later block. With weights in
// rows, the rows after these are prefetched in the order of memory: one half while these are packed or unpacked, the
// other half here.
template <class Block, bool FROM_ROWS>
void one_slab(const SlabTask& t, const uint8_t* slab, int64_t rows) {
  using P = SlabPairs<Block>;
  constexpr int64_t kBytes = Packing<Block>::packed_bytes, kFileBytes = kGroupRows * Packing<Block>::bytes;
  constexpr int64_t kLines = kBytes / 64 / (FROM_ROWS ? 2 : 1);
  static_assert(!FROM_ROWS || kSlabRows / kGroupRows * kBytes <= kPackedScratchBytes);
  const int64_t groups = groups_of(rows);
  SlabPass<Block> each[kSlabRows / kGroupRows];
  const int64_t m = t.m, passes = (m + kMostAtOnce - 1) / kMostAtOnce;
  const int64_t asked = (kLines + passes * P::pairs - 1) / (passes * P::pairs);
  const bool unpacks = passes <= most_unpacking<P>();
  const auto* x = reinterpret_cast<const BatchBlock<Block>*>(t.x);
  for (int64_t b = 0; b < t.blocks; b++, x += m) {
    int64_t begin = 0;
    for (int64_t left = passes; left > 0; left--) {
      int64_t count = (m - begin + left - 1) / left;
      if (left > 1) count += count % kBatchStep;
      for (int64_t g = 0; g < groups; g++) {
        SlabPass<Block>& pass = each[g];
        if (left == passes) {
          pass.asked = m > kMostAsking ? 0 : asked;
          if constexpr (FROM_ROWS) {
            const uint8_t* const later = slab + rows * t.row_bytes + (b * groups + g) * kFileBytes;
            const int64_t first = kGroupRows * g;
            const uint8_t* const from = slab + first * t.row_bytes + b * Packing<Block>::bytes;
            if constexpr (kKeepsRows) {
              keep_rows<Block>(pass, from, rows - first, t.row_bytes, later);
            } else {
              uint8_t* const packed = t.packed + g * kBytes;
              pack_group<Block>(t, from, rows - first, later, packed);
              begin_group(pass, packed);
            }
            pass.later = later + kFileBytes / 2;
          } else {
            begin_group(pass, slab);
            pass.later = slab + kBlocksAhead * kBytes;
            slab += kBytes;
          }
        }
        float* const sums = t.sums + kSlabRows * begin + kGroupRows * g;
        if ((passes - left) * asked * P::pairs >= kLines) pass.asked = 0;
        if constexpr (FROM_ROWS && kKeepsRows)
          pass_of<Block, Source::kept, kMostAtOnce>(count, pass, x + begin, sums);
        else if (unpacks)
          pass_of<Block, Source::unpacked, kMostAtOnce>(count, pass, x + begin, sums);
        else if (left == passes)
          pass_of<Block, Source::unpacked_and_kept, kMostAtOnce>(count, pass, x + begin, sums);
        else
          pass_of<Block, Source::kept, kMostAtOnce>(count, pass, x + begin, sums);
        pass.later += 64 * pass.asked * P::pairs;
      }
      begin += count;
    }
  }
}

template <class Block>
void matmul_slabs(const SlabTask& t) {
  const uint8_t* slab = t.weight;
  const int64_t in_order = in_order_up_to_m(), most = rows_at_once(t);
  const int64_t stride = t.row_bytes > 0 ? most * t.row_bytes : t.slab_stride;
  for (int64_t row = 0; row < t.rows; row += most, slab += stride) {
    const int64_t rows = t.rows - row < most ? t.rows - row : most;
    // [batch row][rows]: with the opposite order, a stride prefetcher probably fetched lines of another thread's sums.
    __builtin_memset(t.sums, 0, size_t(kSlabRows * t.m) * sizeof(float));
    if constexpr (!Packing<Block>::exists)
      one_slab<Block, true>(t, slab, rows);
    else if (kPacksRows && t.row_bytes > 0)
      one_slab<Block, kPacksRows>(t, slab, rows);
    else if (t.m == 1 && in_order >= 1)
      one_slab_in_order<Block, 1>(t, slab, groups_of(rows));
    else if (t.m == 2 && in_order >= 2)
      one_slab_in_order<Block, 2>(t, slab, groups_of(rows));
    else
      one_slab<Block, false>(t, slab, rows);
    for (int64_t j = 0; j < t.m; j++)
      __builtin_memcpy(t.y + j * t.y_stride + row, t.sums + kSlabRows * j, size_t(rows) * sizeof(float));
  }
}

}  // namespace
}  // namespace qtensor
