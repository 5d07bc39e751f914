// Attention over a cache of bytes: the float steps, written once over the virtual vector, and exact integer sums from
// the instruction set's byte_dots.h. The order of operations is specified in kernel_table.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "byte_dots.h"
#include "kernel_table.h"
#include "kernels/portable/fetch_ahead.h"
#include "kernels/portable/float_kernels.h"
#include "kernels/portable/head_vectors.h"
#include "vec16.h"

namespace qtensor {
namespace {

// 2^x = 2^n * 2^r with |r| <= 1/2. 2^r is a polynomial fitted for minimal relative error (9e-8). x is not positive.
// Values below -100 are treated as -100, so the result is negligible and its products with scales stay normal numbers.
inline V16 v_exp2(V16 x) {
  x = v_max(v_set(-100.0f), x);  // in this order, NaN is propagated
  const V16 n = v_round(x), r = v_sub(x, n);
  V16 p = v_set(0.001326472731307149f);
  p = v_fma(p, r, v_set(0.009671512991189957f));
  p = v_fma(p, r, v_set(0.05550733581185341f));
  p = v_fma(p, r, v_set(0.24022242426872253f));
  p = v_fma(p, r, v_set(0.6931470036506653f));
  p = v_fma(p, r, v_set(1.0f));
  return v_scale(p, n);
}

// The first n lanes of a, `rest` in the others.
inline V16 v_first_or(V16 a, int64_t n, float rest) {
  float lane[16];
  v_store(lane, a);
  for (int64_t i = n; i < 16; i++) lane[i] = rest;
  return v_load(lane);
}

constexpr int kByteQueries = 4;  // queries that are processed together

// The layout of the scratch memory of one task.
struct ByteScratch {
  float* o;         // queries x dim
  float* top;       // per query: largest score, in units of log2
  float* total;     // sum of powers
  float* unit;      // dq * scale * log2(e)
  int32_t* start;   // -128 * sum of the query's bytes, because keys have 128 added
  int32_t* chosen;  // queries that read the current tile
  QueryLane* query;
  float *key_scales, *value_scales;  // of the current tile
  int32_t* sums;                     // kByteQueries x the wider of 128 and dim
  float* lanes;                      // kByteQueries x 128: scores, then powers
  int16_t* weights;                  // kByteQueries x 128
  uint8_t *keys, *values;            // the current tile as bytes, if the cache has fewer bits
  uint8_t* rest;                     // remaining scratch, used by tile_attention.h
  int64_t sum_stride;

  ByteScratch(uint8_t* at, int64_t queries, int64_t dim) {
    auto take = [&](int64_t bytes) {
      uint8_t* const room = at;
      at += (bytes + 63) / 64 * 64;
      return room;
    };
    sum_stride = dim > kTilePositions ? dim : kTilePositions;
    o = reinterpret_cast<float*>(take(queries * dim * 4));
    query = reinterpret_cast<QueryLane*>(take(queries * dim * int64_t(sizeof(QueryLane))));
    top = reinterpret_cast<float*>(take(queries * 4));
    total = reinterpret_cast<float*>(take(queries * 4));
    unit = reinterpret_cast<float*>(take(queries * 4));
    start = reinterpret_cast<int32_t*>(take(queries * 4));
    chosen = reinterpret_cast<int32_t*>(take(queries * 4));
    key_scales = reinterpret_cast<float*>(take(kTilePositions * 4));
    value_scales = reinterpret_cast<float*>(take(kTilePositions * 4));
    sums = reinterpret_cast<int32_t*>(take(kByteQueries * sum_stride * 4));
    lanes = reinterpret_cast<float*>(take(kByteQueries * kTilePositions * 4));
    weights = reinterpret_cast<int16_t*>(take(kByteQueries * kTilePositions * 2));
    keys = take(kTilePositions * dim);
    values = take(kTilePositions * dim);
    rest = at;
  }
};

// One side of a tile: the keys or the values, packed or not.
struct TileSide {
  const uint8_t* data;
  int bits;
};

// Computes the sums of products of QUERIES rows of a with one side.
template <int QUERIES, class Lane>
inline void side_dots(const Lane* const* a, const TileSide& side, int64_t groups, int64_t used, int64_t width,
                      int64_t lanes, const int32_t* start, const ByteScratch& s, FetchAhead& ahead) {
  if (side.bits == 8)
    byte_dots<QUERIES, 8>(a, side.data, groups, used, width, lanes, start, s.sums, s.sum_stride, ahead);
  else if (side.bits == 4)
    byte_dots<QUERIES, 4>(a, side.data, groups, used, width, lanes, start, s.sums, s.sum_stride, ahead);
  else
    byte_dots<QUERIES, 3>(a, side.data, groups, used, width, lanes, start, s.sums, s.sum_stride, ahead);
}

inline void begin_query(const ByteAttentionTask& t, int64_t i, const ByteScratch& s) {
  float* const turned = s.o + i * t.dim;
  rotate_head(t.q[i], t.dim, turned);
  const float top = largest_magnitude(turned, t.dim);
  int8_t bytes[kMostByteDim];
  const bool usable = top >= 1e-30f;
  if (usable)
    round_to_bytes(turned, t.dim, 127.0f / top, bytes);
  else
    __builtin_memset(bytes, 0, size_t(t.dim));
  const float step = usable ? top / 127.0f : top == top ? 0.0f : top;
  s.unit[i] = step * t.scale * 1.44269504f;
  int32_t sum = 0;
  for (int64_t d = 0; d < t.dim; d++) sum += bytes[d];
  s.start[i] = -128 * sum;
  lay_query(bytes, t.dim, s.query + i * t.dim);
  s.top[i] = -1e30f;
  s.total[i] = 0.0f;
  for (int64_t d = 0; d < t.dim; d += 16) v_store(turned + d, v_zero());
}

// The float steps of QUERIES queries for one tile. Each phase processes all of them before the next phase begins, so
// that the horizontal reductions of one query, which are long chains, overlap with the work of the others.
template <int QUERIES>
struct TileSteps {
  const int32_t* chosen;
  int64_t counts[QUERIES];
  float correction[QUERIES], unit[QUERIES];
  int32_t start[QUERIES];

  static int64_t vectors(int64_t count) { return (count + 15) / 16; }
  // Replaces lanes beyond the last position of a query by `rest`.
  static V16 cut(V16 a, int64_t v, int64_t count, float rest) {
    return 16 * v + 16 <= count ? a : v_first_or(a, count - 16 * v, rest);
  }

  // Converts sums to scores, in place, and updates the largest score so far.
  void peaks(const ByteScratch& s, FetchAhead& ahead) {
    for (int i = 0; i < QUERIES; i++) {
      const V16 unit_of = v_set(s.unit[chosen[i]]);
      V16 peak = v_set(-1e30f);
      for (int64_t v = 0; v < vectors(counts[i]); v++) {
        ahead.pass(kPeakTime);
        const V16 sums = v_load_int(s.sums + i * s.sum_stride + 16 * v);
        const V16 score = cut(v_mul(sums, v_mul(v_load(s.key_scales + 16 * v), unit_of)), v, counts[i], -1e30f);
        v_store(s.lanes + i * kTilePositions + 16 * v, score);
        peak = v_max(peak, score);
      }
      const float tile_top = v_reduce_max(peak), before = s.top[chosen[i]];
      const float top = before > tile_top ? before : tile_top;
      correction[i] = 1.0f;
      if (!(before == top)) {
        float power[16];
        v_store(power, v_exp2(v_set(before - top)));
        correction[i] = power[0];
      }
      s.top[chosen[i]] = top;
    }
  }

  // Converts scores to powers times the scale of their value, in place, and adds up the powers.
  void powers(const ByteScratch& s, FetchAhead& ahead) {
    for (int i = 0; i < QUERIES; i++) {
      const V16 top = v_set(s.top[chosen[i]]);
      V16 sum = v_zero(), largest[1] = {v_zero()};
      for (int64_t v = 0; v < vectors(counts[i]); v++) {
        ahead.pass(kPowerTime);
        float* const lane = s.lanes + i * kTilePositions + 16 * v;
        const V16 p = v_exp2(v_sub(v_load(lane), top));
        const V16 w = cut(v_mul(p, v_load(s.value_scales + 16 * v)), v, counts[i], 0.0f);
        sum = v_add(sum, cut(p, v, counts[i], 0.0f));
        largest[0] = v_max_magnitude(largest[0], w);
        v_store(lane, w);
      }
      s.total[chosen[i]] = __builtin_fmaf(s.total[chosen[i]], correction[i], v_reduce_add(sum));
      const uint32_t bits = v_top_magnitude(largest);
      __builtin_memcpy(&unit[i], &bits, 4);  // NaN if a weight is NaN
    }
  }

  // Converts the scaled powers to weights of 15 bits.
  void weights(const ByteScratch& s, FetchAhead& ahead) {
    for (int i = 0; i < QUERIES; i++) {
      const float most = unit[i];
      const bool usable = most >= 1e-30f && most < __builtin_inff();
      const V16 inverse = v_set(usable ? 32767.0f / most : 0.0f);
      unit[i] = usable ? most / 32767.0f : most < 1e-30f ? 0.0f : __builtin_nanf("");
      V16 sum = v_zero();
      int16_t* const row = s.weights + i * kTilePositions;
      for (int64_t v = 0; v < vectors(counts[i]); v++) {
        ahead.pass(kWeightTime);
        const V16 w = v_load(s.lanes + i * kTilePositions + 16 * v);
        const V16 whole = usable ? v_round(v_mul(w, inverse)) : v_zero();
        if (!kSignedValues) sum = v_add(sum, whole);
        lay_weights(row + 16 * v, whole);
      }
      start[i] = kSignedValues ? 0 : -128 * int32_t(v_reduce_add(sum));
      const int64_t laid = 16 * vectors(counts[i]);
      if (laid < kTilePositions) __builtin_memset(row + laid, 0, size_t(kTilePositions - laid) * 2);
    }
  }
};

// Processes one tile for QUERIES of the chosen queries.
template <int QUERIES>
inline void byte_tile(const ByteAttentionTask& t, const TileSide& keys, const TileSide& values, const int32_t* chosen,
                      int64_t before, const ByteScratch& s, FetchAhead& ahead) {
  const QueryLane* query[QUERIES];
  const int16_t* weights[QUERIES];
  TileSteps<QUERIES> steps;
  steps.chosen = chosen;
  int64_t most = 0;
  for (int i = 0; i < QUERIES; i++) {
    query[i] = s.query + chosen[i] * t.dim;
    weights[i] = s.weights + i * kTilePositions;
    steps.start[i] = s.start[chosen[i]];
    const int64_t seen = t.limits[chosen[i]] - before;
    steps.counts[i] = seen < kTilePositions ? seen : kTilePositions;
    most = steps.counts[i] > most ? steps.counts[i] : most;
  }
  side_dots<QUERIES>(query, keys, t.dim / 4, t.dim / 4, kTilePositions, (most + 15) / 16 * 16, steps.start, s, ahead);
  steps.peaks(s, ahead);
  steps.powers(s, ahead);
  steps.weights(s, ahead);
  side_dots<QUERIES>(weights, values, kTilePositions / 4, (most + 3) / 4, t.dim, t.dim, steps.start, s, ahead);
  for (int i = 0; i < QUERIES; i++) {
    float* const o = s.o + chosen[i] * t.dim;
    const int32_t* const sums = s.sums + i * s.sum_stride;
    const V16 correction = v_set(steps.correction[i]), unit = v_set(steps.unit[i]);
    for (int64_t d = 0; d < t.dim; d += 16)
      v_store(o + d, v_fma(v_load_int(sums + d), unit, v_mul(v_load(o + d), correction)));
  }
}

// Unpacks one side once for all queries that read it.
inline void unpack_side(TileSide& side, int64_t groups, int64_t width, uint8_t* out) {
  if (side.bits == 8) return;
  if (side.bits == 4)
    unpack_groups<4>(side.data, groups, width, out);
  else
    unpack_groups<3>(side.data, groups, width, out);
  side.data = out;
  side.bits = 8;
}

inline void load_scales(const ByteAttentionTask& t, CacheFormat format, const uint8_t* data, const ByteScratch& s) {
  const half* const scale = reinterpret_cast<const half*>(data + scales_at(format, t.dim));
  for (int64_t j = 0; j < kTilePositions; j += 16) {
    v_store(s.key_scales + j, v_load_half(scale + j));
    v_store(s.value_scales + j, v_load_half(scale + kTilePositions + j));
  }
}

// Processes one tile in `format` for the chosen queries, and prefetches the next tile.
inline void read_tile(const ByteAttentionTask& t, CacheFormat format, const uint8_t* data, const uint8_t* next,
                      int64_t before, int64_t readers, const ByteScratch& s) {
  const int64_t values_at = key_bytes(format, t.dim);
  load_scales(t, format, data, s);
  TileSide keys{data, key_bits(format)}, values{data + values_at, value_bits(format)};
  FetchAhead ahead = next == nullptr ? FetchAhead() : FetchAhead(next, head_bytes(format, t.dim));
  const int64_t groups = (t.dim / 4 * kTilePositions) / kBlockLanes,
                rounds = (readers + kByteQueries - 1) / kByteQueries;
  ahead.spread_over(rounds * groups * (kScoreGroupTime + kValueGroupTime) +
                    readers * kTilePositions / 16 * (kPeakTime + kPowerTime + kWeightTime));
  if (readers > kByteQueries) {
    unpack_side(keys, t.dim / 4, kTilePositions, s.keys);
    unpack_side(values, kTilePositions / 4, t.dim, s.values);
  }
  for (int64_t i = 0; i < readers; i += kByteQueries) {
    const int32_t* const chosen = s.chosen + i;
    switch (readers - i) {
      case 1:
        byte_tile<1>(t, keys, values, chosen, before, s, ahead);
        break;
      case 2:
        byte_tile<2>(t, keys, values, chosen, before, s, ahead);
        break;
      case 3:
        byte_tile<3>(t, keys, values, chosen, before, s, ahead);
        break;
      default:
        byte_tile<kByteQueries>(t, keys, values, chosen, before, s, ahead);
    }
  }
}

// Executes a task. `read`, with the arguments of read_tile, processes each tile of the cache.
template <class Read>
inline void attend_bytes(const ByteAttentionTask& t, Read read) {
  const ByteScratch s(t.scratch, t.queries, t.dim);
  const bool small = t.format > CacheFormat::k8v8;
  int64_t longest = 0;
  for (int64_t i = 0; i < t.queries; i++) {
    begin_query(t, i, s);
    longest = t.limits[i] > longest ? t.limits[i] : longest;
  }
  const int64_t tiles = (longest + kTilePositions - 1) / kTilePositions;
  for (int64_t number = 0; number < tiles; number++) {
    const int64_t before = number * kTilePositions;
    for (int source = 0; source < 2; source++) {
      const bool window = source == 0;
      int64_t readers = 0;
      for (int64_t i = 0; i < t.queries; i++) {
        const bool is_last = t.limits[i] - before <= kTilePositions;
        if (t.limits[i] > before && (small && (number == 0 || is_last)) == window) s.chosen[readers++] = int32_t(i);
      }
      if (readers == 0) continue;
      if (window) {
        read(t, CacheFormat::k8v8, t.window[number], nullptr, before, readers, s);
      } else {
        const bool more = number + 1 < (small ? tiles - 1 : tiles);
        read(t, t.format, t.tiles[number], more ? t.tiles[number + 1] : nullptr, before, readers, s);
      }
    }
  }
  float turned[kMostByteDim];
  for (int64_t i = 0; i < t.queries; i++) {
    const V16 divisor = v_set(s.total[i]);
    for (int64_t d = 0; d < t.dim; d += 16) v_store(turned + d, v_div(v_load(s.o + i * t.dim + d), divisor));
    rotate_head(turned, t.dim, t.out[i]);
  }
}

}  // namespace
}  // namespace qtensor
