// Products of K-quant weights and 8-bit activations in tiles: the entries of the kernel table.
#pragma once

#include <cstdint>

#include "kernel_table.h"
#include "kernels/amx/few_columns.h"
#include "kernels/amx/left_columns.h"
#include "kernels/amx/many_columns.h"
#include "kernels/avx512/integer_kernels.h"

namespace qtensor {
namespace {

// The formats with mins.
template <class Planes, class Right>
inline void matmul_tiles(const TileTask& t) {
  if (t.row_begin >= t.row_end) return;
  if (t.columns <= kLeftColumns)
    left_columns<Right>(t);
  else
    many_columns<Planes>(t);
}
int64_t packed_bytes(int64_t blocks, int64_t columns) {
  if (columns > kLeftColumns) return packed_right_bytes(blocks, columns);
  return left_begin(blocks, columns) + packed_left_bytes(blocks, columns);
}
void pack_block(const PackTask& t, int64_t tile, int64_t block) {
  if (t.for_signed || t.columns > kLeftColumns) pack_right(t, tile, block);
  if (t.for_mins && t.columns <= kLeftColumns) pack_left(t, tile, block);
}
int64_t tile_scratch_bytes(int64_t columns) {
  constexpr int64_t left = sizeof(LeftScratch), few = sizeof(FewScratch);
  const int64_t many = int64_t(sizeof(ManyScratch)) + (columns + 31) / 32 * kPanelTiles * 512 * 4;
  const int64_t with_mins = columns <= kLeftColumns ? left : many, without = columns <= kFewColumns ? few : many;
  return with_mins > without ? with_mins : without;
}
void matmul_tiles_q4_k(const TileTask& t) { matmul_tiles<MinPlanes<Q4_K512>, RightMins<RightQ4_K>>(t); }
void matmul_tiles_q5_k(const TileTask& t) { matmul_tiles<MinPlanes<Q5_K512>, RightMins<RightQ5_K>>(t); }
void matmul_tiles_q6_k(const TileTask& t) {
  if (t.row_begin >= t.row_end) return;
  if (t.columns <= kFewColumns)
    few_columns<SignedPlanes>(t);
  else
    many_columns<SignedPlanes>(t);
}

}  // namespace
}  // namespace qtensor
