// Kernels for AVX2 with FMA and F16C, and, compiled once more, with AVX-VNNI.
#include "batch_lanes.h"
#include "batch_lanes_32.h"
#include "integer_kernels.h"
#include "kernel_table.h"
#include "kernels/portable/byte_attention.h"
#include "kernels/portable/table_entries.h"
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

template <class Rows, class Lanes = BatchLanes256>
constexpr Tiles kTiles256{matmul_batch_lanes<Lanes, Rows>, &kPacked<BatchLanes256>};

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
    case Format::IQ4_XS:
      return kTiles256<LevelRows, LevelLanes256>;
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
