// Declarations of CUDA's names, for host code that includes the kernels' headers to launch kernels. They are not
// defined anywhere, because no kernel is compiled there.
#pragma once

#include <cstdint>

#define LANES_KERNEL(threads, blocks) inline void
#define LANES_DEVICE inline
#define LANES_SHARED(name) uint8_t* const name = lanes_shared()
#define LANES_UNROLL
#define LANES_LOOP

struct uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct LanesIndex {
  unsigned x, y, z;
};
extern const LanesIndex threadIdx, blockIdx;
uint8_t* lanes_shared();

void await_previous();
void fetch_ahead(const uint8_t* p, uint32_t bytes);
void __syncthreads();
void __syncwarp();
template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int distance);
template <class T>
T __shfl_sync(uint32_t mask, T value, int from);
uint32_t __reduce_max_sync(uint32_t mask, uint32_t value);
uint32_t __reduce_min_sync(uint32_t mask, uint32_t value);
int __dp4a(int a, int b, int c);
int __dp2a_lo(int a, int b, int c);
int __dp2a_hi(int a, int b, int c);
uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t which);
void mma_s8(int (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
void mma_s8_short(int (&c)[4], const uint32_t (&a)[2], uint32_t b);

float __fmaf_rn(float a, float b, float c);
float __fmul_rn(float a, float b);
float __fadd_rn(float a, float b);
float __fsub_rn(float a, float b);
float __fdiv_rn(float a, float b);
float __fsqrt_rn(float a);
double __dmul_rn(double a, double b);
double __dsub_rn(double a, double b);
double __ddiv_rn(double a, double b);
float __double2float_rn(double a);
float round_even(float a);
double round_even(double a);
float __int2float_rn(int a);
int __float2int_rn(float a);
uint32_t __float_as_uint(float a);
float __uint_as_float(uint32_t a);
float half_to_float(uint16_t h);
uint16_t round_to_half(float f);
uint4 load16(const void* p);
uint32_t load4(const void* p);
uint2 stream8(const void* p);
uint32_t stream4(const void* p);
