// Replaces the AMX kernels on processors without tiles, where they cannot be called. They would take half of the build
// time with sanitizers; the emulated ones have the same source.
#include "kernel_table.h"

namespace qtensor {
const KernelTable kAmxKernels = {.name = "amx"};
}  // namespace qtensor
