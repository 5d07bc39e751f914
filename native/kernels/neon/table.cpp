// Kernels for AArch64 with the dot product instructions (Armv8.2 dotprod); compiled a second time with i8mm (matrix
// products of bytes), as the family "neon_i8mm".
#include "integer_kernels.h"
#include "keep_rows.h"
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

template <class Block>
constexpr Slabs kSlabs{matmul_slabs<Block>, &kSlabPacking<BatchBlock<Block>>};
Slabs slabs(Format format, int64_t) {
  return with_packing(format, []<class Block>(Block) { return kSlabs<Block>; }, [] { return Slabs(); });
}
Slabs slabs_of_rows(Format format, int64_t m) {
  if (m < kKeepsRowsFromM) return {};
  return format == Format::MXFP4 ? kSlabs<BlockMXFP4> : slabs(format, m);
}

constexpr KernelTable entries(const char* name) {
  KernelTable t = table_entries(name);
  t.slabs = slabs;
  t.slabs_of_rows = slabs_of_rows;
  t.packs_by_default = true;  // because of instruction counts, not timings
  return t;
}

}  // namespace

#if defined(__ARM_FEATURE_MATMUL_INT8)
constinit const KernelTable kNeonI8mmKernels = entries("neon_i8mm");
#else
constinit const KernelTable kNeonKernels = entries("neon");
#endif

}  // namespace qtensor
