// One kernel source for two compilers. With nvcc, this header adds a few names to CUDA's. With a C++ compiler, the
// names are those of tests/native/emulated_lanes.h, where each thread of a block is a fiber, or, for code that only
// launches kernels, declarations. Kernels are plain CUDA C++ in all cases, so the same code is tested without a GPU.
//
// Every float operation is an intrinsic that rounds once, to nearest (__fmaf_rn, __fmul_rn, ...), so no compiler fuses
// or splits any. Subnormal numbers are preserved (no -ftz).
#pragma once

#include <cstdint>

#if defined(__CUDACC__)

// `threads` per thread block; `blocks` thread blocks must fit on a multiprocessor at a time, which limits the
// registers.
#define LANES_KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
#define LANES_DEVICE __device__ __forceinline__
#define LANES_SHARED(name) extern __shared__ __align__(16) uint8_t name[]
#define LANES_UNROLL _Pragma("unroll")
#define LANES_LOOP _Pragma("unroll 1")

// From architecture 9.0 on, kernels start before the previous one has ended. Each thread must call this before it reads
// data of another kernel or writes anything. Data that only the host writes may be read earlier.
LANES_DEVICE void await_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Prefetches data that only the host writes into L2, if kernels may overlap with the previous one.
LANES_DEVICE void fetch_ahead(const uint8_t* p, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  const uint8_t* const begin = p - (reinterpret_cast<uintptr_t>(p) & 15);
  const uint32_t whole = uint32_t(p + bytes - begin) & ~15u;
  if (whole > 0) asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(begin), "r"(whole));
#endif
}
LANES_DEVICE float half_to_float(uint16_t h) {  // exact, including subnormals
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}
LANES_DEVICE uint16_t round_to_half(float f) {  // f is not NaN; rounds to nearest even
  uint16_t h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}
// c += a (16 x 32, row-major) * b (32 x 8, column-major), signed bytes
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
// Loads of data that is not written while the kernel runs: cached in L1 (load), or read once (stream).
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

constexpr uint32_t kWarp = 0xffffffffu;  // all lanes take part

}  // namespace cuda
}  // namespace qtensor
