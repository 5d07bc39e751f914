// Kernels for AArch64 with the dot product instructions (Armv8.2 dotprod); compiled once more with i8mm, which has
// matrix products of bytes, as the family "neon_i8mm".
#include "batch_lanes.h"
#include "batch_lanes_32.h"
#include "integer_kernels.h"
#include "kernel_table.h"
#include "kernels/portable/byte_attention.h"
#include "kernels/portable/tile_entries.h"
#include "sub_blocks.h"
#include "unpacked_matmul.h"

#if !defined(__ARM_FEATURE_DOTPROD)
#error "compile this with dotprod: -march=armv8.2-a+dotprod"
#endif

namespace qtensor {
namespace {

void attention_bytes(const ByteAttentionTask& t) { attend_bytes(t, read_tile); }

}  // namespace

#if defined(__ARM_FEATURE_MATMUL_INT8)
constinit const KernelTable kNeonI8mmKernels = tile_entries("neon_i8mm", from_m<5>, 64);
#else
constinit const KernelTable kNeonKernels = tile_entries("neon", from_m<5>, 64);
#endif

}  // namespace qtensor
