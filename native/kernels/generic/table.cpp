// Kernels for any CPU, and the bit oracle of all others.
#include "kernel_table.h"

namespace qtensor {
namespace {

constexpr int kScoreLanes = 2, kValueLanes = 2, kQueryGroup = 4;
// clang-format off: each of these builds on the ones before it
#include "vec16.h"
#include "kernels/portable/fetch_ahead.h"
#include "kernels/portable/float_kernels.h"
#include "integer_kernels.h"
#include "kernels/portable/level_tables.h"
#include "byte_dots.h"
#include "kernels/portable/head_vectors.h"
#include "kernels/portable/byte_attention.h"
#include "kernels/portable/read_lines.h"
#include "byte_peak.h"
// clang-format on
void attention_bytes(const ByteAttentionTask& t) { attend_bytes(t, read_tile); }

}  // namespace

const KernelTable kGenericKernels = {
#define QTENSOR_TABLE_NAME "generic"
#include "kernels/portable/table_entries.h"
};

}  // namespace qtensor
