// The table of a family with tiles, whose kernels are named alike as well.
#pragma once

#include <cstdint>

#include "kernel_table.h"
#include "kernels/portable/table_entries.h"

namespace qtensor {
namespace {

int64_t packed_bytes(int64_t blocks, int64_t m);
int64_t tile_scratch_bytes(int64_t m);
void pack_block(const PackTask& t, int64_t tile, int64_t block);
void matmul_tiles_q4_k(const TileTask& t);
void matmul_tiles_q5_k(const TileTask& t);
void matmul_tiles_q6_k(const TileTask& t);
TileKernel tile_kernel_256(Format format);
int64_t packed_bytes_32(int64_t blocks, int64_t m);
void pack_block_32(const PackTask& t, int64_t tile, int64_t block);
TileKernel tile_kernel_32(Format format);

template <int64_t M>
int64_t from_m(Format) {
  return M;
}

constexpr KernelTable tile_entries(const char* name, int64_t (*tiles_from_m)(Format), int64_t tile_rows,
                                   int64_t attention_tile_rows = 0) {
  KernelTable t = table_entries(name);
  t.attention_tile_rows = attention_tile_rows;
  t.tiles_from_m = tiles_from_m;
  t.tile_rows = tile_rows;
  t.packed_bytes = packed_bytes;
  t.tile_scratch_bytes = tile_scratch_bytes;
  t.pack_block = pack_block;
  t.matmul_tiles_q4_k = matmul_tiles_q4_k;
  t.matmul_tiles_q5_k = matmul_tiles_q5_k;
  t.matmul_tiles_q6_k = matmul_tiles_q6_k;
  t.tile_kernel_256 = tile_kernel_256;
  t.packed_bytes_32 = packed_bytes_32;
  t.pack_block_32 = pack_block_32;
  t.tile_kernel_32 = tile_kernel_32;
  return t;
}

}  // namespace
}  // namespace qtensor
