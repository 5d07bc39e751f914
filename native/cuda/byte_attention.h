// Attention over a cache of bytes or less, every tile at once. Scores of a tile need nothing but the query; the largest
// so far is a prefix maximum over the tiles' own; weights of a tile need that alone. What must go in order is one fma
// for each tile and dimension, at the end. Four launches: attend_begin, attend_scores and attend_weights (tiles x
// queries), attend_join. The arithmetic stands at ByteAttentionTask in kernel_table.h.
#pragma once

#include "cuda/cache.h"

namespace qtensor {
namespace cuda {

// Query i is head i % heads of row i / heads.
struct Attend {
  const float* q;  // queries x dim
  float* out;
  Places places;
  Pool pool, recent;
  int heads, most_tiles;
  float scale;
  Levels key_levels, value_levels;  // of the pool, where it holds less than 8 bits
  int8_t* bytes;                    // queries x dim
  float* unit;                      // queries
  float* scores;                    // queries x tiles x 128
  float* tops;                      // queries x tiles
  float* steps;                     // queries x tiles x 3: correction, sum of powers, unit of the weights
  int* sums;                        // queries x tiles x dim
};

LANES_DEVICE int limit_of(const Attend& t, int query) { return t.places.positions[query / t.heads] + 1; }

struct TileOfHead {
  const uint8_t* data;
  CacheFormat format;
};
LANES_DEVICE TileOfHead tile_of(const Attend& t, int query, int tile) {
  const int row = query / t.heads, head = query % t.heads / (t.heads / t.pool.kv_heads);
  const int at = t.places.sequences[row] * t.places.table_length + tile;
  const bool small = t.pool.format > CacheFormat::k8v8;
  if (small && (tile == 0 || tile == t.places.positions[row] / kTile))
    return {head_of(t.recent, t.places.recent_tables[at], head), CacheFormat::k8v8};
  return {head_of(t.pool, t.places.tables[at], head), t.pool.format};
}
LANES_DEVICE float stored_scale(const TileOfHead& tile, int dim, int which) {
  return half_to_float(reinterpret_cast<const uint16_t*>(tile.data + scales_at(tile.format, dim))[which]);
}

constexpr int kQueryThreads = 32;
LANES_KERNEL(kQueryThreads, 16) attend_begin(const Attend t) {
  const int lane = int(threadIdx.x), query = int(blockIdx.x), dim = t.pool.dim;
  const int64_t at = int64_t(query) * dim;
  float v[kMostPieces];
  load_head(t.q + at, dim, lane, v);
  rotate(v, dim, lane);
  const uint32_t bits = top_bits_of(v, dim, lane);
  const bool finite = bits < 0x7f800000;
  const float top = __uint_as_float(finite ? bits : kNaN);
  const bool usable = top >= 1e-30f;
  const float inverse = __fdiv_rn(127.0f, top);
  LANES_UNROLL
  for (int i = 0; i < kMostPieces; i++)
    if (lane + 32 * i < dim) t.bytes[at + lane + 32 * i] = int8_t(usable ? byte_level(v[i], inverse) : 0);
  const float step = usable ? __fdiv_rn(top, 127.0f) : finite ? 0.0f : top;
  if (lane == 0) t.unit[query] = __fmul_rn(__fmul_rn(step, t.scale), 1.44269504f);
}

constexpr int kTileThreads = kTile;
constexpr int kScoresSharedBytes = kTile * 4, kWeightsSharedBytes = kTile * 4 + 16 + kTile * 2;

LANES_KERNEL(kTileThreads, 8) attend_scores(const Attend t) {
  LANES_SHARED(shared);
  float* const scores = reinterpret_cast<float*>(shared);
  const int tile = int(blockIdx.x), query = int(blockIdx.y), j = int(threadIdx.x), dim = t.pool.dim;
  const int seen = limit_of(t, query) - kTile * tile, count = seen < kTile ? seen : kTile;
  if (count <= 0) return;  // the whole block
  const TileOfHead here = tile_of(t, query, tile);
  const uint32_t* const keys = reinterpret_cast<const uint32_t*>(here.data);
  const uint32_t* const x = reinterpret_cast<const uint32_t*>(t.bytes + int64_t(query) * dim);
  const int bits = key_bits(here.format);
  int sum = 0;
  for (int group = 0; group < dim / 4; group++)
    sum = __dp4a(int(group_levels(keys, bits, t.key_levels, group, kTile, j)), int(x[group]), sum);
  const float unit = __fmul_rn(stored_scale(here, dim, j), t.unit[query]);
  const float score = j < count ? __fmul_rn(__int2float_rn(sum), unit) : -1e30f;
  const int64_t at = int64_t(query) * t.most_tiles + tile;
  scores[j] = score;
  t.scores[at * kTile + j] = score;
  __syncthreads();
  if (j < 32) {  // the virtual vector, in its order: a NaN comes and goes as it does there
    float peak = -1e30f;
    for (int v = 0; v < (count + 15) / 16; v++) {
      const float s = scores[16 * v + j % 16];
      peak = peak > s ? peak : s;
    }
    peak = fold_max(peak);
    if (j == 0) t.tops[at] = peak;
  }
}

LANES_KERNEL(kTileThreads, 8) attend_weights(const Attend t) {
  LANES_SHARED(shared);
  float* const powers = reinterpret_cast<float*>(shared);                 // 128
  uint32_t* const largest = reinterpret_cast<uint32_t*>(powers + kTile);  // 4
  int16_t* const weights = reinterpret_cast<int16_t*>(largest + 4);       // 128
  const int tile = int(blockIdx.x), query = int(blockIdx.y), j = int(threadIdx.x), dim = t.pool.dim;
  const int seen = limit_of(t, query) - kTile * tile, count = seen < kTile ? seen : kTile;
  if (count <= 0) return;
  const TileOfHead here = tile_of(t, query, tile);
  const int64_t first = int64_t(query) * t.most_tiles, at = first + tile;
  float before = -1e30f;
  for (int i = 0; i < tile; i++) before = before > t.tops[first + i] ? before : t.tops[first + i];
  const float top = before > t.tops[at] ? before : t.tops[at];
  const float p = exp2_of(__fsub_rn(t.scores[at * kTile + j], top));
  const float w = j < count ? __fmul_rn(p, stored_scale(here, dim, kTile + j)) : 0.0f;
  powers[j] = j < count ? p : 0.0f;
  const uint32_t mine = __reduce_max_sync(kWarp, __float_as_uint(w) & 0x7fffffff);
  if (j % 32 == 0) largest[j / 32] = mine;
  __syncthreads();
  uint32_t bits = largest[0];
  for (int i = 1; i < 4; i++) bits = bits > largest[i] ? bits : largest[i];
  const float most = __uint_as_float(bits);
  const bool usable = most >= 1e-30f && bits < 0x7f800000;
  weights[j] = int16_t(usable ? __float2int_rn(__fmul_rn(w, __fdiv_rn(32767.0f, most))) : 0);
  if (j < 32) {
    float sum = 0.0f;
    for (int v = 0; v < (count + 15) / 16; v++) sum = __fadd_rn(sum, powers[16 * v + j % 16]);
    sum = fold_add(sum);
    float* const step = t.steps + 3 * at;
    if (j == 0) {
      step[0] = before == top ? 1.0f : exp2_of(__fsub_rn(before, top));
      step[1] = sum;
      step[2] = usable ? __fdiv_rn(most, 32767.0f) : most < 1e-30f ? 0.0f : __uint_as_float(kNaN);
    }
  }
  __syncthreads();
  const uint2* const four = reinterpret_cast<const uint2*>(weights);
  const uint32_t* const values = reinterpret_cast<const uint32_t*>(here.data + key_bytes(here.format, dim));
  const int value_size = value_bits(here.format);
  for (int d = j; d < dim; d += kTile) {
    int sum = 0;
    for (int group = 0; group < (count + 3) / 4; group++) {
      const int v = int(group_levels(values, value_size, t.value_levels, group, dim, d));
      sum = __dp2a_hi(int(four[group].y), v, __dp2a_lo(int(four[group].x), v, sum));
    }
    t.sums[at * dim + d] = sum;
  }
}

LANES_KERNEL(kQueryThreads, 16) attend_join(const Attend t) {
  const int lane = int(threadIdx.x), query = int(blockIdx.x), dim = t.pool.dim;
  const int tiles = (limit_of(t, query) + kTile - 1) / kTile;
  float o[kMostPieces] = {}, total = 0.0f;
  for (int tile = 0; tile < tiles; tile++) {
    const int64_t at = int64_t(query) * t.most_tiles + tile;
    const float correction = t.steps[3 * at], unit = t.steps[3 * at + 2];
    total = __fmaf_rn(total, correction, t.steps[3 * at + 1]);
    LANES_UNROLL
    for (int i = 0; i < kMostPieces; i++)
      if (lane + 32 * i < dim)
        o[i] = __fmaf_rn(__int2float_rn(t.sums[at * dim + lane + 32 * i]), unit, __fmul_rn(o[i], correction));
  }
  LANES_UNROLL
  for (int i = 0; i < kMostPieces; i++) o[i] = __fdiv_rn(o[i], total);
  rotate(o, dim, lane);
  LANES_UNROLL
  for (int i = 0; i < kMostPieces; i++)
    if (lane + 32 * i < dim) t.out[int64_t(query) * dim + lane + 32 * i] = o[i];
}

}  // namespace cuda
}  // namespace qtensor
