#include "cuda/machine_code.h"

#if defined(QTENSOR_CUDA_FILE)
__asm__(
    ".pushsection .rodata\n"
    ".balign 64\n"
    "qtensor_cuda_begin:\n"
    ".incbin \"" QTENSOR_CUDA_FILE
    "\"\n"
    "qtensor_cuda_end:\n"
    ".byte 0\n"
    ".popsection\n");
extern "C" __attribute__((visibility("hidden"))) const uint8_t qtensor_cuda_begin[], qtensor_cuda_end[];
#endif

namespace qtensor {
namespace cuda {

MachineCode machine_code() {
#if defined(QTENSOR_CUDA_FILE)
  return {qtensor_cuda_begin, size_t(qtensor_cuda_end - qtensor_cuda_begin), QTENSOR_CUDA_TOOLKIT,
          QTENSOR_CUDA_ARCHITECTURES};
#else
  return {nullptr, 0, 12000, ""};
#endif
}

}  // namespace cuda
}  // namespace qtensor
