// Kernels for AVX-512 with VNNI (and BW, DQ, VL).
#include "batch_lanes_32.h"
#include "four_block_rows.h"
#include "integer_kernels.h"
#include "kernel_table.h"
#include "kernels/portable/byte_attention.h"
#include "kernels/portable/tile_entries.h"
#include "kernels/x86/matmul.h"
#include "kernels/x86/slabs.h"
#include "kernels/x86/unpacked_matmul.h"
#include "tile_matmul.h"
#include "tuning.h"

namespace qtensor {
namespace {

void matmul_q4_k(const MatmulTask& t) { matmul_k_quant<Q4_K512>(t); }
void matmul_q5_k(const MatmulTask& t) { matmul_k_quant<Q5_K512>(t); }
void matmul_q6_k(const MatmulTask& t) { matmul_k_quant<Q6_K512>(t); }
void attention_bytes(const ByteAttentionTask& t) { attend_bytes(t, read_tile); }

SlabKernel slab_kernel(Format format) {
  return with_packing(
      format, []<class Block>(Block) -> SlabKernel { return matmul_slabs<Block>; }, [] { return SlabKernel(nullptr); });
}

// The other formats have batch rows in the lanes, which are packed otherwise.
constexpr KernelTable avx512_entries() {
  KernelTable t = tile_entries("avx512", tiles_from_m, 64);
  t.packed_bytes_lanes = packed_bytes_lanes;
  t.pack_block_lanes = pack_block_lanes;
  t.slab_kernel = slab_kernel;
  t.slab_block_bytes = sizeof(SlabBatchBlock);
  t.pack_slab_batch_row = pack_slab_batch_row;
  t.pack_slab_batch_row_32 = pack_slab_batch_row_32;
  return t;
}

}  // namespace

constinit const KernelTable kAvx512Kernels = avx512_entries();

}  // namespace qtensor
