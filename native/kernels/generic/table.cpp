// Kernels for any CPU, and the bit-exact reference for all others.
#include "integer_kernels.h"
#include "kernel_table.h"
#include "kernels/portable/byte_attention.h"
#include "kernels/portable/table_entries.h"
#include "unpacked_matmul.h"

namespace qtensor {
namespace {

void attention_bytes(const ByteAttentionTask& t) { attend_bytes(t, read_tile); }

}  // namespace

constinit const KernelTable kGenericKernels = table_entries("generic");

}  // namespace qtensor
