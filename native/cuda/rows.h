// Operations on rows of floats: quantization, norms, gates, softmax, rotation, gathering, argmax.
#pragma once

#include "blocks.h"
#include "cuda/float_steps.h"

namespace qtensor {
namespace cuda {

// Eight adjacent values of a row of k, and the bits of their largest magnitude.
struct EightValues {
  float v[8];
  uint32_t top_bits = 0;
  LANES_DEVICE EightValues(const float* row, int64_t begin, int64_t k) {
    for (int i = 0; i < 8; i++) set(i, begin + i < k ? row[begin + i] : 0.0f);
  }
  LANES_DEVICE void set(int i, float value) {
    v[i] = value;
    const uint32_t bits = __float_as_uint(value) & 0x7fffffff;
    top_bits = bits > top_bits ? bits : top_bits;
  }
  EightValues() = default;
};
// The same as bytes, scaled by the largest magnitude of all values that share their scale.
struct EightBytes {
  uint32_t words[2] = {0, 0};
  int sum = 0;
  float d;
  LANES_DEVICE EightBytes(const EightValues& x, uint32_t top_bits) {
    const float top = __uint_as_float(top_bits);
    const bool finite = top_bits < 0x7f800000, usable = finite && top >= 1e-30f;
    const float scale = usable ? __fdiv_rn(127.0f, top) : 0.0f;
    for (int i = 0; i < 8; i++) {
      const int q = usable ? __float2int_rn(__fmul_rn(x.v[i], scale)) : 0;
      words[i / 4] |= uint32_t(q & 255) << (8 * (i % 4));
      sum += q;
    }
    d = usable ? __fdiv_rn(top, 127.0f) : finite ? 0.0f : __uint_as_float(kNaN);
  }
};

// Quantizes activations: a warp processes a block of 256, and a lane eight adjacent values.
LANES_DEVICE void quantize_block(const EightValues& v, int lane, BlockQ8K* to) {
  const EightBytes bytes(v, __reduce_max_sync(kWarp, v.top_bits));
  *reinterpret_cast<uint2*>(to->q + 8 * lane) = uint2{bytes.words[0], bytes.words[1]};
  int sum = bytes.sum;
  sum += __shfl_xor_sync(kWarp, sum, 1);
  if (lane % 2 == 0) to->sums16[lane / 2] = int16_t(sum);
  sum += __shfl_xor_sync(kWarp, sum, 2);
  if (lane % 4 == 0) to->sums32[lane / 4] = int16_t(sum);
  if (lane == 0) *reinterpret_cast<uint4*>(&to->d) = uint4{__float_as_uint(bytes.d), 0, 0, 0};  // and the padding
}
// The same with a scale for each 32 values, which are those of four lanes.
LANES_DEVICE void quantize_block(const EightValues& v, int lane, BlockQ8x32* to) {
  uint32_t top_bits = v.top_bits;
  for (int distance = 1; distance <= 2; distance *= 2) {
    const uint32_t other = __shfl_xor_sync(kWarp, top_bits, distance);
    top_bits = other > top_bits ? other : top_bits;
  }
  const EightBytes bytes(v, top_bits);
  *reinterpret_cast<uint2*>(to->q + 8 * lane) = uint2{bytes.words[0], bytes.words[1]};
  int sum = bytes.sum;
  sum += __shfl_xor_sync(kWarp, sum, 1);
  sum += __shfl_xor_sync(kWarp, sum, 2);
  if (lane % 4 == 0) {
    to->d[lane / 4] = bytes.d;
    to->sums[lane / 4] = sum;
  }
}

template <class Block>
struct QuantizeTo {
  const float* x;  // m x k
  int64_t k;
  Block* out;  // m x blocks
  int blocks;
};
using Quantize = QuantizeTo<BlockQ8K>;
using QuantizeBy32 = QuantizeTo<BlockQ8x32>;
constexpr int kQuantizeThreads = 128;
template <class Block>
LANES_DEVICE void quantize_row(const QuantizeTo<Block>& t) {
  const int lane = int(threadIdx.x % 32), block = int(blockIdx.x * (kQuantizeThreads / 32) + threadIdx.x / 32);
  if (block >= t.blocks) return;  // whole warps
  const int64_t column = blockIdx.y;
  const EightValues v(t.x + column * t.k, 256 * int64_t(block) + 8 * lane, t.k);
  quantize_block(v, lane, t.out + column * t.blocks + block);
}
LANES_KERNEL(kQuantizeThreads, 8) quantize(const Quantize t) {
  await_previous();
  quantize_row(t);
}
LANES_KERNEL(kQuantizeThreads, 8) quantize_by_32(const QuantizeBy32 t) {
  await_previous();
  quantize_row(t);
}

// Adds the squares of x[l], x[l + 16], ... to lane l of the virtual vector. On the CPU, lanes beyond the end compute
// fma(0, 0, sum). The sum is never -0, so the result is the same without it.
LANES_DEVICE float add_squares(float sum, const float* x, int n, int lane) {
  int i = lane % 16;
  for (; i + 240 < n; i += 256) {  // sixteen loads in flight, one chain
    float v[16];
    LANES_UNROLL
    for (int j = 0; j < 16; j++) v[j] = x[i + 16 * j];
    LANES_UNROLL
    for (int j = 0; j < 16; j++) sum = __fmaf_rn(v[j], v[j], sum);
  }
  for (; i < n; i += 16) sum = __fmaf_rn(x[i], x[i], sum);
  return sum;
}
LANES_DEVICE float norm_scale(float squares_of_lane, int n, float eps) {
  const float mean = __fdiv_rn(sum_of_lanes(squares_of_lane), float(n));
  return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
}

// A thread block processes a row and copies it to shared memory, a part at a time, because the sum of squares is a
// chain in one warp, which would wait for each load from memory.
struct Norm {
  const float *x, *weight;
  float eps;
  int width;
  float* out;
};
constexpr int kRowThreads = 256, kNormPart = 4096, kNormSharedBytes = (kNormPart + 4) * 4;
LANES_KERNEL(kRowThreads, 4) rms_norm(const Norm t) {
  LANES_SHARED(shared);
  await_previous();
  float* const part = reinterpret_cast<float*>(shared);
  float* const scale = part + kNormPart;
  const float* const row = t.x + int64_t(blockIdx.x) * t.width;
  float* const out = t.out + int64_t(blockIdx.x) * t.width;
  const int thread = int(threadIdx.x), n = t.width;
  float sum = 0.0f;
  for (int begin = 0; begin < n; begin += kNormPart) {
    const int here = n - begin < kNormPart ? n - begin : kNormPart;
    for (int i = thread; i < here; i += kRowThreads) part[i] = row[begin + i];
    __syncthreads();
    if (thread < 32) sum = add_squares(sum, part, here, thread);
    __syncthreads();
  }
  if (thread < 32) {
    const float by = norm_scale(sum, n, t.eps);
    if (thread == 0) *scale = by;
  }
  __syncthreads();
  const float by = *scale;
  for (int i = thread; i < n; i += kRowThreads) out[i] = __fmul_rn(__fmul_rn(row[i], by), t.weight[i]);
}

struct Pair {
  const float *a, *b;
  int64_t n;
  float* out;
};
LANES_DEVICE float silu_times(float gate, float up) {
  return __fmul_rn(__fdiv_rn(gate, __fadd_rn(1.0f, exp_of(__fsub_rn(0.0f, gate)))), up);
}
LANES_KERNEL(kRowThreads, 4) silu_mul(const Pair t) {
  await_previous();
  const int64_t i = int64_t(blockIdx.x) * kRowThreads + threadIdx.x;
  if (i < t.n) t.out[i] = silu_times(t.a[i], t.b[i]);
}
LANES_KERNEL(kRowThreads, 4) add(const Pair t) {
  await_previous();
  const int64_t i = int64_t(blockIdx.x) * kRowThreads + threadIdx.x;
  if (i < t.n) t.out[i] = __fadd_rn(t.a[i], t.b[i]);
}

// In place, with a thread block per row, whose first warp is the virtual vector.
struct Softmax {
  float* x;
  int width;
};
LANES_KERNEL(kRowThreads, 4) softmax(const Softmax t) {
  LANES_SHARED(shared);
  await_previous();
  float* const of_row = reinterpret_cast<float*>(shared);  // top, sum
  float* const row = t.x + int64_t(blockIdx.x) * t.width;
  const int thread = int(threadIdx.x);
  if (thread < 32) {
    float top = row[thread % 16 < t.width ? thread % 16 : 0];
    for (int i = thread % 16; i < t.width; i += 16) top = top > row[i] ? top : row[i];
    top = max_of_lanes(top);
    if (thread == 0) of_row[0] = top;
  }
  __syncthreads();
  for (int i = thread; i < t.width; i += kRowThreads) row[i] = exp_of(__fsub_rn(row[i], of_row[0]));
  __syncthreads();
  if (thread < 32) {
    float sum = 0.0f;
    for (int i = thread % 16; i < t.width; i += 16) sum = __fadd_rn(sum, row[i]);
    sum = sum_of_lanes(sum);
    if (thread == 0) of_row[1] = sum;
  }
  __syncthreads();
  for (int i = thread; i < t.width; i += kRowThreads) row[i] = __fdiv_rn(row[i], of_row[1]);
}

// A thread block per row and head; each thread rotates some pairs.
struct Rope {
  float* x;  // rows x heads x dim
  const int* positions;
  const float *cosine, *sine;  // dim / 2 floats per position
  int heads, dim;
  bool adjacent;
};
constexpr int kRopeThreads = 64;
LANES_KERNEL(kRopeThreads, 16) rope(const Rope t) {
  await_previous();
  float* const x = t.x + (int64_t(blockIdx.x) * t.heads + blockIdx.y) * t.dim;
  const int pairs = t.dim / 2;
  const int64_t at = int64_t(t.positions[blockIdx.x]) * pairs;
  for (int i = int(threadIdx.x); i < pairs; i += kRopeThreads) {
    float* const first = x + (t.adjacent ? 2 * i : i);
    float* const second = first + (t.adjacent ? 1 : pairs);
    const float a = *first, b = *second, cosine = t.cosine[at + i], sine = t.sine[at + i];
    *first = __fmaf_rn(-b, sine, __fmul_rn(a, cosine));
    *second = __fmaf_rn(b, cosine, __fmul_rn(a, sine));
  }
}

// Cosines and sines of positions, with a thread block per row: as in native/ops/rope_table.cpp, in the same order, in
// doubles.
struct RopeTable {
  const double* frequency;  // pairs
  const int* positions;
  double factor;
  int pairs;
  float *cosine, *sine;  // rows x pairs
};
LANES_KERNEL(kRopeThreads, 16) rope_table(const RopeTable t) {
  await_previous();
  const int64_t at = int64_t(blockIdx.x) * t.pairs;
  for (int i = int(threadIdx.x); i < t.pairs; i += kRopeThreads) {
    const double x = __dmul_rn(double(t.positions[blockIdx.x]), t.frequency[i]);
    const double n = round_even(__dmul_rn(x, 0x1.45f306dc9c883p-1));
    double angle = __dsub_rn(x, __dmul_rn(n, 0x1.921fb544p+0));
    angle = __dsub_rn(angle, __dmul_rn(n, 0x1.0b4611a6p-34));
    angle = __dsub_rn(angle, __dmul_rn(n, 0x1.3198a2e037073p-69));
    const double z = __dmul_rn(angle, angle);
    double of_sine = 0.0, of_cosine = 0.0;
    for (int k = 19; k >= 3; k -= 2) of_sine = __ddiv_rn(__dmul_rn(__dsub_rn(1.0, of_sine), z), double(k * (k - 1)));
    for (int k = 20; k >= 2; k -= 2)
      of_cosine = __ddiv_rn(__dmul_rn(__dsub_rn(1.0, of_cosine), z), double(k * (k - 1)));
    const double s = __dsub_rn(angle, __dmul_rn(angle, of_sine)), c = __dsub_rn(1.0, of_cosine);
    const int quarter = int(int64_t(n) & 3);
    const double sine = quarter == 0 ? s : quarter == 1 ? c : quarter == 2 ? -s : -c;
    const double cosine = quarter == 0 ? c : quarter == 1 ? -s : quarter == 2 ? -c : s;
    t.cosine[at + i] = __double2float_rn(__dmul_rn(cosine, t.factor));
    t.sine[at + i] = __double2float_rn(__dmul_rn(sine, t.factor));
  }
}

// The index of the first largest value, as from std::max_element: NaN matters only as the first value.
struct Argmax {
  const float* x;
  int width;
  int* out;
};
LANES_KERNEL(kRowThreads, 4) argmax(const Argmax t) {
  LANES_SHARED(shared);
  await_previous();
  uint32_t* const tops = reinterpret_cast<uint32_t*>(shared);  // for each warp: largest value, index
  const float* const row = t.x + int64_t(blockIdx.x) * t.width;
  const int thread = int(threadIdx.x), warp = thread / 32;
  // Maps a float to an integer with the same order, in which NaN is below everything and both zeros are equal.
  const auto place = [&](float v) {
    const uint32_t bits = __float_as_uint(v == 0.0f ? 0.0f : v);
    return v != v ? 0u : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  };
  uint32_t top = 0, index = ~0u;
  for (int i = thread; i < t.width; i += kRowThreads) {
    const uint32_t here = place(row[i]);
    if (here > top) top = here, index = uint32_t(i);
  }
  const uint32_t of_warp = __reduce_max_sync(kWarp, top);
  const uint32_t first = __reduce_min_sync(kWarp, top == of_warp ? index : ~0u);
  if (thread % 32 == 0) tops[2 * warp] = of_warp, tops[2 * warp + 1] = first;
  __syncthreads();
  if (thread > 0) return;
  for (int i = 1; i < kRowThreads / 32; i++) {
    const uint32_t other = tops[2 * i], at = tops[2 * i + 1];
    if (other > tops[0] || (other == tops[0] && at < tops[1])) tops[0] = other, tops[1] = at;
  }
  t.out[blockIdx.x] = row[0] != row[0] || tops[0] == 0 ? 0 : int(tops[1]);
}

struct Gather {
  const float* x;
  const int* ids;
  int width;
  float* out;
};
LANES_KERNEL(kRowThreads, 4) gather_rows(const Gather t) {
  await_previous();
  const float* const from = t.x + int64_t(t.ids[blockIdx.x]) * t.width;
  float* const to = t.out + int64_t(blockIdx.x) * t.width;
  for (int i = int(threadIdx.x); i < t.width; i += kRowThreads) to[i] = from[i];
}

}  // namespace cuda
}  // namespace qtensor
