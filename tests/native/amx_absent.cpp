// In place of the AMX kernels on a processor without tiles, where nobody could call them: half of what a sanitizer's
// build takes. The emulated ones are the same source.
#include "kernel_table.h"

namespace qtensor {
const KernelTable kAmxKernels = {.name = "amx"};
}  // namespace qtensor
