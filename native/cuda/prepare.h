// One launch for the operations before the attention of a step: keys and queries are rotated to their positions, keys
// and values are stored in the cache, and queries are rounded to bytes. For a cache with 8 bits and heads of up to 128
// dimensions.
#pragma once

#include "cuda/byte_attention.h"
#include "cuda/store.h"

namespace qtensor {
namespace cuda {

// Rotation of adjacent pairs, like `rope`; none if rows is null.
struct Turn {
  const int* rows;  // rows of the tables, for each batch row
  const float *cosine, *sine;
};
template <int PIECES>
LANES_DEVICE void turn(const Turn& t, int row, int dim, int lane, float (&v)[PIECES], float* x) {
  if (t.rows == nullptr) return;
  const int64_t at = int64_t(t.rows[row]) * (dim / 2);
  LANES_UNROLL
  for (int i = 0; i < PIECES; i++) {
    const int d = lane + 32 * i;
    const float other = __shfl_xor_sync(kWarp, v[i], 1);
    if (d >= dim) continue;
    const float cosine = t.cosine[at + d / 2], sine = t.sine[at + d / 2];
    v[i] = lane % 2 == 0 ? __fmaf_rn(-other, sine, __fmul_rn(v[i], cosine))
                         : __fmaf_rn(v[i], cosine, __fmul_rn(other, sine));
    x[d] = v[i];
  }
}

// A warp processes a query, or the keys or the values of a head.
struct Prepare {
  Attend attend;  // its q is written
  Store store;    // its k is written
  Turn of_queries, of_keys;
};
constexpr int kPrepareThreads = 32, kPrepareDim = 32 * kFewPieces;
LANES_KERNEL(kPrepareThreads, 16) prepare_attention(const Prepare t) {
  LANES_SHARED(levels);
  const int lane = int(threadIdx.x), dim = t.store.pool.dim, queries = t.attend.places.rows * t.attend.heads;
  const int query = int(blockIdx.x), stored = query - queries, kv_heads = t.store.pool.kv_heads;
  float v[kFewPieces];
  if (stored < 0) {
    float* const x = const_cast<float*>(t.attend.q) + int64_t(query) * dim;
    await_previous();
    load_head(x, dim, lane, v);
    turn(t.of_queries, query / t.attend.heads, dim, lane, v, x);
    rotate(v, dim, lane);
    begin_query(t.attend, query, lane, v);
    return;
  }
  const bool keys = stored % 2 == 0;
  const int head = stored / 2 % kv_heads, row = stored / 2 / kv_heads;
  const Place place(t.store.places, row);
  float* const x = const_cast<float*>(keys ? t.store.k : t.store.v) + (int64_t(row) * kv_heads + head) * dim;
  await_previous();
  load_head(x, dim, lane, v);
  if (keys) turn(t.of_keys, row, dim, lane, v, x);
  rotate(v, dim, lane);
  put(t.store, v, t.store.pool, place.block, head, keys, place.slot, lane, levels);
}

}  // namespace cuda
}  // namespace qtensor
