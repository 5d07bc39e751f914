// Products of K-quant weights and 8-bit activations in tiles: the entries of the kernel table.
#pragma once

#include <cstdint>

#include "kernel_table.h"
#include "kernels/amx/activations_as_a.h"
#include "kernels/amx/large_m.h"
#include "kernels/amx/small_m.h"
#include "kernels/avx512/integer_kernels.h"
#include "kernels/portable/batch_lanes.h"

namespace qtensor {
namespace {

int64_t packed_bytes(int64_t blocks, int64_t m) {
  if (m > kMostMAsA) return packed_b_bytes(blocks, m);
  return a_begin(blocks, m) + packed_a_bytes(blocks, m);
}
void pack_block(const PackTask& t, int64_t tile, int64_t block) {
  if (t.for_signed || t.m > kMostMAsA) pack_b(t, tile, block);
  if (t.for_mins && t.m <= kMostMAsA) pack_a(t, tile, block);
}
int64_t tile_scratch_bytes(int64_t m) {
  constexpr int64_t as_a = sizeof(AsAScratch), small_m_bytes = sizeof(SmallMScratch);
  const int64_t large_m_bytes = int64_t(sizeof(LargeMScratch)) + (m + 31) / 32 * kNTileTiles * 512 * 4;
  const int64_t with_mins = m <= kMostMAsA ? as_a : large_m_bytes,
                without = m <= kMostSmallM ? small_m_bytes : large_m_bytes;
  const int64_t most = with_mins > without ? with_mins : without, lanes = lanes_scratch_bytes<RowBlocks>(m);
  return most > lanes ? most : lanes;
}
void matmul_tiles_q6_k(const TileTask& t) {
  if (t.row_begin >= t.row_end) return;
  if (t.m <= kMostSmallM)
    small_m<SignedPlanes>(t);
  else
    large_m<SignedPlanes>(t);
}

}  // namespace
}  // namespace qtensor
