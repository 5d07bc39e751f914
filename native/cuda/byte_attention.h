// Attention over a cache with 8 bits or less, all tiles in parallel. The scores of a tile depend only on the query, the
// largest score so far is a prefix maximum over the tiles' maxima, and the weights of a tile depend only on that. Only
// one fma for each tile and dimension is executed in order, at the end. There are four launches: attend_begin,
// attend_scores and attend_weights (tiles x queries), attend_join. The arithmetic is specified at ByteAttentionTask in
// kernel_table.h.
#pragma once

#include "cuda/cache.h"

namespace qtensor {
namespace cuda {

// Query i is head i % heads of row i / heads.
struct Attend {
  const float* q;  // queries x dim
  float* out;
  Places places;
  Pool pool, window;
  int heads, most_tiles, together;
  float scale;
  Levels key_levels, value_levels;  // of the pool, if it has fewer than 8 bits
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
    return {head_of(t.window, t.places.window_tables[at], head), CacheFormat::k8v8};
  return {head_of(t.pool, t.places.tables[at], head), t.pool.format};
}
LANES_DEVICE float stored_scale(const TileOfHead& tile, int dim, int which) {
  return half_to_float(reinterpret_cast<const uint16_t*>(tile.data + scales_at(tile.format, dim))[which]);
}

// Computes a query's bytes and its unit, with one warp. v: the rotated query.
template <int PIECES>
LANES_DEVICE void begin_query(const Attend& t, int query, int lane, const float (&v)[PIECES]) {
  const int dim = t.pool.dim;
  const int64_t at = int64_t(query) * dim;
  const uint32_t bits = top_bits_of(v, dim, lane);
  const bool finite = bits < 0x7f800000;
  const float top = __uint_as_float(finite ? bits : kNaN);
  const bool usable = top >= 1e-30f;
  const float inverse = __fdiv_rn(127.0f, top);
  LANES_UNROLL
  for (int i = 0; i < PIECES; i++)
    if (lane + 32 * i < dim) t.bytes[at + lane + 32 * i] = int8_t(usable ? byte_level(v[i], inverse) : 0);
  const float step = usable ? __fdiv_rn(top, 127.0f) : finite ? 0.0f : top;
  if (lane == 0) t.unit[query] = __fmul_rn(__fmul_rn(step, t.scale), 1.44269504f);
}
template <int PIECES>
LANES_DEVICE void load_and_begin(const Attend& t) {
  const int lane = int(threadIdx.x), query = int(blockIdx.x);
  float v[PIECES];
  load_head(t.q + int64_t(query) * t.pool.dim, t.pool.dim, lane, v);
  rotate(v, t.pool.dim, lane);
  begin_query(t, query, lane, v);
}
constexpr int kQueryThreads = 32;
LANES_KERNEL(kQueryThreads, 16) attend_begin(const Attend t) {
  await_previous();
  if (t.pool.dim <= 32 * kFewPieces)
    load_and_begin<kFewPieces>(t);
  else
    load_and_begin<kMostPieces>(t);
}

// Scores, weights and sums of one tile, computed by kTile threads: the work of each thread between two barriers.
constexpr int kTogether = 16;  // loads in flight
LANES_DEVICE float score_of(const Attend& t, const TileOfHead& here, const uint32_t* x, float query_unit, int count,
                            int j) {
  const uint32_t* const keys = reinterpret_cast<const uint32_t*>(here.data);
  const int bits = key_bits(here.format), groups = t.pool.dim / 4;
  const float unit = __fmul_rn(stored_scale(here, t.pool.dim, j), query_unit);
  int sum = 0, group = 0;
  if (bits == 8)
    for (; group + kTogether <= groups; group += kTogether) {
      uint32_t k[kTogether];
      LANES_UNROLL
      for (int i = 0; i < kTogether; i++) k[i] = keys[(group + i) * kTile + j];
      LANES_UNROLL
      for (int i = 0; i < kTogether; i++) sum = __dp4a(int(k[i] ^ 0x80808080), int(x[group + i]), sum);
    }
  for (; group < groups; group++)
    sum = __dp4a(int(group_levels(keys, bits, t.key_levels, group, kTile, j)), int(x[group]), sum);
  return j < count ? __fmul_rn(__int2float_rn(sum), unit) : -1e30f;
}
// The largest score, computed by a warp in the order of the virtual vector, so that NaN has the same effect.
LANES_DEVICE float top_of(const float* scores, int count, int lane) {
  float peak = -1e30f;
  for (int v = 0; v < (count + 15) / 16; v++) {
    const float s = scores[16 * v + lane % 16];
    peak = peak > s ? peak : s;
  }
  return max_of_lanes(peak);
}

struct TileRoom {
  float powers[kTile];
  uint32_t largest[4];
  int16_t weights[kTile];
};
static_assert(sizeof(TileRoom) % 16 == 0);
LANES_DEVICE float weight_of(const TileOfHead& here, TileRoom& room, float score, float top, int dim, int count,
                             int j) {
  const float p = exp2_of(__fsub_rn(score, top));
  const float w = j < count ? __fmul_rn(p, stored_scale(here, dim, kTile + j)) : 0.0f;
  room.powers[j] = j < count ? p : 0.0f;
  const uint32_t mine = __reduce_max_sync(kWarp, __float_as_uint(w) & 0x7fffffff);
  if (j % 32 == 0) room.largest[j / 32] = mine;
  return w;
}
// step: correction, sum of powers, unit of the weights
LANES_DEVICE void round_weights(TileRoom& room, float w, float before, float top, int count, int j, float* step) {
  uint32_t bits = room.largest[0];
  for (int i = 1; i < 4; i++) bits = bits > room.largest[i] ? bits : room.largest[i];
  const float most = __uint_as_float(bits);
  const bool usable = most >= 1e-30f && bits < 0x7f800000;
  room.weights[j] = int16_t(usable ? __float2int_rn(__fmul_rn(w, __fdiv_rn(32767.0f, most))) : 0);
  if (j >= 32) return;
  float sum = 0.0f;
  for (int v = 0; v < (count + 15) / 16; v++) sum = __fadd_rn(sum, room.powers[16 * v + j % 16]);
  sum = sum_of_lanes(sum);
  if (j > 0) return;
  step[0] = before == top ? 1.0f : exp2_of(__fsub_rn(before, top));
  step[1] = sum;
  step[2] = usable ? __fdiv_rn(most, 32767.0f) : most < 1e-30f ? 0.0f : __uint_as_float(kNaN);
}
LANES_DEVICE void sum_values(const Attend& t, const TileOfHead& here, const TileRoom& room, int count, int j,
                             int* sums) {
  const int dim = t.pool.dim, bits = value_bits(here.format), groups = (count + 3) / 4;
  const uint2* const four = reinterpret_cast<const uint2*>(room.weights);
  const uint32_t* const values = reinterpret_cast<const uint32_t*>(here.data + key_bytes(here.format, dim));
  for (int d = j; d < dim; d += kTile) {
    int sum = 0, group = 0;
    if (bits == 8)
      for (; group < groups; group += kTogether) {
        uint32_t v[kTogether];
        LANES_UNROLL
        for (int i = 0; i < kTogether; i++) v[i] = group + i < groups ? values[(group + i) * dim + d] : 0;
        LANES_UNROLL
        for (int i = 0; i < kTogether; i++)
          if (group + i < groups) {
            const int levels = int(v[i] ^ 0x80808080);
            sum = __dp2a_hi(int(four[group + i].y), levels, __dp2a_lo(int(four[group + i].x), levels, sum));
          }
      }
    for (; group < groups; group++) {
      const int v = int(group_levels(values, bits, t.value_levels, group, dim, d));
      sum = __dp2a_hi(int(four[group].y), v, __dp2a_lo(int(four[group].x), v, sum));
    }
    sums[d] = sum;
  }
}

constexpr int kTileThreads = kTile;
constexpr int kScoresSharedBytes = kTile * 4, kWeightsSharedBytes = int(sizeof(TileRoom));

LANES_KERNEL(kTileThreads, 8) attend_scores(const Attend t) {
  LANES_SHARED(shared);
  await_previous();
  float* const scores = reinterpret_cast<float*>(shared);
  const int tile = int(blockIdx.x), query = int(blockIdx.y), j = int(threadIdx.x), dim = t.pool.dim;
  const int seen = limit_of(t, query) - kTile * tile, count = seen < kTile ? seen : kTile;
  if (count <= 0) return;  // for the whole thread block
  const uint32_t* const x = reinterpret_cast<const uint32_t*>(t.bytes + int64_t(query) * dim);
  const float score = score_of(t, tile_of(t, query, tile), x, t.unit[query], count, j);
  const int64_t at = int64_t(query) * t.most_tiles + tile;
  scores[j] = score;
  t.scores[at * kTile + j] = score;
  __syncthreads();
  if (j < 32) {
    const float top = top_of(scores, count, j);
    if (j == 0) t.tops[at] = top;
  }
}

LANES_KERNEL(kTileThreads, 8) attend_weights(const Attend t) {
  LANES_SHARED(shared);
  await_previous();
  TileRoom& room = *reinterpret_cast<TileRoom*>(shared);
  const int tile = int(blockIdx.x), query = int(blockIdx.y), j = int(threadIdx.x), dim = t.pool.dim;
  const int seen = limit_of(t, query) - kTile * tile, count = seen < kTile ? seen : kTile;
  if (count <= 0) return;
  const TileOfHead here = tile_of(t, query, tile);
  const int64_t first = int64_t(query) * t.most_tiles, at = first + tile;
  float before = -1e30f;
  for (int i = 0; i < tile; i++) before = before > t.tops[first + i] ? before : t.tops[first + i];
  const float top = before > t.tops[at] ? before : t.tops[at];
  const float w = weight_of(here, room, t.scores[at * kTile + j], top, dim, count, j);
  __syncthreads();
  round_weights(room, w, before, top, count, j, t.steps + 3 * at);
  __syncthreads();
  sum_values(t, here, room, count, j, t.sums + at * dim);
}

template <int PIECES>
LANES_DEVICE void finish_query(const Attend& t, int query, int lane, float (&o)[PIECES], float total) {
  const int dim = t.pool.dim;
  LANES_UNROLL
  for (int i = 0; i < PIECES; i++) o[i] = __fdiv_rn(o[i], total);
  rotate(o, dim, lane);
  LANES_UNROLL
  for (int i = 0; i < PIECES; i++)
    if (lane + 32 * i < dim) t.out[int64_t(query) * dim + lane + 32 * i] = o[i];
}
template <int PIECES>
LANES_DEVICE void join_tiles(const Attend& t) {
  const int lane = int(threadIdx.x), query = int(blockIdx.x), dim = t.pool.dim;
  const int tiles = (limit_of(t, query) + kTile - 1) / kTile;
  float o[PIECES] = {}, total = 0.0f;
  for (int tile = 0; tile < tiles; tile++) {
    const int64_t at = int64_t(query) * t.most_tiles + tile;
    const float correction = t.steps[3 * at], unit = t.steps[3 * at + 2];
    total = __fmaf_rn(total, correction, t.steps[3 * at + 1]);
    LANES_UNROLL
    for (int i = 0; i < PIECES; i++)
      if (lane + 32 * i < dim)
        o[i] = __fmaf_rn(__int2float_rn(t.sums[at * dim + lane + 32 * i]), unit, __fmul_rn(o[i], correction));
  }
  finish_query(t, query, lane, o, total);
}
LANES_KERNEL(kQueryThreads, 16) attend_join(const Attend t) {
  await_previous();
  if (t.pool.dim <= 32 * kFewPieces)
    join_tiles<kFewPieces>(t);
  else
    join_tiles<kMostPieces>(t);
}

// One launch for a whole query, for few rows that see few tiles: a thread block processes it, `together` tiles at a
// time. The three launches above have many more thread blocks, which is faster only if there is enough work for them.
constexpr int kMostTogether = 4, kWholeQueryThreads = kMostTogether * kTile, kWholeQueryDim = 32 * kFewPieces;
struct WholeQueryRoom {
  TileRoom tile[kMostTogether];
  float tops[kMostTogether], steps[kMostTogether][4];
  uint32_t query[kWholeQueryDim / 4];
  float o[kWholeQueryDim];
  int sums[kMostTogether][kWholeQueryDim];
};
LANES_KERNEL(kWholeQueryThreads, 1) attend_query(const Attend t) {
  LANES_SHARED(shared);
  WholeQueryRoom& room = *reinterpret_cast<WholeQueryRoom*>(shared);
  const int query = int(blockIdx.x), thread = int(threadIdx.x), own = thread / kTile, j = thread % kTile;
  const int dim = t.pool.dim, limit = limit_of(t, query), tiles = (limit + kTile - 1) / kTile;
  TileOfHead here{};
  if (own < tiles) here = tile_of(t, query, own);
  await_previous();
  if (thread < dim / 4) room.query[thread] = reinterpret_cast<const uint32_t*>(t.bytes + int64_t(query) * dim)[thread];
  const float unit = t.unit[query];
  float o = 0.0f, total = 0.0f, before = -1e30f;  // o: output of dimension `thread`
  for (int first = 0; first < tiles; first += t.together) {
    const int tile = first + own, seen = limit - kTile * tile, count = seen < kTile ? seen : kTile;
    if (first > 0 && count > 0) here = tile_of(t, query, tile);
    __syncthreads();
    float score = 0.0f;
    if (count > 0) room.tile[own].powers[j] = score = score_of(t, here, room.query, unit, count, j);
    __syncthreads();
    if (count > 0 && j < 32) {
      const float top = top_of(room.tile[own].powers, count, j);
      if (j == 0) room.tops[own] = top;
    }
    __syncthreads();
    const int ready = tiles - first < t.together ? tiles - first : t.together;
    float mine = 0.0f, earlier = before, w = 0.0f;
    for (int i = 0; i < ready; i++) {
      if (i == own) earlier = before;
      before = before > room.tops[i] ? before : room.tops[i];
      if (i == own) mine = before;
    }
    if (count > 0) w = weight_of(here, room.tile[own], score, mine, dim, count, j);
    __syncthreads();
    if (count > 0) round_weights(room.tile[own], w, earlier, mine, count, j, room.steps[own]);
    __syncthreads();
    if (count > 0) sum_values(t, here, room.tile[own], count, j, room.sums[own]);
    __syncthreads();
    for (int i = 0; i < ready; i++) {
      const float correction = room.steps[i][0];
      total = __fmaf_rn(total, correction, room.steps[i][1]);
      if (thread < dim) o = __fmaf_rn(__int2float_rn(room.sums[i][thread]), room.steps[i][2], __fmul_rn(o, correction));
    }
  }
  if (thread < dim) room.o[thread] = o;
  __syncthreads();
  if (thread >= 32) return;
  float v[kFewPieces];
  LANES_UNROLL
  for (int i = 0; i < kFewPieces; i++) v[i] = thread + 32 * i < dim ? room.o[thread + 32 * i] : 0.0f;
  finish_query(t, query, thread, v, total);
}

}  // namespace cuda
}  // namespace qtensor
