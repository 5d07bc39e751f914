// Products in tiles: the entries of the kernel table.
#pragma once

#include <cstdint>

#include "kernel_table.h"
#include "kernels/avx512/batch_lanes.h"
#include "kernels/avx512/integer_kernels.h"
#include "kernels/avx512/row_blocks.h"
#include "kernels/avx512/unscaled_lanes.h"
#include "kernels/portable/batch_lanes.h"

namespace qtensor {
namespace {

int64_t packed_bytes(int64_t blocks, int64_t m) { return packed_bytes_lanes(blocks, m); }
void pack_block(const PackTask& t, int64_t tile, int64_t block) { pack_block_lanes(t, tile, block); }
int64_t tile_scratch_bytes(int64_t m) { return lanes_scratch_bytes<RowBlocks>(m); }
void matmul_tiles_q4_k(const TileTask& t) { matmul_batch_lanes<BatchLanes512, RowsWithMins<Q4_K512, 15>>(t); }
void matmul_tiles_q5_k(const TileTask& t) { matmul_batch_lanes<BatchLanes512, RowsWithMins<Q5_K512, 31>>(t); }
void matmul_tiles_q6_k(const TileTask& t) { matmul_batch_lanes<BatchLanes512, RowsWithOffset<Q6_K512, 63>>(t); }

}  // namespace
}  // namespace qtensor
