// Kernels for AVX2 with FMA and F16C; compiled a second time with AVX-VNNI.
#include "batch_lanes.h"
#include "integer_kernels.h"
#include "kernel_table.h"
#include "kernels/portable/byte_attention.h"
#include "kernels/portable/slabs.h"
#include "kernels/portable/table_entries.h"
#include "kernels/x86/matmul.h"
#include "kernels/x86/sub_blocks.h"
#include "kernels/x86/unpacked_matmul.h"
#include "pack_rows.h"
#include "unpacked_formats.h"

namespace qtensor {
namespace {

void matmul_q4_k(const MatmulTask& t) { matmul_k_quant<Q4_K256>(t); }
void matmul_q5_k(const MatmulTask& t) { matmul_k_quant<Q5_K256>(t); }
void matmul_q6_k(const MatmulTask& t) { matmul_k_quant<Q6_K256>(t); }
void attention_bytes(const ByteAttentionTask& t) { attend_bytes(t, read_tile); }

// For rows whose length is not a multiple of 256; other rows are packed while they are multiplied.
MatmulKernel kernel_32(Format format) {
  return with_format_32(
      format, []<class F>(F) -> MatmulKernel { return matmul_sub_blocks<typename F::Block>; },
      [] { return MatmulKernel(nullptr); });
}

int64_t tile_scratch_bytes(int64_t m) { return lanes_scratch_bytes<RowBlocks>(m); }
template <class Rows>
constexpr Tiles kTiles256{matmul_batch_lanes<BatchLanes256, Rows>, &kPacked<BatchLanes256>};
template <class Block>
using GroupRows = RowsOfGroups<Quant256<Block>, Quant256<Block>::largest>;

Tiles tiles(Format format, int64_t m) {
  if (m < kTilesFromM) return {};
  switch (format) {
    case Format::Q4_K:
      return kTiles256<RowsWithMins<Q4_K256, 15>>;
    case Format::Q5_K:
      return kTiles256<RowsWithMins<Q5_K256, 31>>;
    case Format::Q6_K:
      return kTiles256<RowsOfGroups<Q6_K256, 63>>;
    case Format::Q2_K:
      return kTiles256<GroupRows<BlockQ2_K>>;
    case Format::Q3_K:
      return kTiles256<GroupRows<BlockQ3_K>>;
    default:
      return {};
  }
}

template <class Block>
constexpr Slabs kSlabs{matmul_slabs<Block>, &kSlabPacking<BatchBlock<Block>>};
Slabs slabs(Format format, int64_t) {
  return with_packing(format, []<class Block>(Block) { return kSlabs<Block>; }, [] { return Slabs(); });
}
// Other formats and sizes are faster with other kernels: few batch rows with four rows together, many batch rows with
// tiles (Q4_K and Q5_K; with dword sums, also Q6_K).
Slabs slabs_of_rows(Format format, int64_t m) {
  if (format == Format::MXFP4) return kSlabs<BlockMXFP4>;
  const bool from_few = format == Format::IQ4_XS || (format == Format::Q6_K && !kDwordSums);
  return has_blocks_of_32(format) || (from_few && m >= kTilesFromM) ? slabs(format, m) : Slabs();
}

constexpr KernelTable entries(const char* name) {
  KernelTable t = table_entries(name, tiles, tile_scratch_bytes);
  t.slabs = slabs;
  t.slabs_of_rows = slabs_of_rows;
  t.packs_by_default = true;
  return t;
}

}  // namespace

#if defined(__AVXVNNI__)
constinit const KernelTable kAvxVnniKernels = entries("avxvnni");
#else
constinit const KernelTable kAvx2Kernels = entries("avx2");
#endif

}  // namespace qtensor
