// Kernels for AVX-512 with VNNI and VBMI, and AMX: tiles for many batch rows, the AVX-512 kernels for few.
#include "kernel_table.h"
#include "kernels/amx/tile_attention.h"
#include "kernels/amx/tile_matmul.h"
#include "kernels/avx512/batch_lanes_32.h"
#include "kernels/avx512/four_block_rows.h"
#include "kernels/avx512/integer_kernels.h"
#include "kernels/avx512/unscaled_lanes.h"
#include "kernels/portable/tile_entries.h"
#include "kernels/x86/matmul.h"
#include "kernels/x86/unpacked_matmul.h"

#ifndef QTENSOR_TABLE_NAME  // the emulation of tests/native has another
#define QTENSOR_TABLE_NAME "amx"
#endif

namespace qtensor {
namespace {

void matmul_q4_k(const MatmulTask& t) { matmul_k_quant<Q4_K512>(t); }
void matmul_q5_k(const MatmulTask& t) { matmul_k_quant<Q5_K512>(t); }
void matmul_q6_k(const MatmulTask& t) { matmul_k_quant<Q6_K512>(t); }

// What has no tiles of AMX has AVX-512's, for which batch rows are packed otherwise.
constexpr KernelTable amx_entries() {
  KernelTable t = tile_entries(QTENSOR_TABLE_NAME, from_m<4>, 16 * kNTileTiles, 32);
  t.packed_bytes_lanes = packed_bytes_lanes;
  t.pack_block_lanes = pack_block_lanes;
  return t;
}

}  // namespace

constinit const KernelTable kAmxKernels = amx_entries();

}  // namespace qtensor
