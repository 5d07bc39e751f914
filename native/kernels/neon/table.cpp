// Kernels for AArch64 with the dot product instructions (Armv8.2 dotprod); compiled a second time with i8mm (matrix
// products of bytes), as the family "neon_i8mm".
#include "batch_lanes.h"
#include "batch_lanes_32.h"
#include "integer_kernels.h"
#include "kernel_table.h"
#include "kernels/portable/byte_attention.h"
#include "kernels/portable/slabs.h"
#include "kernels/portable/table_entries.h"
#include "sub_blocks.h"
#include "unpacked_matmul.h"

#if !defined(__ARM_FEATURE_DOTPROD)
#error "compile this with dotprod: -march=armv8.2-a+dotprod"
#endif

namespace qtensor {
namespace {

void attention_bytes(const ByteAttentionTask& t) { attend_bytes(t, read_tile); }

template <class Quant>
constexpr Tiles kTiles256{matmul_batch_lanes<BatchLanes, RowsOf<Quant>>, &kPacked<BatchLanes>};

Tiles tiles(Format format, int64_t m) {
  if (m < kTilesFromM) return {};
  switch (format) {
    case Format::Q4_K:
      return kTiles256<Q4_KNeon>;
    case Format::Q5_K:
      return kTiles256<Q5_KNeon>;
    case Format::Q6_K:
      return kTiles256<Q6_KNeon>;
    default:
      return tiles_32(format);
  }
}

Slabs slabs(Format format, int64_t) {
  return with_packing(
      format, []<class Block>(Block) -> Slabs { return {matmul_slabs<Block>, &kSlabPacking<BatchBlock<Block>>}; },
      [] { return Slabs(); });
}

constexpr KernelTable entries(const char* name) {
  KernelTable t = table_entries(name, tiles, tile_scratch_bytes);
  t.slabs = slabs;
  t.packs_by_default = true;  // by instructions, not timed
  return t;
}

}  // namespace

#if defined(__ARM_FEATURE_MATMUL_INT8)
constinit const KernelTable kNeonI8mmKernels = entries("neon_i8mm");
#else
constinit const KernelTable kNeonKernels = entries("neon");
#endif

}  // namespace qtensor
