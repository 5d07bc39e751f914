// Attention over a cache of halves. Its sums are float chains in order of position (AttentionTask in kernel_table.h),
// so a thread block processes a query and its tiles in order. A thread computes a position for scores, and a dimension
// for values.
#pragma once

#include "cuda/cache.h"

namespace qtensor {
namespace cuda {

struct HalfAttend {
  const float* q;  // queries x dim
  float* out;
  Places places;
  Pool pool;
  int heads;
  float scale;
};
constexpr int kHalfThreads = kTile;
static constexpr int half_attend_shared_bytes(int dim) { return (kTile + 4 + 2 * dim) * 4; }

LANES_KERNEL(kHalfThreads, 8) attend_halves(const HalfAttend t) {
  LANES_SHARED(shared);
  await_previous();
  const int j = int(threadIdx.x), query = int(blockIdx.x), row = query / t.heads, dim = t.pool.dim;
  float* const scores = reinterpret_cast<float*>(shared);  // 128, then powers
  float* const of_tile = scores + kTile;                   // top, correction, total
  float* const o = of_tile + 4;
  float* const x = o + dim;
  const int limit = t.places.positions[row] + 1, head = query % t.heads / (t.heads / t.pool.kv_heads);
  const int* const table = t.places.tables + t.places.sequences[row] * t.places.table_length;
  for (int d = j; d < dim; d += kHalfThreads) {
    o[d] = 0.0f;
    x[d] = t.q[int64_t(query) * dim + d];
  }
  if (j == 0) of_tile[0] = -1e30f, of_tile[2] = 0.0f;
  __syncthreads();
  for (int tile = 0; tile * kTile < limit; tile++) {
    const uint16_t* const keys = reinterpret_cast<const uint16_t*>(head_of(t.pool, table[tile], head));
    const uint16_t* const values = keys + dim * kTile;
    const int seen = limit - tile * kTile, count = seen < kTile ? seen : kTile;
    float score = 0.0f;
    if (j < count)
      for (int d = 0; d < dim; d++) score = __fmaf_rn(x[d], half_to_float(keys[d * kTile + j]), score);
    scores[j] = __fmul_rn(score, t.scale);
    __syncthreads();
    if (j < 32) {
      float top = scores[0];
      for (int i = j % 16; i < count; i += 16) top = top > scores[i] ? top : scores[i];
      top = max_of_lanes(top);
      if (j == 0) {
        const float before = of_tile[0];
        of_tile[0] = before > top ? before : top;
        of_tile[1] = exp_of(__fsub_rn(before, of_tile[0]));
      }
    }
    __syncthreads();
    if (j < count) scores[j] = exp_of(__fsub_rn(scores[j], of_tile[0]));
    __syncthreads();
    if (j < 32) {
      float sum = 0.0f;
      for (int i = j % 16; i < count; i += 16) sum = __fadd_rn(sum, scores[i]);
      sum = sum_of_lanes(sum);
      if (j == 0) of_tile[2] = __fmaf_rn(of_tile[2], of_tile[1], sum);
    }
    for (int d = j; d < dim; d += kHalfThreads) {
      float acc = __fmul_rn(o[d], of_tile[1]);
      for (int i = 0; i < count; i++) acc = __fmaf_rn(scores[i], half_to_float(values[i * dim + d]), acc);
      o[d] = acc;
    }
    __syncthreads();
  }
  for (int d = j; d < dim; d += kHalfThreads) t.out[int64_t(query) * dim + d] = __fdiv_rn(o[d], of_tile[2]);
}

}  // namespace cuda
}  // namespace qtensor
