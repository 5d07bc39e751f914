// Products in tiles: the entries of the kernel table.
#pragma once

#include <cstdint>

#include "kernel_table.h"
#include "kernels/avx512/batch_lanes.h"
#include "kernels/avx512/row_lanes.h"
#include "kernels/avx512/unscaled_lanes.h"
#include "kernels/portable/batch_lanes.h"

namespace qtensor {
namespace {

int64_t packed_bytes(int64_t blocks, int64_t m) { return lane_batch_bytes(blocks, m); }
void pack_block(const PackTask& t, int64_t tile, int64_t block) {
  if (t.for_mins) pack_lane_batch<LanesWithMins>(t, tile, block);
  if (t.for_signed) pack_lane_batch<LanesQ6_K>(t, tile, block);
}
int64_t tile_scratch_bytes(int64_t m) {
  const int64_t rows = row_lanes_scratch(m), batch = lanes_scratch_bytes<RowBlocks>(m);
  return rows > batch ? rows : batch;
}
void matmul_tiles_q4_k(const TileTask& t) { matmul_row_lanes<LanesQ4_K>(t); }
void matmul_tiles_q5_k(const TileTask& t) { matmul_row_lanes<LanesQ5_K>(t); }
void matmul_tiles_q6_k(const TileTask& t) { matmul_row_lanes<LanesQ6_K>(t); }

}  // namespace
}  // namespace qtensor
