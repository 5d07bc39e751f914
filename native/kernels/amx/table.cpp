// Kernels for AMX: tiles for many batch rows and for attention over bytes. The rest of the family is AVX-512's, which
// would have the same instructions here and take as long to compile again: runtime/dispatch.cpp puts both together.
#pragma GCC diagnostic ignored "-Wunused-function"  // what shared headers hold for the rest

#include "kernel_table.h"
#include "kernels/amx/byte_peak.h"
#include "kernels/amx/tile_attention.h"
#include "kernels/amx/tile_matmul.h"
#include "kernels/avx512/batch_lanes_32.h"
#include "kernels/avx512/unscaled_lanes.h"

#ifndef QTENSOR_TABLE_NAME  // the emulation of tests/native has another
#define QTENSOR_TABLE_NAME "amx"
#endif

namespace qtensor {
namespace {

int64_t tiles_from_m(Format) { return 4; }
void matmul_tiles_q4_k(const TileTask& t) { kAmxKernelsWithMins.matmul_tiles_q4_k(t); }
void matmul_tiles_q5_k(const TileTask& t) { kAmxKernelsWithMins.matmul_tiles_q5_k(t); }

}  // namespace

// What has no tiles of AMX has AVX-512's, for which batch rows are packed otherwise; they ask for memory as AMX's do.
constinit const KernelTable kAmxKernels = {.name = QTENSOR_TABLE_NAME,
                                           .attention_bytes = attention_bytes,
                                           .byte_peak = byte_peak,
                                           .peak_products = kPeakProducts,
                                           .attention_tile_rows = 32,
                                           .tiles_from_m = tiles_from_m,
                                           .tile_rows = 16 * kNTileTiles,
                                           .packed_bytes = packed_bytes,
                                           .tile_scratch_bytes = tile_scratch_bytes,
                                           .pack_block = pack_block,
                                           .matmul_tiles_q4_k = matmul_tiles_q4_k,
                                           .matmul_tiles_q5_k = matmul_tiles_q5_k,
                                           .matmul_tiles_q6_k = matmul_tiles_q6_k,
                                           .packed_bytes_lanes = packed_bytes_lanes,
                                           .pack_block_lanes = pack_block_lanes,
                                           .tile_kernel_256 = tile_kernel_256,
                                           .packed_bytes_32 = packed_bytes_32,
                                           .pack_block_32 = pack_block_32,
                                           .tile_kernel_32 = tile_kernel_32};

}  // namespace qtensor
