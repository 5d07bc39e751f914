// Kernels for AVX2 with FMA and F16C.
#include "batch_lanes.h"
#include "batch_lanes_32.h"
#include "integer_kernels.h"
#include "kernel_table.h"
#include "kernels/portable/byte_attention.h"
#include "kernels/portable/tile_entries.h"
#include "kernels/x86/matmul.h"
#include "kernels/x86/slabs.h"
#include "kernels/x86/unpacked_matmul.h"
#include "unpacked_lanes.h"

namespace qtensor {
namespace {

void matmul_q4_k(const MatmulTask& t) { matmul_k_quant<Q4_K256>(t); }
void matmul_q5_k(const MatmulTask& t) { matmul_k_quant<Q5_K256>(t); }
void matmul_q6_k(const MatmulTask& t) { matmul_k_quant<Q6_K256>(t); }
void attention_bytes(const ByteAttentionTask& t) { attend_bytes(t, read_tile); }

SlabKernel slab_kernel(Format format) {
  return with_packing(
      format, []<class Block>(Block) -> SlabKernel { return matmul_slabs<Block>; }, [] { return SlabKernel(nullptr); });
}

constexpr KernelTable avx2_entries() {
  KernelTable t = tile_entries("avx2", from_m<6>, 64);
  t.slab_kernel = slab_kernel;
  t.slab_block_bytes = sizeof(SlabBatchBlock);
  t.pack_slab_batch_row = pack_slab_batch_row;
  t.pack_slab_batch_row_32 = pack_slab_batch_row_32;
  return t;
}

}  // namespace

constinit const KernelTable kAvx2Kernels = avx2_entries();

}  // namespace qtensor
