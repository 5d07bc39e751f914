// Kernels for AVX-512 with VNNI (and BW, DQ, VL).
#include "batch_lanes_32.h"
#include "four_block_rows.h"
#include "integer_kernels.h"
#include "kernel_table.h"
#include "kernels/portable/byte_attention.h"
#include "kernels/portable/slabs.h"
#include "kernels/portable/table_entries.h"
#include "kernels/x86/matmul.h"
#include "kernels/x86/unpacked_matmul.h"
#include "row_lanes.h"
#include "tuning.h"
#include "unscaled_lanes.h"

namespace qtensor {
namespace {

void matmul_q4_k(const MatmulTask& t) { matmul_k_quant<Q4_K512>(t); }
void matmul_q5_k(const MatmulTask& t) { matmul_k_quant<Q5_K512>(t); }
void matmul_q6_k(const MatmulTask& t) { matmul_k_quant<Q6_K512>(t); }
void attention_bytes(const ByteAttentionTask& t) { attend_bytes(t, read_tile); }

template <class F>
constexpr TilePacking kPackedForLanes{lane_batch_bytes<F>, pack_lane_batch<F>};

Tiles tiles(Format format, int64_t m) {
  if (m < tiles_from_m(format)) return {};
  switch (format) {
    case Format::Q4_K:
      return {matmul_row_lanes<LanesQ4_K>, &kPackedForLanes<LanesWithMins>};
    case Format::Q5_K:
      return {matmul_row_lanes<LanesQ5_K>, &kPackedForLanes<LanesWithMins>};
    case Format::Q6_K:
      return {matmul_row_lanes<LanesQ6_K>, &kPackedForLanes<LanesQ6_K>};
    default:
      return has_blocks_of_32(format) ? tiles_32(format) : tiles_256(format);
  }
}
int64_t tile_scratch_bytes(int64_t m) {
  const int64_t rows = row_lanes_scratch(m), batch = lanes_scratch_bytes<RowBlocks>(m);
  return rows > batch ? rows : batch;
}

Slabs slabs(Format format, int64_t) {
  return with_packing(
      format, []<class Block>(Block) -> Slabs { return {matmul_slabs<Block>, &kSlabPacking<BatchBlock<Block>>}; },
      [] { return Slabs(); });
}

constexpr KernelTable avx512_entries() {
  KernelTable t = table_entries("avx512", tiles, tile_scratch_bytes);
  t.slabs = slabs;
  t.packs_by_default = true;
  return t;
}

}  // namespace

constinit const KernelTable kAvx512Kernels = avx512_entries();

}  // namespace qtensor
