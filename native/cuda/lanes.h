// One kernel source, two compilers. Under nvcc this header adds a handful of names to CUDA's own. Under a C++ compiler
// the names are those of tests/native/emulated_lanes.h, where every thread of a block is a fiber, or, for who only
// starts kernels, declarations alone. Kernels are plain CUDA C++ either way, and the same lines are tested where there
// is no GPU.
//
// Every float step is an intrinsic that rounds once and to nearest (__fmaf_rn, __fmul_rn, ...), so no compiler fuses or
// splits any. Subnormal numbers are kept (no -ftz).
#pragma once

#include <cstdint>

#if defined(__CUDACC__)

// `threads` to a block; `blocks` of them must fit a multiprocessor at a time, which bounds the registers.
#define LANES_KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
#define LANES_DEVICE __device__ __forceinline__
#define LANES_SHARED(name) extern __shared__ __align__(16) uint8_t name[]
#define LANES_UNROLL _Pragma("unroll")
#define LANES_LOOP _Pragma("unroll 1")

// Kernels start before the one they follow has ended, from architecture 9.0 on. What another kernel writes is read, and
// anything is written, behind this alone, which every thread calls; what only the host writes may be read before it.
LANES_DEVICE void await_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Has bytes that only the host writes brought nearer, where that may go on beside the kernel before.
LANES_DEVICE void fetch_ahead(const uint8_t* p, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  const uint8_t* const begin = p - (reinterpret_cast<uintptr_t>(p) & 15);
  const uint32_t whole = uint32_t(p + bytes - begin) & ~15u;
  if (whole > 0) asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(begin), "r"(whole));
#endif
}
LANES_DEVICE float half_to_float(uint16_t h) {  // exact, subnormals too
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}
LANES_DEVICE uint16_t round_to_half(float f) {  // of a number; to nearest even
  uint16_t h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}
// c += a (16 x 32, by rows) * b (32 x 8, by columns), bytes with sign
LANES_DEVICE void mma_s8(int (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// The same with half the depth: a (16 x 16) * b (16 x 8)
LANES_DEVICE void mma_s8_short(int (&c)[4], const uint32_t (&a)[2], uint32_t b) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
}
LANES_DEVICE float round_even(float x) { return rintf(x); }
LANES_DEVICE double round_even(double x) { return rint(x); }
// Of what nobody writes while the kernel runs: kept in the first cache, or read once.
LANES_DEVICE uint4 load16(const void* p) { return __ldg(static_cast<const uint4*>(p)); }
LANES_DEVICE uint32_t load4(const void* p) { return __ldg(static_cast<const uint32_t*>(p)); }
LANES_DEVICE uint2 stream8(const void* p) { return __ldcs(static_cast<const uint2*>(p)); }
LANES_DEVICE uint32_t stream4(const void* p) { return __ldcs(static_cast<const uint32_t*>(p)); }

#elif defined(QTENSOR_EMULATED_LANES)

#include "emulated_lanes.h"

#else

#include "cuda/host_names.h"

#endif

namespace qtensor {
namespace cuda {

constexpr uint32_t kWarp = 0xffffffffu;  // every lane takes part

}  // namespace cuda
}  // namespace qtensor
